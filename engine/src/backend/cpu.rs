//! The CPU backend: the ops of `quire-kernels-cpu` over buffers allocated at load.
//!
//! Activations and weights are allocated at load; a step allocates only the short lists of its
//! sampled rows.

use crate::memory::BufferSizes;
use crate::ops::{
    AttentionArgs, Backend, BackendError, BackendInfo, DType, ForwardInput, KvLayout, MatrixLayout,
    QkvArgs, StepLimits, TensorKind, WeightRows,
};
use crate::sampling::{RowTarget, SampleOutput, Sampler, SamplingBatch, sample_row};
use bytemuck::{cast_slice, cast_slice_mut};
use quire_kernels_cpu as kernels;
use quire_kernels_cpu::{
    AttnArgs, Ctx, Dtype, Epilogue, Isa, KvCache, KvShape, PackedMatrix, Words, gate_up_rows,
    gate_up_source,
};
use std::ops::Range;
use std::sync::Mutex;

/// The KV cache of a [`CpuBackend`].
pub use quire_kernels_cpu::KvCache as CpuKvCache;

/// What the buffers of a [`CpuBackend`] take.
#[derive(Clone, Copy, Debug)]
pub struct CpuBuffers {
    dtype: DType,
    threads: usize,
}

impl CpuBuffers {
    /// Those of a backend with these settings.
    pub fn new(dtype: DType, threads: Option<usize>) -> Self {
        CpuBuffers { dtype, threads: threads.unwrap_or_else(kernels::usable_cores) }
    }

    fn kernel_dtype(&self) -> Dtype {
        match self.dtype {
            DType::F32 => Dtype::F32,
            DType::Bf16 => Dtype::Bf16,
        }
    }

    /// Rows of the packed matrix.
    fn packed_rows(layout: MatrixLayout, n: usize) -> usize {
        match layout {
            MatrixLayout::Plain => n,
            MatrixLayout::GateUp => gate_up_rows(n / 2),
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
}

impl BufferSizes for CpuBuffers {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn matrix_bytes(&self, layout: MatrixLayout, n: usize, k: usize) -> Option<usize> {
        PackedMatrix::bytes_of(self.kernel_dtype(), Self::packed_rows(layout, n), k)
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
}

/// SIMD kernels on a pool of worker threads.
pub struct CpuBackend {
    ctx: Ctx,
    buffers: CpuBuffers,
    step: ForwardInput,
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
        let buffers = CpuBuffers { dtype, threads };
        Ok(CpuBackend {
            ctx,
            buffers,
            step: ForwardInput::default(),
            samplers,
            samples: Vec::new(),
            chosen: Vec::new(),
        })
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

/// A packed weight.
pub struct CpuMatrix {
    packed: PackedMatrix,
    layout: MatrixLayout,
    /// Rows as the model counts them; the packed matrix may be padded.
    n: usize,
}

impl CpuMatrix {
    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.packed.bytes()
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
        let ff = n / 2;
        let packed_n = CpuBuffers::packed_rows(layout, n);
        let mut packed = PackedMatrix::zeroed(self.buffers.kernel_dtype(), packed_n, k)
            .map_err(|e| out_of_memory("a weight", e.bytes))?;
        // Packed row → row of the model, where it is not padding.
        let source = |row: usize| match layout {
            MatrixLayout::Plain => Some(row),
            MatrixLayout::GateUp => {
                gate_up_source(ff, row).map(|(is_up, i)| if is_up { ff + i } else { i })
            }
        };
        let failure = Mutex::new(None);
        packed.set_rows(&self.ctx, 0, packed_n, &|row, out: &mut [f32]| match source(row) {
            None => out.fill(0.0),
            Some(i) => {
                if let Err(error) = rows.read(i, out) {
                    failure.lock().expect("no panic holds it").get_or_insert(error);
                }
            }
        });
        if let Some(error) = failure.into_inner().expect("no panic holds it") {
            return Err(BackendError::Source(error));
        }
        Ok(CpuMatrix { packed, layout, n })
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
        self.blocks(layout, layout.num_blocks, "the KV cache")
    }

    fn host_cache(
        &mut self,
        layout: &KvLayout,
        num_blocks: usize,
    ) -> Result<KvCache, BackendError> {
        self.blocks(layout, num_blocks, "the swapped-out KV blocks")
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
        assert_eq!(table.layout, MatrixLayout::Plain);
        out.resize(self.step.num_tokens());
        let hidden = out.cols;
        let rows = out.floats_mut().chunks_exact_mut(hidden);
        for (row, &id) in rows.zip(&self.step.token_ids) {
            table.packed.get_row(id as usize, row);
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
        kernels::gemm(&self.ctx, x.words(), x.rows, &w.packed, epilogue);
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
        kernels::gemm(&self.ctx, x.words(), x.rows, &w.packed, epilogue);
    }

    fn gate_up_silu_mul(&mut self, x: &CpuTensor, w: &CpuMatrix, out: &mut CpuTensor) {
        assert_eq!((w.layout, w.n), (MatrixLayout::GateUp, 2 * out.cols));
        out.resize(x.rows);
        let n_ff = out.cols;
        let epilogue = Epilogue::SiluMul { out: out.words_mut(), n_ff };
        kernels::gemm(&self.ctx, x.words(), x.rows, &w.packed, epilogue);
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
        kernels::attention(&self.ctx, &args, kv, out.words_mut());
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
