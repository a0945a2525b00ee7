"""Matrix products y = x Wᵀ, with the same bits for a row of x whatever the number of rows.

x is [M, K] and W [N, K], both row-major and of one type; y is f32 or, for the gated product, of
x's type. K and N are multiples of 16. The sum over K is made of chunks of CHUNK elements (the same
in all variants), each from zero, in the order of K; the chunks are added to a total from left to
right:

    y = (((0 + chunk 0) + chunk 1) + chunk 2) …

`gemm` and `gemm_silu_mul` do so in one CTA, for many rows. For few rows one CTA a tile would leave
most of the GPU idle, so `gemm_partial` computes the chunks in CTAs of their own and `fold_partials`
or `fold_silu_mul` adds them in the same order. The tiles are products W xᵀ (the weight is the left
operand), so that the tensor cores' rows are filled even when x has one row.

Epilogues: `bias` f32 [N], where has_bias is 1; `accumulate` 1 adds to what `out` holds (the
residual stream); silu(gate) · up, where rows 0..N/2 of W are the gate and the rest is up.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def silu_mul(b_gate, b_up):
    """gate / (1 + e^-gate) · up."""
    return b_gate / (1.0 + tl.exp2(b_gate * -LOG2E)) * b_up


@triton.jit
def tile_of(num_rows, num_columns, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
            BAND: tl.constexpr):
    """This CTA's tile (of x's rows, of y's columns): neighbours share a band of BAND row tiles, so
    that what they read is still in the L2 cache."""
    num_t = tl.cdiv(num_rows, BLOCK_T)
    num_n = tl.cdiv(num_columns, BLOCK_N)
    band = tl.program_id(0) // (BAND * num_n)
    first_t = band * BAND
    height = tl.minimum(num_t - first_t, BAND)
    i_in_band = tl.program_id(0) % (BAND * num_n)
    return first_t + i_in_band % height, i_in_band // height


@triton.jit
def load_x(x, o_t, o_k, num_rows, num_k, x_stride):
    """A tile of x, transposed: [K, T]; zeros outside."""
    p_x = x + o_t.to(tl.int64)[None, :] * x_stride + o_k[:, None]
    return tl.load(p_x, mask=(o_t < num_rows)[None, :] & (o_k < num_k)[:, None], other=0.0)


@triton.jit
def load_w(w, o_n, o_k, end_n, num_k):
    """A tile of W: [N, K]; zeros outside."""
    p_w = w + o_n.to(tl.int64)[:, None] * num_k + o_k[None, :]
    return tl.load(p_w, mask=(o_n < end_n)[:, None] & (o_k < num_k)[None, :], other=0.0)


@triton.jit
def finish(b_y, out, bias, o_n, o_t, num_rows, num_n, out_stride, has_bias, accumulate):
    """Bias, residual and store of a tile y [N, T]."""
    m_n = o_n < num_n
    b_y += tl.load(bias + o_n, mask=m_n & (has_bias != 0), other=0.0)[:, None]
    p_out = out + o_t.to(tl.int64)[None, :] * out_stride + o_n[:, None]
    m_out = m_n[:, None] & (o_t < num_rows)[None, :]
    b_y = tl.load(p_out, mask=m_out & (accumulate != 0), other=0.0) + b_y
    tl.store(p_out, b_y, mask=m_out)


@triton.jit
def gemm(out, x, w, bias, num_rows, num_n, num_k, x_stride, out_stride, has_bias, accumulate,
         BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
         BAND: tl.constexpr):
    """out [M, N] f32 = x Wᵀ + bias, or added to out. Grid (cdiv(M, BLOCK_T) · cdiv(N, BLOCK_N))."""
    i_t, i_n = tile_of(num_rows, num_n, BLOCK_T, BLOCK_N, BAND)
    o_t = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    b_total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    b_chunk = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in tl.range(0, num_k, BLOCK_K):
        o_k = start + tl.arange(0, BLOCK_K)
        b_w = load_w(w, o_n, o_k, num_n, num_k)
        b_x = load_x(x, o_t, o_k, num_rows, num_k, x_stride)
        b_chunk = tl.dot(b_w, b_x, b_chunk, input_precision="ieee")
        if (start + BLOCK_K) % CHUNK == 0:
            b_total += b_chunk
            b_chunk = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    b_total += b_chunk
    finish(b_total, out, bias, o_n, o_t, num_rows, num_n, out_stride, has_bias, accumulate)


@triton.jit
def gemm_silu_mul(out, x, w, num_rows, num_n, num_k, x_stride, out_stride,
                  BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  CHUNK: tl.constexpr, BAND: tl.constexpr):
    """out [M, N/2] = silu(x Wgateᵀ) · (x Wupᵀ). Grid (cdiv(M, BLOCK_T) · cdiv(N/2, BLOCK_N))."""
    half = num_n // 2
    i_t, i_n = tile_of(num_rows, half, BLOCK_T, BLOCK_N, BAND)
    o_t = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    b_gate = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    b_up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    b_gate_chunk = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    b_up_chunk = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    p_up = w + half.to(tl.int64) * num_k
    for start in tl.range(0, num_k, BLOCK_K):
        o_k = start + tl.arange(0, BLOCK_K)
        b_x = load_x(x, o_t, o_k, num_rows, num_k, x_stride)
        b_w_gate = load_w(w, o_n, o_k, half, num_k)
        b_w_up = load_w(p_up, o_n, o_k, half, num_k)
        b_gate_chunk = tl.dot(b_w_gate, b_x, b_gate_chunk, input_precision="ieee")
        b_up_chunk = tl.dot(b_w_up, b_x, b_up_chunk, input_precision="ieee")
        if (start + BLOCK_K) % CHUNK == 0:
            b_gate += b_gate_chunk
            b_up += b_up_chunk
            b_gate_chunk = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            b_up_chunk = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    b_y = silu_mul(b_gate + b_gate_chunk, b_up + b_up_chunk)
    p_out = out + o_t.to(tl.int64)[None, :] * out_stride + o_n[:, None]
    m_out = (o_n < half)[:, None] & (o_t < num_rows)[None, :]
    tl.store(p_out, b_y.to(out.dtype.element_ty), mask=m_out)


@triton.jit
def gemm_partial(partial, x, w, num_rows, num_n, num_k, x_stride,
                 BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                 CHUNK: tl.constexpr):
    """partial [num_chunks, M, N] f32: the chunks of x Wᵀ, one by one.

    Grid (cdiv(N, BLOCK_N), num_chunks, cdiv(M, BLOCK_T)), num_chunks = cdiv(K, CHUNK).
    """
    i_chunk = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    b_chunk = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    first = i_chunk * CHUNK
    for start in tl.range(first, tl.minimum(first + CHUNK, num_k), BLOCK_K):
        o_k = start + tl.arange(0, BLOCK_K)
        b_w = load_w(w, o_n, o_k, num_n, num_k)
        b_x = load_x(x, o_t, o_k, num_rows, num_k, x_stride)
        b_chunk = tl.dot(b_w, b_x, b_chunk, input_precision="ieee")
    o_row = i_chunk.to(tl.int64) * num_rows + o_t
    m_out = (o_n < num_n)[:, None] & (o_t < num_rows)[None, :]
    tl.store(partial + o_row[None, :] * num_n + o_n[:, None], b_chunk, mask=m_out)


@triton.jit
def fold_chunks(partial, i_row, o_n, end_n, num_rows, num_n, num_chunks, BLOCK_N: tl.constexpr):
    """The total of one row's chunks at columns o_n < end_n: [BLOCK_N]."""
    b_total = tl.zeros([BLOCK_N], tl.float32)
    p_chunk = partial + i_row.to(tl.int64) * num_n + o_n
    for _ in tl.range(0, num_chunks, loop_unroll_factor=4):
        b_total += tl.load(p_chunk, mask=o_n < end_n, other=0.0)
        p_chunk += num_rows.to(tl.int64) * num_n
    return b_total


@triton.jit
def fold_partials(out, partial, bias, num_rows, num_n, num_chunks, out_stride, has_bias, accumulate,
                  BLOCK_N: tl.constexpr):
    """The end of `gemm` for what `gemm_partial` wrote. Grid (M, cdiv(N, BLOCK_N))."""
    i_row = tl.program_id(0)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_total = fold_chunks(partial, i_row, o_n, num_n, num_rows, num_n, num_chunks, BLOCK_N)
    o_t = i_row + tl.arange(0, 1)
    finish(b_total[:, None], out, bias, o_n, o_t, num_rows, num_n, out_stride, has_bias, accumulate)


@triton.jit
def fold_silu_mul(out, partial, num_rows, num_n, num_chunks, out_stride, BLOCK_N: tl.constexpr):
    """The end of `gemm_silu_mul` for what `gemm_partial` wrote. Grid (M, cdiv(N/2, BLOCK_N))."""
    i_row = tl.program_id(0)
    half = num_n // 2
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_gate = fold_chunks(partial, i_row, o_n, half, num_rows, num_n, num_chunks, BLOCK_N)
    b_up = fold_chunks(partial + half, i_row, o_n, half, num_rows, num_n, num_chunks, BLOCK_N)
    p_out = out + i_row.to(tl.int64) * out_stride + o_n
    tl.store(p_out, silu_mul(b_gate, b_up).to(out.dtype.element_ty), mask=o_n < half)
