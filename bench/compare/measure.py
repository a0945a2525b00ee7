"""Cases, the requests they are made of, and the figures that follow from times.

A case is a workload and how many requests may run at once: `A`, `B1024`, `C@16`. This module is
shared by the comparison and by the scripts that drive the engines, each in an environment of its
own, so it needs the standard library alone.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

# Workload -> (key, title, unit, whether less is better) of the figures that a table shows.
FIGURES = {
    "A": [
        ("decode_tok_s", "decode, 1 request", "tok/s", False),
        ("ttft_ms", "first token, prompt of 128", "ms", True),
    ],
    "B1024": [("prefill_tok_s", "prefill 1024", "tok/s", False)],
    "B4096": [("prefill_tok_s", "prefill 4096", "tok/s", False)],
    "C": [("out_tok_s", "C: 64 mixed requests", "tok/s", False)],
    "C16": [("out_tok_s", "C16: 16 mixed requests", "tok/s", False)],
    "D": [("out_tok_s", "D: 32 requests, shared prefix", "tok/s", False)],
}
BATCHES = ("C", "C16", "D")
# Files of a workload of single requests: the most repeats.
SINGLE_REPEATS = 5
# Files of a batch workload: other prompts of the same lengths, for engines that run it twice.
NUM_VARIANTS = 2


@dataclass(frozen=True)
class Case:
    """A workload with at most `cap` requests at once."""

    workload: str
    cap: int = 1

    @classmethod
    def parse(cls, label: str) -> Case:
        """`C@16`; a workload of single requests has no cap."""
        workload, _, cap = label.partition("@")
        if workload not in FIGURES:
            raise ValueError(f"no workload {workload!r}; there are {', '.join(FIGURES)}")
        if (workload in BATCHES) != cap.isdigit():
            raise ValueError(f"{label!r} is no case; cases are such as A, B1024 and C@16")
        return cls(workload, int(cap or 1))

    @property
    def label(self) -> str:
        return f"{self.workload}@{self.cap}" if self.is_batch else self.workload

    @property
    def is_batch(self) -> bool:
        return self.workload in BATCHES

    def files(self, repeats: int) -> list[str]:
        """Names of the files of requests, one for each repeat. No prompt comes twice in the life
        of an engine, or its prefix cache would answer."""
        if self.is_batch:
            return [f"{self.workload}.{0 if self.cap <= 16 else 1}.jsonl"]
        return [f"{self.workload}.{repeat}.jsonl" for repeat in range(repeats)]


@dataclass(frozen=True)
class Timing:
    """Seconds from the start of a run to the first and to the last token of a request."""

    first_s: float
    last_s: float
    num_tokens: int


def read_requests(path: Path) -> list[dict]:
    """Requests of a file: `id`, `prompt_token_ids`, `max_tokens`, `ignore_eos`, `temperature`."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def check_lengths(requests: list[dict], timings: list[Timing]) -> None:
    """Outputs have exact lengths; an engine that stops early or goes on is no comparison."""
    for request, timing in zip(requests, timings):
        if timing.num_tokens != request["max_tokens"]:
            raise ValueError(f"{request['id']} got {timing.num_tokens} tokens instead of "
                             f"{request['max_tokens']}")
    if len(requests) != len(timings):
        raise ValueError(f"{len(timings)} answers to {len(requests)} requests")


def single_figures(requests: list[dict], timings: list[Timing]) -> dict:
    """Figures of requests that ran one at a time: the medians."""
    check_lengths(requests, timings)
    first_s = statistics.median(timing.first_s for timing in timings)
    prompt_len = len(requests[0]["prompt_token_ids"])
    figures = {"ttft_ms": first_s * 1e3}
    if requests[0]["max_tokens"] > 1:
        token_s = statistics.median((timing.last_s - timing.first_s) / (timing.num_tokens - 1)
                                    for timing in timings)
        figures["decode_tok_s"] = 1 / token_s
    else:
        figures["prefill_tok_s"] = prompt_len / first_s
    return figures


def batch_figures(requests: list[dict], wall_s: float) -> dict:
    """Figures of requests that were all there at once."""
    return {"wall_s": wall_s, "out_tok_s": sum(r["max_tokens"] for r in requests) / wall_s}
