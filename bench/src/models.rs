//! Models with random weights, of the shapes of well-known ones: made in memory, as fast as they can
//! be copied.

use half::bf16;
use quire_engine::DType;
use quire_engine::backend::{CudaBackend, CudaOptions};
use quire_engine::ops::BackendError;
use quire_engine::runner::{ModelRunner, RunnerSizes};
use quire_model_zoo::decoder::{Decoder, DecoderLimits, model_info};
use quire_model_zoo::error::LoadError;
use quire_model_zoo::loader::ModelError;
use quire_model_zoo::source::{SourceDtype, WeightSource};
use quire_model_zoo::spec::{DecoderSpec, RopeScaling, RopeSpec};
use quire_model_zoo::weights::expected_weights;
use std::collections::BTreeMap;

use crate::Random;

/// A decoder on a device, with its KV cache.
pub type CudaRunner = ModelRunner<CudaBackend<bf16>, Decoder<CudaBackend<bf16>>>;

/// The sizes that tell dense decoders apart.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Rows of the embedding.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub mlp: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// The output projection is the embedding.
    pub tied: bool,
}

/// SmolLM2-135M.
pub const SMOLLM2: Sizes = Sizes {
    vocab: 49_152,
    hidden: 576,
    mlp: 1536,
    layers: 30,
    heads: 9,
    kv_heads: 3,
    head_dim: 64,
    tied: true,
};
/// Qwen2.5 0.5B.
pub const QWEN_05B: Sizes = Sizes {
    vocab: 151_936,
    hidden: 896,
    mlp: 4864,
    layers: 24,
    heads: 14,
    kv_heads: 2,
    head_dim: 64,
    tied: true,
};
/// Llama 3.2 1B.
pub const LLAMA_1B: Sizes = Sizes {
    vocab: 128_256,
    hidden: 2048,
    mlp: 8192,
    layers: 16,
    heads: 32,
    kv_heads: 8,
    head_dim: 64,
    tied: true,
};
/// Llama 3.1 8B.
pub const LLAMA_8B: Sizes = Sizes {
    vocab: 128_256,
    hidden: 4096,
    mlp: 14_336,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    tied: false,
};
/// The least that every kernel is launched for.
pub const TINY: Sizes = Sizes {
    vocab: 267,
    hidden: 64,
    mlp: 96,
    layers: 2,
    heads: 4,
    kv_heads: 1,
    head_dim: 16,
    tied: false,
};

impl Sizes {
    /// A Llama of these sizes, with a context of `max_positions` tokens.
    pub fn spec(&self, max_positions: usize) -> DecoderSpec {
        let scaling = RopeScaling::None;
        DecoderSpec {
            architecture: "LlamaForCausalLM".into(),
            vocab_size: self.vocab,
            hidden_size: self.hidden,
            intermediate_size: self.mlp,
            num_layers: self.layers,
            num_heads: self.heads,
            num_kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            rms_norm_eps: 1e-5,
            rope: RopeSpec { theta: 5e5, rot_dim: self.head_dim, interleaved: false, scaling },
            max_position_embeddings: max_positions,
            tie_word_embeddings: self.tied,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            qk_norm: false,
            windows: vec![None; self.layers],
            bos: None,
            eos: Vec::new(),
            torch_dtype: None,
        }
    }

    /// Name, outputs and inputs of each matrix of a layer, and of the head.
    pub fn matrices(&self) -> [(&'static str, usize, usize); 5] {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        [
            ("qkv", q + 2 * kv, self.hidden),
            ("o", self.hidden, q),
            ("gate_up", 2 * self.mlp, self.hidden),
            ("down", self.hidden, self.mlp),
            ("logits", self.vocab, self.hidden),
        ]
    }

    /// Bytes of bf16 weights that a decode step reads: all but an embedding that is not the output
    /// projection.
    pub fn step_weight_bytes(&self) -> u64 {
        let embedding = if self.tied { 0 } else { self.vocab * self.hidden };
        2 * (model_info(&self.spec(1)).num_parameters - embedding as u64)
    }

    /// Bytes of bf16 keys and values of a token.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (2 * self.layers * self.kv_heads * self.head_dim * 2) as u64
    }

    /// Floating-point operations of a token with `context` keys in a decode step.
    pub fn step_flops(&self, context: f64) -> f64 {
        let attention = 4 * self.layers * self.heads * self.head_dim;
        self.step_weight_bytes() as f64 + attention as f64 * context
    }

    /// Floating-point operations of a prompt, of which the last token alone has logits.
    pub fn prefill_flops(&self, tokens: usize) -> f64 {
        let head = (2 * self.vocab * self.hidden) as f64;
        let token = self.step_flops((tokens + 1) as f64 / 2.0) - head;
        token * tokens as f64 + head
    }
}

/// Elements that the rows of one width are taken from.
const POOL: usize = 1 << 20;

/// Random weights in bf16: each row is a piece of a pool of random numbers.
pub struct RandomWeights {
    shapes: BTreeMap<String, Vec<usize>>,
    /// By row length, of a size that keeps activations near 1.
    pools: BTreeMap<usize, Vec<bf16>>,
}

impl RandomWeights {
    /// The weights of a decoder.
    pub fn new(spec: &DecoderSpec) -> Self {
        let weights = expected_weights(spec).into_iter();
        let shapes: BTreeMap<_, _> = weights.map(|w| (w.name, w.shape)).collect();
        let mut random = Random::new(0x9E37_79B9_7F4A_7C15);
        let noise = random.floats(POOL);
        let mut pools = BTreeMap::new();
        for cols in shapes.values().filter_map(|shape| shape.get(1).copied()) {
            pools.entry(cols).or_insert_with(|| {
                let scale = (3.0 / cols as f32).sqrt();
                noise.iter().cycle().take(POOL + cols).map(|x| bf16::from_f32(x * scale)).collect()
            });
        }
        RandomWeights { shapes, pools }
    }

    fn row(&self, name: &str, row: usize) -> Option<&[bf16]> {
        let shape = self.shapes.get(name)?;
        let [rows, cols] = shape[..] else { return None };
        // Rows of one matrix, and of matrices of different names, begin at different places.
        let place = name.bytes().fold(row as u64, |place, byte| {
            (place ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(23)
        });
        let start = place as usize % POOL;
        (row < rows).then(|| &self.pools[&cols][start..start + cols])
    }
}

impl WeightSource for RandomWeights {
    fn shape(&self, name: &str) -> Option<&[usize]> {
        self.shapes.get(name).map(Vec::as_slice)
    }

    fn dtype(&self, name: &str) -> Option<SourceDtype> {
        self.shapes.get(name).map(|_| SourceDtype::Bf16)
    }

    fn names(&self) -> Vec<&str> {
        self.shapes.keys().map(String::as_str).collect()
    }

    fn read_row(&self, name: &str, row: usize, out: &mut [f32]) -> Result<(), LoadError> {
        match self.row(name, row) {
            Some(values) => out.iter_mut().zip(values).for_each(|(x, v)| *x = v.to_f32()),
            // Norms.
            None => out.fill(1.0),
        }
        Ok(())
    }

    fn stored_row(&self, name: &str, row: usize) -> Option<&[u8]> {
        self.row(name, row).map(bytemuck::cast_slice)
    }

    fn location(&self, _: &str) -> String {
        "memory".into()
    }
}

/// What a [`cuda_runner`] has room for.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Tokens of a step.
    pub max_tokens: usize,
    /// Sequences of a step.
    pub max_seqs: usize,
    /// Tokens of a sequence.
    pub max_positions: usize,
    /// KV blocks.
    pub num_blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
}

impl Room {
    /// The same for a runner of `spec`.
    pub fn runner_sizes(&self, spec: &DecoderSpec) -> RunnerSizes {
        let layout = model_info(spec).kv_layout(self.num_blocks, self.block_size, DType::Bf16);
        RunnerSizes {
            layout,
            num_swap_blocks: 0,
            max_tokens: self.max_tokens,
            max_seqs: self.max_seqs,
            max_positions: self.max_positions,
            max_logprobs: 20,
        }
    }
}

/// A decoder with random weights on a device.
///
/// # Errors
/// There is no device, or not enough memory.
pub fn cuda_runner(
    sizes: &Sizes,
    options: CudaOptions,
    room: &Room,
) -> Result<CudaRunner, ModelError> {
    let spec = sizes.spec(room.max_positions);
    let mut backend = CudaBackend::new(options).map_err(BackendError::from)?;
    let limits = DecoderLimits { max_tokens: room.max_tokens, max_positions: room.max_positions };
    let source = RandomWeights::new(&spec);
    let model = Decoder::load(&spec, &source, &mut backend, &limits, &mut |_| ())?;
    Ok(ModelRunner::new(backend, model, room.runner_sizes(&spec))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_have_the_parameters_of_their_names() {
        for (sizes, millions) in [(SMOLLM2, 134.5), (LLAMA_1B, 1235.8), (LLAMA_8B, 8030.3)] {
            let parameters = model_info(&sizes.spec(1)).num_parameters as f64 / 1e6;
            assert!((parameters - millions).abs() < 0.1, "{parameters} of {millions}");
        }
        assert_eq!(LLAMA_8B.kv_bytes_per_token(), 131_072);
        assert_eq!(LLAMA_8B.step_weight_bytes(), 2 * (8_030_261_248 - 128_256 * 4096));
        assert_eq!(LLAMA_8B.prefill_flops(1), LLAMA_8B.step_flops(1.0));
        let layers = 8_030_261_248.0 - 2.0 * 128_256.0 * 4096.0;
        let attention = 4.0 * 32.0 * 4096.0 * 1024.0 * 1025.0 / 2.0;
        let flops = 2.0 * layers * 1024.0 + attention + 2.0 * 128_256.0 * 4096.0;
        assert_eq!(LLAMA_8B.prefill_flops(1024), flops);
    }

    #[test]
    fn rows_are_there_in_both_forms_and_differ() {
        let spec = TINY.spec(16);
        let weights = RandomWeights::new(&spec);
        let name = "model.layers.1.mlp.down_proj.weight";
        let mut out = vec![0.0; TINY.mlp];
        let row = |row| weights.stored_row(name, row).expect("a row").to_vec();
        weights.read_row(name, 3, &mut out).unwrap();
        let stored: Vec<f32> =
            bytemuck::pod_collect_to_vec::<u8, bf16>(&row(3)).iter().map(|x| x.to_f32()).collect();
        assert_eq!(out, stored);
        assert!(out.iter().all(|x| x.abs() <= 0.18) && row(3) != row(4));
        assert_eq!(weights.stored_row(name, TINY.hidden), None);
        weights.read_row("model.norm.weight", 0, &mut out).unwrap();
        assert_eq!(out, vec![1.0; TINY.mlp]);
    }
}
