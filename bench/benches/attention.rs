//! Paged attention over block sizes, and over a contiguous line for comparison: a cache whose one
//! block a sequence holds all of it.
//!
//! A decode reads K and V once, so criterion reports it in bytes; prefill is reported in elements,
//! one a multiplication or addition. All sequences together are larger than the caches. A table at
//! the end has the ratios to the line and how close block 16 comes to what the machine can do.

use std::time::Duration;

use criterion::{
    BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use quire_bench::speed::{Machine, Work, measures, print_table, row};
use quire_bench::{PagedBatch, Queries, Shape};
use quire_kernels_cpu::Dtype;

const CONTEXTS: [usize; 3] = [1024, 4096, 16_384];
const BLOCK_SIZES: [usize; 5] = [8, 16, 32, 64, 128];
/// Place of the contiguous line after the block sizes, and of block 16 among them.
const LINE: usize = BLOCK_SIZES.len();
const BLOCK_16: usize = 1;
/// Query heads of a KV head.
const GROUPS: [usize; 4] = [1, 3, 4, 8];
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 128;
/// Tokens of all sequences: 64 MiB of keys and values.
const TOKENS: usize = 32_768;
/// The last tokens of a sequence that prefill computes.
const CHUNK: usize = 128;

/// The caches of a context: one a block size, then the line.
struct Caches {
    context: usize,
    batches: Vec<PagedBatch>,
}

impl Caches {
    fn new(machine: &Machine, context: usize) -> Self {
        let sizes = BLOCK_SIZES.into_iter().chain([context]);
        let batch = |block_size| {
            let shape = Shape {
                num_seqs: if measures() { TOKENS / context } else { 1 },
                context,
                query_len: 1,
                num_heads: KV_HEADS,
                num_kv_heads: KV_HEADS,
                head_dim: HEAD_DIM,
                block_size,
            };
            PagedBatch::new(&machine.ctx, shape, Dtype::Bf16)
        };
        Caches { context, batches: sizes.map(batch).collect() }
    }

    /// Benches every block size; returns a row of the table.
    fn bench(
        &mut self,
        c: &mut Criterion,
        machine: &Machine,
        mode: &str,
        group: usize,
    ) -> Option<Vec<String>> {
        let num_seqs = if mode == "decode" { self.batches[LINE].max_seqs() } else { 1 };
        let query_len = if mode == "decode" { 1 } else { CHUNK };
        let queries = Queries { num_seqs, query_len, num_heads: KV_HEADS * group };
        let name = format!("attention/{mode}/{num_seqs}x{}/group{group}", self.context);
        let mut benches = c.benchmark_group(&name);
        benches.sample_size(10).sampling_mode(SamplingMode::Flat);
        benches
            .warm_up_time(Duration::from_millis(40))
            .measurement_time(Duration::from_millis(120));
        let mut all_ran = true;
        for (i, batch) in self.batches.iter_mut().enumerate() {
            batch.set_queries(&machine.ctx, queries);
            let shape = *batch.shape();
            benches.throughput(match mode {
                "decode" => Throughput::Bytes(shape.kv_bytes(Dtype::Bf16)),
                _ => Throughput::Elements(shape.flops()),
            });
            let block =
                BLOCK_SIZES.get(i).map_or("line".to_owned(), |size| format!("block {size}"));
            let mut ran = false;
            benches.bench_function(BenchmarkId::from_parameter(block), |b| {
                b.iter(|| std::hint::black_box(batch.attend(&machine.ctx))[0]);
                ran = true;
            });
            all_ran &= ran;
        }
        benches.finish();
        // Where a filter leaves some out, there is nothing to compare.
        (measures() && all_ran).then(|| self.row(machine, &name))
    }

    fn row(&mut self, machine: &Machine, name: &str) -> Vec<String> {
        let shape = *self.batches[LINE].shape();
        let batches = &mut self.batches;
        let measured = machine.in_turns(batches.len(), |i| {
            std::hint::black_box(batches[i].attend(&machine.ctx));
        });
        let work = Work { bytes: shape.kv_bytes(Dtype::Bf16) as f64, ops: shape.flops() as f64 };
        let (line, block_16) = (measured.seconds[LINE], measured.seconds[BLOCK_16]);
        let mut cells = vec![
            name.to_owned(),
            format!("{:.0}", block_16 * 1e6),
            format!("{:.1}", work.bytes / block_16 / 1e9),
            format!("{:.0}", work.ops / block_16 / 1e9),
            measured.share(BLOCK_16, work),
        ];
        cells.extend(measured.seconds[..LINE].iter().map(|time| format!("{:.3}", time / line)));
        cells
    }
}

fn attention(c: &mut Criterion) {
    let machine = Machine::default();
    let mut rows = vec![row(["", "µs", "GB/s", "GFLOP/s", "block 16"])];
    rows[0].extend(BLOCK_SIZES.map(|size| format!("{size} ÷ line")));
    for context in CONTEXTS {
        let mut caches = Caches::new(&machine, context);
        for mode in ["decode", "prefill"] {
            rows.extend(GROUPS.iter().filter_map(|&group| caches.bench(c, &machine, mode, group)));
        }
    }
    if rows.len() > 1 {
        print_table(&rows);
    }
}

criterion_group!(benches, attention);
criterion_main!(benches);
