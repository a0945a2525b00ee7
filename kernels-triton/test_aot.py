"""The driver: what it writes depends on the sources alone, and it names what it refuses."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import aot
import variants

HERE = Path(__file__).resolve().parent
SMALL = "copy_blocks"  # a kernel that compiles in a moment


def copy_sources(folder: Path) -> Path:
    """The sources in a folder of their own, with one kernel in the table."""
    skip = shutil.ignore_patterns(".venv", "__pycache__", ".pytest_cache", "test_*", "naive.py")
    root = Path(shutil.copytree(HERE, folder, ignore=skip))
    text = (root / "variants.yaml").read_text()
    head, kernels = text.split("\nkernels:\n")
    wanted = f"memory.{SMALL}"
    [entry] = [entry for entry in kernels.split("  - kernel: ") if entry.startswith(wanted)]
    (root / "variants.yaml").write_text(f"{head}\nkernels:\n  - kernel: {entry}")
    return root


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`aot.py` of that folder, writing beside it."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(root / "aot.py"), "--out", str(root / "out"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def edit(path: Path, old: str, new: str) -> None:
    """Replaces text that must be there."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_two_folders_give_the_same_bytes(tmp_path: Path) -> None:
    roots = [copy_sources(tmp_path / name) for name in ("one", "some/where/else")]
    for root in roots:
        done = run(root)
        assert done.returncode == 0, done.stderr
    first, second = (contents(root / "out") for root in roots)
    assert len(first) == 2 and first == second


def test_only_what_changed_is_compiled_and_a_check_tells(tmp_path: Path) -> None:
    root = copy_sources(tmp_path / "one")
    assert "1 compiled" in run(root).stdout
    assert "0 compiled" in run(root).stdout
    assert run(root, "--check").returncode == 0
    edit(root / "memory/kernels.py", "tl.store(cache + target", "tl.store(cache + source")
    done = run(root, "--check")
    assert done.returncode == 1 and f"ptx/sm_80/{SMALL}" in done.stderr
    assert "manifest.yaml" in done.stderr
    assert "1 compiled" in run(root).stdout
    assert run(root, "--check").returncode == 0


def test_a_damaged_file_is_compiled_again(tmp_path: Path) -> None:
    root = copy_sources(tmp_path / "one")
    run(root)
    file = next((root / "out").rglob("*.ptx"))
    good = file.read_bytes()
    file.write_bytes(good + b"\n")
    stranger = file.with_name("stranger.ptx")
    stranger.write_text("")
    assert "1 compiled" in run(root).stdout
    assert file.read_bytes() == good and not stranger.exists()


def test_a_trial_is_assembled_and_a_release_needs_the_manifest(tmp_path: Path) -> None:
    root = copy_sources(tmp_path / "one")
    assert run(root, "--only", SMALL).returncode == 0
    trial = run(root, "--only", SMALL, "--ptxas")
    assert trial.returncode == 0 and f"{SMALL}_block1024_w4_s1: registers" in trial.stdout
    done = run(root, "--ptxas")
    assert done.returncode == 1 and "run `make kernels`" in done.stderr and SMALL in done.stderr


@pytest.mark.parametrize("file, old, new, message", [
    ("memory/kernels.py", "mask=mask), mask=mask)", "mask=mask), mask=nothing)", "nothing"),
    ("variants.yaml", "      num_blocks: ", "      num_blocs: ", "num_blocs"),
    ("variants.yaml", '"*i32:16 [num_layers', '"*int:16 [num_layers', "unknown type '*int:16'"),
    ("variants.yaml", "targets: [sm_80]", "targets: [sm_7]", "unknown target sm_7"),
    ("variants.yaml", "num_warps: 4, ", "", "lacks `num_warps`"),
    ("variants.yaml", "BLOCK: 1024", "BLOCK: [1024, 1024]", "listed twice"),
    ("variants.yaml", "BLOCK: 1024", "BLOCK: 1000", "power of 2"),
    ("variants.yaml", "max_files: 150", "max_files: 0", "the limit is 0"),
    ("requirements.txt", "triton==", "triton==0", "make setup"),
])
def test_refusals_name_the_place(tmp_path: Path, file: str, old: str, new: str,
                                 message: str) -> None:
    root = copy_sources(tmp_path / "one")
    edit(root / file, old, new)
    done = run(root)
    assert done.returncode == 1 and message in done.stderr
    assert "Traceback" not in done.stderr
    assert SMALL in done.stderr or "max_files" in new or file == "requirements.txt"


def test_a_dead_compiler_is_reported_and_replaced() -> None:
    """LLVM ends the process on a PTX version too old for the target; the next job still runs."""
    job = next(v for v in variants.load(HERE).variants if SMALL in v.name).job()
    worker = aot.Worker()
    died = worker.compile({**job, "arch": 90, "ptx_version": 70})
    assert "ended with status" in died["error"] and "7.0 does not support" in died["error"]
    assert "error" not in worker.compile(job)
    worker.close()


def same_in_all(kernels: list[str], names: list[str]) -> dict[tuple, set]:
    """For each target and type, the values that the constants have over the kernels' variants."""
    found: dict[tuple, set] = {}
    for v in variants.load(HERE).variants:
        if v.kernel in kernels:
            key = v.target, v.types["dtype"], v.constexpr.get("HEAD_DIM"), v.constexpr.get("PADDED")
            found.setdefault(key, set()).add(tuple(v.constexpr[name] for name in names))
    return found


@pytest.mark.parametrize("kernels, names", [
    (["attention.prefill_attention", "attention.decode_attention"], ["SPLIT", "TILE", "BLOCK_V"]),
    (["gemm.gemm", "gemm.gemm_silu_mul", "gemm.gemm_partial"], ["CHUNK"]),
])
def test_what_decides_the_order_of_a_sum_is_one_number(kernels: list[str], names: list[str]) -> None:
    for key, values in same_in_all(kernels, names).items():
        assert len(values) == 1, f"{key}: {names} are {values}"


@pytest.mark.parametrize("family", ["attention", "gemm", "moe"])
def test_one_family_of_tensor_core_instructions_a_target(family: str) -> None:
    """A row must not be computed by mma.sync in one variant and by wgmma in another."""
    for target, expected, other in [("sm_80", "mma.sync", "wgmma"), ("sm_90a", "wgmma", "mma.sync.")]:
        chosen = [v for v in variants.load(HERE).variants if v.target == target
                  and v.kernel.startswith(family) and v.types.get("dtype") in ("bf16", "fp16")]
        texts = {v.id: (aot.COMMITTED / v.file).read_text() for v in chosen}
        assert any(expected in text for text in texts.values())
        assert [id for id, text in texts.items() if other in text] == []


def test_arithmetic_that_ptxas_may_fuse_is_found() -> None:
    for line in ("\tmul.f32 %f1, %f2, %f3;", "@%p1 add.ftz.f32 a, b, c;", "sub.bf16x2 a, b, c;"):
        assert aot.FUSABLE.search(f"{{\n{line}\n}}"), line
    for line in ("mul.rn.f32 %f1, %f2, %f3;", "fma.rn.f32 a, b, c, d;", "add.s32 a, b, c;"):
        assert not aot.FUSABLE.search(f"{{\n{line}\n}}"), line


def test_the_source_hash_covers_kernels_and_table_but_no_tests(tmp_path: Path) -> None:
    root = copy_sources(tmp_path / "one")
    before = variants.source_hash(root)
    (root / "memory" / "test_memory.py").write_text("changed")
    (root / "memory" / "naive.py").write_text("changed")
    assert variants.source_hash(root) == before
    for file in ("memory/kernels.py", "variants.yaml", "aot.py", "requirements.txt"):
        (root / file).write_text((root / file).read_text() + "\n")
        after = variants.source_hash(root)
        assert after != before, file
        before = after
