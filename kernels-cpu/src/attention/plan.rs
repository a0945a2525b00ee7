//! How a step's attention is cut into units of work for the workers.
//!
//! A unit is some tokens of a sequence for one KV head, over all the keys they see; or, for the
//! single token of a long sequence, over a few splits of them. The units of such a token leave
//! the (m, l, o) of each split in scratch, and the last of them to finish folds these in the order
//! of the splits, by the formula of the fold that is done on the way everywhere else. So how the
//! work is cut is free to depend on threads and batch: no bit does.

use std::sync::atomic::AtomicU32;

use super::{AttnArgs, ITEM_ROWS, SPLIT};
use crate::buf::{AllocError, Words};

/// Units wanted for each worker at least, so that the workers end at about the same time.
const SHARES: usize = 16;

/// Query rows of the widest register tile.
const TILE_ROWS: usize = 6;

/// What an [`AttnScratch`] is made for.
#[derive(Clone, Copy, Debug)]
pub struct AttnScratchShape {
    /// Most sequences of a step.
    pub seqs: usize,
    /// Most tokens of a sequence.
    pub positions: usize,
    /// Query heads.
    pub q_heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl AttnScratchShape {
    /// Splits of the longest sequence.
    fn splits(&self) -> usize {
        self.positions.div_ceil(SPLIT)
    }

    fn partial_words(&self) -> Option<usize> {
        let group = self.q_heads.checked_div(self.kv_heads)?;
        partial_words(group, self.head_dim)?.checked_mul(self.kv_heads)?.checked_mul(self.splits())
    }

    /// Bytes of the scratch: a maximum, a sum and an output, in f32, for every query head and
    /// split of 256 positions of the longest sequence, and a few words a sequence. `None`: more
    /// than an address can name.
    pub fn bytes(&self) -> Option<usize> {
        let counters = self.splits().checked_mul(self.kv_heads)?;
        let plans = self.seqs.checked_mul(size_of::<SeqPlan>())?;
        self.partial_words()?.checked_add(counters)?.checked_mul(4)?.checked_add(plans)
    }
}

/// Words of the partial results of a KV head's query heads in one split, in whole cache lines:
/// maxima, sums, outputs.
pub(super) fn partial_words(group: usize, head_dim: usize) -> Option<usize> {
    group.checked_mul(head_dim.checked_add(2)?)?.checked_next_multiple_of(16)
}

/// Buffers of [`super::attention`]; the default has none, and then no token is shared by workers.
#[derive(Default)]
pub struct AttnScratch {
    /// Partial results, `[splits][KV heads]`.
    pub(super) partials: Option<Words>,
    /// For every KV head of a sequence that is cut, at its first partial result: units that are
    /// done.
    pub(super) done: Vec<AtomicU32>,
    seqs: Vec<SeqPlan>,
}

impl AttnScratch {
    /// Makes room for steps within `shape`, in place of the room there was.
    pub fn reserve(&mut self, shape: &AttnScratchShape) -> Result<(), AllocError> {
        let too_large = AllocError { bytes: usize::MAX };
        shape.bytes().ok_or(too_large.clone())?;
        *self = Self::default();
        let words = shape.partial_words().ok_or(too_large)?;
        self.partials = Some(Words::zeroed(words)?);
        self.done.resize_with(shape.splits() * shape.kv_heads, AtomicU32::default);
        self.seqs.reserve_exact(shape.seqs);
        Ok(())
    }

    /// Bytes of the buffers.
    pub fn bytes(&self) -> usize {
        4 * (self.partials.as_ref().map_or(0, Words::len) + self.done.len())
            + self.seqs.capacity() * size_of::<SeqPlan>()
    }
}

/// The units of one sequence, those of a head together.
#[derive(Clone, Copy, Debug)]
struct SeqPlan {
    /// Index of the first unit.
    start: usize,
    units_per_head: usize,
    cut: Cut,
}

#[derive(Clone, Copy, Debug)]
enum Cut {
    /// Into units of so many tokens.
    Tokens(usize),
    /// Into parts of the keys; the first partial result is that of KV head 0 at this index.
    Keys { partial: usize },
}

/// What a unit works on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    pub(super) seq: usize,
    pub(super) head: usize,
    pub(super) tokens: (usize, usize),
    pub(super) part: Option<Part>,
}

/// A unit's part of the keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Splits of the unit, counted from the first that the token sees.
    pub(super) splits: (usize, usize),
    /// All splits that the token sees.
    pub(super) all: usize,
    /// Units that share the token.
    pub(super) units: usize,
    /// Index of the partial result of its first split.
    pub(super) partial: usize,
}

/// The units of a step.
pub(super) struct Plan<'a> {
    args: &'a AttnArgs<'a>,
    seqs: &'a [SeqPlan],
    units: usize,
}

impl<'a> Plan<'a> {
    /// Plans for `threads` workers. Returns the partial results and counters for the units, too.
    pub(super) fn new(
        args: &'a AttnArgs<'a>,
        kv_heads: usize,
        (threads, partial_words): (usize, usize),
        scratch: &'a mut AttnScratch,
    ) -> (Self, &'a mut [f32], &'a [AtomicU32]) {
        let AttnScratch { partials, done, seqs } = scratch;
        let partials = partials.as_mut().map_or(&mut [][..], Words::as_mut_slice);
        let room = (partials.len() / (partial_words * kv_heads)).min(done.len() / kv_heads);
        let mut cutter = Cutter { args, kv_heads, share: 0, room, taken: 0 };
        let all: usize = (0..args.seq_lens.len()).map(|seq| cutter.work(seq)).sum();
        cutter.share = (all * kv_heads / (threads * SHARES)).max(1);
        let (mut units, alone) = (0, threads == 1);
        seqs.clear();
        seqs.extend((0..args.seq_lens.len()).map(|seq| {
            let (cut, units_per_head) = cutter.cut(seq, alone);
            let start = units;
            units += units_per_head * kv_heads;
            SeqPlan { start, units_per_head, cut }
        }));
        for counter in &mut done[..cutter.taken * kv_heads] {
            *counter.get_mut() = 0;
        }
        (Self { args, seqs, units }, bytemuck::cast_slice_mut(partials), done)
    }

    /// Number of units.
    pub(super) fn units(&self) -> usize {
        self.units
    }

    /// The unit that is to be started as the `index`th: those of late tokens, which see the most
    /// keys, come first.
    pub(super) fn unit(&self, index: usize) -> Unit {
        let unit = self.units - 1 - index;
        let seq = self.seqs.partition_point(|plan| plan.start <= unit) - 1;
        let plan = self.seqs[seq];
        let (head, i) =
            ((unit - plan.start) / plan.units_per_head, (unit - plan.start) % plan.units_per_head);
        let tokens = self.args.tokens(seq);
        let (tokens, part) = match plan.cut {
            Cut::Tokens(n) => {
                let first = tokens.0 + i * n;
                ((first, tokens.1.min(first + n)), None)
            }
            Cut::Keys { partial } => {
                let (all, units) = (self.args.splits(seq), plan.units_per_head);
                let splits = (i * all / units, (i + 1) * all / units);
                (tokens, Some(Part { splits, all, units, partial }))
            }
        };
        Unit { seq, head, tokens, part }
    }
}

/// Cuts sequences into units.
struct Cutter<'a> {
    args: &'a AttnArgs<'a>,
    kv_heads: usize,
    /// Work of a unit at most, where it can be cut, in splits of one token and KV head.
    share: usize,
    /// Splits there is room for.
    room: usize,
    /// Those that are taken.
    taken: usize,
}

impl Cutter<'_> {
    /// Tokens of a sequence in this step times the splits they see.
    fn work(&self, seq: usize) -> usize {
        let (start, end) = self.args.tokens(seq);
        (end - start) * self.args.splits(seq)
    }

    /// How a sequence is cut, and its units for each KV head.
    fn cut(&mut self, seq: usize, alone: bool) -> (Cut, usize) {
        let (start, end) = self.args.tokens(seq);
        let (tokens, splits) = (end - start, self.args.splits(seq));
        let group = self.args.q_heads / self.kv_heads;
        let most = (ITEM_ROWS / group).max(1);
        if alone || tokens == 0 {
            return (Cut::Tokens(most), tokens.div_ceil(most));
        }
        let units = splits.div_ceil(self.share);
        if tokens == 1 && units > 1 && splits <= self.room - self.taken && group <= ITEM_ROWS {
            let partial = self.taken;
            self.taken += splits;
            return (Cut::Keys { partial }, units);
        }
        // So many tokens fill register tiles.
        let whole = (1..TILE_ROWS).find(|n| (n * group).is_multiple_of(TILE_ROWS));
        let whole = whole.unwrap_or(TILE_ROWS).min(most);
        let unit_tokens = (self.share / splits / whole * whole).clamp(whole, most);
        (Cut::Tokens(unit_tokens), tokens.div_ceil(unit_tokens))
    }
}
