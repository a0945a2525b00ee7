"""Attention over a paged cache: prefill, split-KV decode and the fold of decode's splits.

Cache of one layer: [num_blocks, 2 (K, V), Hkv, block_size, D]. K and V come from it alone. Key
positions are absolute; they are walked in tiles of TILE within splits of SPLIT (256, everywhere):

    keys      0        256        512   seq_len
              |---------|----------|------|
    split     0         1          2            each from (-inf, 0, 0), over its tiles
    fold      (((state) + 0) + 1) + 2           left to right, by `fold`

Prefill runs the splits of a row one after the other and folds in registers; decode runs them in
parallel CTAs and folds in `fold_splits`. Both do the same operations in the same order, so a row
has the same bits from either, alone or in any batch:

- the products of a row are summed by the tensor cores in the order of the keys, and so is the
  softmax's denominator (a dot with ones), whose order therefore does not depend on the warps;
- maxima are exact in any order;
- a tile or split that a row does not see changes nothing: its weights are exact zeros.

Scores are kept in units of log2, so that every exponential is an exp2. `window` counts the keys a
row sees, itself included; 2^31 - 1 means all. `softcap` 0 means none. Query heads of one KV head
(`group`) are packed into the rows of a block.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Columns of the running denominator: the least a tensor-core dot makes. All hold the same number.
SUM_COLUMNS = tl.constexpr(8)


@triton.jit
def weights(b_max, b_new):
    """2^(max - new), with new = -inf (nothing seen yet) giving 0 rather than NaN."""
    return tl.exp2(b_max - tl.where(b_new == float("-inf"), 0.0, b_new))


@triton.jit
def fold(b_max, b_sum, b_acc, s_max, s_sum, s_acc):
    """Adds a split (s_) to what was folded before it (b_): max [M], sum [M], acc [M, D]."""
    b_new = tl.maximum(b_max, s_max)
    b_keep = weights(b_max, b_new)
    b_add = weights(s_max, b_new)
    b_sum = tl.fma(b_sum, b_keep, s_sum * b_add)
    b_acc = tl.fma(b_acc, tl.broadcast_to(b_keep[:, None], b_acc.shape), s_acc * b_add[:, None])
    return b_new, b_sum, b_acc


@triton.jit
def normalise(b_sum, b_acc):
    """acc / sum, without negative zeros (their sign would tell which tiles were skipped)."""
    b_inverse = tl.math.div_rn(1.0, tl.where(b_sum == 0.0, 1.0, b_sum))
    return b_acc * b_inverse[:, None] + 0.0


@triton.jit
def cap(b_score, softcap):
    """softcap · tanh(score / softcap)."""
    b_exp = tl.exp2(b_score * (2.0 * LOG2E / softcap))
    return softcap * (1.0 - 2.0 / (b_exp + 1.0))


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    """The state every split starts from: max [M], sum [M, SUM_COLUMNS], acc [M, V]."""
    s_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    s_sum = tl.zeros([BLOCK_M, SUM_COLUMNS], tl.float32)
    return s_max, s_sum, tl.zeros([BLOCK_M, BLOCK_V], tl.float32)


@triton.jit
def attend_tile(s_max, s_sum, s_acc, start, b_q, o_row_pos, o_v, p_cache, p_table, first_key,
                end_key, block_stride, v_offset, block_shift, dim, scale, softcap, window,
                HEAD_DIM: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
                MASKED: tl.constexpr):
    """Attends from the rows b_q [M, HEAD_DIM] at positions o_row_pos [M] to TILE keys from `start`.

    p_cache points at K of block 0 and this KV head, p_table at the sequence's block table; o_v [V]
    are the columns of V wanted. Only keys from first_key to end_key are read. Without MASKED every
    row must see every key of the tile. Takes and returns the split's state.
    """
    o_dim = tl.arange(0, HEAD_DIM)
    o_key_pos = start + tl.arange(0, TILE)
    m_key = tl.full([TILE], True, tl.int1)
    if MASKED:
        m_key = (o_key_pos >= first_key) & (o_key_pos < end_key)
    m_k = m_key[None, :]
    m_v = m_key[:, None]
    if PADDED:
        m_k = m_k & (o_dim < dim)[:, None]
        m_v = m_v & (o_v < dim)[None, :]
    b_block = tl.load(p_table + (o_key_pos >> block_shift), mask=m_key, other=0)
    o_slot = o_key_pos & ((1 << block_shift) - 1)
    o_key = b_block.to(tl.int64) * block_stride + o_slot * dim
    b_k = tl.load(p_cache + o_key[None, :] + o_dim[:, None], mask=m_k, other=0.0)
    b_v = tl.load(p_cache + v_offset + o_key[:, None] + o_v[None, :], mask=m_v, other=0.0)

    b_score = tl.dot(b_q, b_k, input_precision="ieee") * scale
    if softcap > 0.0:
        b_score = cap(b_score, softcap)
    b_score = b_score * LOG2E
    if MASKED:
        o_lag = o_row_pos[:, None] - o_key_pos[None, :]
        b_score = tl.where((o_lag >= 0) & (o_lag < window), b_score, float("-inf"))

    s_new = tl.maximum(s_max, tl.max(b_score, 1))
    s_keep = weights(s_max, s_new)
    b_p = weights(b_score, s_new[:, None]).to(b_v.dtype)
    s_acc = tl.dot(b_p, b_v, s_acc * s_keep[:, None], input_precision="ieee")
    b_ones = tl.full([TILE, SUM_COLUMNS], 1.0, b_v.dtype)
    s_sum = tl.dot(b_p, b_ones, s_sum * s_keep[:, None], input_precision="ieee")
    return s_new, s_sum, s_acc


@triton.jit
def attend_range(b_max, b_sum, b_acc, begin, end, b_q, o_row_pos, o_v, p_cache, p_table, first_key,
                 end_key, block_stride, v_offset, block_shift, dim, scale, softcap, window,
                 HEAD_DIM: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
                 PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Attends to the keys from `begin` (where a split or the first key's tile begins) to `end`
    (where a split or the keys end), and folds each split into max, sum and acc.

    One loop over all tiles, so that loads run ahead across splits.
    """
    s_max, s_sum, s_acc = nothing_seen(b_q.shape[0], o_v.shape[0])
    for start in tl.range(begin, end, TILE):
        s_max, s_sum, s_acc = attend_tile(
            s_max, s_sum, s_acc, start, b_q, o_row_pos, o_v, p_cache, p_table, first_key, end_key,
            block_stride, v_offset, block_shift, dim, scale, softcap, window, HEAD_DIM, TILE,
            PADDED, MASKED)
        if (start + TILE) % SPLIT == 0:
            b_max, b_sum, b_acc = fold(b_max, b_sum, b_acc, s_max, tl.max(s_sum, 1), s_acc)
            s_max, s_sum, s_acc = nothing_seen(b_q.shape[0], o_v.shape[0])
    return fold(b_max, b_sum, b_acc, s_max, tl.max(s_sum, 1), s_acc)


@triton.jit
def prefill_attention(out, q, kv_cache, block_tables, tile_seqs, tile_starts, query_start_loc,
                      seq_lens, q_stride, out_stride, table_stride, num_kv_heads, group, head_dim,
                      block_shift, scale, softcap, window,
                      HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK_V: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr):
    """Causal attention of any number of new rows a sequence.

    Grid (num_tiles, Hkv, HEAD_DIM / BLOCK_V). A tile is BLOCK_M // group consecutive rows of
    sequence tile_seqs[i], from its new row tile_starts[i] on, times the heads of the group;
    group <= BLOCK_M.
    """
    i_tile = tl.program_id(0)
    i_head = tl.program_id(1)
    dim = head_dim if PADDED else HEAD_DIM
    i_seq = tl.load(tile_seqs + i_tile)
    first_row = tl.load(tile_starts + i_tile)
    query_start = tl.load(query_start_loc + i_seq)
    query_len = tl.load(query_start_loc + i_seq + 1) - query_start
    num_computed = tl.load(seq_lens + i_seq) - query_len
    tile_rows = BLOCK_M // group
    end_row = tl.minimum(first_row + tile_rows, query_len)

    o_m = tl.arange(0, BLOCK_M)
    o_row = first_row + o_m // group
    o_head = i_head * group + o_m % group
    m_row = (o_m < tile_rows * group) & (o_row < query_len)
    o_row_pos = num_computed + o_row
    o_dim = tl.arange(0, HEAD_DIM)
    m_q = m_row[:, None]
    o_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_out = m_row[:, None]
    if PADDED:
        m_q = m_q & (o_dim < dim)[None, :]
        m_out = m_out & (o_v < dim)[None, :]
    o_token = (query_start + o_row).to(tl.int64)
    p_q = q + (o_token * q_stride + o_head * dim)[:, None] + o_dim[None, :]
    b_q = tl.load(p_q, mask=m_q, other=0.0)

    v_offset = num_kv_heads.to(tl.int64) * dim << block_shift
    block_stride = v_offset * 2
    p_cache = kv_cache + (i_head.to(tl.int64) * dim << block_shift)
    p_table = block_tables + i_seq.to(tl.int64) * table_stride

    min_pos = num_computed + first_row
    max_pos = num_computed + end_row - 1
    first_key = tl.maximum(min_pos - window + 1, 0)
    end_key = max_pos + 1
    # Between full_begin and full_end, both at splits, every row sees every key.
    full_begin = tl.cdiv(tl.maximum(max_pos - window + 1, 0), SPLIT) * SPLIT
    full_end = tl.maximum((min_pos + 1) // SPLIT * SPLIT, full_begin)

    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    b_max, b_sum, b_acc = attend_range(
        b_max, b_sum, b_acc, first_key // TILE * TILE, tl.minimum(full_begin, end_key), b_q,
        o_row_pos, o_v, p_cache, p_table, first_key, end_key, block_stride, v_offset, block_shift,
        dim, scale, softcap, window, HEAD_DIM, TILE, SPLIT, PADDED, True)
    b_max, b_sum, b_acc = attend_range(
        b_max, b_sum, b_acc, full_begin, full_end, b_q, o_row_pos, o_v, p_cache, p_table,
        first_key, end_key, block_stride, v_offset, block_shift, dim, scale, softcap, window,
        HEAD_DIM, TILE, SPLIT, PADDED, False)
    b_max, b_sum, b_acc = attend_range(
        b_max, b_sum, b_acc, full_end, end_key, b_q, o_row_pos, o_v, p_cache, p_table, first_key,
        end_key, block_stride, v_offset, block_shift, dim, scale, softcap, window,
        HEAD_DIM, TILE, SPLIT, PADDED, True)

    p_out = out + (o_token * out_stride + o_head * dim)[:, None] + o_v[None, :]
    tl.store(p_out, normalise(b_sum, b_acc).to(out.dtype.element_ty), mask=m_out)


@triton.jit
def decode_attention(out, partial_max, partial_sum, partial_acc, q, kv_cache, block_tables,
                     query_start_loc, seq_lens, q_stride, out_stride, table_stride, num_kv_heads,
                     group, head_dim, block_shift, scale, softcap, window,
                     HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_V: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr):
    """Attention of sequences with one new row; a CTA does one split of one KV head.

    Grid (S, Hkv * cdiv(group, BLOCK_M) * HEAD_DIM / BLOCK_V, num_splits), num_splits at least that
    of the longest sequence. With num_splits 1 `out` is written; else the partial results of every
    split that the row sees, for `fold_splits`. Sequences whose number of new rows is not 1 are
    left alone.
    """
    i_seq = tl.program_id(0)
    i_v = tl.program_id(1) % (HEAD_DIM // BLOCK_V)
    i_head_tile = tl.program_id(1) // (HEAD_DIM // BLOCK_V)
    num_head_tiles = tl.cdiv(group, BLOCK_M)
    i_head = i_head_tile // num_head_tiles
    i_split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    dim = head_dim if PADDED else HEAD_DIM
    query_start = tl.load(query_start_loc + i_seq)
    query_len = tl.load(query_start_loc + i_seq + 1) - query_start
    end_key = tl.load(seq_lens + i_seq)
    first_key = tl.maximum(end_key - window, 0)
    outside = (i_split < first_key // SPLIT) | (i_split * SPLIT >= end_key)
    if (query_len != 1) | (outside & (num_splits > 1)):
        return

    o_m = i_head_tile % num_head_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    o_head = i_head * group + o_m
    o_row_pos = tl.full([BLOCK_M], 0, tl.int32) + (end_key - 1)
    o_dim = tl.arange(0, HEAD_DIM)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_row = o_m < group
    m_q = m_row[:, None]
    m_out = m_row[:, None]
    if PADDED:
        m_q = m_q & (o_dim < dim)[None, :]
        m_out = m_out & (o_v < dim)[None, :]
    token = query_start.to(tl.int64)
    p_q = q + token * q_stride + (o_head * dim)[:, None] + o_dim[None, :]
    b_q = tl.load(p_q, mask=m_q, other=0.0)

    v_offset = num_kv_heads.to(tl.int64) * dim << block_shift
    block_stride = v_offset * 2
    p_cache = kv_cache + (i_head.to(tl.int64) * dim << block_shift)
    p_table = block_tables + i_seq.to(tl.int64) * table_stride
    s_max, s_sum, s_acc = nothing_seen(BLOCK_M, BLOCK_V)
    begin = tl.maximum(i_split * SPLIT, first_key // TILE * TILE)
    end = tl.minimum(i_split * SPLIT + SPLIT, end_key)
    for start in tl.range(begin, end, TILE):
        s_max, s_sum, s_acc = attend_tile(
            s_max, s_sum, s_acc, start, b_q, o_row_pos, o_v, p_cache, p_table, first_key, end_key,
            block_stride, v_offset, block_shift, dim, scale, softcap, window, HEAD_DIM, TILE,
            PADDED, True)
    s_sum = tl.max(s_sum, 1)

    if num_splits == 1:
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        b_max, b_sum, b_acc = fold(b_max, b_sum, b_acc, s_max, s_sum, s_acc)
        p_out = out + token * out_stride + (o_head * dim)[:, None] + o_v[None, :]
        tl.store(p_out, normalise(b_sum, b_acc).to(out.dtype.element_ty), mask=m_out)
    else:
        o_partial = (i_seq.to(tl.int64) * num_splits + i_split) * num_kv_heads * group + o_head
        m_first = m_row & (i_v == 0)
        tl.store(partial_max + o_partial, s_max, mask=m_first)
        tl.store(partial_sum + o_partial, s_sum, mask=m_first)
        tl.store(partial_acc + (o_partial * dim)[:, None] + o_v[None, :], s_acc, mask=m_out)


@triton.jit
def fold_splits(out, partial_max, partial_sum, partial_acc, query_start_loc, seq_lens, out_stride,
                num_heads, head_dim, num_splits, window, BLOCK_D: tl.constexpr,
                SPLIT: tl.constexpr):
    """Folds the partial results of `decode_attention` from left to right and normalises.

    Grid (S, Hq, cdiv(D, BLOCK_D)); num_splits is decode's grid.
    """
    i_seq = tl.program_id(0)
    i_head = tl.program_id(1)
    query_start = tl.load(query_start_loc + i_seq)
    query_len = tl.load(query_start_loc + i_seq + 1) - query_start
    if query_len != 1:
        return
    end_key = tl.load(seq_lens + i_seq)
    first_key = tl.maximum(end_key - window, 0)
    o_dim = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    m_dim = o_dim < head_dim

    o_one = tl.arange(0, 1)
    b_max = tl.full([1], float("-inf"), tl.float32)
    b_sum = tl.zeros([1], tl.float32)
    b_acc = tl.zeros([1, BLOCK_D], tl.float32)
    base = i_seq.to(tl.int64) * num_splits
    # The loads of several steps may be in flight while the steps themselves wait for each other.
    for split in tl.range(first_key // SPLIT, tl.cdiv(end_key, SPLIT), loop_unroll_factor=4):
        o_partial = (base + split) * num_heads + i_head + o_one
        s_max = tl.load(partial_max + o_partial)
        s_sum = tl.load(partial_sum + o_partial)
        p_acc = partial_acc + (o_partial * head_dim)[:, None] + o_dim
        s_acc = tl.load(p_acc, mask=m_dim, other=0.0)
        b_max, b_sum, b_acc = fold(b_max, b_sum, b_acc, s_max, s_sum, s_acc)
    p_out = out + query_start.to(tl.int64) * out_stride + i_head * head_dim + o_dim
    tl.store(p_out, normalise(b_sum, b_acc).to(out.dtype.element_ty), mask=m_dim)
