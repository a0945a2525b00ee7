"""OpenVINO GenAI's ContinuousBatchingPipeline on the CPU: paged KV cache, prefix caching.

Its `max_num_seqs` was seen not to limit anything, so the limit is kept here.
"""

from __future__ import annotations

import time
from importlib.metadata import version

from driver import Timing, main

KV_CACHE_GIB = 4
# Tokens of a step. The default, 256, cuts prompts into pieces, which is slower; this takes every
# prompt whole.
MAX_BATCHED_TOKENS = 8192


class OpenVino:
    name = "OpenVINO GenAI"

    def __init__(self, args):
        self.args = args
        self.version = version("openvino-genai")
        self.num_requests = 0

    def load(self):
        import numpy
        import openvino
        import openvino_genai

        self.numpy, self.openvino, self.genai = numpy, openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = KV_CACHE_GIB
        scheduler.max_num_seqs = self.args.max_seqs
        scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        properties = {"INFERENCE_NUM_THREADS": self.args.threads, "NUM_STREAMS": 1}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            self.args.model, scheduler, "CPU", properties)

    def add(self, request):
        config = self.genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = request["max_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        self.num_requests += 1
        ids = self.numpy.array([request["prompt_token_ids"]], dtype=self.numpy.int64)
        return self.pipeline.add_request(self.num_requests, self.openvino.Tensor(ids), config)

    def run(self, requests, cap):
        begin = time.perf_counter()
        waiting, running = list(enumerate(requests)), {}
        first, last, num_tokens = {}, {}, {}
        while waiting or running:
            while waiting and len(running) < cap:
                index, request = waiting.pop(0)
                running[index] = self.add(request)
            if self.pipeline.has_non_finished_requests():
                self.pipeline.step()
            now = time.perf_counter() - begin
            for index, handle in list(running.items()):
                while handle.can_read():
                    count = sum(len(o.generated_ids) for o in handle.read().values())
                    if count:
                        first.setdefault(index, now)
                        last[index] = now
                        num_tokens[index] = num_tokens.get(index, 0) + count
                if handle.get_status() != self.genai.GenerationStatus.RUNNING:
                    del running[index]
        return [Timing(first[i], last[i], num_tokens[i]) for i in range(len(requests))]

    def close(self):
        pass


if __name__ == "__main__":
    main(OpenVino)
