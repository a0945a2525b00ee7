//! What a request wants of the sampler, resolved from its parameters.

use crate::runner::RowSource;
use crate::sampling::{
    LogitsProcessor, ProcessorCall, RowTarget, SamplingBatch, SamplingParams, SamplingRow,
    SeenToken,
};
use crate::scheduler::Sequence;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The rows of one sequence: a template, and the state that changes with every token.
pub(super) struct RowPlan {
    template: SamplingRow,
    lists: TokenLists,
    /// Token → times in the output; only where a penalty needs it.
    seen: Option<BTreeMap<u32, u32>>,
    processor: Option<Arc<dyn LogitsProcessor>>,
    prompt_logprobs: Option<u32>,
    prompt_len: usize,
    /// Logits are captured from this position on.
    pub(super) capture_from: Option<usize>,
    /// The next prompt position whose row has not come.
    pub(super) next_prompt_row: usize,
}

/// The lists of a request, shared by its sequences.
#[derive(Clone)]
pub(super) struct TokenLists {
    /// Ascending.
    allowed: Option<Arc<[u32]>>,
    bias: Arc<[(u32, f32)]>,
    /// Token sequences whose last token is suppressed once the others are there.
    bad_words: Arc<[Vec<u32>]>,
}

impl TokenLists {
    pub(super) fn new(params: &SamplingParams, bad_words: Arc<[Vec<u32>]>) -> Self {
        let allowed = params.allowed_token_ids.clone().map(|mut ids| {
            ids.sort_unstable();
            ids.dedup();
            ids.into()
        });
        TokenLists { allowed, bias: params.clamped_bias().into(), bad_words }
    }

    /// Whether a row depends on the tokens before it.
    pub(super) fn needs_history(&self, params: &SamplingParams) -> bool {
        penalises(params) || !self.bad_words.is_empty()
    }
}

/// What [`RowPlan::new`] takes beside the parameters.
pub(super) struct RowContext<'a> {
    pub(super) prompt: &'a [u32],
    pub(super) seed: u64,
    pub(super) vocab_size: usize,
    pub(super) lists: TokenLists,
    pub(super) processor: Option<Arc<dyn LogitsProcessor>>,
    pub(super) capture: bool,
}

impl RowPlan {
    pub(super) fn new(params: &SamplingParams, context: RowContext<'_>) -> Self {
        let vocab_size = context.vocab_size;
        RowPlan {
            template: SamplingRow {
                target: RowTarget::Nothing,
                temperature: params.effective_temperature(),
                top_k: params.top_k,
                // top_p 0 comes with greedy only, which does not look at it.
                top_p: if params.top_p == 0.0 { 1.0 } else { params.top_p },
                min_p: params.min_p,
                repetition_penalty: params.repetition_penalty,
                frequency_penalty: params.frequency_penalty,
                presence_penalty: params.presence_penalty,
                seed: context.seed,
                logprobs: params.logprobs.map(|n| n.resolve(vocab_size)),
                ..Default::default()
            },
            lists: context.lists,
            seen: penalises(params).then(|| context.prompt.iter().map(|&id| (id, 0)).collect()),
            processor: context.processor,
            prompt_logprobs: params.prompt_logprobs.map(|n| n.resolve(vocab_size)),
            prompt_len: context.prompt.len(),
            capture_from: context.capture.then_some(0),
            next_prompt_row: 0,
        }
    }

    pub(super) fn seed(&self) -> u64 {
        self.template.seed
    }

    /// Counts a token of the output.
    pub(super) fn token(&mut self, id: u32) {
        if let Some(seen) = &mut self.seen {
            *seen.entry(id).or_default() += 1;
        }
    }

    /// Whether the log-probability of the prompt's token after `position` is still to come.
    fn wants_prompt_logprob(&self, position: usize) -> bool {
        self.prompt_logprobs.is_some()
            && position >= self.next_prompt_row
            && position + 1 < self.prompt_len
    }

    /// Appends the ids that must not come after `position`.
    fn suppressed(&self, sequence: &Sequence, position: usize, ids: &mut Vec<u32>) {
        let output = sequence.output();
        // The last tokens may be known to the backend only.
        if position + 1 - sequence.prompt_len < sequence.rules.min_tokens {
            ids.extend(&sequence.rules.stop_token_ids);
        }
        for word in self.lists.bad_words.iter() {
            let Some((&last, before)) = word.split_last() else { continue };
            if output.ends_with(before) {
                ids.push(last);
            }
        }
    }

    /// Fills what a sampled row refers to.
    fn sampled_row(&self, sequence: &Sequence, row: &mut SamplingRow, batch: &mut SamplingBatch) {
        row.target = RowTarget::Sample;
        row.allowed =
            self.lists.allowed.as_ref().map(|ids| append(&mut batch.ids, ids.iter().copied()));
        let start = batch.ids.len();
        self.suppressed(sequence, row.position as usize - 1, &mut batch.ids);
        row.suppressed = start..batch.ids.len();
        row.bias = append(&mut batch.biases, self.lists.bias.iter().copied());
        if let Some(seen) = &self.seen {
            let seen = seen.iter().map(|(&token, &output_count)| SeenToken { token, output_count });
            row.seen = append(&mut batch.seen, seen);
        }
        row.processor = self.processor.as_ref().map(|processor| ProcessorCall {
            processor: Arc::clone(processor),
            history: append(&mut batch.history, sequence.tokens.iter().copied()),
            prompt_len: sequence.prompt_len,
        });
    }
}

fn penalises(params: &SamplingParams) -> bool {
    params.repetition_penalty != 1.0
        || params.frequency_penalty != 0.0
        || params.presence_penalty != 0.0
}

fn append<T>(to: &mut Vec<T>, items: impl Iterator<Item = T>) -> Range<usize> {
    let start = to.len();
    to.extend(items);
    start..to.len()
}

impl RowSource for RowPlan {
    fn wants(&self, position: usize) -> bool {
        self.capture_from.is_some_and(|from| position >= from)
            || self.wants_prompt_logprob(position)
    }

    fn push_row(
        &self,
        sequence: &Sequence,
        position: usize,
        samples: bool,
        batch: &mut SamplingBatch,
    ) -> bool {
        let mut row = self.template.clone();
        row.position = position as u32 + 1;
        if samples {
            self.sampled_row(sequence, &mut row, batch);
        } else if self.wants_prompt_logprob(position) {
            row.target = RowTarget::Given(sequence.tokens[position + 1]);
            row.logprobs = self.prompt_logprobs;
        }
        batch.rows.push(row);
        self.capture_from.is_some_and(|from| position >= from)
    }
}
