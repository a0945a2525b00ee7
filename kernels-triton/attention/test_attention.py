"""The attention kernels in Triton's interpreter: against `naive`, and each other bit for bit."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import triton

from attention import kernels, naive
from interpreter import Tensor

SPLIT = 256
ALL_KEYS = 2**31 - 1
TOLERANCE = {"fp32": 2e-5, "fp16": 3e-3, "bf16": 2e-2}
# Launch shapes of the tests: small tiles, so that few rows and keys cross every boundary.
BLOCK_M, TILE = 16, 32


@dataclass
class Case:
    """A ragged batch over a pool of blocks in random order; what no sequence owns is NaN."""

    queries: list[int]  # new rows of each sequence
    lengths: list[int]  # keys of each sequence, the new rows' included
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 64
    block_size: int = 16
    dtype: str = "bf16"
    window: int | None = None
    softcap: float = 0.0
    seed: int = 0
    starts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        counts = [-(-length // self.block_size) for length in self.lengths]
        num_blocks = sum(counts) + 3
        self.tables = np.full((len(counts), max(counts) + 2), -1, np.int32)
        order = iter(rng.permutation(num_blocks))
        shape = (num_blocks, 2, self.kv_heads, self.block_size, self.head_dim)
        cache = np.full(shape, np.nan, np.float32)
        for seq, count in enumerate(counts):
            for i in range(count):
                self.tables[seq, i] = block = next(order)
                used = min(self.block_size, self.lengths[seq] - i * self.block_size)
                rows = (2, self.kv_heads, used, self.head_dim)
                cache[block, :, :, :used] = rng.standard_normal(rows)
        self.starts = np.concatenate([[0], np.cumsum(self.queries)]).astype(np.int32)
        heads = self.kv_heads * self.group
        self.cache = Tensor(cache, self.dtype)
        self.q = Tensor(rng.standard_normal((self.starts[-1], heads, self.head_dim)), self.dtype)
        self.scale = self.head_dim**-0.5

    def free_out_of_window(self) -> None:
        """Clears the table's entries for blocks that no new row sees."""
        for seq, (query, length) in enumerate(zip(self.queries, self.lengths)):
            first_key = max(0, length - query + 1 - self.window)
            self.tables[seq, :first_key // self.block_size] = -1

    def expected(self) -> np.ndarray:
        """`naive` on the values after rounding."""
        return naive.attention(self.q.f32, self.cache.f32, self.tables, self.starts, self.lengths,
                               self.scale, self.softcap, self.window)

    def common(self) -> list:
        """Arguments from q_stride to window."""
        stride = self.q.shape[1] * self.head_dim
        return [stride, stride, self.tables.shape[1], self.kv_heads, self.group, self.head_dim,
                self.block_size.bit_length() - 1, self.scale, self.softcap, self.window or ALL_KEYS]

    def constants(self) -> dict:
        """The constants of a variant that fits."""
        width = triton.next_power_of_2(self.head_dim)
        return dict(HEAD_DIM=width, PADDED=width != self.head_dim, BLOCK_M=BLOCK_M,
                    BLOCK_V=min(width, 128), TILE=TILE, SPLIT=SPLIT)

    def out(self) -> Tensor:
        """NaN, so that a row left out shows."""
        return Tensor(np.full(self.q.shape, np.nan, np.float32), self.dtype)

    def prefill(self) -> Tensor:
        """All rows by `prefill_attention`."""
        rows = BLOCK_M // self.group
        tiles = [(seq, start) for seq, query in enumerate(self.queries)
                 for start in range(0, query, rows)]
        seqs, starts = np.array(tiles, np.int32).T
        constants, out = self.constants(), self.out()
        grid = (len(tiles), self.kv_heads, constants["HEAD_DIM"] // constants["BLOCK_V"])
        kernels.prefill_attention[grid](
            out, self.q, self.cache, Tensor(self.tables), Tensor(seqs), Tensor(starts),
            Tensor(self.starts), Tensor(np.array(self.lengths, np.int32)), *self.common(),
            **constants)
        return out

    def decode(self, num_splits: int | None = None) -> Tensor:
        """The rows of sequences with one new row by `decode_attention` and `fold_splits`."""
        num_splits = num_splits or -(-max(self.lengths) // SPLIT)
        seqs, heads = len(self.queries), self.q.shape[1]
        state = [Tensor(np.full((seqs, num_splits, heads), np.nan, np.float32)) for _ in range(2)]
        acc = Tensor(np.full((seqs, num_splits, heads, self.head_dim), np.nan, np.float32))
        constants, out = self.constants(), self.out()
        lengths = Tensor(np.array(self.lengths, np.int32))
        starts, common = Tensor(self.starts), self.common()
        head_tiles = -(-self.group // BLOCK_M) * (constants["HEAD_DIM"] // constants["BLOCK_V"])
        kernels.decode_attention[(seqs, self.kv_heads * head_tiles, num_splits)](
            out, *state, acc, self.q, self.cache, Tensor(self.tables), starts, lengths, *common,
            **constants)
        if num_splits > 1:
            kernels.fold_splits[(seqs, heads, -(-self.head_dim // 64))](
                out, *state, acc, starts, lengths, common[1], heads, self.head_dim, num_splits,
                self.window or ALL_KEYS, BLOCK_D=64, SPLIT=SPLIT)
        return out

    def alone(self, seq: int) -> np.ndarray:
        """The rows of one sequence, computed without its mates: bits."""
        rows = slice(self.starts[seq], self.starts[seq + 1])
        single = Case([self.queries[seq]], [self.lengths[seq]], self.kv_heads, self.group,
                      self.head_dim, self.block_size, self.dtype, self.window, self.softcap)
        single.cache, single.tables = self.cache, self.tables[seq:seq + 1]
        single.q = Tensor(self.q.array[rows], self.dtype)
        return single.prefill().array


def close(got: Tensor, want: np.ndarray, dtype: str) -> None:
    """Absolute error against the magnitude of the values, which is about 1."""
    error = np.abs(got.f32 - want)
    where = np.unravel_index(error.argmax(), error.shape)
    assert error.max() <= TOLERANCE[dtype], f"error {error.max()} at row, head, dim {where}"


@pytest.mark.parametrize("case", [
    Case([5, 1, 9], [37, 50, 9]),
    Case([5, 1, 9], [37, 50, 9], dtype="fp16", head_dim=80, group=3),
    Case([5, 1, 9], [37, 50, 9], dtype="fp32", head_dim=16, group=8),
    Case([3, 2], [300, 2], head_dim=128, group=7, block_size=8),
    Case([2, 1], [258, 257], head_dim=256, group=1, block_size=64),
    Case([4], [513], head_dim=96, group=4, block_size=128),
    Case([4, 4], [600, 4], softcap=5.0, block_size=32, dtype="fp32"),
], ids=str)
def test_prefill(case: Case) -> None:
    close(case.prefill(), case.expected(), case.dtype)


@pytest.mark.parametrize("case", [
    *[Case([1, 1], [length, 1]) for length in (1, 15, 16, 17, 255, 256, 257)],
    Case([1, 1, 1], [600, 3, 256], dtype="fp16", head_dim=80, group=7, block_size=8),
    Case([1], [300], dtype="fp32", head_dim=32, group=20),
    Case([1, 1], [258, 511], head_dim=256, group=1, block_size=64),
    Case([1], [4096], kv_heads=1, group=8, block_size=128),
    Case([1, 1], [300, 20], softcap=5.0, group=3),
], ids=str)
def test_decode(case: Case) -> None:
    close(case.decode(), case.expected(), case.dtype)


@pytest.mark.parametrize("window", [1, 7, 64, 300])
def test_window(window: int) -> None:
    """Narrower than a tile and wider than a split; blocks out of every window are gone."""
    case = Case([5, 1, 40], [37, 570, 560], window=window, dtype="fp32", head_dim=32, group=2)
    want = case.expected()
    case.free_out_of_window()
    close(case.prefill(), want, "fp32")
    single = Case([1, 1], [37, 570], window=window, dtype="fp32", head_dim=32, group=2)
    want = single.expected()
    single.free_out_of_window()
    close(single.decode(), want, "fp32")


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_decode_has_prefills_bits(dtype: str, window: int | None) -> None:
    """Alone or batched, split or not, by decode or as rows of prefill: the same bits."""
    case = Case([1, 1, 1, 1], [600, 20, 256, 257], dtype=dtype, window=window, head_dim=32, group=3)
    prefill, decode = case.prefill(), case.decode()
    assert np.array_equal(prefill.array, decode.array)
    assert np.array_equal(decode.array, case.decode(num_splits=5).array)
    for seq in range(4):
        assert np.array_equal(prefill.array[seq:seq + 1], case.alone(seq))


def test_chunking_changes_no_bit() -> None:
    """The last rows of a prompt, computed with the rows before them or in a chunk of their own."""
    whole = Case([70], [300], head_dim=32, group=3)
    rows = whole.prefill().array
    chunk = Case([5], [300], head_dim=32, group=3)
    chunk.cache, chunk.tables = whole.cache, whole.tables
    chunk.q = Tensor(whole.q.array[65:], "bf16")
    assert np.array_equal(chunk.prefill().array, rows[65:])


def test_mixed_batch_leaves_other_rows_alone() -> None:
    """Decode kernels write the rows of sequences with one new row and no other."""
    case = Case([1, 6, 1], [300, 280, 5])
    out = case.decode().f32
    want = case.expected()
    assert np.isnan(out[1:7]).all()
    close(Tensor(out[[0, 7]]), want[[0, 7]], "bf16")
