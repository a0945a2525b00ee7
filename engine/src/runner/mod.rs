//! From a step plan to sampled tokens.
//!
//! [`prepare`] turns sequences into the ragged [`ForwardInput`] and the sampling rows;
//! [`Executor`] runs them. The executor is the only place that knows which backend and which
//! model there is; the engine above holds it as a trait object.

mod prepare;

pub use prepare::{RowSource, StepInput, prepare};

use crate::model::{MAX_LOGIT_ROWS, Model, ModelInfo};
use crate::ops::{
    Backend, BackendError, BackendInfo, BlockTransfers, ForwardInput, KvLayout, StepLimits,
};
use crate::sampling::{SampleOutput, SamplingBatch};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A step to be computed.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Tokens and where they are.
    pub input: &'a ForwardInput,
    /// How tokens are chosen, a row for each of `input.logits_indices`.
    pub sampling: &'a SamplingBatch,
    /// Also hand out the logits of row `r` where `capture[r]`.
    pub capture: &'a [bool],
}

/// What a step produced.
#[derive(Debug, Default)]
pub struct ExecutorOutput {
    /// For each row whose target is not `Nothing`, in order.
    pub samples: Vec<SampleOutput>,
    /// (row, logits) of the rows captured for verification.
    pub captured: Vec<(usize, Vec<f32>)>,
    /// Time it took to compute hidden states and logits, or to ask a device for it.
    pub forward_time: Duration,
    /// Time it took to choose tokens, or to wait for a device.
    pub sample_time: Duration,
}

/// Runs steps on some backend, in the order they are submitted. Object-safe, so that the engine is
/// one type.
pub trait Executor: Send {
    /// The model's sizes.
    fn model(&self) -> &ModelInfo;
    /// The backend's description.
    fn backend(&self) -> BackendInfo;
    /// Shape of the KV cache.
    fn kv_layout(&self) -> &KvLayout;
    /// Blocks of the host cache, to which blocks of the KV cache can be swapped out.
    fn num_swap_blocks(&self) -> usize;
    /// Whether a step is computed while the caller goes on, so that it pays to submit the next one
    /// before the results are collected.
    fn runs_ahead(&self) -> bool;
    /// Moves blocks before the step that needs them is submitted.
    fn transfer(&mut self, transfers: &BlockTransfers) -> Result<(), BackendError>;
    /// Waits until all that was asked for is done.
    fn synchronize(&mut self) -> Result<(), BackendError>;
    /// Begins a step, after those that were submitted before. Its placeholders are rows of the
    /// last of them.
    fn submit(&mut self, step: Step<'_>) -> Result<(), BackendError>;
    /// Takes the results of the oldest step that was not collected, and waits for them. `out` is
    /// overwritten.
    fn collect(&mut self, out: &mut ExecutorOutput) -> Result<(), BackendError>;
    /// Forgets the steps that were not collected.
    fn abandon(&mut self);

    /// Computes a step at once.
    fn execute(&mut self, step: Step<'_>, out: &mut ExecutorOutput) -> Result<(), BackendError> {
        self.submit(step)?;
        self.collect(out)
    }
}

/// What a runner has room for.
#[derive(Clone, Debug)]
pub struct RunnerSizes {
    /// The KV cache.
    pub layout: KvLayout,
    /// Blocks of the host cache.
    pub num_swap_blocks: usize,
    /// Tokens of the largest step.
    pub max_tokens: usize,
    /// Sequences of the largest step.
    pub max_seqs: usize,
    /// Tokens of one sequence.
    pub max_positions: usize,
    /// Log-probabilities that a row may ask for.
    pub max_logprobs: usize,
}

/// A model on a backend with its KV cache.
pub struct ModelRunner<B: Backend, M: Model<B>> {
    backend: B,
    model: M,
    kv: B::KvCache,
    layout: KvLayout,
    host: B::HostCache,
    num_swap_blocks: usize,
    /// What is known of the steps that were not collected, oldest first.
    submitted: VecDeque<ExecutorOutput>,
    /// Its arrays serve the next step.
    spare: ExecutorOutput,
}

impl<B: Backend, M: Model<B>> ModelRunner<B, M> {
    /// Allocates the KV cache and whatever else steps of `model` need.
    pub fn new(mut backend: B, model: M, sizes: RunnerSizes) -> Result<Self, BackendError> {
        let RunnerSizes { layout, num_swap_blocks, .. } = sizes;
        let kv = backend.kv_cache(&layout)?;
        let host = backend.host_cache(&layout, num_swap_blocks)?;
        backend.reserve(&StepLimits {
            max_tokens: sizes.max_tokens,
            max_seqs: sizes.max_seqs,
            max_positions: sizes.max_positions,
            max_logprobs: sizes.max_logprobs.min(model.info().vocab_size),
            block_size: layout.block_size,
            swap: num_swap_blocks > 0,
            vocab_size: model.info().vocab_size,
            num_heads: model.info().num_heads,
        })?;
        Ok(ModelRunner {
            backend,
            model,
            kv,
            layout,
            host,
            num_swap_blocks,
            submitted: VecDeque::new(),
            spare: ExecutorOutput::default(),
        })
    }

    /// The backend, the KV cache and the host cache: for tests that poison or inspect them.
    pub fn parts_mut(&mut self) -> (&mut B, &mut B::KvCache, &mut B::HostCache) {
        (&mut self.backend, &mut self.kv, &mut self.host)
    }

    /// The ops of a step; returns how long those took that choose tokens.
    fn run(
        &mut self,
        step: Step<'_>,
        captured: &mut Vec<(usize, Vec<f32>)>,
    ) -> Result<Duration, BackendError> {
        let Step { input, sampling, capture } = step;
        let mut sample_time = Duration::ZERO;
        self.backend.begin_step(input)?;
        self.model.forward(&mut self.backend, &mut self.kv);
        let total = sampling.rows.len();
        for start in (0..total).step_by(MAX_LOGIT_ROWS) {
            let rows = start..total.min(start + MAX_LOGIT_ROWS);
            let logits = self.model.logits(&mut self.backend, rows.clone());
            for row in rows.clone().filter(|&r| capture[r]) {
                let mut values = Vec::new();
                self.backend.read_row(logits, row - start, &mut values)?;
                captured.push((row, values));
            }
            let sampling_start = Instant::now();
            self.backend.sample(logits, sampling, rows)?;
            sample_time += sampling_start.elapsed();
        }
        self.backend.end_step()?;
        Ok(sample_time)
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

    fn runs_ahead(&self) -> bool {
        self.backend.runs_ahead()
    }

    fn transfer(&mut self, transfers: &BlockTransfers) -> Result<(), BackendError> {
        transfers.check(self.layout.num_blocks, self.num_swap_blocks);
        self.backend.swap_out(&self.kv, &mut self.host, &transfers.swap_out)?;
        self.backend.swap_in(&mut self.kv, &mut self.host, &transfers.swap_in)?;
        self.backend.copy_blocks(&mut self.kv, &transfers.copies)
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        self.backend.synchronize()
    }

    fn submit(&mut self, step: Step<'_>) -> Result<(), BackendError> {
        assert_eq!(step.sampling.rows.len(), step.input.logits_indices.len());
        assert_eq!(step.capture.len(), step.sampling.rows.len());
        step.input.check(self.layout.block_size, self.layout.num_blocks);
        let start = Instant::now();
        let mut out = std::mem::take(&mut self.spare);
        out.samples.clear();
        out.captured.clear();
        let mut sample_time = match self.run(step, &mut out.captured) {
            Err(_) if self.backend.wants_retry() => {
                out.captured.clear();
                self.run(step, &mut out.captured)?
            }
            result => result?,
        };
        if !self.backend.runs_ahead() {
            let sampling_start = Instant::now();
            self.backend.read_samples(&mut out.samples)?;
            sample_time += sampling_start.elapsed();
        }
        out.sample_time = sample_time;
        out.forward_time = start.elapsed() - sample_time;
        self.submitted.push_back(out);
        Ok(())
    }

    fn collect(&mut self, out: &mut ExecutorOutput) -> Result<(), BackendError> {
        let step = self.submitted.pop_front().expect("a step that was submitted");
        self.spare = std::mem::replace(out, step);
        if self.backend.runs_ahead() {
            let start = Instant::now();
            self.backend.read_samples(&mut out.samples)?;
            out.sample_time += start.elapsed();
        }
        Ok(())
    }

    fn abandon(&mut self) {
        self.submitted.clear();
        self.backend.abandon_steps();
    }
}
