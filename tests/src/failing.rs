//! A backend whose steps fail.

use quire_engine::model::ModelInfo;
use quire_engine::ops::{BackendError, BackendInfo, BlockTransfers, ForwardInput, KvLayout};
use quire_engine::runner::{Executor, ExecutorOutput};
use quire_engine::sampling::{RowError, SampleOutput, SamplingBatch};

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
}

impl Failing {
    /// Puts itself around `inner`. `fault`: the step, counted from 0 → whether and how it fails.
    pub fn wrap(
        inner: Box<dyn Executor>,
        fault: impl Fn(usize) -> Option<Fault> + Send + 'static,
    ) -> Box<dyn Executor> {
        Box::new(Failing { inner, fault: Box::new(fault), num_calls: 0 })
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

    fn execute(
        &mut self,
        input: &ForwardInput,
        sampling: &SamplingBatch,
        capture: &[bool],
        out: &mut ExecutorOutput,
    ) -> Result<(), BackendError> {
        let fault = (self.fault)(self.num_calls);
        self.num_calls += 1;
        if fault != Some(Fault::Before) {
            self.inner.execute(input, sampling, capture, out)?;
        }
        if let Some(Fault::Row(row)) = fault {
            if let Some(sample) = out.samples.get_mut(row) {
                *sample = SampleOutput { token: Err(RowError::NotANumber), logprobs: None };
            }
            return Ok(());
        }
        if !matches!(fault, Some(Fault::Before | Fault::After)) {
            return Ok(());
        }
        out.samples.iter_mut().for_each(|sample| sample.token = Ok(0));
        out.captured.iter_mut().for_each(|(_, logits)| logits.fill(f32::NAN));
        Err(failure())
    }
}
