//! One step: schedule, prepare, execute, apply.
//!
//! With `plan_ahead`, a step is planned, prepared and submitted before the results of the one
//! before are collected and applied, so that a device never waits for the host; tokens still to be
//! sampled are placeholders, which the backend fills in.

use super::state::Step;
use super::{Engine, EngineError, FinishReason, RequestOutput, StepOutput};
use crate::runner::{self, ExecutorOutput, StepInput, prepare};
use crate::sampling::{RowError, RowTarget, SampleOutput};
use crate::scheduler::{self, SeqId, StepPlan};
use std::collections::BTreeSet;
use std::time::Instant;

/// A step with everything that belongs to it.
#[derive(Default)]
pub(super) struct Flight {
    plan: StepPlan,
    input: StepInput,
    results: ExecutorOutput,
}

impl Engine {
    /// Computes one step and returns what it brought; empty when nothing is left to do.
    ///
    /// # Errors
    /// The backend failed. No token of the step was taken; its sequences are computed anew, as far
    /// as the prefix cache does not hold what earlier steps computed. When a device is lost, all
    /// requests end with that error, which the next call hands out.
    pub fn step(&mut self) -> Result<StepOutput, EngineError> {
        let mut out = std::mem::take(&mut self.unreported);
        let result = self.try_step(&mut out);
        if let Err(error) = result {
            self.executor.abandon();
            self.scheduler.cancel();
            self.unreported = out;
            if error.is_lost() {
                self.end_all(&error);
            }
            return Err(error);
        }
        self.complete_idle_step();
        self.withhold(&mut out);
        Ok(out)
    }

    fn try_step(&mut self, out: &mut StepOutput) -> Result<(), EngineError> {
        let start = Instant::now();
        self.scheduler.schedule(&mut self.flight.plan);
        self.stats.times.schedule += start.elapsed();
        let planned = !self.flight.plan.is_empty();
        let mut before = self.ahead.take();
        let submitted = if planned { self.submit(before.as_ref()) } else { Ok(()) };
        // Its arrays serve the step after this one.
        if let Some(before) = &mut before {
            self.collect(before)?;
            self.apply(before, out);
        }
        submitted?;
        if planned && self.plan_ahead {
            self.ahead = Some(std::mem::replace(&mut self.flight, before.unwrap_or_default()));
        } else if planned {
            let mut flight = std::mem::take(&mut self.flight);
            let collected = self.collect(&mut flight);
            if collected.is_ok() {
                self.apply(&mut flight, out);
            }
            self.flight = flight;
            collected?;
        }
        Ok(())
    }

    /// Prepares the step that was planned and gives it to the executor. `before` is the one under
    /// way.
    fn submit(&mut self, before: Option<&Flight>) -> Result<(), EngineError> {
        self.stats.peak_blocks = self.stats.peak_blocks.max(self.scheduler.pool().num_held());
        let now = Instant::now();
        let Flight { plan, input, .. } = &mut self.flight;
        for s in &plan.scheduled {
            match self.requests.get_mut(&s.id) {
                Some(state) => state.scheduled(now),
                None => self.beams.get_mut(&self.beam_of[&s.id]).expect("a search").scheduled(now),
            }
        }
        let (requests, beams, beam_of) = (&self.requests, &self.beams, &self.beam_of);
        let rows = |id: SeqId| match requests.get(&id) {
            Some(state) => &state.rows,
            None => &beams[&beam_of[&id]].rows,
        };
        input.sampling.vocab_limit = self.vocab_size;
        prepare(plan, &self.scheduler, rows, before.map(|before| &before.input), input);
        self.stats.times.prepare += now.elapsed();

        let start = Instant::now();
        if !plan.transfers.is_empty() {
            self.executor.transfer(&plan.transfers)?;
            let swapped = plan.transfers.swap_out.len() + plan.transfers.swap_in.len();
            self.stats.swap_bytes += (swapped * self.block_bytes) as u64;
        }
        self.stats.times.transfer += start.elapsed();
        let StepInput { forward, sampling, capture, .. } = &*input;
        if forward.num_tokens() > 0 {
            self.executor.submit(runner::Step { input: forward, sampling, capture })?;
        }
        Ok(())
    }

    /// Waits for the results of a step that was submitted.
    fn collect(&mut self, flight: &mut Flight) -> Result<(), EngineError> {
        let Flight { plan, input, results } = flight;
        results.samples.clear();
        results.captured.clear();
        if input.forward.num_tokens() > 0 {
            self.executor.collect(results)?;
            self.stats.times.forward += results.forward_time;
            self.stats.times.sample += results.sample_time;
        }
        self.stats.count_step(plan.num_tokens(), &input.forward);
        Ok(())
    }

    /// Ends every request, as nothing more can be computed.
    fn end_all(&mut self, error: &EngineError) {
        let reason = error.to_string();
        self.lost = Some(reason.clone());
        let searches: Vec<_> = self.beams.keys().copied().collect();
        for id in searches {
            let reason = FinishReason::Error(reason.clone());
            let outputs = self.finish_search(id, Some(reason));
            self.unreported.finished.extend(outputs);
        }
        let seqs: Vec<SeqId> = self.ids.values().flatten().copied().collect();
        for seq in seqs {
            let output = self.finish(seq, FinishReason::Error(reason.clone()), None);
            self.unreported.finished.push(output);
        }
        let withheld = self.withheld.drain(..).map(|(_, output)| output);
        self.unreported.finished.extend(withheld);
    }

    /// Applies the results of a step to scheduler and requests.
    fn apply(&mut self, flight: &mut Flight, out: &mut StepOutput) {
        let now = Instant::now();
        let Flight { plan, input, results } = flight;
        for (row, logits) in results.captured.drain(..) {
            let (seq, position) = input.owners[row];
            if let Some(state) = self.requests.get_mut(&seq) {
                state.captured(position, logits);
            }
        }
        let mut samples = results.samples.drain(..);
        let mut sampled = Vec::new();
        let mut failed: Vec<(SeqId, RowError)> = Vec::new();
        for (row, &(seq, position)) in input.sampling.rows.iter().zip(&input.owners) {
            if row.target == RowTarget::Nothing {
                continue;
            }
            let sample = samples.next().expect("one answer a row");
            if row.target == RowTarget::Sample {
                sampled.push(sample);
                continue;
            }
            // A request that ended, and one after its first failed row, have no use for more.
            let Some(state) = self.requests.get_mut(&seq) else { continue };
            if failed.last().is_some_and(|(id, _)| *id == seq) {
                continue;
            }
            match sample.token {
                Ok(_) => {
                    let logprobs = sample.logprobs.expect("a given token comes with its logprob");
                    state.prompt_logprobs(position, logprobs);
                }
                Err(error) => failed.push((seq, error)),
            }
        }
        drop(samples);
        let mut ended = Vec::new();
        // A failed row still needs a token to account for; the request ends below without it.
        let tokens = sampled.iter().map(|s| s.token.unwrap_or(0));
        self.scheduler.update(plan, tokens, &mut ended);
        self.stats.num_generated_tokens += sampled.len() as u64;
        let mut ended = ended.into_iter().peekable();
        let mut sampled = sampled.into_iter();
        let mut searches = BTreeSet::new();
        for s in &plan.scheduled {
            let sample = s.samples.then(|| sampled.next().expect("one token a sequence"));
            let reason = ended.next_if(|(id, _)| *id == s.id).map(|(_, reason)| reason);
            if self.beam_of.contains_key(&s.id) {
                if let Some(sample) = sample {
                    searches.insert(self.beam_candidates(s.id, sample, now));
                }
                continue;
            }
            if !self.requests.contains_key(&s.id) {
                continue;
            }
            if let Some(&(_, error)) = failed.iter().find(|(id, _)| *id == s.id) {
                let reason = FinishReason::Error(error.to_string());
                out.finished.push(self.finish(s.id, reason, sample.map(|_| error)));
            } else if let Some(sample) = sample {
                self.apply_sample(s.id, sample, reason, now, out);
            }
        }
        self.advance_searches(searches, out);
        self.stats.times.output += now.elapsed();
    }

    fn apply_sample(
        &mut self,
        seq: SeqId,
        sample: SampleOutput,
        ended: Option<scheduler::FinishReason>,
        now: Instant,
        out: &mut StepOutput,
    ) {
        let state = self.requests.get_mut(&seq).expect("a request a sequence");
        let token = match sample.token {
            Ok(token) => token,
            Err(error) => {
                let reason = FinishReason::Error(error.to_string());
                out.finished.push(self.finish(seq, reason, Some(error)));
                return;
            }
        };
        let step = state.token(token, sample.logprobs, ended, now);
        let Step { delta, finish } = step.unwrap_or_else(|error| Step {
            delta: None,
            finish: Some(FinishReason::Error(error.to_string())),
        });
        out.deltas.extend(delta);
        if let Some(reason) = finish {
            out.finished.push(self.finish(seq, reason, None));
        }
    }

    /// With no request left, a step under way has nobody to bring anything to; applying it gives
    /// its blocks back.
    pub(super) fn complete_idle_step(&mut self) {
        if self.ids.is_empty()
            && let Some(mut step) = self.ahead.take()
        {
            // Nobody asks for what it brought; if it failed, the next step will say so.
            match self.collect(&mut step) {
                Ok(()) => self.apply(&mut step, &mut StepOutput::default()),
                Err(_) => {
                    self.executor.abandon();
                    self.scheduler.cancel();
                }
            }
        }
    }

    /// Static batching hands out a batch's outputs when its last member has ended.
    fn withhold(&mut self, out: &mut StepOutput) {
        let now = Instant::now();
        if self.scheduler.static_batch_is_open() {
            self.withheld.extend(out.finished.drain(..).map(|output| (now, output)));
        } else if !self.withheld.is_empty() {
            let held = std::mem::take(&mut self.withheld).into_iter();
            let held = held.map(|(since, mut output): (Instant, RequestOutput)| {
                output.metrics.e2e += now - since;
                output
            });
            out.finished.splice(0..0, held);
        }
    }
}
