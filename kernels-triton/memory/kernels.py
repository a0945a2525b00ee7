"""Kernels that move data: embedding, row gather, block copies, swap, ids sampled a step before.

Apart from the embedding, rows and blocks are moved as 32-bit words whatever their type, so one
variant serves all types; their sizes are multiples of 64 bytes. Offsets into the cache are 64 bits.
"""

import triton
import triton.language as tl


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
def patch_tokens(token_ids, sampled, places, rows, num_patches, BLOCK: tl.constexpr):
    """token_ids[places[i]] = sampled[rows[i]]: ids of the step before, which the host has not seen.

    Grid (cdiv(num_patches, BLOCK)); no place twice.
    """
    o_patch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_patch < num_patches
    b_place = tl.load(places + o_patch, mask=mask, other=0)
    b_row = tl.load(rows + o_patch, mask=mask, other=0)
    b_id = tl.load(sampled + b_row, mask=mask, other=0)
    tl.store(token_ids + b_place, b_id, mask=mask)
