"""Gated activations of the MLP."""

import triton
import triton.language as tl


@triton.jit
def silu_mul(out, gate_up, width, BLOCK: tl.constexpr):
    """out = silu(gate) * up, in f32 and rounded once. Grid (R, cdiv(width, BLOCK)).

    out: [R, width]; gate_up: [R, 2 width] f32, a row's gates before its ups.
    """
    i_r = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = gate_up + i_r * 2 * width
    b_gate = tl.load(row + o_d, mask=o_d < width, other=0.0)
    b_up = tl.load(row + width + o_d, mask=o_d < width, other=0.0)
    # exp overflows to infinity for very negative gates: silu is then -0.
    b_y = tl.div_rn(b_gate, 1.0 + tl.exp(-b_gate)) * b_up
    tl.store(out + i_r * width + o_d, b_y.to(out.dtype.element_ty), mask=o_d < width)
