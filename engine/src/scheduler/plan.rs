//! What a step does, and the steps that are under way.

use super::SeqId;
use crate::kv::BlockId;
use crate::ops::BlockTransfers;

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduledSeq {
    /// The sequence.
    pub id: SeqId,
    /// First token to compute: `num_computed_tokens` before the step.
    pub start: usize,
    /// Tokens to compute, at least 1.
    pub num_scheduled_tokens: usize,
    /// Tokens before this one have their K and V in the cache already and are not written
    /// again. Beyond `start` only where a whole prompt was found: its last token is computed for
    /// its logits alone.
    pub write_from: usize,
    /// The step reaches the last token, so a new one is sampled.
    pub samples: bool,
}

/// What became of a preempted sequence's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreemptionKind {
    /// Freed.
    Recompute,
    /// Copied to the host.
    Swap,
}

/// What a step does. Plans are executed one after the other in the order they were made: first
/// the transfers, then the forward pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// In batch order.
    pub scheduled: Vec<ScheduledSeq>,
    /// Swaps and copies of blocks that come first.
    pub transfers: BlockTransfers,
    /// Sequences that gave up their blocks to make room.
    pub preempted: Vec<(SeqId, PreemptionKind)>,
    /// Tokens of prompts computed for nothing, as static batching pads to the longest.
    pub num_padding_tokens: usize,
    /// Decodes computed for nothing, as static batching goes on with members that have ended.
    pub num_padding_rows: usize,
}

impl StepPlan {
    /// Tokens in the step, without padding.
    pub fn num_tokens(&self) -> usize {
        self.scheduled.iter().map(|s| s.num_scheduled_tokens).sum()
    }

    /// Nothing is to be computed or copied.
    pub fn is_empty(&self) -> bool {
        self.scheduled.is_empty() && self.transfers.is_empty() && self.num_padding_tokens == 0
    }

    pub(super) fn clear(&mut self, step: u64) {
        self.step = step;
        self.scheduled.clear();
        self.transfers.clear();
        self.preempted.clear();
        self.num_padding_tokens = 0;
        self.num_padding_rows = 0;
    }
}

/// A step that was planned and not yet updated. It holds what it may still touch although its
/// owner has no use for it any more.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    pub(super) step: u64,
    /// Sequences that the step computes or copies.
    pub(super) seqs: Vec<SeqId>,
    /// Blocks of sequences that ended meanwhile.
    pub(super) blocks: Vec<BlockId>,
    /// Host blocks that it reads, or that sequences gave up meanwhile.
    pub(super) host_blocks: Vec<BlockId>,
}
