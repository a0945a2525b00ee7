//! A strip of query rows against one split of keys.
//!
//! A strip is two register tiles of rows, which take turns with every few keys and every part of
//! the values, so that the second finds in L1 what the first has read.

use super::batch::{Batch, Fold, QUERY_STRIDE};
use super::halves::{Halves, LINE};
use super::softmax::{LOG2_E, Seen, mask, probabilities};
use super::{AttnArgs, SPLIT};
use crate::dtype::Elem;
use crate::kv::HALF;
use crate::simd::{LANES, Simd};
use crate::tile::{by_rows, step, tile_rows};

/// Register tiles of a strip.
pub(super) const STRIP_TILES: usize = 2;

/// Rows of the widest strip.
pub(super) const MAX_STRIP_ROWS: usize = STRIP_TILES * 6;

/// Half-groups in a group of 16 keys.
const HALVES: usize = LANES / HALF;

/// Scratch of one strip in one split.
#[repr(align(64))]
pub(super) struct Scratch {
    /// Logits of each row.
    scores: [[f32; SPLIT]; MAX_STRIP_ROWS],
    /// Their largest by lane.
    max: [[f32; LANES]; MAX_STRIP_ROWS],
    /// Probabilities in words.
    probs: [[u32; SPLIT]; MAX_STRIP_ROWS],
}

impl Scratch {
    pub(super) const fn new() -> Self {
        Self {
            scores: [[0.0; SPLIT]; MAX_STRIP_ROWS],
            max: [[0.0; LANES]; MAX_STRIP_ROWS],
            probs: [[0; SPLIT]; MAX_STRIP_ROWS],
        }
    }
}

/// A strip of rows `rows.0..rows.1` of a batch against the split at position `base`.
pub(super) struct Split<'a> {
    pub(super) args: &'a AttnArgs<'a>,
    pub(super) head_dim: usize,
    pub(super) base: usize,
    pub(super) halves: &'a Halves,
    /// The split after this one.
    pub(super) next: Option<&'a Halves>,
    pub(super) rows: (usize, usize),
    /// Index of this strip and number of strips of the batch, which share the prefetching.
    pub(super) share: (usize, usize),
}

impl Split<'_> {
    /// What a row at `position` sees of the split.
    #[inline(always)]
    fn seen(&self, position: usize) -> Seen {
        let relative = |position: usize| position as isize - self.base as isize;
        Seen {
            first: relative(self.args.first_seen(position)).max(0),
            last: relative(position).min(SPLIT as isize - 1),
        }
    }

    /// Folds the split into the strip's rows.
    #[inline(always)]
    pub(super) fn fold<S: Simd, D: Elem>(
        &self,
        s: S,
        batch: &mut Batch<'_>,
        scratch: &mut Scratch,
    ) {
        // The first row sees the earliest keys, the last one the latest.
        let (low, high) =
            (self.seen(batch.positions[self.rows.0]), self.seen(batch.positions[self.rows.1 - 1]));
        if low.first > high.last {
            return;
        }
        let (first, last) = (low.first as usize, high.last as usize);
        let groups = (first / LANES, last / LANES);
        // Groups of which every row sees every key.
        let full = (
            high.first.cast_unsigned().div_ceil(LANES),
            (low.last + 1).max(0).cast_unsigned() / LANES,
        );
        // SAFETY: the groups lie in the split, whose half-groups are all valid.
        unsafe { self.scores::<S, D>(s, groups, full, batch, scratch) };
        let fold = self.softmax::<S, D>(s, groups, batch, scratch);
        let d = self.head_dim;
        let values = Values {
            probs: scratch.probs.as_ptr().cast(),
            halves: self.halves,
            d,
            words: (first / D::PACK, (last + 1) / D::PACK),
            half_word: D::PACK == 2 && last.is_multiple_of(2),
            fold: &fold,
            out: batch.out[self.rows.0 * d..self.rows.1 * d].as_mut_ptr(),
        };
        // SAFETY: the probabilities of these rows and words were written, and the words of V
        // hold keys that some row sees.
        unsafe { self.values::<S, D>(s, &values) };
    }

    /// Rows `start..end` of the strip that are the register tile `tile`.
    #[inline(always)]
    fn tile<S: Simd>(&self, tile: usize) -> (usize, usize) {
        tile_rows(self.rows.1 - self.rows.0, S::MR, tile)
    }

    #[inline(always)]
    fn tiles<S: Simd>(&self) -> usize {
        (self.rows.1 - self.rows.0).div_ceil(S::MR)
    }

    /// Logits of all rows and the keys of groups `groups.0..=groups.1`, 16 keys each, and their
    /// maxima. Rows see all of groups `full.0..full.1`.
    ///
    /// # Safety
    /// The groups lie in the split.
    #[inline(always)]
    unsafe fn scores<S: Simd, D: Elem>(
        &self,
        s: S,
        groups: (usize, usize),
        full: (usize, usize),
        batch: &Batch<'_>,
        scratch: &mut Scratch,
    ) {
        let words = self.head_dim / D::PACK;
        let first_strip = self.share.0 == 0;
        scratch.max = [[f32::NEG_INFINITY; LANES]; MAX_STRIP_ROWS];
        let mut group = groups.0;
        while group <= groups.1 {
            let left = groups.1 - group + 1;
            let step = if S::NV == 4 && left >= 4 {
                4
            } else if S::NV == 4 && left >= 2 {
                2
            } else {
                1
            };
            let seen = full.0 <= group && group + step <= full.1 && self.args.softcap.is_none();
            for tile in 0..self.tiles::<S>() {
                let (start, end) = self.tile::<S>(tile);
                let scores = Scores {
                    queries: batch.queries[self.rows.0 + start..].as_ptr().cast(),
                    words,
                    k: self.halves.k[HALVES * group..].as_ptr(),
                    out: scratch.scores[start..]
                        .as_mut_ptr()
                        .cast::<f32>()
                        .wrapping_add(group * LANES),
                    max: seen.then(|| scratch.max[start..].as_mut_ptr().cast()),
                    scale: self.args.scale * LOG2_E,
                    ahead: (first_strip && tile == 0).then_some(self.halves.v_offset),
                };
                // SAFETY: by the contract; `left` groups remain.
                unsafe {
                    match step {
                        4 if S::NV == 4 => by_rows!(end - start, S, score_tile::<D, 4>(s, &scores)),
                        2 if S::NV == 4 => by_rows!(end - start, S, score_tile::<D, 2>(s, &scores)),
                        _ => by_rows!(end - start, S, score_tile::<D, 1>(s, &scores)),
                    }
                }
            }
            if !seen {
                self.mask(s, (group, group + step), batch, scratch);
            }
            group += step;
        }
    }

    /// Turns the dot products of groups `groups.0..groups.1` into logits.
    #[inline(always)]
    fn mask<S: Simd>(
        &self,
        s: S,
        groups: (usize, usize),
        batch: &Batch<'_>,
        scratch: &mut Scratch,
    ) {
        for row in 0..self.rows.1 - self.rows.0 {
            let seen = self.seen(batch.positions[self.rows.0 + row]);
            let max = s.load(&scratch.max[row]);
            let max = mask(s, self.args, seen, groups, &mut scratch.scores[row], max);
            s.store(max, &mut scratch.max[row]);
        }
    }

    /// `P·V` of all rows, folded into their outputs.
    ///
    /// # Safety
    /// The pointers of `values` cover the strip's rows and the words.
    #[inline(always)]
    unsafe fn values<S: Simd, D: Elem>(&self, s: S, values: &Values<'_>) {
        // Every strip and part of the head asks for its share of the next keys.
        let parts = self.head_dim.div_ceil(S::NV * LANES);
        let mut at = 0;
        while at < self.head_dim {
            let left = (self.head_dim - at) / LANES;
            let share = self.share.0 * parts + at / (S::NV * LANES);
            let mut ahead = self.next.map(|next| (next, share, self.share.1 * parts));
            let step = if S::NV == 4 && left >= 4 {
                4
            } else if S::NV == 4 && left >= 2 {
                2
            } else {
                1
            };
            for tile in 0..self.tiles::<S>() {
                let (start, end) = self.tile::<S>(tile);
                let t = ValueTile { row: start, at, ahead: ahead.take() };
                // SAFETY: by the contract; `left` vectors of the head remain.
                unsafe {
                    match step {
                        4 if S::NV == 4 => {
                            by_rows!(end - start, S, value_tile::<D, 4>(s, values, t));
                        }
                        2 if S::NV == 4 => {
                            by_rows!(end - start, S, value_tile::<D, 2>(s, values, t));
                        }
                        _ => by_rows!(end - start, S, value_tile::<D, 1>(s, values, t)),
                    }
                }
            }
            at += step * LANES;
        }
    }

    /// Turns logits into probabilities, and folds maxima and sums into the batch.
    #[inline(always)]
    fn softmax<S: Simd, D: Elem>(
        &self,
        s: S,
        groups: (usize, usize),
        batch: &mut Batch<'_>,
        scratch: &mut Scratch,
    ) -> Fold {
        let rows = self.rows.1 - self.rows.0;
        let mut max = [f32::NEG_INFINITY; LANES];
        let mut sum = [0.0; MAX_STRIP_ROWS];
        for (max, lanes) in max.iter_mut().zip(&scratch.max[..rows]) {
            *max = s.max_lane(s.load(lanes));
        }
        for row in 0..rows {
            let (scores, probs) = (&mut scratch.scores[row], &mut scratch.probs[row]);
            sum[row] = probabilities::<S, D>(s, groups, max[row], scores, probs);
        }
        batch.fold(s, self.rows.0, &max, &sum[..rows])
    }
}

/// What a tile of scores reads and writes.
struct Scores {
    /// Rows of `words` words, [`QUERY_STRIDE`] apart.
    queries: *const u32,
    words: usize,
    k: *const *const u32,
    /// Rows [`SPLIT`] apart.
    out: *mut f32,
    /// Largest logits by lane, a vector a row. Without it dot products are left as they are.
    max: Option<*mut f32>,
    /// Dot products to logits.
    scale: f32,
    /// Ask for what is this many words after the keys: their values.
    ahead: Option<usize>,
}

/// Logits of `R` rows and `16·NV` keys.
///
/// # Safety
/// The pointers cover `R` rows; `k` points at `2·NV` half-groups.
#[inline(always)]
unsafe fn score_tile<S: Simd, D: Elem, const R: usize, const NV: usize>(s: S, t: &Scores) {
    let mut halves = [[std::ptr::null::<u32>(); HALVES]; NV];
    for (v, pair) in halves.iter_mut().enumerate() {
        // SAFETY: by the contract.
        *pair = unsafe { [*t.k.add(2 * v), *t.k.add(2 * v + 1)] };
    }
    let mut acc = [[s.splat(0.0); NV]; R];
    for word in 0..t.words {
        let mut b = [s.splat_w(0); NV];
        for (b, [lo, hi]) in b.iter_mut().zip(&halves) {
            // SAFETY: a half-group holds `words` rows of 8 keys.
            *b = unsafe { s.join_w(&*lo.add(word * HALF).cast(), &*hi.add(word * HALF).cast()) };
        }
        // A line of each vector's values a word, so that the asking is spread over the work: a
        // burst would stop the loads behind it, and memory would idle until the next.
        if let Some(offset) = t.ahead {
            for pair in &halves {
                let line = word % (t.words / HALVES) * LINE;
                s.prefetch_l2(pair[word / (t.words / HALVES)].wrapping_add(offset + line));
            }
        }
        // SAFETY: by the contract.
        unsafe { step::<S, D, R, NV>(s, &mut acc, (t.queries.add(word), QUERY_STRIDE), &b) };
    }
    let scale = s.splat(t.scale);
    for (r, row) in acc.iter().enumerate() {
        // SAFETY: by the contract, here and below.
        let vector = |v: usize| unsafe { &mut *t.out.add(r * SPLIT + v * LANES).cast() };
        let Some(max) = t.max else {
            for (v, &dot) in row.iter().enumerate() {
                s.store(dot, vector(v));
            }
            continue;
        };
        // SAFETY: as above.
        let max: &mut [f32; LANES] = unsafe { &mut *max.add(r * LANES).cast() };
        let mut largest = s.load(max);
        for (v, &dot) in row.iter().enumerate() {
            let x = s.mul(dot, scale);
            largest = s.max(x, largest);
            s.store(x, vector(v));
        }
        s.store(largest, max);
    }
}

/// `P·V` of a strip in a split, and its fold.
struct Values<'a> {
    /// Rows [`SPLIT`] words apart.
    probs: *const u32,
    halves: &'a Halves,
    d: usize,
    /// Words of keys, of which both elements are seen by some row.
    words: (usize, usize),
    /// Whether one more word follows, of which only the first element is.
    half_word: bool,
    fold: &'a Fold,
    /// Rows `d` apart.
    out: *mut f32,
}

/// A tile of `P·V`.
struct ValueTile<'a> {
    /// First row.
    row: usize,
    /// First element of the head.
    at: usize,
    /// Keys to ask for: those of the next split, the first half-group and how many later the
    /// next one is.
    ahead: Option<(&'a Halves, usize, usize)>,
}

impl Values<'_> {
    /// First word of V of key word `word` at element `at` of the head.
    ///
    /// # Safety
    /// The word lies in the split.
    #[inline(always)]
    unsafe fn row<D: Elem>(&self, word: usize, at: usize) -> *const u32 {
        let per_half = HALF / D::PACK;
        // SAFETY: by the contract; a half-group holds `per_half` rows of V.
        unsafe {
            let half = *self.halves.k.get_unchecked(word / per_half);
            half.add(self.halves.v_offset + word % per_half * self.d + at)
        }
    }
}

/// 16·NV elements of the outputs of `R` rows.
///
/// # Safety
/// The pointers of `values` cover the rows and the words; the elements are in the head.
#[inline(always)]
unsafe fn value_tile<S: Simd, D: Elem, const R: usize, const NV: usize>(
    s: S,
    values: &Values<'_>,
    t: ValueTile<'_>,
) {
    let per_half = HALF / D::PACK;
    let mut acc = [[s.splat(0.0); NV]; R];
    let mut word = values.words.0;
    let mut ahead = t.ahead;
    while word < values.words.1 {
        let half = word / per_half;
        let end = values.words.1.min((half + 1) * per_half);
        if let Some((next, first, step)) = &mut ahead {
            while *first <= half {
                next.prefetch_key(s, *first);
                *first += *step;
            }
        }
        // SAFETY: by the contract.
        unsafe {
            if end - word == per_half {
                for i in 0..per_half {
                    value_step::<S, D, R, NV>(s, &mut acc, values, &t, (word + i, None));
                }
            } else {
                for word in word..end {
                    value_step::<S, D, R, NV>(s, &mut acc, values, &t, (word, None));
                }
            }
        }
        word = end;
    }
    if values.half_word {
        let first_element = Some(s.splat_w(0xffff));
        // SAFETY: by the contract.
        unsafe { value_step::<S, D, R, NV>(s, &mut acc, values, &t, (word, first_element)) };
    }
    for (r, row) in acc.iter().enumerate() {
        for (v, &sum) in row.iter().enumerate() {
            let at = (t.row + r) * values.d + t.at + v * LANES;
            // SAFETY: by the contract.
            let o = unsafe { &mut *values.out.add(at).cast() };
            values.fold.apply(s, t.row + r, sum, o);
        }
    }
}

/// Adds the products of a word of keys; the mask is what to keep of V.
///
/// # Safety
/// As for [`value_tile`], and the word lies in the split.
#[inline(always)]
unsafe fn value_step<S: Simd, D: Elem, const R: usize, const NV: usize>(
    s: S,
    acc: &mut [[S::V; NV]; R],
    values: &Values<'_>,
    t: &ValueTile<'_>,
    (word, mask): (usize, Option<S::W>),
) {
    let mut b = [s.splat_w(0); NV];
    // SAFETY: by the contract.
    unsafe {
        let row = values.row::<D>(word, t.at);
        for (v, b) in b.iter_mut().enumerate() {
            *b = s.load_w(&*row.add(v * LANES).cast());
            if let Some(mask) = mask {
                *b = s.and_w(*b, mask);
            }
        }
        step::<S, D, R, NV>(s, acc, (values.probs.add(t.row * SPLIT + word), SPLIT), &b);
    }
}
