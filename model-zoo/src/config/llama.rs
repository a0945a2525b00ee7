//! Llama: Llama 2 and 3, SmolLM and others published as `LlamaForCausalLM`.

use super::{
    decoder::{Defaults, layer_windows, read_decoder},
    json::JsonFile,
};
use crate::{error::LoadError, spec::DecoderSpec};

const DEFAULTS: Defaults =
    Defaults { max_position_embeddings: 2048, num_kv_heads: None, head_dim: None };

pub(super) fn read_spec(config: &JsonFile) -> Result<DecoderSpec, LoadError> {
    let mut spec = read_decoder(config, &DEFAULTS)?;
    spec.qkv_bias = config.flag("attention_bias")?.unwrap_or(false);
    spec.o_bias = spec.qkv_bias;
    spec.mlp_bias = config.flag("mlp_bias")?.unwrap_or(false);
    // The architecture has no window; this refuses a config whose layers ask for one.
    spec.windows = layer_windows(config, spec.num_layers, None, 0)?;
    spec.check(config.path())?;
    Ok(spec)
}
