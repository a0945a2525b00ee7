//! Quantised GEMM in every format, with bf16 beside it.
//!
//! A single row reads every weight once, so it is reported in bytes of packed weights; more rows
//! are reported in elements, one a multiplication or addition. Activations are quantised within
//! the timed call, as in a step. Matrices that fit in the caches are read from there: only the
//! vocabulary and the widest 1B shapes say something about memory.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use quire_bench::Random;
use quire_kernels_cpu::{
    Ctx, Dtype, Epilogue, Isa, PackedMatrix, QuantKind, QuantMatrix, QuantRows, gemm, gemm_quant,
    to_words, usable_cores,
};

/// N × K of SmolLM2-135M and of a Llama of 1B parameters.
const SHAPES: [(usize, usize); 7] =
    [(576, 576), (1536, 576), (576, 1536), (49_152, 576), (2048, 2048), (8192, 2048), (2048, 8192)];

const ROWS: [usize; 3] = [1, 16, 64];

fn throughput(m: usize, n: usize, k: usize, bytes: usize) -> Throughput {
    if m == 1 {
        Throughput::Bytes(bytes as u64)
    } else {
        Throughput::Elements(2 * (m * n * k) as u64)
    }
}

/// Weights with bytes of all kinds and small scales; timing does not depend on the values.
fn quantised(ctx: &Ctx, kind: QuantKind, n: usize, k: usize) -> QuantMatrix {
    let mut w = QuantMatrix::zeroed(kind, n, k).expect("the matrix fits");
    let row = Random::new(3).floats(k);
    if kind == QuantKind::Int8 {
        w.set_values(ctx, 0, n, &|_, out| out.copy_from_slice(&row));
    } else {
        w.set_blocks(ctx, 0, n, &|i, out| {
            out.iter_mut().enumerate().for_each(|(j, byte)| *byte = ((i + 7 * j) % 61) as u8);
        });
    }
    w
}

fn shape(c: &mut Criterion, ctx: &Ctx, m: usize, (n, k): (usize, usize)) {
    let mut group = c.benchmark_group(format!("gemm_quant/{m}x{n}x{k}"));
    group.sample_size(10).warm_up_time(Duration::from_millis(100));
    group.measurement_time(Duration::from_millis(400));
    let mut x = vec![0; m * Dtype::Bf16.words(k)];
    to_words(ctx, &Random::new(1).floats(m * k), m, k, &mut x, Dtype::Bf16);
    let mut out = vec![0.0; m * n];
    for kind in QuantKind::ALL.into_iter().filter(|kind| k % kind.block_elements() == 0) {
        let (w, mut rows) = (quantised(ctx, kind, n, k), QuantRows::new());
        group.throughput(throughput(m, n, k, w.bytes()));
        group.bench_function(BenchmarkId::from_parameter(kind), |b| {
            b.iter(|| {
                rows.quantise(ctx, (&x, Dtype::Bf16), (m, k), kind);
                gemm_quant(ctx, &rows, &w, Epilogue::Store { bias: None, out: &mut out });
            });
        });
    }
    let mut w = PackedMatrix::zeroed(Dtype::Bf16, n, k).expect("the matrix fits");
    let row = Random::new(3).floats(k);
    w.set_rows(ctx, 0, n, &|_, out| out.copy_from_slice(&row));
    group.throughput(throughput(m, n, k, w.bytes()));
    group.bench_function(BenchmarkId::from_parameter("bf16"), |b| {
        b.iter(|| gemm(ctx, &x, m, &w, Epilogue::Store { bias: None, out: &mut out }));
    });
    group.finish();
}

fn gemm_quants(c: &mut Criterion) {
    let ctx = Ctx::new(Isa::detect(), usable_cores()).expect("the detected path runs here");
    for m in ROWS {
        for nk in SHAPES {
            shape(c, &ctx, m, nk);
        }
    }
}

criterion_group!(benches, gemm_quants);
criterion_main!(benches);
