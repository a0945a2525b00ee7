//! The block pool and its free list do what a naive model does, and keep their invariant after
//! every operation.

use proptest::prelude::*;
use quire_engine::kv::{BlockId, BlockPool, FreeList};
use std::collections::VecDeque;

#[derive(Clone, Debug)]
enum PoolOp {
    /// Appends blocks to a table.
    Allocate { table: usize, count: usize },
    /// Replaces an empty table by the start of another.
    Share { from: usize, to: usize, len: usize },
    /// Gives a table back.
    Release { table: usize },
}

fn pool_op() -> impl Strategy<Value = PoolOp> {
    let table = 0..5usize;
    prop_oneof![
        3 => (table.clone(), 0..8usize)
            .prop_map(|(table, count)| PoolOp::Allocate { table, count }),
        1 => (table.clone(), table.clone(), 1..8usize)
            .prop_map(|(from, to, len)| PoolOp::Share { from, to, len }),
        2 => table.prop_map(|table| PoolOp::Release { table }),
    ]
}

/// A pool written for clarity: a queue of free ids, and counts taken from the tables.
struct NaivePool {
    free: VecDeque<u32>,
    tables: [Vec<u32>; 5],
}

impl NaivePool {
    fn allocate(&mut self, table: usize, count: usize) -> bool {
        if count > self.free.len() {
            return false;
        }
        self.tables[table].extend(self.free.drain(..count));
        true
    }

    fn release(&mut self, table: usize) {
        for id in std::mem::take(&mut self.tables[table]).into_iter().rev() {
            if !self.tables.iter().flatten().any(|&held| held == id) {
                self.free.push_back(id);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_pool_is_the_naive_pool(
        num_blocks in 1..20usize,
        ops in prop::collection::vec(pool_op(), 1..60),
    ) {
        let mut pool = BlockPool::new(num_blocks);
        let mut tables: [Vec<BlockId>; 5] = Default::default();
        let free = (0..num_blocks as u32).collect();
        let mut naive = NaivePool { free, tables: Default::default() };
        for op in ops {
            match op {
                PoolOp::Allocate { table, count } => {
                    let done = pool.allocate(count, &mut tables[table]);
                    prop_assert_eq!(done, naive.allocate(table, count));
                }
                PoolOp::Share { from, to, len } if tables[to].is_empty() => {
                    let shared: Vec<BlockId> = tables[from].iter().take(len).copied().collect();
                    shared.iter().for_each(|&id| pool.retain(id));
                    tables[to] = shared;
                    naive.tables[to] = naive.tables[from].iter().take(len).copied().collect();
                }
                PoolOp::Share { .. } => {}
                PoolOp::Release { table } => {
                    pool.release_table(&mut tables[table]);
                    naive.release(table);
                }
            }
            pool.check_integrity(tables.iter().map(Vec::as_slice));
            let ids = tables.each_ref().map(|t| t.iter().map(|id| id.0).collect::<Vec<u32>>());
            prop_assert_eq!(&ids, &naive.tables);
            prop_assert_eq!(pool.num_free(), naive.free.len());
            prop_assert_eq!(pool.num_free() + pool.num_held(), num_blocks);
        }
        for table in &mut tables {
            pool.release_table(table);
        }
        prop_assert_eq!(pool.num_free(), num_blocks);
    }

    #[test]
    fn the_free_list_is_a_queue(
        num_blocks in 1..20usize,
        ops in prop::collection::vec((0..3u8, any::<prop::sample::Index>()), 1..80),
    ) {
        let mut list = FreeList::full(num_blocks);
        let mut queue: VecDeque<BlockId> = (0..num_blocks as u32).map(BlockId).collect();
        let mut taken: Vec<BlockId> = Vec::new();
        for (op, at) in ops {
            match op {
                0 => {
                    let id = list.pop_front();
                    prop_assert_eq!(id, queue.pop_front());
                    taken.extend(id);
                }
                1 if !taken.is_empty() => {
                    let id = taken.swap_remove(at.index(taken.len()));
                    list.push_back(id);
                    queue.push_back(id);
                }
                2 if !queue.is_empty() => {
                    let id = queue.remove(at.index(queue.len())).expect("in range");
                    list.remove(id);
                    taken.push(id);
                }
                _ => {}
            }
            prop_assert_eq!(list.iter().collect::<VecDeque<_>>(), queue.clone());
            prop_assert_eq!(list.len(), queue.len());
            prop_assert_eq!(list.is_empty(), queue.is_empty());
            prop_assert!(taken.iter().all(|&id| !list.contains(id)));
            prop_assert!(queue.iter().all(|&id| list.contains(id)));
        }
    }
}

/// A check that could not see a fault would prove nothing above.
#[test]
#[should_panic(expected = "ref_cnt differs")]
fn the_integrity_check_sees_a_lost_table() {
    let mut pool = BlockPool::new(2);
    let mut table = Vec::new();
    assert!(pool.allocate(1, &mut table));
    pool.check_integrity(std::iter::empty());
}
