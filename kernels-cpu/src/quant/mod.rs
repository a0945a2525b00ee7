//! Quantised weights, multiplied in their own format.
//!
//! Weights are 8-bit rows ([`QuantKind::Int8`]) or the blocks of a GGUF file as they come. The
//! activations are quantised when they are used, row by row, so a row's result depends on that
//! row alone.
//!
//! # Arithmetic
//! Activations: over each block of K (the weights' block; the whole row for `Int8`), with
//! `a = max |x|`, the scale is `a / 127` and each value is `x · (127 / a)` rounded to nearest even,
//! `-127..=127`. A block whose `a` is below 2⁻¹⁰⁰ counts as zeros. A block with a NaN or an
//! infinity gets zeros and the scale NaN, so its row's outputs are all NaN and no other row sees
//! it. The `Int8` weights are quantised in the same way.
//!
//! Products: sums of integers, exact in `i32`, within a block; then one chain over the blocks in
//! the order of K, from 0, every `fma` rounded once:
//!
//! ```text
//! acc = fma(scale_w · scale_x, dot as f32, acc)
//! acc = fma(min_w · scale_x, sum as f32, acc)          where the format has a minimum
//!
//! Int8, Q8_0, Q4_0   dot = Σ w·x
//! Q4_1               dot = Σ w·x                       sum = Σ x
//! Q4_K               dot = Σ_g scale_g · Σ w·x         sum = Σ_g min_g · Σ x     g: 32 elements
//! Q6_K               dot = Σ_g scale_g · Σ w·x                                   g: 16 elements
//! ```
//!
//! `Int8` has one block, so its product is `scale_w · scale_x · dot` rounded twice. All of it is
//! the same for any number of rows or workers and, unlike the floating-point kernels, on every
//! instruction set. (SiLU·mul then follows the instruction set's own exponential.)
//!
//! # Packed form
//! Panels of 64 output columns as in [`crate::PackedMatrix`], each one run of memory along K. A
//! word holds bytes (or nibble pairs) of one column, words of 64 columns lie side by side, so a
//! vector load serves 16 outputs and nothing is ever summed across lanes. It takes the bytes of
//! the GGUF blocks, N padded to a multiple of 64.
//!
//! ```text
//! Int8   [64] f32 scales, then for each 4 elements  [64] words of 4 bytes + 128
//! others, for each block:
//! Q8_0   [64] f16 scales  [8][64] words of 4 bytes + 128
//! Q4_0   [64] f16 scales  [4][64] words of 8 nibbles
//! Q4_1   [64] f16 scales  [64] f16 minima  [4][64] words of 8 nibbles
//! Q4_K   [64] f16 scales  [64] f16 -minima [3][64] words of 6-bit pairs  [32][64] of 8 nibbles
//! Q6_K   [64] f16 scales  [4][64] words of 4 scales + 128
//!        [16] × ([64] words of 16 top bit pairs  [2][64] words of 8 nibbles)
//! ```
//! Nibbles: byte `i` of word `j` has element `8j + i` in its low half and `8j + 4 + i` in its high
//! half. Bit pairs: pair `s` of byte `i` is of element `4s + i` of the 16.

mod codec;
mod formats;
mod gemm;
mod kind;
mod matrix;
mod rows;
mod tile;

pub use gemm::gemm_quant;
pub use kind::{QuantError, QuantKind};
pub use matrix::QuantMatrix;
pub use rows::QuantRows;

use crate::simd::ROUND_MAGIC;

/// Largest quantised magnitude.
const Q_MAX: f32 = 127.0;

/// Blocks below this in magnitude count as zeros: `127 / a` and the products of scales stay finite
/// and normal.
const SMALLEST: f32 = f32::from_bits((127 - 100) << 23);

/// The scale of values up to `max_abs`, and its inverse, with which they are multiplied.
///
/// `poison` is 0, or NaN if a value is not finite.
#[inline(always)]
fn scale_and_inverse(max_abs: f32, poison: f32) -> (f32, f32) {
    if poison.is_nan() {
        (f32::NAN, 0.0)
    } else if max_abs < SMALLEST {
        (0.0, 0.0)
    } else {
        (max_abs / Q_MAX, Q_MAX / max_abs)
    }
}

/// `x` of magnitude up to 127.5 as a byte, to nearest even.
#[inline(always)]
fn round_i8(x: f32) -> i8 {
    (x + ROUND_MAGIC).to_bits() as i8
}
