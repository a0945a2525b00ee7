"""Hugging Face transformers on torch: the baseline of static batches.

Batches of `cap` requests in the given order, padded on the left; each runs until its longest
request is done. Only the tokens that were asked for count.
"""

from __future__ import annotations

import time
from importlib.metadata import version

from driver import Timing, main

PAD = 2


class Times:
    """A streamer that keeps the time of each token."""

    def __init__(self):
        self.times = []

    def put(self, _):
        self.times.append(time.perf_counter())

    def end(self):
        pass


class Transformers:
    name = "transformers"

    def __init__(self, args):
        self.args = args
        self.version = f"{version('transformers')}, torch {version('torch')}"

    def load(self):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        torch.set_num_threads(self.args.threads)
        self.model = AutoModelForCausalLM.from_pretrained(
            self.args.model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    def run(self, requests, cap):
        begin = time.perf_counter()
        timings = []
        for start in range(0, len(requests), cap):
            batch = requests[start:start + cap]
            # A streamer takes batches of one alone.
            streamer = Times() if len(batch) == 1 else None
            num_tokens = self.generate(batch, streamer)
            done = time.perf_counter()
            # The first time is that of the prompt.
            first = streamer.times[1] if streamer else done
            last = streamer.times[-1] if streamer else done
            timings += [Timing(first - begin, last - begin, min(r["max_tokens"], num_tokens))
                        for r in batch]
        return timings

    def generate(self, batch, streamer):
        """Continues a padded batch; returns how many tokens each row got."""
        torch = self.torch
        prompts = [request["prompt_token_ids"] for request in batch]
        width, num_tokens = max(map(len, prompts)), max(r["max_tokens"] for r in batch)
        ids = torch.full((len(batch), width), PAD)
        mask = torch.zeros((len(batch), width), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt):] = torch.tensor(prompt)
            mask[row, width - len(prompt):] = 1
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens,
                min_new_tokens=num_tokens, pad_token_id=PAD, streamer=streamer)
        return output.shape[1] - width

    def close(self):
        pass


if __name__ == "__main__":
    main(Transformers)
