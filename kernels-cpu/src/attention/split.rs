//! One tile of query rows against one split of keys.

use super::SPLIT;
use super::item::{Batch, Item};
use super::softmax::{Seen, Softmax};
use crate::dtype::Elem;
use crate::kv::{HALF, MAX_HEAD_DIM};
use crate::simd::{LANES, Simd};
use crate::tile::{by_rows, step};

/// Rows of the widest register tile.
const MAX_TILE_ROWS: usize = 6;

/// Words of a cache line.
const LINE: usize = 16;

/// Scratch of one tile in one split.
#[repr(align(64))]
pub(super) struct Scratch {
    /// Scores, then their logits.
    scores: [[f32; SPLIT]; MAX_TILE_ROWS],
    /// Probabilities in words.
    probs: [[u32; SPLIT]; MAX_TILE_ROWS],
    /// The tile's queries, `words(D)` apart.
    queries: [u32; MAX_TILE_ROWS * MAX_HEAD_DIM],
}

impl Scratch {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self {
            scores: [[0.0; SPLIT]; MAX_TILE_ROWS],
            probs: [[0; SPLIT]; MAX_TILE_ROWS],
            queries: [0; MAX_TILE_ROWS * MAX_HEAD_DIM],
        }
    }
}

/// The half-groups of a split: K, with V at a constant distance. Those that no row sees repeat
/// one that some row does, so that scores can be computed for whole vectors.
pub(super) struct Halves {
    pub(super) k: [*const u32; SPLIT / HALF],
    /// First and last half-group that some row sees.
    pub(super) seen: (usize, usize),
    /// Words of a half-group.
    pub(super) words: usize,
    pub(super) v_offset: usize,
}

impl Halves {
    /// Asks for all keys.
    #[inline(always)]
    pub(super) fn prefetch_keys<S: Simd>(&self, s: S) {
        for half in self.seen.0..=self.seen.1 {
            self.prefetch(s, half, 0);
        }
    }

    /// Asks for a half-group, `offset` words from its keys.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, s: S, half: usize, offset: usize) {
        if self.seen.0 <= half && half <= self.seen.1 {
            for line in (0..self.words).step_by(LINE) {
                s.prefetch_l2(self.k[half].wrapping_add(offset + line));
            }
        }
    }
}

/// The fold of a split: factors on the old and the new output of each row.
struct Fold {
    old: [f32; LANES],
    new: [f32; LANES],
    /// Whether the row sees any key of the split.
    active: [bool; MAX_TILE_ROWS],
}

/// A tile of rows `rows.0..rows.1` of a batch against the split at position `base`.
pub(super) struct Split<'a> {
    pub(super) item: &'a Item<'a>,
    pub(super) base: usize,
    pub(super) halves: &'a Halves,
    /// The split after this one.
    pub(super) next: Option<&'a Halves>,
    pub(super) rows: (usize, usize),
    /// Index of this tile and number of tiles of the batch, which share the prefetching.
    pub(super) share: (usize, usize),
}

impl Split<'_> {
    /// What a row at `position` sees of the split.
    #[inline(always)]
    fn seen(&self, position: usize) -> Seen {
        let relative = |position: usize| position as isize - self.base as isize;
        Seen {
            first: relative(self.item.first_seen(position)).max(0),
            last: relative(position).min(SPLIT as isize - 1),
        }
    }

    /// Folds the split into the tile's rows.
    #[inline(always)]
    pub(super) fn fold<S: Simd, D: Elem>(&self, s: S, batch: &mut Batch, scratch: &mut Scratch) {
        let rows = self.rows.1 - self.rows.0;
        let first = self.seen(batch.positions[self.rows.0]).first;
        let last = self.seen(batch.positions[self.rows.1 - 1]).last;
        if first > last {
            return;
        }
        let (first, last) = (first as usize, last as usize);
        let groups = (first / LANES, last / LANES);
        self.copy_queries::<D>(batch, scratch);
        // SAFETY: the queries of `rows` rows were copied; the groups lie in the split, whose
        // half-groups are all valid.
        unsafe { self.scores::<S, D>(s, rows, groups, scratch) };
        let fold = self.softmax::<S, D>(s, groups, batch, scratch);
        let d = self.item.kv.shape().head_dim;
        let values = Values {
            probs: scratch.probs.as_ptr().cast(),
            halves: self.halves,
            d,
            words: (first / D::PACK, (last + 1) / D::PACK),
            half_word: D::PACK == 2 && last.is_multiple_of(2),
            fold: &fold,
            out: batch.out(self.rows.0, d),
        };
        // SAFETY: the probabilities of these rows and words were written, and the words of V
        // hold keys that some row sees.
        unsafe { values.accumulate::<S, D>(s, rows) };
    }

    /// Gathers the tile's queries at a constant distance.
    #[inline(always)]
    fn copy_queries<D: Elem>(&self, batch: &Batch, scratch: &mut Scratch) {
        let words = self.item.kv.shape().head_dim / D::PACK;
        let queries = &batch.queries[self.rows.0..self.rows.1];
        for (out, &query) in scratch.queries.chunks_exact_mut(words).zip(queries) {
            let q = &self.item.args.q[query * words..][..words];
            // The head dimension is a multiple of 16, so this is all of it, without a call.
            for (out, q) in out.as_chunks_mut::<8>().0.iter_mut().zip(q.as_chunks::<8>().0) {
                *out = *q;
            }
        }
    }

    /// `q·k` of all rows and the keys of groups `groups.0..=groups.1`, 16 keys each.
    ///
    /// # Safety
    /// The scratch holds the queries of `rows` rows, and the groups lie in the split.
    #[inline(always)]
    unsafe fn scores<S: Simd, D: Elem>(
        &self,
        s: S,
        rows: usize,
        groups: (usize, usize),
        scratch: &mut Scratch,
    ) {
        let queries = scratch.queries.as_ptr();
        let words = self.item.kv.shape().head_dim / D::PACK;
        let mut group = groups.0;
        while group <= groups.1 {
            let k = self.halves.k[2 * group..].as_ptr();
            let out = scratch.scores.as_mut_ptr().cast::<f32>().wrapping_add(group * LANES);
            let left = groups.1 - group + 1;
            let step = if S::NV == 4 && left >= 4 {
                4
            } else if S::NV == 4 && left >= 2 {
                2
            } else {
                1
            };
            self.prefetch(s, 2 * group, 2 * (group + step));
            // SAFETY: by the contract; `left` groups remain.
            unsafe {
                match step {
                    4 if S::NV == 4 => {
                        by_rows!(rows, S, score_tile::<D, 4>(s, queries, words, k, out))
                    }
                    2 if S::NV == 4 => {
                        by_rows!(rows, S, score_tile::<D, 2>(s, queries, words, k, out))
                    }
                    _ => by_rows!(rows, S, score_tile::<D, 1>(s, queries, words, k, out)),
                }
            }
            group += step;
        }
    }

    /// Asks for this tile's share of what comes after the scores of half-groups `start..end`:
    /// their values, and the keys in the same place of the next split.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, s: S, start: usize, end: usize) {
        let (tile, tiles) = self.share;
        for half in start..end {
            if half % tiles != tile {
                continue;
            }
            self.halves.prefetch(s, half, self.halves.v_offset);
            if let Some(next) = self.next {
                next.prefetch(s, half, 0);
            }
        }
    }

    /// Turns scores into probabilities, and folds maxima and sums into the batch.
    #[inline(always)]
    fn softmax<S: Simd, D: Elem>(
        &self,
        s: S,
        groups: (usize, usize),
        batch: &mut Batch,
        scratch: &mut Scratch,
    ) -> Fold {
        let rows = self.rows.1 - self.rows.0;
        let mut max = [f32::NEG_INFINITY; LANES];
        let mut sum = [0.0; MAX_TILE_ROWS];
        let mut active = [false; MAX_TILE_ROWS];
        for row in 0..rows {
            let seen = self.seen(batch.positions[self.rows.0 + row]);
            let softmax = Softmax { args: self.item.args, seen, groups };
            let (scores, probs) = (&mut scratch.scores[row], &mut scratch.probs[row]);
            if let Some(result) = softmax.run::<S, D>(s, scores, probs) {
                (max[row], sum[row]) = result;
                active[row] = true;
            }
        }
        let old_max = &mut batch.max[self.rows.0..].as_chunks_mut::<LANES>().0[0];
        let (old, new) = (s.load(old_max), s.load(&max));
        let joint = s.max(new, old);
        // A row without keys is NaN here if it had none before either; it is not used.
        let old = s.to_array(s.exp2(s.sub(old, joint)));
        let new = s.to_array(s.exp2(s.sub(new, joint)));
        s.store(joint, old_max);
        for row in 0..rows {
            if active[row] {
                let total = &mut batch.sum[self.rows.0 + row];
                *total = *total * old[row] + sum[row] * new[row];
            }
        }
        Fold { old, new, active }
    }
}

/// Scores of `R` rows and `16·NV` keys.
///
/// # Safety
/// `q` holds `R` rows of `words` words; `k` points at `2·NV` half-groups; `out` has `R` rows
/// [`SPLIT`] apart.
#[inline(always)]
unsafe fn score_tile<S: Simd, D: Elem, const R: usize, const NV: usize>(
    s: S,
    q: *const u32,
    words: usize,
    k: *const *const u32,
    out: *mut f32,
) {
    let mut halves = [[std::ptr::null::<u32>(); 2]; NV];
    for (v, pair) in halves.iter_mut().enumerate() {
        // SAFETY: by the contract.
        *pair = unsafe { [*k.add(2 * v), *k.add(2 * v + 1)] };
    }
    let mut acc = [[s.splat(0.0); NV]; R];
    for word in 0..words {
        let mut b = [s.splat_w(0); NV];
        for (b, [lo, hi]) in b.iter_mut().zip(&halves) {
            // SAFETY: a half-group holds `words` rows of 8 keys.
            *b = unsafe { s.join_w(&*lo.add(word * HALF).cast(), &*hi.add(word * HALF).cast()) };
        }
        // SAFETY: by the contract.
        unsafe { step::<S, D, R, NV>(s, &mut acc, (q.add(word), words), &b) };
    }
    for (r, row) in acc.iter().enumerate() {
        for (v, &sum) in row.iter().enumerate() {
            // SAFETY: by the contract.
            s.store(sum, unsafe { &mut *out.add(r * SPLIT + v * LANES).cast() });
        }
    }
}

/// `P·V` of a tile in a split, and its fold.
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

impl Values<'_> {
    /// # Safety
    /// The pointers cover `rows` rows and the words.
    #[inline(always)]
    unsafe fn accumulate<S: Simd, D: Elem>(&self, s: S, rows: usize) {
        let mut at = 0;
        while at < self.d {
            let left = (self.d - at) / LANES;
            // SAFETY: by the contract; `left` vectors of the head remain.
            unsafe {
                if S::NV == 4 && left >= 4 {
                    by_rows!(rows, S, value_tile::<D, 4>(s, self, at));
                    at += 4 * LANES;
                } else if S::NV == 4 && left >= 2 {
                    by_rows!(rows, S, value_tile::<D, 2>(s, self, at));
                    at += 2 * LANES;
                } else {
                    by_rows!(rows, S, value_tile::<D, 1>(s, self, at));
                    at += LANES;
                }
            }
        }
    }

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

/// Elements `at..at + 16·NV` of the outputs of `R` rows.
///
/// # Safety
/// As for [`Values::accumulate`], and the elements are in the head.
#[inline(always)]
unsafe fn value_tile<S: Simd, D: Elem, const R: usize, const NV: usize>(
    s: S,
    values: &Values<'_>,
    at: usize,
) {
    let mut acc = [[s.splat(0.0); NV]; R];
    let mut b = [s.splat_w(0); NV];
    for word in values.words.0..values.words.1 {
        // SAFETY: by the contract.
        unsafe {
            let row = values.row::<D>(word, at);
            for (v, b) in b.iter_mut().enumerate() {
                *b = s.load_w(&*row.add(v * LANES).cast());
            }
            step::<S, D, R, NV>(s, &mut acc, (values.probs.add(word), SPLIT), &b);
        }
    }
    if values.half_word {
        let first_element = s.splat_w(0xffff);
        // SAFETY: by the contract.
        unsafe {
            let row = values.row::<D>(values.words.1, at);
            for (v, b) in b.iter_mut().enumerate() {
                *b = s.and_w(s.load_w(&*row.add(v * LANES).cast()), first_element);
            }
            step::<S, D, R, NV>(s, &mut acc, (values.probs.add(values.words.1), SPLIT), &b);
        }
    }
    for (r, row) in acc.iter().enumerate() {
        if !values.fold.active[r] {
            continue;
        }
        let (old, new) = (s.splat(values.fold.old[r]), s.splat(values.fold.new[r]));
        for (v, &sum) in row.iter().enumerate() {
            // SAFETY: by the contract.
            let o = unsafe { &mut *values.out.add(r * values.d + at + v * LANES).cast() };
            // +0 turns −0, which trailing 0 · v may or may not have turned, into +0.
            let sum = s.add(sum, s.splat(0.0));
            s.store(s.fma(sum, new, s.mul(s.load(o), old)), o);
        }
    }
}
