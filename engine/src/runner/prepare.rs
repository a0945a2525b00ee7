//! Builds a step's input from its plan.

use crate::ops::ForwardInput;
use crate::sampling::{SamplingBatch, SamplingRow};
use crate::scheduler::{Scheduler, SeqId, Sequence, StepPlan};

/// Everything the executor needs for a step; the arrays live across steps.
#[derive(Clone, Debug, Default)]
pub struct StepInput {
    /// Tokens, positions, slots, block tables.
    pub forward: ForwardInput,
    /// One row for each of `forward.logits_indices`.
    pub sampling: SamplingBatch,
    /// Rows whose logits are handed out.
    pub capture: Vec<bool>,
    /// The sequence and position each row belongs to.
    pub owners: Vec<(SeqId, usize)>,
}

/// What a request wants of its rows.
#[derive(Clone, Debug)]
pub struct RowRequest<'a> {
    /// Template; `sample`, `position` and `suppressed` are filled in for each row.
    pub row: &'a SamplingRow,
    /// Ids that must not be sampled this step.
    pub suppressed: &'a [u32],
    /// Capture the logits of every position from this one on.
    pub capture_from: Option<usize>,
}

/// Fills `out` for `plan`; `request` says what the owner of a sequence wants.
pub fn prepare<'a>(
    plan: &StepPlan,
    scheduler: &Scheduler,
    request: impl Fn(SeqId, &Sequence) -> RowRequest<'a>,
    out: &mut StepInput,
) {
    let block_size = scheduler.config().block_size;
    let tables = plan.scheduled.iter().map(|s| scheduler.sequence(s.id).blocks.len());
    let max_blocks = tables.max().unwrap_or(0);
    let input = &mut out.forward;
    input.clear(max_blocks);
    out.sampling.clear();
    out.capture.clear();
    out.owners.clear();
    for s in &plan.scheduled {
        let seq = scheduler.sequence(s.id);
        let end = s.start + s.num_scheduled_tokens;
        let first = input.token_ids.len();
        for position in s.start..end {
            let block = seq.blocks[position / block_size].0 as usize;
            input.token_ids.push(seq.tokens[position]);
            input.positions.push(position as u32);
            input.slot_mapping.push((block * block_size + position % block_size) as i64);
        }
        input.query_start_loc.push(input.token_ids.len() as i32);
        input.seq_lens.push(end as i32);
        input.block_table.extend(seq.blocks.iter().map(|b| b.0 as i32));
        input.block_table.resize(input.seq_lens.len() * max_blocks, -1);

        let wanted = request(s.id, seq);
        let from = wanted.capture_from.unwrap_or(end).max(s.start);
        let from = if s.samples { from.min(end - 1) } else { from };
        for position in from..end {
            let samples = s.samples && position == end - 1;
            input.logits_indices.push((first + position - s.start) as u32);
            let suppressed = out.sampling.suppressed.len();
            if samples {
                out.sampling.suppressed.extend_from_slice(wanted.suppressed);
            }
            out.sampling.rows.push(SamplingRow {
                sample: samples,
                position: position as u32 + 1,
                suppressed: suppressed..out.sampling.suppressed.len(),
                ..wanted.row.clone()
            });
            out.capture.push(wanted.capture_from.is_some_and(|c| position >= c));
            out.owners.push((s.id, position));
        }
    }
}
