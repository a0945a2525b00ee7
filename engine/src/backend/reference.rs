//! The reference backend: the specification of every op, scalar and single-threaded.
//!
//! Sums are taken in f64, so that this is what the other backends approximate. Rounding happens
//! where the contract says: `Compute` tensors, K, V and the softmax numerators P hold values of
//! the backend's dtype. KV is stored as `[layer][block][2][kv_head][block_size][head_dim]`.
#![forbid(unsafe_code)]

use crate::memory::BufferSizes;
use crate::ops::{
    AttentionArgs, Backend, BackendError, BackendInfo, DType, ForwardInput, KvLayout, MatrixLayout,
    MatrixShape, QkvArgs, StepLimits, TensorKind, WeightFormats, WeightRows,
};
use crate::sampling::{RowTarget, SampleOutput, Sampler, SamplingBatch, sample_row};
use quire_kernels_cpu::Isa;
use std::ops::Range;

/// What the buffers of a [`ReferenceBackend`] take: every value is an f32, whatever it is rounded to.
#[derive(Clone, Copy, Debug)]
pub struct ReferenceBuffers {
    dtype: DType,
}

impl ReferenceBuffers {
    /// Those of a backend of this type.
    pub fn new(dtype: DType) -> Self {
        ReferenceBuffers { dtype }
    }
}

impl BufferSizes for ReferenceBuffers {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn matrix_bytes(&self, matrix: &MatrixShape) -> Option<usize> {
        matrix.n.checked_mul(matrix.k)?.checked_mul(size_of::<f32>())
    }

    fn tensor_bytes(&self, max_rows: usize, cols: usize, _: TensorKind) -> Option<usize> {
        max_rows.checked_mul(cols)?.checked_mul(size_of::<f32>())
    }

    fn kv_bytes(&self, layout: &KvLayout) -> Option<usize> {
        KvLayout { dtype: DType::F32, ..layout.clone() }
            .block_bytes()?
            .checked_mul(layout.num_blocks)
    }

    fn sampling_bytes(&self, limits: &StepLimits) -> Option<usize> {
        Sampler::max_bytes(limits.vocab_size)
    }
}

/// `bytes` of zeros.
fn zeros(bytes: Option<usize>, what: &str) -> Result<Vec<f32>, BackendError> {
    let limit = bytes.filter(|&bytes| isize::try_from(bytes).is_ok());
    let too_large = || BackendError::OutOfMemory { what: what.to_owned(), bytes: usize::MAX };
    Ok(vec![0.0; limit.ok_or_else(too_large)? / size_of::<f32>()])
}

/// Scalar specification of the ops.
#[derive(Debug)]
pub struct ReferenceBackend {
    dtype: DType,
    buffers: ReferenceBuffers,
    step: ForwardInput,
    samples: Vec<SampleOutput>,
    /// The token of each row of the step, for the placeholders of the next.
    chosen: Vec<u32>,
}

impl ReferenceBackend {
    /// A backend whose weights, GEMM inputs and KV are of `dtype`.
    pub fn new(dtype: DType) -> Self {
        ReferenceBackend {
            dtype,
            buffers: ReferenceBuffers::new(dtype),
            step: ForwardInput::default(),
            samples: Vec::new(),
            chosen: Vec::new(),
        }
    }
}

/// `[rows, cols]` row-major.
#[derive(Debug)]
pub struct RefTensor {
    data: Vec<f32>,
    rows: usize,
    cols: usize,
    kind: TensorKind,
}

impl RefTensor {
    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        size_of_val(self.data.as_slice())
    }

    fn row(&self, i: usize) -> &[f32] {
        assert!(i < self.rows);
        &self.data[i * self.cols..][..self.cols]
    }

    fn row_mut(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows);
        &mut self.data[i * self.cols..][..self.cols]
    }

    fn resize(&mut self, rows: usize) {
        assert!(rows * self.cols <= self.data.len(), "{rows} rows exceed the tensor");
        self.rows = rows;
    }
}

/// `[n, k]` row-major, rounded to the dtype.
#[derive(Debug)]
pub struct RefMatrix {
    data: Vec<f32>,
    n: usize,
    k: usize,
    layout: MatrixLayout,
}

impl RefMatrix {
    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        size_of_val(self.data.as_slice())
    }

    fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.k..][..self.k]
    }
}

/// Paged keys and values.
#[derive(Debug)]
pub struct RefKvCache {
    data: Vec<f32>,
    layout: KvLayout,
}

impl RefKvCache {
    fn new(layout: KvLayout, buffers: &ReferenceBuffers) -> Result<Self, BackendError> {
        Ok(RefKvCache { data: zeros(buffers.kv_bytes(&layout), "KV blocks")?, layout })
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        size_of_val(self.data.as_slice())
    }

    /// All elements of a block in one layer.
    fn block(&self, layer: usize, block: u32) -> Range<usize> {
        let l = &self.layout;
        assert!((block as usize) < l.num_blocks && layer < l.num_layers);
        let len = 2 * l.num_kv_heads * l.block_size * l.head_dim;
        let start = (layer * l.num_blocks + block as usize) * len;
        start..start + len
    }

    /// Copies blocks (of `source`, of this cache) in every layer.
    fn copy_from(&mut self, source: &RefKvCache, pairs: &[(u32, u32)]) {
        for &(from, to) in pairs {
            for layer in 0..self.layout.num_layers {
                let to = self.block(layer, to);
                self.data[to].copy_from_slice(&source.data[source.block(layer, from)]);
            }
        }
    }

    /// The vector of `kv` (0 = key, 1 = value) of one head at a slot.
    fn at(&self, layer: usize, kv: usize, head: usize, slot: usize) -> Range<usize> {
        let l = &self.layout;
        let (block, offset) = (slot / l.block_size, slot % l.block_size);
        assert!(block < l.num_blocks && head < l.num_kv_heads && layer < l.num_layers);
        let index = (layer * l.num_blocks + block) * 2 + kv;
        let index = (index * l.num_kv_heads + head) * l.block_size + offset;
        index * l.head_dim..(index + 1) * l.head_dim
    }

    /// Every key and value of a block, layer by layer: for tests.
    pub fn block_values(&self, block: u32) -> impl Iterator<Item = f32> {
        let layers = 0..self.layout.num_layers;
        layers.flat_map(move |layer| self.data[self.block(layer, block)].iter().copied())
    }

    /// Overwrites every element: for tests that nothing stale is read.
    pub fn fill(&mut self, value: f32) {
        self.data.fill(value);
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// RMS norm in place, f64 inside.
fn rms_norm(x: &mut [f32], weight: &[f32], eps: f32) {
    assert_eq!(x.len(), weight.len());
    let mean = dot(x, x) / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    for (v, &w) in x.iter_mut().zip(weight) {
        *v = (f64::from(*v) * scale * f64::from(w)) as f32;
    }
}

/// Rotates the first `rot_dim` elements of a head by the angles of one position.
fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32], interleaved: bool) {
    let half = cos.len();
    for i in 0..half {
        let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
        let (x, y) = (f64::from(head[a]), f64::from(head[b]));
        let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
        head[a] = (x * c - y * s) as f32;
        head[b] = (y * c + x * s) as f32;
    }
}

impl Backend for ReferenceBackend {
    type Tensor = RefTensor;
    type Matrix = RefMatrix;
    type Vector = Vec<f32>;
    type KvCache = RefKvCache;
    type HostCache = RefKvCache;

    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: "reference",
            isa: "scalar".into(),
            threads: 1,
            dtype: self.dtype,
            quantization: WeightFormats::default(),
            batch_invariant: true,
        }
    }

    fn matrix(
        &mut self,
        layout: MatrixLayout,
        n: usize,
        k: usize,
        rows: &dyn WeightRows,
    ) -> Result<RefMatrix, BackendError> {
        let shape = MatrixShape { layout, n, k, blocks: None };
        let mut data = zeros(self.buffers.matrix_bytes(&shape), "a weight")?;
        for (i, row) in data.chunks_exact_mut(k).enumerate() {
            rows.read(i, row).map_err(BackendError::Source)?;
            row.iter_mut().for_each(|x| *x = self.dtype.round(*x));
        }
        Ok(RefMatrix { data, n, k, layout })
    }

    fn vector(&mut self, data: &[f32]) -> Result<Vec<f32>, BackendError> {
        Ok(data.to_vec())
    }

    fn tensor(
        &mut self,
        max_rows: usize,
        cols: usize,
        kind: TensorKind,
    ) -> Result<RefTensor, BackendError> {
        let data = zeros(self.buffers.tensor_bytes(max_rows, cols, kind), "activations")?;
        Ok(RefTensor { data, rows: 0, cols, kind })
    }

    fn kv_cache(&mut self, layout: &KvLayout) -> Result<RefKvCache, BackendError> {
        RefKvCache::new(layout.clone(), &self.buffers)
    }

    fn host_cache(
        &mut self,
        layout: &KvLayout,
        num_blocks: usize,
    ) -> Result<RefKvCache, BackendError> {
        RefKvCache::new(KvLayout { num_blocks, ..layout.clone() }, &self.buffers)
    }

    fn copy_blocks(
        &mut self,
        kv: &mut RefKvCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), BackendError> {
        for &(from, to) in pairs {
            for layer in 0..kv.layout.num_layers {
                let (from, to) = (kv.block(layer, from), kv.block(layer, to));
                kv.data.copy_within(from, to.start);
            }
        }
        Ok(())
    }

    fn swap_out(
        &mut self,
        kv: &RefKvCache,
        host: &mut RefKvCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), BackendError> {
        host.copy_from(kv, pairs);
        Ok(())
    }

    fn swap_in(
        &mut self,
        kv: &mut RefKvCache,
        host: &mut RefKvCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), BackendError> {
        kv.copy_from(host, pairs);
        Ok(())
    }

    fn begin_step(&mut self, input: &ForwardInput) -> Result<(), BackendError> {
        self.step.clone_from(input);
        self.step.fill_placeholders(&self.chosen);
        self.chosen.clear();
        self.samples.clear();
        Ok(())
    }

    fn embed(&mut self, table: &RefMatrix, out: &mut RefTensor) {
        out.resize(self.step.num_tokens());
        for (t, &id) in self.step.token_ids.iter().enumerate() {
            out.row_mut(t).copy_from_slice(table.row(id as usize));
        }
    }

    fn linear(
        &mut self,
        x: &RefTensor,
        w: &RefMatrix,
        bias: Option<&Vec<f32>>,
        out: &mut RefTensor,
    ) {
        assert_eq!(
            (w.layout, x.kind, out.kind),
            (MatrixLayout::Plain, TensorKind::Compute, TensorKind::F32)
        );
        assert_eq!(out.cols, w.n);
        out.resize(x.rows);
        for i in 0..x.rows {
            for (j, y) in out.row_mut(i).iter_mut().enumerate() {
                *y = (dot(x.row(i), w.row(j)) + bias.map_or(0.0, |b| f64::from(b[j]))) as f32;
            }
        }
    }

    fn linear_add(
        &mut self,
        x: &RefTensor,
        w: &RefMatrix,
        bias: Option<&Vec<f32>>,
        residual: &mut RefTensor,
    ) {
        assert_eq!((w.layout, residual.rows, residual.cols), (MatrixLayout::Plain, x.rows, w.n));
        for i in 0..x.rows {
            for (j, y) in residual.row_mut(i).iter_mut().enumerate() {
                let sum = dot(x.row(i), w.row(j)) + bias.map_or(0.0, |b| f64::from(b[j]));
                *y = (f64::from(*y) + sum) as f32;
            }
        }
    }

    fn gate_up_silu_mul(&mut self, x: &RefTensor, w: &RefMatrix, out: &mut RefTensor) {
        assert_eq!((w.layout, out.kind), (MatrixLayout::GateUp, TensorKind::Compute));
        let ff = w.n / 2;
        assert_eq!(out.cols, ff);
        out.resize(x.rows);
        for i in 0..x.rows {
            for (j, y) in out.row_mut(i).iter_mut().enumerate() {
                let (gate, up) = (dot(x.row(i), w.row(j)), dot(x.row(i), w.row(ff + j)));
                *y = self.dtype.round((silu(gate) * up) as f32);
            }
        }
    }

    fn rms_norm(&mut self, x: &RefTensor, weight: &Vec<f32>, eps: f32, out: &mut RefTensor) {
        assert_eq!(out.kind, TensorKind::Compute);
        out.resize(x.rows);
        for i in 0..x.rows {
            let row = out.row_mut(i);
            row.copy_from_slice(x.row(i));
            rms_norm(row, weight, eps);
            row.iter_mut().for_each(|v| *v = self.dtype.round(*v));
        }
    }

    fn qk_norm_rope_write_kv(
        &mut self,
        qkv: &RefTensor,
        args: &QkvArgs<'_, Self>,
        kv: &mut RefKvCache,
        q: &mut RefTensor,
    ) {
        let (d, heads, kv_heads) = (kv.layout.head_dim, args.num_heads, kv.layout.num_kv_heads);
        assert_eq!((qkv.cols, q.cols), ((heads + 2 * kv_heads) * d, heads * d));
        q.resize(qkv.rows);
        let half = args.rope.rot_dim / 2;
        for t in 0..qkv.rows {
            let angles = self.step.positions[t] as usize * half..;
            let (cos, sin) = (&args.rope.cos[angles.clone()], &args.rope.sin[angles]);
            let transform = |head: usize, norm: Option<&Vec<f32>>| -> Vec<f32> {
                let mut x = qkv.row(t)[head * d..][..d].to_vec();
                if let Some(weight) = norm {
                    rms_norm(&mut x, weight, args.eps);
                }
                rotate(&mut x, &cos[..half], &sin[..half], args.rope.interleaved);
                x.iter_mut().for_each(|v| *v = self.dtype.round(*v));
                x
            };
            for h in 0..heads {
                q.row_mut(t)[h * d..][..d].copy_from_slice(&transform(h, args.q_norm));
            }
            let Ok(slot) = usize::try_from(self.step.slot_mapping[t]) else { continue };
            for h in 0..kv_heads {
                let at = kv.at(args.layer, 0, h, slot);
                kv.data[at].copy_from_slice(&transform(heads + h, args.k_norm));
                let at = kv.at(args.layer, 1, h, slot);
                let v = &qkv.row(t)[(heads + kv_heads + h) * d..][..d];
                for (to, &from) in kv.data[at].iter_mut().zip(v) {
                    *to = self.dtype.round(from);
                }
            }
        }
    }

    fn attention(
        &mut self,
        q: &RefTensor,
        args: &AttentionArgs,
        kv: &RefKvCache,
        out: &mut RefTensor,
    ) {
        let KvLayout { block_size, num_kv_heads, head_dim: d, .. } = kv.layout;
        let group = args.num_heads / num_kv_heads;
        out.resize(q.rows);
        for s in 0..self.step.num_seqs() {
            let table = &self.step.block_table[s * self.step.max_blocks..][..self.step.max_blocks];
            let slot = |j: usize| {
                let block = table[j / block_size];
                assert!(block >= 0, "sequence {s}: block table entry {block} at position {j}");
                block as usize * block_size + j % block_size
            };
            let tokens = self.step.query_start_loc[s]..self.step.query_start_loc[s + 1];
            for t in tokens.map(|t| t as usize) {
                let position = self.step.positions[t] as usize;
                let first = args.window.map_or(0, |w| (position + 1).saturating_sub(w as usize));
                for h in 0..args.num_heads {
                    let query = &q.row(t)[h * d..][..d];
                    let key = |j| &kv.data[kv.at(args.layer, 0, h / group, slot(j))];
                    let value = |j| &kv.data[kv.at(args.layer, 1, h / group, slot(j))];
                    let scores: Vec<f64> = (first..=position)
                        .map(|j| dot(query, key(j)) * f64::from(args.scale))
                        .collect();
                    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let mut sum = 0.0;
                    let mut acc = vec![0.0f64; d];
                    for (i, score) in scores.iter().enumerate() {
                        let p = (score - max).exp();
                        sum += p;
                        let p = f64::from(self.dtype.round(p as f32));
                        for (a, &v) in acc.iter_mut().zip(value(first + i)) {
                            *a += p * f64::from(v);
                        }
                    }
                    let row = &mut out.row_mut(t)[h * d..][..d];
                    for (o, a) in row.iter_mut().zip(acc) {
                        *o = self.dtype.round((a / sum) as f32);
                    }
                }
            }
        }
    }

    fn gather_rows(&mut self, x: &RefTensor, rows: Range<usize>, out: &mut RefTensor) {
        out.resize(rows.len());
        for (i, &t) in self.step.logits_indices[rows].iter().enumerate() {
            out.row_mut(i).copy_from_slice(x.row(t as usize));
        }
    }

    fn sample(
        &mut self,
        logits: &mut RefTensor,
        batch: &SamplingBatch,
        rows: Range<usize>,
    ) -> Result<(), BackendError> {
        let mut sampler = Sampler::new(Isa::Portable);
        for (i, row) in batch.rows[rows].iter().enumerate() {
            if row.target == RowTarget::Nothing {
                self.chosen.push(0);
                continue;
            }
            let logits = &mut logits.row_mut(i)[..batch.vocab_limit];
            let sample = sample_row(&mut sampler, logits, row, batch);
            self.chosen.push(sample.token.unwrap_or(0));
            self.samples.push(sample);
        }
        Ok(())
    }

    fn read_samples(&mut self, out: &mut Vec<SampleOutput>) -> Result<(), BackendError> {
        out.append(&mut self.samples);
        Ok(())
    }

    fn num_rows(&self, x: &RefTensor) -> usize {
        x.rows
    }

    fn read_row(
        &mut self,
        x: &RefTensor,
        row: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        out.extend_from_slice(x.row(row));
        Ok(())
    }
}
