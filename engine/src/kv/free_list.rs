//! An intrusive doubly linked list over block ids, in the order in which they are to be reused.

use super::BlockId;

const NONE: u32 = u32::MAX;

/// Free blocks, the next to be reused first. Pop, push and remove are O(1) and allocate nothing.
///
/// Links live in two arrays indexed by block id, so a block can leave from the middle when a
/// later request finds its contents still wanted.
#[derive(Clone, Debug)]
pub struct FreeList {
    prev: Vec<u32>,
    next: Vec<u32>,
    linked: Vec<bool>,
    head: u32,
    tail: u32,
    len: usize,
}

impl FreeList {
    /// A list holding blocks `0..num_blocks` in order.
    pub fn full(num_blocks: usize) -> Self {
        assert!(num_blocks < NONE as usize, "{num_blocks} blocks do not fit block ids");
        let mut list = FreeList {
            prev: vec![NONE; num_blocks],
            next: vec![NONE; num_blocks],
            linked: vec![false; num_blocks],
            head: NONE,
            tail: NONE,
            len: 0,
        };
        for i in 0..num_blocks as u32 {
            list.push_back(BlockId(i));
        }
        list
    }

    /// Number of free blocks.
    pub fn len(&self) -> usize {
        self.len
    }

    /// No block is free.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether `id` is on the list.
    pub fn contains(&self, id: BlockId) -> bool {
        self.linked[id.index()]
    }

    /// Appends a block, to be reused last. It must not be on the list.
    pub fn push_back(&mut self, id: BlockId) {
        let i = id.index();
        assert!(!self.linked[i], "block {} freed twice", id.0);
        self.linked[i] = true;
        self.prev[i] = self.tail;
        self.next[i] = NONE;
        match self.tail {
            NONE => self.head = id.0,
            tail => self.next[tail as usize] = id.0,
        }
        self.tail = id.0;
        self.len += 1;
    }

    /// Prepends a block, to be taken next: for one whose content nobody can want again. It must
    /// not be on the list.
    pub fn push_front(&mut self, id: BlockId) {
        let i = id.index();
        assert!(!self.linked[i], "block {} freed twice", id.0);
        self.linked[i] = true;
        self.prev[i] = NONE;
        self.next[i] = self.head;
        match self.head {
            NONE => self.tail = id.0,
            head => self.prev[head as usize] = id.0,
        }
        self.head = id.0;
        self.len += 1;
    }

    /// Takes the block that is next to be reused.
    pub fn pop_front(&mut self) -> Option<BlockId> {
        if self.head == NONE {
            return None;
        }
        let id = BlockId(self.head);
        self.remove(id);
        Some(id)
    }

    /// Takes a given block off the list. It must be on it.
    pub fn remove(&mut self, id: BlockId) {
        let i = id.index();
        assert!(self.linked[i], "block {} is not free", id.0);
        let (prev, next) = (self.prev[i], self.next[i]);
        match prev {
            NONE => self.head = next,
            p => self.next[p as usize] = next,
        }
        match next {
            NONE => self.tail = prev,
            n => self.prev[n as usize] = prev,
        }
        self.linked[i] = false;
        self.len -= 1;
    }

    /// The blocks, the next to be reused first.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let mut at = self.head;
        std::iter::from_fn(move || {
            (at != NONE).then(|| {
                let id = BlockId(at);
                at = self.next[id.index()];
                id
            })
        })
    }
}
