//! A live request: its text so far, its clock, what it wants of the sampler.

use super::rows::RowPlan;
use super::{FinishReason, Request, RequestDelta, RequestId, RequestMetrics, RequestOutput};
use super::{StopReason, output};
use crate::sampling::TokenLogprobs;
use crate::scheduler::{self, Sequence};
use crate::text::{OutputText, OutputTextOptions, TextError, Tokenizer};
use std::time::Instant;

/// One of the sequences of a request.
pub(super) struct RequestState {
    pub(super) id: RequestId,
    index: usize,
    pub(super) rows: RowPlan,
    stops: Vec<String>,
    include_stop: bool,
    stream: bool,
    output: OutputText,
    text: String,
    logprobs: Option<Vec<TokenLogprobs>>,
    prompt_logprobs: Option<Vec<TokenLogprobs>>,
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
    /// Sequence `index` of `request`.
    pub(super) fn new(
        (id, index): (RequestId, usize),
        request: &Request,
        rows: RowPlan,
        tokenizer: &Tokenizer,
        arrival: Instant,
    ) -> Self {
        let params = &request.params;
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
            index,
            rows,
            stops: params.stop.clone(),
            include_stop: params.include_stop_str_in_output,
            stream: request.stream,
            output,
            text: String::new(),
            logprobs: params.logprobs.map(|_| Vec::new()),
            prompt_logprobs: params.prompt_logprobs.map(|_| Vec::new()),
            stop_reason: None,
            logits: Vec::new(),
            arrival,
            first_scheduled: None,
            first_token: None,
            last_token: None,
        }
    }

    pub(super) fn scheduled(&mut self, now: Instant) {
        self.first_scheduled.get_or_insert(now);
    }

    pub(super) fn captured(&mut self, position: usize, logits: Vec<f32>) {
        assert_eq!(position, self.logits.len(), "logits come once, in order");
        self.logits.push(logits);
        // What a preempted request has handed out is not handed out again.
        self.rows.capture_from = Some(self.logits.len());
    }

    /// Takes the log-probability of the prompt's token after `position`.
    pub(super) fn prompt_logprobs(&mut self, position: usize, logprobs: TokenLogprobs) {
        let all = self.prompt_logprobs.as_mut().expect("asked for");
        assert_eq!(position, all.len(), "prompt logprobs come once, in order");
        all.push(logprobs);
        self.rows.next_prompt_row = all.len();
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
        self.rows.token(token_id);
        let streamed = if self.stream { logprobs.clone() } else { None };
        if let Some(all) = &mut self.logprobs {
            all.extend(logprobs);
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
            index: self.index,
            text: delta.text,
            token_id,
            logprobs: streamed,
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
            index: self.index,
            prompt_token_ids: sequence.tokens,
            text: self.text,
            token_ids,
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            finish_reason,
            stop_reason: self.stop_reason,
            seed: self.rows.seed(),
            metrics: RequestMetrics {
                queue: self.first_scheduled.map(since),
                ttft: self.first_token.map(since),
                tpot,
                e2e: now - self.arrival,
                num_preemptions: sequence.num_preemptions,
                num_cached_tokens: sequence.num_cached_tokens,
            },
            logits: self.logits,
            beam: None,
        }
    }
}
