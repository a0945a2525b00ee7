"""The sampler by its definition: full sorts, one row at a time, exact arithmetic in numpy.

`exp` and `ln` round after every operation as the kernels do, because draws and cuts must agree bit
for bit; everything else is what a textbook would write.
"""

from dataclasses import dataclass, field

import numpy as np

F = np.float32
MASS_ONE = F(2.0**40)
GREEDY_BELOW = 1e-5
OK, NOT_A_NUMBER, NOTHING_ALLOWED = 0, 1, 2


@dataclass
class Row:
    """What is asked of one row; the defaults draw from the plain softmax."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    position: int = 0
    given: int | None = None
    num_top: int | None = None
    allowed: list[int] | None = None
    suppressed: list[int] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    # Token id to its count in the output; 0 where it is only in the prompt.
    seen: dict[int, int] = field(default_factory=dict)


@dataclass
class Choice:
    """The outcome of a row: `token` counts where `status` is OK."""

    status: int
    token: int = 0
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of f32, rounded once: the sum in f64, made odd where inexact, then rounded."""
    product = np.float64(x) * np.float64(y)  # exact
    z = np.float64(z)
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)
    bits = total.view(np.int64)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & (bits & 1 == 0)
    return np.where(inexact, bits + toward, bits).view(np.float64).astype(F)


def exp(x: np.ndarray) -> np.ndarray:
    """e^x of f32 values <= 0, as the CPU and the kernels define it."""
    low = F(-87.33654)
    c = np.maximum(x, low)
    magic = F(12582912.0)
    n = (c * F(1.4426950408889634) + magic) - magic
    r = fma(n, F(2.1219444e-4), fma(n, F(-0.693359375), c))
    p = np.full_like(r, F(1.9875691e-4))
    for coefficient in (1.3981999e-3, 8.333452e-3, 4.1665796e-2, 1.6666665e-1, 0.5):
        p = fma(p, r, F(coefficient))
    y = np.ldexp(fma(p * r, r, r) + F(1), n.astype(np.int32))
    return np.where(x < low, F(0), y).astype(F)


def ln(x: np.ndarray) -> np.ndarray:
    """ln x of positive normal f32 values, as the CPU and the kernels define it."""
    mantissa, exponent = np.frexp(x)  # in [1/2, 1)
    is_small = mantissa < F(np.sqrt(0.5))
    f = np.where(is_small, mantissa * F(2), mantissa) - F(1)
    e = (exponent - is_small).astype(F)
    p = np.full_like(f, F(7.0376836e-2))
    for coefficient in (-1.151461e-1, 1.1676999e-1, -1.2420141e-1, 1.4249323e-1,
                        -1.6668058e-1, 2.0000715e-1, -2.4999994e-1, 3.333333e-1):
        p = fma(p, f, F(coefficient))
    square = f * f
    tail = fma(e, F(-2.1219444e-4), f * square * p)
    return fma(e, F(0.693359375), fma(square, F(-0.5), tail) + f)


def philox(key: int, counter: list[np.ndarray]) -> list[np.ndarray]:
    """Philox4x32-10 (Salmon et al., 2011): four words for a 64-bit key and four counter words."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [np.asarray(word, np.uint64) for word in counter]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> shift) ^ c[1] ^ np.uint64(k[0]), p1 & mask,
             (p0 >> shift) ^ c[3] ^ np.uint64(k[1]), p0 & mask]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return [word.astype(np.uint32) for word in c]


def gumbel(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """-ln(-ln u) of each id: word id mod 4 of counter (id / 4, position, 0, 0)."""
    zero = np.zeros_like(ids)
    words = np.stack(philox(seed, [ids // 4, zero + position, zero, zero]))
    word = np.take_along_axis(words, (ids % 4)[None, :], axis=0)[0]
    u = ((word >> np.uint32(9)).astype(F) + F(0.5)) * F(2.0**-23)
    return -ln(-ln(u))


def mass(x: np.ndarray) -> np.ndarray:
    """exp(x) in units of 2^-40."""
    return (exp(x) * MASS_ONE).astype(np.int64)


def status_of(logits: np.ndarray) -> int:
    """Whether a token can be chosen."""
    if np.isnan(logits).any() or (logits == np.inf).any():
        return NOT_A_NUMBER
    return OK if (logits > -np.inf).any() else NOTHING_ALLOWED


def edited(logits: np.ndarray, row: Row) -> np.ndarray:
    """Allowed ids, suppressed ids, bias, penalties, in this order."""
    x = logits.copy()
    if row.allowed is not None:
        x[np.setdiff1d(np.arange(len(x)), row.allowed)] = -np.inf
    x[[i for i in row.suppressed if i < len(x)]] = -np.inf
    for i, bias in row.bias.items():
        x[i] += F(bias)
    for i, count in row.seen.items():
        if i >= len(x):
            continue
        r = F(row.repetition_penalty)
        if x[i] > -np.inf:
            with np.errstate(over="ignore"):
                y = x[i] / r if x[i] > 0 else x[i] * r
            x[i] = np.clip(y, np.finfo(F).min, np.finfo(F).max)
        if count > 0:
            x[i] -= F(row.frequency_penalty) * F(count) + F(row.presence_penalty)
    return x


def scaled(x: np.ndarray, row: Row) -> np.ndarray:
    """(x - max) / temperature; -inf below min_p times the most likely token."""
    y = (x - x.max()) / F(row.temperature)
    return np.where(exp(y) >= F(row.min_p), y, F(-np.inf))


def kept(x: np.ndarray, row: Row) -> np.ndarray:
    """Ids that pass top-k, then top-p, of scaled logits: most likely first, by a full sort."""
    ids = np.flatnonzero(x > -np.inf)
    ids = ids[np.argsort(-x[ids], kind="stable")]
    if 0 < row.top_k < len(ids):
        ids = ids[x[ids] >= x[ids[row.top_k - 1]]]
    if row.top_p < 1:
        sums = np.cumsum(mass(x[ids]))
        target = int(np.ceil(np.float64(F(row.top_p)) * np.float64(sums[-1])))
        last = np.searchsorted(sums, target)
        ids = ids[x[ids] >= x[ids[last]]]
    return ids


def token_of(x: np.ndarray, row: Row) -> int:
    """The token of edited logits: the lowest id of the maximum, or a draw by the Gumbel trick."""
    if row.temperature < GREEDY_BELOW:
        return int(np.argmax(x))
    y = scaled(x, row)
    ids = np.sort(kept(y, row))
    return int(ids[np.argmax(y[ids] + gumbel(row.seed, row.position, ids))])


def logprobs(logits: np.ndarray, token: int, n: int) -> tuple[float, list[tuple[int, float]]]:
    """ln p of `token` and of the n best, equal ones by id, under the raw logits; f64."""
    x = logits.astype(np.float64)
    lp = x - x.max() - np.log(np.exp(x - x.max()).sum())
    best = np.argsort(-x, kind="stable")[:n]
    return lp[token] if token < len(x) else -np.inf, [(int(i), lp[i]) for i in best]


def sample(logits: np.ndarray, row: Row) -> Choice:
    """Chooses the token of one row of f32 logits, padding cut off."""
    status = status_of(logits)
    if status == OK and row.given is None:
        x = edited(logits, row)
        status = status_of(x)
    if status != OK:
        return Choice(status)
    choice = Choice(OK, token_of(x, row) if row.given is None else row.given)
    if row.num_top is not None:
        choice.logprob, choice.top = logprobs(logits, choice.token, row.num_top)
    return choice
