//! Metadata keys to a [`DecoderSpec`].

use super::{GgufFile, Metadata, names, rope::read_rope, tokenizer::special_ids};
use crate::{
    error::LoadError,
    spec::{
        DecoderSpec, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN_SIZE, MAX_INTERMEDIATE_SIZE, MAX_LAYERS,
        MAX_POSITIONS, MAX_VOCAB_SIZE,
    },
};

/// What is known of an architecture beyond its keys.
struct Architecture {
    gguf: &'static str,
    hugging_face: &'static str,
    qk_norm: bool,
    /// Query and key rows are stored interleaved.
    permuted: bool,
}

/// Mistral's files call themselves llama: the two differ only in the window key.
const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        gguf: "llama",
        hugging_face: "LlamaForCausalLM",
        qk_norm: false,
        permuted: true,
    },
    Architecture {
        gguf: "qwen2",
        hugging_face: "Qwen2ForCausalLM",
        qk_norm: false,
        permuted: false,
    },
    Architecture {
        gguf: "qwen3",
        hugging_face: "Qwen3ForCausalLM",
        qk_norm: true,
        permuted: false,
    },
];

fn architecture(metadata: &Metadata) -> Result<&'static Architecture, LoadError> {
    const KEY: &str = "general.architecture";
    let name = metadata.string(KEY)?.ok_or_else(|| metadata.missing(KEY))?;
    ARCHITECTURES
        .iter()
        .find(|architecture| architecture.gguf == name)
        .ok_or_else(|| LoadError::unsupported(metadata.path(), "architecture", name))
}

/// Whether the file's query and key rows are stored interleaved.
pub(super) fn is_permuted(metadata: &Metadata) -> Result<bool, LoadError> {
    architecture(metadata).map(|architecture| architecture.permuted)
}

pub(super) fn read_spec(file: &GgufFile) -> Result<DecoderSpec, LoadError> {
    let metadata = file.metadata();
    let architecture = architecture(metadata)?;
    let key = |suffix: &str| format!("{}.{suffix}", architecture.gguf);
    let count = |suffix: &str, limit| metadata.required_count(&key(suffix), limit);
    check_dense(metadata, &key("expert_count"))?;

    let hidden_size = count("embedding_length", MAX_HIDDEN_SIZE)?;
    let num_layers = count("block_count", MAX_LAYERS)?;
    let num_heads = count("attention.head_count", MAX_HEADS)?;
    let head_dim = read_head_dim(metadata, &key, hidden_size, num_heads)?;
    let window = metadata.count(&key("attention.sliding_window"), 0..=MAX_POSITIONS)?;
    let context_length = count("context_length", MAX_POSITIONS)?;
    let rope = read_rope(file, architecture.gguf, head_dim, context_length)?;
    let eps_key = key("attention.layer_norm_rms_epsilon");
    let (bos, eos) = special_ids(metadata)?;
    let has = |gguf_name: &str| file.tensor(gguf_name).is_some();
    let spec = DecoderSpec {
        architecture: architecture.hugging_face.to_owned(),
        vocab_size: read_vocab_size(file)?,
        hidden_size,
        intermediate_size: count("feed_forward_length", MAX_INTERMEDIATE_SIZE)?,
        num_layers,
        num_heads,
        num_kv_heads: metadata
            .count(&key("attention.head_count_kv"), 1..=MAX_HEADS)?
            .unwrap_or(num_heads),
        head_dim,
        rms_norm_eps: metadata.float(&eps_key)?.ok_or_else(|| metadata.missing(&eps_key))? as f32,
        max_position_embeddings: rope.scaling.stretched(context_length),
        rope,
        tie_word_embeddings: !has(names::OUTPUT),
        qkv_bias: has("blk.0.attn_q.bias"),
        o_bias: has("blk.0.attn_output.bias"),
        mlp_bias: has("blk.0.ffn_gate.bias"),
        qk_norm: architecture.qk_norm,
        windows: vec![window.filter(|w| *w != 0).map(|w| w as u32); num_layers],
        bos,
        eos,
        torch_dtype: None,
    };
    spec.check(file.path())?;
    if architecture.permuted && spec.rope.rot_dim != head_dim {
        let problem = format!("is {}; llama rotates whole heads of {head_dim}", spec.rope.rot_dim);
        return Err(metadata.error(&key("rope.dimension_count"), problem));
    }
    Ok(spec)
}

fn check_dense(metadata: &Metadata, key: &str) -> Result<(), LoadError> {
    match metadata.count(key, 0..=usize::from(u16::MAX))? {
        None | Some(0) => Ok(()),
        Some(experts) => {
            let name = format!("{key} = {experts}");
            Err(LoadError::unsupported(metadata.path(), "mixture of experts", &name))
        }
    }
}

/// The vocabulary is the embedding's rows; the tokenizer may have fewer tokens, never more.
fn read_vocab_size(file: &GgufFile) -> Result<usize, LoadError> {
    let error = |problem: String| file.tensor_error(names::TOKEN_EMBEDDING, problem);
    let Some(embedding) = file.tensor(names::TOKEN_EMBEDDING) else {
        return Err(error("is missing".into()));
    };
    let &[vocab_size, _] = &embedding.shape[..] else {
        return Err(error(format!("has shape {:?}; it must be a matrix", embedding.shape)));
    };
    if vocab_size > MAX_VOCAB_SIZE {
        return Err(error(format!("has {vocab_size} rows; the limit is {MAX_VOCAB_SIZE}")));
    }
    match file.metadata().strings("tokenizer.ggml.tokens")? {
        Some(tokens) if tokens.len() > vocab_size => {
            Err(error(format!("has {vocab_size} rows; there are {} tokens", tokens.len())))
        }
        _ => Ok(vocab_size),
    }
}

fn read_head_dim(
    metadata: &Metadata,
    key: &impl Fn(&str) -> String,
    hidden_size: usize,
    num_heads: usize,
) -> Result<usize, LoadError> {
    let key_length = metadata.count(&key("attention.key_length"), 1..=MAX_HEAD_DIM)?;
    let head_dim = match key_length {
        Some(length) => length,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            let problem = format!(
                "is absent, and embedding_length {hidden_size} is not a multiple of head_count \
                 {num_heads}"
            );
            return Err(metadata.error(&key("attention.key_length"), problem));
        }
    };
    let value_key = key("attention.value_length");
    match metadata.count(&value_key, 1..=MAX_HEAD_DIM)? {
        Some(length) if length != head_dim => {
            let problem = format!("is {length}; keys have {head_dim}, and they must agree");
            Err(metadata.error(&value_key, problem))
        }
        _ => Ok(head_dim),
    }
}
