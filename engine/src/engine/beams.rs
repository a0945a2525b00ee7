//! Requests with beam search: the beams are sequences of the scheduler, their comparison is
//! [`BeamSearch`]'s.

use super::rows::{RowContext, RowPlan, TokenLists};
use super::state::RequestState;
use super::{
    BeamScore, Engine, FinishReason, Request, RequestError, RequestId, RequestOutput, StepOutput,
};
use crate::sampling::{
    BeamParams, BeamSearch, BeamStep, Hypothesis, NumLogprobs, RowError, SampleOutput,
    SamplingParams, TokenLogprob,
};
use crate::scheduler::{self, NewSequence, SeqId, Sequence};
use std::collections::BTreeSet;
use std::time::Instant;

/// A live search.
pub(super) struct BeamState {
    report: BeamReport,
    /// The live beams, in the order of the search.
    seqs: Vec<SeqId>,
    /// What may follow each live beam, as far as it is computed.
    candidates: Vec<Option<Result<Vec<TokenLogprob>, RowError>>>,
    search: BeamSearch,
    pub(super) rows: RowPlan,
}

impl BeamState {
    pub(super) fn scheduled(&mut self, now: Instant) {
        self.report.first_scheduled.get_or_insert(now);
    }
}

impl Engine {
    /// Adds a checked request that asks for beams.
    pub(super) fn add_beam_request(
        &mut self,
        id: RequestId,
        request: Request,
        new: NewSequence,
        seed: u64,
        arrival: Instant,
    ) -> Result<(), RequestError> {
        if request.stream || request.capture_logits {
            return Err(RequestError::BeamsAtTheEndOnly);
        }
        let params = &request.params;
        let width = params.effective_beam_width();
        let search = BeamSearch::new(BeamParams {
            width,
            length_penalty: params.length_penalty,
            early_stopping: params.early_stopping,
            max_tokens: new.rules.max_tokens.max(1),
            stop_token_ids: new.rules.stop_token_ids.clone(),
        });
        let wanted = NumLogprobs::Top(search.candidates_per_beam() as u32);
        let row = SamplingParams { logprobs: Some(wanted), ..params.clone() };
        let rows = self.beam_rows(&row, &new.prompt, seed);
        let seq = self.scheduler.add_beams(new, width)?;
        self.beam_of.insert(seq, id);
        self.ids.insert(id, Vec::new());
        let report =
            BeamReport { id, request, seed, arrival, first_scheduled: None, first_token: None };
        let state = BeamState { report, seqs: vec![seq], candidates: vec![None], search, rows };
        self.beams.insert(id, state);
        Ok(())
    }

    fn beam_rows(&self, params: &SamplingParams, prompt: &[u32], seed: u64) -> RowPlan {
        let lists = TokenLists::new(params, Vec::new().into());
        let vocab_size = self.vocab_size();
        let context =
            RowContext { prompt, seed, vocab_size, lists, processor: None, capture: false };
        RowPlan::new(params, context)
    }

    /// Keeps what may follow a beam, and says of which search it is.
    pub(super) fn beam_candidates(
        &mut self,
        seq: SeqId,
        sample: SampleOutput,
        now: Instant,
    ) -> RequestId {
        let id = self.beam_of[&seq];
        let state = self.beams.get_mut(&id).expect("a live search");
        let place = state.seqs.iter().position(|&s| s == seq).expect("a live beam");
        let top = sample.logprobs.map(|logprobs| logprobs.top).unwrap_or_default();
        state.candidates[place] = Some(sample.token.map(|_| top));
        state.report.first_token.get_or_insert(now);
        id
    }

    /// Moves those of `searches`, which a step has sampled for, on whose beams are all computed.
    pub(super) fn advance_searches(&mut self, searches: BTreeSet<RequestId>, out: &mut StepOutput) {
        for id in searches {
            if !self.scheduler.beams_are_parked(self.beams[&id].seqs[0]) {
                continue;
            }
            let state = self.beams.get_mut(&id).expect("just seen");
            let candidates: Result<Vec<_>, RowError> =
                state.candidates.iter_mut().map(|c| c.take().expect("a parked beam")).collect();
            match candidates.and_then(|candidates| state.search.advance(&candidates)) {
                Ok(BeamStep::Continue(next)) => {
                    let next: Vec<(usize, u32)> =
                        next.iter().map(|n| (n.parent, n.token)).collect();
                    let seqs = self.scheduler.advance_beams(state.seqs[0], &next);
                    state.candidates = vec![None; seqs.len()];
                    for seq in std::mem::replace(&mut state.seqs, seqs.clone()) {
                        self.beam_of.remove(&seq);
                    }
                    self.beam_of.extend(seqs.into_iter().map(|seq| (seq, id)));
                }
                Ok(BeamStep::Done) => out.finished.extend(self.finish_search(id, None)),
                Err(error) => {
                    let reason = FinishReason::Error(error.to_string());
                    out.finished.extend(self.finish_search(id, Some(reason)));
                }
            }
        }
    }

    /// Ends a search: with the best of what it found, or for `reason` without any of it. Nothing
    /// where `id` is no search.
    pub(super) fn finish_search(
        &mut self,
        id: RequestId,
        reason: Option<FinishReason>,
    ) -> Vec<RequestOutput> {
        let Some(state) = self.beams.remove(&id) else { return Vec::new() };
        self.ids.remove(&id);
        let mut base = None;
        for seq in &state.seqs {
            self.beam_of.remove(seq);
            let sequence = self.scheduler.finish(*seq);
            base.get_or_insert(sequence);
        }
        let mut base = base.expect("a search has a beam");
        base.tokens.truncate(base.prompt_len);
        let BeamState { report, search, .. } = state;
        let n = report.request.params.n;
        let found = if reason.is_none() { search.into_hypotheses(n) } else { Vec::new() };
        let mut found = found.into_iter();
        let none = FinishReason::Error("the search found fewer sequences".to_owned());
        let end = reason.unwrap_or(none);
        (0..n)
            .map(|index| match found.next() {
                Some(hypothesis) => self.report_hypothesis(&report, index, &base, hypothesis),
                None => self.report_state(&report, index, &base.tokens).into_output(
                    base.clone(),
                    end.clone(),
                    Instant::now(),
                ),
            })
            .collect()
    }

    fn report_state(&self, report: &BeamReport, index: usize, prompt: &[u32]) -> RequestState {
        let rows = self.beam_rows(&report.request.params, prompt, report.seed);
        let tokenizer = &self.text.tokenizer;
        let id = (report.id, index);
        let mut state = RequestState::new(id, &report.request, rows, tokenizer, report.arrival);
        if let Some(scheduled) = report.first_scheduled {
            state.scheduled(scheduled);
        }
        state
    }

    /// The output of a finished sequence: its text is made in one go.
    fn report_hypothesis(
        &self,
        report: &BeamReport,
        index: usize,
        base: &Sequence,
        hypothesis: Hypothesis,
    ) -> RequestOutput {
        let mut state = self.report_state(report, index, &base.tokens);
        let now = Instant::now();
        let mut sequence = base.clone();
        let mut finish = FinishReason::Length;
        let last = hypothesis.token_ids.len() - 1;
        for (i, &token) in hypothesis.token_ids.iter().enumerate() {
            let ended = (i == last).then_some(match hypothesis.stop {
                Some(id) => scheduler::FinishReason::StopToken(id),
                None => scheduler::FinishReason::Length,
            });
            let at = if i == last { now } else { report.first_token.unwrap_or(now) };
            sequence.tokens.push(token);
            match state.token(token, None, ended, at) {
                Ok(step) => finish = step.finish.unwrap_or(finish),
                Err(error) => {
                    finish = FinishReason::Error(error.to_string());
                    break;
                }
            }
        }
        let mut output = state.into_output(sequence, finish, now);
        output.beam = Some(BeamScore {
            cumulative_logprob: hypothesis.cumulative_logprob,
            score: hypothesis.score,
        });
        output
    }
}

/// What the outputs of a search have in common.
struct BeamReport {
    id: RequestId,
    request: Request,
    seed: u64,
    arrival: Instant,
    first_scheduled: Option<Instant>,
    first_token: Option<Instant>,
}
