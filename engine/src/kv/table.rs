//! The blocks of one sequence, in order.

use super::BlockId;

/// Block table: token `i` of the sequence is in entry `i / block_size`.
///
/// Where every layer attends through a sliding window, leading blocks that left it are freed;
/// their entries stay, as null, so that the others keep their index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockTable {
    num_freed: usize,
    blocks: Vec<BlockId>,
}

impl BlockTable {
    /// A table whose first `num_freed` entries are null.
    pub(crate) fn with_freed(num_freed: usize) -> Self {
        BlockTable { num_freed, blocks: Vec::new() }
    }

    /// Entries, null ones included.
    pub fn len(&self) -> usize {
        self.num_freed + self.blocks.len()
    }

    /// No entry at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Leading null entries.
    pub fn num_freed(&self) -> usize {
        self.num_freed
    }

    /// The blocks held, from entry [`BlockTable::num_freed`] on.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Entry `index`; `None` when it is null.
    pub fn get(&self, index: usize) -> Option<BlockId> {
        assert!(index < self.len(), "entry {index} of a table of {}", self.len());
        index.checked_sub(self.num_freed).map(|i| self.blocks[i])
    }

    /// The blocks held, for the pool to append to.
    pub(crate) fn blocks_mut(&mut self) -> &mut Vec<BlockId> {
        &mut self.blocks
    }

    /// Puts another block at entry `index` and returns the one that was there.
    pub(crate) fn replace(&mut self, index: usize, with: BlockId) -> BlockId {
        std::mem::replace(&mut self.blocks[index - self.num_freed], with)
    }

    /// Makes the entries before `index` null and returns the blocks they held.
    pub(crate) fn free_before(&mut self, index: usize) -> impl Iterator<Item = BlockId> + '_ {
        let count = index.saturating_sub(self.num_freed).min(self.blocks.len());
        self.num_freed += count;
        self.blocks.drain(..count)
    }

    /// Cuts the table after `len` entries and returns the blocks cut off.
    pub(crate) fn split_off(&mut self, len: usize) -> Vec<BlockId> {
        let at = len.saturating_sub(self.num_freed).min(self.blocks.len());
        self.blocks.split_off(at)
    }
}
