//! A safetensors file: its header is refused, or describes the whole file.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use quire_model_zoo::safetensors::check_file;

fuzz_target!(|contents: &[u8]| {
    let _ = check_file(Path::new("model.safetensors"), contents);
});
