//! An executor whose every choice is made again by the host's sampler, on the same logits.

use crate::conformance::assert_sample;
use quire_engine::backend::Isa;
use quire_engine::model::ModelInfo;
use quire_engine::ops::{BackendError, BackendInfo, BlockTransfers, KvLayout};
use quire_engine::runner::{Executor, ExecutorOutput, Step};
use quire_engine::sampling::{RowTarget, Sampler, SamplingBatch, SamplingRow, sample_row};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How many rows were compared that have what the key names.
#[derive(Clone, Debug, Default)]
pub struct Coverage(Arc<Mutex<BTreeMap<&'static str, usize>>>);

impl Coverage {
    fn counts(&self) -> MutexGuard<'_, BTreeMap<&'static str, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, row: &SamplingRow, failed: bool) {
        let drawn = row.target == RowTarget::Sample && row.temperature > 0.0;
        let has = [
            ("greedy", row.target == RowTarget::Sample && row.temperature == 0.0),
            ("drawn", drawn),
            ("given", matches!(row.target, RowTarget::Given(_))),
            ("failed", failed),
            ("top_k", drawn && row.top_k > 0),
            ("top_p", drawn && row.top_p < 1.0),
            ("min_p", drawn && row.min_p > 0.0),
            ("repetition_penalty", row.repetition_penalty != 1.0),
            ("frequency_penalty", row.frequency_penalty != 0.0),
            ("presence_penalty", row.presence_penalty != 0.0),
            ("logprobs", row.logprobs.is_some_and(|n| n <= 64)),
            ("more than 64 logprobs", row.logprobs.is_some_and(|n| n > 64)),
            ("allowed", row.allowed.is_some()),
            ("suppressed", !row.suppressed.is_empty()),
            ("bias", !row.bias.is_empty()),
            ("processor", row.processor.is_some()),
        ];
        let mut counts = self.counts();
        for (what, has) in has {
            *counts.entry(what).or_default() += usize::from(has);
        }
    }

    /// Asserts that so many rows had each thing that there is.
    pub fn assert_at_least(&self, rows: usize) {
        let counts = self.counts();
        assert!(!counts.is_empty() && counts.values().all(|&n| n >= rows), "{counts:?}");
    }
}

/// An executor that checks another.
pub struct Checked {
    inner: Box<dyn Executor>,
    /// How far a log-probability may be from the host's.
    logprob_error: f32,
    coverage: Coverage,
    sampler: Sampler,
    /// Of the steps that were not collected: rows, and which of them the engine wants logits of.
    submitted: VecDeque<(SamplingBatch, Vec<bool>)>,
}

impl Checked {
    /// Puts itself around `inner`.
    pub fn wrap(
        inner: Box<dyn Executor>,
        logprob_error: f32,
        coverage: Coverage,
    ) -> Box<dyn Executor> {
        let sampler = Sampler::new(Isa::detect());
        let submitted = VecDeque::new();
        Box::new(Checked { inner, logprob_error, coverage, sampler, submitted })
    }

    fn check(&mut self, batch: &SamplingBatch, out: &ExecutorOutput) {
        assert_eq!(out.captured.len(), batch.rows.len(), "logits of every row");
        let mut samples = out.samples.iter();
        for (row, (_, logits)) in batch.rows.iter().zip(&out.captured) {
            if row.target == RowTarget::Nothing {
                continue;
            }
            let got = samples.next().expect("an answer for every row");
            let mut logits = logits[..batch.vocab_limit].to_vec();
            let want = sample_row(&mut self.sampler, &mut logits, row, batch);
            assert_sample(got, &want, self.logprob_error);
            self.coverage.count(row, want.token.is_err());
        }
        assert!(samples.next().is_none(), "more answers than rows");
    }
}

impl Executor for Checked {
    fn model(&self) -> &ModelInfo {
        self.inner.model()
    }

    fn backend(&self) -> BackendInfo {
        self.inner.backend()
    }

    fn kv_layout(&self) -> &KvLayout {
        self.inner.kv_layout()
    }

    fn num_swap_blocks(&self) -> usize {
        self.inner.num_swap_blocks()
    }

    fn runs_ahead(&self) -> bool {
        self.inner.runs_ahead()
    }

    fn transfer(&mut self, transfers: &BlockTransfers) -> Result<(), BackendError> {
        self.inner.transfer(transfers)
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        self.inner.synchronize()
    }

    fn submit(&mut self, step: Step<'_>) -> Result<(), BackendError> {
        let all = vec![true; step.capture.len()];
        self.inner.submit(Step { capture: &all, ..step })?;
        self.submitted.push_back((step.sampling.clone(), step.capture.to_vec()));
        Ok(())
    }

    fn collect(&mut self, out: &mut ExecutorOutput) -> Result<(), BackendError> {
        self.inner.collect(out)?;
        let (batch, capture) = self.submitted.pop_front().expect("a step that was submitted");
        self.check(&batch, out);
        out.captured.retain(|&(row, _)| capture[row]);
        Ok(())
    }

    fn abandon(&mut self) {
        self.submitted.clear();
        self.inner.abandon();
    }
}
