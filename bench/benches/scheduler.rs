//! What a step costs besides computing it: planning and updating at a number of running
//! sequences, building its input, and admitting a prompt with and without a prefix cache.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use quire_bench::running::{Plain, config, decoding, sequence, step};
use quire_engine::runner::{StepInput, prepare};
use quire_engine::scheduler::{Scheduler, StepPlan};
use std::hint::black_box;
use std::time::{Duration, Instant};

fn steps(c: &mut Criterion) {
    let mut group = c.benchmark_group("scheduler/step");
    for num_seqs in [64, 256, 1024] {
        for cache in [false, true] {
            let name = if cache { "prefix_cache" } else { "plain" };
            let (mut scheduler, mut plan) = decoding(config(num_seqs, cache));
            // Sequences that have grown too long start anew.
            let mut left = 1 << 10;
            group.bench_function(BenchmarkId::new(name, num_seqs), |b| {
                b.iter(|| {
                    if left == 0 {
                        (scheduler, plan) = decoding(config(num_seqs, cache));
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

fn inputs(c: &mut Criterion) {
    let mut group = c.benchmark_group("scheduler/prepare");
    for num_seqs in [256, 1024] {
        let (mut scheduler, mut plan) = decoding(config(num_seqs, true));
        scheduler.schedule(&mut plan);
        let mut input = StepInput::default();
        group.bench_function(BenchmarkId::new("decode", num_seqs), |b| {
            b.iter(|| prepare(&plan, &scheduler, |_| &Plain, None, black_box(&mut input)))
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
