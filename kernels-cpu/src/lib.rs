//! Quire's CPU kernels: SIMD GEMM, quantised GEMM, paged attention, norms, worker pool.
//!
//! Every kernel takes a [`Ctx`] (an instruction set and a pool of workers) and plain slices.
//! Activations that feed a matrix kernel are rows of 32-bit words, see [`Dtype`].
//!
//! Architecture invariant: on one instruction-set path a result depends on its own row's data
//! alone, bit for bit. It does not depend on how many rows there are, which they are, how many
//! workers share them, how a prompt is chunked, or the KV block size.

mod attention;
mod buf;
mod ceiling;
mod ctx;
mod dtype;
mod gemm;
mod isa;
mod kv;
mod matrix;
mod norm;
mod philox;
mod pool;
mod ptr;
mod quant;
mod rope;
mod simd;
mod tile;
pub mod vecmath;

pub use attention::{AttnArgs, AttnScratch, AttnScratchShape, attention};
pub use buf::{AllocError, Arena, Words};
pub use ceiling::{MatrixKind, Pages, ReadBuffer, matrix_peak, read_bandwidth};
pub use ctx::{Ctx, CtxError};
pub use dtype::Dtype;
pub use gemm::{Epilogue, gemm};
pub use isa::{Isa, UnknownIsa};
pub use kv::{KvCache, KvError, KvShape, MAX_HEAD_DIM};
pub use matrix::{PANEL, PackedMatrix, gate_up_row, gate_up_rows, gate_up_source};
pub use norm::{gather_rows, rms_norm, to_words};
pub use philox::{gumbel, gumbel_argmax, philox4x32, uniform};
pub use pool::{Pool, usable_cores};
pub use quant::{QuantError, QuantKind, QuantMatrix, QuantRows, gemm_quant};
pub use rope::{QkvArgs, qk_norm_rope_write_kv};
