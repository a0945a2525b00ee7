//! A GGUF tokenizer made of arbitrary keys, and a text: whatever loads can encode and decode.

#![no_main]

use std::path::Path;

use libfuzzer_sys::{arbitrary, arbitrary::Arbitrary, fuzz_target};
use quire_model_zoo::gguf::GgufFile;

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    is_spm: bool,
    pre: Option<&'a str>,
    /// Text, score, type.
    tokens: Vec<(&'a str, f32, i32)>,
    merges: Vec<&'a str>,
    add_space_prefix: Option<bool>,
    bos: Option<u32>,
    unknown: Option<u32>,
    text: &'a str,
}

/// The keys of a GGUF header.
#[derive(Default)]
struct Keys {
    count: u64,
    bytes: Vec<u8>,
}

impl Keys {
    fn key(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.count += 1;
        self.bytes.extend(string(&format!("tokenizer.ggml.{key}")));
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend(value);
    }

    fn array(&mut self, key: &str, kind: u32, elements: impl Iterator<Item = Vec<u8>>) {
        let elements = Vec::from_iter(elements);
        let len = elements.len() as u64;
        self.key(
            key,
            9,
            &[&kind.to_le_bytes()[..], &len.to_le_bytes(), &elements.concat()].concat(),
        );
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn file(input: &Input<'_>) -> Vec<u8> {
    let mut keys = Keys::default();
    keys.key("model", 8, &string(if input.is_spm { "llama" } else { "gpt2" }));
    if let Some(pre) = input.pre {
        keys.key("pre", 8, &string(pre));
    }
    let tokens = || input.tokens.iter();
    keys.array("tokens", 8, tokens().map(|(text, ..)| string(text)));
    keys.array("scores", 6, tokens().map(|(_, score, _)| score.to_le_bytes().to_vec()));
    keys.array("token_type", 5, tokens().map(|(.., kind)| kind.to_le_bytes().to_vec()));
    keys.array("merges", 8, input.merges.iter().map(|merge| string(merge)));
    if let Some(flag) = input.add_space_prefix {
        keys.key("add_space_prefix", 7, &[flag.into()]);
    }
    for (key, id) in [("bos_token_id", input.bos), ("unknown_token_id", input.unknown)] {
        if let Some(id) = id {
            keys.key(key, 4, &id.to_le_bytes());
        }
    }
    let num_tensors = 0u64;
    [
        b"GGUF",
        &3u32.to_le_bytes()[..],
        &num_tensors.to_le_bytes(),
        &keys.count.to_le_bytes(),
        &keys.bytes,
    ]
    .concat()
}

fuzz_target!(|input: Input<'_>| {
    let file = GgufFile::from_bytes(Path::new("model.gguf"), file(&input)).expect("is well-formed");
    let Ok(read) = file.tokenizer() else { return };
    if let Ok(encoding) = read.tokenizer.encode_fast(input.text, true) {
        let _ = read.tokenizer.decode(encoding.get_ids(), true);
    }
});
