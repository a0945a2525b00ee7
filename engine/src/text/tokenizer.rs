//! The Hugging Face tokenizer of a model, shared between requests.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use tokenizers::DecoderWrapper;

use super::chain::Chain;
use super::guard::{MAX_GROWTH, charsmaps_fit, growth, guarded};
use super::{MAX_TOKENIZER_BYTES, TextError};

/// A tokenizer; clones share it.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    tokenizer: tokenizers::Tokenizer,
    /// 1 + the largest id.
    vocab_size: usize,
    /// Length of the longest token as the vocabulary spells it, in bytes.
    longest_token: usize,
    /// The decoder at the start of a text.
    chain: Chain,
}

impl Tokenizer {
    /// Wraps a tokenizer, without its truncation and padding: a prompt is never cut silently.
    ///
    /// The decoder is trusted; [`Tokenizer::from_file`] refuses those that are not supported.
    pub fn from_inner(mut tokenizer: tokenizers::Tokenizer) -> Self {
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).expect("removing the truncation checks nothing");
        let vocab = tokenizer.get_vocab(true);
        let vocab_size = vocab.values().max().map_or(0, |&id| id as usize + 1);
        let longest_token = vocab.keys().map(String::len).max().unwrap_or(0);
        let chain = Chain::new(tokenizer.get_decoder());
        Self { inner: Arc::new(Inner { tokenizer, vocab_size, longest_token, chain }) }
    }

    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// The file cannot be read, is longer than [`MAX_TOKENIZER_BYTES`], is not a tokenizer, or
    /// has a decoder or a normaliser that is not supported.
    pub fn from_file(path: &Path) -> Result<Self, TextError> {
        Self::from_bytes(path, &read_limited(path, MAX_TOKENIZER_BYTES)?)
    }

    /// Reads the contents of a `tokenizer.json`; `path` is for messages.
    ///
    /// # Errors
    /// They are not a tokenizer, or one with a part that is not supported.
    pub fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self, TextError> {
        if !charsmaps_fit(bytes) {
            let reason = "its precompiled character map is shorter than it says".to_owned();
            return Err(TextError::Parse { path: path.into(), reason });
        }
        let parse = || tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| e.to_string());
        let tokenizer =
            guarded(parse).map_err(|reason| TextError::Parse { path: path.into(), reason })?;
        let growth = tokenizer
            .get_normalizer()
            .map_or(1, growth)
            .max(tokenizer.get_decoder().map_or(1, growth));
        if growth > MAX_GROWTH {
            let limit = MAX_GROWTH;
            return Err(TextError::NormaliserGrowth { path: path.into(), growth, limit });
        }
        if let Some(decoder) = tokenizer.get_decoder().and_then(unsupported_decoder) {
            return Err(TextError::UnsupportedDecoder { path: path.into(), decoder });
        }
        Ok(Self::from_inner(tokenizer))
    }

    /// The ids of `text`; `add_special_tokens` adds those of the model's template (BOS).
    ///
    /// Special tokens written out in `text` become their ids.
    ///
    /// # Errors
    /// The tokenizer fails on the text, such as for a word that it has no token for.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let encode = || {
            let encoding = self.inner.tokenizer.encode_fast(text, add_special_tokens);
            encoding.map(|e| e.get_ids().to_vec()).map_err(|e| e.to_string())
        };
        guarded(encode).map_err(|reason| TextError::Encode { bytes: text.len(), reason })
    }

    /// The text of `ids` as a whole; `skip_special` leaves special tokens out. Ids outside the
    /// vocabulary have no text.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        let has_text = |&id: &u32| self.visible_token(id, skip_special).is_some();
        // Some decoders panic when no token is left.
        if !ids.iter().any(has_text) {
            return Ok(String::new());
        }
        let decode = || self.inner.tokenizer.decode(ids, skip_special).map_err(|e| e.to_string());
        guarded(decode).map_err(|reason| TextError::Decode { reason })
    }

    /// The text of one token as it reads in the middle of a text (a leading space stays), special
    /// or not; half a character reads as U+FFFD, an id outside the vocabulary as nothing.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn token_text(&self, id: u32) -> Result<String, TextError> {
        let Some(token) = self.id_to_token(id) else {
            return Ok(String::new());
        };
        let mut chain = self.inner.chain.clone().inside_text();
        let mut text = chain.push(token)?;
        text.push_str(&chain.finish()?);
        Ok(text)
    }

    /// 1 + the largest id, added tokens included: the number of logits that can be sampled.
    pub fn vocab_size(&self) -> usize {
        self.inner.vocab_size
    }

    /// The longest text, in bytes, that can be `max_tokens` tokens or fewer: a longer one need
    /// not be encoded to know that it does not fit.
    pub fn max_bytes(&self, max_tokens: usize) -> usize {
        max_tokens.saturating_mul(self.inner.longest_token)
    }

    /// The id of a token given as the vocabulary spells it.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.tokenizer.token_to_id(token)
    }

    /// The vocabulary's spelling of a token; none outside the vocabulary.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.tokenizer.id_to_token(id)
    }

    /// Whether `id` is flagged special; what a token looks like has no say.
    pub fn is_special(&self, id: u32) -> bool {
        self.id_to_token(id).is_some_and(|token| self.is_special_token(&token))
    }

    /// The added tokens by id, and whether they are flagged special. Does not go through the ids:
    /// a file may claim one near 2³².
    pub fn added_tokens(&self) -> Vec<(String, bool)> {
        let mut added: Vec<_> =
            self.inner.tokenizer.get_added_tokens_decoder().into_iter().collect();
        added.sort_unstable_by_key(|(id, _)| *id);
        added.into_iter().map(|(_, token)| (token.content, token.special)).collect()
    }

    /// The token of `id` if it has a part in the decoded text.
    pub(super) fn visible_token(&self, id: u32, skip_special: bool) -> Option<String> {
        self.id_to_token(id).filter(|token| !skip_special || !self.is_special_token(token))
    }

    /// The decoder at the start of a text.
    pub(super) fn chain(&self) -> Chain {
        self.inner.chain.clone()
    }

    fn is_special_token(&self, token: &str) -> bool {
        self.inner.tokenizer.get_added_vocabulary().is_special_token(token)
    }
}

fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, TextError> {
    let read = |source| TextError::Read { path: path.into(), source };
    let file = File::open(path).map_err(read)?;
    let bytes = file.metadata().map_err(read)?.len();
    if bytes > limit {
        return Err(TextError::TooLarge { path: path.into(), bytes, limit });
    }
    // The file may grow, or be a pipe without a length; the limit holds all the same.
    let mut contents = Vec::new();
    let bytes = file.take(limit + 1).read_to_end(&mut contents).map_err(read)? as u64;
    if bytes > limit {
        return Err(TextError::TooLarge { path: path.into(), bytes, limit });
    }
    Ok(contents)
}

/// Names a decoder that the tokenizers crate can panic on (`Strip` at the end, of a shorter
/// token), or one for speech (`CTC`, which drops repeated tokens).
fn unsupported_decoder(decoder: &DecoderWrapper) -> Option<String> {
    match decoder {
        DecoderWrapper::Sequence(sequence) => {
            sequence.get_decoders().iter().find_map(unsupported_decoder)
        }
        DecoderWrapper::Strip(strip) if strip.stop > 0 => {
            Some(format!("Strip with stop {}", strip.stop))
        }
        DecoderWrapper::CTC(_) => Some("CTC".to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::text::testing;

    fn scratch_file(name: &str, contents: &str) -> std::path::PathBuf {
        let name = format!("quire-tokenizer-{}-{name}.json", std::process::id());
        let path = std::env::temp_dir().join(name);
        File::create(&path).unwrap().write_all(contents.as_bytes()).unwrap();
        path
    }

    fn json_with(decoder: &str) -> String {
        format!(
            r#"{{"version": "1.0", "truncation": {{"direction": "Right", "max_length": 1,
            "strategy": "LongestFirst", "stride": 0}}, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": {{"type": "Whitespace"}}, "post_processor": null,
            "decoder": {decoder}, "model": {{"type": "WordLevel",
            "vocab": {{"a": 0, "b": 7}}, "unk_token": "a"}}}}"#
        )
    }

    fn from_json(name: &str, contents: &str) -> Result<Tokenizer, TextError> {
        let path = scratch_file(name, contents);
        let tokenizer = Tokenizer::from_file(&path);
        std::fs::remove_file(path).unwrap();
        tokenizer
    }

    #[test]
    fn from_file_ignores_truncation_and_counts_to_the_largest_id() {
        let tokenizer = from_json("truncation", &json_with("null")).unwrap();
        assert_eq!(tokenizer.encode("a b a", false).unwrap(), [0, 7, 0]);
        assert_eq!(tokenizer.vocab_size(), 8);
        assert_eq!(tokenizer.decode(&[0, 3, 7], false).unwrap(), "a b");
    }

    #[test]
    fn from_file_names_what_is_wrong() {
        let missing = Tokenizer::from_file(Path::new("/no/such/tokenizer.json"));
        assert!(matches!(missing, Err(TextError::Read { .. })));
        assert!(matches!(from_json("cut", r#"{"version":"#), Err(TextError::Parse { .. })));
        let ctc = r#"{"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "CTC",
            "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true}]}"#;
        let Err(TextError::UnsupportedDecoder { decoder, .. }) = from_json("ctc", &json_with(ctc))
        else {
            panic!("CTC was accepted");
        };
        assert_eq!(decoder, "CTC");
        let strip = r#"{"type": "Strip", "content": " ", "start": 0, "stop": 2}"#;
        let error = from_json("strip", &json_with(strip)).err().unwrap();
        assert!(error.to_string().ends_with("decoder Strip with stop 2 is not supported"));
    }

    #[test]
    fn reading_stops_at_the_limit() {
        let path = scratch_file("limit", "12345");
        assert_eq!(read_limited(&path, 5).unwrap(), b"12345");
        let error = read_limited(&path, 4).unwrap_err();
        assert!(error.to_string().ends_with("has 5 bytes; the limit is 4"));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn encode_decode_round_trip() {
        let tokenizer = testing::byte_level();
        let ids = tokenizer.encode("né <|s|>", false).unwrap();
        assert_eq!(ids.last(), Some(&testing::byte_level_special()));
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), "né <|s|>");
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), "né ");
        assert!(tokenizer.is_special(testing::byte_level_special()));
        assert!(!tokenizer.is_special(0) && !tokenizer.is_special(u32::MAX));
    }

    #[test]
    fn decode_of_nothing_is_empty_whatever_the_decoder() {
        for (name, tokenizer) in testing::all() {
            assert_eq!(tokenizer.decode(&[], true).unwrap(), "", "{name}");
            assert_eq!(tokenizer.decode(&[u32::MAX], false).unwrap(), "", "{name}");
        }
    }

    #[test]
    fn token_text_keeps_the_leading_space() {
        let metaspace = testing::metaspace();
        assert_eq!(metaspace.token_text(metaspace.token_to_id("▁Hey").unwrap()).unwrap(), " Hey");
        let llama = testing::llama();
        assert_eq!(llama.token_text(llama.token_to_id("▁Hey").unwrap()).unwrap(), " Hey");
        assert_eq!(llama.token_text(llama.token_to_id("<0xE4>").unwrap()).unwrap(), "\u{FFFD}");
        assert_eq!(llama.token_text(llama.token_to_id("</s>").unwrap()).unwrap(), "</s>");
        assert_eq!(llama.token_text(u32::MAX).unwrap(), "");
        let word_piece = testing::word_piece();
        assert_eq!(word_piece.token_text(word_piece.token_to_id("##ing").unwrap()).unwrap(), "ing");
    }
}
