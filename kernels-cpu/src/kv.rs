//! The paged KV cache: blocks of token slots, laid out for the attention kernel.
//!
//! ```text
//! block ─ layer ─┬─ K ─ head ─ half-group of 8 tokens: [words(D)][8]   word (d / PACK, token)
//!                └─ V ─ head ─ half-group of 8 tokens: [8 / PACK][D]   word (token / PACK, d)
//! ```
//! Scores then read K, and outputs read V, without any transposition or horizontal sum, and a
//! block size only has to be a multiple of 8. All layers of a block lie together: a block is copied
//! in one piece, and a short sequence touches few pages.

use crate::buf::{AllocError, Words};
use crate::ctx::Ctx;
use crate::dtype::Dtype;
use crate::ptr::SharedMut;

/// Tokens in a half-group.
pub(crate) const HALF: usize = 8;

/// Largest head dimension the attention kernel has scratch for.
pub const MAX_HEAD_DIM: usize = 256;

/// Shape of a [`KvCache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers.
    pub layers: usize,
    /// Blocks, each with slots in every layer; there may be none.
    pub num_blocks: usize,
    /// Tokens in a block, a multiple of 8.
    pub block_size: usize,
    /// K and V heads.
    pub kv_heads: usize,
    /// Elements of a head, a multiple of 16 up to [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Element type.
    pub dtype: Dtype,
}

/// Why a [`KvCache`] cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// The block size does not suit the layout.
    #[error("KV block size {0} is not a positive multiple of 8")]
    BlockSize(usize),
    /// The head dimension does not suit the kernels.
    #[error("head dimension {0} is not a multiple of 16 between 16 and {MAX_HEAD_DIM}")]
    HeadDim(usize),
    /// A count is zero.
    #[error("a KV cache needs at least one layer and head; got {0:?}")]
    Empty(KvShape),
    /// There are more blocks than block tables can name.
    #[error("{0} KV blocks exceed the limit of {max}", max = i32::MAX)]
    TooManyBlocks(usize),
    /// The size does not fit in an address.
    #[error("a KV cache of {0:?} exceeds the address space")]
    TooLarge(KvShape),
    /// The system refused the memory.
    #[error("KV cache: {0}")]
    Alloc(#[from] AllocError),
}

impl KvShape {
    /// Bytes of the whole cache, or what is wrong with the shape.
    pub fn bytes(&self) -> Result<usize, KvError> {
        if self.block_size == 0 || !self.block_size.is_multiple_of(HALF) {
            return Err(KvError::BlockSize(self.block_size));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(16) || self.head_dim > MAX_HEAD_DIM {
            return Err(KvError::HeadDim(self.head_dim));
        }
        if self.layers == 0 || self.kv_heads == 0 {
            return Err(KvError::Empty(*self));
        }
        if i32::try_from(self.num_blocks).is_err() {
            return Err(KvError::TooManyBlocks(self.num_blocks));
        }
        let factors =
            [self.num_blocks, 2, self.kv_heads, self.block_size, self.head_dim, self.dtype.size()];
        factors
            .into_iter()
            .try_fold(self.layers, usize::checked_mul)
            .filter(|&bytes| isize::try_from(bytes).is_ok())
            .ok_or(KvError::TooLarge(*self))
    }

    /// Words of one half-group of one head.
    pub(crate) fn half_words(&self) -> usize {
        self.dtype.words(self.head_dim) * HALF
    }

    /// Words of K (or V) of one head in one block.
    pub(crate) fn head_words(&self) -> usize {
        self.half_words() * (self.block_size / HALF)
    }

    /// Words of K (or V) of one block.
    pub(crate) fn side_words(&self) -> usize {
        self.head_words() * self.kv_heads
    }

    /// Words of one block in one layer.
    fn layer_words(&self) -> usize {
        2 * self.side_words()
    }

    /// First word of K of `block` in `layer`; V follows after [`Self::side_words`].
    pub(crate) fn block_start(&self, layer: usize, block: usize) -> usize {
        assert!(layer < self.layers, "layer {layer} of {}", self.layers);
        assert!(block < self.num_blocks, "KV block {block} of {}", self.num_blocks);
        (block * self.layers + layer) * self.layer_words()
    }
}

/// Keys and values of every layer.
pub struct KvCache {
    shape: KvShape,
    words: Words,
}

impl KvCache {
    /// A zeroed cache.
    pub fn new(shape: KvShape) -> Result<Self, KvError> {
        let words = Words::zeroed(shape.bytes()? / 4)?;
        Ok(Self { shape, words })
    }

    /// The shape.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Bytes all blocks take.
    pub fn bytes(&self) -> usize {
        4 * self.words.len()
    }

    /// Sets every word; tests poison a cache with `0xFFFF_FFFF`, NaN in either type.
    pub fn fill(&mut self, word: u32) {
        self.words.as_mut_slice().fill(word);
    }

    /// Copies blocks (source, destination) in every layer.
    ///
    /// Panics if a block is out of range, or if a destination is named twice or is also a source.
    pub fn copy_blocks(&mut self, ctx: &Ctx, pairs: &[(u32, u32)]) {
        let destinations = distinct_destinations(pairs);
        let is_destination = |block| destinations.binary_search(&block).is_ok();
        assert!(!pairs.iter().any(|pair| is_destination(pair.0)), "overlapping copies {pairs:?}");
        let shape = self.shape;
        let words = SharedMut::new(self.words.as_mut_slice());
        for_pairs(ctx, &shape, pairs, |layer, src, dst| {
            let (from, to) = (shape.block_start(layer, src), shape.block_start(layer, dst));
            // SAFETY: no destination is a source, and each is written once.
            unsafe { words.copy(from, to, shape.layer_words()) };
        });
    }

    /// Copies blocks (of `source`, of this cache) in every layer: swapping between a device pool
    /// and a host pool.
    ///
    /// Panics if a block is out of range, if a destination is named twice or if the caches differ
    /// in more than their number of blocks.
    pub fn copy_blocks_from(&mut self, ctx: &Ctx, source: &Self, pairs: &[(u32, u32)]) {
        let alike = KvShape { num_blocks: self.shape.num_blocks, ..source.shape };
        assert_eq!(self.shape, alike, "copying between KV caches of different shapes");
        distinct_destinations(pairs);
        let (shape, len) = (self.shape, self.shape.layer_words());
        let words = SharedMut::new(self.words.as_mut_slice());
        for_pairs(ctx, &shape, pairs, |layer, src, dst| {
            let from = &source.words()[source.shape.block_start(layer, src)..][..len];
            // SAFETY: each destination is written once.
            unsafe { words.slice(shape.block_start(layer, dst), len) }.copy_from_slice(from);
        });
    }

    /// Reads the key of one token and head, `[head_dim]`.
    ///
    /// Panics if an index is out of range.
    pub fn read_k(&self, layer: usize, block: usize, offset: usize, head: usize, out: &mut [f32]) {
        let pack = self.shape.dtype.pack();
        let start = self.half_start(layer, block, offset, head) + offset % HALF;
        self.read(out, |d| (start + d / pack * HALF, d % pack));
    }

    /// Reads the value of one token and head, `[head_dim]`.
    ///
    /// Panics if an index is out of range.
    pub fn read_v(&self, layer: usize, block: usize, offset: usize, head: usize, out: &mut [f32]) {
        let (pack, token) = (self.shape.dtype.pack(), offset % HALF);
        let start = self.half_start(layer, block, offset, head)
            + self.shape.side_words()
            + token / pack * self.shape.head_dim;
        self.read(out, |d| (start + d, token % pack));
    }

    /// The words of all layers.
    pub(crate) fn words(&self) -> &[u32] {
        self.words.as_slice()
    }

    /// The words of all layers.
    pub(crate) fn words_mut(&mut self) -> &mut [u32] {
        self.words.as_mut_slice()
    }

    /// First K word of the half-group that holds slot `offset` of `block`.
    fn half_start(&self, layer: usize, block: usize, offset: usize, head: usize) -> usize {
        let shape = &self.shape;
        assert!(offset < shape.block_size, "slot {offset} of a block of {}", shape.block_size);
        assert!(head < shape.kv_heads, "KV head {head} of {}", shape.kv_heads);
        shape.block_start(layer, block)
            + head * shape.head_words()
            + offset / HALF * shape.half_words()
    }

    /// `out[d]` from the word and element `place(d)`.
    fn read(&self, out: &mut [f32], place: impl Fn(usize) -> (usize, usize)) {
        assert_eq!(out.len(), self.shape.head_dim, "values of a head");
        for (d, value) in out.iter_mut().enumerate() {
            let (word, sub) = place(d);
            *value = self.shape.dtype.extract(self.words()[word], sub);
        }
    }
}

/// The destinations in order. Panics if one is named twice.
fn distinct_destinations(pairs: &[(u32, u32)]) -> Vec<u32> {
    let mut destinations: Vec<u32> = pairs.iter().map(|pair| pair.1).collect();
    destinations.sort_unstable();
    assert!(
        destinations.windows(2).all(|pair| pair[0] < pair[1]),
        "two copies over one block in {pairs:?}"
    );
    destinations
}

/// Calls `f(layer, source, destination)` for every pair in every layer, on all workers.
fn for_pairs(
    ctx: &Ctx,
    shape: &KvShape,
    pairs: &[(u32, u32)],
    f: impl Fn(usize, usize, usize) + Sync,
) {
    ctx.for_rows(shape.layers * pairs.len(), shape.layer_words(), |start, end| {
        for item in start..end {
            let (src, dst) = pairs[item / shape.layers];
            f(item % shape.layers, src as usize, dst as usize);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    const SHAPE: KvShape = KvShape {
        layers: 2,
        num_blocks: 3,
        block_size: 16,
        kv_heads: 2,
        head_dim: 16,
        dtype: Dtype::Bf16,
    };

    #[test]
    fn bad_shapes_are_errors() {
        let check = |shape: KvShape| shape.bytes().unwrap_err();
        assert_eq!(check(KvShape { block_size: 12, ..SHAPE }), KvError::BlockSize(12));
        assert_eq!(check(KvShape { block_size: 0, ..SHAPE }), KvError::BlockSize(0));
        assert_eq!(check(KvShape { head_dim: 24, ..SHAPE }), KvError::HeadDim(24));
        assert_eq!(check(KvShape { head_dim: 272, ..SHAPE }), KvError::HeadDim(272));
        assert!(matches!(check(KvShape { layers: 0, ..SHAPE }), KvError::Empty(_)));
        let blocks = i32::MAX as usize + 1;
        assert_eq!(check(KvShape { num_blocks: blocks, ..SHAPE }), KvError::TooManyBlocks(blocks));
        assert!(matches!(check(KvShape { layers: usize::MAX, ..SHAPE }), KvError::TooLarge(_)));
        assert_eq!(SHAPE.bytes(), Ok(2 * 3 * 2 * 2 * 16 * 16 * 2));
    }

    #[test]
    fn block_copies_cover_every_layer_and_nothing_else() {
        let ctx = Ctx::new(Isa::Portable, 2).unwrap();
        let mut cache = KvCache::new(SHAPE).unwrap();
        assert_eq!(Ok(cache.bytes()), SHAPE.bytes());
        for (i, word) in cache.words_mut().iter_mut().enumerate() {
            *word = i as u32;
        }
        let mut host = KvCache::new(KvShape { num_blocks: 2, ..SHAPE }).unwrap();
        host.copy_blocks_from(&ctx, &cache, &[(2, 0), (0, 1)]);
        let before = cache.words().to_vec();
        cache.copy_blocks(&ctx, &[(2, 0)]);
        let len = SHAPE.layer_words();
        let two = KvShape { num_blocks: 2, ..SHAPE };
        for layer in 0..2 {
            let at = |block| SHAPE.block_start(layer, block);
            assert_eq!(cache.words()[at(0)..][..len], before[at(2)..][..len]);
            for kept in [1, 2] {
                assert_eq!(cache.words()[at(kept)..][..len], before[at(kept)..][..len]);
            }
            for (block, source) in [(0, 2), (1, 0)] {
                let host = &host.words()[two.block_start(layer, block)..][..len];
                assert_eq!(*host, before[at(source)..][..len]);
            }
        }
    }

    #[test]
    fn a_cache_without_blocks_takes_no_memory() {
        let ctx = Ctx::new(Isa::Portable, 1).unwrap();
        let mut host = KvCache::new(KvShape { num_blocks: 0, ..SHAPE }).unwrap();
        assert_eq!(host.words().len(), 0);
        host.copy_blocks_from(&ctx, &KvCache::new(SHAPE).unwrap(), &[]);
    }

    #[test]
    fn copies_whose_order_matters_are_refused() {
        let ctx = Ctx::new(Isa::Portable, 2).unwrap();
        for pairs in [[(0, 1), (2, 1)], [(0, 1), (1, 2)], [(0, 3), (1, 2)]] {
            let mut cache = KvCache::new(SHAPE).unwrap();
            let copy = std::panic::AssertUnwindSafe(|| cache.copy_blocks(&ctx, &pairs));
            assert!(std::panic::catch_unwind(copy).is_err(), "{pairs:?}");
        }
    }
}
