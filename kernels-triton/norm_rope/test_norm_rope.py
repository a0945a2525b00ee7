"""Norms, rotary embedding and the cache write in Triton's interpreter against `naive.py`."""

import numpy as np
import pytest
from interpreter import Tensor
from norm_rope import kernels, naive

# Relative error of one rounding to the type, doubled for the f32 arithmetic before it.
TOLERANCE = {"fp32": 2e-6, "bf16": 2**-7, "fp16": 2**-10}
EPS = 1e-5


def assert_close(got: np.ndarray, want: np.ndarray, dtype: str) -> None:
    """Within the type's rounding, relative to each value and, for differences, to 1."""
    np.testing.assert_allclose(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def values(seed: int, *shape: int) -> np.ndarray:
    """Normally distributed f32."""
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("width", [1, 64, 896, 1500])
def test_rms_norm(dtype: str, width: int) -> None:
    x, weight = values(1, 3, width), values(2, width)
    out = Tensor(np.zeros((3, width), np.float32), dtype)
    kernels.rms_norm[(3,)](out, Tensor(x), Tensor(weight), EPS, width, BLOCK=512)
    assert_close(out.f32, naive.rms_norm(x, weight, EPS), dtype)


@pytest.mark.parametrize("width", [48, 1100])
def test_add_rms_norm_updates_the_residual(width: int) -> None:
    x, delta, weight = values(1, 3, width), values(2, 3, width), values(3, width)
    residual, out = Tensor(x), Tensor(np.zeros((3, width), np.float32), "bf16")
    kernels.add_rms_norm[(3,)](out, residual, Tensor(delta), Tensor(weight), EPS, width, BLOCK=512)
    np.testing.assert_array_equal(residual.array, x + delta)
    assert_close(out.f32, naive.rms_norm(x + delta, weight, EPS), "bf16")


def test_a_norm_does_not_depend_on_the_rows_beside_it() -> None:
    x, weight = values(1, 9, 700), Tensor(values(2, 700))
    together = Tensor(np.zeros((9, 700), np.float32))
    kernels.rms_norm[(9,)](together, Tensor(x), weight, EPS, 700, BLOCK=512)
    for i in range(9):
        alone = Tensor(np.zeros((1, 700), np.float32))
        kernels.rms_norm[(1,)](alone, Tensor(x[i:i + 1]), weight, EPS, 700, BLOCK=512)
        np.testing.assert_array_equal(alone.array[0], together.array[i])


class Case:
    """One launch of qk_norm_rope_write_kv over a cache of NaN, against the definition."""

    def __init__(self, head_dim: int, rot_dim: int, interleaved: bool, has_norm: bool,
                 block_size: int, dtype: str, heads: tuple[int, int] = (3, 2)) -> None:
        self.num_q_heads, self.num_kv_heads = heads
        self.head_dim, self.rot_dim, self.dtype = head_dim, rot_dim, dtype
        self.interleaved, self.has_norm, self.block_size = interleaved, has_norm, block_size
        angles = np.arange(40)[:, None] * 100.0 ** (-np.arange(rot_dim // 2) / head_dim)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.norms = values(5, head_dim), values(6, head_dim)
        self.cache_shape = (4, 2, self.num_kv_heads, block_size, head_dim)

    def launch(self, qkv: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> tuple:
        """Queries and cache, as f32."""
        num_tokens, num_heads = qkv.shape[:2]
        q = Tensor(np.zeros((num_tokens, self.num_q_heads, self.head_dim), np.float32), self.dtype)
        cache = Tensor(np.full(self.cache_shape, np.nan, np.float32), self.dtype)
        kernels.qk_norm_rope_write_kv[(num_tokens, num_heads)](
            q, cache, Tensor(qkv), Tensor(self.norms[0]), Tensor(self.norms[1]), Tensor(self.cos),
            Tensor(self.sin), Tensor(positions), Tensor(slots), self.num_q_heads,
            self.num_kv_heads, self.head_dim, self.rot_dim, int(self.interleaved),
            int(self.has_norm), EPS, self.block_size, self.block_size.bit_length() - 1,
            BLOCK_D=256 if self.head_dim > 128 else 128)
        return q.f32, cache.f32

    def check(self) -> None:
        """Five tokens, one of them without a slot; untouched slots stay as they were."""
        positions = np.array([0, 7, 39, 8, 20], np.int32)
        slots = np.array([2, self.block_size * 4 - 1, -1, self.block_size + 1, 0], np.int64)
        qkv = values(7, 5, self.num_q_heads + 2 * self.num_kv_heads, self.head_dim)
        q, cache = self.launch(qkv, positions, slots)
        want = np.full(self.cache_shape, np.nan)
        norms = self.norms if self.has_norm else None
        want_q = naive.qk_norm_rope_write_kv(qkv, self.num_q_heads, want, positions, slots,
                                             self.cos, self.sin, self.interleaved, norms, EPS)
        assert_close(q, want_q, self.dtype)
        assert_close(cache, want, self.dtype)


@pytest.mark.parametrize("head_dim, rot_dim", [
    (16, 16), (64, 64), (80, 20), (80, 32), (128, 64), (256, 256)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_and_cache_write(head_dim: int, rot_dim: int, interleaved: bool,
                              has_norm: bool) -> None:
    Case(head_dim, rot_dim, interleaved, has_norm, 16, "fp32").check()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("block_size", [8, 64])
def test_rope_rounds_to_the_type_of_the_cache(dtype: str, block_size: int) -> None:
    Case(64, 64, False, True, block_size, dtype, heads=(7, 1)).check()


def test_a_token_does_not_depend_on_the_tokens_beside_it() -> None:
    case = Case(64, 32, False, True, 8, "bf16")
    qkv = values(8, 6, 7, 64)
    positions, slots = np.arange(6, dtype=np.int32), np.arange(6, dtype=np.int64)
    q, cache = case.launch(qkv, positions, slots)
    for t in range(6):
        one = slice(t, t + 1)
        alone_q, alone_cache = case.launch(qkv[one], positions[one], slots[one])
        np.testing.assert_array_equal(alone_q[0], q[t])
        np.testing.assert_array_equal(alone_cache[0, :, :, t], cache[0, :, :, t])
