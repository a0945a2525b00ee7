//! Qwen2 and Qwen2.5: biases on queries, keys and values; a window only where it is switched on.

use super::{
    decoder::{Defaults, layer_windows, read_decoder, read_window},
    json::JsonFile,
};
use crate::{
    error::LoadError,
    spec::{DecoderSpec, MAX_LAYERS},
};

const DEFAULTS: Defaults =
    Defaults { max_position_embeddings: 32768, num_kv_heads: Some(32), head_dim: None };

pub(super) fn read_spec(config: &JsonFile) -> Result<DecoderSpec, LoadError> {
    let mut spec = read_decoder(config, &DEFAULTS)?;
    spec.qkv_bias = true;
    spec.windows = read_windows(config, spec.num_layers)?;
    spec.check(config.path())?;
    Ok(spec)
}

/// Qwen's windows: `sliding_window` counts only with `use_sliding_window`, and only for the layers
/// from `max_window_layers` on.
pub(super) fn read_windows(
    config: &JsonFile,
    num_layers: usize,
) -> Result<Vec<Option<u32>>, LoadError> {
    let is_used = config.flag("use_sliding_window")?.unwrap_or(false);
    let window = read_window(config)?.filter(|_| is_used);
    let first_windowed = config.count("max_window_layers", 0..=MAX_LAYERS)?.unwrap_or(28);
    layer_windows(config, num_layers, window, first_windowed)
}
