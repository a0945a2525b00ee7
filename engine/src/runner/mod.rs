//! From a step plan to sampled tokens.
//!
//! [`prepare`] turns sequences into the ragged [`ForwardInput`] and the sampling rows;
//! [`Executor`] runs them. The executor is the only place that knows which backend and which
//! model there is; the engine above holds it as a trait object.

mod prepare;

pub use prepare::{RowSource, StepInput, prepare};

use crate::model::{MAX_LOGIT_ROWS, Model, ModelInfo};
use crate::ops::{Backend, BackendError, BackendInfo, BlockTransfers, ForwardInput, KvLayout};
use crate::sampling::{SampleOutput, SamplingBatch};

/// What a step produced.
#[derive(Debug, Default)]
pub struct ExecutorOutput {
    /// For each row whose target is not `Nothing`, in order.
    pub samples: Vec<SampleOutput>,
    /// (row, logits) of the rows captured for verification.
    pub captured: Vec<(usize, Vec<f32>)>,
}

/// Runs steps on some backend. Object-safe, so that the engine is one type.
pub trait Executor: Send {
    /// The model's sizes.
    fn model(&self) -> &ModelInfo;
    /// The backend's description.
    fn backend(&self) -> BackendInfo;
    /// Shape of the KV cache.
    fn kv_layout(&self) -> &KvLayout;
    /// Blocks of the host cache, to which blocks of the KV cache can be swapped out.
    fn num_swap_blocks(&self) -> usize;
    /// Moves blocks before the step that needs them is executed.
    fn transfer(&mut self, transfers: &BlockTransfers) -> Result<(), BackendError>;
    /// Computes a step. `capture[r]`: also hand out the logits of row `r`.
    fn execute(
        &mut self,
        input: &ForwardInput,
        sampling: &SamplingBatch,
        capture: &[bool],
        out: &mut ExecutorOutput,
    ) -> Result<(), BackendError>;
}

/// A model on a backend with its KV cache.
pub struct ModelRunner<B: Backend, M: Model<B>> {
    backend: B,
    model: M,
    kv: B::KvCache,
    layout: KvLayout,
    host: B::HostCache,
    num_swap_blocks: usize,
}

impl<B: Backend, M: Model<B>> ModelRunner<B, M> {
    /// Allocates the KV cache of `layout` for `model`, and `num_swap_blocks` blocks on the host.
    pub fn new(
        mut backend: B,
        model: M,
        layout: KvLayout,
        num_swap_blocks: usize,
    ) -> Result<Self, BackendError> {
        let kv = backend.kv_cache(&layout)?;
        let host = backend.host_cache(&layout, num_swap_blocks)?;
        Ok(ModelRunner { backend, model, kv, layout, host, num_swap_blocks })
    }

    /// The backend, the KV cache and the host cache: for tests that poison or inspect them.
    pub fn parts_mut(&mut self) -> (&mut B, &mut B::KvCache, &mut B::HostCache) {
        (&mut self.backend, &mut self.kv, &mut self.host)
    }
}

impl<B: Backend, M: Model<B>> Executor for ModelRunner<B, M> {
    fn model(&self) -> &ModelInfo {
        self.model.info()
    }

    fn backend(&self) -> BackendInfo {
        self.backend.info()
    }

    fn kv_layout(&self) -> &KvLayout {
        &self.layout
    }

    fn num_swap_blocks(&self) -> usize {
        self.num_swap_blocks
    }

    fn transfer(&mut self, transfers: &BlockTransfers) -> Result<(), BackendError> {
        transfers.check(self.layout.num_blocks, self.num_swap_blocks);
        self.backend.swap_out(&self.kv, &mut self.host, &transfers.swap_out)?;
        self.backend.swap_in(&mut self.kv, &self.host, &transfers.swap_in)?;
        self.backend.copy_blocks(&mut self.kv, &transfers.copies)
    }

    fn execute(
        &mut self,
        input: &ForwardInput,
        sampling: &SamplingBatch,
        capture: &[bool],
        out: &mut ExecutorOutput,
    ) -> Result<(), BackendError> {
        assert_eq!(sampling.rows.len(), input.logits_indices.len());
        assert_eq!(capture.len(), sampling.rows.len());
        input.check(self.layout.block_size, self.layout.num_blocks);
        self.backend.begin_step(input)?;
        self.model.forward(&mut self.backend, &mut self.kv);
        let total = sampling.rows.len();
        for start in (0..total).step_by(MAX_LOGIT_ROWS) {
            let rows = start..total.min(start + MAX_LOGIT_ROWS);
            let logits = self.model.logits(&mut self.backend, rows.clone());
            for row in rows.clone().filter(|&r| capture[r]) {
                let mut values = Vec::new();
                self.backend.read_row(logits, row - start, &mut values)?;
                out.captured.push((row, values));
            }
            self.backend.sample(logits, sampling, rows)?;
        }
        self.backend.read_samples(&mut out.samples)
    }
}
