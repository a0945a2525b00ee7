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


def persistent_table() -> dict[str, np.ndarray]:
    """Four sequences' entries; blocks 0 to 3 of 16 tokens, the last sequence's first one freed."""
    return {
        "num_computed": np.array([0, 17, 40, 33], np.int32),
        "last_tokens": np.array([11, 12, 13, 14], np.int32),
        "block_tables": np.array([[5, -1, -1, -1], [9, 2, -1, -1], [1, 7, 8, 4], [-1, 3, 6, -1]],
                                 np.int32),
    }


def test_prepare_inputs() -> None:
    table = persistent_table()
    step = {
        "entries": np.array([2, 0, 3], np.int32),
        "query_start_loc": np.array([0, 1, 12, 30], np.int32),
        "token_ids": np.arange(100, 130, dtype=np.int32),
    }
    step["token_ids"][[0, 12]] = naive.LAST_SAMPLED
    want = naive.prepare_inputs(step, table, 16)
    token_ids = Tensor(step["token_ids"])
    positions, slots = Tensor(np.zeros(30, np.int32)), Tensor(np.full(30, 99, np.int64))
    seq_lens = Tensor(np.zeros(3, np.int32))
    kernels.prepare_inputs[(3, 3)](
        token_ids, positions, slots, seq_lens, Tensor(step["query_start_loc"]),
        Tensor(step["entries"]), *map(Tensor, table.values()), 4, 4, BLOCK=8)
    got = {"token_ids": token_ids, "positions": positions, "slot_mapping": slots,
           "seq_lens": seq_lens}
    for name, values in want.items():
        assert np.array_equal(got[name].array, values), name
    assert got["slot_mapping"].array[-1] == -1  # position 50 lies in a block that is not there


def test_commit_step() -> None:
    table = persistent_table()
    computed, last = Tensor(table["num_computed"]), Tensor(table["last_tokens"])
    kernels.commit_step[(2,)](
        computed, last, Tensor(np.array([0, 1, 12, 30], np.int32)),
        Tensor(np.array([2, 0, 3], np.int32)), Tensor(np.array([77, 88], np.int32)),
        Tensor(np.array([1, -1, 0], np.int32)), 3, BLOCK=2)
    assert computed.array.tolist() == [11, 17, 41, 51]
    assert last.array.tolist() == [11, 12, 88, 77]
