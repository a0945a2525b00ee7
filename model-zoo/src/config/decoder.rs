//! What the dense families share: the keys of a config that mean the same in all of them.

use super::{json::JsonFile, rope::read_rope};
use crate::{
    error::LoadError,
    source::SourceDtype,
    spec::{
        DecoderSpec, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN_SIZE, MAX_INTERMEDIATE_SIZE, MAX_LAYERS,
        MAX_POSITIONS, MAX_VOCAB_SIZE,
    },
};

/// Where families differ in what an absent key means.
pub(super) struct Defaults {
    pub(super) max_position_embeddings: usize,
    /// `None`: as many as query heads.
    pub(super) num_kv_heads: Option<usize>,
    /// `None`: hidden size over heads. A null in the config always means that.
    pub(super) head_dim: Option<usize>,
}

/// Reads the shared keys. Biases, query and key norms are left off and every layer sees all
/// positions; the family sets what it has, then calls [`DecoderSpec::check`].
pub(super) fn read_decoder(
    config: &JsonFile,
    defaults: &Defaults,
) -> Result<DecoderSpec, LoadError> {
    check_activation(config)?;
    let hidden_size = config.required_count("hidden_size", MAX_HIDDEN_SIZE)?;
    let num_layers = config.required_count("num_hidden_layers", MAX_LAYERS)?;
    let num_heads = config.required_count("num_attention_heads", MAX_HEADS)?;
    let num_kv_heads = match config.count("num_key_value_heads", 1..=MAX_HEADS)? {
        Some(heads) => heads,
        // Null stands for one a query head; only an absent key has the family's default.
        None => defaults
            .num_kv_heads
            .filter(|_| !config.has("num_key_value_heads"))
            .unwrap_or(num_heads),
    };
    let head_dim = match config.count("head_dim", 1..=MAX_HEAD_DIM)? {
        Some(dim) => dim,
        None => match defaults.head_dim.filter(|_| !config.has("head_dim")) {
            Some(dim) => dim,
            None => derived_head_dim(config, hidden_size, num_heads)?,
        },
    };
    let max_position_embeddings = config
        .count("max_position_embeddings", 1..=MAX_POSITIONS)?
        .unwrap_or(defaults.max_position_embeddings);
    let rope = read_rope(config, head_dim, max_position_embeddings)?;
    Ok(DecoderSpec {
        architecture: config.architecture()?.to_owned(),
        vocab_size: config.required_count("vocab_size", MAX_VOCAB_SIZE)?,
        hidden_size,
        intermediate_size: config.required_count("intermediate_size", MAX_INTERMEDIATE_SIZE)?,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        rms_norm_eps: config.float("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        max_position_embeddings: rope.scaling.stretched(max_position_embeddings),
        rope,
        tie_word_embeddings: config.flag("tie_word_embeddings")?.unwrap_or(false),
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        qk_norm: false,
        windows: vec![None; num_layers],
        bos: config.token_ids("bos_token_id")?.first().copied(),
        eos: unique(config.token_ids("eos_token_id")?),
        torch_dtype: read_dtype(config)?,
    })
}

fn check_activation(config: &JsonFile) -> Result<(), LoadError> {
    match config.string("hidden_act")? {
        None | Some("silu") => Ok(()),
        Some(other) => Err(LoadError::unsupported(config.path(), "hidden_act", other)),
    }
}

fn derived_head_dim(
    config: &JsonFile,
    hidden_size: usize,
    num_heads: usize,
) -> Result<usize, LoadError> {
    if hidden_size.is_multiple_of(num_heads) {
        return Ok(hidden_size / num_heads);
    }
    let problem = format!(
        "is absent, and hidden_size {hidden_size} is not a multiple of num_attention_heads \
         {num_heads}"
    );
    Err(config.error("head_dim", problem))
}

fn read_dtype(config: &JsonFile) -> Result<Option<SourceDtype>, LoadError> {
    let name = match config.string("dtype")? {
        Some(name) => Some(name),
        None => config.string("torch_dtype")?,
    };
    match name.map(|name| name.strip_prefix("torch.").unwrap_or(name)) {
        None => Ok(None),
        Some("float32") => Ok(Some(SourceDtype::F32)),
        Some("float16") => Ok(Some(SourceDtype::F16)),
        Some("bfloat16") => Ok(Some(SourceDtype::Bf16)),
        Some(other) => Err(LoadError::unsupported(config.path(), "dtype", other)),
    }
}

fn unique(ids: Vec<u32>) -> Vec<u32> {
    let mut seen = Vec::with_capacity(ids.len().min(64));
    for id in ids {
        if !seen.contains(&id) {
            seen.push(id);
        }
    }
    seen
}

/// The `sliding_window` key: null and 0 mean no window, an absent key transformers' default.
pub(super) fn read_window(config: &JsonFile) -> Result<Option<u32>, LoadError> {
    if !config.has("sliding_window") {
        return Ok(Some(4096));
    }
    let window = config.count("sliding_window", 0..=MAX_POSITIONS)?;
    Ok(window.map(|w| w as u32).filter(|w| *w != 0))
}

/// Each layer's window: by `layer_types` where the config has it, else `window` for the layers from
/// `first_windowed` on.
pub(super) fn layer_windows(
    config: &JsonFile,
    num_layers: usize,
    window: Option<u32>,
    first_windowed: usize,
) -> Result<Vec<Option<u32>>, LoadError> {
    let Some(types) = config.strings("layer_types")? else {
        return Ok((0..num_layers).map(|i| window.filter(|_| i >= first_windowed)).collect());
    };
    if types.len() != num_layers {
        let problem = format!("has {} entries; there are {num_layers} layers", types.len());
        return Err(config.error("layer_types", problem));
    }
    let windows = types.into_iter().map(|kind| match (kind, window) {
        ("full_attention", _) => Ok(None),
        ("sliding_attention", Some(window)) => Ok(Some(window)),
        ("sliding_attention", None) => {
            Err(config.error("layer_types", "has sliding_attention, but no window is in use"))
        }
        (other, _) => Err(LoadError::unsupported(config.path(), "layer type", other)),
    });
    windows.collect()
}
