//! Sampling: parameters and their rules, logits processors, and the sampler.
//!
//! Order, for one row: raw logprobs → allowed ids → bad words → min_tokens (stop ids) and logit
//! bias → custom processor → repetition, frequency and presence penalties → temperature → min_p →
//! top_k → top_p → Gumbel-max with Philox noise. The noise depends on (seed, position, token id)
//! alone, so a request's draws do not depend on what else is in the batch.

mod beam;
mod params;
mod processors;
mod sampler;
mod select;

#[cfg(feature = "cuda")]
pub(crate) use params::GREEDY_BELOW;

pub use beam::{BeamExtension, BeamParams, BeamSearch, BeamStep, EarlyStopping, Hypothesis};
pub use params::{
    DEFAULT_MAX_LOGPROBS, MAX_BAD_WORD_BYTES, MAX_BAD_WORDS, MAX_BEAM_STOP_IDS, MAX_BEAM_WIDTH,
    MAX_CACHE_SALT_BYTES, MAX_N, NumLogprobs, ParamError, ParamLimits, SamplingParams,
};
pub use processors::{LogitsContext, LogitsProcessor};
pub use sampler::{Sampler, sample_row};

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// What a row's logits are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowTarget {
    /// A token is sampled.
    Sample,
    /// The next token is known; its log-probability is wanted.
    Given(u32),
    /// Only the logits are wanted.
    Nothing,
}

/// How to choose one row's token; the resolved form of [`SamplingParams`]. Ranges refer to the
/// arrays of [`SamplingBatch`].
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingRow {
    /// What is wanted of the row.
    pub target: RowTarget,
    /// Below 1e-5 the maximum is taken.
    pub temperature: f32,
    /// 0 = off.
    pub top_k: u32,
    /// 1 = off.
    pub top_p: f32,
    /// 0 = off.
    pub min_p: f32,
    /// 1 = off.
    pub repetition_penalty: f32,
    /// 0 = off.
    pub frequency_penalty: f32,
    /// 0 = off.
    pub presence_penalty: f32,
    /// Philox key.
    pub seed: u64,
    /// Absolute position of the token to be sampled; Philox counter.
    pub position: u32,
    /// Log-probabilities wanted: of the token and this many best ones.
    pub logprobs: Option<u32>,
    /// Only these ids may be sampled; they ascend.
    pub allowed: Option<Range<usize>>,
    /// Ids that must not be sampled.
    pub suppressed: Range<usize>,
    /// Added to logits.
    pub bias: Range<usize>,
    /// Tokens that penalties apply to.
    pub seen: Range<usize>,
    /// Custom processor, with the sequence so far in `history`.
    pub processor: Option<ProcessorCall>,
}

impl Default for SamplingRow {
    /// Draws from the plain softmax.
    fn default() -> Self {
        SamplingRow {
            target: RowTarget::Sample,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
            position: 0,
            logprobs: None,
            allowed: None,
            suppressed: 0..0,
            bias: 0..0,
            seen: 0..0,
            processor: None,
        }
    }
}

/// A custom processor at work on a row.
#[derive(Clone)]
pub struct ProcessorCall {
    /// The processor.
    pub processor: Arc<dyn LogitsProcessor>,
    /// Prompt and output so far, in [`SamplingBatch::history`].
    pub history: Range<usize>,
    /// How many of them are the prompt.
    pub prompt_len: usize,
}

impl fmt::Debug for ProcessorCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessorCall({:?})", self.history)
    }
}

impl PartialEq for ProcessorCall {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.processor, &other.processor)
            && self.history == other.history
            && self.prompt_len == other.prompt_len
    }
}

/// A token of the sequence so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenToken {
    /// Token id.
    pub token: u32,
    /// Times it is in the output; 0 = only in the prompt.
    pub output_count: u32,
}

/// The rows of a step, in the order of `logits_indices`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingBatch {
    /// `[R]`
    pub rows: Vec<SamplingRow>,
    /// Allowed and suppressed ids that rows refer to.
    pub ids: Vec<u32>,
    /// (id, bias) that rows refer to; the ids of one row are distinct.
    pub biases: Vec<(u32, f32)>,
    /// Distinct tokens of sequences with penalties.
    pub seen: Vec<SeenToken>,
    /// Tokens of sequences with a custom processor.
    pub history: Vec<u32>,
    /// Ids from here on are padding of the output matrix and never sampled.
    pub vocab_limit: usize,
}

impl SamplingBatch {
    /// Empties the batch, keeping its memory.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.ids.clear();
        self.biases.clear();
        self.seen.clear();
        self.history.clear();
    }
}

/// A token with its log-probability (natural logarithm).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Token id.
    pub token: u32,
    /// ln p under the raw logits, before any parameter.
    pub logprob: f32,
}

/// Log-probabilities at one position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token at this position.
    pub sampled: TokenLogprob,
    /// The most likely tokens, best first; equal ones by id.
    pub top: Vec<TokenLogprob>,
}

/// Why a row has no token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// A logit is NaN or +∞.
    #[error("the model produced a logit that is not a number")]
    NotANumber,
    /// Every id is suppressed or −∞.
    #[error("no token is allowed")]
    NothingAllowed,
    /// The request's custom logits processor panicked.
    #[error("the request's logits processor panicked")]
    ProcessorPanicked,
}

/// What was chosen for one row.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleOutput {
    /// The token (sampled or given), or why this row (and no other) failed.
    pub token: Result<u32, RowError>,
    /// Where asked for and the row did not fail.
    pub logprobs: Option<TokenLogprobs>,
}
