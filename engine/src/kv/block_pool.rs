//! The pool of KV blocks: reference counts over an LRU free list, and the prefix cache.

use super::prefix::PrefixIndex;
use super::{BlockHash, BlockId, FreeList};

/// All KV blocks of one memory. A block is held by `ref_cnt` block tables, or on the free list;
/// there it may be cached: named by the history it holds, to be shared again or reused.
#[derive(Clone, Debug)]
pub struct BlockPool {
    ref_cnt: Vec<u32>,
    free: FreeList,
    index: PrefixIndex,
    num_cached_free: usize,
    num_evictions: u64,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks.
    pub fn new(num_blocks: usize) -> Self {
        BlockPool {
            ref_cnt: vec![0; num_blocks],
            free: FreeList::full(num_blocks),
            index: PrefixIndex::new(num_blocks),
            num_cached_free: 0,
            num_evictions: 0,
        }
    }

    /// Blocks in the pool.
    pub fn num_blocks(&self) -> usize {
        self.ref_cnt.len()
    }

    /// Blocks nobody holds, cached ones included.
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Blocks nobody holds whose content may be shared again.
    pub fn num_cached_free(&self) -> usize {
        self.num_cached_free
    }

    /// Blocks somebody holds.
    pub fn num_held(&self) -> usize {
        self.num_blocks() - self.num_free()
    }

    /// Blocks the prefix cache can find.
    pub fn num_cached(&self) -> usize {
        self.index.len()
    }

    /// Cached blocks that were reused for something else.
    pub fn num_evictions(&self) -> u64 {
        self.num_evictions
    }

    /// Tables that hold `id`.
    pub fn ref_cnt(&self, id: BlockId) -> u32 {
        self.ref_cnt[id.index()]
    }

    /// Appends `count` fresh blocks to `table`, or changes nothing and returns `false` when
    /// fewer are free. Blocks without content come first, then cached ones, least recently
    /// freed first; those are forgotten.
    #[must_use]
    pub fn allocate(&mut self, count: usize, table: &mut Vec<BlockId>) -> bool {
        if count > self.free.len() {
            return false;
        }
        for _ in 0..count {
            let id = self.free.pop_front().expect("counted above");
            assert_eq!(self.ref_cnt[id.index()], 0, "free block {} is held", id.0);
            if self.index.remove(id) {
                self.num_cached_free -= 1;
                self.num_evictions += 1;
            }
            self.ref_cnt[id.index()] = 1;
            table.push(id);
        }
        true
    }

    /// Counts one more table holding `id`, which must be held already.
    pub fn retain(&mut self, id: BlockId) {
        assert!(self.ref_cnt[id.index()] > 0, "block {} is free", id.0);
        self.ref_cnt[id.index()] += 1;
    }

    /// The block with this history, held or free. It stays where it is: see
    /// [`BlockPool::share`].
    pub fn find(&self, hash: &BlockHash) -> Option<BlockId> {
        self.index.get(hash)
    }

    /// Counts one more table holding the cached block `id`, reviving it where nobody held it.
    pub fn share(&mut self, id: BlockId) {
        if self.ref_cnt[id.index()] == 0 {
            assert!(self.index.is_named(id), "block {} is free and unknown", id.0);
            self.free.remove(id);
            self.num_cached_free -= 1;
        }
        self.ref_cnt[id.index()] += 1;
    }

    /// Makes the full block `id`, whose last token is written by `step`, known as `hash`. Where
    /// another block is known by it, that one stays the one to share.
    pub fn publish(&mut self, id: BlockId, hash: BlockHash, step: u64) {
        assert!(self.ref_cnt[id.index()] > 0, "block {} is free", id.0);
        self.index.insert(id, hash, step);
    }

    /// Records that every step up to `step` has written its blocks.
    pub fn steps_written(&mut self, step: u64) {
        self.index.written(step);
    }

    /// Forgets the blocks that were published for steps which will not come.
    pub fn withdraw_unwritten(&mut self) {
        for id in self.index.take_unwritten() {
            self.forget(id);
        }
    }

    /// Forgets every cached block: nothing computed so far is shared with later sequences.
    pub fn reset_cache(&mut self) {
        for i in 0..self.num_blocks() {
            self.forget(BlockId(i as u32));
        }
        self.index.take_unwritten();
    }

    fn forget(&mut self, id: BlockId) {
        if self.index.remove(id) && self.ref_cnt[id.index()] == 0 {
            self.num_cached_free -= 1;
            self.free.remove(id);
            self.free.push_front(id);
        }
    }

    /// One table less holds `id`.
    pub fn release(&mut self, id: BlockId) {
        let count = &mut self.ref_cnt[id.index()];
        assert!(*count > 0, "block {} freed twice", id.0);
        *count -= 1;
        if *count > 0 {
            return;
        }
        if self.index.is_named(id) {
            self.num_cached_free += 1;
            self.free.push_back(id);
        } else {
            self.free.push_front(id);
        }
    }

    /// Gives back all of `blocks`, last first, so that the start of a sequence (what others are
    /// most likely to share) is the last of it to be reused.
    pub fn release_all(&mut self, blocks: &mut Vec<BlockId>) {
        while let Some(id) = blocks.pop() {
            self.release(id);
        }
    }

    /// Asserts the pool's invariants against every table in existence.
    pub fn check_integrity<'a>(&self, tables: impl Iterator<Item = &'a [BlockId]>) {
        let mut held = vec![0u32; self.num_blocks()];
        for id in tables.flatten() {
            held[id.index()] += 1;
        }
        assert_eq!(held, self.ref_cnt, "ref_cnt differs from the tables");
        let free: Vec<_> = self.free.iter().collect();
        assert_eq!(free.len(), self.free.len(), "free list length");
        let unheld = held.iter().filter(|&&c| c == 0).count();
        assert_eq!(free.len(), unheld, "free blocks and unheld blocks");
        assert!(free.iter().all(|id| held[id.index()] == 0), "a held block is on the free list");
        let cached = free.iter().filter(|&&id| self.index.is_named(id)).count();
        assert_eq!(cached, self.num_cached_free, "cached free blocks");
        self.index.check_integrity();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{CacheScope, PrefixHasher};

    fn name(tokens: [u32; 2]) -> BlockHash {
        let hasher = PrefixHasher::new("test", 2);
        hasher.link(&hasher.root(CacheScope::default()), &tokens)
    }

    #[test]
    fn allocation_is_all_or_nothing() {
        let mut pool = BlockPool::new(3);
        let mut table = Vec::new();
        assert!(!pool.allocate(4, &mut table));
        assert!(table.is_empty());
        assert_eq!(pool.num_free(), 3);
        assert!(pool.allocate(3, &mut table));
        pool.check_integrity([table.as_slice()].into_iter());
    }

    #[test]
    fn cached_blocks_are_reused_last_and_the_start_of_a_sequence_after_its_end() {
        let mut pool = BlockPool::new(5);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(pool.allocate(2, &mut a) && pool.allocate(2, &mut b));
        for (i, &id) in a.iter().enumerate() {
            pool.publish(id, name([i as u32; 2]), 1);
        }
        pool.release_all(&mut a);
        pool.release_all(&mut b);
        assert_eq!((pool.num_free(), pool.num_cached_free()), (5, 2));
        let mut c = Vec::new();
        assert!(pool.allocate(4, &mut c));
        assert_eq!(c, [2, 3, 4, 1].map(BlockId));
        assert_eq!((pool.num_evictions(), pool.num_cached()), (1, 1));
        assert_eq!(pool.find(&name([0; 2])), Some(BlockId(0)));
        assert_eq!(pool.find(&name([1; 2])), None);
        pool.check_integrity([c.as_slice()].into_iter());
    }

    #[test]
    fn a_hit_revives_a_free_block_and_shares_a_held_one() {
        let mut pool = BlockPool::new(2);
        let mut a = Vec::new();
        assert!(pool.allocate(1, &mut a));
        let id = a[0];
        pool.publish(id, name([7, 8]), 1);
        pool.share(id);
        assert_eq!(pool.ref_cnt(id), 2);
        pool.release(id);
        pool.release_all(&mut a);
        pool.share(id);
        assert_eq!((pool.ref_cnt(id), pool.num_cached_free()), (1, 0));
        pool.check_integrity([[id].as_slice()].into_iter());
    }

    #[test]
    fn a_reset_forgets_held_and_free_blocks_alike() {
        let mut pool = BlockPool::new(2);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(pool.allocate(1, &mut a) && pool.allocate(1, &mut b));
        pool.publish(a[0], name([1, 1]), 1);
        pool.publish(b[0], name([2, 2]), 1);
        pool.release_all(&mut b);
        pool.reset_cache();
        assert_eq!((pool.num_cached(), pool.num_cached_free(), pool.num_free()), (0, 0, 1));
        pool.check_integrity([a.as_slice()].into_iter());
    }

    #[test]
    fn a_shared_block_is_free_only_when_every_table_gave_it_back() {
        let mut pool = BlockPool::new(1);
        let mut a = Vec::new();
        assert!(pool.allocate(1, &mut a));
        let mut b = a.clone();
        pool.retain(b[0]);
        pool.release_all(&mut a);
        assert_eq!(pool.num_free(), 0);
        pool.check_integrity([b.as_slice()].into_iter());
        pool.release_all(&mut b);
        assert_eq!(pool.num_free(), 1);
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_double_free_is_an_assertion() {
        let mut pool = BlockPool::new(2);
        let mut table = Vec::new();
        assert!(pool.allocate(1, &mut table));
        let mut copy = table.clone();
        pool.release_all(&mut table);
        pool.release_all(&mut copy);
    }
}
