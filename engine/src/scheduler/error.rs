//! Requests that can never run.

/// Why a sequence can never run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// No tokens to compute.
    #[error("the prompt is empty and the tokenizer adds no BOS token")]
    EmptyPrompt,
    /// Prompt and output do not fit the context.
    #[error(
        "prompt has {prompt} tokens and max_tokens is {max_tokens}; together {} exceed the \
         context of {limit} tokens", .prompt.saturating_add(*.max_tokens)
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens asked for; at least one.
        max_tokens: usize,
        /// `max_model_len`.
        limit: usize,
    },
    /// Beams fork and end as they are compared; a static batch is fixed.
    #[error("use_beam_search is not possible with static batching; take another policy")]
    StaticBeams,
    /// All beams together do not fit a step.
    #[error("beam_width is {width}; the limit is {limit}, the value of {name}")]
    BeamsTooWide {
        /// Beams asked for.
        width: usize,
        /// How many fit a step.
        limit: usize,
        /// Which setting that is: `max_num_seqs` or `max_num_batched_tokens`.
        name: &'static str,
    },
    /// All beams together do not fit the pool.
    #[error(
        "a prompt of {prompt} tokens with {width} beams of up to {max_tokens} tokens may need \
         {needed} KV blocks; there are {limit}"
    )]
    BeamsTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Beams.
        width: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// Blocks they may hold at once.
        needed: usize,
        /// Blocks in the pool.
        limit: usize,
    },
}
