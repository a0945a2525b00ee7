//! Byte-level BPE (`tokenizer.ggml.model` = `gpt2`): tokens, merges, and a named way to cut words.

use tokenizers::{
    Tokenizer,
    models::bpe::{BPE, Merges},
    normalizers::NFC,
    pre_tokenizers::byte_level::ByteLevel,
};

use super::{MERGES, Metadata, PRE, Tokens, words::WordSplit};
use crate::error::{LoadError, quoted};

/// The tokenizer without added tokens, and whether prompts start with BOS unless the file says.
pub(super) fn read(metadata: &Metadata, tokens: &Tokens) -> Result<(Tokenizer, bool), LoadError> {
    let pre = metadata.string(PRE)?.unwrap_or("default");
    let Some(words) = WordSplit::named(pre) else {
        let known = Vec::from_iter(WordSplit::known_names()).join(", ");
        let problem = format!("pre-tokenizer {} is not supported; known are {known}", quoted(pre));
        return Err(metadata.error(PRE, problem));
    };
    let pre_tokenizer = words.pre_tokenizer().map_err(|e| metadata.error(PRE, e.to_string()))?;
    let model = BPE::builder()
        .vocab_and_merges(tokens.vocab.clone(), read_merges(metadata)?)
        .ignore_merges(words.ignore_merges)
        .build()
        .map_err(|e| metadata.error(MERGES, quoted(&e.to_string())))?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    if words.compose {
        tokenizer.with_normalizer(Some(NFC));
    }
    Ok((tokenizer, words.add_bos))
}

fn read_merges(metadata: &Metadata) -> Result<Merges, LoadError> {
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
    Ok(merges)
}
