//! Counters of the scheduler.

/// What happened since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Sequences preempted to be computed anew.
    pub num_preempted_recompute: u64,
    /// Sequences preempted by copying their blocks to the host.
    pub num_preempted_swap: u64,
    /// Preemptions that were to swap and found no room on the host.
    pub num_swap_fallbacks: u64,
    /// Blocks copied to the host.
    pub num_blocks_swapped_out: u64,
    /// Blocks copied back.
    pub num_blocks_swapped_in: u64,
    /// Tokens of admitted sequences that were looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Those of them that were found.
    pub prefix_hits: u64,
    /// Sequences that took blocks over from a sample or beam of the same request.
    pub num_forks: u64,
    /// Blocks copied, or about to be when their step ran short of blocks, because somebody else
    /// holds them too.
    pub num_block_copies: u64,
    /// Blocks freed because they left every layer's window.
    pub num_window_freed: u64,
    /// Steps taken back because they failed.
    pub num_cancelled_steps: u64,
    /// Sequences that ended while a step that computes them was under way.
    pub num_ended_in_flight: u64,
    /// Tokens computed for padding.
    pub num_padding_tokens: u64,
}

impl SchedulerStats {
    /// Preemptions of either kind.
    pub fn num_preemptions(&self) -> u64 {
        self.num_preempted_recompute + self.num_preempted_swap
    }
}

/// How full the KV cache is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvUsage {
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Blocks held by live sequences, each counted once.
    pub num_held: usize,
    /// Blocks held only by steps under way.
    pub num_in_transit: usize,
    /// Free blocks that the prefix cache still knows.
    pub num_cached_free: usize,
    /// Tokens whose K and V live sequences hold, each slot counted once.
    pub num_live_tokens: usize,
    /// Slots of held blocks that hold no token.
    pub num_wasted_slots: usize,
    /// Host blocks held.
    pub num_swapped: usize,
}
