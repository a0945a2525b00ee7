"""The data movers in Triton's interpreter against `naive`: exact."""

import numpy as np
import pytest

from interpreter import Tensor
from memory import kernels, naive

RNG = np.random.default_rng(0)


def words(*shape: int) -> np.ndarray:
    """Random 32-bit words."""
    return RNG.integers(-2**31, 2**31, shape, np.int32)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_embed(dtype: str) -> None:
    table = Tensor(RNG.standard_normal((10, 48)), dtype)
    ids = np.array([3, 9, 0, 3, 10, -1], np.int32)
    out = Tensor(np.full((6, 48), np.nan, np.float32))
    kernels.embed[(6, 2)](out, table, Tensor(ids), 48, 10, BLOCK=32)
    assert np.array_equal(out.array, naive.take_rows(table.f32, ids))


def test_gather_rows() -> None:
    table, rows = words(7, 48), np.array([6, 0, -1, 7, 2], np.int32)
    out = Tensor(words(5, 48))
    kernels.gather_rows[(5, 2)](out, Tensor(table), Tensor(rows), 48, 7, BLOCK=32)
    assert np.array_equal(out.array, naive.take_rows(table, rows))


def test_copy_blocks() -> None:
    cache = words(3, 9, 48)
    pairs = np.array([[4, 0], [4, 7], [8, 2]], np.int32)
    want = cache.copy()
    want[:, pairs[:, 1]] = cache[:, pairs[:, 0]]
    got = Tensor(cache)
    kernels.copy_blocks[(3, 2, 3)](got, Tensor(pairs), 9, 48, BLOCK=32)
    assert np.array_equal(got.array, want)


def test_swap_out_and_in() -> None:
    cache, blocks = words(2, 9, 48), np.array([5, 0, 8], np.int32)
    staging = Tensor(words(3, 2, 48))
    kernels.swap_out[(3, 2, 2)](staging, Tensor(cache), Tensor(blocks), 9, 48, BLOCK=32)
    assert np.array_equal(staging.array, cache[:, blocks].swapaxes(0, 1))
    target, other = words(2, 9, 48), np.array([1, 2, 6], np.int32)
    want = target.copy()
    want[:, other] = cache[:, blocks]
    got = Tensor(target)
    kernels.swap_in[(3, 2, 2)](got, staging, Tensor(other), 9, 48, BLOCK=32)
    assert np.array_equal(got.array, want)


@pytest.mark.parametrize("num_patches", [1, 7, 8, 19])
def test_patch_tokens(num_patches: int) -> None:
    ids, sampled = words(30), words(9)
    # Longer than num_patches, as reused arrays are; a row may be taken twice, a place may not.
    places = RNG.permutation(30)[:20].astype(np.int32)
    rows = RNG.integers(0, 9, 20, np.int32)
    got = Tensor(ids)
    kernels.patch_tokens[(-(-num_patches // 8),)](
        got, Tensor(sampled), Tensor(places), Tensor(rows), num_patches, BLOCK=8)
    want = naive.patch_tokens(ids, sampled, places[:num_patches], rows[:num_patches])
    assert np.array_equal(got.array, want)
