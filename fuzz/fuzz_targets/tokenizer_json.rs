//! `tokenizer.json`: refused, or a tokenizer that encodes and decodes without a panic.

#![no_main]

use libfuzzer_sys::fuzz_target;
use quire_engine::text::Tokenizer;

fuzz_target!(|json: &[u8]| {
    // The `tokenizers` crate checks some settings by panicking; that must stay inside.
    std::panic::set_hook(Box::new(|_| ()));
    let Ok(tokenizer) = Tokenizer::from_bytes("tokenizer.json".as_ref(), json) else { return };
    if let Ok(ids) = tokenizer.encode("The tide, 12 \u{1F30A}", true) {
        let _ = tokenizer.decode(&ids, false);
    }
});
