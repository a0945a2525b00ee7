//! Paged attention, prefill and decode in one arithmetic.
//!
//! Keys are walked in splits of 256 absolute positions. Within a split: scores of the keys that
//! some row of the tile sees, masked by selection; `m = max`; `p = 2^(s − m)`; `l = Σp` by lane,
//! then in the fixed tree; P rounded to the cache's type; `o = P·V` in the order of the keys. A
//! split is folded into the row's `(M, L, O)`, which starts from `(−∞, 0, 0)`, by one formula.
//!
//! The rows of a tile share the walk and nothing else. A key that a row does not see has `p = 0`,
//! and adding `0 · v` to a sum changes no bit where v is finite; keys that no row of the tile sees
//! are not read, so what lies in free slots never takes part. (Rows of one tile belong to one
//! sequence: only a value of its own that is not finite can reach an earlier row, and such a
//! sequence fails anyway.)

mod item;
mod softmax;
mod split;

use crate::ctx::Ctx;
use crate::kv::KvCache;
use crate::ptr::SharedMut;
use crate::simd::dispatch;
use item::Item;

/// Positions in a split.
const SPLIT: usize = 256;

/// Query rows of an item at most: the keys and values of a split come from L2 for all its tiles.
const ITEM_ROWS: usize = 48;

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
