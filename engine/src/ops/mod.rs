//! The operations a model is written in: `trait Backend`, its tensors, and the ragged step input.
//!
//! # What the trait is shaped by
//! * **Buffers belong to the backend.** A model holds handles (`Tensor`, `Matrix`, `Vector`) and
//!   never sees bytes in the middle of a step. On a GPU a handle is a device allocation that never
//!   moves, so a decode step can be captured once and replayed.
//! * **Metadata goes up once a step.** [`Backend::begin_step`] takes the whole [`ForwardInput`];
//!   ops read positions, slots and block tables from where the backend put them.
//! * **Sampled ids need not come down.** [`Backend::sample`] leaves them with the backend and
//!   [`Backend::read_samples`] fetches them, so that a device can start the next step first.
//! * **Fused ops are the unit.** Each op is one GEMM with its epilogue or one memory pass; a
//!   backend may split an op into several kernels, a model may not.
//! * **Rows travel with the tensor.** An op sets the row count of what it writes, so a model is
//!   written once for prefill, decode and mixed batches.
//!
//! # Numerics
//! Every op computes each output row from that row's own inputs in one fixed order, whatever else
//! is in the batch (batch invariance). `Compute` tensors hold values rounded to the backend's
//! dtype; `F32` tensors hold the residual stream, qkv and logits. Accumulation is f32. Quantisation
//! is a property of a weight: an op with a quantised one quantises its input, row by row, first.

mod dtype;
mod input;
mod quantised;

pub use dtype::DType;
pub use input::{BlockTransfers, ForwardInput, KvLayout};
pub use quantised::{BlockFormat, WeightFormats};

use crate::sampling::{SampleOutput, SamplingBatch};
use std::ops::Range;

/// What an activation tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorKind {
    /// f32 values: residual stream, qkv, logits.
    F32,
    /// Values rounded to the backend's dtype: inputs of GEMM and attention.
    Compute,
}

/// What is known of a weight before it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    /// How its rows are used.
    pub layout: MatrixLayout,
    /// Rows.
    pub n: usize,
    /// Columns.
    pub k: usize,
    /// See [`WeightRows::block_format`].
    pub blocks: Option<BlockFormat>,
}

/// How the rows of a weight matrix are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixLayout {
    /// `y = x Wᵀ`, also usable as an embedding table.
    Plain,
    /// Rows `0..n/2` are the gate, rows `n/2..n` the up projection of a SiLU MLP;
    /// only for [`Backend::gate_up_silu_mul`].
    GateUp,
}

/// Why a row of a weight cannot be read.
pub type ReadError = Box<dyn std::error::Error + Send + Sync>;

/// The rows of a weight, read by several threads. A function that reads rows is one.
pub trait WeightRows: Sync {
    /// Reads a row as f32.
    fn read(&self, row: usize, out: &mut [f32]) -> Result<(), ReadError>;

    /// The type that every row is stored in, where it is one that a backend computes in and the
    /// bytes are at hand as this machine lays them out.
    fn stored_type(&self) -> Option<DType> {
        None
    }

    /// The bytes of a row of such a weight, or the blocks of one that has a
    /// [`Self::block_format`].
    fn stored(&self, _row: usize) -> Option<&[u8]> {
        None
    }

    /// Says that rows have been read for now; what memory holds of their file may be let go.
    fn release(&self, _rows: Range<usize>) {}

    /// The format that every row is stored in, where it is one of quantised blocks.
    fn block_format(&self) -> Option<BlockFormat> {
        None
    }
}

impl<F: Fn(usize, &mut [f32]) -> Result<(), ReadError> + Sync> WeightRows for F {
    fn read(&self, row: usize, out: &mut [f32]) -> Result<(), ReadError> {
        self(row, out)
    }
}

/// Rotary embedding: tables and how pairs are laid out.
#[derive(Debug)]
pub struct Rope<V> {
    /// `[max_position, rot_dim / 2]` cosines.
    pub cos: V,
    /// `[max_position, rot_dim / 2]` sines.
    pub sin: V,
    /// How many leading dimensions of a head are rotated; even.
    pub rot_dim: usize,
    /// Pairs are (2i, 2i+1) instead of (i, i + rot_dim/2).
    pub interleaved: bool,
}

/// Arguments of [`Backend::qk_norm_rope_write_kv`].
#[derive(Debug)]
pub struct QkvArgs<'a, B: Backend> {
    /// Layer of the KV cache to write.
    pub layer: usize,
    /// Query heads; the cache knows the KV heads and the head dimension.
    pub num_heads: usize,
    /// `[head_dim]` RMS-norm weights of the query heads, where the model has them.
    pub q_norm: Option<&'a B::Vector>,
    /// `[head_dim]` RMS-norm weights of the key heads.
    pub k_norm: Option<&'a B::Vector>,
    /// Epsilon of both norms.
    pub eps: f32,
    /// Rotary tables.
    pub rope: &'a Rope<B::Vector>,
}

/// Arguments of [`Backend::attention`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs {
    /// Layer of the KV cache to read.
    pub layer: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Softmax scale, usually `head_dim^-0.5`.
    pub scale: f32,
    /// Position `p` sees keys `p − window + 1 ..= p`; `None` sees all up to `p`.
    pub window: Option<u32>,
}

/// A part of a model, in the order of computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelPart {
    /// Tokens to vectors.
    Embedding,
    /// A decoder layer, counted from 0.
    Layer(usize),
    /// Vectors to logits.
    Head,
}

/// What a backend says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendInfo {
    /// `reference`, `cpu` or `cuda`.
    pub name: &'static str,
    /// Instruction-set path or GPU architecture.
    pub isa: String,
    /// Worker threads; 1 where it does not apply.
    pub threads: usize,
    /// Type of GEMM inputs, the KV cache and the weights that are not quantised.
    pub dtype: DType,
    /// The weights that are, of those loaded so far.
    pub quantization: WeightFormats,
    /// A request's results do not depend on what else is in the batch.
    pub batch_invariant: bool,
}

/// The largest step a backend is asked for, and the shapes that it depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Tokens.
    pub max_tokens: usize,
    /// Sequences.
    pub max_seqs: usize,
    /// Tokens of one sequence.
    pub max_positions: usize,
    /// Log-probabilities of the most likely tokens that a row may ask for.
    pub max_logprobs: usize,
    /// Tokens of a KV block.
    pub block_size: usize,
    /// There is a host cache to swap blocks to.
    pub swap: bool,
    /// Columns of the logits.
    pub vocab_size: usize,
    /// Query heads.
    pub num_heads: usize,
}

/// Errors a backend can return; after any of them in a step the step's results are void.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// Memory for a buffer could not be had.
    #[error("cannot allocate {bytes} bytes for {what}")]
    OutOfMemory {
        /// What the buffer was for.
        what: String,
        /// Its size.
        bytes: usize,
    },
    /// The backend cannot run this configuration.
    #[error("{backend} backend: {reason}")]
    Unsupported {
        /// Backend name.
        backend: &'static str,
        /// What is not supported and the limit.
        reason: String,
    },
    /// A weight could not be read.
    #[error(transparent)]
    Source(Box<dyn std::error::Error + Send + Sync>),
    /// The device failed.
    #[error("{source}")]
    Device {
        /// What it says.
        source: Box<dyn std::error::Error + Send + Sync>,
        /// Nothing more can be computed on it in this process.
        lost: bool,
    },
}

impl BackendError {
    /// Whether every step from now on would fail, too.
    pub fn is_lost(&self) -> bool {
        matches!(self, BackendError::Device { lost: true, .. })
    }
}

/// The fused operations of a decoder, over tensors the backend owns.
///
/// `T` is the number of tokens in the step, `R` the number of rows that need logits.
pub trait Backend: Sized + Send + 'static {
    /// Activation `[rows ≤ max_rows, cols]`.
    type Tensor: Send;
    /// Weight `[n, k]`, packed as the backend likes.
    type Matrix: Send;
    /// Small f32 parameter: norm weight, bias, rotary table.
    type Vector: Send + std::fmt::Debug;
    /// Paged keys and values of every layer.
    type KvCache: Send;
    /// KV blocks in host memory, of the same shape.
    type HostCache: Send;

    /// Name, ISA, threads, dtype.
    fn info(&self) -> BackendInfo;

    // ---- load time -------------------------------------------------------------------------

    /// Packs a weight of `n` rows and `k` columns, reading each row once.
    fn matrix(
        &mut self,
        layout: MatrixLayout,
        n: usize,
        k: usize,
        rows: &dyn WeightRows,
    ) -> Result<Self::Matrix, BackendError>;

    /// Whether a weight of this shape would be kept in its blocks or otherwise quantised.
    fn quantises(&self, _shape: &MatrixShape) -> bool {
        false
    }

    /// One weight whose rows are those of several plain ones, which may differ in format; only
    /// asked for where some of them are quantised, and not for embeddings.
    fn stack(&mut self, _parts: Vec<Self::Matrix>) -> Self::Matrix {
        unreachable!("no weight is quantised")
    }

    /// Uploads a small parameter.
    fn vector(&mut self, data: &[f32]) -> Result<Self::Vector, BackendError>;

    /// Allocates an activation of at most `max_rows` rows; its contents are unspecified.
    fn tensor(
        &mut self,
        max_rows: usize,
        cols: usize,
        kind: TensorKind,
    ) -> Result<Self::Tensor, BackendError>;

    /// Allocates the KV cache.
    fn kv_cache(&mut self, layout: &KvLayout) -> Result<Self::KvCache, BackendError>;

    /// Allocates `num_blocks` blocks of `layout` in host memory, whatever the layout's own number
    /// of blocks; none is allowed.
    fn host_cache(
        &mut self,
        layout: &KvLayout,
        num_blocks: usize,
    ) -> Result<Self::HostCache, BackendError>;

    /// Allocates what steps need besides the model's own buffers; called once, after the caches
    /// are there.
    fn reserve(&mut self, _limits: &StepLimits) -> Result<(), BackendError> {
        Ok(())
    }

    // ---- between steps ---------------------------------------------------------------------

    /// Copies blocks (source, destination) of all layers within the cache. As all transfers, it
    /// comes between two steps, and `pairs` keep what [`BlockTransfers`] promises.
    fn copy_blocks(
        &mut self,
        kv: &mut Self::KvCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), BackendError>;

    /// Copies blocks (of the cache, of the host cache) to the host.
    fn swap_out(
        &mut self,
        kv: &Self::KvCache,
        host: &mut Self::HostCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), BackendError>;

    /// Copies blocks (of the host cache, of the cache) from the host.
    fn swap_in(
        &mut self,
        kv: &mut Self::KvCache,
        host: &mut Self::HostCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), BackendError>;

    /// Waits until all that was asked for is done.
    fn synchronize(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    // ---- a step ----------------------------------------------------------------------------

    /// Takes the step's metadata and puts tokens in the place of its placeholders. Every op until
    /// the next call refers to it.
    fn begin_step(&mut self, input: &ForwardInput) -> Result<(), BackendError>;

    /// Says which part of the model the ops that follow belong to; for tracing and profiling.
    fn enter(&mut self, _part: ModelPart) {}

    /// `out[T, hidden] = table[token_ids]`.
    fn embed(&mut self, table: &Self::Matrix, out: &mut Self::Tensor);

    /// `out = x Wᵀ + bias`; `x` Compute, `out` F32.
    fn linear(
        &mut self,
        x: &Self::Tensor,
        w: &Self::Matrix,
        bias: Option<&Self::Vector>,
        out: &mut Self::Tensor,
    );

    /// `residual += x Wᵀ + bias`; `x` Compute, `residual` F32.
    fn linear_add(
        &mut self,
        x: &Self::Tensor,
        w: &Self::Matrix,
        bias: Option<&Self::Vector>,
        residual: &mut Self::Tensor,
    );

    /// `out = silu(x Wgateᵀ) · (x Wupᵀ)`; `w` has layout [`MatrixLayout::GateUp`], `out` Compute.
    fn gate_up_silu_mul(&mut self, x: &Self::Tensor, w: &Self::Matrix, out: &mut Self::Tensor);

    /// `out = x / sqrt(mean(x²) + eps) · weight` by rows; `x` F32, `out` Compute.
    fn rms_norm(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Tensor,
    );

    /// Splits `qkv[T, (Hq + 2·Hkv)·D]` (F32) into heads, normalises q and k heads where the model
    /// does, rotates them, writes k and v to the step's slots (slot −1 is skipped) and
    /// `q[T, Hq·D]` (Compute).
    fn qk_norm_rope_write_kv(
        &mut self,
        qkv: &Self::Tensor,
        args: &QkvArgs<'_, Self>,
        kv: &mut Self::KvCache,
        q: &mut Self::Tensor,
    );

    /// Causal attention of `q[T, Hq·D]` over each sequence's cached keys and values, read through
    /// its block table; `out[T, Hq·D]` Compute. What lies beyond `seq_len` is never part of it, and
    /// a block of which no row of the sequence sees any slot is not read: it may be freed.
    fn attention(
        &mut self,
        q: &Self::Tensor,
        args: &AttentionArgs,
        kv: &Self::KvCache,
        out: &mut Self::Tensor,
    );

    /// `out = x[logits_indices[rows]]`, both F32.
    fn gather_rows(
        &mut self,
        x: &Self::Tensor,
        rows: std::ops::Range<usize>,
        out: &mut Self::Tensor,
    );

    /// Answers each row of `logits[R', vocab]` that has a target, by `batch.rows[rows]`; the ids
    /// stay with the backend. `logits` is scratch afterwards.
    fn sample(
        &mut self,
        logits: &mut Self::Tensor,
        batch: &SamplingBatch,
        rows: std::ops::Range<usize>,
    ) -> Result<(), BackendError>;

    /// Whether the step that failed just now is worth beginning again at once, as the backend would
    /// compute it in another way.
    fn wants_retry(&mut self) -> bool {
        false
    }

    /// The step has no more ops.
    fn end_step(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    /// Whether a step may begin before [`Backend::read_samples`] was called for the one before.
    fn runs_ahead(&self) -> bool {
        false
    }

    /// Appends what [`Backend::sample`] chose in the oldest step whose samples were not read, in
    /// row order; waits for it where there is anything to append.
    fn read_samples(&mut self, out: &mut Vec<SampleOutput>) -> Result<(), BackendError>;

    /// Forgets the steps whose samples were not read, and one that did not end.
    fn abandon_steps(&mut self) {}

    /// Rows `x` has now.
    fn num_rows(&self, x: &Self::Tensor) -> usize;

    /// Appends row `row` of a tensor as f32: for verification, not for the hot path.
    fn read_row(
        &mut self,
        x: &Self::Tensor,
        row: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError>;
}
