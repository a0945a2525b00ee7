//! The softmax of one query row over one split.

use super::{AttnArgs, SPLIT};
use crate::dtype::Elem;
use crate::simd::{LANES, ROUND_MAGIC, Simd};

/// Logits are in units of log 2.
pub(super) const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// Keys a row sees, relative to the split; may be empty (`first > last`).
#[derive(Clone, Copy)]
pub(super) struct Seen {
    pub(super) first: isize,
    pub(super) last: isize,
}

/// Scores of groups of 16 keys `groups.0..groups.1`, as dot products, to logits; what the row does
/// not see becomes −∞. Returns the maximum of `max` and them by lane.
#[inline(always)]
pub(super) fn mask<S: Simd>(
    s: S,
    args: &AttnArgs<'_>,
    seen: Seen,
    groups: (usize, usize),
    scores: &mut [f32; SPLIT],
    mut max: S::V,
) -> S::V {
    let minus_infinity = s.splat(f32::NEG_INFINITY);
    let (first, last) = (s.splat(seen.first as f32), s.splat(seen.last as f32));
    let mut index = s.add(s.iota(), s.splat((groups.0 * LANES) as f32));
    for scores in &mut scores.as_chunks_mut::<LANES>().0[groups.0..groups.1] {
        let x = logits(s, args, s.load(scores));
        // Selected, not added: what lies in unseen slots may be NaN.
        let x = s.select_lt(index, first, minus_infinity, x);
        let x = s.select_lt(last, index, minus_infinity, x);
        index = s.add(index, s.splat(LANES as f32));
        max = s.max(x, max);
        s.store(x, scores);
    }
    max
}

/// Scaled (and capped) scores in units of log 2.
#[inline(always)]
fn logits<S: Simd>(s: S, args: &AttnArgs<'_>, x: S::V) -> S::V {
    let Some(cap) = args.softcap else {
        return s.mul(x, s.splat(args.scale * LOG2_E));
    };
    // tanh(t) = 1 − 2 / (e^2t + 1)
    let e = s.exp2(s.mul(x, s.splat(args.scale / cap * 2.0 * LOG2_E)));
    let rest = s.div(s.splat(2.0), s.add(e, s.splat(1.0)));
    s.mul(s.sub(s.splat(1.0), rest), s.splat(cap * LOG2_E))
}

/// Turns the logits of groups `groups.0..=groups.1` into probabilities relative to `max`, in
/// words. Returns their sum.
#[inline(always)]
pub(super) fn probabilities<S: Simd, D: Elem>(
    s: S,
    groups: (usize, usize),
    max: f32,
    scores: &mut [f32; SPLIT],
    probs: &mut [u32; SPLIT],
) -> f32 {
    let (groups_of_16, _) = scores.as_chunks_mut::<LANES>();
    // Groups are taken in pairs; the other one of the first and of the last may have no logits.
    if groups.0 % 2 == 1 {
        groups_of_16[groups.0 - 1].fill(f32::NEG_INFINITY);
    }
    if groups.1.is_multiple_of(2) {
        groups_of_16[groups.1 + 1].fill(f32::NEG_INFINITY);
    }
    // Any finite maximum makes all probabilities 0 where no key is seen.
    let shift = s.splat(if max == f32::NEG_INFINITY { 0.0 } else { max });
    let mut sum = s.splat(0.0);
    let words = 2 * LANES / D::PACK;
    let (first, end) = (groups.0 / 2, groups.1 / 2 + 1);
    let probs = &mut probs[first * words..end * words];
    // Four groups in step: each is one long chain of operations.
    let (fours, two) = groups_of_16[2 * first..2 * end].as_chunks::<4>();
    let (most, last) = probs.split_at_mut(fours.len() * 2 * words);
    for (logits, probs) in fours.iter().zip(most.chunks_exact_mut(2 * words)) {
        let p = exp2_below(s, logits, shift);
        sum = s.add(s.add(s.add(s.add(sum, p[0]), p[1]), p[2]), p[3]);
        D::put_vectors(s, [p[0], p[1]], &mut probs[..words]);
        D::put_vectors(s, [p[2], p[3]], &mut probs[words..]);
    }
    if let [low, high] = two {
        let p = exp2_below(s, &[*low, *high], shift);
        sum = s.add(s.add(sum, p[0]), p[1]);
        D::put_vectors(s, p, last);
    }
    s.sum(sum)
}

/// 2 to the power of the distance below `max`: [`Simd::exp2`] where nothing is above 0, with the
/// same bits for less.
#[inline(always)]
fn exp2_below<S: Simd, const N: usize>(s: S, x: &[[f32; LANES]; N], max: S::V) -> [S::V; N] {
    let magic = s.splat(ROUND_MAGIC);
    let (mut d, mut n, mut f) = ([max; N], [max; N], [max; N]);
    let mut p = [s.splat(1.535_336_2e-4); N];
    for i in 0..N {
        d[i] = s.sub(s.load(&x[i]), max);
        n[i] = s.sub(s.add(d[i], magic), magic);
        f[i] = s.sub(d[i], n[i]);
    }
    for c in [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0] {
        for i in 0..N {
            p[i] = s.fma(p[i], f[i], s.splat(c));
        }
    }
    for i in 0..N {
        // Whatever the scaling makes of an exponent out of range is not taken.
        p[i] = s.select_lt(d[i], s.splat(-126.0), s.splat(0.0), s.scale2(p[i], n[i]));
    }
    p
}
