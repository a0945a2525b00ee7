//! A GGUF file: header, spec, tokenizer, and the first row of every tensor.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use quire_model_zoo::{gguf::GgufFile, source::WeightSource};

/// Longest row that is read; a header may describe rows as long as the file.
const MAX_ROW: usize = 1 << 16;

fuzz_target!(|contents: &[u8]| {
    let Ok(file) = GgufFile::from_bytes(Path::new("model.gguf"), contents.to_vec()) else { return };
    let _ = file.tokenizer();
    let Ok(source) = file.into_source() else { return };
    for name in source.names() {
        let shape = source.shape(name).expect("the source named it");
        if let [.., cols @ 0..=MAX_ROW] = *shape
            && shape.len() <= 2
        {
            source.read_row(name, 0, &mut vec![0.0; cols]).expect("the header was checked");
        }
    }
});
