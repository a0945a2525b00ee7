//! Text in and out: token ids ↔ text, and where generated text ends.
//!
//! ```text
//!   prompt ── Tokenizer::encode ──▶ ids ──▶ … model … ──▶ id
//!                                                          │ Detokenizer   certain text only
//!                                                          ▼
//!                                                     StopMatcher          holds back a possible stop
//!                                                          ▼
//!                                          TextDelta { text, stop }        (OutputText = both)
//! ```
//!
//! Invariants: what [`Detokenizer`] gives, joined, is the one-shot decode of the same ids; what
//! [`StopMatcher`] gives, joined, is its input up to the first stop string. Neither looks at how
//! the text was cut into tokens.

mod chain;
pub mod chat;
mod detokenize;
mod guard;
mod stop;
mod stream;
#[cfg(test)]
mod testing;
mod tokenizer;

use std::path::PathBuf;

pub use detokenize::Detokenizer;
pub use stop::{StopMatcher, StopResult};
pub use stream::{OutputText, OutputTextOptions, TextDelta};
pub use tokenizer::Tokenizer;

/// The most stop strings a request may have. Matching costs one step per stop and byte of text.
pub const MAX_STOP_STRINGS: usize = 32;

/// The most bytes that the stop strings of a request may have together.
pub const MAX_STOP_BYTES: usize = 64 * 1024;

/// The largest `tokenizer.json` that is read, in bytes.
pub const MAX_TOKENIZER_BYTES: u64 = 256 * 1024 * 1024;

/// What can go wrong between text and token ids.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The tokenizer file cannot be read.
    #[error("cannot read tokenizer {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The tokenizer file is longer than [`MAX_TOKENIZER_BYTES`].
    #[error("tokenizer {} has {bytes} bytes; the limit is {limit}", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// The tokenizer file does not describe a tokenizer.
    #[error("tokenizer {} is not valid: {reason}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        reason: String,
    },
    /// The tokenizer file has a decoder that no text model uses and that is not supported.
    #[error("tokenizer {}: decoder {decoder} is not supported", path.display())]
    UnsupportedDecoder {
        /// The file.
        path: PathBuf,
        /// The decoder, with the setting that is at fault.
        decoder: String,
    },
    /// The tokenizer file has a normaliser or decoder that could turn a short text into an endless
    /// one.
    #[error("tokenizer {}: its replacements make text grow {growth}-fold; the limit is {limit}", path.display())]
    NormaliserGrowth {
        /// The file.
        path: PathBuf,
        /// Bytes that one byte can become.
        growth: u64,
        /// The limit.
        limit: u64,
    },
    /// The tokenizer failed on a text.
    #[error("cannot tokenize a text of {bytes} bytes: {reason}")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// What the tokenizer said.
        reason: String,
    },
    /// The tokenizer's decoder failed on a token.
    #[error("cannot decode tokens: {reason}")]
    Decode {
        /// What the decoder said.
        reason: String,
    },
}
