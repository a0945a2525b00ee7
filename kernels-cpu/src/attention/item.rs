//! One item of attention: a range of a sequence's tokens for the query heads of one KV head.

use std::sync::atomic::{AtomicU32, Ordering};

use super::batch::{Batch, QUERY_STRIDE};
use super::halves::Halves;
use super::plan::{Part, Unit};
use super::split::{MAX_STRIP_ROWS, STRIP_TILES, Scratch, Split};
use super::{AttnArgs, ITEM_ROWS, SPLIT};
use crate::dtype::{Bf16, Dtype, Elem, F32};
use crate::kv::{KvCache, MAX_HEAD_DIM};
use crate::ptr::SharedMut;
use crate::simd::{Kernel, LANES, Simd};
use crate::tile::tile_rows;

/// A unit and what it reads and writes.
pub(super) struct Item<'a> {
    pub(super) args: &'a AttnArgs<'a>,
    pub(super) kv: &'a KvCache,
    pub(super) out: SharedMut<'a, u32>,
    pub(super) unit: Unit,
    pub(super) partials: Partials<'a>,
}

/// Where a worker computes.
pub(super) struct Workspace {
    scratch: Scratch,
    /// The queries of a batch.
    queries: [[u32; QUERY_STRIDE]; ITEM_ROWS],
    /// Its outputs, `[rows][D]`.
    out: [f32; ITEM_ROWS * MAX_HEAD_DIM],
}

impl Workspace {
    pub(super) const fn new() -> Self {
        Self {
            scratch: Scratch::new(),
            queries: [[0; QUERY_STRIDE]; ITEM_ROWS],
            out: [0.0; ITEM_ROWS * MAX_HEAD_DIM],
        }
    }
}

/// Results of splits that are yet to be folded, and how many units of a token have left theirs.
#[derive(Clone, Copy)]
pub(super) struct Partials<'a> {
    /// `[splits][KV heads]`: maxima, sums and outputs of a KV head's query heads.
    pub(super) values: SharedMut<'a, f32>,
    pub(super) done: &'a [AtomicU32],
    /// Words of a KV head in one split.
    pub(super) words: usize,
}

impl<'a> Partials<'a> {
    /// Maxima, sums and outputs of `rows` query heads.
    ///
    /// # Safety
    /// Nobody else uses them meanwhile.
    unsafe fn get(
        self,
        index: usize,
        rows: usize,
    ) -> (&'a mut [f32], &'a mut [f32], &'a mut [f32]) {
        // SAFETY: by the contract.
        let all = unsafe { self.values.slice(index * self.words, self.words) };
        let (max, rest) = all.split_at_mut(rows);
        let (sum, out) = rest.split_at_mut(rows);
        (max, sum, out)
    }
}

/// The computing of an item.
pub(super) struct Compute<'a>(pub(super) &'a Item<'a>, pub(super) &'a mut Workspace);

impl Kernel for Compute<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.0.kv.shape().dtype {
            Dtype::F32 => self.0.all::<S, F32>(s, self.1),
            Dtype::Bf16 => self.0.all::<S, Bf16>(s, self.1),
        }
    }
}

impl Item<'_> {
    fn group(&self) -> usize {
        self.args.q_heads / self.kv.shape().kv_heads
    }

    #[inline(always)]
    fn all<S: Simd, D: Elem>(&self, s: S, workspace: &mut Workspace) {
        let tokens = self.unit.tokens;
        let rows = (tokens.1 - tokens.0) * self.group();
        let Workspace { scratch, queries, out } = workspace;
        for batch in 0..rows.div_ceil(ITEM_ROWS) {
            let rows = tile_rows(rows, ITEM_ROWS, batch);
            let mut batch = self.batch::<D>(rows, queries, out);
            if let Some(part) = self.unit.part {
                self.part::<S, D>(s, &mut batch, scratch, &part);
            } else {
                self.splits::<S, D>(s, &mut batch, scratch, None);
                self.finish::<S, D>(s, &mut batch);
            }
        }
    }

    /// Rows `start..end` of the item, before any key; the heads of a token are adjacent rows.
    #[inline(always)]
    fn batch<'b, D: Elem>(
        &self,
        (start, end): (usize, usize),
        queries: &'b mut [[u32; QUERY_STRIDE]; ITEM_ROWS],
        out: &'b mut [f32],
    ) -> Batch<'b> {
        let (group, d) = (self.group(), self.kv.shape().head_dim);
        let (rows, words) = (end - start, d / D::PACK);
        let seq_end = self.args.tokens(self.unit.seq).1;
        let (mut positions, mut indices) = ([0; ITEM_ROWS], [0; ITEM_ROWS]);
        for (i, row) in (start..end).enumerate() {
            let (token, head) = (self.unit.tokens.0 + row / group, row % group);
            positions[i] = self.args.seq_lens[self.unit.seq] as usize - (seq_end - token);
            indices[i] = token * self.args.q_heads + self.unit.head * group + head;
        }
        for (query, index) in queries.iter_mut().zip(&indices[..rows]) {
            let q = &self.args.q[index * words..][..words];
            // The head dimension is a multiple of 16, so this is all of it, without a call.
            for (query, q) in query.as_chunks_mut::<8>().0.iter_mut().zip(q.as_chunks::<8>().0) {
                *query = *q;
            }
        }
        let out = &mut out[..rows * d];
        let (max, sum) = ([0.0; ITEM_ROWS + LANES], [0.0; ITEM_ROWS]);
        let mut batch = Batch { rows, positions, indices, max, sum, queries, out };
        batch.restart();
        batch
    }

    /// Computes a part of the splits of a token; the last unit of the token folds all of them.
    #[inline(always)]
    fn part<S: Simd, D: Elem>(
        &self,
        s: S,
        batch: &mut Batch<'_>,
        scratch: &mut Scratch,
        part: &Part,
    ) {
        self.splits::<S, D>(s, batch, scratch, Some(part));
        let counter = self.partial(part, 0);
        // Releases this unit's results, and acquires those of the others for the last one.
        let before = self.partials.done[counter].fetch_add(1, Ordering::AcqRel);
        if before as usize + 1 == part.units {
            batch.restart();
            for split in 0..part.all {
                self.fold_partial(s, batch, part, split);
            }
            self.finish::<S, D>(s, batch);
        }
    }

    /// Folds every split that some row sees into the batch; with a part, leaves each split of it
    /// among the partial results instead.
    #[inline(always)]
    fn splits<S: Simd, D: Elem>(
        &self,
        s: S,
        batch: &mut Batch<'_>,
        scratch: &mut Scratch,
        part: Option<&Part>,
    ) {
        let (first, last) =
            (self.args.first_seen(batch.positions[0]), batch.positions[batch.rows - 1]);
        let tiles = batch.rows.div_ceil(S::MR);
        let strips = tiles.div_ceil(STRIP_TILES);
        let (mut split, end) =
            part.map_or((0, last / SPLIT - first / SPLIT + 1), |part| part.splits);
        let halves_at = |split: usize| {
            let base = (first / SPLIT + split) * SPLIT;
            let place = (self.unit.seq, self.unit.head);
            let seen = (first.max(base), last.min(base + SPLIT - 1));
            (base, Halves::new((self.args, self.kv), place, base, seen))
        };
        let (mut base, mut halves) = halves_at(split);
        halves.prefetch_keys(s);
        loop {
            let next = (split + 1 < end).then(|| halves_at(split + 1));
            for strip in 0..strips {
                let last = tiles.min((strip + 1) * STRIP_TILES) - 1;
                let tile = |tile| tile_rows(batch.rows, S::MR, tile);
                let split = Split {
                    args: self.args,
                    head_dim: self.kv.shape().head_dim,
                    base,
                    halves: &halves,
                    next: next.as_ref().map(|(_, halves)| halves),
                    rows: (tile(strip * STRIP_TILES).0, tile(last).1),
                    share: (strip, strips),
                };
                split.fold::<S, D>(s, batch, scratch);
            }
            if let Some(part) = part {
                self.leave(batch, part, split);
                batch.restart();
            }
            let Some(next) = next else { break };
            split += 1;
            (base, halves) = next;
        }
    }

    /// Index of the partial results of a split of the token.
    fn partial(&self, part: &Part, split: usize) -> usize {
        (part.partial + split) * self.kv.shape().kv_heads + self.unit.head
    }

    /// Leaves the batch, into which one split was folded, as the partial results of that split.
    fn leave(&self, batch: &mut Batch<'_>, part: &Part, split: usize) {
        // SAFETY: the split is this unit's alone until it counts itself done.
        let (max, sum, out) = unsafe { self.partials.get(self.partial(part, split), batch.rows) };
        max.copy_from_slice(&batch.max[..batch.rows]);
        sum.copy_from_slice(&batch.sum[..batch.rows]);
        out[..batch.out.len()].copy_from_slice(batch.out);
    }

    /// Folds the partial results of a split.
    #[inline(always)]
    fn fold_partial<S: Simd>(&self, s: S, batch: &mut Batch<'_>, part: &Part, split: usize) {
        // SAFETY: all units of the token are done, and this one was the last.
        let (max, sum, out) = unsafe { self.partials.get(self.partial(part, split), batch.rows) };
        let d = self.kv.shape().head_dim;
        for start in (0..batch.rows).step_by(MAX_STRIP_ROWS) {
            let end = batch.rows.min(start + MAX_STRIP_ROWS);
            let mut new_max = [f32::NEG_INFINITY; LANES];
            new_max[..end - start].copy_from_slice(&max[start..end]);
            let fold = batch.fold(s, start, &new_max, &sum[start..end]);
            for row in start..end {
                let new = out[row * d..][..d].as_chunks::<LANES>().0;
                let old = batch.out[row * d..][..d].as_chunks_mut::<LANES>().0;
                for (new, old) in new.iter().zip(old) {
                    fold.apply(s, row - start, s.load(new), old);
                }
            }
        }
    }

    /// Divides by the sums and rounds to words.
    #[inline(always)]
    fn finish<S: Simd, D: Elem>(&self, s: S, batch: &mut Batch<'_>) {
        let d = self.kv.shape().head_dim;
        let words = d / D::PACK;
        for row in 0..batch.rows {
            let sum = s.splat(batch.sum[row]);
            // SAFETY: a token's head is written by one unit.
            let out = unsafe { self.out.slice(batch.indices[row] * words, words) };
            let values = &mut batch.out[row * d..][..d];
            for value in values.as_chunks_mut::<LANES>().0 {
                s.store(s.div(s.load(value), sum), value);
            }
            D::put(s, values, out);
        }
    }
}
