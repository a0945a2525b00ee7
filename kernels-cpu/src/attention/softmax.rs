//! The softmax of one query row over one split.

use super::{AttnArgs, SPLIT};
use crate::dtype::Elem;
use crate::simd::{LANES, Simd};

/// Keys a row sees, relative to the split; may be empty (`first > last`).
#[derive(Clone, Copy)]
pub(super) struct Seen {
    pub(super) first: isize,
    pub(super) last: isize,
}

/// The softmax of one row in one split.
pub(super) struct Softmax<'a> {
    pub(super) args: &'a AttnArgs<'a>,
    pub(super) seen: Seen,
    /// Groups of 16 keys that have scores, first and last.
    pub(super) groups: (usize, usize),
}

impl Softmax<'_> {
    /// Turns scores into probabilities relative to their maximum, in words. Returns the maximum
    /// (base 2) and the sum, or nothing if the row sees no key.
    #[inline(always)]
    pub(super) fn run<S: Simd, D: Elem>(
        &self,
        s: S,
        scores: &mut [f32; SPLIT],
        probs: &mut [u32; SPLIT],
    ) -> Option<(f32, f32)> {
        let (scores, _) = scores.as_chunks_mut::<LANES>();
        let minus_infinity = s.splat(f32::NEG_INFINITY);
        let (first, last) = (s.splat(self.seen.first as f32), s.splat(self.seen.last as f32));
        let mut max = minus_infinity;
        let groups = scores.iter_mut().enumerate().take(self.groups.1 + 1);
        for (group, scores) in groups.skip(self.groups.0) {
            let mut x = self.logits(s, s.load(scores));
            if !self.sees_all(group) {
                let index = s.add(s.iota(), s.splat((group * LANES) as f32));
                // Selected, not added: what lies in unseen slots may be NaN.
                x = s.select_lt(index, first, minus_infinity, x);
                x = s.select_lt(last, index, minus_infinity, x);
            }
            max = s.max(x, max);
            s.store(x, scores);
        }
        let max = s.max_lane(max);
        let seen = self.seen.first <= self.seen.last && max != f32::NEG_INFINITY;
        // Any finite maximum makes all probabilities 0 where no key is seen.
        let shift = s.splat(if seen { max } else { 0.0 });
        let mut sum = s.splat(0.0);
        let pairs =
            scores.as_chunks::<2>().0.iter().zip(probs.chunks_exact_mut(2 * LANES / D::PACK));
        let pairs = pairs.enumerate().take(self.groups.1 / 2 + 1).skip(self.groups.0 / 2);
        for (pair, (scores, probs)) in pairs {
            let mut p = [s.splat(0.0); 2];
            for (i, p) in p.iter_mut().enumerate() {
                let group = 2 * pair + i;
                if self.groups.0 <= group && group <= self.groups.1 {
                    *p = s.exp2(s.sub(s.load(&scores[i]), shift));
                    sum = s.add(sum, *p);
                }
            }
            D::put_vectors(s, p, probs);
        }
        seen.then(|| (max, s.sum(sum)))
    }

    /// Whether the row sees all keys of the group.
    #[inline(always)]
    fn sees_all(&self, group: usize) -> bool {
        let start = (group * LANES) as isize;
        self.seen.first <= start && start + LANES as isize <= self.seen.last + 1
    }

    /// Scaled (and capped) scores in units of log 2.
    #[inline(always)]
    fn logits<S: Simd>(&self, s: S, x: S::V) -> S::V {
        const LOG2_E: f32 = std::f32::consts::LOG2_E;
        let Some(cap) = self.args.softcap else {
            return s.mul(x, s.splat(self.args.scale * LOG2_E));
        };
        // tanh(t) = 1 − 2 / (e^2t + 1)
        let e = s.exp2(s.mul(x, s.splat(self.args.scale / cap * 2.0 * LOG2_E)));
        let rest = s.div(s.splat(2.0), s.add(e, s.splat(1.0)));
        s.mul(s.sub(s.splat(1.0), rest), s.splat(cap * LOG2_E))
    }
}
