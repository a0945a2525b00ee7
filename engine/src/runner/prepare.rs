//! Builds a step's input from its plan.

use crate::ops::ForwardInput;
use crate::sampling::{RowTarget, SamplingBatch, SamplingRow};
use crate::scheduler::{ScheduledSeq, Scheduler, SeqId, Sequence, StepPlan};

/// Everything the executor needs for a step; the arrays live across steps.
#[derive(Clone, Debug, Default)]
pub struct StepInput {
    /// Tokens, positions, slots, block tables.
    pub forward: ForwardInput,
    /// One row for each of `forward.logits_indices`.
    pub sampling: SamplingBatch,
    /// Rows whose logits are handed out.
    pub capture: Vec<bool>,
    /// The sequence and position each row belongs to; padding rows at the end have none.
    pub owners: Vec<(SeqId, usize)>,
    /// Tokens, by their place in `forward.token_ids`, that the step before samples for this
    /// sequence.
    pub placeholders: Vec<(usize, SeqId)>,
}

/// What a sequence's request wants of its logits.
pub trait RowSource {
    /// Whether the logits at `position` are wanted, besides the last one's, which samples.
    fn wants(&self, position: usize) -> bool;

    /// Appends the row of `position` to `batch`; true: hand out its logits as well.
    fn push_row(
        &self,
        sequence: &Sequence,
        position: usize,
        samples: bool,
        batch: &mut SamplingBatch,
    ) -> bool;
}

/// Fills `out` for `plan`, which was made just now; `request` is the owner of a sequence.
pub fn prepare<'a, R: RowSource + 'a>(
    plan: &StepPlan,
    scheduler: &Scheduler,
    request: impl Fn(SeqId) -> &'a R,
    out: &mut StepInput,
) {
    let block_size = scheduler.config().block_size;
    let max_model_len = scheduler.config().max_model_len;
    let entries = |s: &ScheduledSeq| (s.start + s.num_scheduled_tokens).div_ceil(block_size);
    let padding = plan.num_padding_tokens.min(max_model_len).div_ceil(block_size);
    let padding = padding.max(plan.num_padding_rows.min(1));
    let max_blocks = plan.scheduled.iter().map(entries).max().unwrap_or(0).max(padding);
    out.forward.clear(max_blocks);
    out.sampling.clear();
    out.capture.clear();
    out.owners.clear();
    out.placeholders.clear();
    for s in &plan.scheduled {
        push_sequence(s, scheduler.sequence(s.id), request(s.id), block_size, out);
    }
    let mut left = plan.num_padding_tokens;
    while left > 0 {
        let len = left.min(max_model_len);
        push_padding(len, out);
        left -= len;
    }
    for _ in 0..plan.num_padding_rows {
        push_padding(1, out);
        out.forward.logits_indices.push(out.forward.token_ids.len() as u32 - 1);
        let row = SamplingRow { target: RowTarget::Nothing, ..SamplingRow::default() };
        out.sampling.rows.push(row);
        out.capture.push(false);
    }
}

fn push_sequence(
    s: &ScheduledSeq,
    seq: &Sequence,
    source: &impl RowSource,
    block_size: usize,
    out: &mut StepInput,
) {
    let input = &mut out.forward;
    let end = s.start + s.num_scheduled_tokens;
    for position in s.start..end {
        let samples = s.samples && position == end - 1;
        if samples || source.wants(position) {
            input.logits_indices.push(input.token_ids.len() as u32);
            let capture = source.push_row(seq, position, samples, &mut out.sampling);
            out.capture.push(capture);
            out.owners.push((s.id, position));
        }
        let token = seq.tokens.get(position).copied().unwrap_or_else(|| {
            out.placeholders.push((input.token_ids.len(), s.id));
            0
        });
        input.token_ids.push(token);
        input.positions.push(position as u32);
        input.slot_mapping.push(if position < s.write_from {
            -1
        } else {
            let block = seq.table.get(position / block_size).expect("a block that is written");
            i64::from(block.0) * block_size as i64 + (position % block_size) as i64
        });
    }
    input.query_start_loc.push(input.token_ids.len() as i32);
    input.seq_lens.push(end as i32);
    let used = end.div_ceil(block_size);
    let entry = |i: usize| seq.table.get(i).map_or(-1, |block| block.0 as i32);
    input.block_table.extend((0..used).map(entry));
    input.block_table.resize(input.seq_lens.len() * input.max_blocks, -1);
}

/// A sequence of `len` tokens that writes nothing and reads whatever block 0 holds.
fn push_padding(len: usize, out: &mut StepInput) {
    let input = &mut out.forward;
    input.token_ids.extend(std::iter::repeat_n(0, len));
    input.positions.extend(0..len as u32);
    input.slot_mapping.extend(std::iter::repeat_n(-1, len));
    input.query_start_loc.push(input.token_ids.len() as i32);
    input.seq_lens.push(len as i32);
    input.block_table.resize(input.seq_lens.len() * input.max_blocks, 0);
}
