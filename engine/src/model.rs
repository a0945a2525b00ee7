//! What the engine needs of a model.

use crate::ops::{Backend, KvLayout};
use std::ops::Range;

/// Rows of logits computed at a time; bounds the `[rows, vocab]` buffer.
pub const MAX_LOGIT_ROWS: usize = 64;

/// Facts about a model that sizes and limits are computed from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// Architecture name, as its configuration spells it.
    pub architecture: String,
    /// Rows of the output matrix; may exceed the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Positions the rotary tables cover.
    pub max_position_embeddings: usize,
    /// Parameters, tied ones counted once.
    pub num_parameters: u64,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// The largest attention window, where every layer has one.
    pub window: Option<usize>,
}

impl ModelInfo {
    /// What the names of the prefix cache are keyed by. It tells architectures and types apart,
    /// not the weights of two models of one kind: a cache lives and dies with its engine.
    pub fn cache_identity(&self, dtype: crate::DType) -> String {
        format!("{self:?} {dtype:?}")
    }

    /// The KV cache this model needs, with `num_blocks` blocks of `block_size` tokens.
    pub fn kv_layout(&self, num_blocks: usize, block_size: usize, dtype: crate::DType) -> KvLayout {
        KvLayout {
            num_layers: self.num_layers,
            num_blocks,
            block_size,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            dtype,
        }
    }
}

/// A model over some backend's ops. It owns its weights and its activations, sized for the
/// largest step when it was loaded.
pub trait Model<B: Backend>: Send {
    /// Sizes and names.
    fn info(&self) -> &ModelInfo;

    /// Computes the hidden states of the step given to [`Backend::begin_step`], reading and
    /// writing `kv`. They stay with the model for [`Model::logits`].
    fn forward(&mut self, backend: &mut B, kv: &mut B::KvCache);

    /// Logits `[rows, vocab_size]` (F32) of the step's `logits_indices[rows]`, at most
    /// [`MAX_LOGIT_ROWS`] of them.
    fn logits(&mut self, backend: &mut B, rows: Range<usize>) -> &mut B::Tensor;
}
