//! Schedulers full of sequences that decode, and the rows that they sample: what benches of a step's
//! cost to the host run on.

use quire_engine::kv::PrefixHasher;
use quire_engine::runner::RowSource;
use quire_engine::sampling::{SamplingBatch, SamplingRow};
use quire_engine::scheduler::{
    NewSequence, Scheduler, SchedulerConfig, Sequence, StepPlan, StopRules,
};

/// Tokens of a KV block.
pub const BLOCK_SIZE: usize = 16;
/// Tokens of a prompt, and up to a block more.
pub const PROMPT: usize = 200;

/// Room for `num_seqs` sequences and more.
pub fn config(num_seqs: usize, prefix_cache: bool) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: num_seqs,
        max_num_batched_tokens: 1 << 20,
        max_model_len: 1 << 16,
        block_size: BLOCK_SIZE,
        num_blocks: num_seqs * 128 + (1 << 13),
        prefix_cache: prefix_cache.then(|| PrefixHasher::new("bench", BLOCK_SIZE)),
        ..SchedulerConfig::default()
    }
}

/// A sequence of `len` tokens that no other `first` begins.
pub fn sequence(len: usize, first: u32, max_tokens: usize) -> NewSequence {
    NewSequence {
        prompt: (0..len as u32).map(|i| first.wrapping_mul(7919) + i).collect(),
        rules: StopRules { max_tokens, ..StopRules::default() },
        ..NewSequence::default()
    }
}

/// Plans a step and updates it with one token for each sequence.
pub fn step(scheduler: &mut Scheduler, plan: &mut StepPlan) {
    scheduler.schedule(plan);
    let samples = plan.scheduled.iter().filter(|s| s.samples).count();
    let mut finished = Vec::new();
    scheduler.update(plan, std::iter::repeat_n(1, samples), &mut finished);
    assert!(finished.is_empty());
}

/// As many sequences that decode as `config` has seats, each at another place in its block.
pub fn decoding(config: SchedulerConfig) -> (Scheduler, StepPlan) {
    let num_seqs = config.max_num_seqs;
    let max_tokens = config.max_model_len / 2;
    let mut scheduler = Scheduler::new(config);
    for i in 0..num_seqs {
        let len = PROMPT + i % BLOCK_SIZE;
        scheduler.add(sequence(len, i as u32, max_tokens), 1).expect("it fits");
    }
    let mut plan = StepPlan::default();
    step(&mut scheduler, &mut plan);
    assert_eq!(scheduler.num_running(), num_seqs);
    (scheduler, plan)
}

/// Rows that sample and want nothing else.
pub struct Plain;

impl RowSource for Plain {
    fn wants(&self, _: usize) -> bool {
        false
    }

    fn push_row(&self, _: &Sequence, position: usize, _: bool, batch: &mut SamplingBatch) -> bool {
        batch.rows.push(SamplingRow { position: position as u32 + 1, ..SamplingRow::default() });
        false
    }
}
