//! Incremental detokenising against decoding in one go.

#![no_main]

use libfuzzer_sys::fuzz_target;
use quire_engine::text::{Detokenizer, Tokenizer};
use std::sync::LazyLock;

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let json = include_bytes!("../../tests/data/goldens/llama-gqa/tokenizer.json");
    Tokenizer::from_bytes("tokenizer.json".as_ref(), json).expect("a valid tokenizer")
});

fuzz_target!(|input: (Vec<u16>, bool)| {
    let (ids, skip_special) = input;
    // Most ids are tokens, some are outside the vocabulary.
    let ids: Vec<u32> = ids.into_iter().map(|id| u32::from(id % 340)).collect();
    let mut detokenizer = Detokenizer::new(TOKENIZER.clone(), skip_special);
    let mut text = String::new();
    for &id in &ids {
        text.push_str(&detokenizer.push(id).expect("decodes"));
    }
    text.push_str(&detokenizer.finish().expect("decodes"));
    assert_eq!(text, TOKENIZER.decode(&ids, skip_special).expect("decodes"));
});
