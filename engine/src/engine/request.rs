//! Requests and why they are refused.

use crate::sampling::{ParamError, SamplingParams};
use crate::scheduler::AdmissionError;
use crate::text::TextError;
use crate::text::chat::ChatError;

/// Longest text prompt, in bytes; far above any context, it bounds the tokenizer's work.
pub const MAX_PROMPT_BYTES: usize = 16 << 20;

/// Most tokens that the prompts of a request's samples may have together.
pub const MAX_SAMPLE_TOKENS: usize = 1 << 24;

/// Identifies a request within its engine; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// What to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text; special tokens in it count as such, and BOS is added where the model wants it.
    Text(String),
    /// Ids, taken as they are.
    Tokens(Vec<u32>),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Prompt::Text(text.to_owned())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Prompt::Text(text)
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(ids: Vec<u32>) -> Self {
        Prompt::Tokens(ids)
    }
}

/// One prompt with its parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// What to continue.
    pub prompt: Prompt,
    /// How.
    pub params: SamplingParams,
    /// Report text as it comes, in [`crate::StepOutput::deltas`].
    pub stream: bool,
    /// Hand out the logits of every position, for verification:
    /// [`crate::RequestOutput::logits`].
    pub capture_logits: bool,
}

impl Request {
    /// A request that reports once, at its end.
    pub fn new(prompt: impl Into<Prompt>, params: SamplingParams) -> Self {
        Request { prompt: prompt.into(), params, stream: false, capture_logits: false }
    }
}

/// Why a request was refused.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The device was lost; nothing more can be computed.
    #[error("no request is taken any more: {0}")]
    Lost(String),
    /// A sampling parameter is outside its rule.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// The request can never run.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// The prompt's text cannot be encoded.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The messages cannot be made a prompt.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// The model's files hold no chat template.
    #[error("the model has no chat template; give a prompt instead of messages")]
    NoChatTemplate,
    /// The text is longer than [`MAX_PROMPT_BYTES`], or than any that fits the context.
    #[error("the prompt has {bytes} bytes; for a context of {context} tokens the limit is {limit}")]
    PromptTooLarge {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// A prompt id is not in the model's vocabulary.
    #[error("prompt token id {id} is outside the vocabulary of {vocab_size} tokens")]
    TokenOutOfVocabulary {
        /// The id.
        id: u32,
        /// Rows of the embedding table.
        vocab_size: usize,
    },
    /// The samples together are too long.
    #[error(
        "n is {n} and the prompt has {prompt} tokens; together at most {MAX_SAMPLE_TOKENS} tokens"
    )]
    TooManySamples {
        /// Samples asked for.
        n: usize,
        /// Tokens of the prompt.
        prompt: usize,
    },
    /// Beams are compared until the end.
    #[error("a request with beams is answered at its end; stream and capture_logits must be off")]
    BeamsAtTheEndOnly,
    /// `min_tokens` exceeds what the context leaves room for.
    #[error("min_tokens is {min_tokens}, but at most {max_tokens} tokens can be generated")]
    MinTokens {
        /// Asked for.
        min_tokens: usize,
        /// Possible.
        max_tokens: usize,
    },
    /// No logits processor of this name is registered.
    #[error("logits_processor {name:?} is not registered; registered: {known}")]
    UnknownProcessor {
        /// The name asked for.
        name: String,
        /// Those there are.
        known: String,
    },
}
