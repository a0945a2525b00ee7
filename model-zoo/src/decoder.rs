//! The one decoder implementation: a pre-norm transformer driven by a [`DecoderSpec`].
//!
//! ```text
//! hidden = embed(tokens)                                  residual stream, f32
//! per layer:  qkv    = norm(hidden) · Wqkvᵀ (+ bias)
//!             q      = rope(q-norm(q));  k, v → KV cache
//!             hidden += attention(q, KV) · Woᵀ
//!             hidden += silu(norm(hidden) · Wgateᵀ) · (norm(hidden) · Wupᵀ) · Wdownᵀ
//! logits = norm(hidden[wanted]) · Wheadᵀ
//! ```

use crate::loader::ModelError;
use crate::source::WeightSource;
use crate::spec::DecoderSpec;
use crate::weights::{self, layer_weight};
use quire_engine::model::{MAX_LOGIT_ROWS, Model, ModelInfo};
use quire_engine::ops::{
    AttentionArgs, Backend, MatrixLayout, ModelPart, QkvArgs, Rope, TensorKind,
};
use std::ops::Range;

struct Layer<B: Backend> {
    input_norm: B::Vector,
    qkv: B::Matrix,
    qkv_bias: Option<B::Vector>,
    q_norm: Option<B::Vector>,
    k_norm: Option<B::Vector>,
    o: B::Matrix,
    o_bias: Option<B::Vector>,
    mlp_norm: B::Vector,
    gate_up: B::Matrix,
    down: B::Matrix,
    window: Option<u32>,
}

/// Activations, sized for the largest step.
struct Workspace<B: Backend> {
    hidden: B::Tensor,
    normed: B::Tensor,
    qkv: B::Tensor,
    q: B::Tensor,
    attention: B::Tensor,
    mlp: B::Tensor,
    wanted: B::Tensor,
    wanted_normed: B::Tensor,
    logits: B::Tensor,
}

/// A dense decoder on a backend.
pub struct Decoder<B: Backend> {
    info: ModelInfo,
    eps: f32,
    embed: B::Matrix,
    layers: Vec<Layer<B>>,
    norm: B::Vector,
    /// Absent when the output projection is the embedding.
    head: Option<B::Matrix>,
    rope: Rope<B::Vector>,
    ws: Workspace<B>,
}

/// What [`Decoder::load`] may use.
pub struct DecoderLimits {
    /// Tokens in the largest step.
    pub max_tokens: usize,
    /// Positions of the longest sequence; the rotary tables have this length.
    pub max_positions: usize,
}

/// Called as weights are packed, with the parameters done so far.
pub type OnProgress<'a> = &'a mut dyn FnMut(u64);

struct Loader<'a, B: Backend> {
    backend: &'a mut B,
    source: &'a dyn WeightSource,
    done: u64,
    progress: OnProgress<'a>,
}

impl<B: Backend> Loader<'_, B> {
    /// One matrix whose rows are those of `names`, one after the other.
    fn matrix(&mut self, layout: MatrixLayout, names: &[String]) -> Result<B::Matrix, ModelError> {
        let shapes: Vec<&[usize]> =
            names.iter().map(|n| self.source.shape(n).expect("weights are checked")).collect();
        let (n, k) = (shapes.iter().map(|s| s[0]).sum(), shapes[0][1]);
        let source = self.source;
        let read = |mut row: usize, out: &mut [f32]| {
            let mut part = 0;
            while row >= shapes[part][0] {
                row -= shapes[part][0];
                part += 1;
            }
            source.read_row(&names[part], row, out).map_err(Into::into)
        };
        let matrix = self.backend.matrix(layout, n, k, &read)?;
        self.advance(n * k);
        Ok(matrix)
    }

    /// The vectors of `names`, one after the other.
    fn vector(&mut self, names: &[String]) -> Result<B::Vector, ModelError> {
        let mut data = Vec::new();
        for name in names {
            let len = self.source.shape(name).expect("weights are checked")[0];
            let start = data.len();
            data.resize(start + len, 0.0);
            self.source.read_row(name, 0, &mut data[start..])?;
        }
        self.advance(data.len());
        Ok(self.backend.vector(&data)?)
    }

    fn advance(&mut self, parameters: usize) {
        self.done += parameters as u64;
        (self.progress)(self.done);
    }

    fn layer(&mut self, spec: &DecoderSpec, i: usize) -> Result<Layer<B>, ModelError> {
        let name = |suffix: &str| layer_weight(i, suffix);
        let attn = |parts: &[&str], kind: &str| -> Vec<String> {
            parts.iter().map(|p| name(&format!("self_attn.{p}_proj.{kind}"))).collect()
        };
        let qkv = ["q", "k", "v"];
        let vector = |loader: &mut Self, wanted: bool, names: &[String]| {
            wanted.then(|| loader.vector(names)).transpose()
        };
        Ok(Layer {
            input_norm: self.vector(&[name("input_layernorm.weight")])?,
            qkv: self.matrix(MatrixLayout::Plain, &attn(&qkv, "weight"))?,
            qkv_bias: vector(self, spec.qkv_bias, &attn(&qkv, "bias"))?,
            q_norm: vector(self, spec.qk_norm, &[name("self_attn.q_norm.weight")])?,
            k_norm: vector(self, spec.qk_norm, &[name("self_attn.k_norm.weight")])?,
            o: self.matrix(MatrixLayout::Plain, &attn(&["o"], "weight"))?,
            o_bias: vector(self, spec.o_bias, &attn(&["o"], "bias"))?,
            mlp_norm: self.vector(&[name("post_attention_layernorm.weight")])?,
            gate_up: self.matrix(
                MatrixLayout::GateUp,
                &[name("mlp.gate_proj.weight"), name("mlp.up_proj.weight")],
            )?,
            down: self.matrix(MatrixLayout::Plain, &[name("mlp.down_proj.weight")])?,
            window: spec.windows[i],
        })
    }

    fn rope(
        &mut self,
        spec: &DecoderSpec,
        positions: usize,
    ) -> Result<Rope<B::Vector>, ModelError> {
        let inv_freq = spec.rope.inv_freq(positions);
        let scale = spec.rope.attention_factor();
        let angles = (0..positions).flat_map(|p| inv_freq.iter().map(move |f| p as f64 * f));
        let (cos, sin): (Vec<f32>, Vec<f32>) =
            angles.map(|a| ((scale * a.cos()) as f32, (scale * a.sin()) as f32)).unzip();
        Ok(Rope {
            cos: self.backend.vector(&cos)?,
            sin: self.backend.vector(&sin)?,
            rot_dim: spec.rope.rot_dim,
            interleaved: spec.rope.interleaved,
        })
    }

    fn workspace(&mut self, spec: &DecoderSpec, tokens: usize) -> Result<Workspace<B>, ModelError> {
        let rows = tokens.min(MAX_LOGIT_ROWS);
        let (q, kv) = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim);
        let mut tensor = |rows, cols, kind| self.backend.tensor(rows, cols, kind);
        use TensorKind::{Compute, F32};
        Ok(Workspace {
            hidden: tensor(tokens, spec.hidden_size, F32)?,
            normed: tensor(tokens, spec.hidden_size, Compute)?,
            qkv: tensor(tokens, q + 2 * kv, F32)?,
            q: tensor(tokens, q, Compute)?,
            attention: tensor(tokens, q, Compute)?,
            mlp: tensor(tokens, spec.intermediate_size, Compute)?,
            wanted: tensor(rows, spec.hidden_size, F32)?,
            wanted_normed: tensor(rows, spec.hidden_size, Compute)?,
            logits: tensor(rows, spec.vocab_size, F32)?,
        })
    }
}

impl<B: Backend> Decoder<B> {
    /// Loads a decoder onto `backend`; `source` must pass [`weights::check_weights`].
    pub fn load(
        spec: &DecoderSpec,
        source: &dyn WeightSource,
        backend: &mut B,
        limits: &DecoderLimits,
        progress: OnProgress<'_>,
    ) -> Result<Self, ModelError> {
        weights::check_weights(spec, source)?;
        let mut loader = Loader { backend, source, done: 0, progress };
        let layers =
            (0..spec.num_layers).map(|i| loader.layer(spec, i)).collect::<Result<_, _>>()?;
        let one = |name: &str| [name.to_owned()];
        Ok(Decoder {
            info: model_info(spec),
            eps: spec.rms_norm_eps,
            embed: loader.matrix(MatrixLayout::Plain, &one(weights::EMBED_TOKENS))?,
            layers,
            norm: loader.vector(&one(weights::FINAL_NORM))?,
            head: (!spec.tie_word_embeddings)
                .then(|| loader.matrix(MatrixLayout::Plain, &one(weights::LM_HEAD)))
                .transpose()?,
            rope: loader.rope(spec, limits.max_positions)?,
            ws: loader.workspace(spec, limits.max_tokens)?,
        })
    }
}

/// The sizes the engine plans with.
pub fn model_info(spec: &DecoderSpec) -> ModelInfo {
    let elements = |shape: &[usize]| shape.iter().map(|&n| n as u64).product::<u64>();
    ModelInfo {
        architecture: spec.architecture.clone(),
        vocab_size: spec.vocab_size,
        max_position_embeddings: spec.max_position_embeddings,
        num_parameters: weights::expected_weights(spec).iter().map(|w| elements(&w.shape)).sum(),
        num_layers: spec.num_layers,
        num_heads: spec.num_heads,
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        hidden_size: spec.hidden_size,
        window: spec
            .windows
            .iter()
            .try_fold(0, |widest, window| window.map(|w| widest.max(w as usize))),
    }
}

impl<B: Backend> Model<B> for Decoder<B> {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&mut self, backend: &mut B, kv: &mut B::KvCache) {
        let Decoder { info, eps, ws, rope, .. } = self;
        let num_heads = info.num_heads;
        let scale = (info.head_dim as f32).sqrt().recip();
        backend.enter(ModelPart::Embedding);
        backend.embed(&self.embed, &mut ws.hidden);
        for (layer, l) in self.layers.iter().enumerate() {
            backend.enter(ModelPart::Layer(layer));
            backend.rms_norm(&ws.hidden, &l.input_norm, *eps, &mut ws.normed);
            backend.linear(&ws.normed, &l.qkv, l.qkv_bias.as_ref(), &mut ws.qkv);
            let qkv = QkvArgs {
                layer,
                num_heads,
                q_norm: l.q_norm.as_ref(),
                k_norm: l.k_norm.as_ref(),
                eps: *eps,
                rope,
            };
            backend.qk_norm_rope_write_kv(&ws.qkv, &qkv, kv, &mut ws.q);
            let attention = AttentionArgs { layer, num_heads, scale, window: l.window };
            backend.attention(&ws.q, &attention, kv, &mut ws.attention);
            backend.linear_add(&ws.attention, &l.o, l.o_bias.as_ref(), &mut ws.hidden);
            backend.rms_norm(&ws.hidden, &l.mlp_norm, *eps, &mut ws.normed);
            backend.gate_up_silu_mul(&ws.normed, &l.gate_up, &mut ws.mlp);
            backend.linear_add(&ws.mlp, &l.down, None, &mut ws.hidden);
        }
    }

    fn logits(&mut self, backend: &mut B, rows: Range<usize>) -> &mut B::Tensor {
        let ws = &mut self.ws;
        backend.enter(ModelPart::Head);
        backend.gather_rows(&ws.hidden, rows, &mut ws.wanted);
        backend.rms_norm(&ws.wanted, &self.norm, self.eps, &mut ws.wanted_normed);
        let head = self.head.as_ref().unwrap_or(&self.embed);
        backend.linear(&ws.wanted_normed, head, None, &mut ws.logits);
        &mut ws.logits
    }
}
