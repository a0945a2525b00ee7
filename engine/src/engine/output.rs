//! What comes out: deltas while a request runs, one output when it ends.

use super::RequestId;
use crate::sampling::TokenLogprobs;
use serde::Serialize;
use std::time::Duration;

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop string, a stop token or EOS.
    Stop,
    /// `max_tokens`, or the end of the context.
    Length,
    /// [`crate::Engine::abort`].
    Abort,
    /// The request itself failed; others go on.
    Error(String),
}

impl FinishReason {
    /// The field's usual name.
    pub fn name(&self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
            FinishReason::Error(_) => "error",
        }
    }
}

/// What stopped a request that ended with [`FinishReason::Stop`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    /// This stop string.
    Text(String),
    /// This token.
    Token(u32),
}

/// Clock readings of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestMetrics {
    /// Arrival → first time in a step.
    pub queue: Option<Duration>,
    /// Arrival → first token.
    pub ttft: Option<Duration>,
    /// Mean time between tokens after the first; `None` with fewer than two.
    pub tpot: Option<Duration>,
    /// Arrival → end.
    pub e2e: Duration,
    /// Times its blocks were taken.
    pub num_preemptions: u32,
    /// Prompt tokens that were found in the prefix cache.
    pub num_cached_tokens: usize,
}

/// New text and tokens of a streaming request.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestDelta {
    /// The request.
    pub request_id: RequestId,
    /// Which of its `n` sequences.
    pub index: usize,
    /// Text that is certain now; may be empty. Text still held back when a request is aborted or
    /// fails is in its [`RequestOutput`] only.
    pub text: String,
    /// The new token.
    pub token_id: u32,
    /// Its log-probabilities, where asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// A sequence of a request that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestOutput {
    /// The request.
    pub request_id: RequestId,
    /// Which of its `n` sequences.
    pub index: usize,
    /// The prompt as ids.
    pub prompt_token_ids: Vec<u32>,
    /// The whole output as text.
    pub text: String,
    /// The whole output as ids, a final stop token included.
    pub token_ids: Vec<u32>,
    /// One entry for each of `token_ids`, where asked for.
    pub logprobs: Option<Vec<TokenLogprobs>>,
    /// One entry for each of `prompt_token_ids` but the first, where asked for.
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// What stopped it.
    pub stop_reason: Option<StopReason>,
    /// The seed of its draws.
    pub seed: u64,
    /// Clock readings.
    pub metrics: RequestMetrics,
    /// Logits of positions `0..`, where captured.
    pub logits: Vec<Vec<f32>>,
    /// How likely it is, where it was found by beam search.
    pub beam: Option<BeamScore>,
}

/// How likely a sequence is that beam search found.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BeamScore {
    /// Sum of the log-probabilities of its tokens.
    pub cumulative_logprob: f64,
    /// The sum over length^`length_penalty`.
    pub score: f64,
}

/// What one step brought.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// Of streaming requests, in batch order.
    pub deltas: Vec<RequestDelta>,
    /// Requests that ended, in batch order.
    pub finished: Vec<RequestOutput>,
}
