//! One item of attention: a range of a sequence's tokens for the query heads of one KV head.

use std::mem::MaybeUninit;

use super::split::{Halves, Scratch, Split};
use super::{AttnArgs, ITEM_ROWS, SPLIT};
use crate::dtype::{Bf16, Dtype, Elem, F32};
use crate::kv::{HALF, KvCache, MAX_HEAD_DIM};
use crate::ptr::SharedMut;
use crate::simd::{Kernel, LANES, Simd};
use crate::tile::tile_rows;

/// Tokens `tokens.0..tokens.1` of one sequence, the query heads of one KV head.
pub(super) struct Item<'a> {
    pub(super) args: &'a AttnArgs<'a>,
    pub(super) kv: &'a KvCache,
    pub(super) out: SharedMut<'a, u32>,
    pub(super) seq: usize,
    pub(super) head: usize,
    pub(super) tokens: (usize, usize),
}

/// Query rows, in the order of their tokens, and their running softmax.
pub(super) struct Batch {
    pub(super) rows: usize,
    /// Absolute position of each row; does not decrease.
    pub(super) positions: [usize; ITEM_ROWS],
    /// Index of each row among `[T][Hq]`.
    pub(super) queries: [usize; ITEM_ROWS],
    /// Largest score so far; padded so that whole vectors can be loaded.
    pub(super) max: [f32; ITEM_ROWS + LANES],
    /// Sum of the probabilities relative to `max`.
    pub(super) sum: [f32; ITEM_ROWS],
    /// `[rows][D]`.
    out: MaybeUninit<[f32; ITEM_ROWS * MAX_HEAD_DIM]>,
}

impl Batch {
    /// Outputs from row `row` on.
    #[inline(always)]
    pub(super) fn out(&mut self, row: usize, d: usize) -> *mut f32 {
        self.out.as_mut_ptr().cast::<f32>().wrapping_add(row * d)
    }
}

impl Kernel for Item<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.kv.shape().dtype {
            Dtype::F32 => self.batches::<S, F32>(s),
            Dtype::Bf16 => self.batches::<S, Bf16>(s),
        }
    }
}

impl Item<'_> {
    fn group(&self) -> usize {
        self.args.q_heads / self.kv.shape().kv_heads
    }

    /// First position that a row at `position` sees.
    #[inline(always)]
    pub(super) fn first_seen(&self, position: usize) -> usize {
        self.args.window.map_or(0, |window| (position + 1).saturating_sub(window as usize))
    }

    #[inline(always)]
    fn batches<S: Simd, D: Elem>(&self, s: S) {
        let rows = (self.tokens.1 - self.tokens.0) * self.group();
        let mut scratch = Scratch::new();
        for batch in 0..rows.div_ceil(ITEM_ROWS) {
            let (start, end) = tile_rows(rows, ITEM_ROWS, batch);
            let mut batch = self.batch(start, end);
            self.splits::<S, D>(s, &mut batch, &mut scratch);
            self.finish::<S, D>(s, &mut batch);
        }
    }

    /// Rows `start..end` of the item, before any key; the heads of a token are adjacent rows.
    fn batch(&self, start: usize, end: usize) -> Batch {
        let (rows, group) = (end - start, self.group());
        let mut batch = Batch {
            rows,
            positions: [0; ITEM_ROWS],
            queries: [0; ITEM_ROWS],
            max: [f32::NEG_INFINITY; ITEM_ROWS + LANES],
            sum: [0.0; ITEM_ROWS],
            out: MaybeUninit::uninit(),
        };
        let seq_end = self.args.query_start_loc[self.seq + 1] as usize;
        for (i, row) in (start..end).enumerate() {
            let (token, head) = (self.tokens.0 + row / group, row % group);
            batch.positions[i] = self.args.seq_lens[self.seq] as usize - (seq_end - token);
            batch.queries[i] = token * self.args.q_heads + self.head * group + head;
        }
        let len = rows * self.kv.shape().head_dim;
        // SAFETY: rows and head dimension are within the array; zero bytes are a valid `f32`.
        unsafe { batch.out(0, 0).write_bytes(0, len) };
        batch
    }

    /// Folds every split that some row sees.
    #[inline(always)]
    fn splits<S: Simd, D: Elem>(&self, s: S, batch: &mut Batch, scratch: &mut Scratch) {
        let (first, last) = (self.first_seen(batch.positions[0]), batch.positions[batch.rows - 1]);
        let tiles = batch.rows.div_ceil(S::MR);
        let halves_at =
            |base: usize| self.halves(base, first.max(base), last.min(base + SPLIT - 1));
        let mut base = first / SPLIT * SPLIT;
        let mut halves = halves_at(base);
        halves.prefetch_keys(s);
        while base <= last {
            let next = (base + SPLIT <= last).then(|| halves_at(base + SPLIT));
            for tile in 0..tiles {
                let split = Split {
                    item: self,
                    base,
                    halves: &halves,
                    next: next.as_ref(),
                    rows: tile_rows(batch.rows, S::MR, tile),
                    share: (tile, tiles),
                };
                split.fold::<S, D>(s, batch, scratch);
            }
            let Some(next) = next else { break };
            (base, halves) = (base + SPLIT, next);
        }
    }

    /// Divides by the sums and rounds to words.
    #[inline(always)]
    fn finish<S: Simd, D: Elem>(&self, s: S, batch: &mut Batch) {
        let d = self.kv.shape().head_dim;
        let words = d / D::PACK;
        for row in 0..batch.rows {
            // SAFETY: the row was initialised; an item has its own tokens and heads.
            let (values, out) = unsafe {
                let values = std::slice::from_raw_parts_mut(batch.out(row, d), d);
                (values, self.out.slice(batch.queries[row] * words, words))
            };
            let sum = s.splat(batch.sum[row]);
            for value in values.as_chunks_mut::<LANES>().0 {
                s.store(s.div(s.load(value), sum), value);
            }
            D::put(s, values, out);
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
        let mut k = [std::ptr::null(); SPLIT / HALF];
        for (half, k) in k.iter_mut().enumerate().take(last + 1).skip(first) {
            *k = locate(base + half * HALF);
        }
        let (low, high) = (k[first], k[last]);
        k[..first].fill(low);
        k[last + 1..].fill(high);
        Halves { k, seen: (first, last), words: shape.half_words(), v_offset: shape.side_words() }
    }
}
