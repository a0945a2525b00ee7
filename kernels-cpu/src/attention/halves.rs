//! Where the keys and values of a split are.

use super::{AttnArgs, SPLIT};
use crate::kv::{HALF, KvCache};
use crate::simd::Simd;

/// Words of a cache line.
pub(super) const LINE: usize = 16;

/// The half-groups of a split: K, with V at a constant distance. Those that no row sees repeat
/// one that some row does, so that scores can be computed for whole vectors.
pub(super) struct Halves {
    pub(super) k: [*const u32; SPLIT / HALF],
    /// First and last half-group that some row sees.
    pub(super) seen: (usize, usize),
    /// Words of a half-group.
    words: usize,
    pub(super) v_offset: usize,
}

impl Halves {
    /// Those of the split at position `base` of sequence `seq` for KV head `head`, of which
    /// positions `seen.0..=seen.1` are seen.
    ///
    /// Panics if a block that holds them is out of range.
    pub(super) fn new(
        (args, kv): (&AttnArgs<'_>, &KvCache),
        (seq, head): (usize, usize),
        base: usize,
        seen: (usize, usize),
    ) -> Self {
        let shape = kv.shape();
        let (per_block, half_words) = (shape.block_size / HALF, shape.half_words());
        let table = &args.block_table[seq * args.max_blocks..][..args.max_blocks];
        let locate = |block: usize| {
            let entry = usize::try_from(table[block]).unwrap_or_else(|_| {
                let position = block * shape.block_size;
                panic!("block table entry {} at position {position} of row {seq}", table[block])
            });
            let start = shape.block_start(args.layer, entry) + head * shape.head_words();
            kv.words()[start..][..shape.side_words() + shape.head_words()].as_ptr()
        };
        let (first, last) = ((seen.0 - base) / HALF, (seen.1 - base) / HALF);
        let (mut block, mut within) = (seen.0 / HALF / per_block, seen.0 / HALF % per_block);
        let mut start = locate(block);
        let mut k = [std::ptr::null(); SPLIT / HALF];
        for k in &mut k[first..=last] {
            if within == per_block {
                (block, within) = (block + 1, 0);
                start = locate(block);
            }
            *k = start.wrapping_add(within * half_words);
            within += 1;
        }
        let (low, high) = (k[first], k[last]);
        k[..first].fill(low);
        k[last + 1..].fill(high);
        Self { k, seen: (first, last), words: half_words, v_offset: shape.side_words() }
    }

    /// Asks for all keys.
    #[inline(always)]
    pub(super) fn prefetch_keys<S: Simd>(&self, s: S) {
        for half in self.seen.0..=self.seen.1 {
            self.prefetch_key(s, half);
        }
    }

    /// Asks for the keys of half-group `half`, if they are seen.
    #[inline(always)]
    pub(super) fn prefetch_key<S: Simd>(&self, s: S, half: usize) {
        if self.seen.0 <= half && half <= self.seen.1 {
            for line in (0..self.words).step_by(LINE) {
                s.prefetch_l2(self.k[half].wrapping_add(line));
            }
        }
    }
}
