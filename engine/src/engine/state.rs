//! A live request: its text so far, its clock, what it wants of the sampler.

use super::{FinishReason, Request, RequestDelta, RequestId, RequestMetrics, RequestOutput};
use super::{StopReason, output};
use crate::runner::RowRequest;
use crate::sampling::{SamplingRow, TokenLogprobs};
use crate::scheduler::{self, Sequence};
use crate::text::{OutputText, OutputTextOptions, TextError, Tokenizer};
use std::time::Instant;

pub(super) struct RequestState {
    id: RequestId,
    row: SamplingRow,
    min_tokens: usize,
    stop_token_ids: Vec<u32>,
    stops: Vec<String>,
    include_stop: bool,
    stream: bool,
    capture: bool,
    output: OutputText,
    text: String,
    logprobs: Option<Vec<TokenLogprobs>>,
    stop_reason: Option<StopReason>,
    logits: Vec<Vec<f32>>,
    arrival: Instant,
    first_scheduled: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

/// What one token did to a request.
pub(super) struct Step {
    pub delta: Option<RequestDelta>,
    pub finish: Option<FinishReason>,
}

impl RequestState {
    pub(super) fn new(
        id: RequestId,
        request: Request,
        seed: u64,
        stop_token_ids: Vec<u32>,
        tokenizer: &Tokenizer,
        arrival: Instant,
    ) -> Self {
        let params = request.params;
        let output = OutputText::new(
            tokenizer,
            &OutputTextOptions {
                stops: &params.stop,
                include_stop: params.include_stop_str_in_output,
                min_tokens: params.min_tokens,
                skip_special_tokens: params.skip_special_tokens,
                detokenize: params.detokenize,
            },
        );
        RequestState {
            id,
            row: SamplingRow {
                sample: true,
                temperature: params.effective_temperature(),
                top_k: params.top_k,
                top_p: if params.top_p == 0.0 { 1.0 } else { params.top_p },
                min_p: params.min_p,
                seed,
                position: 0,
                logprobs: params.logprobs,
                suppressed: 0..0,
            },
            min_tokens: params.min_tokens,
            stop_token_ids,
            stops: params.stop,
            include_stop: params.include_stop_str_in_output,
            stream: request.stream,
            capture: request.capture_logits,
            output,
            text: String::new(),
            logprobs: params.logprobs.map(|_| Vec::new()),
            stop_reason: None,
            logits: Vec::new(),
            arrival,
            first_scheduled: None,
            first_token: None,
            last_token: None,
        }
    }

    pub(super) fn id(&self) -> RequestId {
        self.id
    }

    /// What the request wants of a step that samples its output token number `num_output`.
    pub(super) fn row_request(&self, num_output: usize) -> RowRequest<'_> {
        let early = num_output < self.min_tokens;
        RowRequest {
            row: &self.row,
            suppressed: if early { &self.stop_token_ids } else { &[] },
            // What a preempted request has handed out is not handed out again.
            capture_from: self.capture.then_some(self.logits.len()),
        }
    }

    pub(super) fn scheduled(&mut self, now: Instant) {
        self.first_scheduled.get_or_insert(now);
    }

    pub(super) fn captured(&mut self, position: usize, logits: Vec<f32>) {
        assert_eq!(position, self.logits.len(), "logits come once, in order");
        self.logits.push(logits);
    }

    /// Takes the next token. `ended`: what the scheduler made of it.
    pub(super) fn token(
        &mut self,
        token_id: u32,
        logprobs: Option<TokenLogprobs>,
        ended: Option<scheduler::FinishReason>,
        now: Instant,
    ) -> Result<Step, TextError> {
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        if let (Some(all), Some(one)) = (&mut self.logprobs, &logprobs) {
            all.push(one.clone());
        }
        let mut finish = ended.map(|reason| match reason {
            scheduler::FinishReason::StopToken(id) => {
                self.stop_reason = Some(StopReason::Token(id));
                FinishReason::Stop
            }
            scheduler::FinishReason::Length => FinishReason::Length,
        });
        // A token that stops the request is text only where stop strings are.
        let shown = self.stop_reason.is_none() || self.include_stop;
        let mut delta =
            if shown { self.output.push(token_id)? } else { crate::text::TextDelta::default() };
        if finish.is_some() && delta.stop.is_none() {
            let rest = self.output.finish()?;
            delta.text.push_str(&rest.text);
            delta.stop = rest.stop;
        }
        if let Some(stop) = delta.stop
            && self.stop_reason.is_none()
        {
            self.stop_reason = Some(StopReason::Text(self.stops[stop].clone()));
            finish = Some(FinishReason::Stop);
        }
        self.text.push_str(&delta.text);
        let delta = self.stream.then_some(RequestDelta {
            request_id: self.id,
            text: delta.text,
            token_id,
            logprobs,
        });
        Ok(Step { delta, finish })
    }

    pub(super) fn into_output(
        mut self,
        mut sequence: Sequence,
        finish_reason: FinishReason,
        now: Instant,
    ) -> RequestOutput {
        if matches!(finish_reason, FinishReason::Abort | FinishReason::Error(_))
            && let Ok(rest) = self.output.finish()
        {
            self.text.push_str(&rest.text);
        }
        let token_ids = sequence.tokens.split_off(sequence.prompt_len);
        let since = |t: Instant| t - self.arrival;
        let tpot = match (self.first_token, self.last_token) {
            (Some(first), Some(last)) if token_ids.len() > 1 => {
                Some((last - first) / (token_ids.len() - 1) as u32)
            }
            _ => None,
        };
        output::RequestOutput {
            request_id: self.id,
            prompt_token_ids: sequence.tokens,
            text: self.text,
            token_ids,
            logprobs: self.logprobs,
            finish_reason,
            stop_reason: self.stop_reason,
            seed: self.row.seed,
            metrics: RequestMetrics {
                queue: self.first_scheduled.map(since),
                ttft: self.first_token.map(since),
                tpot,
                e2e: now - self.arrival,
                num_preemptions: sequence.num_preemptions,
            },
            logits: self.logits,
        }
    }
}
