//! What a dense decoder is made of: plain data, read from a config and consumed by the one decoder
//! implementation. Every family (Llama, Mistral, Qwen2, Qwen3) differs only in these values.

mod rope;

use std::path::Path;

pub use rope::{LongRope, RopeScaling, RopeSpec, Yarn, yarn_attention_factor};

use crate::{error::LoadError, source::SourceDtype};

/// Most layers a spec may have.
pub const MAX_LAYERS: usize = 1024;
/// Most attention heads a spec may have.
pub const MAX_HEADS: usize = 1024;
/// Largest head dimension; every head dimension is a multiple of [`HEAD_DIM_MULTIPLE`].
pub const MAX_HEAD_DIM: usize = 256;
/// Head dimensions are multiples of this.
pub const HEAD_DIM_MULTIPLE: usize = 16;
/// Largest hidden size.
pub const MAX_HIDDEN_SIZE: usize = 1 << 17;
/// Largest MLP size.
pub const MAX_INTERMEDIATE_SIZE: usize = 1 << 20;
/// Largest vocabulary.
pub const MAX_VOCAB_SIZE: usize = 4_000_000;
/// Longest context.
pub const MAX_POSITIONS: usize = 1 << 27;

// No product of two of these dimensions overflows, so shapes need no checked arithmetic.
const _: () = assert!(MAX_VOCAB_SIZE.checked_mul(MAX_HIDDEN_SIZE).is_some());
const _: () = assert!(MAX_INTERMEDIATE_SIZE.checked_mul(MAX_HIDDEN_SIZE).is_some());
const _: () = assert!((MAX_HEADS * MAX_HEAD_DIM).checked_mul(MAX_HIDDEN_SIZE).is_some());

/// A dense decoder-only transformer with RMS norms and a SwiGLU MLP.
///
/// Specs from [`read_config`](crate::config::read_config) and
/// [`GgufFile::spec`](crate::gguf::GgufFile::spec) are checked: within the limits of this module,
/// `num_heads` a multiple of `num_kv_heads`, `windows` one a layer, token ids within the
/// vocabulary.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderSpec {
    /// Hugging Face architecture name, such as `LlamaForCausalLM`.
    pub architecture: String,
    /// Rows of the embedding and of the output projection; may exceed the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of one head; `num_heads * head_dim` need not be `hidden_size`.
    pub head_dim: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f32,
    /// Rotary position embedding.
    pub rope: RopeSpec,
    /// Longest context in tokens, as [`RopeScaling::stretched`] by the rotary scaling.
    pub max_position_embeddings: usize,
    /// The output projection is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// The query, key and value projections have biases.
    pub qkv_bias: bool,
    /// The attention output projection has a bias.
    pub o_bias: bool,
    /// The MLP projections have biases.
    pub mlp_bias: bool,
    /// Queries and keys are RMS-normalised per head before the rotation.
    pub qk_norm: bool,
    /// Sliding window of each layer: with `Some(w)` position `p` sees `p - w + 1 ..= p`.
    pub windows: Vec<Option<u32>>,
    /// Beginning-of-sequence token.
    pub bos: Option<u32>,
    /// Tokens that end a sequence: the union of every source that names one, in that order.
    pub eos: Vec<u32>,
    /// Type the weights were published in, where the config says so.
    pub torch_dtype: Option<SourceDtype>,
}

impl DecoderSpec {
    /// Checks what holds between values; `path` is the file they came from.
    pub(crate) fn check(&self, path: &Path) -> Result<(), LoadError> {
        self.find_conflict().map_err(|problem| LoadError::malformed(path, problem))
    }

    fn find_conflict(&self) -> Result<(), String> {
        for (key, value, limit) in [
            ("vocab_size", self.vocab_size, MAX_VOCAB_SIZE),
            ("hidden_size", self.hidden_size, MAX_HIDDEN_SIZE),
            ("intermediate_size", self.intermediate_size, MAX_INTERMEDIATE_SIZE),
            ("num_hidden_layers", self.num_layers, MAX_LAYERS),
            ("num_attention_heads", self.num_heads, MAX_HEADS),
            ("num_key_value_heads", self.num_kv_heads, MAX_HEADS),
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
            ("max_position_embeddings", self.max_position_embeddings, MAX_POSITIONS),
        ] {
            if !(1..=limit).contains(&value) {
                return Err(format!("{key} is {value}; it must be 1 to {limit}"));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(format!(
                "num_attention_heads is {}; it must be a multiple of num_key_value_heads {}",
                self.num_heads, self.num_kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(HEAD_DIM_MULTIPLE) {
            return Err(format!(
                "head_dim is {}; it must be a multiple of {HEAD_DIM_MULTIPLE}",
                self.head_dim
            ));
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps < 1.0) {
            return Err(format!(
                "rms_norm_eps is {}; it must be between 0 and 1",
                self.rms_norm_eps
            ));
        }
        if self.windows.len() != self.num_layers {
            return Err(format!(
                "{} layers have an attention type; there are {} layers",
                self.windows.len(),
                self.num_layers
            ));
        }
        for id in self.bos.iter().chain(&self.eos) {
            if *id as usize >= self.vocab_size {
                return Err(format!(
                    "token id {id} (bos or eos) is outside the vocabulary of {}",
                    self.vocab_size
                ));
            }
        }
        self.rope.check(self.head_dim)
    }
}
