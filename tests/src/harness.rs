//! One op at a time on any backend, with inputs that arrive bit for bit.
//!
//! The trait [`Backend`] has no upload of activations: a model has no use for one. The ops
//! themselves give one whose every step is exact, whatever the arithmetic of the backend:
//!
//! ```text
//! one-hot F32      embed(table whose row i is s·eᵢ), s a power of two ≥ 4 with s² = columns
//! one-hot Compute  rms_norm with weight 1 and eps 0: the mean square is s²/columns = 1
//! any F32          linear(one-hot, data / s), in parts that the backend's dtype holds
//! any Compute      gate_up_silu_mul(one-hot, gate 64, up data / (64 s)): silu(64) = 64 in f32
//! ```
//! A Compute tensor is read through `linear` with the identity.

use crate::fixtures::Poison;
use quire_engine::DType;
use quire_engine::ops::{Backend, ForwardInput, KvLayout, MatrixLayout, StepLimits, TensorKind};
use std::collections::HashMap;

/// A matrix on the host, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    /// `[rows, cols]`
    pub data: Vec<f32>,
    /// Row length, at least 1.
    pub cols: usize,
}

impl Rows {
    /// Wraps `data`, a whole number of rows.
    pub fn new(data: Vec<f32>, cols: usize) -> Self {
        assert!(data.len().is_multiple_of(cols), "{} values in rows of {cols}", data.len());
        Rows { data, cols }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.data.len() / self.cols
    }

    /// There are no rows.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// Row `i`.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.cols..][..self.cols]
    }

    /// The given rows alone.
    pub fn select(&self, rows: impl IntoIterator<Item = usize>) -> Rows {
        Rows::new(rows.into_iter().flat_map(|i| self.row(i).to_vec()).collect(), self.cols)
    }

    /// Every value rounded to `dtype`.
    pub fn rounded(&self, dtype: DType) -> Rows {
        Rows::new(self.data.iter().map(|&x| dtype.round(x)).collect(), self.cols)
    }

    /// The bits of every value.
    pub fn bits(&self) -> Vec<u32> {
        self.data.iter().map(|x| x.to_bits()).collect()
    }
}

/// Value of the gate for which `silu(gate)` is the gate.
const GATE: f32 = 64.0;

/// Room for the steps of any case, but for those of other heads, blocks and vocabularies.
const LIMITS: StepLimits = StepLimits {
    max_tokens: 256,
    max_seqs: 16,
    max_positions: 512,
    max_logprobs: 64,
    block_size: 16,
    swap: false,
    vocab_size: 256,
    num_heads: 1,
};

/// A backend with ways in and out.
pub struct Harness<B: Backend> {
    /// The backend under test.
    pub backend: B,
    limits: StepLimits,
    identities: HashMap<usize, B::Matrix>,
}

impl<B: Backend<KvCache: Poison>> Harness<B> {
    /// Wraps a backend, which must launch every op as it is called: the ops of these steps differ.
    pub fn new(backend: B) -> Self {
        let mut h = Harness { backend, limits: LIMITS, identities: HashMap::new() };
        let layout = KvLayout {
            num_layers: 1,
            num_blocks: 1,
            block_size: LIMITS.block_size,
            num_kv_heads: 1,
            head_dim: 16,
            dtype: h.dtype(),
        };
        h.kv_cache(&layout, LIMITS.num_heads);
        h
    }

    /// A KV cache, and room for steps that attend to it.
    pub fn kv_cache(&mut self, layout: &KvLayout, num_heads: usize) -> B::KvCache {
        let kv = self.backend.kv_cache(layout).expect("a small KV cache");
        self.reserve(StepLimits { block_size: layout.block_size, num_heads, ..self.limits });
        kv
    }

    /// Room for steps with rows of so many logits.
    pub fn reserve_logits(&mut self, vocab_size: usize) {
        self.reserve(StepLimits { vocab_size, ..self.limits });
    }

    fn reserve(&mut self, limits: StepLimits) {
        self.backend.reserve(&limits).expect("memory for small steps");
        self.limits = limits;
    }

    /// The backend's dtype.
    pub fn dtype(&self) -> DType {
        self.backend.info().dtype
    }

    /// A weight whose element is `value(row, column)`.
    pub fn matrix(
        &mut self,
        layout: MatrixLayout,
        (n, k): (usize, usize),
        value: impl Fn(usize, usize) -> f32 + Sync,
    ) -> B::Matrix {
        let read = |row: usize, out: &mut [f32]| {
            out.iter_mut().enumerate().for_each(|(i, x)| *x = value(row, i));
            Ok(())
        };
        let weight = self.backend.matrix(layout, n, k, &read).expect("memory for a small weight");
        // Weights may be on their way; between the ops of a step nothing waits for them.
        self.backend.synchronize().expect("the backend works");
        weight
    }

    /// A weight of these rows.
    pub fn weight(&mut self, layout: MatrixLayout, rows: &Rows) -> B::Matrix {
        self.matrix(layout, (rows.len(), rows.cols), |row, i| rows.row(row)[i])
    }

    /// A small parameter.
    pub fn vector(&mut self, data: &[f32]) -> B::Vector {
        self.backend.vector(data).expect("memory for a vector")
    }

    /// An empty activation.
    pub fn tensor(&mut self, rows: usize, cols: usize, kind: TensorKind) -> B::Tensor {
        self.backend.tensor(rows, cols, kind).expect("memory for an activation")
    }

    /// Row `i` is `s` at column `i` (Compute), with `s`; begins a step of its own.
    fn one_hot(&mut self, rows: usize) -> (B::Tensor, usize, f32) {
        let mut s = 4.0f32;
        while (s * s) < rows as f32 {
            s *= 2.0;
        }
        let cols = (s * s) as usize;
        self.begin(&row_input(rows));
        let table =
            self.matrix(MatrixLayout::Plain, (rows, cols), |row, i| if row == i { s } else { 0.0 });
        let mut hot = self.tensor(rows, cols, TensorKind::F32);
        self.backend.embed(&table, &mut hot);
        let ones = self.vector(&vec![1.0; cols]);
        let mut out = self.tensor(rows, cols, TensorKind::Compute);
        self.backend.rms_norm(&hot, &ones, 0.0, &mut out);
        (out, cols, s)
    }

    /// An F32 tensor of exactly these values. Begins a step of its own.
    pub fn f32_tensor(&mut self, rows: &Rows) -> B::Tensor {
        let (hot, k, s) = self.one_hot(rows.len());
        let mut out = self.tensor(rows.len(), rows.cols, TensorKind::F32);
        let mut rest = rows.data.clone();
        // Three parts of 8 bits make up the 24 of an f32; an f32 backend is done after one.
        for part in 0..3 {
            let head: Vec<f32> = rest.iter().map(|&x| self.dtype().round(x)).collect();
            rest.iter_mut().zip(&head).for_each(|(x, h)| *x -= h);
            let head = Rows::new(head, rows.cols);
            let weight = self.matrix(MatrixLayout::Plain, (rows.cols, k), |column, row| {
                if row < head.len() { head.row(row)[column] / s } else { 0.0 }
            });
            if part == 0 {
                self.backend.linear(&hot, &weight, None, &mut out);
            } else {
                self.backend.linear_add(&hot, &weight, None, &mut out);
            }
        }
        assert!(rest.iter().all(|&x| x == 0.0), "values with more bits than an f32");
        assert_eq!(self.read(&out, rows), *rows, "the upload is exact");
        out
    }

    /// A Compute tensor of these values rounded to the dtype. Begins a step of its own.
    pub fn compute_tensor(&mut self, rows: &Rows) -> B::Tensor {
        let (hot, k, s) = self.one_hot(rows.len());
        let rounded = rows.rounded(self.dtype());
        let weight = self.matrix(MatrixLayout::GateUp, (2 * rows.cols, k), |row, i| match row {
            gate if gate < rows.cols => GATE / s,
            up if i < rows.len() => rounded.row(i)[up - rows.cols] / (GATE * s),
            _ => 0.0,
        });
        let mut out = self.tensor(rows.len(), rows.cols, TensorKind::Compute);
        self.backend.gate_up_silu_mul(&hot, &weight, &mut out);
        assert_eq!(self.read_compute(&out, rows.len(), rows.cols), rounded, "the upload is exact");
        out
    }

    /// The values of an F32 tensor; `like` has its shape.
    pub fn read(&mut self, tensor: &B::Tensor, like: &Rows) -> Rows {
        self.read_f32(tensor, like.len(), like.cols)
    }

    /// The values of an F32 tensor.
    pub fn read_f32(&mut self, tensor: &B::Tensor, rows: usize, cols: usize) -> Rows {
        let mut data = Vec::new();
        for row in 0..rows {
            self.backend.read_row(tensor, row, &mut data).expect("a row that was computed");
        }
        Rows::new(data, cols)
    }

    /// The values of a Compute tensor.
    pub fn read_compute(&mut self, tensor: &B::Tensor, rows: usize, cols: usize) -> Rows {
        let mut out = self.tensor(rows, cols, TensorKind::F32);
        if !self.identities.contains_key(&cols) {
            let one = |row: usize, i: usize| if row == i { 1.0 } else { 0.0 };
            let identity = self.matrix(MatrixLayout::Plain, (cols, cols), one);
            self.identities.insert(cols, identity);
        }
        self.backend.linear(tensor, &self.identities[&cols], None, &mut out);
        self.read_f32(&out, rows, cols)
    }

    /// Begins a step.
    pub fn begin(&mut self, input: &ForwardInput) {
        self.backend.begin_step(input).expect("a valid step");
    }
}

/// A step of `rows` tokens with ids `0..rows`, for ops that look at no cache.
pub fn row_input(rows: usize) -> ForwardInput {
    let ids: Vec<u32> = (0..rows as u32).collect();
    ForwardInput {
        positions: ids.clone(),
        slot_mapping: vec![-1; rows],
        query_start_loc: vec![0, rows as i32],
        seq_lens: vec![rows as i32],
        block_table: Vec::new(),
        max_blocks: 0,
        logits_indices: ids.clone(),
        token_ids: ids,
        placeholders: Vec::new(),
    }
}
