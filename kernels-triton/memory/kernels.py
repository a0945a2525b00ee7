"""Kernels that move data: embedding, row gather, block copies, swap, and the input of a step.

Apart from the embedding, rows and blocks are moved as 32-bit words whatever their type, so one
variant serves all types; their sizes are multiples of 64 bytes. Offsets into the cache are 64 bits.
"""

import triton
import triton.language as tl

# A token id that stands for "what this sequence sampled last", still on the device.
LAST_SAMPLED = tl.constexpr(-1)


@triton.jit
def embed(out, table, token_ids, hidden, num_table_rows, BLOCK: tl.constexpr):
    """out [T, hidden] f32 = table[token_ids]; ids outside the table give zeros.

    Grid (T, cdiv(hidden, BLOCK)).
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_id = tl.load(token_ids + i_row).to(tl.int64)
    inside = (b_id >= 0) & (b_id < num_table_rows)
    mask = o_dim < hidden
    b_row = tl.load(table + b_id * hidden + o_dim, mask=mask & inside, other=0.0)
    tl.store(out + i_row * hidden + o_dim, b_row.to(tl.float32), mask=mask)


@triton.jit
def gather_rows(out, table, rows, row_words, num_table_rows, BLOCK: tl.constexpr):
    """out [R, row_words] = table[rows]; rows outside the table give zeros.

    Grid (R, cdiv(row_words, BLOCK)).
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_source = tl.load(rows + i_row).to(tl.int64)
    inside = (b_source >= 0) & (b_source < num_table_rows)
    mask = o_word < row_words
    b_words = tl.load(table + b_source * row_words + o_word, mask=mask & inside, other=0)
    tl.store(out + i_row * row_words + o_word, b_words, mask=mask)


@triton.jit
def layer_block(block, num_blocks, block_words):
    """Offset of a block within this CTA's layer (grid axis 2)."""
    return (tl.program_id(2).to(tl.int64) * num_blocks + block) * block_words


@triton.jit
def copy_blocks(cache, pairs, num_blocks, block_words, BLOCK: tl.constexpr):
    """cache[layer, to] = cache[layer, from]. Grid (P, cdiv(block_words, BLOCK), num_layers)."""
    i_pair = tl.program_id(0)
    o_word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_word < block_words
    source = layer_block(tl.load(pairs + i_pair * 2), num_blocks, block_words)
    target = layer_block(tl.load(pairs + i_pair * 2 + 1), num_blocks, block_words)
    tl.store(cache + target + o_word, tl.load(cache + source + o_word, mask=mask), mask=mask)


@triton.jit
def staging_block(block_words):
    """Offset in the staging buffer of this CTA's block (axis 0) and layer (axis 2)."""
    return (tl.program_id(0).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)) * block_words


@triton.jit
def swap_out(staging, cache, blocks, num_blocks, block_words, BLOCK: tl.constexpr):
    """staging[i, layer] = cache[layer, blocks[i]].

    Grid (num_swapped, cdiv(block_words, BLOCK), num_layers).
    """
    o_word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_word < block_words
    source = layer_block(tl.load(blocks + tl.program_id(0)), num_blocks, block_words)
    b_words = tl.load(cache + source + o_word, mask=mask)
    tl.store(staging + staging_block(block_words) + o_word, b_words, mask=mask)


@triton.jit
def swap_in(cache, staging, blocks, num_blocks, block_words, BLOCK: tl.constexpr):
    """cache[layer, blocks[i]] = staging[i, layer]; grid as in `swap_out`."""
    o_word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_word < block_words
    target = layer_block(tl.load(blocks + tl.program_id(0)), num_blocks, block_words)
    b_words = tl.load(staging + staging_block(block_words) + o_word, mask=mask)
    tl.store(cache + target + o_word, b_words, mask=mask)


@triton.jit
def prepare_inputs(token_ids, positions, slot_mapping, seq_lens, query_start_loc, entries,
                   num_computed, last_tokens, block_tables, table_stride, block_shift,
                   BLOCK: tl.constexpr):
    """Fills a step's arrays from the persistent table. Grid (S, cdiv(longest query, BLOCK))."""
    i_seq = tl.program_id(0)
    entry = tl.load(entries + i_seq)
    query_start = tl.load(query_start_loc + i_seq)
    query_len = tl.load(query_start_loc + i_seq + 1) - query_start
    computed = tl.load(num_computed + entry)

    o_row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_row < query_len
    o_token = query_start + o_row
    b_position = computed + o_row
    p_block = block_tables + entry.to(tl.int64) * table_stride + (b_position >> block_shift)
    b_block = tl.load(p_block, mask=mask, other=-1).to(tl.int64)
    b_slot = (b_block << block_shift) + (b_position & ((1 << block_shift) - 1))
    tl.store(positions + o_token, b_position, mask=mask)
    tl.store(slot_mapping + o_token, tl.where(b_block < 0, -1, b_slot), mask=mask)

    b_id = tl.load(token_ids + o_token, mask=mask, other=0)
    tl.store(token_ids + o_token, tl.load(last_tokens + entry), mask=mask & (b_id == LAST_SAMPLED))
    if tl.program_id(1) == 0:
        tl.store(seq_lens + i_seq, computed + query_len)


@triton.jit
def commit_step(num_computed, last_tokens, query_start_loc, entries, sampled, sample_rows, num_seqs,
                BLOCK: tl.constexpr):
    """Adds the step's tokens to num_computed and keeps sampled ids. Grid (cdiv(S, BLOCK))."""
    o_seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_seq < num_seqs
    b_entry = tl.load(entries + o_seq, mask=mask, other=0)
    b_end = tl.load(query_start_loc + o_seq + 1, mask=mask, other=0)
    b_start = tl.load(query_start_loc + o_seq, mask=mask, other=0)
    b_computed = tl.load(num_computed + b_entry, mask=mask, other=0)
    tl.store(num_computed + b_entry, b_computed + b_end - b_start, mask=mask)
    b_row = tl.load(sample_rows + o_seq, mask=mask, other=-1)
    m_sampled = mask & (b_row >= 0)
    b_id = tl.load(sampled + b_row, mask=m_sampled, other=0)
    tl.store(last_tokens + b_entry, b_id, mask=m_sampled)
