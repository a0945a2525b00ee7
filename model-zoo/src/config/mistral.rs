//! Mistral: Llama's shape, one sliding window for every layer or none.

use super::{
    decoder::{Defaults, layer_windows, read_decoder, read_window},
    json::JsonFile,
};
use crate::{error::LoadError, spec::DecoderSpec};

const DEFAULTS: Defaults =
    Defaults { max_position_embeddings: 4096 * 32, num_kv_heads: Some(8), head_dim: None };

pub(super) fn read_spec(config: &JsonFile) -> Result<DecoderSpec, LoadError> {
    let mut spec = read_decoder(config, &DEFAULTS)?;
    spec.windows = layer_windows(config, spec.num_layers, read_window(config)?, 0)?;
    spec.check(config.path())?;
    Ok(spec)
}
