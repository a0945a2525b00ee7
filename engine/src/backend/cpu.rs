//! The CPU backend: the ops of `quire-kernels-cpu` over buffers allocated at load.
//!
//! Activations and weights are allocated at load; a step allocates only the short lists of its
//! sampled rows.

mod matrix;

pub use matrix::CpuMatrix;

use super::Quantization;
use crate::memory::BufferSizes;
use crate::ops::{
    AttentionArgs, Backend, BackendError, BackendInfo, DType, ForwardInput, KvLayout, MatrixLayout,
    MatrixShape, QkvArgs, StepLimits, TensorKind, WeightFormats, WeightRows,
};
use crate::sampling::{RowTarget, SampleOutput, Sampler, SamplingBatch, sample_row};
use bytemuck::{cast_slice, cast_slice_mut};
use matrix::{Packed, Packing, label};
use quire_kernels_cpu as kernels;
use quire_kernels_cpu::{
    Arena, AttnArgs, AttnScratch, AttnScratchShape, Ctx, Dtype, Epilogue, Isa, KvCache, KvShape,
    QuantKind, QuantRows, Words,
};
use std::ops::Range;
use std::sync::Mutex;

/// The KV cache of a [`CpuBackend`].
pub use quire_kernels_cpu::KvCache as CpuKvCache;

/// What the buffers of a [`CpuBackend`] take.
#[derive(Clone, Copy, Debug)]
pub struct CpuBuffers {
    dtype: DType,
    quantization: Quantization,
    threads: usize,
}

impl CpuBuffers {
    /// Those of a backend with these settings and no quantised weights.
    pub fn new(dtype: DType, threads: Option<usize>) -> Self {
        let threads = threads.unwrap_or_else(kernels::usable_cores);
        CpuBuffers { dtype, quantization: Quantization::None, threads }
    }

    /// The same with weights as `quantization` says.
    pub fn quantised(self, quantization: Quantization) -> Self {
        CpuBuffers { quantization, ..self }
    }

    fn packing(&self) -> Packing {
        Packing { dtype: self.kernel_dtype(), quantization: self.quantization }
    }

    fn kernel_dtype(&self) -> Dtype {
        match self.dtype {
            DType::F32 => Dtype::F32,
            DType::Bf16 => Dtype::Bf16,
        }
    }

    /// Words of one row of an activation.
    fn row_words(&self, cols: usize, kind: TensorKind) -> usize {
        match kind {
            TensorKind::F32 => cols,
            TensorKind::Compute => self.kernel_dtype().words(cols),
        }
    }

    fn kv_shape(&self, layout: &KvLayout) -> KvShape {
        KvShape {
            layers: layout.num_layers,
            num_blocks: layout.num_blocks,
            block_size: layout.block_size,
            kv_heads: layout.num_kv_heads,
            head_dim: layout.head_dim,
            dtype: self.kernel_dtype(),
        }
    }

    fn attention_shape(limits: &StepLimits, layout: &KvLayout) -> AttnScratchShape {
        AttnScratchShape {
            seqs: limits.max_seqs,
            positions: limits.max_positions,
            q_heads: limits.num_heads,
            kv_heads: layout.num_kv_heads,
            head_dim: layout.head_dim,
        }
    }
}

impl BufferSizes for CpuBuffers {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn matrix_bytes(&self, matrix: &MatrixShape) -> Option<usize> {
        self.packing().bytes(matrix)
    }

    fn quantised_as(&self, matrix: &MatrixShape) -> Option<&'static str> {
        self.packing().kind(matrix).map(label)
    }

    fn tensor_bytes(&self, max_rows: usize, cols: usize, kind: TensorKind) -> Option<usize> {
        max_rows.checked_mul(self.row_words(cols, kind))?.checked_mul(4)
    }

    fn kv_bytes(&self, layout: &KvLayout) -> Option<usize> {
        self.kv_shape(layout).bytes().ok()
    }

    fn sampling_bytes(&self, limits: &StepLimits) -> Option<usize> {
        Sampler::max_bytes(limits.vocab_size)?.checked_mul(self.threads)
    }

    fn step_bytes(
        &self,
        limits: &StepLimits,
        layout: &KvLayout,
        matrices: &[MatrixShape],
    ) -> Option<usize> {
        let attention = Self::attention_shape(limits, layout).bytes()?;
        self.packing().rows_bytes(matrices, limits.max_tokens)?.checked_add(attention)
    }
}

/// SIMD kernels on a pool of worker threads.
pub struct CpuBackend {
    ctx: Ctx,
    buffers: CpuBuffers,
    /// Holds the weights.
    arena: Arena,
    step: ForwardInput,
    /// Kind and inputs of the quantised weights, each once.
    quant_shapes: Vec<(QuantKind, usize)>,
    formats: WeightFormats,
    /// The input of an op with a quantised weight.
    quant_rows: QuantRows,
    /// Layout of the KV cache, once there is one.
    layout: Option<KvLayout>,
    attention: AttnScratch,
    /// One sampler a worker.
    samplers: Vec<Mutex<Sampler>>,
    samples: Vec<SampleOutput>,
    /// The token of each row of the step, for the placeholders of the next.
    chosen: Vec<u32>,
}

impl CpuBackend {
    /// A backend on `threads` threads (default: the cores this process may use) and `isa`
    /// (default: the best of this machine).
    pub fn new(
        dtype: DType,
        isa: Option<Isa>,
        threads: Option<usize>,
    ) -> Result<Self, BackendError> {
        let unsupported = |reason: String| BackendError::Unsupported { backend: "cpu", reason };
        let threads = threads.unwrap_or_else(kernels::usable_cores);
        if !(1..=1024).contains(&threads) {
            return Err(unsupported(format!("{threads} threads; it takes 1 to 1024")));
        }
        let ctx = Ctx::new(isa.unwrap_or_else(Isa::detect), threads)
            .map_err(|e| unsupported(e.to_string()))?;
        let samplers = (0..threads).map(|_| Mutex::new(Sampler::new(ctx.isa))).collect();
        Ok(CpuBackend {
            ctx,
            buffers: CpuBuffers::new(dtype, Some(threads)),
            arena: Arena::default(),
            step: ForwardInput::default(),
            quant_shapes: Vec::new(),
            formats: WeightFormats::default(),
            quant_rows: QuantRows::new(),
            layout: None,
            attention: AttnScratch::default(),
            samplers,
            samples: Vec::new(),
            chosen: Vec::new(),
        })
    }

    /// The same with the weights to come as `quantization` says.
    pub fn quantised(mut self, quantization: Quantization) -> Self {
        self.buffers = self.buffers.quantised(quantization);
        self
    }

    /// Bytes of the buffers that steps take: inputs of quantised weights, and partial results of
    /// attention.
    pub fn step_bytes(&self) -> usize {
        self.quant_rows.bytes() + self.attention.bytes()
    }

    /// Multiplies by a weight; the input is quantised first where the weight is.
    fn multiply(&mut self, x: &CpuTensor, w: &CpuMatrix, epilogue: Epilogue<'_>) {
        match &w.packed {
            Packed::Plain(packed) => {
                kernels::gemm(&self.ctx, x.words(), x.rows, packed, epilogue);
            }
            Packed::Quantised(packed) => {
                let words = (x.words(), self.buffers.kernel_dtype());
                let rows = &mut self.quant_rows;
                rows.quantise(&self.ctx, words, (x.rows, x.cols), packed.kind());
                kernels::gemm_quant(&self.ctx, rows, packed, epilogue);
            }
            Packed::Stacked(parts) => {
                let Epilogue::Store { bias, out } = epilogue else {
                    unreachable!("stacked weights are for plain products")
                };
                let mut first = 0;
                for part in parts {
                    let bias = bias.map(|bias| &bias[first..first + part.n]);
                    let epilogue = Epilogue::StoreColumns { bias, out, first, stride: w.n };
                    self.multiply(x, part, epilogue);
                    first += part.n;
                }
            }
        }
    }

    /// `num_blocks` blocks of `layout`.
    fn blocks(
        &self,
        layout: &KvLayout,
        num_blocks: usize,
        what: &str,
    ) -> Result<KvCache, BackendError> {
        let shape = KvShape { num_blocks, ..self.buffers.kv_shape(layout) };
        KvCache::new(shape).map_err(|e| match e {
            kernels::KvError::Alloc(e) => out_of_memory(what, e.bytes),
            e => BackendError::Unsupported { backend: "cpu", reason: e.to_string() },
        })
    }
}

/// `[rows, cols]`: f32, or words of the backend's dtype.
pub struct CpuTensor {
    words: Words,
    rows: usize,
    max_rows: usize,
    cols: usize,
    /// Words of one row.
    stride: usize,
    kind: TensorKind,
}

impl CpuTensor {
    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        4 * self.words.len()
    }

    fn resize(&mut self, rows: usize) {
        assert!(rows <= self.max_rows, "{rows} rows exceed the tensor's {}", self.max_rows);
        self.rows = rows;
    }

    fn words(&self) -> &[u32] {
        assert_eq!(self.kind, TensorKind::Compute);
        &self.words.as_slice()[..self.rows * self.stride]
    }

    fn words_mut(&mut self) -> &mut [u32] {
        assert_eq!(self.kind, TensorKind::Compute);
        &mut self.words.as_mut_slice()[..self.rows * self.stride]
    }

    fn floats(&self) -> &[f32] {
        assert_eq!(self.kind, TensorKind::F32);
        cast_slice(&self.words.as_slice()[..self.rows * self.stride])
    }

    fn floats_mut(&mut self) -> &mut [f32] {
        assert_eq!(self.kind, TensorKind::F32);
        cast_slice_mut(&mut self.words.as_mut_slice()[..self.rows * self.stride])
    }
}

fn out_of_memory(what: &str, bytes: usize) -> BackendError {
    BackendError::OutOfMemory { what: what.to_owned(), bytes }
}

impl Backend for CpuBackend {
    type Tensor = CpuTensor;
    type Matrix = CpuMatrix;
    type Vector = Vec<f32>;
    type KvCache = KvCache;
    type HostCache = KvCache;

    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: "cpu",
            isa: self.ctx.isa.name().to_owned(),
            threads: self.ctx.pool.threads(),
            dtype: self.buffers.dtype,
            quantization: self.formats.clone(),
            batch_invariant: true,
        }
    }

    fn matrix(
        &mut self,
        layout: MatrixLayout,
        n: usize,
        k: usize,
        rows: &dyn WeightRows,
    ) -> Result<CpuMatrix, BackendError> {
        let shape = MatrixShape { layout, n, k, blocks: rows.block_format() };
        let packing = self.buffers.packing();
        let matrix = packing.pack(&self.ctx, &mut self.arena, &shape, rows)?;
        let kind = packing.kind(&shape);
        self.formats.add(kind.map(label));
        if let Some(kind) = kind
            && !self.quant_shapes.contains(&(kind, k))
        {
            self.quant_shapes.push((kind, k));
        }
        Ok(matrix)
    }

    fn quantises(&self, shape: &MatrixShape) -> bool {
        self.buffers.packing().kind(shape).is_some()
    }

    fn stack(&mut self, parts: Vec<CpuMatrix>) -> CpuMatrix {
        CpuMatrix::stacked(parts)
    }

    fn vector(&mut self, data: &[f32]) -> Result<Vec<f32>, BackendError> {
        Ok(data.to_vec())
    }

    fn tensor(
        &mut self,
        max_rows: usize,
        cols: usize,
        kind: TensorKind,
    ) -> Result<CpuTensor, BackendError> {
        let stride = self.buffers.row_words(cols, kind);
        let too_large = |bytes| out_of_memory("activations", bytes);
        let bytes = self.buffers.tensor_bytes(max_rows, cols, kind);
        let bytes = bytes.ok_or_else(|| too_large(usize::MAX))?;
        let words = Words::zeroed(bytes / 4).map_err(|e| too_large(e.bytes))?;
        Ok(CpuTensor { words, rows: 0, max_rows, cols, stride, kind })
    }

    fn kv_cache(&mut self, layout: &KvLayout) -> Result<KvCache, BackendError> {
        self.layout = Some(layout.clone());
        self.blocks(layout, layout.num_blocks, "the KV cache")
    }

    fn host_cache(
        &mut self,
        layout: &KvLayout,
        num_blocks: usize,
    ) -> Result<KvCache, BackendError> {
        self.blocks(layout, num_blocks, "the swapped-out KV blocks")
    }

    fn reserve(&mut self, limits: &StepLimits) -> Result<(), BackendError> {
        for &(kind, k) in &self.quant_shapes {
            let room = self.quant_rows.reserve(kind, limits.max_tokens, k);
            room.map_err(|e| out_of_memory("quantised activations", e.bytes))?;
        }
        if let Some(layout) = &self.layout {
            let room = self.attention.reserve(&CpuBuffers::attention_shape(limits, layout));
            room.map_err(|e| out_of_memory("partial results of attention", e.bytes))?;
        }
        Ok(())
    }

    fn copy_blocks(&mut self, kv: &mut KvCache, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        kv.copy_blocks(&self.ctx, pairs);
        Ok(())
    }

    fn swap_out(
        &mut self,
        kv: &KvCache,
        host: &mut KvCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), BackendError> {
        host.copy_blocks_from(&self.ctx, kv, pairs);
        Ok(())
    }

    fn swap_in(
        &mut self,
        kv: &mut KvCache,
        host: &mut KvCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), BackendError> {
        kv.copy_blocks_from(&self.ctx, host, pairs);
        Ok(())
    }

    fn begin_step(&mut self, input: &ForwardInput) -> Result<(), BackendError> {
        self.step.clone_from(input);
        self.step.fill_placeholders(&self.chosen);
        self.chosen.clear();
        self.samples.clear();
        Ok(())
    }

    fn embed(&mut self, table: &CpuMatrix, out: &mut CpuTensor) {
        out.resize(self.step.num_tokens());
        let hidden = out.cols;
        let rows = out.floats_mut().chunks_exact_mut(hidden);
        for (row, &id) in rows.zip(&self.step.token_ids) {
            table.get_row(id as usize, row);
        }
    }

    fn linear(
        &mut self,
        x: &CpuTensor,
        w: &CpuMatrix,
        bias: Option<&Vec<f32>>,
        out: &mut CpuTensor,
    ) {
        assert_eq!((w.layout, w.n), (MatrixLayout::Plain, out.cols));
        out.resize(x.rows);
        let bias = bias.map(Vec::as_slice);
        let epilogue = Epilogue::Store { bias, out: out.floats_mut() };
        self.multiply(x, w, epilogue);
    }

    fn linear_add(
        &mut self,
        x: &CpuTensor,
        w: &CpuMatrix,
        bias: Option<&Vec<f32>>,
        residual: &mut CpuTensor,
    ) {
        assert_eq!((w.layout, w.n), (MatrixLayout::Plain, residual.cols));
        assert_eq!(residual.rows, x.rows);
        let bias = bias.map(Vec::as_slice);
        let epilogue = Epilogue::Add { bias, out: residual.floats_mut() };
        self.multiply(x, w, epilogue);
    }

    fn gate_up_silu_mul(&mut self, x: &CpuTensor, w: &CpuMatrix, out: &mut CpuTensor) {
        assert_eq!((w.layout, w.n), (MatrixLayout::GateUp, 2 * out.cols));
        out.resize(x.rows);
        let n_ff = out.cols;
        let epilogue = Epilogue::SiluMul { out: out.words_mut(), n_ff };
        self.multiply(x, w, epilogue);
    }

    fn rms_norm(&mut self, x: &CpuTensor, weight: &Vec<f32>, eps: f32, out: &mut CpuTensor) {
        assert_eq!(x.cols, out.cols);
        out.resize(x.rows);
        let dtype = self.buffers.kernel_dtype();
        kernels::rms_norm(&self.ctx, x.floats(), x.rows, weight, eps, out.words_mut(), dtype);
    }

    fn qk_norm_rope_write_kv(
        &mut self,
        qkv: &CpuTensor,
        args: &QkvArgs<'_, Self>,
        kv: &mut KvCache,
        q: &mut CpuTensor,
    ) {
        q.resize(qkv.rows);
        let args = kernels::QkvArgs {
            qkv: qkv.floats(),
            positions: &self.step.positions,
            slots: &self.step.slot_mapping,
            q_heads: args.num_heads,
            q_norm: args.q_norm.map(Vec::as_slice),
            k_norm: args.k_norm.map(Vec::as_slice),
            eps: args.eps,
            cos: &args.rope.cos,
            sin: &args.rope.sin,
            rot_dim: args.rope.rot_dim,
            interleaved: args.rope.interleaved,
            layer: args.layer,
        };
        kernels::qk_norm_rope_write_kv(&self.ctx, &args, kv, q.words_mut());
    }

    fn attention(
        &mut self,
        q: &CpuTensor,
        args: &AttentionArgs,
        kv: &KvCache,
        out: &mut CpuTensor,
    ) {
        out.resize(q.rows);
        let args = AttnArgs {
            q: q.words(),
            q_heads: args.num_heads,
            layer: args.layer,
            query_start_loc: &self.step.query_start_loc,
            seq_lens: &self.step.seq_lens,
            block_table: &self.step.block_table,
            max_blocks: self.step.max_blocks,
            scale: args.scale,
            window: args.window,
            softcap: None,
        };
        kernels::attention(&self.ctx, &args, kv, &mut self.attention, out.words_mut());
    }

    fn gather_rows(&mut self, x: &CpuTensor, rows: Range<usize>, out: &mut CpuTensor) {
        out.resize(rows.len());
        let cols = x.cols;
        let indices = &self.step.logits_indices[rows];
        kernels::gather_rows(&self.ctx, x.floats(), cols, indices, out.floats_mut());
    }

    fn sample(
        &mut self,
        logits: &mut CpuTensor,
        batch: &SamplingBatch,
        rows: Range<usize>,
    ) -> Result<(), BackendError> {
        let vocab = logits.cols;
        // Each row is one item; its logits and its result are locked by the worker that has it.
        let items: Vec<_> = logits
            .floats_mut()
            .chunks_exact_mut(vocab)
            .zip(&batch.rows[rows.clone()])
            .filter(|(_, row)| row.target != RowTarget::Nothing)
            .map(|(logits, row)| Mutex::new((&mut logits[..batch.vocab_limit], row, None)))
            .collect();
        self.ctx.pool.for_each(items.len(), |worker, i| {
            let mut sampler = self.samplers[worker].lock().expect("one worker, one sampler");
            let mut item = items[i].lock().expect("one worker has the row");
            let (logits, row, out) = &mut *item;
            *out = Some(sample_row(&mut sampler, logits, row, batch));
        });
        let done = items.into_iter().map(|m| m.into_inner().expect("no panic holds it").2);
        let mut done = done.map(|out| out.expect("every row was sampled"));
        for row in &batch.rows[rows] {
            let sample = (row.target != RowTarget::Nothing).then(|| done.next()).flatten();
            let token = sample.as_ref().and_then(|sample| sample.token.ok());
            self.chosen.push(token.unwrap_or(0));
            self.samples.extend(sample);
        }
        Ok(())
    }

    fn read_samples(&mut self, out: &mut Vec<SampleOutput>) -> Result<(), BackendError> {
        out.append(&mut self.samples);
        Ok(())
    }

    fn num_rows(&self, x: &CpuTensor) -> usize {
        x.rows
    }

    fn read_row(
        &mut self,
        x: &CpuTensor,
        row: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        assert!(row < x.rows);
        let words = &x.words.as_slice()[row * x.stride..][..x.stride];
        match (x.kind, self.buffers.dtype) {
            (TensorKind::F32, _) | (_, DType::F32) => out.extend_from_slice(cast_slice(words)),
            (TensorKind::Compute, DType::Bf16) => {
                let values: &[half::bf16] = cast_slice(words);
                out.extend(values[..x.cols].iter().map(|v| v.to_f32()));
            }
        }
        Ok(())
    }
}
