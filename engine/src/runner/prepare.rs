//! Builds a step's input from its plan.

use crate::ops::ForwardInput;
use crate::sampling::SamplingBatch;
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

/// Fills `out` for `plan`; `request` is the owner of a sequence.
pub fn prepare<'a, R: RowSource + 'a>(
    plan: &StepPlan,
    scheduler: &Scheduler,
    request: impl Fn(SeqId) -> &'a R,
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
        let source = request(s.id);
        let end = s.start + s.num_scheduled_tokens;
        for position in s.start..end {
            let samples = s.samples && position == end - 1;
            if samples || source.wants(position) {
                input.logits_indices.push(input.token_ids.len() as u32);
                let capture = source.push_row(seq, position, samples, &mut out.sampling);
                out.capture.push(capture);
                out.owners.push((s.id, position));
            }
            let block = seq.blocks[position / block_size].0 as usize;
            input.token_ids.push(seq.tokens[position]);
            input.positions.push(position as u32);
            input.slot_mapping.push((block * block_size + position % block_size) as i64);
        }
        input.query_start_loc.push(input.token_ids.len() as i32);
        input.seq_lens.push(end as i32);
        input.block_table.extend(seq.blocks.iter().map(|b| b.0 as i32));
        input.block_table.resize(input.seq_lens.len() * max_blocks, -1);
    }
}
