//! The block pool and its free list do what a naive model does, and keep their invariant after
//! every operation.

use proptest::prelude::*;
use quire_engine::kv::{BlockHash, BlockId, BlockPool, CacheScope, FreeList, PrefixHasher};
use std::collections::{BTreeMap, VecDeque};

const TABLES: usize = 5;
/// Histories that blocks may hold.
const NAMES: u32 = 6;

#[derive(Clone, Debug)]
enum PoolOp {
    /// Appends blocks to a table.
    Allocate {
        table: usize,
        count: usize,
    },
    /// Replaces an empty table by the start of another.
    Retain {
        from: usize,
        to: usize,
        len: usize,
    },
    /// Gives a table back.
    Release {
        table: usize,
    },
    /// Names a block of a table, written by the next step.
    Publish {
        table: usize,
        at: usize,
        name: u32,
    },
    /// Appends the block with this name, if there is one.
    Share {
        table: usize,
        name: u32,
    },
    /// All that was named is written.
    Written,
    /// What is not written will not be.
    Withdraw,
    Reset,
}

fn pool_op() -> impl Strategy<Value = PoolOp> {
    let table = 0..TABLES;
    prop_oneof![
        3 => (table.clone(), 0..6usize)
            .prop_map(|(table, count)| PoolOp::Allocate { table, count }),
        1 => (table.clone(), table.clone(), 1..8usize)
            .prop_map(|(from, to, len)| PoolOp::Retain { from, to, len }),
        3 => table.clone().prop_map(|table| PoolOp::Release { table }),
        4 => (table.clone(), 0..8usize, 0..NAMES)
            .prop_map(|(table, at, name)| PoolOp::Publish { table, at, name }),
        3 => (table, 0..NAMES).prop_map(|(table, name)| PoolOp::Share { table, name }),
        1 => Just(PoolOp::Written),
        1 => Just(PoolOp::Withdraw),
        1 => (0..6u8).prop_filter_map("seldom", |n| (n == 0).then_some(PoolOp::Reset)),
    ]
}

/// A pool written for clarity: a list of free ids, names of blocks, and counts taken from the
/// tables.
struct NaivePool {
    free: VecDeque<u32>,
    tables: [Vec<u32>; TABLES],
    /// By block: its name, and whether it is written.
    names: BTreeMap<u32, (u32, bool)>,
    num_evictions: u64,
}

impl NaivePool {
    fn is_held(&self, id: u32) -> bool {
        self.tables.iter().flatten().any(|&held| held == id)
    }

    fn find(&self, name: u32) -> Option<u32> {
        self.names.iter().find(|(_, (n, _))| *n == name).map(|(&id, _)| id)
    }

    fn allocate(&mut self, table: usize, count: usize) -> bool {
        if count > self.free.len() {
            return false;
        }
        for id in self.free.drain(..count) {
            self.num_evictions += u64::from(self.names.remove(&id).is_some());
            self.tables[table].push(id);
        }
        true
    }

    /// Cached blocks go to the end of the list, others to its start.
    fn release(&mut self, table: usize) {
        while let Some(id) = self.tables[table].pop() {
            match (self.is_held(id), self.names.contains_key(&id)) {
                (true, _) => {}
                (false, true) => self.free.push_back(id),
                (false, false) => self.free.push_front(id),
            }
        }
    }

    fn share(&mut self, table: usize, name: u32) -> Option<u32> {
        let id = self.find(name)?;
        self.free.retain(|&free| free != id);
        self.tables[table].push(id);
        Some(id)
    }

    /// Forgets names; the last forgotten of the free blocks is the next to be used.
    fn forget(&mut self, ids: impl IntoIterator<Item = u32>) {
        for id in ids {
            self.names.remove(&id);
            if !self.is_held(id) {
                self.free.retain(|&free| free != id);
                self.free.push_front(id);
            }
        }
    }
}

fn names() -> Vec<BlockHash> {
    let hasher = PrefixHasher::new("pool", 1);
    let root = hasher.root(CacheScope::default());
    (0..NAMES).map(|n| hasher.link(&root, &[n])).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_pool_is_the_naive_pool(
        num_blocks in 1..20usize,
        ops in prop::collection::vec(pool_op(), 1..80),
    ) {
        let hashes = names();
        let mut pool = BlockPool::new(num_blocks);
        let mut tables: [Vec<BlockId>; TABLES] = Default::default();
        let mut naive = NaivePool {
            free: (0..num_blocks as u32).collect(),
            tables: Default::default(),
            names: BTreeMap::new(),
            num_evictions: 0,
        };
        // Blocks named since the last write, in order.
        let mut unwritten: Vec<u32> = Vec::new();
        let mut step = 1;
        for op in ops {
            match op {
                PoolOp::Allocate { table, count } => {
                    let done = pool.allocate(count, &mut tables[table]);
                    prop_assert_eq!(done, naive.allocate(table, count));
                }
                PoolOp::Retain { from, to, len } if tables[to].is_empty() => {
                    let kept: Vec<BlockId> = tables[from].iter().take(len).copied().collect();
                    kept.iter().for_each(|&id| pool.retain(id));
                    tables[to] = kept;
                    naive.tables[to] = naive.tables[from].iter().take(len).copied().collect();
                }
                PoolOp::Retain { .. } => {}
                PoolOp::Release { table } => {
                    pool.release_all(&mut tables[table]);
                    naive.release(table);
                }
                PoolOp::Publish { table, at, name } => {
                    let id = tables[table].get(at).copied();
                    let Some(id) = id.filter(|id| !naive.names.contains_key(&id.0)) else { continue };
                    pool.publish(id, hashes[name as usize], step);
                    // A second block with the name does not get it.
                    if naive.find(name).is_none() {
                        naive.names.insert(id.0, (name, false));
                        unwritten.push(id.0);
                    }
                }
                PoolOp::Share { table, name } => {
                    let found = pool.find(&hashes[name as usize]);
                    found.iter().for_each(|&id| pool.share(id));
                    tables[table].extend(found);
                    prop_assert_eq!(found.map(|id| id.0), naive.share(table, name));
                }
                PoolOp::Written => {
                    pool.steps_written(step);
                    step += 1;
                    naive.names.values_mut().for_each(|name| name.1 = true);
                    unwritten.clear();
                }
                PoolOp::Withdraw => {
                    pool.withdraw_unwritten();
                    let mut gone = std::mem::take(&mut unwritten);
                    gone.retain(|id| naive.names.get(id).is_some_and(|name| !name.1));
                    let mut once = Vec::new();
                    gone.into_iter().for_each(|id| if !once.contains(&id) { once.push(id) });
                    naive.forget(once);
                }
                PoolOp::Reset => {
                    pool.reset_cache();
                    let all: Vec<u32> = naive.names.keys().copied().collect();
                    naive.forget(all);
                    unwritten.clear();
                }
            }
            pool.check_integrity(tables.iter().map(Vec::as_slice));
            let ids = tables.each_ref().map(|t| t.iter().map(|id| id.0).collect::<Vec<u32>>());
            prop_assert_eq!(&ids, &naive.tables);
            prop_assert_eq!(pool.num_free(), naive.free.len());
            prop_assert_eq!(pool.num_free() + pool.num_held(), num_blocks);
            let cached_free = naive.free.iter().filter(|id| naive.names.contains_key(id)).count();
            prop_assert_eq!(pool.num_cached_free(), cached_free);
            prop_assert_eq!(pool.num_cached(), naive.names.len());
            prop_assert_eq!(pool.num_evictions(), naive.num_evictions);
            for (name, hash) in hashes.iter().enumerate() {
                prop_assert_eq!(pool.find(hash).map(|id| id.0), naive.find(name as u32));
            }
        }
        for table in &mut tables {
            pool.release_all(table);
        }
        prop_assert_eq!(pool.num_free(), num_blocks);
    }

    #[test]
    fn the_free_list_is_a_queue_that_can_be_jumped(
        num_blocks in 1..20usize,
        ops in prop::collection::vec((0..4u8, any::<prop::sample::Index>()), 1..80),
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
                3 if !taken.is_empty() => {
                    let id = taken.swap_remove(at.index(taken.len()));
                    list.push_front(id);
                    queue.push_front(id);
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
