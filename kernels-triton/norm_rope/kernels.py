"""RMS norm, and what lies between the QKV projection and attention.

One program works on one row or one head, so that no result depends on what else is in the batch.
Inputs are f32 (residual stream, GEMM accumulators); outputs are rounded once, to their own type.
"""

import triton
import triton.language as tl


@triton.jit
def _rms_factor(b_squares, num_elements, eps):
    """1 / sqrt(mean of the squares + eps), each operation correctly rounded."""
    mean = tl.div_rn(tl.sum(b_squares, 0), num_elements.to(tl.float32))
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def _store_normed(out, row, weight, factor, width, BLOCK: tl.constexpr):
    """out = row * factor * weight, rounded to out's type."""
    for i in range(0, width, BLOCK):
        o_d = i + tl.arange(0, BLOCK)
        b_x = tl.load(row + o_d, mask=o_d < width, other=0.0)
        b_w = tl.load(weight + o_d, mask=o_d < width, other=0.0)
        b_y = b_x * factor * b_w
        tl.store(out + o_d, b_y.to(out.dtype.element_ty), mask=o_d < width)


@triton.jit
def rms_norm(out, x, weight, eps, width, BLOCK: tl.constexpr):
    """out = x * weight / sqrt(mean(x^2) + eps) of each row. Grid (R,).

    out: [R, width]; x: [R, width] f32; weight: [width] f32.
    """
    i_r = tl.program_id(0).to(tl.int64)
    row = x + i_r * width
    b_squares = tl.zeros([BLOCK], tl.float32)
    for i in range(0, width, BLOCK):
        o_d = i + tl.arange(0, BLOCK)
        b_x = tl.load(row + o_d, mask=o_d < width, other=0.0)
        b_squares = tl.fma(b_x, b_x, b_squares)
    factor = _rms_factor(b_squares, width, eps)
    _store_normed(out + i_r * width, row, weight, factor, width, BLOCK)


@triton.jit
def add_rms_norm(out, residual, delta, weight, eps, width, BLOCK: tl.constexpr):
    """residual += delta in place, then `rms_norm` of it. Grid (R,).

    out: [R, width]; residual, delta: [R, width] f32; weight: [width] f32.
    """
    i_r = tl.program_id(0).to(tl.int64)
    row = residual + i_r * width
    b_squares = tl.zeros([BLOCK], tl.float32)
    for i in range(0, width, BLOCK):
        o_d = i + tl.arange(0, BLOCK)
        b_x = tl.load(row + o_d, mask=o_d < width, other=0.0)
        b_x += tl.load(delta + i_r * width + o_d, mask=o_d < width, other=0.0)
        tl.store(row + o_d, b_x, mask=o_d < width)
        b_squares = tl.fma(b_x, b_x, b_squares)
    # The sum is read back below, perhaps by another thread.
    tl.debug_barrier()
    factor = _rms_factor(b_squares, width, eps)
    _store_normed(out + i_r * width, row, weight, factor, width, BLOCK)


@triton.jit
def _halves(o_d, half):
    """Pairs (i, i + half): whether an element is the first of its pair, its angle, its partner."""
    is_first = o_d < half
    o_angle = tl.where(is_first, o_d, o_d - half)
    return is_first, o_angle, tl.where(is_first, o_d + half, o_d - half)


@triton.jit
def _turned(head, weight, has_norm, eps, cos, sin, half, is_first, o_angle, o_partner, head_dim,
            BLOCK_D: tl.constexpr):
    """A head, normalised where asked, its 2 half first elements turned. [BLOCK_D] f32.

    cos, sin: [half] of the position.
    """
    o_d = tl.arange(0, BLOCK_D)
    is_rotated = o_d < 2 * half
    b_x = tl.load(head + o_d, mask=o_d < head_dim, other=0.0)
    b_partner = tl.load(head + o_partner, mask=is_rotated, other=0.0)
    # Here, not below the branch: the compiler merges what follows it for both callers, and would
    # load single words for both.
    b_cos = tl.load(cos + o_angle, mask=is_rotated, other=1.0)
    b_sin = tl.load(sin + o_angle, mask=is_rotated, other=0.0)
    if has_norm != 0:
        factor = _rms_factor(b_x * b_x, head_dim, eps)
        b_x = b_x * factor * tl.load(weight + o_d, mask=o_d < head_dim, other=0.0)
        b_partner = b_partner * factor * tl.load(weight + o_partner, mask=is_rotated, other=0.0)
    b_turn = b_partner * b_sin
    b_y = tl.where(is_first, b_x * b_cos - b_turn, b_x * b_cos + b_turn)
    return tl.where(is_rotated, b_y, b_x)


@triton.jit
def _rotated(head, weight, has_norm, eps, cos, sin, position, rot_dim, interleaved, head_dim,
             BLOCK_D: tl.constexpr):
    """A head, normalised where asked and rotated by the angles of its position. [BLOCK_D] f32.

    Pairs are (i, i + rot_dim / 2), or (2i, 2i + 1) where interleaved; the first of a pair becomes
    x cos - y sin, the second y cos + x sin.
    """
    o_d = tl.arange(0, BLOCK_D)
    half = rot_dim // 2
    if (interleaved == 0) & (half % 4 == 0):
        # The same number, but one that the compiler knows to be a multiple of 4: partners and
        # angles of four neighbours are neighbours, and loads are vectors.
        half = half // 4 * 4
        is_first, o_angle, o_partner = _halves(o_d, half)
        b_y = _turned(head, weight, has_norm, eps, cos + position * half, sin + position * half,
                      half, is_first, o_angle, o_partner, head_dim, BLOCK_D)
    else:
        if interleaved != 0:
            is_first = o_d % 2 == 0
            o_angle = o_d // 2
            o_partner = o_d ^ 1
        else:
            is_first, o_angle, o_partner = _halves(o_d, half)
        b_y = _turned(head, weight, has_norm, eps, cos + position * half, sin + position * half,
                      half, is_first, o_angle, o_partner, head_dim, BLOCK_D)
    return b_y


@triton.jit
def qk_norm_rope_write_kv(
    q_out,
    kv_cache,
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    slot_mapping,
    num_q_heads,
    num_kv_heads,
    head_dim,
    rot_dim,
    interleaved,
    has_norm,
    eps,
    block_size,
    block_shift,
    BLOCK_D: tl.constexpr,
):
    """Norm and rotary embedding of queries and keys; keys and values go to their cache slots.
    Grid (T, Hq + 2 Hkv): query heads, then key heads, then value heads.

    q_out: [T, Hq, D]; kv_cache: [num_blocks][2][Hkv][block_size][D] of one layer;
    qkv: [T, (Hq + 2 Hkv) D] f32; q_norm, k_norm: [D] f32, read where has_norm;
    cos, sin: [max_pos, rot_dim / 2] f32; positions: [T] i32; slot_mapping: [T] i64, -1 = the
    token's key and value are not written; block_size = 2^block_shift.
    """
    i_t = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    o_d = tl.arange(0, BLOCK_D)
    is_element = o_d < head_dim
    head = qkv + (i_t * tl.num_programs(1) + i_h) * head_dim
    position = tl.load(positions + i_t).to(tl.int64)
    if i_h < num_q_heads:
        b_q = _rotated(head, q_norm, has_norm, eps, cos, sin, position, rot_dim,
                       interleaved, head_dim, BLOCK_D)
        p_q = q_out + (i_t * num_q_heads + i_h) * head_dim + o_d
        tl.store(p_q, b_q.to(q_out.dtype.element_ty), mask=is_element)
    else:
        slot = tl.load(slot_mapping + i_t)
        if slot >= 0:
            # Side 0 of a block holds keys, side 1 values.
            i_side_head = i_h - num_q_heads
            block = slot >> block_shift
            offset = slot & (block_size - 1)
            p_kv = ((block * 2 * num_kv_heads + i_side_head) * block_size + offset) * head_dim
            if i_side_head < num_kv_heads:
                b_kv = _rotated(head, k_norm, has_norm, eps, cos, sin, position, rot_dim,
                                interleaved, head_dim, BLOCK_D)
            else:
                b_kv = tl.load(head + o_d, mask=is_element, other=0.0)
            tl.store(kv_cache + p_kv + o_d, b_kv.to(kv_cache.dtype.element_ty), mask=is_element)
