//! A backend whose steps fail.

use quire_engine::model::ModelInfo;
use quire_engine::ops::{BackendError, BackendInfo, BlockTransfers, KvLayout};
use quire_engine::runner::{Executor, ExecutorOutput, Step};
use quire_engine::sampling::{RowError, SampleOutput};
use std::collections::VecDeque;

/// How a step fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Before anything is computed.
    Before,
    /// After everything was: the cache is written and results are there, but wrong.
    After,
    /// Not the step but one row, where there is one, as if its logits were NaN.
    Row(usize),
    /// After blocks were moved, where the step moves any.
    Transfer,
}

/// An executor that fails at some of its steps.
pub struct Failing {
    inner: Box<dyn Executor>,
    fault: Box<dyn Fn(usize) -> Option<Fault> + Send>,
    num_calls: usize,
    /// What becomes of the steps that were not collected.
    submitted: VecDeque<Option<Fault>>,
}

impl Failing {
    /// Puts itself around `inner`. `fault`: the step, counted from 0 → whether and how it fails.
    pub fn wrap(
        inner: Box<dyn Executor>,
        fault: impl Fn(usize) -> Option<Fault> + Send + 'static,
    ) -> Box<dyn Executor> {
        let submitted = VecDeque::new();
        Box::new(Failing { inner, fault: Box::new(fault), num_calls: 0, submitted })
    }
}

fn failure() -> BackendError {
    BackendError::OutOfMemory { what: "a test".into(), bytes: 7 }
}

impl Executor for Failing {
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

    fn transfer(&mut self, transfers: &BlockTransfers) -> Result<(), BackendError> {
        self.inner.transfer(transfers)?;
        if (self.fault)(self.num_calls) == Some(Fault::Transfer) {
            self.num_calls += 1;
            return Err(failure());
        }
        Ok(())
    }

    fn runs_ahead(&self) -> bool {
        self.inner.runs_ahead()
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        self.inner.synchronize()
    }

    fn submit(&mut self, step: Step<'_>) -> Result<(), BackendError> {
        let fault = (self.fault)(self.num_calls);
        self.num_calls += 1;
        if fault == Some(Fault::Before) {
            return Err(failure());
        }
        self.inner.submit(step)?;
        self.submitted.push_back(fault);
        Ok(())
    }

    fn collect(&mut self, out: &mut ExecutorOutput) -> Result<(), BackendError> {
        self.inner.collect(out)?;
        match self.submitted.pop_front().expect("a step that was submitted") {
            Some(Fault::Row(row)) => {
                if let Some(sample) = out.samples.get_mut(row) {
                    *sample = SampleOutput { token: Err(RowError::NotANumber), logprobs: None };
                }
                Ok(())
            }
            Some(Fault::After) => {
                out.samples.iter_mut().for_each(|sample| sample.token = Ok(0));
                out.captured.iter_mut().for_each(|(_, logits)| logits.fill(f32::NAN));
                Err(failure())
            }
            _ => Ok(()),
        }
    }

    fn abandon(&mut self) {
        self.submitted.clear();
        self.inner.abandon();
    }
}
