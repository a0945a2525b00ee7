//! Sampling 64 rows over the largest common vocabulary (151,936 entries, Qwen's), as the CPU
//! backend does it: rows spread over the workers.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use quire_bench::Random;
use quire_engine::sampling::{Sampler, SamplingBatch, SamplingRow, SeenToken, sample_row};
use quire_kernels_cpu::{Ctx, Isa, usable_cores};
use std::sync::Mutex;

const ROWS: usize = 64;
const VOCAB: usize = 151_936;

fn rows(c: &mut Criterion, name: &str, row: &SamplingRow) {
    let ctx = Ctx::new(Isa::detect(), usable_cores()).expect("the detected path runs here");
    let samplers: Vec<_> =
        (0..ctx.pool.threads()).map(|_| Mutex::new(Sampler::new(ctx.isa))).collect();
    // Roughly normal logits, as a model's are.
    let mut random = Random::new(7);
    let mut logits = vec![0.0f32; ROWS * VOCAB];
    for _ in 0..4 {
        let noise = random.floats(ROWS * VOCAB);
        logits.iter_mut().zip(noise).for_each(|(x, n)| *x += 2.0 * n);
    }
    let seen = (0..500).map(|i| SeenToken { token: i * 300, output_count: i % 3 }).collect();
    let batch = SamplingBatch { seen, ..Default::default() };
    let fresh = || -> Vec<_> { logits.chunks(VOCAB).map(|r| Mutex::new(r.to_vec())).collect() };
    let mut group = c.benchmark_group("sampling/64x151936");
    group.throughput(Throughput::Elements(ROWS as u64)).sample_size(20);
    group.bench_function(name, |b| {
        let sample = |rows: &mut Vec<Mutex<Vec<f32>>>| {
            ctx.pool.for_each(ROWS, |worker, i| {
                let mut sampler = samplers[worker].lock().expect("one worker has it");
                let mut logits = rows[i].lock().expect("one worker has it");
                let row = SamplingRow { seed: i as u64, ..row.clone() };
                let out = sample_row(&mut sampler, &mut logits, &row, &batch);
                assert!(out.token.is_ok());
            });
        };
        b.iter_batched_ref(fresh, sample, BatchSize::LargeInput);
    });
    group.finish();
}

fn sampling(c: &mut Criterion) {
    let base = SamplingRow { temperature: 0.8, ..Default::default() };
    rows(c, "greedy", &SamplingRow { temperature: 0.0, ..base.clone() });
    rows(c, "temperature", &base);
    rows(c, "top_k 50", &SamplingRow { top_k: 50, ..base.clone() });
    rows(c, "top_p 0.9", &SamplingRow { top_p: 0.9, ..base.clone() });
    rows(c, "top_k 50, top_p 0.9", &SamplingRow { top_k: 50, top_p: 0.9, ..base.clone() });
    rows(c, "min_p 0.05", &SamplingRow { min_p: 0.05, ..base.clone() });
    let penalised = SamplingRow { seen: 0..500, repetition_penalty: 1.1, ..base.clone() };
    rows(c, "penalties over 500 tokens", &penalised);
    rows(c, "20 logprobs", &SamplingRow { logprobs: Some(20), ..base });
}

criterion_group!(benches, sampling);
criterion_main!(benches);
