//! Qwen3 (dense): norms on each query and key head, biases only by `attention_bias`.

use super::{
    decoder::{Defaults, read_decoder},
    json::JsonFile,
    qwen2::read_windows,
};
use crate::{error::LoadError, spec::DecoderSpec};

const DEFAULTS: Defaults =
    Defaults { max_position_embeddings: 32768, num_kv_heads: Some(32), head_dim: Some(128) };

pub(super) fn read_spec(config: &JsonFile) -> Result<DecoderSpec, LoadError> {
    let mut spec = read_decoder(config, &DEFAULTS)?;
    spec.qk_norm = true;
    spec.qkv_bias = config.flag("attention_bias")?.unwrap_or(false);
    spec.o_bias = spec.qkv_bias;
    spec.windows = read_windows(config, spec.num_layers)?;
    spec.check(config.path())?;
    Ok(spec)
}
