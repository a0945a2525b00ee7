"""Runs jobs: starts processes, watches their memory, and makes records of what came out."""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from measure import Case, Timing, batch_figures, read_requests, single_figures
from plan import Job

HERE = Path(__file__).resolve().parent
# Engine -> its environment and script.
SCRIPTS = {
    "vllm": ("venv-vllm", "run_vllm.py"),
    "openvino": ("venv-openvino", "run_openvino.py"),
    "llama.cpp": ("venv-tools", "run_llamacpp.py"),
    "transformers": ("venv-transformers", "run_transformers.py"),
}
SAMPLE_S = 0.1
GRACE_S = 10


class JobError(Exception):
    """A process that could not be run, or did not do what it should."""


@dataclass(frozen=True)
class Settings:
    """What is the same for all jobs of a run."""

    work: Path
    quire: Path
    threads: int
    repeats: int
    timeout_s: float
    quire_flags: tuple[str, ...] = ()

    @property
    def requests(self) -> Path:
        return self.work / "requests"


# ---------------------------------------------------------------- processes


def process_tree(root: int) -> list[int]:
    """`root` and all that descends from it."""
    tree = [root]
    for pid in tree:
        for path in glob.glob(f"/proc/{pid}/task/*/children"):
            try:
                tree += map(int, Path(path).read_text().split())
            except OSError:
                pass  # it ended
    return tree


def resident_bytes(pids: list[int]) -> int:
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            pass
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def watched(process: subprocess.Popen, timeout_s: float):
    """Samples the memory of a process and ends it after `timeout_s`; yields what was seen."""
    seen = {"peak_rss": 0, "timed_out": False}
    over = threading.Event()

    def watch() -> None:
        deadline = time.monotonic() + timeout_s
        while not over.wait(SAMPLE_S):
            seen["peak_rss"] = max(seen["peak_rss"], resident_bytes(process_tree(process.pid)))
            if time.monotonic() > deadline:
                seen["timed_out"] = True
                stop(process)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()


def stop(process: subprocess.Popen) -> None:
    """Ends the processes of the group that `process` leads or led: politely, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


@dataclass(frozen=True)
class Ended:
    """A process that ended well."""

    stdout: str
    seconds: float
    peak_rss: int


def run_process(command: list, env: dict, log: Path, timeout_s: float) -> Ended:
    """Runs a command to its end. Standard error goes to `log`, behind what is there."""
    command = [str(part) for part in command]
    output = log.with_suffix(".out")
    with open(log, "a", encoding="utf-8") as errors, open(output, "w", encoding="utf-8") as out:
        errors.write(f"$ {' '.join(command)}\n")
        errors.flush()
        start = time.monotonic()
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out,
                                       stderr=errors, start_new_session=True, env=env)
        except OSError as error:
            raise JobError(f"cannot run {command[0]}: {error.strerror}") from error
        with watched(process, timeout_s) as seen:
            try:
                code = process.wait()
                seconds = time.monotonic() - start
            finally:  # after Ctrl-C, and what it left behind: a driver's server, say
                stop(process)
    if seen["timed_out"]:
        raise JobError(f"not done after {timeout_s:.0f} s")
    if code != 0:
        raise JobError(f"ended with {code}: {last_line(log)}")
    return Ended(output.read_text(encoding="utf-8"), seconds, seen["peak_rss"])


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no message")


# ---------------------------------------------------------------- the machine


def other_share(before: tuple, after: tuple, seconds: float) -> float:
    """Share of the cores that processes other than ours took between two `cpu_times()`."""
    busy, ours = (new - old for new, old in zip(after, before))
    return max(0.0, busy - ours) / (seconds * (os.cpu_count() or 1))


def cpu_times() -> tuple[float, float]:
    """Seconds that all cores were busy or stolen, and those spent by us and by what we ran."""
    with open("/proc/stat", encoding="utf-8") as stat:
        ticks = [int(field) for field in stat.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]
    busy = (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")
    times = os.times()
    return busy, times.user + times.system + times.children_user + times.children_system


# ---------------------------------------------------------------- jobs


def run_job(settings: Settings, job: Job, log: Path) -> list[dict]:
    """The records of a job: one for each of its cases, then one for the job itself."""
    log.unlink(missing_ok=True)
    load_average, before, start = os.getloadavg()[0], cpu_times(), time.monotonic()
    run = run_quire if job.engine == "quire" else run_script
    found, whole = {}, {}
    try:
        run(settings, job, log, found, whole)
    except JobError as error:
        whole["error"] = str(error)
    seconds = time.monotonic() - start
    whole.update(seconds=seconds, load_average=load_average,
                 other_share=other_share(before, cpu_times(), seconds))
    missing = {"error": whole.get("error", "no result")}
    cases = [{"kind": "case", "case": case.label, **found.get(case.label, missing)}
             for case in job.cases]
    return [*cases, {"kind": "job", **whole}]


def run_quire(settings: Settings, job: Job, log: Path, found: dict, whole: dict) -> None:
    """Quire: a process for each file of requests. `found` gets the figures of each case, `whole`
    those of the job."""
    flags = ["--device", "cpu", "--threads", settings.threads, *job.flags, *settings.quire_flags]
    model = settings.work / "models" / job.model
    peak_rss = 0

    def quire(*arguments, counts: bool = True) -> Ended:
        nonlocal peak_rss
        ended = run_process([settings.quire, *arguments, *flags], dict(os.environ), log,
                            settings.timeout_s)
        if counts:
            peak_rss = max(peak_rss, ended.peak_rss)
            whole["peak_rss"] = peak_rss
        return ended

    whole["version"] = quire_version(settings.quire)
    warm = settings.requests / "warm.0.jsonl"
    whole["first_token_s"] = quire("generate", model, "--input", warm, "--quiet").seconds
    for case in job.cases:
        try:
            found[case.label] = quire_case(settings, case, model, quire)
        except (JobError, ValueError) as error:
            found[case.label] = {"error": str(error)}


def quire_case(settings: Settings, case: Case, model: Path, quire) -> dict:
    """What a record of the case says: `figures`, and `ceiling`, the percentages of the machine's
    ceilings that the binary reports. Those come from a run of their own, as measuring them takes
    memory that is not the engine's."""
    files = [settings.requests / name for name in case.files(settings.repeats)]

    def bench(file: Path, *arguments, counts: bool = True) -> dict:
        ended = quire("bench", "throughput", model, "--input", file, "--max-num-seqs", case.cap,
                      "--json", "--no-prediction", "--quiet", *arguments, counts=counts)
        return json.loads(ended.stdout)["runs"][0]

    runs = [bench(file, "--no-ceiling") for file in files]
    requests = [request for file in files for request in read_requests(file)]
    if case.is_batch:
        figures = quire_batch_figures(requests, runs[0])
    else:
        figures = single_figures(requests, [quire_timing(run) for run in runs])
    try:
        ceiling = percents(bench(files[0], counts=False))
    except JobError:  # no room to measure them, say: the log has it
        ceiling = {}
    return {"figures": figures, "ceiling": ceiling}


def percents(run: dict) -> dict:
    """Bound (`reading`, `multiplying`) -> the percent of it that a run came to."""
    shares = run.get("ceiling") or {}
    return {bound: share["percent"] for bound, share in shares.items() if share}


def quire_batch_figures(requests: list[dict], run: dict) -> dict:
    """The figures of a run of requests that were all there at once."""
    wanted = sum(request["max_tokens"] for request in requests)
    if run["total_output_tokens"] != wanted:
        raise ValueError(f"{run['total_output_tokens']} tokens instead of {wanted}")
    return batch_figures(requests, run["duration"])


def quire_timing(run: dict) -> Timing:
    """The times of a run of one request."""
    num_tokens, first_ms = run["total_output_tokens"], run.get("mean_ttft_ms")
    token_ms = run.get("mean_tpot_ms") if num_tokens > 1 else 0.0
    if first_ms is None or token_ms is None:
        raise ValueError(f"the request failed: {num_tokens} tokens, no times of them")
    first_s = first_ms / 1e3
    return Timing(first_s, first_s + token_ms / 1e3 * (num_tokens - 1), num_tokens)


def quire_version(quire: Path) -> str:
    try:
        shown = subprocess.run([quire, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise JobError(f"cannot run {quire}: {error}") from error
    return shown.stdout.split()[-1]


def run_script(settings: Settings, job: Job, log: Path, found: dict, whole: dict) -> None:
    """A peer: one process of its script, which runs all cases. See `run_quire`."""
    environment, script = SCRIPTS[job.engine]
    python = settings.work / environment / "bin" / "python"
    model = settings.work / "models" / job.model
    for path in (python, model):
        if not path.exists():
            raise JobError(f"{path} is not there; run make compare-setup")
    out = log.with_suffix(".jsonl")
    out.unlink(missing_ok=True)
    command = [python, HERE / "engines" / script, "--model", model, "--out", out,
               "--requests", settings.requests, "--repeats", settings.repeats,
               "--threads", settings.threads, "--started", time.time(),
               "--cases", ",".join(case.label for case in job.cases), *job.flags]
    if job.engine == "llama.cpp":
        command += ["--server", llama_server(settings.work)]
    try:
        whole["peak_rss"] = run_process(command, script_env(settings, job), log,
                                        settings.timeout_s).peak_rss
    finally:
        for record in read_lines(out):
            if "case" in record:
                found[record.pop("case")] = record
            else:
                whole.update(record)


def llama_server(work: Path) -> Path:
    built = sorted(work.glob("llama.cpp-*/llama-server"))
    if not built:
        raise JobError(f"no llama-server under {work}; run make compare-setup")
    return built[-1]


def script_env(settings: Settings, job: Job) -> dict:
    """The environment of an engine: no network, our threads, and what its manual advises."""
    env = dict(os.environ, HF_HUB_OFFLINE="1", DO_NOT_TRACK="1", TOKENIZERS_PARALLELISM="false",
               OMP_NUM_THREADS=str(settings.threads))
    if job.engine == "vllm":
        preloads = glob.glob("/usr/lib/*/libtcmalloc_minimal.so.4")
        preloads += glob.glob(str(settings.work / "venv-vllm/lib/libiomp5.so"))
        env.update(LD_PRELOAD=":".join(preloads), VLLM_CACHE_ROOT=str(settings.work / "vllm-cache"))
    return env


def read_lines(path: Path) -> list[dict]:
    """Lines of JSON; one that was cut off when its writer ended is left out."""
    records = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return records
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            pass
    return records
