"""Mixture of experts: routing, grouping by expert, grouped GEMM, combination.

A *slot* is one (token, choice): slot t * K + k is the k-th expert of token t, K experts a token,
in ascending order. Launches of a layer, in order:

    route          (T,)             the K experts of each token, and their weights
    count_experts  (C,)             slots of each expert in each chunk of slots
    plan_tiles     (1,)             where each expert's rows start; the expert of each tile
    place_slots    (C,)             the slots, sorted by expert
    grouped_gemm   (tiles, N tiles) gate and up; then `activation.silu_mul`; then again for down
    combine        (T, D tiles)     the weighted sum, in expert order, onto the residual stream

There are no atomics, and an expert's rows are padded to whole tiles: a token's result depends on
its own row alone, whichever tile of whichever size it lands in.

    sorted slots, BLOCK_M 4:   | e0 e0 e0 -- | e2 e2 e2 e2 | e2 -- -- -- |    -- = num_slots
    tile_expert:                      0             2             2
"""

import triton
import triton.language as tl


@triton.jit
def _scores(b_logit, is_expert, use_sigmoid):
    """Softmax over the experts, or the sigmoid of each."""
    if use_sigmoid != 0:
        b_score = tl.div_rn(1.0, 1.0 + tl.exp(-b_logit))
    else:
        b_exp = tl.exp(b_logit - tl.max(b_logit, 0))
        b_score = tl.div_rn(b_exp, tl.sum(b_exp, 0))
    return tl.where(is_expert, b_score, 0.0)


@triton.jit
def route(
    expert,
    weight,
    logits,
    bias,
    num_experts,
    top_k,
    use_sigmoid,
    has_bias,
    renormalise,
    scale,
    BLOCK_E: tl.constexpr,
):
    """The top_k experts of each token, ascending, and their weights. Grid (T,).

    expert: [T, top_k] i32; weight: [T, top_k] f32; logits: [T, num_experts] f32;
    bias: [num_experts] f32, added to the scores for the choice alone, read where has_bias;
    renormalise: weights are divided by their sum; scale: factor of all weights.
    Ties go to the lower expert.
    """
    i_t = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK_E)
    is_expert = o_e < num_experts
    p_logit = logits + i_t * num_experts + o_e
    b_logit = tl.load(p_logit, mask=is_expert, other=float("-inf"))
    b_score = _scores(b_logit, is_expert, use_sigmoid)
    # Scores order as logits do, but may round distinct logits to one score.
    b_choice = b_logit
    if has_bias != 0:
        b_choice = b_score + tl.load(bias + o_e, mask=is_expert, other=0.0)
    # Every round must find an expert, even in a row of NaN, or later kernels would read elsewhere.
    b_choice = tl.where(b_choice == b_choice, b_choice, float("-inf"))
    # 2 = open, 1 = chosen, 0 = no expert.
    b_state = tl.where(is_expert, 2, 0)
    for _ in range(0, top_k):
        best = tl.max(tl.where(b_state == 2, b_choice, float("-inf")), 0)
        is_best = (b_state == 2) & (b_choice == best)
        b_state = tl.where(o_e == tl.min(tl.where(is_best, o_e, BLOCK_E), 0), 1, b_state)
    b_weight = tl.where(b_state == 1, b_score, 0.0)
    if renormalise != 0:
        b_weight = tl.div_rn(b_weight, tl.sum(b_weight, 0))
    last = -1
    for i in range(0, top_k):
        last = tl.min(tl.where((b_state == 1) & (o_e > last), o_e, BLOCK_E), 0)
        chosen = tl.sum(tl.where(o_e == last, b_weight, 0.0), 0)
        tl.store(expert + i_t * top_k + i, last)
        tl.store(weight + i_t * top_k + i, chosen * scale)


@triton.jit
def count_experts(
    counts,
    expert,
    num_slots,
    num_experts,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Slots of each expert in each chunk. Grid (C,), C = cdiv(num_slots, CHUNK).

    counts: [C, num_experts] i32; expert: [num_slots] i32.
    """
    i_c = tl.program_id(0)
    o_s = i_c * CHUNK + tl.arange(0, CHUNK)
    o_e = tl.arange(0, BLOCK_E)
    b_expert = tl.load(expert + o_s, mask=o_s < num_slots, other=-1)
    b_count = tl.sum((b_expert[:, None] == o_e[None, :]).to(tl.int32), 0)
    tl.store(counts + i_c * num_experts + o_e, b_count, mask=o_e < num_experts)


@triton.jit
def plan_tiles(
    sorted_slots,
    tile_expert,
    num_tiles,
    starts,
    counts,
    num_slots,
    num_chunks,
    num_experts,
    block_m,
    BLOCK_E: tl.constexpr,
):
    """Lays out the experts' rows in whole tiles of block_m. Grid (1,).

    sorted_slots: [>= tiles * block_m] i32, of which only the padding is written: num_slots;
    tile_expert: [tiles] i32; num_tiles: [1] i32; starts: [num_chunks, num_experts] i32, the
    position of the first slot of each expert in each chunk; counts: as `count_experts` left them.
    There are at most num_slots / block_m + min(num_slots, num_experts) tiles.
    """
    o_e = tl.arange(0, BLOCK_E)
    is_expert = o_e < num_experts
    b_count = tl.zeros([BLOCK_E], tl.int32)
    for i_c in range(0, num_chunks):
        b_count += tl.load(counts + i_c * num_experts + o_e, mask=is_expert, other=0)
    b_tiles = (b_count + block_m - 1) // block_m
    b_first = tl.cumsum(b_tiles, 0) - b_tiles
    tl.store(num_tiles, tl.sum(b_tiles, 0))
    for i in range(0, tl.max(b_tiles, 0)):
        tl.store(tile_expert + b_first + i, o_e, mask=i < b_tiles)
    b_end = b_first * block_m + b_count
    for i in range(0, block_m):
        tl.store(sorted_slots + b_end + i, num_slots, mask=i < b_tiles * block_m - b_count)
    b_at = b_first * block_m
    for i_c in range(0, num_chunks):
        tl.store(starts + i_c * num_experts + o_e, b_at, mask=is_expert)
        b_at += tl.load(counts + i_c * num_experts + o_e, mask=is_expert, other=0)


@triton.jit
def place_slots(sorted_slots, expert, starts, num_slots, num_experts, CHUNK: tl.constexpr):
    """Writes each slot to its place: those of an expert ascend. Grid (C,); shapes as above."""
    i_c = tl.program_id(0)
    o_i = tl.arange(0, CHUNK)
    o_s = i_c * CHUNK + o_i
    b_expert = tl.load(expert + o_s, mask=o_s < num_slots, other=-1)
    # The same again along the other axis of the comparison.
    b_other = tl.load(expert + o_s, mask=o_s < num_slots, other=-1)
    is_before = (b_other[None, :] == b_expert[:, None]) & (o_i[None, :] < o_i[:, None])
    b_rank = tl.sum(is_before.to(tl.int32), 1)
    p_start = starts + i_c * num_experts + b_expert
    b_start = tl.load(p_start, mask=o_s < num_slots, other=0)
    tl.store(sorted_slots + b_start + b_rank, o_s, mask=o_s < num_slots)


@triton.jit
def grouped_gemm(
    out,
    x,
    w,
    sorted_slots,
    tile_expert,
    num_tiles,
    num_slots,
    slots_per_row,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[s] = x[s / slots_per_row] w[expert of s]^T for every slot s. Grid (most tiles that can
    be, cdiv(N, BLOCK_N)); programs past num_tiles do nothing.

    out: [num_slots, N] f32; x: [num_slots / slots_per_row, K]; w: [num_experts, N, K]; the tables
    as `plan_tiles` left them, with block_m = BLOCK_M. Each element is accumulated over K in one
    order, whatever BLOCK_M and BLOCK_N are. The tiles are products w x^T (the weight is the left
    operand), so that the tensor cores' rows are filled even when an expert has one slot.
    """
    i_m = tl.program_id(0)
    i_n = tl.program_id(1)
    if i_m < tl.load(num_tiles):
        i_e = tl.load(tile_expert + i_m).to(tl.int64)
        o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = tl.arange(0, BLOCK_K)
        b_slot = tl.load(sorted_slots + o_m)
        is_row = b_slot < num_slots
        is_column = o_n < N
        p_w = w + (i_e * N + o_n)[:, None] * K + o_k[None, :]
        p_x = x + (b_slot // slots_per_row).to(tl.int64)[None, :] * K + o_k[:, None]
        b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for i_k in range(0, K, BLOCK_K):
            is_k = o_k < K - i_k
            b_w = tl.load(p_w, mask=is_column[:, None] & is_k[None, :], other=0.0)
            b_x = tl.load(p_x, mask=is_row[None, :] & is_k[:, None], other=0.0)
            b_acc = tl.dot(b_w, b_x, b_acc, input_precision="ieee")
            p_w += BLOCK_K
            p_x += BLOCK_K
        p_out = out + b_slot.to(tl.int64)[None, :] * N + o_n[:, None]
        tl.store(p_out, b_acc, mask=is_row[None, :] & is_column[:, None])


@triton.jit
def combine(residual, y, weight, top_k, width, BLOCK: tl.constexpr):
    """residual[t] += sum over the token's slots of weight * y, in expert order.
    Grid (T, cdiv(width, BLOCK)).

    residual: [T, width] f32; y: [T * top_k, width] f32; weight: [T, top_k] f32.
    """
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i in range(0, top_k):
        i_s = i_t * top_k + i
        b_y = tl.load(y + i_s * width + o_d, mask=o_d < width, other=0.0)
        b_sum = tl.fma(b_y, tl.load(weight + i_s), b_sum)
    p_residual = residual + i_t * width + o_d
    b_residual = tl.load(p_residual, mask=o_d < width, other=0.0)
    tl.store(p_residual, b_residual + b_sum, mask=o_d < width)
