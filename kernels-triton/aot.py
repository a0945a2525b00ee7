#!/usr/bin/env python3
"""Compiles the kernels of `variants.yaml` ahead of time: Triton sources in, PTX and a manifest out.

    aot.py [--out DIR] [--only NAME]   write DIR/ptx/<target>/<variant>.ptx and DIR/manifest.yaml
    aot.py --check                     compile everything anew and require the committed bytes
    aot.py --ptxas                     assemble every file for every architecture it must run on
    aot.py --source-hash               print the hash that the manifest must carry

No GPU, no CUDA toolkit and no torch: the stages of Triton's NVIDIA backend are driven one by one,
up to PTX. The output depends on the sources alone, not on where they lie, on the machine or on the
order of compilation:

- line information is off, floating-point fusion is off (a kernel that wants an fma writes one), the
  PTX version is explicit for each target;
- every variant is compiled in a worker process, because LLVM ends the process on some errors; the
  parent then names the variant that did it.

A variant whose key (a hash of its sources and settings) is in the manifest is not compiled again.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import yaml

import variants
from variants import AotError, Variant

HERE = Path(__file__).resolve().parent
COMMITTED = HERE.parent / "kernels-ptx"
NUM_WORKERS = 2
# What a plain arithmetic instruction must carry: without `.rn` ptxas may fuse it into an fma, and
# rows would depend on which kernel computed them.
FUSABLE = re.compile(r"^\s*(?:@!?%\w+\s+)?((?:add|sub|mul)(?:\.ftz)?\.(?:f|bf)(?:16|16x2|32|64))\b",
                     re.MULTILINE)


# ---------------------------------------------------------------- worker: one variant at a time


def compile_variant(job: dict) -> dict:
    """Compiles one variant in this process.

    `job`: `Variant.job()`. Returns the PTX and what the launcher has to know about it.
    """
    import importlib

    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler import ASTSource, make_backend

    family, function = job["kernel"].split(".")
    kernel = getattr(importlib.import_module(f"{family}.kernels"), function)
    check_signature(kernel.arg_names, job)

    signature, hints = {}, {}
    for index, name in enumerate(kernel.arg_names):
        arg_type = job["args"].get(name)
        if arg_type is None:
            signature[name] = "constexpr"
            continue
        signature[name], _, hint = arg_type.partition(":")
        if hint:
            hints[(index,)] = [["tt.divisibility", int(hint)]]

    backend = make_backend(GPUTarget("cuda", job["arch"], 32))
    options = backend.parse_options({
        "num_warps": job["num_warps"],
        "num_stages": job["num_stages"],
        "enable_fp_fusion": False,
        "ptx_version": job["ptx_version"],
    })
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict = {}
    backend.add_stages(stages, options, Language.TRITON)
    source = ASTSource(fn=kernel, signature=signature, constexprs=job["constexpr"], attrs=hints)
    metadata = {"num_warps": options.num_warps}
    module = source.make_ir(backend.target, options, backend.get_codegen_implementation(options),
                            backend.get_module_map(), context)
    for stage in ("ttir", "ttgir", "llir", "ptx"):
        module = stages[stage](module, metadata)
    return {"ptx": module, "launch": launch_facts(module, metadata, len(job["args"]))}


def check_signature(arg_names: list, job: dict) -> None:
    """The table and the kernel must name the same arguments, in the same order."""
    told = list(job["args"]) + list(job["constexpr"])
    missing = [name for name in arg_names if name not in told]
    unknown = [name for name in told if name not in arg_names]
    if missing or unknown:
        raise AotError(f"arguments of the kernel that variants.yaml lacks: {missing}; "
                       f"arguments in variants.yaml that the kernel lacks: {unknown}")
    ordered = [name for name in arg_names if name in job["args"]]
    if ordered != list(job["args"]):
        raise AotError(f"order of arguments: the kernel has {ordered}, "
                       f"variants.yaml has {list(job['args'])}")


def launch_facts(ptx: str, metadata: dict, num_args: int) -> dict:
    """What a launcher needs, from the PTX where it says so; refuses what it cannot run."""
    entry = re.search(r"\.visible \.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
    num_params = len(entry.group(2).split(","))
    if num_params != num_args + 2:
        raise AotError(f"the entry has {num_params} parameters; expected {num_args} and two "
                       "scratch pointers")
    fusable = FUSABLE.search(ptx)
    if fusable:
        raise AotError(f"`{fusable.group(1)}` has no rounding mode, so ptxas may fuse it")
    scratch = metadata["global_scratch_size"], metadata["profile_scratch_size"]
    if scratch != (0, 0):
        raise AotError(f"needs {scratch} bytes of (global, profile) scratch; launches give none")
    return {
        "entry": entry.group(1),
        "num_warps": metadata["num_warps"],
        "shared_bytes": metadata["shared"],
        "reqntid": int(re.search(r"\.reqntid (\d+)", ptx).group(1)),
        "global_scratch": scratch[0],
        "profile_scratch": scratch[1],
    }


def worker_main() -> None:
    """Reads jobs from stdin and answers on stdout, one JSON object a line."""
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Triton prints must not mix with the answers
    sys.path.insert(0, str(HERE))
    for line in sys.stdin:
        try:
            answer = compile_variant(json.loads(line))
        except Exception as error:  # the parent reports it with the variant's name
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Worker:
    """A worker process, started again after a crash."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()
        environment = dict(os.environ, TRITON_DISABLE_LINE_INFO="1", PYTHONHASHSEED="0",
                           PYTHONDONTWRITEBYTECODE="1")
        environment.pop("TRITON_INTERPRET", None)
        self._process = subprocess.Popen([sys.executable, str(HERE / "aot.py"), "--worker"],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=self._log, text=True, env=environment)

    def compile(self, job: dict) -> dict:
        """The worker's answer, or an `error` with the end of its log if it died."""
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died; the empty answer below says so
        answer = self._process.stdout.readline()
        if answer:
            return json.loads(answer)
        status = self._process.wait()
        self._log.seek(0)
        log = self._log.read().decode(errors="replace").strip().splitlines()
        self._start()
        return {"error": f"the compiler ended with status {status}: " + "\n".join(log[-5:])}

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()


# ---------------------------------------------------------------- parent


class Progress:
    """A counter on one line of a terminal; silent elsewhere."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._live = total, 0, sys.stderr.isatty()

    def step(self, name: str) -> None:
        """Counts one more."""
        self._done += 1
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            line = f"[{self._done}/{self._total}] {name}"[:width]
            end = "\n" if self._done == self._total else ""
            print(f"\r\033[K{line}", end=end, file=sys.stderr, flush=True)


def compile_all(todo: list[Variant]) -> dict[str, dict]:
    """Compiles in parallel; variant id → worker's answer. Raises with every failure named."""
    results: dict[str, dict] = {}
    queue, lock, progress = list(reversed(todo)), threading.Lock(), Progress(len(todo))

    def serve() -> None:
        worker = Worker()
        while True:
            with lock:
                if not queue:
                    break
                variant = queue.pop()
            answer = worker.compile(variant.job())
            with lock:
                results[variant.id] = answer
                progress.step(variant.id)
        worker.close()

    threads = [threading.Thread(target=serve) for _ in range(min(NUM_WORKERS, len(todo)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = [f"kernel {v.kernel}, variant {v.id}: {results[v.id]['error']}"
                for v in todo if "error" in results[v.id]]
    if failures:
        raise AotError("\n".join(failures))
    return results


def reusable(out: Path) -> dict[str, dict]:
    """Variants of the manifest in `out` whose file is intact, by id."""
    path = out / "manifest.yaml"
    if not path.exists():
        return {}
    found = {}
    for kernel in yaml.safe_load(path.read_text())["kernels"]:
        for variant in kernel["variants"]:
            file = out / variant["file"]
            if file.exists() and sha256(file.read_bytes()) == variant["sha256"]:
                found[f"{variant['target']}/{variant['name']}"] = variant
    return found


def sha256(data: bytes) -> str:
    """Hexadecimal digest."""
    return hashlib.sha256(data).hexdigest()


def build(table: variants.Table, out: Path, only: str | None, fresh: bool) -> int:
    """Brings `out` in line with the table; returns how many variants were compiled.

    With `only`, nothing but the matching variants is written and the manifest stays as it is.
    """
    wanted = [v for v in table.variants if only is None or only in v.id]
    if not wanted:
        raise AotError(f"no variant's name contains '{only}'")
    old = {} if fresh or only else reusable(out)
    entries, todo = {}, []
    for variant in wanted:
        kept = old.get(variant.id)
        if kept and kept["key"] == variant.key:
            entries[variant.id] = kept
        else:
            todo.append(variant)
    results = compile_all(todo) if todo else {}
    for variant in todo:
        ptx = results[variant.id]["ptx"].encode()
        path = out / variant.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(ptx)
        entries[variant.id] = variant.manifest_entry(results[variant.id]["launch"], sha256(ptx))
    if only is None:
        remove_strangers(out, {v.file for v in wanted})
        (out / "manifest.yaml").write_text(table.manifest(entries))
    return len(todo)


def remove_strangers(out: Path, files: set[str]) -> None:
    """Deletes PTX files that the table does not name."""
    for path in sorted((out / "ptx").rglob("*.ptx")):
        if str(path.relative_to(out)) not in files:
            path.unlink()


def check(table: variants.Table, committed: Path) -> None:
    """Compiles everything into a temporary folder and requires the bytes in `committed`."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        build(table, fresh, only=None, fresh=True)
        names = {str(p.relative_to(root)) for root in (fresh, committed)
                 for p in [*(root / "ptx").rglob("*.ptx"), root / "manifest.yaml"]}
        differing = [name for name in sorted(names) if read(fresh / name) != read(committed / name)]
    if differing:
        raise AotError("these files of kernels-ptx/ are not what the sources compile to; run `make "
                       "kernels`:\n  " + "\n  ".join(differing))


def read(path: Path) -> bytes | None:
    """The file's bytes, or None where there is no such file."""
    return path.read_bytes() if path.exists() else None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=COMMITTED, help="folder to write into")
    parser.add_argument("--only", metavar="NAME", help="only variants whose name contains NAME; "
                        "their files are written, the manifest is not")
    parser.add_argument("--fresh", action="store_true", help="compile what is up to date, too")
    parser.add_argument("--check", action="store_true", help="require the committed files")
    parser.add_argument("--ptxas", action="store_true", help="assemble every file and check limits")
    parser.add_argument("--table", action="store_true", help="with --ptxas: write README's tables")
    parser.add_argument("--source-hash", action="store_true", help="print the sources' hash")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker_main()
        return
    try:
        table = variants.load(HERE)
        if options.source_hash:
            print(table.source_hash)
        elif options.check:
            check(table, options.out)
            print(f"kernels-ptx: {len(table.variants)} variants are what the sources compile to")
        elif not options.ptxas:
            compiled = build(table, options.out, options.only, options.fresh)
            print(f"{len(table.variants)} variants in the table, {compiled} compiled")
        if options.ptxas:
            import assemble
            assemble.run(table, options.out, options.only, options.table)
    except AotError as error:
        sys.exit(f"aot: {error}")


if __name__ == "__main__":
    main()
