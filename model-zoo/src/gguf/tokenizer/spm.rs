//! SentencePiece (`tokenizer.ggml.model` = `llama`): tokens with scores, bytes for the rest.
//!
//! Text, its spaces spelled `▁` and one put before it, starts as characters. Of all neighbours
//! whose concatenation is a token, those with the highest score (leftmost of equals) are joined,
//! until none are left; a character that is no token becomes its UTF-8 bytes' tokens.
//!
//! That is BPE with the merges ordered by the score of their result. The order is the same only if
//! no two results have equal scores, which is checked, and if every character of a token is itself
//! a token, which SentencePiece's trainer sees to.

use tokenizers::{
    DecoderWrapper, NormalizerWrapper, Tokenizer,
    decoders::{
        byte_fallback::ByteFallback, fuse::Fuse, sequence::Sequence as Decoders, strip::Strip,
    },
    models::bpe::{BPE, Merges},
    normalizers::{Prepend, Replace, Sequence as Normalizers},
};

use super::{Metadata, SCORES, TOKENS, TokenType, Tokens};
use crate::{
    error::{LoadError, quoted},
    gguf::Value,
};

const ADD_SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";
const REMOVE_EXTRA_WHITESPACES: &str = "tokenizer.ggml.remove_extra_whitespaces";
const PRECOMPILED_CHARSMAP: &str = "tokenizer.ggml.precompiled_charsmap";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";

const SPACE: &str = "▁";
/// Longest token that merges may lead to, in bytes: SentencePiece's pieces are far shorter, and
/// every way to cut a token in two is looked up.
const MAX_PIECE_BYTES: usize = 512;

/// The tokenizer without added tokens, and whether prompts start with BOS unless the file says.
pub(super) fn read(metadata: &Metadata, tokens: &Tokens) -> Result<(Tokenizer, bool), LoadError> {
    refuse_normalisation(metadata)?;
    let mut builder = BPE::builder()
        .vocab_and_merges(tokens.vocab.clone(), merges_by_score(metadata, tokens)?)
        .fuse_unk(true);
    let has_bytes = (0..=255u8).all(|byte| tokens.vocab.contains_key(&format!("<0x{byte:02X}>")));
    match unknown_token(metadata, tokens)? {
        Some(unknown) => builder = builder.unk_token(unknown.to_owned()),
        // Without either, text would vanish.
        None if !has_bytes => return Err(metadata.missing(UNKNOWN)),
        None => {}
    }
    let model = builder
        .byte_fallback(has_bytes)
        .build()
        .map_err(|e| metadata.error(TOKENS, quoted(&e.to_string())))?;
    let mut tokenizer = Tokenizer::new(model);

    let replace = |from: &str, to: &str| {
        Replace::new(from, to).map_err(|e| metadata.error(ADD_SPACE_PREFIX, e.to_string()))
    };
    let mut normalizers: Vec<NormalizerWrapper> = vec![replace(" ", SPACE)?.into()];
    let mut decoders: Vec<DecoderWrapper> =
        vec![replace(SPACE, " ")?.into(), ByteFallback::default().into(), Fuse::default().into()];
    if metadata.flag(ADD_SPACE_PREFIX)?.unwrap_or(true) {
        normalizers.insert(0, Prepend::new(SPACE.to_owned()).into());
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    tokenizer.with_normalizer(Some(Normalizers::new(normalizers)));
    tokenizer.with_decoder(Some(Decoders::new(decoders)));
    Ok((tokenizer, true))
}

/// Refuses what would change the text before it is cut.
fn refuse_normalisation(metadata: &Metadata) -> Result<(), LoadError> {
    if metadata.flag(REMOVE_EXTRA_WHITESPACES)? == Some(true) {
        let name = "remove_extra_whitespaces";
        return Err(LoadError::unsupported(metadata.path(), "tokenizer option", name));
    }
    match metadata.get(PRECOMPILED_CHARSMAP) {
        None => Ok(()),
        Some(Value::Array(map)) if map.is_empty() => Ok(()),
        Some(_) => {
            let name = "precompiled_charsmap";
            Err(LoadError::unsupported(metadata.path(), "tokenizer option", name))
        }
    }
}

fn unknown_token<'a>(
    metadata: &Metadata,
    tokens: &'a Tokens,
) -> Result<Option<&'a str>, LoadError> {
    let Some(id) = metadata.token_id(UNKNOWN)? else {
        return Ok(tokens.of_type(TokenType::UNKNOWN).next());
    };
    match tokens.texts.get(id as usize) {
        Some(text) => Ok(Some(text)),
        None => {
            let problem = format!("is {id}; there are {} tokens", tokens.texts.len());
            Err(metadata.error(UNKNOWN, problem))
        }
    }
}

/// Every way to make a token of two others, the highest score of the result first.
fn merges_by_score(metadata: &Metadata, tokens: &Tokens) -> Result<Merges, LoadError> {
    let scores = read_scores(metadata, tokens.texts.len())?;
    let mut ids: Vec<usize> =
        (0..scores.len()).filter(|id| tokens.type_of(*id).is_merged()).collect();
    ids.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    let mut merges = Merges::new();
    let mut last_result: Option<usize> = None;
    for id in ids {
        let token = tokens.texts[id].as_str();
        if token.len() > MAX_PIECE_BYTES {
            let problem = format!(
                "has {} of {} bytes; the limit is {MAX_PIECE_BYTES}",
                quoted(token),
                token.len()
            );
            return Err(metadata.error(TOKENS, problem));
        }
        let is_part = |text: &str| {
            tokens.vocab.get(text).is_some_and(|id| tokens.type_of(*id as usize).is_merged())
        };
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let before = merges.len();
        merges.extend(
            cuts.filter(|(left, right)| is_part(left) && is_part(right))
                .map(|(left, right)| (left.to_owned(), right.to_owned())),
        );
        if merges.len() == before {
            continue;
        }
        if let Some(other) = last_result.filter(|other| scores[*other] == scores[id]) {
            let (other, token) = (quoted(&tokens.texts[other]), quoted(token));
            let problem = format!("gives {other} and {token} both {}", scores[id]);
            return Err(metadata.error(SCORES, problem));
        }
        last_result = Some(id);
    }
    Ok(merges)
}

fn read_scores(metadata: &Metadata, num_tokens: usize) -> Result<&[f64], LoadError> {
    let scores = metadata.floats(SCORES)?.ok_or_else(|| metadata.missing(SCORES))?;
    if scores.len() != num_tokens {
        let problem = format!("has {} entries; there are {num_tokens} tokens", scores.len());
        return Err(metadata.error(SCORES, problem));
    }
    match scores.iter().position(|score| !score.is_finite()) {
        Some(id) => Err(metadata.error(SCORES, format!("gives token {id} {}", scores[id]))),
        None => Ok(scores),
    }
}
