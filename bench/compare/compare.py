#!/usr/bin/env python3
"""Runs Quire and other engines on the same requests, in turns, and compares them.

    compare.py                      SmolLM2-135M, every engine, three rounds
    compare.py --model 1b           the shape of Llama 3.2 1B
    compare.py --quick              one round, the short cases
    compare.py --report FILE.jsonl  tables and picture of a run that is done

Every round starts each engine once, in a process of its own. Records are lines of JSON in the file
of `--out`; behind the last of them tables (.md) and a picture (.svg) are written beside it. A run
that broke off goes on with `--resume`, which also tries again what failed. The exit code is 0 if
all went well, 1 if an engine failed, 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import plan
import report
from measure import FIGURES, SINGLE_REPEATS
from runner import HERE, JobError, Settings, quire_version, read_lines, run_job

ROOT = HERE.parent.parent
# Settings that must be the same when a run goes on.
SAME = ("model", "threads", "repeats", "quire_version", "quire_flags", "machine")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="Engines: " + ", ".join(plan.ENGINES) + ". Workloads: " + ", ".join(FIGURES)
        + ", and such as C@16 for C with at most 16 requests at once.")
    parser.add_argument("--model", choices=list(plan.GROUPS), default="135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default="", metavar="A,B", help="only these [all]")
    parser.add_argument("--groups", default="", metavar="A,B",
                        help="only these, such as bf16,q4_1 [all]")
    parser.add_argument("--workloads", default="", metavar="A,B", help="only these [all]")
    parser.add_argument("--quick", action="store_true",
                        help="one round, no repeats, and only " + ", ".join(plan.QUICK))
    parser.add_argument("--all", action="store_true",
                        help="also what takes a peer very long")
    parser.add_argument("--repeats", type=int, default=3,
                        help=f"prompts of A and B in a round, at most {SINGLE_REPEATS} [3]")
    parser.add_argument("--threads", type=int, default=usable_cores(),
                        help="[the cores this process may use]")
    parser.add_argument("--quire", type=Path, default=ROOT / "target/release/quire",
                        help="the binary")
    parser.add_argument("--quire-flag", action="append", default=[], metavar="FLAG",
                        help="a flag for Quire besides, such as --quire-flag=--isa=avx2")
    parser.add_argument("--work", type=Path, default=HERE / "work", help="the folder of setup.sh")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of a process [1800]")
    parser.add_argument("--out", type=Path, help="[WORK/results/compare-MODEL-DATE.jsonl]")
    parser.add_argument("--resume", action="store_true", help="go on with the file of --out")
    parser.add_argument("--list", action="store_true", help="show what would run, and end")
    parser.add_argument("--report", type=Path, metavar="FILE", help="only make the tables of FILE")
    return checked(parser, parser.parse_args())


def refuse(message: str) -> NoReturn:
    """Ends before anything has run."""
    say(f"compare: {message}")
    sys.exit(2)


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def checked(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """Refuses names that mean nothing; fills in what others decide."""
    if args.quick:
        args.rounds = args.repeats = 1
    engines, groups, workloads = map(names, (args.engines, args.groups, args.workloads))
    known_groups = [group.name for group in plan.GROUPS[args.model]]
    planned = plan.jobs(args.model, plan.Choice(everything=True))
    cases = {case for job in planned for case in job.cases}
    known = ((engines, plan.ENGINES, "engine"), (groups, known_groups, "group"),
             (workloads, sorted({c.label for c in cases} | {c.workload for c in cases}),
              f"workload of model {args.model}"))
    for given, allowed, what in known:
        for name in given:
            if name not in allowed:
                parser.error(f"no {what} {name!r}; there are {', '.join(allowed)}")
    for value, most, flag in ((args.rounds, 1000, "--rounds"),
                              (args.repeats, SINGLE_REPEATS, "--repeats"),
                              (args.threads, os.cpu_count() or 1, "--threads")):
        if not 1 <= value <= most:
            parser.error(f"{flag} is {value}; it must be 1 to {most}")
    if args.quick and not workloads:
        workloads = plan.QUICK
    args.choice = plan.Choice(engines or plan.ENGINES, groups, workloads, args.all)
    today = datetime.date.today().isoformat()
    args.out = args.out or args.work / "results" / f"compare-{args.model}-{today}.jsonl"
    args.quire = args.quire.resolve()
    args.work = args.work.resolve()
    return args


# ---------------------------------------------------------------- the machine


def usable_cores(groups: Path = Path("/proc/self/cgroup"),
                 root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: those it may run on, or as many as the time that its
    control groups grant comes to."""
    cores = len(os.sched_getaffinity(0))
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 1 has a tree for each controller and two files, version 2 one file for both.
        tree, files = ((root / "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")) if controllers
                       else (root, ("cpu.max",)))
        for group in (Path(name), *Path(name).parents):
            paths = [tree / group.relative_to("/") / file for file in files]
            if not all(path.exists() for path in paths):
                continue  # a container does not see the groups it is in by the host's names
            quota, period = " ".join(path.read_text() for path in paths).split()
            if quota not in ("max", "-1"):
                cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def machine() -> dict:
    """The class of this machine."""
    info = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    flags = info.get("flags", info.get("Features", "")).split()
    isa = [name for name in ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "asimd")
           if name in flags]
    family = f" family {info['cpu family']} model {info['model']}" if "cpu family" in info else ""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"cpu": info.get("model name", platform.machine()) + family, "isa": " ".join(isa[:3]),
            "cores": os.cpu_count(), "memory_gb": round(memory / 1e9),
            "system": f"{platform.system()} {platform.release().split('-')[0]}"}


def ceiling(quire: Path, threads: int) -> dict | None:
    """What `quire bench ceiling` measures with all threads; None of a binary without it."""
    shown = subprocess.run([quire, "bench", "ceiling", "--threads", str(threads), "--json"],
                           capture_output=True, text=True, check=False)
    if shown.returncode != 0:
        return None
    return json.loads(shown.stdout)["runs"][-1]


# ---------------------------------------------------------------- the run


def first_record(args: argparse.Namespace) -> dict:
    return {
        "kind": "run", "model": args.model, "threads": args.threads, "repeats": args.repeats,
        "date": datetime.date.today().isoformat(), "machine": machine(),
        "quire_version": quire_version(args.quire), "quire_flags": args.quire_flag,
    }


def open_records(args: argparse.Namespace) -> list[dict]:
    """The records of the file of --out, which has its first one from now on."""
    first = first_record(args)
    if args.out.exists():
        if not args.resume:
            refuse(f"{args.out} is there already; give --resume, or another --out")
        records = read_lines(args.out)
        runs = [record for record in records if record["kind"] == "run"]
        for key in SAME if runs else ():
            if runs[0].get(key) != first[key]:
                refuse(f"{args.out} was made with {key} {runs[0].get(key)}, this is {first[key]};"
                       " give another --out")
        if runs:
            return records
    first["ceiling"] = ceiling(args.quire, args.threads)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    append(args.out, [first])
    return [first]


def append(path: Path, records: list[dict]) -> None:
    """Adds records, on lines of their own even behind one that was cut off."""
    lead = ""
    if path.exists() and path.stat().st_size > 0:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            lead = "" if file.read() == b"\n" else "\n"
    with open(path, "a", encoding="utf-8") as file:
        file.write(lead + "".join(json.dumps(record) + "\n" for record in records))


def run_rounds(args: argparse.Namespace, records: list[dict]) -> None:
    """Runs what is not done yet; `records` and the file get the results of each job at once."""
    settings = Settings(args.work, args.quire, args.threads, args.repeats, args.timeout,
                        tuple(args.quire_flag))
    logs = args.out.parent / f"{args.out.stem}-logs"
    logs.mkdir(exist_ok=True)
    round_jobs = plan.jobs(args.model, args.choice)
    todo = [(number, job) for number in range(1, args.rounds + 1)
            for job in plan.rotated(round_jobs, number)
            if not report.is_done(records, number, job.name, [c.label for c in job.cases])]
    for index, (number, job) in enumerate(todo, 1):
        labels = " ".join(case.label for case in job.cases)
        say(f"[{index}/{len(todo)}] round {number}, {job.name}: {labels} …")
        log = logs / f"{number}-{job.name.replace('/', '-')}.log"
        place = {"round": number, "job": job.name, "group": job.group, "engine": job.engine,
                 "weights": job.weights}
        made = [{**record, **place} for record in run_job(settings, job, log)]
        records += made
        append(args.out, made)
        failed = [r.get("case", "the process") for r in made if "error" in r]
        failure = f"; FAILED: {', '.join(failed)}, see {log}" if failed else ""
        say(f"    {made[-1]['seconds']:.0f} s{failure}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write_report(records: list[dict], path: Path) -> int:
    """Writes tables and picture beside `path`; the exit code."""
    results = report.collect(records)
    tables = report.markdown(results)
    path.with_suffix(".md").write_text(tables, encoding="utf-8")
    path.with_suffix(".svg").write_text(report.picture(results), encoding="utf-8")
    print(tables, end="")
    say(f"written: {path.with_suffix('.md')}, {path.with_suffix('.svg')}; records: {path}")
    return 1 if results.errors else 0


def main() -> int:
    args = parse_args()
    if args.report:
        records = read_lines(args.report)
        if not any(record["kind"] == "run" for record in records):
            refuse(f"{args.report} has no records of a run")
        return write_report(records, args.report)
    if args.list:
        for job in plan.jobs(args.model, args.choice):
            print(f"{job.name:24} {job.model:36} {' '.join(case.label for case in job.cases)}")
        return 0
    if not shutil.which(str(args.quire)):
        refuse(f"no binary {args.quire}; build it, or give --quire")
    try:
        records = open_records(args)
    except JobError as error:
        refuse(str(error))
    # Ended from outside is like Ctrl-C: the engine that runs must end, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_rounds(args, records)
    except KeyboardInterrupt:
        say(f"\ninterrupted; what is done is in {args.out}: go on with --resume")
        return 130
    return write_report(records, args.out)


if __name__ == "__main__":
    sys.exit(main())
