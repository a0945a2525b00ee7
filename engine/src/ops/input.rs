//! The ragged input of one step, the block transfers before it and the layout of the KV cache.

use super::DType;
use std::collections::HashSet;

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
    ///
    /// So may be the first entries of a row (freed blocks): those of blocks that end at or before
    /// the first position that the sequence's first token of the step sees in any layer,
    /// `(b + 1) · block_size ≤ positions[query_start_loc[s]] + 1 − window` with the largest window
    /// of the model. That is exact to the block for every block size; a block of which any slot is
    /// seen is kept whole.
    pub block_table: Vec<i32>,
    /// Row length of `block_table`.
    pub max_blocks: usize,
    /// `[R]` tokens whose logits are wanted, ascending.
    pub logits_indices: Vec<u32>,
    /// Tokens that the step before chooses: (place in `token_ids`, row of that step), no place
    /// twice. The backend puts them in place; where they are, `token_ids` holds 0.
    pub placeholders: Vec<(u32, u32)>,
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
        self.placeholders.clear();
    }

    /// Puts tokens in the place of the placeholders; `chosen` are those of the rows of the step
    /// before.
    pub fn fill_placeholders(&mut self, chosen: &[u32]) {
        for (place, row) in self.placeholders.drain(..) {
            self.token_ids[place as usize] = chosen[row as usize];
        }
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
        assert!(self.placeholders.iter().all(|&(place, _)| (place as usize) < t), "placeholders");
        let slots = (num_blocks * block_size) as i64;
        assert!(self.slot_mapping.iter().all(|&x| (-1..slots).contains(&x)), "slot_mapping range");
        for (i, &len) in self.seq_lens.iter().enumerate() {
            let query = self.query_start_loc[i + 1] - self.query_start_loc[i];
            assert!(query >= 1 && len >= query, "sequence {i}: query {query}, seq_len {len}");
            let used = (len as usize).div_ceil(block_size);
            assert!(used <= self.max_blocks, "sequence {i}: {used} blocks");
            let row = &self.block_table[i * self.max_blocks..][..used];
            // Freed blocks come first and hold nothing that this step writes. Attention, which
            // knows the window of its layer, refuses one that it would have to read.
            let freed = row.iter().take_while(|&&block| block == -1).count();
            let writes = (len - query) as usize / block_size;
            assert!(freed <= writes, "sequence {i}: {freed} freed blocks, writes block {writes}");
            let in_pool = |&block: &i32| usize::try_from(block).is_ok_and(|b| b < num_blocks);
            assert!(row[freed..].iter().all(in_pool), "sequence {i}: block table {row:?}");
        }
    }
}

/// Copies of whole KV blocks, all layers, as pairs (source, destination).
///
/// They are made before the step's forward, list by list in the order of the fields. So a block
/// whose contents leave by `swap_out` may be the destination of a `swap_in` of the same step, and
/// the destination of a `swap_in` may be the source of a copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockTransfers {
    /// From the KV cache to the host cache; distinct destinations.
    pub swap_out: Vec<(u32, u32)>,
    /// From the host cache to the KV cache; distinct destinations.
    pub swap_in: Vec<(u32, u32)>,
    /// Within the KV cache; distinct destinations, none of which is also a source.
    pub copies: Vec<(u32, u32)>,
}

impl BlockTransfers {
    /// Empties the lists and keeps their memory.
    pub fn clear(&mut self) {
        self.swap_out.clear();
        self.swap_in.clear();
        self.copies.clear();
    }

    /// There is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.swap_out.is_empty() && self.swap_in.is_empty() && self.copies.is_empty()
    }

    /// Asserts what the fields promise, for pools of `num_blocks` blocks in the KV cache and
    /// `num_swap_blocks` in the host cache; a violation is a bug in the scheduler.
    pub fn check(&self, num_blocks: usize, num_swap_blocks: usize) {
        let lists = [
            ("swap_out", &self.swap_out, num_blocks, num_swap_blocks),
            ("swap_in", &self.swap_in, num_swap_blocks, num_blocks),
            ("copies", &self.copies, num_blocks, num_blocks),
        ];
        for (name, pairs, sources, destinations) in lists {
            let in_range = |&(from, to): &(u32, u32)| {
                (from as usize) < sources && (to as usize) < destinations
            };
            assert!(pairs.iter().all(in_range), "{name}: {pairs:?} of {sources} → {destinations}");
            let distinct: HashSet<u32> = pairs.iter().map(|pair| pair.1).collect();
            assert_eq!(distinct.len(), pairs.len(), "{name}: a destination twice in {pairs:?}");
            let overlap = name == "copies" && pairs.iter().any(|pair| distinct.contains(&pair.0));
            assert!(!overlap, "{name}: a destination is a source in {pairs:?}");
        }
    }
}

/// Shape of the paged KV cache: `[layer][block][2][kv_head][block_size][head_dim]`; the order of
/// layers and blocks, and that inside a block, is the backend's own.
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
