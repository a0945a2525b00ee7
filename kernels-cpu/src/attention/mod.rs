//! Paged attention, prefill and decode in one arithmetic.
//!
//! Keys are walked in splits of 256 absolute positions. Within a split: scores of the keys that
//! some row of the strip sees, masked by selection; `m = max`; `p = 2^(s − m)`; `l = Σp` by lane,
//! then in the fixed tree; P rounded to the cache's type; `o = P·V` in the order of the keys. A
//! split is folded into the row's `(M, L, O)`, which starts from `(−∞, 0, 0)`, by one formula.
//!
//! Who computes what is [`plan`]'s: a split of a long sequence may be another worker's, and is then
//! folded later, in the same order by the same formula.
//!
//! The rows of a strip share the walk and nothing else. A key that a row does not see has `p = 0`,
//! and adding `0 · v` to a sum changes no bit where v is finite; keys that no row of the strip
//! sees are not read, so what lies in free slots never takes part. (Rows of one strip belong to one
//! sequence: only a value of its own that is not finite can reach an earlier row, and such a
//! sequence fails anyway.)

mod batch;
mod halves;
mod item;
mod plan;
mod softmax;
mod split;

use std::cell::RefCell;

use crate::ctx::Ctx;
use crate::kv::KvCache;
use crate::ptr::SharedMut;
use crate::simd::dispatch;
use item::{Compute, Item, Partials, Workspace};
use plan::{Plan, partial_words};

pub use plan::{AttnScratch, AttnScratchShape};

/// Positions in a split.
const SPLIT: usize = 256;

/// Query rows of an item at most: the keys and values of a split come from L2 for all its tiles.
const ITEM_ROWS: usize = 48;

thread_local! {
    static WORKSPACE: RefCell<Workspace> = const { RefCell::new(Workspace::new()) };
}

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
/// The tokens of a sequence are its last, in order. `out` is `[T][words(Hq·D)]`. The bits do not
/// depend on `scratch`, which lets workers share a token with many keys.
/// Panics if a length does not fit or a block that is read is out of range.
pub fn attention(
    ctx: &Ctx,
    args: &AttnArgs<'_>,
    kv: &KvCache,
    scratch: &mut AttnScratch,
    out: &mut [u32],
) {
    let tokens = args.check(kv);
    assert_eq!(out.len(), args.q.len(), "words of {tokens} tokens' heads");
    let (kv_heads, head_dim) = (kv.shape().kv_heads, kv.shape().head_dim);
    let words = partial_words(args.q_heads / kv_heads, head_dim).expect("queries are in memory");
    let (plan, values, done) = Plan::new(args, kv_heads, (ctx.pool.threads(), words), scratch);
    let partials = Partials { values: SharedMut::new(values), done, words };
    let out = SharedMut::new(out);
    ctx.pool.for_each(plan.units(), |_, index| {
        let item = Item { args, kv, out, unit: plan.unit(index), partials };
        WORKSPACE.with_borrow_mut(|workspace| dispatch(ctx.isa, Compute(&item, workspace)));
    });
}

impl AttnArgs<'_> {
    /// First token of a sequence in this step, and the one after its last.
    #[inline(always)]
    fn tokens(&self, seq: usize) -> (usize, usize) {
        (self.query_start_loc[seq] as usize, self.query_start_loc[seq + 1] as usize)
    }

    /// First position that a token at `position` sees.
    #[inline(always)]
    fn first_seen(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window as usize))
    }

    /// Splits that the tokens of a sequence see.
    fn splits(&self, seq: usize) -> usize {
        let (start, end) = self.tokens(seq);
        if start == end {
            return 0;
        }
        let len = self.seq_lens[seq] as usize;
        (len - 1) / SPLIT - self.first_seen(len - (end - start)) / SPLIT + 1
    }

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
