//! Op-by-op comparison of two backends: where does the first difference come from?
//!
//! A tracing backend passes every op on and keeps what it wrote. [`compare`] runs one
//! step of a model on two of them and compares op by op. Differences grow from layer to layer, so
//! the first op over its bound is the place to look.

use crate::decoder::{Decoder, DecoderLimits};
use crate::loader::cuda;
use crate::loader::{BackendKind, ModelError, ModelFiles};
use quire_engine::DType;
use quire_engine::backend::{CpuBackend, CudaOptions, Isa, Quantization, ReferenceBackend};
use quire_engine::model::{MAX_LOGIT_ROWS, Model};
use quire_engine::ops::{
    AttentionArgs, Backend, BackendError, BackendInfo, ForwardInput, KvLayout, MatrixLayout,
    ModelPart, QkvArgs, StepLimits, TensorKind, WeightRows,
};
use quire_engine::sampling::{SampleOutput, SamplingBatch};
use serde::Serialize;
use std::ops::Range;

/// Relative difference (norm of the difference over norm of the values) allowed of an op's output,
/// f32. Accumulated over layers, it stays below 1e-5 for the golden models.
pub const F32_BOUND: f64 = 1e-4;
/// The same for bf16, where backends may round to either side; the golden models stay below 2e-2.
pub const BF16_BOUND: f64 = 5e-2;

/// What one op wrote.
#[derive(Clone, Debug)]
pub(crate) struct OpOutput {
    part: ModelPart,
    op: &'static str,
    values: Vec<f32>,
}

/// A backend that keeps what every op wrote.
struct Traced<B> {
    inner: B,
    part: ModelPart,
    outputs: Vec<OpOutput>,
    /// The first op whose output cannot be read.
    failure: Option<BackendError>,
}

impl<B: Backend> Traced<B> {
    fn new(inner: B) -> Self {
        Traced { inner, part: ModelPart::Embedding, outputs: Vec::new(), failure: None }
    }

    fn keep(&mut self, op: &'static str, x: &B::Tensor) {
        let mut values = Vec::new();
        for row in 0..self.inner.num_rows(x) {
            if let Err(error) = self.inner.read_row(x, row, &mut values) {
                self.failure.get_or_insert(error);
            }
        }
        self.outputs.push(OpOutput { part: self.part, op, values });
    }
}

impl<B: Backend> Backend for Traced<B> {
    type Tensor = B::Tensor;
    type Matrix = B::Matrix;
    type Vector = B::Vector;
    type KvCache = B::KvCache;
    type HostCache = B::HostCache;

    fn info(&self) -> BackendInfo {
        self.inner.info()
    }

    fn matrix(
        &mut self,
        layout: MatrixLayout,
        n: usize,
        k: usize,
        rows: &dyn WeightRows,
    ) -> Result<B::Matrix, BackendError> {
        self.inner.matrix(layout, n, k, rows)
    }

    fn vector(&mut self, data: &[f32]) -> Result<B::Vector, BackendError> {
        self.inner.vector(data)
    }

    fn tensor(
        &mut self,
        max_rows: usize,
        cols: usize,
        kind: TensorKind,
    ) -> Result<B::Tensor, BackendError> {
        self.inner.tensor(max_rows, cols, kind)
    }

    fn kv_cache(&mut self, layout: &KvLayout) -> Result<B::KvCache, BackendError> {
        self.inner.kv_cache(layout)
    }

    fn host_cache(
        &mut self,
        layout: &KvLayout,
        num_blocks: usize,
    ) -> Result<B::HostCache, BackendError> {
        self.inner.host_cache(layout, num_blocks)
    }

    fn reserve(&mut self, limits: &StepLimits) -> Result<(), BackendError> {
        self.inner.reserve(limits)
    }

    fn copy_blocks(
        &mut self,
        kv: &mut B::KvCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), BackendError> {
        self.inner.copy_blocks(kv, pairs)
    }

    fn swap_out(
        &mut self,
        kv: &B::KvCache,
        host: &mut B::HostCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), BackendError> {
        self.inner.swap_out(kv, host, pairs)
    }

    fn swap_in(
        &mut self,
        kv: &mut B::KvCache,
        host: &mut B::HostCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), BackendError> {
        self.inner.swap_in(kv, host, pairs)
    }

    fn begin_step(&mut self, input: &ForwardInput) -> Result<(), BackendError> {
        self.outputs.clear();
        self.inner.begin_step(input)
    }

    fn enter(&mut self, part: ModelPart) {
        self.part = part;
        self.inner.enter(part);
    }

    fn embed(&mut self, table: &B::Matrix, out: &mut B::Tensor) {
        self.inner.embed(table, out);
        self.keep("embed", out);
    }

    fn linear(
        &mut self,
        x: &B::Tensor,
        w: &B::Matrix,
        bias: Option<&B::Vector>,
        out: &mut B::Tensor,
    ) {
        self.inner.linear(x, w, bias, out);
        self.keep("linear", out);
    }

    fn linear_add(
        &mut self,
        x: &B::Tensor,
        w: &B::Matrix,
        bias: Option<&B::Vector>,
        residual: &mut B::Tensor,
    ) {
        self.inner.linear_add(x, w, bias, residual);
        self.keep("linear_add", residual);
    }

    fn gate_up_silu_mul(&mut self, x: &B::Tensor, w: &B::Matrix, out: &mut B::Tensor) {
        self.inner.gate_up_silu_mul(x, w, out);
        self.keep("gate_up_silu_mul", out);
    }

    fn rms_norm(&mut self, x: &B::Tensor, weight: &B::Vector, eps: f32, out: &mut B::Tensor) {
        self.inner.rms_norm(x, weight, eps, out);
        self.keep("rms_norm", out);
    }

    fn qk_norm_rope_write_kv(
        &mut self,
        qkv: &B::Tensor,
        args: &QkvArgs<'_, Self>,
        kv: &mut B::KvCache,
        q: &mut B::Tensor,
    ) {
        let QkvArgs { layer, num_heads, q_norm, k_norm, eps, rope } = *args;
        self.inner.qk_norm_rope_write_kv(
            qkv,
            &QkvArgs { layer, num_heads, q_norm, k_norm, eps, rope },
            kv,
            q,
        );
        self.keep("qk_norm_rope_write_kv", q);
    }

    fn attention(
        &mut self,
        q: &B::Tensor,
        args: &AttentionArgs,
        kv: &B::KvCache,
        out: &mut B::Tensor,
    ) {
        self.inner.attention(q, args, kv, out);
        self.keep("attention", out);
    }

    fn gather_rows(&mut self, x: &B::Tensor, rows: Range<usize>, out: &mut B::Tensor) {
        self.inner.gather_rows(x, rows, out);
        self.keep("gather_rows", out);
    }

    fn sample(
        &mut self,
        logits: &mut B::Tensor,
        batch: &SamplingBatch,
        rows: Range<usize>,
    ) -> Result<(), BackendError> {
        self.inner.sample(logits, batch, rows)
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        self.inner.synchronize()
    }

    fn wants_retry(&mut self) -> bool {
        self.inner.wants_retry()
    }

    fn end_step(&mut self) -> Result<(), BackendError> {
        self.inner.end_step()
    }

    fn runs_ahead(&self) -> bool {
        self.inner.runs_ahead()
    }

    fn read_samples(&mut self, out: &mut Vec<SampleOutput>) -> Result<(), BackendError> {
        self.inner.read_samples(out)
    }

    fn abandon_steps(&mut self) {
        self.inner.abandon_steps();
    }

    fn num_rows(&self, x: &B::Tensor) -> usize {
        self.inner.num_rows(x)
    }

    fn read_row(
        &mut self,
        x: &B::Tensor,
        row: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        self.inner.read_row(x, row, out)
    }
}

/// How one op of the two backends compares.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OpDifference {
    /// `embedding`, `layer N` or `head`.
    pub part: String,
    /// Name of the op in the backend trait.
    pub op: &'static str,
    /// Norm of the difference over norm of the reference.
    pub relative: f64,
    /// Largest difference of an element.
    pub max_abs: f64,
    /// Within the bound of the type.
    pub ok: bool,
}

/// Every op of a step, in order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerReport {
    /// In the order of computation.
    pub ops: Vec<OpDifference>,
    /// The bound that `relative` is held to.
    pub bound: f64,
}

impl LayerReport {
    /// The first op over its bound.
    pub fn first_difference(&self) -> Option<&OpDifference> {
        self.ops.iter().find(|op| !op.ok)
    }
}

/// A backend for [`compare`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Side {
    /// Which implementation.
    pub backend: BackendKind,
    /// Instruction set of the CPU backend.
    pub isa: Option<Isa>,
    /// Threads of the CPU backend.
    pub threads: Option<usize>,
    /// What becomes of weights; only the CPU backend quantises any, and then the bound, which is
    /// that of roundings, says little.
    pub quantization: Quantization,
    /// How the CUDA backend is set up.
    pub cuda: CudaOptions,
}

/// Computes `tokens` as one step on both sides and compares op by op; `reference` is the measure.
///
/// # Errors
/// A side cannot be loaded.
pub fn compare(
    files: &ModelFiles,
    dtype: DType,
    tokens: &[u32],
    (reference, other): (Side, Side),
) -> Result<LayerReport, ModelError> {
    let bound = match dtype {
        DType::F32 => F32_BOUND,
        DType::Bf16 => BF16_BOUND,
    };
    let want = outputs(files, dtype, tokens, reference)?;
    let got = outputs(files, dtype, tokens, other)?;
    assert_eq!(want.len(), got.len(), "both run the same model");
    let ops = want.iter().zip(&got).map(|(want, got)| difference(want, got, bound)).collect();
    Ok(LayerReport { ops, bound })
}

fn difference(want: &OpOutput, got: &OpOutput, bound: f64) -> OpDifference {
    assert_eq!((want.part, want.op), (got.part, got.op), "both run the same model");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let deltas = || want.values.iter().zip(&got.values).map(|(a, b)| f64::from(*a) - f64::from(*b));
    let size = norm(&mut want.values.iter().map(|&x| f64::from(x)));
    let relative = norm(&mut deltas()) / size.max(f64::MIN_POSITIVE);
    OpDifference {
        part: match want.part {
            ModelPart::Embedding => "embedding".to_owned(),
            ModelPart::Layer(layer) => format!("layer {layer}"),
            ModelPart::Head => "head".to_owned(),
        },
        op: want.op,
        relative,
        max_abs: deltas().map(f64::abs).fold(0.0, f64::max),
        // NaN is not within any bound.
        ok: relative <= bound && want.values.len() == got.values.len(),
    }
}

fn outputs(
    files: &ModelFiles,
    dtype: DType,
    tokens: &[u32],
    side: Side,
) -> Result<Vec<OpOutput>, ModelError> {
    side.backend.check(side.quantization)?;
    match side.backend {
        BackendKind::Reference => run(files, ReferenceBackend::new(dtype), tokens),
        BackendKind::Cpu => {
            let backend = CpuBackend::new(dtype, side.isa, side.threads)?;
            run(files, backend.quantised(side.quantization), tokens)
        }
        BackendKind::Cuda => cuda::trace(files, (dtype, side.cuda), tokens),
    }
}

/// Computes `tokens` as one step.
pub(crate) fn run<B: Backend>(
    files: &ModelFiles,
    backend: B,
    tokens: &[u32],
) -> Result<Vec<OpOutput>, ModelError> {
    const BLOCK_SIZE: usize = 16;
    let mut backend = Traced::new(backend);
    let limits = DecoderLimits { max_tokens: tokens.len(), max_positions: tokens.len() };
    let (spec, source) = (&files.spec, files.source.as_ref());
    let mut model = Decoder::load(spec, source, &mut backend, &limits, &mut |_| ())?;
    let num_blocks = tokens.len().div_ceil(BLOCK_SIZE);
    let dtype = backend.info().dtype;
    let mut kv = backend.kv_cache(&files.info().kv_layout(num_blocks, BLOCK_SIZE, dtype))?;
    let len = tokens.len() as u32;
    let logits = len - len.min(MAX_LOGIT_ROWS as u32)..len;
    let input = ForwardInput {
        token_ids: tokens.to_vec(),
        positions: (0..len).collect(),
        slot_mapping: (0..i64::from(len)).collect(),
        query_start_loc: vec![0, len as i32],
        seq_lens: vec![len as i32],
        block_table: (0..num_blocks as i32).collect(),
        max_blocks: num_blocks,
        logits_indices: logits.clone().collect(),
        placeholders: Vec::new(),
    };
    backend.reserve(&StepLimits {
        max_tokens: tokens.len(),
        max_seqs: 1,
        max_positions: tokens.len(),
        max_logprobs: 0,
        block_size: BLOCK_SIZE,
        swap: false,
        vocab_size: files.info().vocab_size,
        num_heads: files.info().num_heads,
    })?;
    backend.begin_step(&input)?;
    model.forward(&mut backend, &mut kv);
    model.logits(&mut backend, 0..logits.len());
    backend.failure.map_or(Ok(backend.outputs), |error| Err(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::golden_folder;

    fn tokens() -> Vec<u32> {
        (0..40).map(|i| (i * 37) % 256).collect()
    }

    #[test]
    fn the_backends_agree_op_by_op_on_a_golden_model() {
        let files = ModelFiles::open(&golden_folder("qwen3-qknorm")).unwrap();
        for dtype in [DType::F32, DType::Bf16] {
            let sides =
                (Side { backend: BackendKind::Reference, ..Default::default() }, Side::default());
            let report = compare(&files, dtype, &tokens(), sides).unwrap();
            // embed, 8 ops a layer, gather, norm and output.
            assert_eq!(report.ops.len(), 1 + 8 * files.spec.num_layers + 3);
            assert_eq!(report.first_difference(), None, "{dtype}");
        }
    }

    #[test]
    fn a_difference_is_found_where_it_starts() {
        let output = |op, part, values: &[f32]| OpOutput { part, op, values: values.to_vec() };
        let same = output("embed", ModelPart::Embedding, &[1.0, 2.0]);
        let want = output("attention", ModelPart::Layer(3), &[1.0, 2.0]);
        let got = output("attention", ModelPart::Layer(3), &[1.0, 2.01]);
        let nan = output("attention", ModelPart::Layer(3), &[1.0, f32::NAN]);
        let ops = vec![
            difference(&same, &same, F32_BOUND),
            difference(&want, &got, F32_BOUND),
            difference(&want, &nan, F32_BOUND),
        ];
        assert_eq!(ops.iter().map(|op| op.ok).collect::<Vec<_>>(), [true, false, false]);
        let report = LayerReport { ops, bound: F32_BOUND };
        let first = report.first_difference().unwrap();
        assert_eq!((first.part.as_str(), first.op), ("layer 3", "attention"));
    }
}
