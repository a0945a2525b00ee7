//! What a dense decoder is made of: plain data, read from a config and consumed by the one decoder
//! implementation. Every family (Llama, Mistral, Qwen2, Qwen3) differs only in these values.

use std::{f64::consts::PI, path::Path};

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
    /// Longest context the model was trained for, in tokens.
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

/// Rotary position embedding of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// Base of the frequencies.
    pub theta: f64,
    /// Leading elements of a head that are rotated; even, at most `head_dim`.
    pub rot_dim: usize,
    /// Pairs are `(2i, 2i + 1)`; otherwise `(i, i + rot_dim / 2)`.
    pub interleaved: bool,
    /// Change of the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// How a model stretches its rotary frequencies.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Plain `theta^(-2i / rot_dim)`.
    None,
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a linear ramp between
    /// (`_compute_llama3_parameters` in transformers).
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths over `original_max_position_embeddings / low_freq_factor` are scaled.
        low_freq_factor: f64,
        /// Wavelengths under `original_max_position_embeddings / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of the unscaled model, in tokens.
        original_max_position_embeddings: usize,
    },
    /// One divisor for each of the `rot_dim / 2` frequencies, as GGUF files store any scaling.
    Factors(Vec<f32>),
}

impl RopeSpec {
    /// The `rot_dim / 2` angles per position, in radians, scaling applied.
    pub fn inv_freq(&self) -> Vec<f64> {
        let plain =
            (0..self.rot_dim / 2).map(|i| self.theta.powf(-((2 * i) as f64) / self.rot_dim as f64));
        match &self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Factors(factors) => {
                plain.zip(factors).map(|(freq, &factor)| freq / f64::from(factor)).collect()
            }
            &RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let context = original_max_position_embeddings as f64;
                plain
                    .map(|freq| {
                        let turns = context * freq / (2.0 * PI);
                        let ramp = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                        let kept = ramp.clamp(0.0, 1.0);
                        (1.0 - kept) * freq / factor + kept * freq
                    })
                    .collect()
            }
        }
    }

    fn check(&self, head_dim: usize) -> Result<(), String> {
        if !(self.theta.is_finite() && self.theta > 1.0) {
            return Err(format!("rope_theta is {}; it must be finite and over 1", self.theta));
        }
        if self.rot_dim == 0 || !self.rot_dim.is_multiple_of(2) || self.rot_dim > head_dim {
            return Err(format!(
                "the rotary dimension is {}; it must be even, at least 2 and at most head_dim \
                 {head_dim}",
                self.rot_dim
            ));
        }
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Factors(factors) => check_factors(factors, self.rot_dim / 2),
            &RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let good = factor.is_finite()
                    && factor >= 1.0
                    && low_freq_factor > 0.0
                    && high_freq_factor.is_finite()
                    && high_freq_factor > low_freq_factor
                    && original_max_position_embeddings >= 1;
                let found = || {
                    format!(
                        "llama3 rope scaling has factor {factor}, low_freq_factor \
                         {low_freq_factor}, high_freq_factor {high_freq_factor}; it needs factor \
                         >= 1 and 0 < low < high"
                    )
                };
                good.then_some(()).ok_or_else(found)
            }
        }
    }
}

fn check_factors(factors: &[f32], expected: usize) -> Result<(), String> {
    if factors.len() != expected {
        return Err(format!("there are {} rope factors; it takes {expected}", factors.len()));
    }
    match factors.iter().position(|f| !(f.is_finite() && *f > 0.0)) {
        Some(i) => Err(format!("rope factor {i} is {}; it must be finite and over 0", factors[i])),
        None => Ok(()),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: RopeScaling) -> RopeSpec {
        RopeSpec { theta: 10000.0, rot_dim: 8, interleaved: false, scaling }
    }

    #[test]
    fn plain_frequencies_are_powers_of_theta() {
        let expected = [1.0, 0.1, 0.01, 0.001];
        for (freq, expected) in rope(RopeScaling::None).inv_freq().into_iter().zip(expected) {
            assert!((freq - expected).abs() < 1e-15, "{freq} {expected}");
        }
    }

    #[test]
    fn llama3_keeps_high_divides_low_and_blends_between() {
        let scaled = rope(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 128,
        })
        .inv_freq();
        // Turns within 128 positions: 20.4, 2.04, 0.2, 0.02.
        let turns = 128.0 * 0.1 / (2.0 * PI);
        let kept = (turns - 1.0) / 3.0;
        let expected = [1.0, (1.0 - kept) * 0.1 / 8.0 + kept * 0.1, 0.01 / 8.0, 0.001 / 8.0];
        for (freq, expected) in scaled.into_iter().zip(expected) {
            assert!((freq - expected).abs() < 1e-15, "{freq} {expected}");
        }
    }

    #[test]
    fn factors_divide_each_frequency() {
        let scaled = rope(RopeScaling::Factors(vec![1.0, 2.0, 4.0, 8.0])).inv_freq();
        let plain = rope(RopeScaling::None).inv_freq();
        for (i, (scaled, plain)) in scaled.into_iter().zip(plain).enumerate() {
            assert_eq!(scaled * f64::from(1 << i), plain);
        }
    }

    #[test]
    fn bad_rope_is_refused_with_its_value() {
        let message = |rope: RopeSpec| rope.check(64).unwrap_err();
        let plain = rope(RopeScaling::None);
        assert!(message(RopeSpec { theta: f64::NAN, ..plain.clone() }).contains("NaN"));
        assert!(message(RopeSpec { rot_dim: 66, ..plain.clone() }).contains("66"));
        assert!(message(RopeSpec { rot_dim: 7, ..plain.clone() }).contains('7'));
        assert!(message(rope(RopeScaling::Factors(vec![1.0; 3]))).contains("takes 4"));
        let zero = rope(RopeScaling::Factors(vec![1.0, 0.0, 1.0, 1.0]));
        assert!(message(zero).contains("factor 1 is 0"));
        assert_eq!(plain.check(64), Ok(()));
    }
}
