//! The pool of KV blocks: reference counts over an LRU free list.

use super::{BlockId, FreeList};

/// All KV blocks of the engine. A block is free, or held by `ref_cnt` block tables.
#[derive(Clone, Debug)]
pub struct BlockPool {
    ref_cnt: Vec<u32>,
    free: FreeList,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks.
    pub fn new(num_blocks: usize) -> Self {
        BlockPool { ref_cnt: vec![0; num_blocks], free: FreeList::full(num_blocks) }
    }

    /// Blocks in the pool.
    pub fn num_blocks(&self) -> usize {
        self.ref_cnt.len()
    }

    /// Blocks nobody holds.
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Blocks somebody holds.
    pub fn num_held(&self) -> usize {
        self.num_blocks() - self.num_free()
    }

    /// Appends `count` fresh blocks to `table`, least recently freed first, or changes nothing
    /// and returns `false` when fewer are free.
    #[must_use]
    pub fn allocate(&mut self, count: usize, table: &mut Vec<BlockId>) -> bool {
        if count > self.free.len() {
            return false;
        }
        for _ in 0..count {
            let id = self.free.pop_front().expect("counted above");
            assert_eq!(self.ref_cnt[id.index()], 0, "free block {} is held", id.0);
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

    /// Gives back a whole table, last block first, so that the start of a sequence (what others
    /// are most likely to share) is the last of it to be reused.
    pub fn release_table(&mut self, table: &mut Vec<BlockId>) {
        while let Some(id) = table.pop() {
            let count = &mut self.ref_cnt[id.index()];
            assert!(*count > 0, "block {} freed twice", id.0);
            *count -= 1;
            if *count == 0 {
                self.free.push_back(id);
            }
        }
    }

    /// Asserts the pool's invariant against every table in existence.
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn blocks_are_reused_least_recently_freed_first_and_tables_freed_last_first() {
        let mut pool = BlockPool::new(4);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(pool.allocate(2, &mut a) && pool.allocate(2, &mut b));
        pool.release_table(&mut b);
        pool.release_table(&mut a);
        let mut c = Vec::new();
        assert!(pool.allocate(4, &mut c));
        assert_eq!(c, [3, 2, 1, 0].map(BlockId));
    }

    #[test]
    fn a_shared_block_is_free_only_when_every_table_gave_it_back() {
        let mut pool = BlockPool::new(1);
        let mut a = Vec::new();
        assert!(pool.allocate(1, &mut a));
        let mut b = a.clone();
        pool.retain(b[0]);
        pool.release_table(&mut a);
        assert_eq!(pool.num_free(), 0);
        pool.check_integrity([b.as_slice()].into_iter());
        pool.release_table(&mut b);
        assert_eq!(pool.num_free(), 1);
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_double_free_is_an_assertion() {
        let mut pool = BlockPool::new(2);
        let mut table = Vec::new();
        assert!(pool.allocate(1, &mut table));
        let mut copy = table.clone();
        pool.release_table(&mut table);
        pool.release_table(&mut copy);
    }
}
