//! KV block sizes 8, 16, 32 and 64 compared for paged attention on the CPU backend.
//!
//! Decode reads K and V once, so it is reported in bytes; prefill is bound by arithmetic, so it is
//! reported in elements, one an FLOP.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use quire_bench::{PagedBatch, Shape};
use quire_kernels_cpu::{Ctx, Dtype, Isa, usable_cores};

const BLOCK_SIZES: [usize; 4] = [8, 16, 32, 64];

fn compare(c: &mut Criterion, name: &str, shape: Shape, unit: fn(&Shape) -> Throughput) {
    let ctx = Ctx::new(Isa::detect(), usable_cores()).expect("the detected path runs here");
    let mut group = c.benchmark_group(name);
    for block_size in BLOCK_SIZES {
        let shape = Shape { block_size, ..shape };
        let mut batch = PagedBatch::new(&ctx, shape, Dtype::Bf16);
        group.throughput(unit(&shape));
        group.bench_function(BenchmarkId::new("block", block_size), |b| {
            b.iter(|| std::hint::black_box(batch.attend(&ctx))[0]);
        });
    }
    group.finish();
}

fn bytes(shape: &Shape) -> Throughput {
    Throughput::Bytes(shape.kv_bytes(Dtype::Bf16))
}

fn flops(shape: &Shape) -> Throughput {
    Throughput::Elements(shape.flops())
}

fn block_sizes(c: &mut Criterion) {
    // Heads of SmolLM2-135M (group 3) and of an 8B Llama (group 4).
    let small = Shape {
        num_seqs: 16,
        context: 512,
        query_len: 1,
        num_heads: 9,
        num_kv_heads: 3,
        head_dim: 64,
        block_size: 16,
    };
    let large = Shape { num_seqs: 1, num_heads: 32, num_kv_heads: 8, head_dim: 128, ..small };
    compare(c, "decode/16x512/group3", small, bytes);
    compare(c, "decode/1x4096/group4", Shape { context: 4096, ..large }, bytes);
    compare(c, "prefill/512/group3", Shape { num_seqs: 1, query_len: 512, ..small }, flops);
    compare(c, "prefill/512of4096/group4", Shape { context: 4096, query_len: 512, ..large }, flops);
}

criterion_group!(benches, block_sizes);
criterion_main!(benches);
