//! The ragged input of one step and the layout of the KV cache.

use super::DType;

/// Input of one step: `S` sequences, `T` tokens in all, `R` rows that need logits.
///
/// Token `t` of sequence `s` (`query_start_loc[s] ≤ t < query_start_loc[s+1]`) has absolute
/// position `positions[t]` and is the last of its sequence when it equals `seq_lens[s] − 1`.
/// The arrays live across steps; [`ForwardInput::clear`] keeps their memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForwardInput {
    /// `[T]`
    pub token_ids: Vec<u32>,
    /// `[T]` absolute positions.
    pub positions: Vec<u32>,
    /// `[T]` block · block_size + offset; −1: do not write.
    pub slot_mapping: Vec<i64>,
    /// `[S + 1]` first token of each sequence.
    pub query_start_loc: Vec<i32>,
    /// `[S]` tokens in the cache once this step has written.
    pub seq_lens: Vec<i32>,
    /// `[S, max_blocks]` block ids in order; unused entries −1.
    pub block_table: Vec<i32>,
    /// Row length of `block_table`.
    pub max_blocks: usize,
    /// `[R]` tokens whose logits are wanted, ascending.
    pub logits_indices: Vec<u32>,
}

impl ForwardInput {
    /// Empties every array and sets the row length of the block table.
    pub fn clear(&mut self, max_blocks: usize) {
        self.token_ids.clear();
        self.positions.clear();
        self.slot_mapping.clear();
        self.query_start_loc.clear();
        self.query_start_loc.push(0);
        self.seq_lens.clear();
        self.block_table.clear();
        self.max_blocks = max_blocks;
        self.logits_indices.clear();
    }

    /// `T`.
    pub fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// `S`.
    pub fn num_seqs(&self) -> usize {
        self.seq_lens.len()
    }

    /// Asserts that the arrays agree with each other; a violation is a bug in the runner.
    pub fn check(&self, block_size: usize, num_blocks: usize) {
        let (t, s) = (self.num_tokens(), self.num_seqs());
        assert_eq!(self.positions.len(), t, "positions");
        assert_eq!(self.slot_mapping.len(), t, "slot_mapping");
        assert_eq!(self.query_start_loc.len(), s + 1, "query_start_loc");
        assert_eq!(self.query_start_loc[s] as usize, t, "query_start_loc end");
        assert_eq!(self.block_table.len(), s * self.max_blocks, "block_table");
        assert!(self.logits_indices.iter().all(|&i| (i as usize) < t), "logits_indices");
        let slots = (num_blocks * block_size) as i64;
        assert!(self.slot_mapping.iter().all(|&x| (-1..slots).contains(&x)), "slot_mapping range");
        for (i, &len) in self.seq_lens.iter().enumerate() {
            let query = self.query_start_loc[i + 1] - self.query_start_loc[i];
            assert!(query >= 1 && len >= query, "sequence {i}: query {query}, seq_len {len}");
            let used = (len as usize).div_ceil(block_size);
            assert!(used <= self.max_blocks, "sequence {i}: {used} blocks");
        }
    }
}

/// Shape of the paged KV cache: `[layer][block][2][kv_head][block_size][head_dim]`, the order
/// inside a block being the backend's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Decoder layers.
    pub num_layers: usize,
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Tokens a block holds.
    pub block_size: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Element type.
    pub dtype: DType,
}

impl KvLayout {
    /// Bytes of one block over all layers, or `None` on overflow.
    pub fn block_bytes(&self) -> Option<usize> {
        [2, self.block_size, self.num_kv_heads, self.head_dim, self.dtype.size()]
            .into_iter()
            .try_fold(self.num_layers, usize::checked_mul)
    }
}
