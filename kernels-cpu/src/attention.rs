//! Paged attention, prefill and decode in one arithmetic.
//!
//! Keys are walked in splits of 256 absolute positions. Within a split: scores of the keys that
//! some row of the tile sees, masked by selection; `m = max`; `p = 2^(s − m)`; `l = Σp` by lane,
//! then in the fixed tree; P rounded to the cache's type; `o = P·V` in the order of the keys. A
//! split is folded into the row's `(M, L, O)`, which starts from `(−∞, 0, 0)`, by one formula.
//!
//! The rows of a tile share the walk and nothing else. A key that a row does not see has `p = 0`,
//! and adding `0 · v` to a sum changes no bit; keys that no row of the tile sees are not read, so
//! what lies in free slots never takes part.

use std::mem::MaybeUninit;

use crate::ctx::Ctx;
use crate::dtype::{Bf16, Dtype, Elem, F32};
use crate::kv::{HALF, KvCache, MAX_HEAD_DIM};
use crate::ptr::SharedMut;
use crate::simd::{Kernel, LANES, Simd, dispatch};
use crate::tile::{by_rows, step, tile_rows};

/// Positions in a split.
const SPLIT: usize = 256;

/// Half-groups in a split.
const HALVES: usize = SPLIT / HALF;

/// Query rows of an item at most: the keys and values of a split come from L2 for all its tiles.
const ITEM_ROWS: usize = 48;

/// Rows of the widest register tile.
const MAX_TILE_ROWS: usize = 6;

/// Inputs of [`attention`] for S sequences with T tokens in this step.
#[derive(Clone, Copy)]
pub struct AttnArgs<'a> {
    /// `[T][Hq][words(D)]`.
    pub q: &'a [u32],
    /// Query heads, a multiple of the cache's heads.
    pub q_heads: usize,
    /// Layer of the cache.
    pub layer: usize,
    /// `[S + 1]` first token of each sequence, then T.
    pub query_start_loc: &'a [i32],
    /// `[S]` tokens of each sequence, those of this step included.
    pub seq_lens: &'a [i32],
    /// `[S][max_blocks]`; entries of blocks that no row sees are not read.
    pub block_table: &'a [i32],
    /// Row length of the block table.
    pub max_blocks: usize,
    /// Factor on `q·k`.
    pub scale: f32,
    /// Position p sees key j if `j ≤ p < j + window`.
    pub window: Option<u32>,
    /// `cap · tanh(score / cap)` in place of the score.
    pub softcap: Option<f32>,
}

/// Causal attention of every token over its sequence in the cache.
///
/// The tokens of a sequence are its last, in order. `out` is `[T][words(Hq·D)]`.
/// Panics if a length does not fit or a block that is read is out of range.
pub fn attention(ctx: &Ctx, args: &AttnArgs<'_>, kv: &KvCache, out: &mut [u32]) {
    let tokens = args.check(kv);
    assert_eq!(out.len(), args.q.len(), "words of {tokens} tokens' heads");
    let kv_heads = kv.shape().kv_heads;
    let group = args.q_heads / kv_heads;
    let item_tokens = (ITEM_ROWS / group).max(1);
    let out = SharedMut::new(out);
    // One item for each token and head, most of which are empty: no list of items is needed.
    // Late tokens see the most keys, so they come first.
    ctx.pool.for_each(tokens * kv_heads, |_, item| {
        let (token, head) = (tokens - 1 - item / kv_heads, item % kv_heads);
        let starts = args.query_start_loc;
        let seq = starts.partition_point(|&start| start as usize <= token) - 1;
        let (start, end) = (starts[seq] as usize, starts[seq + 1] as usize);
        if (token - start).is_multiple_of(item_tokens) {
            let last = end.min(token + item_tokens);
            dispatch(ctx.isa, Item { args, kv, out, seq, head, tokens: (token, last) });
        }
    });
}

impl AttnArgs<'_> {
    /// Checks the lengths and returns the number of tokens.
    fn check(&self, kv: &KvCache) -> usize {
        let (shape, seqs) = (kv.shape(), self.seq_lens.len());
        assert_eq!(self.query_start_loc.len(), seqs + 1, "starts of {seqs} sequences");
        assert_eq!(self.block_table.len(), seqs * self.max_blocks, "block tables");
        assert_eq!(self.query_start_loc[0], 0, "start of the first sequence");
        assert!(
            self.q_heads > 0 && self.q_heads.is_multiple_of(shape.kv_heads),
            "{} query heads over {} KV heads",
            self.q_heads,
            shape.kv_heads
        );
        assert!(self.window != Some(0), "a window of 0 sees no key");
        for (starts, &len) in self.query_start_loc.windows(2).zip(self.seq_lens) {
            let step = starts[1].checked_sub(starts[0]);
            assert!(
                step.is_some_and(|step| 0 <= step && step <= len),
                "tokens {starts:?} of a sequence of {len}"
            );
            let slots = self.max_blocks * shape.block_size;
            assert!(len as usize <= slots, "sequence of {len} in {slots} slots");
        }
        let tokens = self.query_start_loc[seqs] as usize;
        let words = self.q_heads * shape.dtype.words(shape.head_dim);
        assert_eq!(self.q.len(), tokens * words, "words of {tokens} tokens' queries");
        tokens
    }
}

/// Tokens `tokens.0..tokens.1` of one sequence, the query heads of one KV head.
struct Item<'a> {
    args: &'a AttnArgs<'a>,
    kv: &'a KvCache,
    out: SharedMut<'a, u32>,
    seq: usize,
    head: usize,
    tokens: (usize, usize),
}

impl Kernel for Item<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.kv.shape().dtype {
            Dtype::F32 => self.row_batches::<S, F32>(s),
            Dtype::Bf16 => self.row_batches::<S, Bf16>(s),
        }
    }
}

/// The running softmax of a batch of rows.
struct State {
    max: [f32; ITEM_ROWS],
    sum: [f32; ITEM_ROWS],
    /// `[ITEM_ROWS][D]`.
    out: MaybeUninit<[f32; ITEM_ROWS * MAX_HEAD_DIM]>,
}

/// Scratch of one tile in one split.
#[repr(align(64))]
struct Scratch {
    /// Scores, then probabilities.
    scores: [[f32; SPLIT]; MAX_TILE_ROWS],
    /// Probabilities in words.
    probs: [[u32; SPLIT]; MAX_TILE_ROWS],
    /// The tile's queries, `words(D)` apart.
    queries: [u32; MAX_TILE_ROWS * MAX_HEAD_DIM],
}

/// The half-groups of a split: K, with V at a constant distance. Those that no row sees repeat
/// one that some row does, so that scores can be computed for whole vectors.
struct Halves {
    k: [*const u32; HALVES],
    v_offset: usize,
}

/// Keys a row sees, relative to the split; may be empty (`first > last`).
#[derive(Clone, Copy)]
struct Seen {
    first: isize,
    last: isize,
}

/// The fold of a tile's split: factors on the old and the new output of each row.
struct Fold {
    old: [f32; MAX_TILE_ROWS],
    new: [f32; MAX_TILE_ROWS],
    /// Whether the row sees any key of the split.
    active: [bool; MAX_TILE_ROWS],
}

impl Item<'_> {
    fn group(&self) -> usize {
        self.args.q_heads / self.kv.shape().kv_heads
    }

    /// Absolute position of row `row`; the group's heads are rows of one token.
    #[inline(always)]
    fn position(&self, row: usize) -> usize {
        let token = self.tokens.0 + row / self.group();
        let past_end = self.args.query_start_loc[self.seq + 1] as usize - token;
        self.args.seq_lens[self.seq] as usize - past_end
    }

    /// First position that row `row` sees.
    #[inline(always)]
    fn first_seen(&self, row: usize) -> usize {
        self.args.window.map_or(0, |w| (self.position(row) + 1).saturating_sub(w as usize))
    }

    /// Index of row `row` among `[T][Hq]`.
    #[inline(always)]
    fn query_index(&self, row: usize) -> usize {
        let group = self.group();
        (self.tokens.0 + row / group) * self.args.q_heads + self.head * group + row % group
    }

    #[inline(always)]
    fn row_batches<S: Simd, D: Elem>(&self, s: S) {
        let rows = (self.tokens.1 - self.tokens.0) * self.group();
        let mut scratch = Scratch {
            scores: [[0.0; SPLIT]; MAX_TILE_ROWS],
            probs: [[0; SPLIT]; MAX_TILE_ROWS],
            queries: [0; MAX_TILE_ROWS * MAX_HEAD_DIM],
        };
        for batch in 0..rows.div_ceil(ITEM_ROWS) {
            self.batch::<S, D>(s, tile_rows(rows, ITEM_ROWS, batch), &mut scratch);
        }
    }

    /// Rows `start..end`, at most [`ITEM_ROWS`].
    #[inline(always)]
    fn batch<S: Simd, D: Elem>(&self, s: S, (start, end): (usize, usize), scratch: &mut Scratch) {
        let (d, rows) = (self.kv.shape().head_dim, end - start);
        let mut state = State {
            max: [f32::NEG_INFINITY; ITEM_ROWS],
            sum: [0.0; ITEM_ROWS],
            out: MaybeUninit::uninit(),
        };
        // SAFETY: within the array; zero bytes are a valid `f32`.
        unsafe { state.out.as_mut_ptr().cast::<f32>().write_bytes(0, rows * d) };
        let (first, last) = (self.first_seen(start), self.position(end - 1));
        for split in first / SPLIT..=last / SPLIT {
            let base = split * SPLIT;
            let halves = self.halves(base, first.max(base), last.min(base + SPLIT - 1));
            for tile in 0..rows.div_ceil(S::MR) {
                let (a, b) = tile_rows(rows, S::MR, tile);
                let tile = Tile { item: self, rows: (start + a, start + b), base, halves: &halves };
                tile.split::<S, D>(s, a, &mut state, scratch);
            }
        }
        let words = d / D::PACK;
        for row in 0..rows {
            // SAFETY: the row was initialised; an item has its own tokens and heads.
            let (o, out) = unsafe {
                let o = state.out.as_mut_ptr().cast::<f32>().add(row * d);
                let out = self.out.slice(self.query_index(start + row) * words, words);
                (std::slice::from_raw_parts_mut(o, d), out)
            };
            let sum = s.splat(state.sum[row]);
            for o in o.as_chunks_mut::<LANES>().0 {
                s.store(s.div(s.load(o), sum), o);
            }
            D::put(s, o, out);
        }
    }

    /// The half-groups of the split at `base`, of which positions `first..=last` are seen.
    fn halves(&self, base: usize, first: usize, last: usize) -> Halves {
        let shape = self.kv.shape();
        let table = &self.args.block_table[self.seq * self.args.max_blocks..];
        let words = self.kv.words();
        let locate = |position: usize| {
            let entry = table[position / shape.block_size];
            let block = usize::try_from(entry).unwrap_or_else(|_| {
                panic!("block table entry {entry} at position {position} of row {}", self.seq)
            });
            let start = shape.block_start(self.args.layer, block)
                + self.head * shape.head_words()
                + position % shape.block_size / HALF * shape.half_words();
            words[start..].as_ptr()
        };
        let (first, last) = ((first - base) / HALF, (last - base) / HALF);
        let mut k = [std::ptr::null(); HALVES];
        for (half, k) in k.iter_mut().enumerate().take(last + 1).skip(first) {
            *k = locate(base + half * HALF);
        }
        let (low, high) = (k[first], k[last]);
        k[..first].fill(low);
        k[last + 1..].fill(high);
        Halves { k, v_offset: shape.side_words() }
    }
}

/// Query rows `rows.0..rows.1` of an item against the split at `base`.
struct Tile<'a> {
    item: &'a Item<'a>,
    rows: (usize, usize),
    base: usize,
    halves: &'a Halves,
}

impl Tile<'_> {
    /// What row `row` sees of the split.
    #[inline(always)]
    fn seen(&self, row: usize) -> Seen {
        let relative = |position: usize| position as isize - self.base as isize;
        Seen {
            first: relative(self.item.first_seen(row)).max(0),
            last: relative(self.item.position(row)).min(SPLIT as isize - 1),
        }
    }

    /// Folds the split into rows `at..` of `state`.
    #[inline(always)]
    fn split<S: Simd, D: Elem>(&self, s: S, at: usize, state: &mut State, scratch: &mut Scratch) {
        let rows = self.rows.1 - self.rows.0;
        // Positions do not decrease from row to row.
        let (first, last) = (self.seen(self.rows.0).first, self.seen(self.rows.1 - 1).last);
        if first > last {
            return;
        }
        let (first, last) = (first as usize, last as usize);
        self.copy_queries::<D>(scratch);
        let (group, last_group) = (first / LANES, last / LANES);
        // SAFETY: the queries of `rows` rows were copied; groups lie in the split, whose
        // half-groups are all valid.
        unsafe { self.scores::<S, D>(s, rows, (group, last_group), scratch) };
        let mut fold = Fold {
            old: [1.0; MAX_TILE_ROWS],
            new: [0.0; MAX_TILE_ROWS],
            active: [false; MAX_TILE_ROWS],
        };
        for row in 0..rows {
            let seen = self.seen(self.rows.0 + row);
            let (scores, probs) = (&mut scratch.scores[row], &mut scratch.probs[row]);
            let softmax = Softmax { args: self.item.args, seen, groups: (group, last_group) };
            if let Some((max, sum)) = softmax.run::<S, D>(s, scores, probs) {
                let old_max = state.max[at + row];
                let new_max = if max > old_max { max } else { old_max };
                let old = s.exp2_scalar(old_max - new_max);
                let new = s.exp2_scalar(max - new_max);
                state.sum[at + row] = state.sum[at + row] * old + sum * new;
                state.max[at + row] = new_max;
                (fold.old[row], fold.new[row], fold.active[row]) = (old, new, true);
            }
        }
        let d = self.item.kv.shape().head_dim;
        let values = Values {
            probs: scratch.probs.as_ptr().cast(),
            halves: self.halves,
            d,
            words: (first / D::PACK, (last + 1) / D::PACK),
            half_word: D::PACK == 2 && last % 2 == 0,
            fold: &fold,
            // SAFETY: row `at` is in the state.
            out: unsafe { state.out.as_mut_ptr().cast::<f32>().add(at * d) },
        };
        // SAFETY: probabilities of these rows and words were written; V of seen keys is valid.
        unsafe { values.accumulate::<S, D>(s, rows) };
    }

    /// Gathers the tile's queries at a constant distance.
    #[inline(always)]
    fn copy_queries<D: Elem>(&self, scratch: &mut Scratch) {
        let words = self.item.kv.shape().head_dim / D::PACK;
        for (i, row) in (self.rows.0..self.rows.1).enumerate() {
            let at = self.item.query_index(row) * words;
            scratch.queries[i * words..][..words]
                .copy_from_slice(&self.item.args.q[at..at + words]);
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
            // SAFETY: by the contract; `left` groups remain.
            unsafe {
                if S::NV == 4 && left >= 4 {
                    by_rows!(rows, S, score_tile::<D, 4>(s, queries, words, k, out));
                    group += 4;
                } else if S::NV == 4 && left >= 2 {
                    by_rows!(rows, S, score_tile::<D, 2>(s, queries, words, k, out));
                    group += 2;
                } else {
                    by_rows!(rows, S, score_tile::<D, 1>(s, queries, words, k, out));
                    group += 1;
                }
            }
        }
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

/// The softmax of one row in one split.
struct Softmax<'a> {
    args: &'a AttnArgs<'a>,
    seen: Seen,
    /// Groups of 16 keys that have scores, first and last.
    groups: (usize, usize),
}

impl Softmax<'_> {
    /// Turns scores into probabilities relative to their maximum, in words. Returns the maximum
    /// (base 2) and the sum, or nothing if the row sees no key.
    #[inline(always)]
    fn run<S: Simd, D: Elem>(
        &self,
        s: S,
        scores: &mut [f32; SPLIT],
        probs: &mut [u32; SPLIT],
    ) -> Option<(f32, f32)> {
        let (scores, _) = scores.as_chunks_mut::<LANES>();
        let minus_infinity = s.splat(f32::NEG_INFINITY);
        let (first, last) = (s.splat(self.seen.first as f32), s.splat(self.seen.last as f32));
        let mut max = minus_infinity;
        for group in self.groups.0..=self.groups.1 {
            let index = s.add(s.iota(), s.splat((group * LANES) as f32));
            let mut x = self.logits(s, s.load(&scores[group]));
            // Selected, not added: what lies in unseen slots may be NaN.
            x = s.select_lt(index, first, minus_infinity, x);
            x = s.select_lt(last, index, minus_infinity, x);
            max = s.max(x, max);
            s.store(x, &mut scores[group]);
        }
        let max = s.max_lane(max);
        let seen = self.seen.first <= self.seen.last && max != f32::NEG_INFINITY;
        // Any finite maximum makes all probabilities 0 where no key is seen.
        let shift = s.splat(if seen { max } else { 0.0 });
        let (mut sum, zero) = (s.splat(0.0), [0.0; LANES]);
        let words = 2 * LANES / D::PACK;
        for pair in self.groups.0 / 2..=self.groups.1 / 2 {
            let mut values = [zero; 2];
            for (i, value) in values.iter_mut().enumerate() {
                let group = 2 * pair + i;
                if self.groups.0 <= group && group <= self.groups.1 {
                    let p = s.exp2(s.sub(s.load(&scores[group]), shift));
                    sum = s.add(sum, p);
                    s.store(p, value);
                }
            }
            D::put(s, values.as_flattened(), &mut probs[pair * words..][..words]);
        }
        seen.then(|| (max, s.sum(sum)))
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
