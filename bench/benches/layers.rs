//! What of a layer is neither GEMM nor attention: norms, and rotary embedding with the write of
//! keys and values. Sampling has a bench of its own.
//!
//! Bytes are those read and written. Both are small beside a layer's matrices, and mostly in the
//! caches.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use quire_bench::Random;
use quire_bench::models::{LLAMA_8B, SMOLLM2, Sizes};
use quire_kernels_cpu::{
    Ctx, Dtype, Isa, KvCache, KvShape, QkvArgs, qk_norm_rope_write_kv, rms_norm, usable_cores,
};
use std::time::Duration;

const MODELS: [(&str, Sizes); 2] = [("135M", SMOLLM2), ("8B", LLAMA_8B)];
const ROWS: [usize; 3] = [1, 16, 512];
const BLOCK_SIZE: usize = 16;

fn norms(c: &mut Criterion, ctx: &Ctx, (name, sizes): (&str, Sizes)) {
    let mut group = c.benchmark_group(format!("layers/rms_norm/{name}"));
    group.warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(500));
    let d = sizes.hidden;
    let weight = Random::new(1).floats(d);
    for rows in ROWS {
        let x = Random::new(2).floats(rows * d);
        let mut out = vec![0; rows * Dtype::Bf16.words(d)];
        group.throughput(Throughput::Bytes((6 * rows * d) as u64));
        group.bench_function(BenchmarkId::from_parameter(rows), |b| {
            b.iter(|| rms_norm(ctx, &x, rows, &weight, 1e-5, &mut out, Dtype::Bf16));
        });
    }
}

fn rope(c: &mut Criterion, ctx: &Ctx, (name, sizes): (&str, Sizes)) {
    let mut group = c.benchmark_group(format!("layers/rope_write_kv/{name}"));
    group.warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(500));
    let Sizes { heads, kv_heads, head_dim, .. } = sizes;
    let all_heads = heads + 2 * kv_heads;
    for tokens in ROWS {
        let shape = KvShape {
            layers: 1,
            num_blocks: tokens.div_ceil(BLOCK_SIZE),
            block_size: BLOCK_SIZE,
            kv_heads,
            head_dim,
            dtype: Dtype::Bf16,
        };
        let mut kv = KvCache::new(shape).expect("the cache fits");
        let qkv = Random::new(3).floats(tokens * all_heads * head_dim);
        let angles = Random::new(4).floats(tokens * head_dim / 2);
        let positions: Vec<u32> = (0..tokens as u32).collect();
        let slots: Vec<i64> = (0..tokens as i64).collect();
        let args = QkvArgs {
            qkv: &qkv,
            positions: &positions,
            slots: &slots,
            q_heads: heads,
            q_norm: None,
            k_norm: None,
            eps: 1e-5,
            cos: &angles,
            sin: &angles,
            rot_dim: head_dim,
            interleaved: false,
            layer: 0,
        };
        let mut q = vec![0; tokens * heads * Dtype::Bf16.words(head_dim)];
        group.throughput(Throughput::Bytes((6 * tokens * all_heads * head_dim) as u64));
        group.bench_function(BenchmarkId::from_parameter(tokens), |b| {
            b.iter(|| qk_norm_rope_write_kv(ctx, &args, &mut kv, &mut q));
        });
    }
}

fn layers(c: &mut Criterion) {
    let ctx = Ctx::new(Isa::detect(), usable_cores()).expect("the detected path runs here");
    for model in MODELS {
        norms(c, &ctx, model);
        rope(c, &ctx, model);
    }
}

criterion_group!(benches, layers);
criterion_main!(benches);
