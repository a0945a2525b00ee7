//! Query rows and their running softmax.

use super::ITEM_ROWS;
use super::split::MAX_STRIP_ROWS;
use crate::kv::MAX_HEAD_DIM;
use crate::simd::{LANES, Simd};

/// Words from query to query: constant, so that rows need no pointers of their own, and no power
/// of two, so that they do not compete for a few sets of the cache.
pub(super) const QUERY_STRIDE: usize = MAX_HEAD_DIM + LANES;

/// Query rows, in the order of their tokens, and their running softmax.
pub(super) struct Batch<'a> {
    pub(super) rows: usize,
    /// Absolute position of each row; does not decrease.
    pub(super) positions: [usize; ITEM_ROWS],
    /// Index of each row among `[T][Hq]`.
    pub(super) indices: [usize; ITEM_ROWS],
    /// Largest score so far; padded so that whole vectors can be loaded.
    pub(super) max: [f32; ITEM_ROWS + LANES],
    /// Sum of the probabilities relative to `max`.
    pub(super) sum: [f32; ITEM_ROWS],
    pub(super) queries: &'a [[u32; QUERY_STRIDE]; ITEM_ROWS],
    /// `[rows][D]`.
    pub(super) out: &'a mut [f32],
}

/// The fold of a split: factors on the old and the new output of each row of a strip.
pub(super) struct Fold {
    old: [f32; LANES],
    new: [f32; LANES],
    /// Whether the row sees any key of the split.
    active: [bool; MAX_STRIP_ROWS],
}

impl Batch<'_> {
    /// Back to the state before any key: (−∞, 0, 0).
    #[inline(always)]
    pub(super) fn restart(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.out.fill(0.0);
    }

    /// Folds the maxima and sums that the rows from `row` on have in a split; a maximum of −∞
    /// stands for a row that sees no key.
    #[inline(always)]
    pub(super) fn fold<S: Simd>(
        &mut self,
        s: S,
        row: usize,
        max: &[f32; LANES],
        sum: &[f32],
    ) -> Fold {
        let old_max = &mut self.max[row..].as_chunks_mut::<LANES>().0[0];
        let (old, new) = (s.load(old_max), s.load(max));
        let joint = s.max(new, old);
        // A row without keys is NaN here if it had none before either; it is not used.
        let old = s.to_array(s.exp2(s.sub(old, joint)));
        let new = s.to_array(s.exp2(s.sub(new, joint)));
        s.store(joint, old_max);
        let mut active = [false; MAX_STRIP_ROWS];
        for (i, &sum) in sum.iter().enumerate() {
            active[i] = max[i] != f32::NEG_INFINITY;
            if active[i] {
                let total = &mut self.sum[row + i];
                *total = *total * old[i] + sum * new[i];
            }
        }
        Fold { old, new, active }
    }
}

impl Fold {
    /// Folds 16 outputs of a split into those of row `row` of the strip.
    #[inline(always)]
    pub(super) fn apply<S: Simd>(&self, s: S, row: usize, new: S::V, out: &mut [f32; LANES]) {
        if self.active[row] {
            // +0 turns −0, which trailing 0 · v may or may not have turned, into +0.
            let new = s.add(new, s.splat(0.0));
            let old = s.mul(s.load(out), s.splat(self.old[row]));
            s.store(s.fma(new, s.splat(self.new[row]), old), out);
        }
    }
}
