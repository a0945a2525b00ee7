//! The tokenizer inside a GGUF file, rebuilt as a Hugging Face one.
//!
//! | `tokenizer.ggml.model` | kind | module |
//! | --- | --- | --- |
//! | `gpt2` | byte-level BPE | `bpe`, `words` |
//! | `llama` | SentencePiece: scores, byte fallback | `spm` |

mod bpe;
mod spm;
mod words;

use tokenizers::{AddedToken, Tokenizer, models::bpe::Vocab};

use super::Metadata;
use crate::error::{LoadError, quoted};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const EOM: &str = "tokenizer.ggml.eom_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

/// A tokenizer and what goes with it.
#[derive(Debug, Clone)]
pub struct GgufTokenizer {
    /// Text to ids and back. It never adds `bos` itself, so that a prompt which already starts with
    /// it does not get a second one.
    pub tokenizer: Tokenizer,
    /// Beginning-of-sequence token.
    pub bos: Option<u32>,
    /// Tokens that end a sequence: end of text, of turn and of message, where given.
    pub eos: Vec<u32>,
    /// Whether prompts start with `bos`; if so, there is one.
    pub add_bos: bool,
    /// Jinja chat template.
    pub chat_template: Option<String>,
}

/// The ids of `bos` and of the tokens that end a sequence.
pub(super) fn special_ids(metadata: &Metadata) -> Result<(Option<u32>, Vec<u32>), LoadError> {
    let mut eos = Vec::new();
    for key in [EOS, EOT, EOM] {
        eos.extend(metadata.token_id(key)?.filter(|id| !eos.contains(id)));
    }
    Ok((metadata.token_id(BOS)?, eos))
}

pub(super) fn read_tokenizer(metadata: &Metadata) -> Result<GgufTokenizer, LoadError> {
    let model = metadata.string(MODEL)?.ok_or_else(|| metadata.missing(MODEL))?;
    let read = match model {
        "gpt2" => bpe::read,
        "llama" => spm::read,
        _ => return Err(LoadError::unsupported(metadata.path(), "tokenizer model", model)),
    };
    let tokens = Tokens::read(metadata)?;
    let (mut tokenizer, adds_bos) = read(metadata, &tokens)?;
    tokens.add_to(&mut tokenizer);

    let (bos, eos) = special_ids(metadata)?;
    if let Some(id) = bos.iter().chain(&eos).find(|id| **id as usize >= tokens.texts.len()) {
        let problem = format!("has {} tokens; bos or eos is {id}", tokens.texts.len());
        return Err(metadata.error(TOKENS, problem));
    }
    let add_bos = metadata.flag(ADD_BOS)?.unwrap_or(adds_bos);
    if add_bos && bos.is_none() {
        return Err(metadata.missing(BOS));
    }
    let chat_template = metadata.string(CHAT_TEMPLATE)?.map(str::to_owned);
    Ok(GgufTokenizer { tokenizer, bos, eos, add_bos, chat_template })
}

/// A value of `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct TokenType(i64);

impl TokenType {
    const NORMAL: Self = Self(1);
    const UNKNOWN: Self = Self(2);
    const CONTROL: Self = Self(3);
    const USER_DEFINED: Self = Self(4);
    const UNUSED: Self = Self(5);

    /// Whether merges make or use tokens of this type; others stand for themselves.
    fn is_merged(self) -> bool {
        matches!(self, Self::NORMAL | Self::UNUSED)
    }
}

/// The vocabulary: the index of a text is its id, and no text is there twice.
struct Tokens<'a> {
    texts: &'a [String],
    /// As many as texts, or none: then all are normal.
    types: Vec<i64>,
    vocab: Vocab,
}

impl<'a> Tokens<'a> {
    fn read(metadata: &'a Metadata) -> Result<Self, LoadError> {
        let texts = metadata.strings(TOKENS)?.ok_or_else(|| metadata.missing(TOKENS))?;
        if u32::try_from(texts.len()).is_err() {
            return Err(metadata.error(TOKENS, format!("has {} tokens", texts.len())));
        }
        let mut vocab = Vocab::with_capacity(texts.len());
        for (text, id) in texts.iter().zip(0..) {
            if let Some(first) = vocab.insert(text.clone(), id) {
                let problem = format!("has {} twice, as {first} and {id}", quoted(text));
                return Err(metadata.error(TOKENS, problem));
            }
        }
        let types = metadata.integers(TOKEN_TYPE)?.unwrap_or_default();
        if !types.is_empty() && types.len() != texts.len() {
            let problem = format!("has {} entries; there are {} tokens", types.len(), texts.len());
            return Err(metadata.error(TOKEN_TYPE, problem));
        }
        Ok(Self { texts, types, vocab })
    }

    fn type_of(&self, id: usize) -> TokenType {
        self.types.get(id).map_or(TokenType::NORMAL, |number| TokenType(*number))
    }

    fn of_type(&self, wanted: TokenType) -> impl Iterator<Item = &'a str> {
        let typed = self.texts.iter().enumerate();
        typed.filter(move |(id, _)| self.type_of(*id) == wanted).map(|(_, text)| text.as_str())
    }

    /// Adds the tokens that are matched in text before it is cut: those skipped when decoding, and
    /// the others.
    fn add_to(&self, tokenizer: &mut Tokenizer) {
        let added = |wanted: TokenType, is_special: bool| -> Vec<AddedToken> {
            let texts = self.of_type(wanted);
            texts.map(|text| AddedToken::from(text, is_special).normalized(false)).collect()
        };
        tokenizer.add_special_tokens(&added(TokenType::CONTROL, true));
        tokenizer.add_special_tokens(&added(TokenType::UNKNOWN, true));
        tokenizer.add_tokens(&added(TokenType::USER_DEFINED, false));
    }
}

#[cfg(test)]
mod tests;
