"""What is compared: engines, the models they load, and the cases each of them runs.

A job is one process of one engine in one round. Engines that take requests as they come run all
their cases in one process; llama-server is started anew for each number of slots, since they share
its context.
"""

from __future__ import annotations

from dataclasses import dataclass

from measure import Case

ENGINES = ("quire", "vllm", "openvino", "llama.cpp", "transformers")

SMOLLM2 = "SmolLM2-135M-Instruct"
LLAMA_1B = "llama3.2-1b-shape"


@dataclass(frozen=True)
class Job:
    """One process of an engine.

    `group` names what is compared with what; `model` is a name in the folder of models; `weights`
    is what they are; `flags` go to Quire or to the engine's script.
    """

    group: str
    engine: str
    model: str
    weights: str
    cases: tuple[Case, ...]
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        slots = f"@{self.cases[0].cap}" if self.engine == "llama.cpp" else ""
        return f"{self.group}/{self.engine}{slots}"


@dataclass(frozen=True)
class Entry:
    """An engine in a group. The cases in `slow` are left out unless everything is asked for."""

    engine: str
    model: str
    weights: str
    flags: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Engines that do the same with the same weights, as far as they can."""

    name: str
    cases: tuple[str, ...]
    entries: tuple[Entry, ...]


def gguf_group(kind: str, file: str, slow: tuple[str, ...]) -> Group:
    """Quire and llama.cpp on the same quantised file."""
    return Group(kind.lower(), ("A", "B1024", "C@16"), (
        Entry("quire", file, kind),
        Entry("llama.cpp", file, kind, slow=slow),
    ))


def int8_group(model: str, cases: tuple[str, ...]) -> Group:
    return Group("int8", cases, (
        Entry("quire", model, "int8", ("--quantization", "int8")),
        Entry("openvino", f"{model}-ov-int8", "int8 (IR)"),
    ))


CASES_135M = ("A", "B1024", "B4096", "C@16", "C@64", "D@16", "D@64")
CASES_1B = ("A", "B1024", "C16@16")
BF16 = ("--quantization", "none")

GROUPS = {
    "135m": (
        Group("bf16", CASES_135M, (
            Entry("quire", SMOLLM2, "bf16", BF16),
            Entry("vllm", SMOLLM2, "bf16"),
            Entry("openvino", f"{SMOLLM2}-ov-fp16", "fp16 (IR), computes in bf16"),
            Entry("llama.cpp", f"{SMOLLM2}.bf16.gguf", "bf16", slow=("B4096", "C@64", "D@64")),
            Entry("transformers", SMOLLM2, "bf16", slow=("B4096", "C@64", "D@16", "D@64")),
        )),
        gguf_group("Q8_0", f"{SMOLLM2}.q8_0.gguf", ()),
        gguf_group("Q4_1", f"{SMOLLM2}.Q4_1.gguf", ("C@16",)),
        int8_group(SMOLLM2, ("A", "B1024", "B4096", "C@16")),
    ),
    "1b": (
        Group("bf16", CASES_1B, (
            Entry("quire", LLAMA_1B, "bf16", BF16),
            Entry("vllm", LLAMA_1B, "bf16"),
            Entry("openvino", f"{LLAMA_1B}-ov-fp16", "fp16 (IR), computes in bf16"),
            Entry("llama.cpp", f"{LLAMA_1B}.bf16.gguf", "bf16"),
            Entry("transformers", LLAMA_1B, "bf16", slow=CASES_1B),
        )),
        int8_group(LLAMA_1B, CASES_1B),
    ),
}
# What `--quick` leaves.
QUICK = ("A", "B1024", "C@16", "D@16")


@dataclass(frozen=True)
class Choice:
    """What the command line asks for. A workload `C` means all its cases, `C@16` that one."""

    engines: tuple[str, ...] = ENGINES
    groups: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    everything: bool = False

    def wants(self, case: Case) -> bool:
        return not self.workloads or bool({case.label, case.workload} & set(self.workloads))


def jobs(model: str, choice: Choice) -> list[Job]:
    """The jobs of a round, those of a group together and Quire first."""
    chosen = []
    for group in GROUPS[model]:
        if choice.groups and group.name not in choice.groups:
            continue
        for entry in group.entries:
            if entry.engine not in choice.engines:
                continue
            cases = [Case.parse(label) for label in group.cases
                     if choice.everything or label not in entry.slow]
            cases = [case for case in cases if choice.wants(case)]
            chosen += split(group.name, entry, cases)
    return chosen


def split(group: str, entry: Entry, cases: list[Case]) -> list[Job]:
    """One job, or for llama.cpp one for each number of slots."""
    parts = [cases]
    if entry.engine == "llama.cpp":
        parts = [[case for case in cases if case.cap == cap]
                 for cap in sorted({case.cap for case in cases})]
    return [Job(group, entry.engine, entry.model, entry.weights, tuple(part), entry.flags)
            for part in parts if part]


def rotated(round_jobs: list[Job], round_number: int) -> list[Job]:
    """The jobs of round 1, 2, … each beginning with another one, so that a machine that gets
    slower does not always do so to the same engine."""
    if not round_jobs:
        return []
    start = (round_number - 1) % len(round_jobs)
    return round_jobs[start:] + round_jobs[:start]
