//! Writes GGUF files for tests, well-formed or not.

use super::{GgufFile, GgufSource, types::tensor_type};
use crate::spec::DecoderSpec;
use std::path::Path;

/// A GGUF file in the making.
#[derive(Clone)]
pub(super) struct Builder {
    pub(super) version: u32,
    pub(super) alignment: usize,
    /// Key, type number, value.
    keys: Vec<(String, u32, Vec<u8>)>,
    tensors: Vec<Tensor>,
    data: Vec<u8>,
}

#[derive(Clone)]
pub(super) struct Tensor {
    pub(super) name: String,
    /// Fastest dimension first, as in the file.
    pub(super) dimensions: Vec<u64>,
    pub(super) kind: u32,
    pub(super) offset: u64,
}

impl Builder {
    pub(super) fn new() -> Self {
        Self { version: 3, alignment: 32, keys: vec![], tensors: vec![], data: vec![] }
    }

    pub(super) fn key(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.keys.retain(|(name, ..)| name != key);
        self.duplicate_key(key, kind, value)
    }

    pub(super) fn duplicate_key(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.keys.push((key.into(), kind, value.to_vec()));
        self
    }

    pub(super) fn without(mut self, key: &str) -> Self {
        self.keys.retain(|(name, ..)| name != key);
        self
    }

    pub(super) fn u32(self, key: &str, value: u32) -> Self {
        self.key(key, 4, &value.to_le_bytes())
    }

    pub(super) fn f32(self, key: &str, value: f32) -> Self {
        self.key(key, 6, &value.to_le_bytes())
    }

    pub(super) fn flag(self, key: &str, value: bool) -> Self {
        self.key(key, 7, &[value.into()])
    }

    pub(super) fn string(self, key: &str, value: &str) -> Self {
        self.key(key, 8, &string(value))
    }

    pub(super) fn strings<S: AsRef<str>>(self, key: &str, values: &[S]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(|v| string(v.as_ref())).collect();
        self.array(key, 8, values.len() as u64, &elements)
    }

    pub(super) fn i32s(self, key: &str, values: &[i32]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.array(key, 5, values.len() as u64, &elements)
    }

    pub(super) fn array(self, key: &str, kind: u32, count: u64, elements: &[u8]) -> Self {
        let value = [&kind.to_le_bytes()[..], &count.to_le_bytes(), elements].concat();
        self.key(key, 9, &value)
    }

    /// Adds an F32 tensor of this shape, slowest dimension first.
    pub(super) fn floats(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        let dimensions: Vec<u64> = shape.iter().rev().map(|&d| d as u64).collect();
        let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.tensor(name, &dimensions, 0, &data)
    }

    /// Adds a tensor behind the others; `dimensions` are fastest first.
    pub(super) fn tensor(mut self, name: &str, dimensions: &[u64], kind: u32, data: &[u8]) -> Self {
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        let offset = self.data.len() as u64;
        self.data.extend(data);
        let dimensions = dimensions.to_vec();
        self.tensors.push(Tensor { name: name.into(), dimensions, kind, offset });
        self
    }

    /// Changes the last tensor's info.
    pub(super) fn edit_tensor(mut self, edit: impl FnOnce(&mut Tensor)) -> Self {
        edit(self.tensors.last_mut().expect("there is a tensor"));
        self
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.keys {
            out.extend(string(key));
            out.extend(kind.to_le_bytes());
            out.extend(value);
        }
        for tensor in &self.tensors {
            out.extend(string(&tensor.name));
            out.extend((tensor.dimensions.len() as u32).to_le_bytes());
            out.extend(tensor.dimensions.iter().flat_map(|d| d.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(&self.data);
        out
    }
}

/// A llama of two layers whose matrices are of these ggml types: the embedding, which is the head,
/// too; queries and keys; values; the rest. All sizes are whole blocks. Bytes are any, scales small.
pub(crate) fn block_model(kinds: [u32; 4]) -> (DecoderSpec, GgufSource) {
    let (hidden, ff, vocab) = (256, 512, 300);
    let mut builder = Builder::new()
        .string("general.architecture", "llama")
        .u32("llama.block_count", 2)
        .u32("llama.context_length", 128)
        .u32("llama.embedding_length", hidden as u32)
        .u32("llama.feed_forward_length", ff as u32)
        .u32("llama.attention.head_count", 8)
        .u32("llama.attention.head_count_kv", 2)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .u32("tokenizer.ggml.eos_token_id", 2);
    let [embedding, qk, v, rest] = kinds;
    builder = matrix(builder, "token_embd.weight", [vocab, hidden], embedding);
    builder = builder.floats("output_norm.weight", &[hidden], &vec![1.0; hidden]);
    for layer in 0..2 {
        for (name, shape, kind) in [
            ("attn_q", [hidden, hidden], qk),
            ("attn_k", [hidden / 4, hidden], qk),
            ("attn_v", [hidden / 4, hidden], v),
            ("attn_output", [hidden, hidden], rest),
            ("ffn_gate", [ff, hidden], rest),
            ("ffn_up", [ff, hidden], rest),
            ("ffn_down", [hidden, ff], rest),
        ] {
            builder = matrix(builder, &format!("blk.{layer}.{name}.weight"), shape, kind);
        }
        for name in ["attn_norm", "ffn_norm"] {
            let name = format!("blk.{layer}.{name}.weight");
            builder = builder.floats(&name, &[hidden], &vec![1.0; hidden]);
        }
    }
    let file = GgufFile::from_bytes(Path::new("blocks.gguf"), builder.bytes());
    let file = file.expect("a good file");
    let spec = file.spec().expect("a llama");
    (spec, file.into_source().expect("its weights"))
}

fn matrix(builder: Builder, name: &str, [rows, cols]: [usize; 2], kind: u32) -> Builder {
    let dtype = tensor_type(kind).expect("a type that can be read");
    let bytes = rows * cols / dtype.block_elements() * dtype.block_bytes();
    // No pair of bytes is an f16 beyond 2, nor are four an f32 or two a bf16.
    let data: Vec<u8> = (0..bytes).map(|i| ((i * 7919) >> 5) as u8 & 0x3f).collect();
    builder.tensor(name, &[cols as u64, rows as u64], kind, &data)
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}
