"""Reads `variants.yaml`, the table of what ships, and expands it into single variants.

The table's form, the hashes and the manifest's form are defined here; `aot.py` compiles.
"""

import hashlib
import itertools
import json
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import yaml

SCALARS = {"i32", "i64", "u32", "u64", "fp32"}
POINTEES = SCALARS | {"i8", "u8", "i16", "u16", "bf16", "fp16"}
# Short names for the keys of a variant's name; other keys are lower-cased without underscores.
SHORT = {"HEAD_DIM": "d", "BLOCK_M": "m", "BLOCK_N": "n", "BLOCK_K": "k", "TILE": "t"}
LAUNCH = ("num_warps", "num_stages")


class AotError(Exception):
    """Something the author of a kernel or of the table has to mend."""


@dataclass(frozen=True)
class Variant:
    """One PTX file: a kernel with types, constants, launch settings and target fixed."""

    kernel: str  # "family.function"
    name: str
    target: str  # "sm_80"
    arch: int  # 80
    ptx_version: int  # 80 for PTX ISA 8.0
    types: dict[str, str]  # type variables of the kernel's arguments
    args: dict[str, str]  # argument → type with the variables put in
    constexpr: dict[str, object]
    num_warps: int
    num_stages: int
    limits: dict[str, int]
    key: str  # hash of everything the PTX depends on

    @property
    def id(self) -> str:
        """Unique over the table."""
        return f"{self.target}/{self.name}"

    @property
    def file(self) -> str:
        """Path of the PTX under the output folder."""
        return f"ptx/{self.target}/{self.name}.ptx"

    def job(self) -> dict:
        """What a worker needs to compile it."""
        return {
            "kernel": self.kernel, "arch": self.arch, "ptx_version": self.ptx_version,
            "args": self.args, "constexpr": self.constexpr, "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }

    def manifest_entry(self, launch: dict, ptx_sha256: str) -> dict:
        """The variant as the manifest lists it; `launch` comes from the compiled PTX."""
        return {
            "name": self.name, "target": self.target, "ptx_version": self.ptx_version,
            "file": self.file, "sha256": ptx_sha256, "key": self.key, "entry": launch["entry"],
            "types": self.types, "constexpr": self.constexpr, "num_warps": launch["num_warps"],
            "num_stages": self.num_stages, "shared_bytes": launch["shared_bytes"],
            "reqntid": launch["reqntid"], "global_scratch": launch["global_scratch"],
            "profile_scratch": launch["profile_scratch"],
        }


class Table:
    """The whole of `variants.yaml`, expanded and checked."""

    def __init__(self, root: Path, data: dict) -> None:
        self.targets: dict = data["targets"]
        self.limits: dict = data["limits"]
        self.kernels: list[dict] = data["kernels"]
        self.triton_version = pinned_triton(root)
        self.source_hash = source_hash(root)
        self.variants = [v for kernel in self.kernels for v in self._expand(root, kernel)]
        self._check()

    def _expand(self, root: Path, kernel: dict) -> list[Variant]:
        family = kernel["kernel"].split(".")[0]
        sources = digest_of_files(root, import_closure(root, f"{family}/kernels.py"))
        expanded = []
        for row in kernel["variants"]:
            axes = {key: value if isinstance(value, list) else [value]
                    for key, value in row.items() if key not in ("targets", "limits")}
            for point in itertools.product(*axes.values()):
                for target in row["targets"]:
                    expanded.append(self._variant(kernel, dict(zip(axes, point)), target, sources,
                                                  row.get("limits", {})))
        return expanded

    def _variant(self, kernel: dict, point: dict, target: str, sources: str,
                 limits: dict) -> Variant:
        where = f"variants.yaml: kernel {kernel['kernel']}"
        if target not in self.targets:
            raise AotError(f"{where}: unknown target {target}; known: {sorted(self.targets)}")
        for setting in LAUNCH:
            if setting not in point:
                raise AotError(f"{where}: a row of `variants` lacks `{setting}`")
        types = {key: value for key, value in point.items() if key.islower() and key not in LAUNCH}
        swept = {key: value for key, value in point.items() if not key.islower()}
        args = {}
        for name, text in kernel["args"].items():
            try:
                args[name] = text.split(None, 1)[0].format(**types)
            except KeyError as missing:
                raise AotError(f"{where}: argument {name} uses the type variable {missing}, which "
                               "a row of `variants` does not give") from None
            check_type(args[name], f"{where}: argument {name}")
        settings = {
            "arch": int(re.search(r"\d+", target).group()),
            "ptx_version": self.targets[target]["ptx_version"],
            "constexpr": {**(kernel.get("constexpr") or {}), **swept},
            **{setting: point[setting] for setting in LAUNCH},
        }
        key = digest(json.dumps([sources, self.triton_version, kernel["kernel"], args, target,
                                 settings], sort_keys=True))
        return Variant(kernel=kernel["kernel"], name=variant_name(kernel, types, swept, settings),
                       target=target, types=types, args=args, key=key,
                       limits={**self.limits["default"], **limits}, **settings)

    def _check(self) -> None:
        ids = [variant.id for variant in self.variants]
        twice = sorted({id for id in ids if ids.count(id) > 1})
        if twice:
            raise AotError(f"variants.yaml: listed twice: {', '.join(twice)}")
        if len(ids) > self.limits["max_files"]:
            raise AotError(f"variants.yaml: {len(ids)} variants; the limit is "
                           f"{self.limits['max_files']}")

    def manifest(self, entries: dict[str, dict]) -> str:
        """The manifest's text; `entries`: variant id → `manifest_entry`."""
        kernels = []
        for kernel in self.kernels:
            family, function = kernel["kernel"].split(".")
            kernels.append({
                "name": function, "family": family, "why": " ".join(kernel["why"].split()),
                "args": [manifest_arg(name, text) for name, text in kernel["args"].items()],
                "variants": [entries[v.id] for v in self.variants if v.kernel == kernel["kernel"]],
            })
        body = {"triton": self.triton_version, "source_hash": self.source_hash, "kernels": kernels}
        return ("# Written by `make kernels`; do not edit.\n"
                + yaml.safe_dump(body, sort_keys=False, width=100, allow_unicode=True))


def manifest_arg(name: str, text: str) -> dict:
    """An argument of the table, "type documentation", taken apart for the manifest."""
    arg_type, _, doc = text.partition(" ")
    base, _, hint = arg_type.partition(":")
    return {
        "name": name, "type": arg_type, "ptr": base.startswith("*"), "dtype": base.lstrip("*"),
        "hint": int(hint) if hint else None, "doc": doc.strip(),
    }


def variant_name(kernel: dict, types: dict, swept: dict, settings: dict) -> str:
    """Function, types, varying constants, warps and stages: an identifier, one in a target."""
    parts = [kernel["kernel"].split(".")[1], *types.values()]
    for key, value in swept.items():
        short = SHORT.get(key, key.lower().replace("_", ""))
        parts.append(f"{short}{int(value)}")
    return "_".join([*parts, f"w{settings['num_warps']}", f"s{settings['num_stages']}"])


def check_type(text: str, where: str) -> None:
    """`*bf16:16`, `i32:16`, `fp32`, …"""
    base, _, hint = text.partition(":")
    known = base[1:] in POINTEES if base.startswith("*") else base in SCALARS
    if not known or hint not in ("", "16"):
        raise AotError(f"{where}: unknown type '{text}'")


def import_closure(root: Path, start: str) -> list[str]:
    """The kernel file and every file of this folder that it imports, directly or not, sorted."""
    seen, todo = set(), [start]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        if not (root / path).exists():
            raise AotError(f"kernels-triton/{path} does not exist; variants.yaml names its family")
        seen.add(path)
        for module in re.findall(r"^from (\w+(?:\.\w+)+) import", (root / path).read_text(), re.M):
            imported = module.replace(".", "/") + ".py"
            if (root / imported).exists():
                todo.append(imported)
    return sorted(seen)


def source_hash(root: Path) -> str:
    """One hash over all that determines the PTX.

    SHA-256 of lines `<SHA-256 of the file>  <path>` (the form of `sha256sum`), sorted by path, for
    `aot.py`, `requirements.txt` (it pins Triton), `variants.py`, `variants.yaml` and
    `<family>/*.py` except `naive.py` and `test_*.py`, a family being a folder with a `kernels.py`.
    """
    paths = ["aot.py", "requirements.txt", "variants.py", "variants.yaml"]
    for kernels in root.glob("*/kernels.py"):
        paths += [f"{kernels.parent.name}/{file.name}" for file in kernels.parent.glob("*.py")
                  if file.name != "naive.py" and not file.name.startswith("test_")]
    return digest_of_files(root, sorted(paths))


def digest_of_files(root: Path, paths: list[str]) -> str:
    """SHA-256 of a list in the form of `sha256sum`."""
    hashes = [hashlib.sha256((root / path).read_bytes()).hexdigest() for path in paths]
    return digest("".join(f"{sha256}  {path}\n" for sha256, path in zip(hashes, paths)))


def digest(text: str) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()


def pinned_triton(root: Path) -> str:
    """The version in requirements.txt, which must be the one installed."""
    pinned = re.search(r"^triton==(\S+)$", (root / "requirements.txt").read_text(), re.M).group(1)
    try:
        installed = metadata.version("triton")
    except metadata.PackageNotFoundError:
        installed = "none"
    if installed != pinned:
        raise AotError(f"requirements.txt pins Triton {pinned}; installed: {installed}. Run `make "
                       "setup` and use kernels-triton/.venv/bin/python")
    return pinned


def load(root: Path) -> Table:
    """Reads and checks the table of `root`."""
    try:
        data = yaml.safe_load((root / "variants.yaml").read_text())
    except yaml.YAMLError as error:
        raise AotError(f"variants.yaml: {error}") from None
    return Table(root, data)
