"""What `repair` mends stays mended: each test fails on Triton's own interpreter."""

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from interpreter import Tensor, bf16_round


@triton.jit
def add_and_compare(out, less, x, y, N: tl.constexpr):
    """out = x + y and less = x < y, in the tensors' type."""
    o_n = tl.arange(0, N)
    b_x, b_y = tl.load(x + o_n), tl.load(y + o_n)
    tl.store(out + o_n, b_x + b_y)
    tl.store(less + o_n, (b_x < b_y).to(tl.int32))


@triton.jit
def product(out, x, y, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """out [M, N] f32 = x [M, K] · y [K, N]."""
    o_m, o_k, o_n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    b_x = tl.load(x + o_m[:, None] * K + o_k[None, :])
    b_y = tl.load(y + o_k[:, None] * N + o_n[None, :])
    tl.store(out + o_m[:, None] * N + o_n[None, :], tl.dot(b_x, b_y, input_precision="ieee"))


@triton.jit
def round_to(out, x, N: tl.constexpr):
    """out = x in out's type."""
    o_n = tl.arange(0, N)
    tl.store(out + o_n, tl.load(x + o_n).to(out.dtype.element_ty))


@triton.jit
def copy(out, x, count, N: tl.constexpr):
    """out[:N] = x[:N] if count is positive."""
    o_n = tl.arange(0, N)
    mask = (o_n < N) & (count > 0)
    tl.store(out + o_n, tl.load(x + o_n, mask=mask), mask=mask)


def test_bf16_arithmetic_and_comparison() -> None:
    x, y = np.float32([1.0, -2.0, 3.0, 0.5]), np.float32([1.0, 5.0, -7.0, 0.25])
    out, less = Tensor(np.zeros(4), "bf16"), Tensor(np.zeros(4, np.int32))
    add_and_compare[(1,)](out, less, Tensor(x, "bf16"), Tensor(y, "bf16"), N=4)
    assert np.array_equal(out.f32, x + y)
    assert np.array_equal(less.array, (x < y).astype(np.int32))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_f32_is_rounded_to_nearest_even(dtype: str) -> None:
    step = {"bf16": 2.0**-7, "fp16": 2.0**-10}[dtype]
    x = np.float32([1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, -1 - 0.49 * step, np.inf, -0.0,
                    3e38 if dtype == "bf16" else 65519.0, np.nan])
    out = Tensor(np.zeros(8), dtype)
    round_to[(1,)](out, Tensor(x), N=8)
    want = bf16_round(x) if dtype == "bf16" else x.astype(np.float16).astype(np.float32)
    assert np.array_equal(out.f32, want, equal_nan=True)
    assert out.f32[:4].tolist() == [1.0, 1 + 2 * step, 1 + step, -1.0]


def test_a_rows_dot_does_not_depend_on_the_other_rows() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((16, 64)), Tensor(rng.standard_normal((64, 16)), "bf16")
    outs = []
    for rows in (x, np.concatenate([x[:1], np.zeros((15, 64))])):
        outs.append(Tensor(np.zeros((16, 16), np.float32)))
        product[(1,)](outs[-1], Tensor(rows, "bf16"), y, M=16, K=64, N=16)
    assert np.array_equal(outs[0].array[0], outs[1].array[0])
    assert np.abs(outs[0].array - bf16_round(x) @ y.f32).max() < 1e-4


def test_addresses_are_checked() -> None:
    out, x = Tensor(np.zeros(8, np.float32)), Tensor(np.ones(8, np.float32))
    copy[(1,)](out, x, 1, N=8)
    assert out.array.sum() == 8
    copy[(1,)](out, x, 0, N=16)  # all masked
    wide = Tensor(np.zeros(16, np.float32))
    with pytest.raises(InterpreterError, match="store of 4 bytes outside every tensor"):
        copy[(1,)](out, wide, 1, N=16)
    with pytest.raises(InterpreterError, match="load of 4 bytes outside every tensor"):
        copy[(1,)](wide, x, 1, N=16)
