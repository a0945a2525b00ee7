"""The sampling pipeline in Triton's interpreter against the definition in `naive.py`."""

import numpy as np
import pytest
from interpreter import Tensor
from sampling import kernels
from sampling.naive import (GREEDY_BELOW, NOT_A_NUMBER, NOTHING_ALLOWED, OK, Choice, Row, exp, fma,
                            gumbel, kept, ln, philox, sample, scaled)

VOCAB = 151_936

# (seed, position, id), or x, to the bits that `quire_kernels_cpu` answers.
CPU_GUMBEL = {
    (0, 0, 0): 0x3DADB63F,
    (7, 3, 1): 0xBFE145C8,
    (7, 3, 2): 0x4010E3BB,
    (0x123456789AB, 4000, 151_935): 0x3FAEF9B4,
    (2**64 - 1, 131_071, 77_777): 0xBEA03B1D,
    (2**63, 1, 40_003): 0xBDF52B50,
}
CPU_EXP = {
    -0.0: 0x3F800000, -0.5: 0x3F1B4598, -1.0: 0x3EBC5AB2, -1e-7: 0x3F7FFFFE, -3.3: 0x3D1712CE,
    -17.25: 0x330A7A4F, -60.1: 0x141CEF8E, -87.33: 0x0080D71A, -87.4: 0,
}
CPU_LN = {
    1.0: 0, 0.5: 0xBF317218, 0.7071: 0xBEB1735B, 0.7072: 0xBEB160D1, 2e-38: 0xC2AD9C34,
    5.9604645e-8: 0xC1851592, 3.0: 0x3F8C9F54, 16.6355: 0x4033F041, 151_936.0: 0x413EE641,
    0.99999994: 0xB3800000,
}

# (temperature, top_k, top_p, min_p) to the tokens that `quire_engine::sampling::sample_row` draws
# from `cpu_logits(VOCAB)` with `cpu_row(0..4)`.
CPU_TOKENS = {
    (1.0, 0, 1.0, 0.0): [18375, 2853, 121975, 72004],
    (0.7, 50, 1.0, 0.0): [69594, 89600, 124336, 32403],
    (1.3, 0, 0.9, 0.0): [105139, 2853, 121975, 72004],
    (0.9, 200, 0.5, 0.02): [69594, 37435, 124336, 32403],
    (2.0, 0, 1.0, 0.1): [105139, 2853, 87733, 143355],
    (1.0, 3000, 0.99, 0.0): [18375, 20723, 83928, 74855],
    (0.01, 0, 0.999, 0.0): [69594, 139554, 124336, 32403],
}
# The same from `cpu_logits(1000)` with lists and penalties, at positions 0..12.
CPU_EDITED_TOKENS = [8, 614, 6, 169, 8, 186, 8, 856, 6, 124, 6, 122]


def cpu_logits(vocab: int) -> np.ndarray:
    """f32 on 4096 levels from -8 to 8, the same arithmetic as on the CPU's side of the tables."""
    hashed = (np.arange(vocab, dtype=np.uint64) * 2_654_435_761 % 2**32) >> 8
    return (hashed % 4096).astype(np.float32) * np.float32(16 / 4096) - np.float32(8)


def cpu_row(i: int, settings: tuple) -> Row:
    """Row i of a table."""
    seed = 0x9E3779B97F4A7C15 * (i + 1) % 2**64
    return Row(*settings, seed=seed, position=100 * i)


class Lists:
    """Per-row lists, one after the other, with [R, 2] ranges; `None` becomes (-1, -1)."""

    def __init__(self, lists: list, dtype: type = np.int32) -> None:
        flat, ranges = [], []
        for items in lists:
            start = len(flat)
            flat.extend(items or [])
            ranges.append((-1, -1) if items is None else (start, len(flat)))
        self.values = Tensor(np.array(flat or [0], dtype))
        self.ranges = Tensor(np.array(ranges, np.int32))


class Batch:
    """Runs every launch of the pipeline over rows of logits [R, stride], padded past `vocab`."""

    def __init__(self, logits: np.ndarray, rows: list[Row], vocab: int, split: int,
                 block: int) -> None:
        self.rows, self.vocab, self.split, self.block = rows, vocab, split, block
        self.num_rows, self.stride = logits.shape
        self.num_splits = -(-vocab // split)
        self.logits = Tensor(logits.astype(np.float32))
        self.work = Tensor(np.full_like(self.logits.array, np.inf))
        self.temperature = self.param("temperature", np.float32)

    def param(self, name: str, dtype: type) -> Tensor:
        """A [R] array of one field of the rows."""
        return Tensor(np.array([getattr(row, name) for row in self.rows]).astype(dtype))

    def empty(self, dtype: type, *shape: int) -> Tensor:
        """[R, *shape], filled with a value that no kernel writes."""
        return Tensor(np.full((self.num_rows, *shape), 77, dtype))

    def per_split(self, kernel, *args) -> None:
        """A launch of a program per row and split."""
        grid = (self.num_rows, self.num_splits)
        kernel[grid](*args, self.vocab, self.stride, SPLIT=self.split)

    def fold_stats(self, best: Tensor, bad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maximum, its id and status of each row."""
        out = self.empty(np.float32), self.empty(np.int32), self.empty(np.int32)
        kernels.fold_stats[(self.num_rows,)](*out, best, bad, self.num_splits, BLOCK=self.block)
        return out

    def prepare(self) -> None:
        """Raw statistics, and the logits after everything that precedes the temperature."""
        best, bad = self.empty(np.int64, self.num_splits), self.empty(np.int32, self.num_splits)
        allowed = Lists([None if row.allowed is None else sorted(row.allowed) for row in self.rows])
        self.per_split(kernels.prepare_logits, self.work, best, bad, self.logits, allowed.values,
                       allowed.ranges)
        self.raw_max, _, self.raw_status = self.fold_stats(best, bad)
        suppressed = Lists([row.suppressed for row in self.rows])
        bias = Lists([list(row.bias) for row in self.rows])
        values = Lists([list(row.bias.values()) for row in self.rows], np.float32)
        seen = Lists([list(row.seen) for row in self.rows])
        counts = Lists([list(row.seen.values()) for row in self.rows])
        kernels.edit_logits[(self.num_rows,)](
            self.work, suppressed.values, suppressed.ranges, bias.values, values.values,
            bias.ranges, seen.values, counts.values, seen.ranges,
            self.param("repetition_penalty", np.float32),
            self.param("frequency_penalty", np.float32),
            self.param("presence_penalty", np.float32), self.vocab, self.stride, BLOCK=self.block)
        self.per_split(kernels.row_stats, best, bad, self.work)
        self.max, self.argmax, self.status = self.fold_stats(best, bad)

    def cut(self) -> Tensor:
        """Scales the logits; the least key each row keeps."""
        self.per_split(kernels.scale_logits, self.work, self.max, self.temperature,
                       self.param("min_p", np.float32))
        cut = self.empty(np.int32)
        kernels.cut_logits[(self.num_rows,)](
            cut, self.work, self.temperature, self.param("top_k", np.int32),
            self.param("top_p", np.float32), self.vocab, self.stride, BLOCK=self.block)
        return cut

    def choose(self, cut: Tensor) -> tuple[Tensor, Tensor]:
        """Draws; tokens and their statuses."""
        draws = self.empty(np.int64, self.num_splits)
        seeds = Tensor(np.array([row.seed for row in self.rows], np.uint64).view(np.int64))
        self.per_split(kernels.draw_partials, draws, self.work, cut, self.temperature, seeds,
                       self.param("position", np.int32))
        given = Tensor(np.array([-1 if r.given is None else r.given for r in self.rows], np.int32))
        token, status = self.empty(np.int32), self.empty(np.int32)
        kernels.choose_tokens[(self.num_rows,)](
            token, status, draws, self.raw_status, self.argmax, self.status, self.temperature,
            given, self.num_splits, BLOCK=self.block)
        return token, status

    def logprobs(self, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ln p of the token; ids and ln p of the best ones."""
        wanted = [-1 if row.num_top is None else row.num_top for row in self.rows]
        max_top, num_top = max(1, *wanted), Tensor(np.array(wanted, np.int32))
        sums = self.empty(np.int64, self.num_splits)
        self.per_split(kernels.sum_exp, sums, self.logits, self.raw_max)
        top = self.empty(np.int64, self.num_splits, max_top)
        self.per_split(kernels.top_partials, top, self.logits, num_top, max_top)
        out = self.empty(np.float32), self.empty(np.int32, max_top), self.empty(np.float32, max_top)
        kernels.fold_logprobs[(self.num_rows,)](
            *out, self.logits, token, self.raw_max, sums, top, num_top, max_top, self.num_splits,
            self.vocab, self.stride, BLOCK=self.block)
        return out

    def run(self) -> list[Choice]:
        """The whole pipeline."""
        self.prepare()
        token, status = self.choose(self.cut())
        choices = [Choice(int(s), int(t)) for s, t in zip(status.array, token.array)]
        logprob, ids, values = self.logprobs(token)
        for i, (row, choice) in enumerate(zip(self.rows, choices)):
            if row.num_top is not None and choice.status == OK:
                choice.logprob = float(logprob.array[i])
                best = zip(ids.array[i, :row.num_top], values.array[i, :row.num_top])
                choice.top = [(int(t), float(lp)) for t, lp in best]
        return choices


def batch(logits: np.ndarray, rows: list[Row], split: int = 256, block: int = 128) -> Batch:
    """Rows with padding columns that must not be read: NaN."""
    padded = np.full((len(rows), -(-logits.shape[-1] // 16) * 16 + 16), np.nan, np.float32)
    padded[:, :logits.shape[-1]] = logits
    return Batch(padded, rows, logits.shape[-1], split, block)


def assert_choices(got: list[Choice], logits: np.ndarray, rows: list[Row]) -> None:
    """Status, token and ids of the best exactly; log-probabilities to 3e-6."""
    for i, (choice, x, row) in enumerate(zip(got, logits, rows)):
        want = sample(x, row)
        assert (choice.status, choice.token) == (want.status, want.token), f"row {i}: {row}"
        assert [t for t, _ in choice.top] == [t for t, _ in want.top], f"row {i}"
        if want.logprob is not None:
            values = [choice.logprob, *[lp for _, lp in choice.top]]
            wanted = [want.logprob, *[lp for _, lp in want.top]]
            np.testing.assert_allclose(values, wanted, rtol=3e-6, atol=3e-6)


def test_fma_rounds_once() -> None:
    # In f64 the sum lies half way between two f32, and what tips it is below its last bit.
    x, one = np.float32(1 + 2**-12), np.float32(1)
    z = np.float32(2**-60)
    assert fma(x, np.float32(1 + 2**-12), z) == np.float32(1 + 2**-11 + 2**-23)
    assert fma(x, x, -z) == np.float32(1 + 2**-11)
    assert fma(one, one, one) == 2


def test_philox_known_answers() -> None:
    """Published with the Random123 library."""
    words = philox(0x299F31D0A4093822, [np.array(c) for c in
                                        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)])
    assert [int(w) for w in words] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_the_definition_has_the_bits_of_the_cpu() -> None:
    """The answers of `quire_kernels_cpu`'s `gumbel`, `vecmath::exp` and `vecmath::ln`."""
    for (seed, position, token), bits in CPU_GUMBEL.items():
        assert gumbel(seed, position, np.array([token]))[0].view(np.uint32) == bits
    for x, bits in CPU_EXP.items():
        assert exp(np.array([x], np.float32))[0].view(np.uint32) == bits
    for x, bits in CPU_LN.items():
        assert ln(np.array([x], np.float32))[0].view(np.uint32) == bits


def filters(rng: np.random.Generator, n: int) -> list[Row]:
    """Rows with every filter on or off."""
    return [Row(temperature=float(rng.choice([0.5, 1.0, 2.0])),
                top_k=int(rng.choice([0, 1, 5, 40, 5000])),
                top_p=float(rng.choice([1.0, 0.95, 0.5, 0.05, 0.0])),
                min_p=float(rng.choice([0.0, 0.0, 0.02, 0.5, 1.0])),
                seed=int(rng.integers(2**64, dtype=np.uint64)), position=i) for i in range(n)]


def assert_kept(run: Batch, x: np.ndarray) -> Tensor:
    """Scaled logits and kept sets are those of the definition; the cuts."""
    run.prepare()
    cut = run.cut()
    vocab = x.shape[1]
    for i, row in enumerate(run.rows):
        y = scaled(x[i], row)
        np.testing.assert_array_equal(run.work.array[i, :vocab], y)
        bits = (y + np.float32(0)).view(np.int32)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        got = np.flatnonzero((y > -np.inf) & (keys >= cut.array[i]))
        assert got.tolist() == np.sort(kept(y, row)).tolist(), row
    return cut


@pytest.mark.parametrize("levels", [4, 60, 2**20])
@pytest.mark.parametrize("scale", [0.5, 8.0])
def test_kept_sets_and_tokens_equal_the_sort(levels: int, scale: float) -> None:
    """Few levels make ties; many make long tails."""
    rng = np.random.default_rng(levels)
    rows = filters(rng, 8)
    x = (rng.integers(0, levels, (8, 700)) / levels * scale).astype(np.float32)
    x[:, 17] = -np.inf
    run = batch(x, rows, block=512)
    token, _ = run.choose(assert_kept(run, x))
    assert token.array.tolist() == [sample(xi, row).token for xi, row in zip(x, rows)]


def test_cuts_between_neighbouring_floats() -> None:
    """Every key of a range is there, so that pivots meet keys and bounds are met exactly."""
    steps = np.random.default_rng(3).permutation(90).astype(np.int32)
    x = -(np.full(90, 2.0, np.float32).view(np.int32) + steps).view(np.float32)
    x[0] = 0.0
    rows = [Row(top_k=k) for k in (1, 2, 3, 5, 17, 44, 66, 88, 89, 90, 91)]
    rows += [Row(top_p=p) for p in (0.2, 0.4, 0.7, 0.99)]
    x = np.stack([x] * len(rows))
    assert_kept(batch(x, rows, block=64), x)


def test_the_mass_to_keep_is_not_rounded_to_f32() -> None:
    """Half of the mass is just more than the first token's, by what an f32 would not show."""
    below_zero = -np.float32(2**-30)
    x = np.array([[0.0, below_zero, -20.0]], np.float32)
    rows = [Row(top_p=0.5)]
    assert kept(scaled(x[0], rows[0]), rows[0]).tolist() == [0, 1]
    assert_kept(batch(x, rows), x)


@pytest.mark.filterwarnings("ignore:invalid value")  # rows that are refused are still computed
def test_edits_and_refusals() -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(0, 3, (10, 300)).astype(np.float32)
    x[1, 3], x[2, 9], x[3] = np.nan, np.inf, -np.inf
    everything = dict(allowed=list(range(0, 300, 2)), suppressed=[4, 6, 299, 1000],
                      bias={4: 100.0, 8: -1.5, 10: 2.25},
                      seen={4: 1, 8: 0, 10: 3, 12: 1, 150: 2, 999: 1},
                      repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.25)
    rows = [Row(**everything, seed=3, num_top=4), Row(allowed=[5]), Row(suppressed=[9]), Row(),
            Row(suppressed=list(range(300)), seen={7: 1}, repetition_penalty=1.5), Row(allowed=[]),
            Row(temperature=0.0, num_top=0), Row(given=17, num_top=2, suppressed=list(range(300))),
            Row(given=302, num_top=1),
            Row(seen={7: 0, 8: 0}, repetition_penalty=1e-38, suppressed=[7])]
    got = batch(x, rows).run()
    assert_choices(got, x, rows)
    assert [c.status for c in got[1:6]] == [NOT_A_NUMBER, NOT_A_NUMBER] + 3 * [NOTHING_ALLOWED]


def test_maxima_and_draws_break_ties_by_the_lower_id() -> None:
    x = np.zeros((3, 600), np.float32)
    x[0, [400, 30, 599]] = 2.0
    x[1, [0, 3]] = 0.0, -0.0
    rows = [Row(temperature=0.0, num_top=3), Row(temperature=GREEDY_BELOW / 2, num_top=2),
            Row(top_k=1, num_top=1)]
    got = batch(x, rows).run()
    assert [got[0].token, got[1].token] == [30, 0]
    assert [t for t, _ in got[0].top] == [30, 400, 599]
    assert_choices(got, x, rows)


def test_a_row_does_not_depend_on_its_batch_or_on_the_splits() -> None:
    rng = np.random.default_rng(11)
    x = rng.normal(0, 4, (3, 900)).astype(np.float32)
    rows = filters(rng, 3)
    for row in rows:
        row.num_top = 6
    together = batch(x, rows).run()
    for i, row in enumerate(rows):
        for split, block in [(256, 128), (1024, 64)]:
            assert batch(x[i:i + 1], [row], split, block).run() == [together[i]]


def test_tokens_over_a_whole_vocabulary_are_those_of_the_cpu() -> None:
    x = cpu_logits(VOCAB)
    for settings, tokens in CPU_TOKENS.items():
        assert [sample(x, cpu_row(i, settings)).token for i in range(4)] == tokens, settings
    # The first settings have all filters between them.
    rows = [cpu_row(i, settings) for i, settings in enumerate(CPU_TOKENS)][:4]
    got = batch(np.stack([x] * len(rows)), rows, split=4096, block=4096).run()
    assert [c.token for c in got] == [t[i] for i, t in zip(range(4), CPU_TOKENS.values())]


def test_edited_tokens_are_those_of_the_cpu() -> None:
    rows = [Row(temperature=1.5 if i < 10 else 0.0, seed=5, position=i, top_p=0.8,
                allowed=[3, 5, 6, 7, 8, 9, 10, 100, 200, 300, 999] if i % 2 == 0 else None,
                suppressed=[7, 999], bias={5: 2.5, 100: -1.0, 300: -3.25},
                seen={5: 2, 9: 0, 10: 1, 200: 3}, repetition_penalty=1.2,
                frequency_penalty=0.3, presence_penalty=0.4) for i in range(12)]
    x = np.stack([cpu_logits(1000)] * len(rows))
    assert [sample(xi, row).token for xi, row in zip(x, rows)] == CPU_EDITED_TOKENS
    got = batch(x, rows, split=1024, block=1024).run()
    assert [c.token for c in got] == CPU_EDITED_TOKENS


def test_logprobs_over_a_whole_vocabulary() -> None:
    x = np.random.default_rng(2).normal(0, 3, (2, VOCAB)).astype(np.float32)
    x[1] = np.round(x[1], 1)  # thousands of ties
    rows = [Row(temperature=0.0, num_top=20), Row(given=VOCAB - 1, num_top=5)]
    assert_choices(batch(x, rows, split=4096, block=4096).run(), x, rows)
