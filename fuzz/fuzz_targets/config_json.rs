//! `config.json`, a line break, `generation_config.json`: refused, or a spec that can be used.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use quire_model_zoo::{config::parse_config, weights::expected_weights};

fuzz_target!(|text: &str| {
    let (config, generation) = match text.split_once('\n') {
        Some((config, generation)) => (config, Some(generation)),
        None => (text, None),
    };
    if let Ok(config) = parse_config(Path::new("model"), config, generation) {
        let spec = config.spec;
        let inv_freq = spec.rope.inv_freq(spec.max_position_embeddings);
        assert_eq!(inv_freq.len() * 2, spec.rope.rot_dim);
        assert!(inv_freq.iter().all(|freq| freq.is_finite()));
        assert_eq!(spec.windows.len(), spec.num_layers);
        expected_weights(&spec);
    }
});
