"""Assembles the PTX for every architecture it must run on, and writes the tables of README.md.

`ptxas` comes with Triton. What it reports (registers, spills) and the shared memory of a launch are
held against the limits of `variants.yaml`; the tables must be what README.md has.
"""

import lzma
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from variants import AotError, Table, Variant

README = Path(__file__).resolve().parent / "README.md"
ROOFLINE = README.parent / "roofline.yaml"
MARKERS = "<!-- tables: written by aot.py --ptxas --table -->\n", "<!-- end of tables -->\n"
KIB = 1024
SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Gpu:
    """Peak rates from the vendor's data sheets (SXM, dense)."""

    name: str
    bytes_per_s: float
    tensor_flops: float  # bf16 tensor cores, f32 accumulation
    f32_flops: float


GPUS = [
    Gpu("A100 80GB", 2.039e12, 312e12, 19.5e12),
    Gpu("H100", 3.35e12, 989e12, 67e12),
    Gpu("H200", 4.8e12, 989e12, 67e12),
]


@dataclass(frozen=True)
class Usage:
    """What one variant takes on one architecture."""

    arch: str
    registers: int
    spill_bytes: int


def find_ptxas() -> str:
    """Triton's assembler."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas")


def assemble(ptxas: str, path: Path, arch: str) -> Usage | str:
    """What `ptxas -v` reports, or its complaint."""
    command = [ptxas, "-v", f"--gpu-name={arch}", str(path), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores", report)
    if done.returncode or not registers or not spills:
        return report.strip()
    return Usage(arch, int(registers.group(1)), int(spills.group(1)))


def assemble_all(table: Table, out: Path, variants: list[Variant]) -> dict[str, list[Usage]]:
    """Variant id → usage by architecture. Raises with every failure."""
    ptxas = find_ptxas()
    jobs = [(variant, arch) for variant in variants
            for arch in table.targets[variant.target]["runs_on"]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(pool.map(lambda job: assemble(ptxas, out / job[0].file, job[1]), jobs))
    usage: dict[str, list[Usage]] = {}
    failures = []
    for (variant, arch), report in zip(jobs, reports):
        if isinstance(report, str):
            failures.append(f"{variant.id} for {arch}: {report}")
        else:
            usage.setdefault(variant.id, []).append(report)
    if failures:
        raise AotError("ptxas refuses:\n" + "\n".join(failures))
    return usage


def shared_bytes_of(out: Path) -> dict[str, int]:
    """Variant id → dynamic shared memory, from the manifest; `aot.py --only` writes none."""
    path = out / "manifest.yaml"
    if not path.exists():
        return {}
    manifest = yaml.safe_load(path.read_text())
    return {f"{v['target']}/{v['name']}": v["shared_bytes"]
            for kernel in manifest["kernels"] for v in kernel["variants"]}


def check_limits(table: Table, variants: list[Variant], usage: dict[str, list[Usage]],
                 shared: dict[str, int]) -> None:
    """Prints each variant's use against its limits; raises if any is over.

    Shared memory is not known of a variant that is not in a manifest yet.
    """
    over = []
    for variant in variants:
        registers = max(u.registers for u in usage[variant.id])
        spills = max(u.spill_bytes for u in usage[variant.id])
        room = min(table.limits["shared_kib"][u.arch] for u in usage[variant.id]) * KIB
        values = [("registers", registers, variant.limits["registers"]),
                  ("spill bytes", spills, variant.limits["spill_bytes"])]
        if variant.id in shared:
            values.append(("shared bytes", shared[variant.id], room))
        print(f"{variant.id}: "
              + ", ".join(f"{what} {value}/{limit}" for what, value, limit in values))
        over += [f"{variant.id}: {what} {value}, the limit is {limit}"
                 for what, value, limit in values if value > limit]
    if over:
        raise AotError("over the limits of variants.yaml:\n" + "\n".join(over))


def check_listed(variants: list[Variant], shared: dict[str, int]) -> None:
    """Every variant of the table must be in the manifest."""
    unlisted = [variant.id for variant in variants if variant.id not in shared]
    if unlisted:
        raise AotError("the manifest lacks these variants; run `make kernels`:\n  "
                       + "\n  ".join(unlisted))


def check_size(table: Table, out: Path) -> None:
    """The files' size, compressed one by one as the build embeds them."""
    size = sum(len(lzma.compress((out / v.file).read_bytes())) for v in table.variants)
    print(f"{len(table.variants)} files (limit {table.limits['max_files']}), "
          f"{size} bytes compressed (limit {table.limits['max_compressed_bytes']})")
    if size > table.limits["max_compressed_bytes"]:
        raise AotError(f"the PTX takes {size} bytes compressed")


# ---------------------------------------------------------------- tables of README.md


def row(cells: list[str]) -> str:
    """A line of a table."""
    return "| " + " | ".join(cells) + " |\n"


def rounded(value: float) -> str:
    """Three digits with a decimal prefix."""
    for factor, prefix in [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]:
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "


def work_table(table: Table, out: Path) -> str:
    """Least bytes and FLOPs of each kernel for a stated case, and the time they take at best."""
    works = yaml.safe_load(ROOFLINE.read_text())
    lines = row(["kernel", "case", "bytes", "FLOPs", "FLOPs/byte", *(g.name for g in GPUS)])
    lines += row(["---"] * 2 + ["---:"] * (3 + len(GPUS)))
    for kernel in table.kernels:
        name = kernel["kernel"]
        if name not in works:
            raise AotError(f"roofline.yaml lacks kernel {name}")
        first = next(v for v in table.variants if v.kernel == name)
        work = works[name]
        values = {**work["case"], "e": SIZES[first.types.get("dtype", "fp32")]}
        num_bytes, flops = (float(eval(str(work[what]), {"__builtins__": {}}, values))
                            for what in ("bytes", "flops"))
        tensor = "mma" in (out / first.file).read_text()
        times = [max(num_bytes / g.bytes_per_s, flops / (g.tensor_flops if tensor else g.f32_flops))
                 for g in GPUS]
        text = ", ".join(f"{key} {value}" for key, value in work["case"].items())
        lines += row([f"`{name}`", text, rounded(num_bytes) + "B", rounded(flops).strip(),
                      f"{flops / num_bytes:.3g}", *(f"{t * 1e6:.3g} µs" for t in times)])
    return lines


def usage_table(table: Table, usage: dict[str, list[Usage]], shared: dict[str, int]) -> str:
    """Registers, spills and shared memory; types that take the same share a row."""
    lines = row(["kernel", "target", "types", "constants", "warps", "stages", "registers", "spills",
                 "shared"])
    lines += row(["---"] * 4 + ["---:"] * 5)
    types: dict[tuple, list[str]] = {}
    for v in table.variants:
        used = usage[v.id][0]  # on the target's own architecture
        constants = ", ".join(f"{name} {value}" for name, value in v.constexpr.items())
        key = (v.kernel.split(".")[1], v.target, constants, v.num_warps, v.num_stages,
               used.registers, used.spill_bytes, shared[v.id])
        types.setdefault(key, []).append(" ".join(v.types.values()))
    for key, names in types.items():
        kernel, target, constants, *numbers = key
        lines += row([f"`{kernel}`", target, ", ".join(filter(None, names)) or "any", constants,
                      *map(str, numbers)])
    return lines


def tables(table: Table, out: Path, usage: dict[str, list[Usage]], shared: dict[str, int]) -> str:
    """The generated part of README.md."""
    return (
        "\n### Work\n\n"
        "What a launch must move and compute at least (for the first variant's type; inputs\n"
        "read once, outputs written once), and the time that takes at the data sheets' rates:\n"
        "the larger of bytes / bandwidth and FLOPs / peak (of the tensor cores where the kernel\n"
        "uses them). The times are bounds by formula: **not yet measured on hardware**.\n\n"
        + work_table(table, out)
        + "\n### Resources\n\n"
        "Registers and spilled bytes of a thread from `ptxas`, on the target's own architecture;\n"
        "bytes of shared memory of a block.\n\n" + usage_table(table, usage, shared) + "\n")


def split_readme() -> tuple[str, str, str]:
    """README.md before, between and after the markers."""
    text = README.read_text()
    if any(text.count(marker) != 1 for marker in MARKERS):
        raise AotError(f"README.md lacks the lines {MARKERS[0].strip()} and {MARKERS[1].strip()}")
    head, rest = text.split(MARKERS[0])
    body, tail = rest.split(MARKERS[1])
    return head, body, tail


def run(table: Table, out: Path, only: str | None, write_table: bool) -> None:
    """The whole of `aot.py --ptxas`."""
    variants = [v for v in table.variants if only is None or only in v.id]
    shared = shared_bytes_of(out)
    if only is None:
        check_listed(variants, shared)
    usage = assemble_all(table, out, variants)
    check_limits(table, variants, usage, shared)
    if only is not None:
        return
    check_size(table, out)
    head, body, tail = split_readme()
    new = tables(table, out, usage, shared)
    if write_table:
        README.write_text(head + MARKERS[0] + new + MARKERS[1] + tail)
    elif new != body:
        raise AotError("the tables of kernels-triton/README.md are out of date; run `make kernels`")
