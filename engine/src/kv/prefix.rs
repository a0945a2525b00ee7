//! The prefix cache: which block holds the K and V of which token history.
//!
//! A full block is named by a keyed BLAKE3 hash over the name of the block before it and its
//! tokens, so equal names mean equal histories from the first token on. The chain starts from a
//! root over everything else that K and V depend on or that keeps users apart: the model, the
//! block size, the adapter and the cache salt. Nothing random goes in, so names are the same in
//! every process.

use super::BlockId;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

/// Name of a full block's token history.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash([u8; 32]);

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What sequences must have in common, besides tokens, to share blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheScope<'a> {
    /// The adapter applied to the model.
    pub adapter: Option<&'a str>,
    /// A secret that keeps the cache entries of one user from another.
    pub salt: Option<&'a str>,
}

/// Names blocks. The key is derived from the model, the block size from the layout.
#[derive(Clone, PartialEq, Eq)]
pub struct PrefixHasher {
    key: [u8; 32],
    block_size: usize,
}

impl fmt::Debug for PrefixHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefixHasher").field("block_size", &self.block_size).finish_non_exhaustive()
    }
}

/// Longest input of one link: tag, parent, and the tokens of the largest block.
const MAX_LINK_BYTES: usize = 1 + 32 + 256 * 4;

impl PrefixHasher {
    /// A hasher for blocks of `block_size` tokens; names of another `model` are others.
    pub fn new(model: &str, block_size: usize) -> Self {
        assert!((1..=256).contains(&block_size), "block size {block_size}");
        PrefixHasher {
            key: blake3::derive_key("quire 2026 prefix cache", model.as_bytes()),
            block_size,
        }
    }

    /// Where the chain of `scope` starts.
    pub fn root(&self, scope: CacheScope<'_>) -> BlockHash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&[0]).update(&(self.block_size as u64).to_le_bytes());
        for (tag, value) in [(1u8, scope.adapter), (2, scope.salt)] {
            if let Some(text) = value {
                hasher.update(&[tag]).update(&(text.len() as u64).to_le_bytes());
                hasher.update(text.as_bytes());
            }
        }
        BlockHash(*hasher.finalize().as_bytes())
    }

    /// The name of the block that holds `tokens` after the block named `parent`.
    pub fn link(&self, parent: &BlockHash, tokens: &[u32]) -> BlockHash {
        assert_eq!(tokens.len(), self.block_size, "only full blocks have a name");
        let mut bytes = [0u8; MAX_LINK_BYTES];
        bytes[0] = 1;
        bytes[1..33].copy_from_slice(&parent.0);
        for (to, token) in bytes[33..].chunks_exact_mut(4).zip(tokens) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        let len = 33 + 4 * tokens.len();
        BlockHash(*blake3::keyed_hash(&self.key, &bytes[..len]).as_bytes())
    }
}

/// Takes the first bytes of a name as they are: they are a cryptographic hash already.
#[derive(Default)]
struct NameHasher(u64);

impl Hasher for NameHasher {
    fn write(&mut self, bytes: &[u8]) {
        if let Some(first) = bytes.first_chunk() {
            self.0 = u64::from_le_bytes(*first);
        }
    }

    fn write_usize(&mut self, _: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Names of blocks, both ways, and which of them no step has written yet.
#[derive(Clone, Debug, Default)]
pub(super) struct PrefixIndex {
    by_hash: HashMap<BlockHash, BlockId, BuildHasherDefault<NameHasher>>,
    /// By block.
    names: Vec<Option<BlockHash>>,
    /// (step that writes it, block, name), in the order of steps.
    unwritten: VecDeque<(u64, BlockId, BlockHash)>,
}

impl PrefixIndex {
    pub(super) fn new(num_blocks: usize) -> Self {
        PrefixIndex { names: vec![None; num_blocks], ..Default::default() }
    }

    pub(super) fn get(&self, hash: &BlockHash) -> Option<BlockId> {
        self.by_hash.get(hash).copied()
    }

    pub(super) fn is_named(&self, id: BlockId) -> bool {
        self.names[id.index()].is_some()
    }

    pub(super) fn len(&self) -> usize {
        self.by_hash.len()
    }

    /// Names `id`, which `step` writes, unless another block has the name.
    pub(super) fn insert(&mut self, id: BlockId, hash: BlockHash, step: u64) {
        debug_assert!(self.names[id.index()].is_none(), "block {} is named", id.0);
        if let std::collections::hash_map::Entry::Vacant(entry) = self.by_hash.entry(hash) {
            entry.insert(id);
            self.names[id.index()] = Some(hash);
            // A step that was begun and came to nothing may have named blocks for its number.
            // Taken for written too late is safe.
            let step = self.unwritten.back().map_or(step, |last| last.0.max(step));
            self.unwritten.push_back((step, id, hash));
        }
    }

    /// Forgets the name of `id`; whether it had one.
    pub(super) fn remove(&mut self, id: BlockId) -> bool {
        let Some(hash) = self.names[id.index()].take() else { return false };
        let removed = self.by_hash.remove(&hash);
        assert_eq!(removed, Some(id), "two blocks have one name");
        true
    }

    /// What steps up to `step` write is written.
    pub(super) fn written(&mut self, step: u64) {
        while self.unwritten.front().is_some_and(|&(s, ..)| s <= step) {
            self.unwritten.pop_front();
        }
    }

    /// The blocks named for steps that will not write them.
    pub(super) fn take_unwritten(&mut self) -> Vec<BlockId> {
        let entries = std::mem::take(&mut self.unwritten).into_iter();
        // A block reused since then has another name, or none.
        entries.filter(|(_, id, hash)| self.names[id.index()] == Some(*hash)).map(|e| e.1).collect()
    }

    pub(super) fn check_integrity(&self) {
        let named = self.names.iter().flatten().count();
        assert_eq!(named, self.by_hash.len(), "names both ways");
        for (hash, id) in &self.by_hash {
            assert_eq!(self.names[id.index()], Some(*hash), "block {}", id.0);
        }
        assert!(self.unwritten.iter().map(|e| e.0).is_sorted(), "unwritten blocks by step");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hasher() -> PrefixHasher {
        PrefixHasher::new("model", 4)
    }

    #[test]
    fn names_are_the_same_in_every_process() {
        let root = hasher().root(CacheScope::default());
        let first = hasher().link(&root, &[1, 2, 3, 4]);
        assert_eq!(format!("{root:?} {first:?}"), "ae57b228 9be0541d");
    }

    #[test]
    fn a_name_depends_on_everything_that_goes_in() {
        let h = hasher();
        let scope = |adapter, salt| h.root(CacheScope { adapter, salt });
        let root = scope(None, None);
        let names = [
            root,
            scope(Some("a"), None),
            scope(None, Some("a")),
            scope(Some("a"), Some("b")),
            scope(Some("b"), Some("a")),
            scope(Some("ab"), None),
            scope(Some(""), None),
            PrefixHasher::new("other", 4).root(CacheScope::default()),
            PrefixHasher::new("model", 8).root(CacheScope::default()),
            h.link(&root, &[1, 2, 3, 4]),
            h.link(&root, &[1, 2, 4, 3]),
            h.link(&scope(None, Some("a")), &[1, 2, 3, 4]),
            h.link(&h.link(&root, &[1, 2, 3, 4]), &[1, 2, 3, 4]),
        ];
        let distinct: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
    }

    #[test]
    fn what_a_cancelled_step_would_have_written_is_found_again() {
        let h = hasher();
        let root = h.root(CacheScope::default());
        let name = |t: u32| h.link(&root, &[t; 4]);
        let mut index = PrefixIndex::new(4);
        index.insert(BlockId(0), name(0), 1);
        index.insert(BlockId(1), name(1), 2);
        index.insert(BlockId(2), name(2), 2);
        // A second block with the same content stays unnamed.
        index.insert(BlockId(3), name(0), 2);
        assert!(!index.is_named(BlockId(3)));
        index.written(1);
        assert!(index.remove(BlockId(2)));
        assert_eq!(index.take_unwritten(), [BlockId(1)]);
        index.check_integrity();
        assert_eq!(index.get(&name(0)), Some(BlockId(0)));
        assert_eq!(index.get(&name(2)), None);
    }
}
