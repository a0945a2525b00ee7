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
use crate::source::{SourceDtype, WeightSource, common_dtype};
use crate::spec::DecoderSpec;
use crate::weights::{self, layer_weight};
use quire_engine::model::{MAX_LOGIT_ROWS, Model, ModelInfo};
use quire_engine::ops::{
    AttentionArgs, Backend, BlockFormat, DType, MatrixLayout, MatrixShape, ModelPart, QkvArgs,
    ReadError, Rope, TensorKind, WeightRows,
};
use std::ops::Range;

struct Layer<M, V> {
    input_norm: V,
    qkv: M,
    qkv_bias: Option<V>,
    q_norm: Option<V>,
    k_norm: Option<V>,
    o: M,
    o_bias: Option<V>,
    mlp_norm: V,
    gate_up: M,
    down: M,
    window: Option<u32>,
}

/// What the model has learned.
pub(crate) struct Parameters<M, V> {
    layers: Vec<Layer<M, V>>,
    embed: M,
    norm: V,
    /// Absent when the output projection is the embedding.
    head: Option<M>,
}

/// Activations, sized for the largest step.
pub(crate) struct Workspace<T> {
    hidden: T,
    normed: T,
    qkv: T,
    q: T,
    attention: T,
    mlp: T,
}

/// Activations of the rows that need logits, a slice of them at a time.
pub(crate) struct HeadWorkspace<T> {
    wanted: T,
    wanted_normed: T,
    logits: T,
}

/// A dense decoder on a backend.
pub struct Decoder<B: Backend> {
    info: ModelInfo,
    eps: f32,
    params: Parameters<B::Matrix, B::Vector>,
    rope: Rope<B::Vector>,
    ws: Workspace<B::Tensor>,
    head: HeadWorkspace<B::Tensor>,
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

/// Makes the parts of a decoder: buffers of a backend, or a count of what they take.
pub(crate) trait Parts {
    type Matrix;
    type Vector;
    type Tensor;

    /// One matrix whose rows are those of `names`, one after the other.
    fn matrix(
        &mut self,
        layout: MatrixLayout,
        names: &[String],
    ) -> Result<Self::Matrix, ModelError>;

    /// The vectors of `names`, one after the other.
    fn vector(&mut self, names: &[String]) -> Result<Self::Vector, ModelError>;

    /// A vector of `len` computed values.
    fn table(
        &mut self,
        len: usize,
        values: &mut dyn Iterator<Item = f32>,
    ) -> Result<Self::Vector, ModelError>;

    /// An activation of up to `rows` rows.
    fn tensor(
        &mut self,
        rows: usize,
        cols: usize,
        kind: TensorKind,
    ) -> Result<Self::Tensor, ModelError>;
}

/// All of `spec` that is learned.
pub(crate) fn parameters<P: Parts>(
    parts: &mut P,
    spec: &DecoderSpec,
) -> Result<Parameters<P::Matrix, P::Vector>, ModelError> {
    let one = |name: &str| [name.to_owned()];
    Ok(Parameters {
        layers: (0..spec.num_layers).map(|i| layer(parts, spec, i)).collect::<Result<_, _>>()?,
        embed: parts.matrix(MatrixLayout::Plain, &one(weights::EMBED_TOKENS))?,
        norm: parts.vector(&one(weights::FINAL_NORM))?,
        head: (!spec.tie_word_embeddings)
            .then(|| parts.matrix(MatrixLayout::Plain, &one(weights::LM_HEAD)))
            .transpose()?,
    })
}

fn layer<P: Parts>(
    parts: &mut P,
    spec: &DecoderSpec,
    i: usize,
) -> Result<Layer<P::Matrix, P::Vector>, ModelError> {
    let name = |suffix: &str| layer_weight(i, suffix);
    let attn = |parts: &[&str], kind: &str| -> Vec<String> {
        parts.iter().map(|p| name(&format!("self_attn.{p}_proj.{kind}"))).collect()
    };
    let qkv = ["q", "k", "v"];
    let vector = |parts: &mut P, wanted: bool, names: &[String]| {
        wanted.then(|| parts.vector(names)).transpose()
    };
    Ok(Layer {
        input_norm: parts.vector(&[name("input_layernorm.weight")])?,
        qkv: parts.matrix(MatrixLayout::Plain, &attn(&qkv, "weight"))?,
        qkv_bias: vector(parts, spec.qkv_bias, &attn(&qkv, "bias"))?,
        q_norm: vector(parts, spec.qk_norm, &[name("self_attn.q_norm.weight")])?,
        k_norm: vector(parts, spec.qk_norm, &[name("self_attn.k_norm.weight")])?,
        o: parts.matrix(MatrixLayout::Plain, &attn(&["o"], "weight"))?,
        o_bias: vector(parts, spec.o_bias, &attn(&["o"], "bias"))?,
        mlp_norm: parts.vector(&[name("post_attention_layernorm.weight")])?,
        gate_up: parts.matrix(
            MatrixLayout::GateUp,
            &[name("mlp.gate_proj.weight"), name("mlp.up_proj.weight")],
        )?,
        down: parts.matrix(MatrixLayout::Plain, &[name("mlp.down_proj.weight")])?,
        window: spec.windows[i],
    })
}

/// Rotary tables of `positions` positions.
pub(crate) fn rope<P: Parts>(
    parts: &mut P,
    spec: &DecoderSpec,
    positions: usize,
) -> Result<Rope<P::Vector>, ModelError> {
    let inv_freq = spec.rope.inv_freq(positions);
    let scale = spec.rope.attention_factor();
    let len = positions.saturating_mul(inv_freq.len());
    let mut table = |of: fn(f64) -> f64| {
        let angles = (0..positions).flat_map(|p| inv_freq.iter().map(move |f| p as f64 * f));
        parts.table(len, &mut angles.map(|a| (scale * of(a)) as f32))
    };
    Ok(Rope {
        cos: table(f64::cos)?,
        sin: table(f64::sin)?,
        rot_dim: spec.rope.rot_dim,
        interleaved: spec.rope.interleaved,
    })
}

/// Activations of steps of up to `tokens` tokens.
pub(crate) fn workspace<P: Parts>(
    parts: &mut P,
    spec: &DecoderSpec,
    tokens: usize,
) -> Result<Workspace<P::Tensor>, ModelError> {
    let (q, kv) = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim);
    let mut tensor = |cols, kind| parts.tensor(tokens, cols, kind);
    Ok(Workspace {
        hidden: tensor(spec.hidden_size, TensorKind::F32)?,
        normed: tensor(spec.hidden_size, TensorKind::Compute)?,
        qkv: tensor(q + 2 * kv, TensorKind::F32)?,
        q: tensor(q, TensorKind::Compute)?,
        attention: tensor(q, TensorKind::Compute)?,
        mlp: tensor(spec.intermediate_size, TensorKind::Compute)?,
    })
}

/// Activations of the rows of steps of up to `tokens` tokens that need logits.
pub(crate) fn head_workspace<P: Parts>(
    parts: &mut P,
    spec: &DecoderSpec,
    tokens: usize,
) -> Result<HeadWorkspace<P::Tensor>, ModelError> {
    let mut tensor = |cols, kind| parts.tensor(tokens.min(MAX_LOGIT_ROWS), cols, kind);
    Ok(HeadWorkspace {
        wanted: tensor(spec.hidden_size, TensorKind::F32)?,
        wanted_normed: tensor(spec.hidden_size, TensorKind::Compute)?,
        logits: tensor(spec.vocab_size, TensorKind::F32)?,
    })
}

/// Parts on a backend, filled from a source.
pub(crate) struct Loader<'a, B: Backend> {
    backend: &'a mut B,
    source: &'a dyn WeightSource,
    done: u64,
    progress: OnProgress<'a>,
}

impl<'a, B: Backend> Loader<'a, B> {
    /// A loader of a source whose weights are checked.
    pub(crate) fn new(
        backend: &'a mut B,
        source: &'a dyn WeightSource,
        progress: OnProgress<'a>,
    ) -> Self {
        Loader { backend, source, done: 0, progress }
    }

    fn advance(&mut self, parameters: usize) {
        self.done += parameters as u64;
        (self.progress)(self.done);
    }
}

impl<B: Backend> Parts for Loader<'_, B> {
    type Matrix = B::Matrix;
    type Vector = B::Vector;
    type Tensor = B::Tensor;

    fn matrix(&mut self, layout: MatrixLayout, names: &[String]) -> Result<B::Matrix, ModelError> {
        let stacks = stacks(self.source, layout, names, |shape| self.backend.quantises(shape));
        let mut parts = Vec::with_capacity(stacks.len());
        for (names, MatrixShape { n, k, .. }) in stacks {
            let rows = StackedRows::new(self.source, names);
            parts.push(self.backend.matrix(layout, n, k, &rows)?);
            self.advance(n * k);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { self.backend.stack(parts) })
    }

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

    fn table(
        &mut self,
        len: usize,
        values: &mut dyn Iterator<Item = f32>,
    ) -> Result<B::Vector, ModelError> {
        let mut data = Vec::with_capacity(len);
        data.extend(values);
        assert_eq!(data.len(), len, "values of a table");
        Ok(self.backend.vector(&data)?)
    }

    fn tensor(
        &mut self,
        rows: usize,
        cols: usize,
        kind: TensorKind,
    ) -> Result<B::Tensor, ModelError> {
        Ok(self.backend.tensor(rows, cols, kind)?)
    }
}

/// The shape of the matrix whose rows are those of `names`, whose shapes are checked.
fn stacked_shape(source: &dyn WeightSource, layout: MatrixLayout, names: &[String]) -> MatrixShape {
    let shape = |name: &String| source.shape(name).expect("weights are checked");
    MatrixShape {
        layout,
        n: names.iter().map(|name| shape(name)[0]).sum(),
        k: shape(&names[0])[1],
        blocks: common_dtype(source, names).and_then(SourceDtype::block_format),
    }
}

/// The matrices that make the one of `names`: one, unless they are stored in several formats and
/// some would be quantised if they were alone.
pub(crate) fn stacks<'a>(
    source: &dyn WeightSource,
    layout: MatrixLayout,
    names: &'a [String],
    quantises: impl Fn(&MatrixShape) -> bool,
) -> Vec<(&'a [String], MatrixShape)> {
    let stack = |names: &'a [String]| (names, stacked_shape(source, layout, names));
    let whole = stack(names);
    if layout == MatrixLayout::Plain && !quantises(&whole.1) {
        let parts = names.chunk_by(|a, b| source.dtype(a) == source.dtype(b));
        let parts: Vec<_> = parts.map(stack).collect();
        if parts.iter().any(|(_, shape)| quantises(shape)) {
            return parts;
        }
    }
    vec![whole]
}

/// The rows of several matrices, one after the other.
struct StackedRows<'a> {
    source: &'a dyn WeightSource,
    names: &'a [String],
    shapes: Vec<&'a [usize]>,
    /// The type they are all stored in.
    dtype: Option<SourceDtype>,
}

impl<'a> StackedRows<'a> {
    fn new(source: &'a dyn WeightSource, names: &'a [String]) -> Self {
        let shape = |name: &String| source.shape(name).expect("weights are checked");
        let shapes = names.iter().map(shape).collect();
        StackedRows { source, names, shapes, dtype: common_dtype(source, names) }
    }
}

impl StackedRows<'_> {
    /// The matrix that has a row, and which of its rows that is.
    fn part(&self, mut row: usize) -> (&str, usize) {
        let mut part = 0;
        while row >= self.shapes[part][0] {
            row -= self.shapes[part][0];
            part += 1;
        }
        (&self.names[part], row)
    }
}

impl WeightRows for StackedRows<'_> {
    fn read(&self, row: usize, out: &mut [f32]) -> Result<(), ReadError> {
        let (name, row) = self.part(row);
        Ok(self.source.read_row(name, row, out)?)
    }

    fn stored_type(&self) -> Option<DType> {
        // Files are little endian.
        let common = self.dtype.filter(|_| cfg!(target_endian = "little"));
        let dtype = match common? {
            SourceDtype::F32 => DType::F32,
            SourceDtype::Bf16 => DType::Bf16,
            _ => return None,
        };
        self.stored(0).map(|_| dtype)
    }

    fn stored(&self, row: usize) -> Option<&[u8]> {
        let (name, row) = self.part(row);
        self.source.stored_row(name, row)
    }

    fn release(&self, rows: Range<usize>) {
        let mut first = 0;
        for (name, shape) in self.names.iter().zip(&self.shapes) {
            let part = first..first + shape[0];
            let (start, end) = (rows.start.max(part.start), rows.end.min(part.end));
            if start < end {
                self.source.release(name, start - first..end - first);
            }
            first = part.end;
        }
    }

    fn block_format(&self) -> Option<BlockFormat> {
        self.dtype?.block_format()
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
        let mut loader = Loader::new(backend, source, progress);
        Ok(Decoder {
            info: model_info(spec),
            eps: spec.rms_norm_eps,
            params: parameters(&mut loader, spec)?,
            rope: rope(&mut loader, spec, limits.max_positions)?,
            ws: workspace(&mut loader, spec, limits.max_tokens)?,
            head: head_workspace(&mut loader, spec, limits.max_tokens)?,
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
        let Decoder { info, eps, params, ws, rope, .. } = self;
        let num_heads = info.num_heads;
        let scale = (info.head_dim as f32).sqrt().recip();
        backend.enter(ModelPart::Embedding);
        backend.embed(&params.embed, &mut ws.hidden);
        for (layer, l) in params.layers.iter().enumerate() {
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
        let Decoder { params, ws, head, .. } = self;
        backend.enter(ModelPart::Head);
        backend.gather_rows(&ws.hidden, rows, &mut head.wanted);
        backend.rms_norm(&head.wanted, &params.norm, self.eps, &mut head.wanted_normed);
        let matrix = params.head.as_ref().unwrap_or(&params.embed);
        backend.linear(&head.wanted_normed, matrix, None, &mut head.logits);
        &mut head.logits
    }
}
