//! Sampling: parameters and their rules, and the sampler.
//!
//! Order, for one row: raw logprobs → min_tokens (stop ids suppressed) → temperature → min_p →
//! top_k → top_p → Gumbel-max with Philox noise. The noise depends on (seed, position, token id)
//! alone, so a request's draws do not depend on what else is in the batch.

mod params;
mod philox;
mod sampler;
mod select;

pub use params::{MAX_LOGPROBS, ParamError, SamplingParams};
pub use philox::{philox4x32, uniform};
pub use sampler::{Sampler, sample_row};

use std::ops::Range;

/// How to choose one row's token; the resolved form of [`SamplingParams`].
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingRow {
    /// The row wants a token; otherwise only its logits are looked at.
    pub sample: bool,
    /// Below 1e-5 the maximum is taken.
    pub temperature: f32,
    /// 0 = off.
    pub top_k: u32,
    /// 1 = off.
    pub top_p: f32,
    /// 0 = off.
    pub min_p: f32,
    /// Philox key.
    pub seed: u64,
    /// Absolute position of the token to be sampled; Philox counter.
    pub position: u32,
    /// Log-probabilities wanted: of the sampled token and this many best ones.
    pub logprobs: Option<u32>,
    /// Ids that must not be sampled, in [`SamplingBatch::suppressed`].
    pub suppressed: Range<usize>,
}

/// The rows of a step, in the order of `logits_indices`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingBatch {
    /// `[R]`
    pub rows: Vec<SamplingRow>,
    /// Id lists the rows refer to.
    pub suppressed: Vec<u32>,
    /// Ids from here on are padding of the output matrix and never sampled.
    pub vocab_limit: usize,
}

impl SamplingBatch {
    /// Empties the batch, keeping its memory.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.suppressed.clear();
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
    /// The token that was sampled.
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
}

/// What was chosen for one row.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleOutput {
    /// The token, or why this row (and no other) failed.
    pub token: Result<u32, RowError>,
    /// Where asked for and the row did not fail.
    pub logprobs: Option<TokenLogprobs>,
}
