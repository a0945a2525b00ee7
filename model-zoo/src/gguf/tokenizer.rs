//! The tokenizer inside a GGUF file, rebuilt as a Hugging Face one.
//!
//! Byte-level BPE only (`tokenizer.ggml.model` = `gpt2`). How text is split before merging is not
//! in the file: `tokenizer.ggml.pre` names one of the splits that llama.cpp knows, and the ones
//! here are those of the models' own `tokenizer.json`.

use tokenizers::{
    AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer,
    models::bpe::{BPE, Merges, Vocab},
    normalizers::NFC,
    pre_tokenizers::{
        byte_level::ByteLevel,
        digits::Digits,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

use super::Metadata;
use crate::error::{LoadError, quoted};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

/// Values of `tokenizer.ggml.token_type`.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// A tokenizer and what goes with it.
#[derive(Debug, Clone)]
pub struct GgufTokenizer {
    /// Text to ids and back. It never adds `bos` itself, so that a prompt which already starts with
    /// it does not get a second one.
    pub tokenizer: Tokenizer,
    /// Beginning-of-sequence token.
    pub bos: Option<u32>,
    /// Tokens that end a sequence: end of text, then end of turn, where given.
    pub eos: Vec<u32>,
    /// Whether prompts start with `bos`; if so, there is one.
    pub add_bos: bool,
    /// Jinja chat template.
    pub chat_template: Option<String>,
}

/// How text is cut into words before merging.
#[derive(Debug, Clone, Copy, PartialEq)]
enum WordSplit {
    Gpt2,
    SmolLm,
    Llama3,
    Qwen2,
    /// llama.cpp's for files that do not say.
    Unnamed,
}

const LLAMA3_WORDS: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const QWEN2_WORDS: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// Applied one after the other, each to what the one before left.
const UNNAMED_WORDS: [&str; 4] = [
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
];

impl WordSplit {
    fn named(name: &str) -> Option<Self> {
        match name {
            "gpt-2" | "gpt2" => Some(Self::Gpt2),
            "smollm" => Some(Self::SmolLm),
            "llama-bpe" | "llama3" | "llama-v3" => Some(Self::Llama3),
            "qwen2" | "deepseek-r1-qwen" => Some(Self::Qwen2),
            "default" => Some(Self::Unnamed),
            _ => None,
        }
    }

    fn pre_tokenizer(self) -> tokenizers::Result<PreTokenizerWrapper> {
        let byte_level = |use_regex| ByteLevel::new(false, true, use_regex).into();
        let split = |pattern: &str| {
            let pattern = SplitPattern::Regex(pattern.to_owned());
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map(Into::into)
        };
        let steps: Vec<PreTokenizerWrapper> = match self {
            // ByteLevel's own expression is GPT-2's.
            Self::Gpt2 => vec![byte_level(true)],
            Self::SmolLm => vec![Digits::new(true).into(), byte_level(true)],
            Self::Llama3 => vec![split(LLAMA3_WORDS)?, byte_level(false)],
            Self::Qwen2 => vec![split(QWEN2_WORDS)?, byte_level(false)],
            Self::Unnamed => {
                let mut steps = Vec::new();
                for pattern in UNNAMED_WORDS {
                    steps.push(split(pattern)?);
                }
                steps.push(byte_level(false));
                steps
            }
        };
        Ok(Sequence::new(steps).into())
    }
}

/// The ids of `bos` and of the tokens that end a sequence.
pub(super) fn special_ids(metadata: &Metadata) -> Result<(Option<u32>, Vec<u32>), LoadError> {
    let mut eos = Vec::from_iter(metadata.token_id(EOS)?);
    eos.extend(metadata.token_id(EOT)?.filter(|id| !eos.contains(id)));
    Ok((metadata.token_id(BOS)?, eos))
}

pub(super) fn read_tokenizer(metadata: &Metadata) -> Result<GgufTokenizer, LoadError> {
    let model = metadata.string(MODEL)?.ok_or_else(|| metadata.missing(MODEL))?;
    if model != "gpt2" {
        return Err(LoadError::unsupported(metadata.path(), "tokenizer model", model));
    }
    let pre = metadata.string(PRE)?.unwrap_or("default");
    let words = WordSplit::named(pre)
        .ok_or_else(|| LoadError::unsupported(metadata.path(), "pre-tokenizer", pre))?;
    let tokens = metadata.strings(TOKENS)?.ok_or_else(|| metadata.missing(TOKENS))?;

    let model = read_model(metadata, tokens, words)?;
    let pre_tokenizer = words.pre_tokenizer().map_err(|e| metadata.error(PRE, e.to_string()))?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    if words == WordSplit::Qwen2 {
        tokenizer.with_normalizer(Some(NFC));
    }
    let (special, plain) = added_tokens(metadata, tokens)?;
    tokenizer.add_special_tokens(&special);
    tokenizer.add_tokens(&plain);

    let (bos, eos) = special_ids(metadata)?;
    if let Some(id) = bos.iter().chain(&eos).find(|id| **id as usize >= tokens.len()) {
        let problem = format!("has {} tokens; bos or eos is {id}", tokens.len());
        return Err(metadata.error(TOKENS, problem));
    }
    // Llama 3's converter leaves the flag out.
    let add_bos = metadata.flag(ADD_BOS)?.unwrap_or(words == WordSplit::Llama3);
    if add_bos && bos.is_none() {
        return Err(metadata.missing(BOS));
    }
    let chat_template = metadata.string(CHAT_TEMPLATE)?.map(str::to_owned);
    Ok(GgufTokenizer { tokenizer, bos, eos, add_bos, chat_template })
}

fn read_model(metadata: &Metadata, tokens: &[String], words: WordSplit) -> Result<BPE, LoadError> {
    if u32::try_from(tokens.len()).is_err() {
        return Err(metadata.error(TOKENS, format!("has {} tokens", tokens.len())));
    }
    let mut vocab = Vocab::with_capacity(tokens.len());
    for (token, id) in tokens.iter().zip(0..) {
        if let Some(first) = vocab.insert(token.clone(), id) {
            let problem = format!("has {} twice, as {first} and {id}", quoted(token));
            return Err(metadata.error(TOKENS, problem));
        }
    }
    let lines = metadata.strings(MERGES)?.ok_or_else(|| metadata.missing(MERGES))?;
    let mut merges = Merges::with_capacity(lines.len());
    for (i, line) in lines.iter().enumerate() {
        match line.split_once(' ') {
            Some((left, right)) if !left.is_empty() && !right.is_empty() => {
                merges.push((left.to_owned(), right.to_owned()));
            }
            _ => {
                let problem = format!("holds {} at {i}; a merge is two tokens", quoted(line));
                return Err(metadata.error(MERGES, problem));
            }
        }
    }
    BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(words == WordSplit::Llama3)
        .build()
        .map_err(|e| metadata.error(MERGES, quoted(&e.to_string())))
}

/// Tokens matched in text before it is split: those skipped when decoding, and the others.
fn added_tokens(
    metadata: &Metadata,
    tokens: &[String],
) -> Result<(Vec<AddedToken>, Vec<AddedToken>), LoadError> {
    let types = metadata.integers(TOKEN_TYPE)?.unwrap_or_default();
    if !types.is_empty() && types.len() != tokens.len() {
        let problem = format!("has {} entries; there are {} tokens", types.len(), tokens.len());
        return Err(metadata.error(TOKEN_TYPE, problem));
    }
    let of_type = |wanted: i64| {
        let is_special = wanted == CONTROL;
        let typed = tokens.iter().zip(&types).filter(|(_, kind)| **kind == wanted);
        typed
            .map(|(token, _)| AddedToken::from(token.as_str(), is_special).normalized(false))
            .collect()
    };
    Ok((of_type(CONTROL), of_type(USER_DEFINED)))
}
