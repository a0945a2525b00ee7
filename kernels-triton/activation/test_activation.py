"""Activations in Triton's interpreter against `naive.py`."""

import numpy as np
import pytest
from activation import kernels, naive
from interpreter import Tensor

TOLERANCE = {"fp32": 2e-6, "bf16": 2**-7, "fp16": 2**-10}


def run(gate_up: np.ndarray, dtype: str) -> np.ndarray:
    """The kernel's result as f32."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = Tensor(np.zeros((num_rows, width), np.float32), dtype)
    grid = (num_rows, -(-width // 256))
    kernels.silu_mul[grid](out, Tensor(gate_up), width, BLOCK=256)
    return out.f32


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("width", [1, 255, 256, 700])
def test_silu_mul(dtype: str, width: int) -> None:
    x = np.random.default_rng(width).normal(0, 4, (3, 2 * width)).astype(np.float32)
    np.testing.assert_allclose(run(x, dtype), naive.silu_mul(x), TOLERANCE[dtype], 1e-6)


@pytest.mark.filterwarnings("ignore:overflow")  # exp of the far end is infinite
def test_far_ends() -> None:
    x = np.array([[-200.0, 200.0, -88.0, 0.0, 1.0, 2.0, 3.0, 4.0]], np.float32)
    np.testing.assert_allclose(run(x, "fp32"), [[0.0, 400.0, 0.0, 0.0]], atol=1e-30)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    x = np.random.default_rng(3).normal(0, 2, (5, 600)).astype(np.float32)
    together = run(x, "bf16")
    for i in range(5):
        np.testing.assert_array_equal(run(x[i:i + 1], "bf16")[0], together[i])
