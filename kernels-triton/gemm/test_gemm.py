"""The GEMM kernels in Triton's interpreter against `naive`, and against each other bit for bit."""

import numpy as np
import pytest

from gemm import kernels, naive
from interpreter import Tensor

CHUNK = 512
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-5, "bf16": 1e-5}  # f32 results of exact products
ROUNDED = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 8e-3}  # results rounded to the type
SHAPES = [(1, 16, 16), (3, 48, 528), (16, 32, 512), (21, 80, 1040)]


def operands(m: int, n: int, k: int, dtype: str) -> tuple[Tensor, Tensor]:
    """x [m, k] and w [n, k], scaled so that y is about 1."""
    rng = np.random.default_rng(m + n + k)
    x = Tensor(rng.standard_normal((m, k)), dtype)
    return x, Tensor(rng.standard_normal((n, k)) * k**-0.5, dtype)


def large(x: Tensor, w: Tensor, bias: Tensor, flags: tuple[int, int], out: np.ndarray) -> Tensor:
    """`gemm`; flags are (has_bias, accumulate)."""
    (m, k), n = x.shape, w.shape[0]
    result = Tensor(out)
    kernels.gemm[(-(-m // 16) * -(-n // 32),)](
        result, x, w, bias, m, n, k, k, n, *flags, BLOCK_T=16, BLOCK_N=32, BLOCK_K=32, CHUNK=CHUNK,
        BAND=2)
    return result


def partial(x: Tensor, w: Tensor) -> Tensor:
    """`gemm_partial`."""
    (m, k), n = x.shape, w.shape[0]
    chunks = -(-k // CHUNK)
    result = Tensor(np.full((chunks, m, n), np.nan, np.float32))
    kernels.gemm_partial[(-(-n // 32), chunks, -(-m // 16))](
        result, x, w, m, n, k, k, BLOCK_T=16, BLOCK_N=32, BLOCK_K=64, CHUNK=CHUNK)
    return result


def skinny(x: Tensor, w: Tensor, bias: Tensor, flags: tuple[int, int], out: np.ndarray) -> Tensor:
    """`gemm_partial`, then `fold_partials`."""
    m, n = x.shape[0], w.shape[0]
    part, result = partial(x, w), Tensor(out)
    kernels.fold_partials[(m, -(-n // 64))](result, part, bias, m, n, part.shape[0], n, *flags,
                                            BLOCK_N=64)
    return result


def large_silu_mul(x: Tensor, w: Tensor) -> Tensor:
    """`gemm_silu_mul`."""
    (m, k), n = x.shape, w.shape[0]
    out = Tensor(np.full((m, n // 2), np.nan, np.float32), x.dtype)
    kernels.gemm_silu_mul[(-(-m // 16) * -(-n // 64),)](
        out, x, w, m, n, k, k, n // 2, BLOCK_T=16, BLOCK_N=32, BLOCK_K=32, CHUNK=CHUNK,
        BAND=2)
    return out


def skinny_silu_mul(x: Tensor, w: Tensor) -> Tensor:
    """`gemm_partial`, then `fold_silu_mul`."""
    m, n = x.shape[0], w.shape[0]
    part, out = partial(x, w), Tensor(np.full((m, n // 2), np.nan, np.float32), x.dtype)
    kernels.fold_silu_mul[(m, -(-n // 64))](out, part, m, n, part.shape[0], n // 2, BLOCK_N=32)
    return out


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest error against the larger of the value and 1."""
    return float((np.abs(got - want) / np.maximum(1.0, np.abs(want))).max())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("flags", [(0, 0), (1, 0), (1, 1)])
def test_linear(shape: tuple[int, int, int], dtype: str, flags: tuple[int, int]) -> None:
    x, w = operands(*shape, dtype)
    rng = np.random.default_rng(1)
    bias = Tensor(rng.standard_normal(shape[1]).astype(np.float32))
    out = rng.standard_normal(shape[:2]).astype(np.float32)
    if not flags[1]:
        out[...] = np.nan
    want = naive.linear(x.f32, w.f32, bias.f32 if flags[0] else None, out if flags[1] else None)
    got = large(x, w, bias, flags, out)
    assert relative_error(got.f32, want) <= TOLERANCE[dtype]
    assert np.array_equal(got.array, skinny(x, w, bias, flags, out).array)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", [(1, 32, 16), (5, 96, 1040), (18, 64, 512)])
def test_silu_mul(shape: tuple[int, int, int], dtype: str) -> None:
    x, w = operands(*shape, dtype)
    got = large_silu_mul(x, w)
    assert relative_error(got.f32, naive.silu_mul(x.f32, w.f32)) <= ROUNDED[dtype]
    assert np.array_equal(got.array, skinny_silu_mul(x, w).array)


def test_rows_do_not_depend_on_their_number() -> None:
    x, w = operands(21, 48, 1040, "bf16")
    none = Tensor(np.zeros(48, np.float32))
    whole = large(x, w, none, (0, 0), np.zeros((21, 48), np.float32)).array
    for first, last in [(0, 1), (7, 9), (4, 21)]:
        rows = Tensor(x.array[first:last], "bf16")
        out = np.zeros((last - first, 48), np.float32)
        for run in (large, skinny):
            assert np.array_equal(run(rows, w, none, (0, 0), out).array, whole[first:last])
