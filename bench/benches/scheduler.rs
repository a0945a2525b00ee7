//! What a step costs besides computing it: planning and updating at a number of running
//! sequences, building its input, and admitting a prompt with and without a prefix cache.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use quire_engine::kv::PrefixHasher;
use quire_engine::runner::{RowSource, StepInput, prepare};
use quire_engine::sampling::{SamplingBatch, SamplingRow};
use quire_engine::scheduler::{
    NewSequence, Scheduler, SchedulerConfig, Sequence, StepPlan, StopRules,
};
use std::hint::black_box;
use std::time::{Duration, Instant};

const BLOCK_SIZE: usize = 16;

fn config(num_seqs: usize, prefix_cache: bool) -> SchedulerConfig {
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

fn sequence(len: usize, first: u32, max_tokens: usize) -> NewSequence {
    NewSequence {
        prompt: (0..len as u32).map(|i| first.wrapping_mul(7919) + i).collect(),
        rules: StopRules { max_tokens, ..StopRules::default() },
        ..NewSequence::default()
    }
}

/// Plans a step and updates it with one token for each sequence.
fn step(scheduler: &mut Scheduler, plan: &mut StepPlan) {
    scheduler.schedule(plan);
    let samples = plan.scheduled.iter().filter(|s| s.samples).count();
    let mut finished = Vec::new();
    scheduler.update(plan, std::iter::repeat_n(1, samples), &mut finished);
    assert!(finished.is_empty());
}

/// `num_seqs` sequences that decode, each at another place in its block.
fn decoding(num_seqs: usize, prefix_cache: bool) -> (Scheduler, StepPlan) {
    let mut scheduler = Scheduler::new(config(num_seqs, prefix_cache));
    for i in 0..num_seqs {
        let len = 200 + i % BLOCK_SIZE;
        scheduler.add(sequence(len, i as u32, 1 << 15), 1).expect("it fits");
    }
    let mut plan = StepPlan::default();
    step(&mut scheduler, &mut plan);
    assert_eq!(scheduler.num_running(), num_seqs);
    (scheduler, plan)
}

fn steps(c: &mut Criterion) {
    let mut group = c.benchmark_group("scheduler/step");
    for num_seqs in [64, 256, 1024] {
        for cache in [false, true] {
            let name = if cache { "prefix_cache" } else { "plain" };
            let (mut scheduler, mut plan) = decoding(num_seqs, cache);
            // Sequences that have grown too long start anew.
            let mut left = 1 << 10;
            group.bench_function(BenchmarkId::new(name, num_seqs), |b| {
                b.iter(|| {
                    if left == 0 {
                        (scheduler, plan) = decoding(num_seqs, cache);
                        left = 1 << 10;
                    }
                    left -= 1;
                    step(&mut scheduler, &mut plan);
                })
            });
        }
    }
    group.finish();
}

/// Rows that sample and want nothing else.
struct Plain;

impl RowSource for Plain {
    fn wants(&self, _: usize) -> bool {
        false
    }

    fn push_row(&self, _: &Sequence, position: usize, _: bool, batch: &mut SamplingBatch) -> bool {
        batch.rows.push(SamplingRow { position: position as u32 + 1, ..SamplingRow::default() });
        false
    }
}

fn inputs(c: &mut Criterion) {
    let mut group = c.benchmark_group("scheduler/prepare");
    for num_seqs in [256, 1024] {
        let (mut scheduler, mut plan) = decoding(num_seqs, true);
        scheduler.schedule(&mut plan);
        let mut input = StepInput::default();
        group.bench_function(BenchmarkId::new("decode", num_seqs), |b| {
            b.iter(|| prepare(&plan, &scheduler, |_| &Plain, black_box(&mut input)))
        });
    }
    group.finish();
}

/// Takes in a prompt of 550 tokens: what the queue, the blocks and the prefix cache cost it.
fn admissions(c: &mut Criterion) {
    let mut group = c.benchmark_group("scheduler/admit_550");
    for (name, cache, repeat) in
        [("plain", false, false), ("miss", true, false), ("hit", true, true)]
    {
        let mut scheduler = Scheduler::new(config(64, cache));
        let mut plan = StepPlan::default();
        let mut number = 0;
        group.bench_function(name, |b| {
            b.iter_custom(|iterations| {
                let mut time = Duration::ZERO;
                for _ in 0..iterations {
                    number += u32::from(!repeat);
                    let new = sequence(550, number, 16);
                    let start = Instant::now();
                    let id = scheduler.add(new, 1).expect("it fits")[0];
                    scheduler.schedule(&mut plan);
                    time += start.elapsed();
                    scheduler.update(&plan, [1], &mut Vec::new());
                    scheduler.finish(id);
                }
                time
            })
        });
    }
    group.finish();
}

criterion_group!(benches, steps, inputs, admissions);
criterion_main!(benches);
