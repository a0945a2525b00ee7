//! Random configurations and the operations of a run.

use super::device::Failure;
use super::fake::mix;
use crate::rng::Rng;
use quire_engine::kv::PrefixHasher;
use quire_engine::scheduler::{Policy, Preemption, PreemptionCosts, SchedulerConfig, StopRules};

/// What a run is about, besides its operations.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Limits and policies.
    pub scheduler: SchedulerConfig,
    /// Steps that may be under way while another is planned.
    pub run_ahead: usize,
    /// Tokens are below this; small, so that stop tokens and equal continuations come up.
    pub vocab: u64,
    /// Where prompts come from.
    pub tree: u64,
}

/// A prompt: a path in a tree of shared prefixes, or an earlier conversation, and more.
#[derive(Clone, Debug)]
pub struct PromptSpec {
    /// Branches taken, or the conversation that goes on.
    pub start: PromptStart,
    /// Tokens after that, and where they come from.
    pub more: (usize, u64),
}

/// How a prompt starts.
#[derive(Clone, Debug)]
pub enum PromptStart {
    /// Branches of the tree.
    Path(Vec<u8>),
    /// One of the conversations that have ended, where there are any.
    FollowUp(usize),
}

/// Something that happens. Requests are named by their place among the live ones.
#[derive(Clone, Debug)]
pub enum Op {
    /// A request comes in.
    Add {
        /// Its prompt; cut to the context in most cases.
        prompt: PromptSpec,
        /// Leave it as long as it is.
        uncut: bool,
        /// When it ends.
        rules: StopRules,
        /// Samples, or the width in beams.
        n: usize,
        /// With beams.
        beams: bool,
        /// Smaller is more urgent.
        priority: i32,
        /// What it shares its cache with.
        salt: Option<String>,
        /// Computes all of its prompt.
        skip_cache: bool,
        /// Cannot be planned ahead.
        needs_history: bool,
    },
    /// Plans a step, where one may be planned, and computes the oldest one under way where no
    /// more may be.
    Step,
    /// Plans a step.
    Plan,
    /// Computes the oldest step under way.
    Compute,
    /// It fails.
    Fail(Failure),
    /// A request is aborted.
    Abort(usize),
    /// A single sample is.
    AbortSample(usize),
    /// The prefix cache is emptied.
    ResetCache,
    /// Another budget of tokens.
    Budget(usize),
}

/// A configuration.
pub fn config(rng: &mut Rng) -> SimConfig {
    let block_size = 2 + rng.below(15);
    let max_model_len = 6 + rng.below(60);
    let least = max_model_len.div_ceil(block_size);
    let num_blocks =
        least + [0, rng.below(3), rng.below(8), rng.below(3 * least + 1)][rng.below(4)];
    let costs = PreemptionCosts {
        recompute_ns_per_token: 1 + rng.below(8) as u64,
        swap_ns_per_block: 1 + rng.below(40) as u64,
    };
    let policy = match rng.below(9) {
        0 => Policy::Static,
        1..4 => Policy::Priority { aging_steps: 1 + rng.below(24) as u32 },
        _ => Policy::Fcfs,
    };
    let preemption =
        [Preemption::Recompute, Preemption::Swap, Preemption::Swap, Preemption::Auto(costs)];
    let scheduler = SchedulerConfig {
        max_num_seqs: 1 + rng.below(8),
        max_num_batched_tokens: 1 + below_one_of(rng, &[4, 12, 64]),
        max_model_len,
        block_size,
        num_blocks,
        num_swap_blocks: [0, rng.below(6), rng.below(20), 100][rng.below(4)],
        prefix_cache: (rng.below(5) > 1).then(|| PrefixHasher::new("sim", block_size)),
        window: (rng.below(3) == 0).then(|| 1 + rng.below(max_model_len)),
        policy,
        preemption: preemption[rng.below(4)],
    };
    SimConfig {
        scheduler,
        run_ahead: rng.below(2),
        vocab: 2 + rng.below(22) as u64,
        tree: rng.next_u64(),
    }
}

/// The operations of a run.
pub fn ops(rng: &mut Rng, config: &SimConfig) -> Vec<Op> {
    let calm = rng.below(3) == 0;
    (0..20 + rng.below(140)).map(|_| op(rng, config, calm)).collect()
}

fn op(rng: &mut Rng, config: &SimConfig, calm: bool) -> Op {
    match rng.below(100) {
        0..18 => add(rng, config),
        18..66 => Op::Step,
        66..76 => Op::Plan,
        76..86 => Op::Compute,
        _ if calm => Op::Step,
        86..89 => Op::Fail(
            [Failure::AtOnce, Failure::AfterTransfers, Failure::WhileWriting][rng.below(3)],
        ),
        89..93 => Op::Abort(rng.below(1000)),
        93..96 => Op::AbortSample(rng.below(1000)),
        96 => Op::ResetCache,
        97 => Op::Budget(1 + rng.below(24)),
        _ => Op::Step,
    }
}

fn add(rng: &mut Rng, config: &SimConfig) -> Op {
    let beams = rng.below(5) == 0 && config.scheduler.policy != Policy::Static;
    let mut stop_token_ids: Vec<u32> =
        (0..rng.below(3)).map(|_| rng.below(config.vocab as usize) as u32).collect();
    stop_token_ids.sort_unstable();
    let start = match rng.below(4) {
        0 => PromptStart::FollowUp(rng.below(1000)),
        _ => PromptStart::Path((0..rng.below(6)).map(|_| rng.below(2) as u8).collect()),
    };
    Op::Add {
        prompt: PromptSpec { start, more: (rng.below(8), rng.next_u64()) },
        uncut: rng.below(12) == 0,
        rules: StopRules {
            max_tokens: 1 + below_one_of(rng, &[4, 20]),
            min_tokens: [0, rng.below(6)][rng.below(2)],
            stop_token_ids,
        },
        n: if beams || rng.below(3) == 0 { 1 + rng.below([5, 4][usize::from(beams)]) } else { 1 },
        beams,
        priority: rng.below(4) as i32 - 1,
        salt: (rng.below(8) == 0).then(|| "ab"[rng.below(2)..][..1].to_owned()),
        skip_cache: rng.below(10) == 0,
        needs_history: rng.below(6) == 0,
    }
}

fn below_one_of(rng: &mut Rng, ends: &[usize]) -> usize {
    let end = ends[rng.below(ends.len())];
    rng.below(end)
}

/// The tokens at the end of `path` in the tree, from the root on.
pub fn tree_tokens(config: &SimConfig, path: &[u8]) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut node = config.tree;
    for depth in 0..=path.len() {
        let len = 1 + mix(node) % 9;
        tokens.extend((0..len).map(|i| (mix(node ^ (i + 1)) % config.vocab) as u32));
        node = mix(node.wrapping_add(path.get(depth).map_or(0, |&b| u64::from(b) + 1)));
    }
    tokens
}

/// `len` tokens from a seed.
pub fn more_tokens(config: &SimConfig, (len, seed): (usize, u64)) -> Vec<u32> {
    (0..len as u64).map(|i| (mix(seed ^ i) % config.vocab) as u32).collect()
}
