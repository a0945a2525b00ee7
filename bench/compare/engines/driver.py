"""Drives one engine in its own environment: command line, warm-up, cases, one line of JSON each.

A script defines a class with

    name, version                 what the table says
    load()                        builds the engine
    run(requests, cap) -> list of Timing, in the order of the requests; at most `cap` run at once
    close()

and calls `main(Class)`. It is started by compare.py, which says when in `--started`. The lines go
to `--out`, as an engine writes what it likes to standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from measure import (  # noqa: E402  (the path must be set first)
    Case,
    Timing,
    batch_figures,
    check_lengths,
    read_requests,
    single_figures,
)

__all__ = ["Timing", "main"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="whatever the engine loads")
    parser.add_argument("--requests", type=Path, required=True, help="folder of requests")
    parser.add_argument("--cases", required=True, help="comma list, such as A,C@16")
    parser.add_argument("--repeats", type=int, required=True, help="of cases of single requests")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--started", type=float, required=True, help="time of the start, Unix")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--server", help="binary of a server")
    args = parser.parse_args()
    args.cases = [Case.parse(label) for label in args.cases.split(",")]
    args.max_seqs = max(case.cap for case in args.cases)
    return args


def run_case(engine, case: Case, args: argparse.Namespace) -> dict:
    """The figures of a case."""
    files = [read_requests(args.requests / name) for name in case.files(args.repeats)]
    if case.is_batch:
        requests = files[0]
        begin = time.perf_counter()
        timings = engine.run(requests, case.cap)
        wall_s = time.perf_counter() - begin
        check_lengths(requests, timings)
        return batch_figures(requests, wall_s)
    requests = [file[0] for file in files]
    return single_figures(requests, [engine.run([request], 1)[0] for request in requests])


def main(engine_class) -> None:
    args = parse_args()
    engine = engine_class(args)
    with open(args.out, "w", encoding="utf-8") as out:
        def write(record: dict) -> None:
            out.write(json.dumps(record) + "\n")
            out.flush()

        engine.load()
        try:
            # One token, then some, of prompts that no case has.
            engine.run(read_requests(args.requests / "warm.0.jsonl"), 1)
            write({"version": engine.version, "first_token_s": time.time() - args.started})
            engine.run(read_requests(args.requests / "warm.1.jsonl"), 1)
            for case in args.cases:
                try:
                    write({"case": case.label, "figures": run_case(engine, case, args)})
                except Exception as error:  # the other cases may do
                    traceback.print_exc()
                    write({"case": case.label, "error": f"{type(error).__name__}: {error}"[:300]})
        finally:
            engine.close()
