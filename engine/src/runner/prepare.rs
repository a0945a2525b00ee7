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

/// Fills `out` for `plan`, which was made just now; `request` is the owner of a sequence and
/// `before` the input of the step under way, where there is one.
pub fn prepare<'a, R: RowSource + 'a>(
    plan: &StepPlan,
    scheduler: &Scheduler,
    request: impl Fn(SeqId) -> &'a R,
    before: Option<&StepInput>,
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
    let mut sampled = SampledRows { before, next: 0 };
    for s in &plan.scheduled {
        let sequence = scheduler.sequence(s.id);
        push_sequence(s, sequence, request(s.id), block_size, out);
        let end = s.start + s.num_scheduled_tokens;
        if end > sequence.tokens.len() {
            // At most one is under way, and it is the last.
            assert_eq!(end, sequence.tokens.len() + 1, "tokens of {:?}", s.id);
            let place = out.forward.token_ids.len() as u32 - 1;
            out.forward.placeholders.push((place, sampled.row_of(s.id)));
        }
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

/// Finds the rows in which the step under way chooses tokens.
struct SampledRows<'a> {
    before: Option<&'a StepInput>,
    /// Where the search goes on: sequences keep their order from step to step, mostly.
    next: usize,
}

impl SampledRows<'_> {
    fn row_of(&mut self, seq: SeqId) -> u32 {
        let before = self.before.expect("placeholders have a step before");
        let n = before.owners.len();
        let is_its = |&row: &usize| {
            before.owners[row].0 == seq && before.sampling.rows[row].target == RowTarget::Sample
        };
        let row = (self.next..n).chain(0..self.next.min(n)).find(is_its).expect("a sampled row");
        self.next = row + 1;
        row as u32
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
        input.token_ids.push(seq.tokens.get(position).copied().unwrap_or(0));
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
