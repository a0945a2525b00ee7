//! KV blocks: ids, the O(1) LRU free list, block tables, the reference-counted pool and the
//! prefix cache over it.
//!
//! Invariant, checked by [`BlockPool::check_integrity`] after every operation in tests: every
//! block is either on the free list with a count of zero, or held by exactly `ref_cnt` tables. A
//! block on the free list may still be known to the prefix cache; it is revived by a hit and
//! forgotten when it is reused.

mod block_pool;
mod free_list;
mod prefix;
mod table;

pub use block_pool::BlockPool;
pub use free_list::FreeList;
pub use prefix::{BlockHash, CacheScope, PrefixHasher};
pub use table::BlockTable;

/// Block sizes the engine accepts, in tokens.
pub const BLOCK_SIZES: [usize; 6] = [8, 16, 32, 64, 128, 256];

/// Index of a KV block in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}
