//! A tokenizer's decoder as a chain of streaming stages.
//!
//! One-shot decoding maps a whole list of tokens through each decoder in turn. Here each stage
//! keeps only what later tokens can still change, so that a token costs the same however long the
//! text is:
//!
//! | decoder                                      | what is held                                 |
//! | -------------------------------------------- | -------------------------------------------- |
//! | `ByteLevel`                                  | an unfinished character, ≤ 3 bytes           |
//! | `ByteFallback`                               | the run of `<0x..>` tokens while it is UTF-8 |
//! | `Replace`, `Metaspace`, `WordPiece`, `Strip` | nothing: token by token                      |
//! | `BPEDecoder`                                 | the last token                               |
//! | `Strip` after `Fuse`                         | nothing: counts what it may still strip      |
//! | any other (no text model uses one)           | everything, until the end                    |
//!
//! A run of `<0x..>` tokens is one character string or, when not UTF-8, one U+FFFD per token, *as a
//! whole*. Hence its text is certain only at its end, or once it cannot be UTF-8 any more; from
//! there each further token of the run gives its U+FFFD at once and nothing is held.
//!
//! After `Fuse` or `ByteLevel` the whole text is one token. Items that pass between stages are then
//! pieces of it, and only stages that do not care for the cuts may follow.

use std::sync::Arc;

use tokenizers::{Decoder, DecoderWrapper};

use super::TextError;
use super::guard::guarded;

const REPLACEMENT: &str = "\u{FFFD}";

/// The stages of a decoder, in order, with what they hold.
#[derive(Clone)]
pub(super) struct Chain {
    stages: Vec<Stage>,
}

#[derive(Clone)]
enum Stage {
    /// Without a decoder, tokens are joined by spaces.
    Spaced {
        first: bool,
    },
    /// Maps each token by itself, the first one in its own way.
    EachToken {
        decoder: Arc<DecoderWrapper>,
        first: bool,
    },
    /// Maps each token by itself, the last one in its own way.
    LastDiffers {
        decoder: Arc<DecoderWrapper>,
        held: Option<String>,
    },
    /// Bytes spelled as characters; `tail` is the start of an unfinished character.
    ByteLevel {
        tail: Vec<u8>,
    },
    ByteFallback(ByteRun),
    /// Drops up to `left` times `content` from the start of the text.
    StripStart {
        content: char,
        left: usize,
    },
    /// Needs all tokens (`fused`: the pieces of the one token) at once.
    Whole {
        decoder: Arc<DecoderWrapper>,
        fused: bool,
        items: Vec<String>,
    },
}

impl Chain {
    /// The chain of a tokenizer's decoder, at the start of a text.
    pub fn new(decoder: Option<&DecoderWrapper>) -> Self {
        let mut stages = Vec::new();
        match decoder {
            Some(decoder) => add_stages(decoder, &mut false, &mut stages),
            None => stages.push(Stage::Spaced { first: true }),
        }
        Self { stages }
    }

    /// The same chain, as if some text had passed through it.
    pub fn inside_text(mut self) -> Self {
        for stage in &mut self.stages {
            match stage {
                Stage::Spaced { first } | Stage::EachToken { first, .. } => *first = false,
                Stage::StripStart { left, .. } => *left = 0,
                _ => {}
            }
        }
        self
    }

    /// Takes a token; gives the text that is now certain.
    pub fn push(&mut self, token: String) -> Result<String, TextError> {
        let mut items = vec![token];
        for stage in &mut self.stages {
            items = stage.push_all(items)?;
        }
        Ok(items.concat())
    }

    /// Gives the rest of the text: the input has ended.
    pub fn finish(&mut self) -> Result<String, TextError> {
        let mut items = Vec::new();
        for stage in &mut self.stages {
            items = stage.push_all(items)?;
            stage.finish(&mut items)?;
        }
        Ok(items.concat())
    }
}

/// Appends the stages of `decoder`. `fused` says whether the whole text is one token at that place
/// in the chain.
fn add_stages(decoder: &DecoderWrapper, fused: &mut bool, stages: &mut Vec<Stage>) {
    let stage = match decoder {
        DecoderWrapper::Sequence(sequence) => {
            for decoder in sequence.get_decoders() {
                add_stages(decoder, fused, stages);
            }
            return;
        }
        DecoderWrapper::Fuse(_) => {
            *fused = true;
            return;
        }
        DecoderWrapper::ByteLevel(_) if !*fused => {
            *fused = true;
            Stage::ByteLevel { tail: Vec::new() }
        }
        DecoderWrapper::ByteFallback(_) if !*fused => Stage::ByteFallback(ByteRun::default()),
        DecoderWrapper::Strip(strip) if *fused && strip.stop == 0 => {
            Stage::StripStart { content: strip.content, left: strip.start }
        }
        DecoderWrapper::BPE(_) if !*fused => {
            Stage::LastDiffers { decoder: Arc::new(decoder.clone()), held: None }
        }
        DecoderWrapper::Strip(strip) if strip.stop > 0 => whole(decoder, *fused),
        DecoderWrapper::Strip(_)
        | DecoderWrapper::Replace(_)
        | DecoderWrapper::Metaspace(_)
        | DecoderWrapper::WordPiece(_)
            if !*fused =>
        {
            Stage::EachToken { decoder: Arc::new(decoder.clone()), first: true }
        }
        _ => whole(decoder, *fused),
    };
    stages.push(stage);
}

fn whole(decoder: &DecoderWrapper, fused: bool) -> Stage {
    Stage::Whole { decoder: Arc::new(decoder.clone()), fused, items: Vec::new() }
}

impl Stage {
    fn push_all(&mut self, items: Vec<String>) -> Result<Vec<String>, TextError> {
        let mut out = Vec::with_capacity(items.len());
        for item in items {
            self.push(item, &mut out)?;
        }
        Ok(out)
    }

    fn push(&mut self, item: String, out: &mut Vec<String>) -> Result<(), TextError> {
        match self {
            Self::Spaced { first } => {
                out.push(if *first { item } else { format!(" {item}") });
                *first = false;
            }
            Self::EachToken { decoder, first } => {
                // The empty token stands for those before.
                let tokens = if *first { vec![item] } else { vec![String::new(), item] };
                out.extend(run(decoder, tokens)?.pop());
                *first = false;
            }
            Self::LastDiffers { decoder, held } => {
                if let Some(token) = held.replace(item) {
                    // The empty token stands for those after.
                    out.extend(run(decoder, vec![token, String::new()])?.into_iter().next());
                }
            }
            Self::ByteLevel { tail } => {
                push_token_bytes(&item, tail);
                let mut text = String::new();
                take_certain_text(tail, &mut text);
                out.push(text);
            }
            Self::ByteFallback(run) => run.push(item, out),
            Self::StripStart { content, left } => {
                let mut text = item.as_str();
                while let Some(rest) = text.strip_prefix(*content).filter(|_| *left > 0) {
                    text = rest;
                    *left -= 1;
                }
                if !text.is_empty() {
                    *left = 0;
                }
                out.push(text.to_owned());
            }
            Self::Whole { items, .. } => items.push(item),
        }
        Ok(())
    }

    /// Gives what was held; the input has ended.
    fn finish(&mut self, out: &mut Vec<String>) -> Result<(), TextError> {
        match self {
            Self::LastDiffers { decoder, held } => {
                if let Some(token) = held.take() {
                    out.extend(run(decoder, vec![token])?);
                }
            }
            Self::ByteLevel { tail } if !tail.is_empty() => {
                tail.clear();
                out.push(REPLACEMENT.to_owned());
            }
            Self::ByteFallback(run) => run.end(out),
            Self::Whole { decoder, fused, items } if !items.is_empty() => {
                let mut items = std::mem::take(items);
                if *fused {
                    items = vec![items.concat()];
                }
                out.extend(run(decoder, items)?);
            }
            _ => {}
        }
        Ok(())
    }
}

fn run(decoder: &DecoderWrapper, tokens: Vec<String>) -> Result<Vec<String>, TextError> {
    guarded(|| decoder.decode_chain(tokens).map_err(|e| e.to_string()))
        .map_err(|reason| TextError::Decode { reason })
}

/// A run of `<0x..>` tokens.
#[derive(Clone, Default)]
struct ByteRun {
    /// The run so far: UTF-8, but for an unfinished character at the end.
    bytes: Vec<u8>,
    /// How many of `bytes` are whole characters.
    checked: usize,
    /// The run is not UTF-8; `bytes` is empty.
    invalid: bool,
}

impl ByteRun {
    fn push(&mut self, token: String, out: &mut Vec<String>) {
        let Some(byte) = fallback_byte(&token) else {
            self.end(out);
            out.push(token);
            return;
        };
        if self.invalid {
            out.push(REPLACEMENT.to_owned());
            return;
        }
        self.bytes.push(byte);
        match std::str::from_utf8(&self.bytes[self.checked..]) {
            Ok(_) => self.checked = self.bytes.len(),
            Err(error) if error.error_len().is_none() => {}
            Err(_) => {
                self.give_up(out);
                self.invalid = true;
            }
        }
    }

    fn end(&mut self, out: &mut Vec<String>) {
        if self.checked < self.bytes.len() {
            self.give_up(out);
        } else if !self.bytes.is_empty() {
            let text = String::from_utf8(std::mem::take(&mut self.bytes));
            out.push(text.expect("all bytes of the run were checked"));
        }
        *self = Self::default();
    }

    fn give_up(&mut self, out: &mut Vec<String>) {
        out.extend(self.bytes.drain(..).map(|_| REPLACEMENT.to_owned()));
        self.checked = 0;
    }
}

/// The byte that a `<0x..>` token stands for, parsed as the tokenizers crate does.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// Appends the bytes that a byte-level token spells; those of the token itself if it has a
/// character outside the alphabet.
fn push_token_bytes(token: &str, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    for c in token.chars() {
        let Some(byte) = byte_level_byte(c) else {
            bytes.truncate(start);
            bytes.extend_from_slice(token.as_bytes());
            return;
        };
        bytes.push(byte);
    }
}

/// The byte that a character of GPT-2's byte-level alphabet stands for: printable Latin-1
/// characters for themselves, the 68 other bytes in order for U+0100 and up.
fn byte_level_byte(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121) as u8 + 0x7F),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// Moves text out of `bytes`, as `String::from_utf8_lossy` reads it; an unfinished character at the
/// end stays.
fn take_certain_text(bytes: &mut Vec<u8>, text: &mut String) {
    let mut consumed = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        consumed += chunk.valid().len();
        let invalid = chunk.invalid();
        let at_end = consumed + invalid.len() == bytes.len();
        if at_end && std::str::from_utf8(invalid).err().is_none_or(|e| e.error_len().is_none()) {
            break;
        }
        text.push_str(REPLACEMENT);
        consumed += invalid.len();
    }
    bytes.drain(..consumed);
}
