//! Limits and policies of the scheduler.

use crate::kv::PrefixHasher;

/// Limits of the scheduler; sizes are at least 1 unless they say otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Sequences in one step.
    pub max_num_seqs: usize,
    /// Tokens in one step, over all sequences.
    pub max_num_batched_tokens: usize,
    /// Tokens of one sequence, prompt and output.
    pub max_model_len: usize,
    /// Tokens a KV block holds.
    pub block_size: usize,
    /// KV blocks in the pool.
    pub num_blocks: usize,
    /// KV blocks in host memory, for sequences that are swapped out; may be 0.
    pub num_swap_blocks: usize,
    /// Names full blocks so that equal prefixes share them; `None`: nothing is shared but the
    /// prompt among the samples of one request.
    pub prefix_cache: Option<PrefixHasher>,
    /// The largest attention window, where every layer has one. Blocks that left it are freed.
    pub window: Option<usize>,
    /// Who comes first.
    pub policy: Policy,
    /// What becomes of the blocks of a preempted sequence.
    pub preemption: Preemption,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        SchedulerConfig {
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            max_model_len: 2048,
            block_size: 16,
            num_blocks: 1024,
            num_swap_blocks: 0,
            prefix_cache: None,
            window: None,
            policy: Policy::Fcfs,
            preemption: Preemption::Recompute,
        }
    }
}

/// Steps in which a waiting request gains one level of priority, unless set.
pub const DEFAULT_AGING_STEPS: u32 = 256;

/// Who comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// The smaller `priority` comes first, and preempts a larger one where seats or blocks are
    /// short. Every `aging_steps` steps of age count as one level, so that nothing starves.
    Priority {
        /// Steps that count as one level, at least 1.
        aging_steps: u32,
    },
    /// Classic static batching, the baseline that continuous batching is measured against: a
    /// batch is taken from the queue when the one before has ended, every sequence reserves
    /// `max_model_len` tokens, prompts are padded to the longest, and those that end early are
    /// padded until the last one ends.
    Static,
}

/// What becomes of the blocks of a preempted sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preemption {
    /// They are freed; the sequence is computed anew, as far as the prefix cache does not help.
    #[default]
    Recompute,
    /// They are copied to host memory and back; without room there, as `Recompute`.
    Swap,
    /// The cheaper of both by these costs.
    Auto(PreemptionCosts),
}

/// What preemption costs, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PreemptionCosts {
    /// To compute one token of a prompt.
    pub recompute_ns_per_token: u64,
    /// To copy one block one way.
    pub swap_ns_per_block: u64,
}

impl PreemptionCosts {
    /// Whether moving `blocks` blocks out and back beats computing `tokens` tokens.
    pub(super) fn prefers_swap(&self, tokens: usize, blocks: usize) -> bool {
        let recompute = self.recompute_ns_per_token.saturating_mul(tokens as u64);
        let swap = self.swap_ns_per_block.saturating_mul(2 * blocks as u64);
        swap < recompute
    }
}
