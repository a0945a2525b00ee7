//! GEMM in bf16, in the shapes of models of 135M to 8B parameters.
//!
//! Weights come from memory, as they do in a step, which walks all layers: of a small matrix there
//! are copies, and each call takes the next. Criterion's elements are multiplications and
//! additions. A table at the end says how close each shape comes to what the machine can do, and
//! how fast weights are read.

use std::time::Duration;

use criterion::{
    BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use quire_bench::Random;
use quire_bench::models::{LLAMA_1B, LLAMA_8B, QWEN_05B, SMOLLM2, Sizes};
use quire_bench::speed::{Machine, Work, measures, print_table, row};
use quire_kernels_cpu::{Arena, Ctx, Dtype, Epilogue, PackedMatrix, gemm, to_words};

const MODELS: [(&str, Sizes); 4] =
    [("135M", SMOLLM2), ("0.5B", QWEN_05B), ("1B", LLAMA_1B), ("8B", LLAMA_8B)];

const ROWS: [usize; 5] = [1, 4, 16, 64, 512];

/// Logits are computed for so many rows at a time.
const MAX_LOGIT_ROWS: usize = 64;

/// Bytes of a matrix at most; a larger one loses columns.
const MAX_BYTES: usize = 256 << 20;

/// Bytes of all copies at least: several times what caches hold.
const ALL_BYTES: usize = 256 << 20;

/// Copies of a matrix.
struct Weights {
    copies: Vec<PackedMatrix>,
    next: usize,
}

impl Weights {
    fn new(ctx: &Ctx, n: usize, k: usize) -> Self {
        let (mut arena, row) = (Arena::default(), Random::new(3).floats(k));
        let bytes = PackedMatrix::bytes_of(Dtype::Bf16, n, k).expect("it is bounded");
        let copies = if measures() { ALL_BYTES.div_ceil(bytes) } else { 1 };
        let copy = |_| {
            let w = PackedMatrix::zeroed_in(&mut arena, Dtype::Bf16, n, k);
            let mut w = w.expect("the matrix fits");
            w.set_rows(ctx, 0, n, &|_, out| out.copy_from_slice(&row));
            w
        };
        Weights { copies: (0..copies).map(copy).collect(), next: 0 }
    }

    fn multiply(&mut self, ctx: &Ctx, x: &[u32], m: usize, out: &mut [f32]) {
        self.next = (self.next + 1) % self.copies.len();
        gemm(ctx, x, m, &self.copies[self.next], Epilogue::Store { bias: None, out });
    }
}

/// Benches one matrix; returns its rows of the table.
fn matrix(
    c: &mut Criterion,
    machine: &Machine,
    model: &str,
    (name, n, k): (&str, usize, usize),
) -> Vec<Vec<String>> {
    let ctx = &machine.ctx;
    let most = if measures() { MAX_BYTES } else { 1 << 20 };
    let n = n.min((most / (2 * k)).next_multiple_of(64));
    let mut weights = None;
    let mut group = c.benchmark_group(format!("gemm/{model}/{name} {n}x{k}"));
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    group.warm_up_time(Duration::from_millis(80)).measurement_time(Duration::from_millis(250));
    let mut rows = Vec::new();
    for m in ROWS.into_iter().filter(|&m| name != "logits" || m <= MAX_LOGIT_ROWS) {
        let mut x = vec![0; m * Dtype::Bf16.words(k)];
        to_words(ctx, &Random::new(1).floats(m * k), m, k, &mut x, Dtype::Bf16);
        let mut out = vec![0.0; m * n];
        let mut ran = false;
        group.throughput(Throughput::Elements(2 * (m * n * k) as u64));
        group.bench_function(BenchmarkId::from_parameter(m), |b| {
            let weights = weights.get_or_insert_with(|| Weights::new(ctx, n, k));
            b.iter(|| weights.multiply(ctx, &x, m, &mut out));
            ran = true;
        });
        let Some(weights) = weights.as_mut().filter(|_| ran && measures()) else { continue };
        let work = Work { bytes: weights.copies[0].bytes() as f64, ops: 2.0 * (m * n * k) as f64 };
        let measured = machine.in_turns(1, |_| weights.multiply(ctx, &x, m, &mut out));
        let seconds = measured.seconds[0];
        rows.push(vec![
            format!("{model} {name}"),
            format!("{m}"),
            format!("{n} x {k}"),
            format!("{:.1}", seconds * 1e6),
            format!("{:.0}", work.ops / seconds / 1e9),
            format!("{:.1}", work.bytes / seconds / 1e9),
            measured.share(0, work),
        ]);
    }
    group.finish();
    rows
}

fn gemms(c: &mut Criterion) {
    let machine = Machine::default();
    let mut rows = vec![row(["matrix", "M", "N x K", "µs", "GFLOP/s", "GB/s", "ceiling"])];
    for (model, sizes) in MODELS {
        for shape in sizes.matrices() {
            rows.extend(matrix(c, &machine, model, shape));
        }
    }
    if measures() {
        print_table(&rows);
    }
}

criterion_group!(benches, gemms);
criterion_main!(benches);
