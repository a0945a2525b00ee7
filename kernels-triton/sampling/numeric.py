"""The arithmetic of sampling, on vectors: exp and ln, Gumbel noise, order keys and ranks.

`exp` and `ln` are defined by their operations (fma, mul, add and bit moves, each correctly
rounded, in this order), so that the CPU computes the same bits; the polynomials are those of
Cephes `expf` and `logf`. A *rank* packs a value and an id into an i64 that orders by value, then
by lower id.
"""

import triton
import triton.language as tl

# Adding and subtracting it rounds to an integer: 1.5 * 2^23.
ROUND_MAGIC = tl.constexpr(12582912.0)
LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts; the product of the first with an exponent is exact.
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.1219444e-4)
# Below this e^x is not a normal number.
EXP_MIN = tl.constexpr(-87.33654)
# Bits of sqrt(1/2).
SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)

# A rank below that of every number.
NO_RANK = tl.constexpr(-0x7FFFFFFFFFFFFFFF - 1)
MAX_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _power_of_two(b_n):
    """2^n for integers in [-126, 127]."""
    return ((b_n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp(b_x):
    """e^x for x <= 0, within 2 ulp; 0 where the result would be denormal."""
    b_c = tl.where(b_x < EXP_MIN, EXP_MIN, b_x)
    b_n = (b_c * LOG2_E + ROUND_MAGIC) - ROUND_MAGIC
    b_r = tl.fma(b_n, -LN2_LOW, tl.fma(b_n, -LN2_HIGH, b_c))
    b_p = tl.fma(b_r, 1.9875691e-4, 1.3981999e-3)
    b_p = tl.fma(b_p, b_r, 8.333452e-3)
    b_p = tl.fma(b_p, b_r, 4.1665796e-2)
    b_p = tl.fma(b_p, b_r, 1.6666665e-1)
    b_p = tl.fma(b_p, b_r, 0.5)
    b_y = tl.fma(b_p * b_r, b_r, b_r) + 1.0
    # In two steps, so that the factors stay normal.
    b_i = b_n.to(tl.int32)
    b_half = b_i >> 1
    b_y = b_y * _power_of_two(b_half) * _power_of_two(b_i - b_half)
    return tl.where(b_x < EXP_MIN, 0.0, b_y)


@triton.jit
def ln(b_x):
    """ln x of a positive normal number, within 2 ulp."""
    # m in [sqrt(1/2), sqrt(2)): subtracting the bits of sqrt(1/2) carries into the exponent.
    b_offset = b_x.to(tl.int32, bitcast=True) - SQRT_HALF_BITS
    b_e = (b_offset >> 23).to(tl.float32)
    b_m = ((b_offset & 0x7FFFFF) + SQRT_HALF_BITS).to(tl.float32, bitcast=True)
    b_f = b_m - 1.0
    b_p = tl.fma(b_f, 7.0376836e-2, -1.151461e-1)
    b_p = tl.fma(b_p, b_f, 1.1676999e-1)
    b_p = tl.fma(b_p, b_f, -1.2420141e-1)
    b_p = tl.fma(b_p, b_f, 1.4249323e-1)
    b_p = tl.fma(b_p, b_f, -1.6668058e-1)
    b_p = tl.fma(b_p, b_f, 2.0000715e-1)
    b_p = tl.fma(b_p, b_f, -2.4999994e-1)
    b_p = tl.fma(b_p, b_f, 3.333333e-1)
    b_square = b_f * b_f
    b_low = tl.fma(b_e, LN2_LOW, b_f * b_square * b_p)
    return tl.fma(b_e, LN2_HIGH, tl.fma(b_square, -0.5, b_low) + b_f)


@triton.jit
def gumbel(b_word):
    """-ln(-ln u) of random words, u = (floor(w / 2^9) + 1/2) / 2^23 inside (0, 1)."""
    b_u = ((b_word >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -ln(-ln(b_u))


@triton.jit
def order_key(b_x):
    """An i32 that orders like the float (no NaN; -0 counts as +0)."""
    b_bits = (b_x + 0.0).to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def rank_of(b_x, b_id):
    """Orders by value, then by lower id."""
    return (order_key(b_x).to(tl.int64) << 32) | (b_id ^ MAX_ID).to(tl.int64)


@triton.jit
def rank_id(b_rank):
    return (b_rank & 0xFFFFFFFF).to(tl.int32) ^ MAX_ID


@triton.jit
def rank_value(b_rank):
    b_key = (b_rank >> 32).to(tl.int32)
    return (b_key ^ ((b_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
