//! The launches from logits to tokens and log-probabilities, against the CPU's sampler: the same
//! tokens, the same log-probabilities, the same rows refused.

use quire_engine::sampling::{
    RowError, RowTarget, SampleOutput, Sampler, SamplingBatch, SamplingRow, SeenToken,
    TokenLogprob, TokenLogprobs, sample_row,
};
use quire_kernels_cpu::Isa;
use quire_ptxsim::CtaOrder;
use quire_tests::args;
use quire_tests::conformance::assert_samples;
use quire_tests::ptx::{Element, Gpu, Kernels};
use quire_tests::rng::Rng;
use std::ops::Range;

pub const TESTED: &[&str] = &[
    "choose_tokens",
    "cut_logits",
    "draw_partials",
    "edit_logits",
    "fold_logprobs",
    "fold_stats",
    "prepare_logits",
    "row_stats",
    "scale_logits",
    "sum_exp",
    "top_partials",
];

const VOCAB: usize = 151_936;

/// Runs the launches of a step for a batch; `logits` is `[R, stride]`.
pub fn sample(
    kernels: &Kernels,
    batch: &SamplingBatch,
    logits: &[f32],
    order: CtaOrder,
) -> Vec<SampleOutput> {
    let mut step = Step::new(kernels, batch, logits, order);
    let (raw_max, _, raw_status) = step.prepare();
    let edited = step.edit();
    let cut = step.cut(edited.0);
    let (token, status) = step.choose(cut, raw_status, edited);
    let logprobs = step.logprobs(token, raw_max);
    step.outputs(token, status, logprobs)
}

/// Maximum, its id and status of each row.
type Stats = (u64, u64, u64);

struct Step<'a> {
    kernels: &'a Kernels,
    batch: &'a SamplingBatch,
    gpu: Gpu,
    rows: usize,
    stride: usize,
    splits: usize,
    logits: u64,
    work: u64,
    best: u64,
    bad: u64,
    temperature: u64,
}

impl<'a> Step<'a> {
    fn new(
        kernels: &'a Kernels,
        batch: &'a SamplingBatch,
        logits: &[f32],
        order: CtaOrder,
    ) -> Step<'a> {
        let mut gpu = Gpu::ordered(order);
        let rows = batch.rows.len();
        let splits = batch.vocab_limit.div_ceil(kernels.only("row_stats").constant("SPLIT"));
        let temperature: Vec<f32> = batch.rows.iter().map(|row| row.temperature).collect();
        Step {
            logits: gpu.floats("logits", Element::F32, logits),
            work: gpu.empty("work", 4 * logits.len()),
            best: gpu.empty("best", 8 * rows * splits),
            bad: gpu.empty("bad", 4 * rows * splits),
            temperature: gpu.floats("temperature", Element::F32, &temperature),
            kernels,
            batch,
            gpu,
            rows,
            stride: logits.len() / rows,
            splits,
        }
    }

    fn vocab(&self) -> usize {
        self.batch.vocab_limit
    }

    /// A value of each row, as f32.
    fn floats(&mut self, name: &str, value: impl Fn(&SamplingRow) -> f32) -> u64 {
        let values: Vec<f32> = self.batch.rows.iter().map(value).collect();
        self.gpu.floats(name, Element::F32, &values)
    }

    /// A value of each row, as i32.
    fn ints(&mut self, name: &str, value: impl Fn(&SamplingRow) -> i32) -> u64 {
        let values: Vec<i32> = self.batch.rows.iter().map(value).collect();
        self.gpu.i32s(name, &values)
    }

    /// Start and end of each row's list.
    fn ranges(&mut self, name: &str, range: impl Fn(&SamplingRow) -> Option<Range<usize>>) -> u64 {
        let pair = |row| range(row).map_or([-1, -1], |r| [r.start as i32, r.end as i32]);
        let values: Vec<i32> = self.batch.rows.iter().flat_map(pair).collect();
        self.gpu.i32s(name, &values)
    }

    fn fold_stats(&mut self) -> Stats {
        let [row_max, row_argmax, row_status] =
            ["row_max", "row_argmax", "row_status"].map(|name| self.gpu.empty(name, 4 * self.rows));
        self.gpu.launch(
            &self.kernels.only("fold_stats"),
            &[self.rows],
            args![
                row_max, row_argmax, row_status, best: self.best, bad: self.bad,
                num_splits: self.splits,
            ],
        );
        (row_max, row_argmax, row_status)
    }

    fn prepare(&mut self) -> Stats {
        let ids: Vec<i32> = self.batch.ids.iter().map(|&id| id as i32).collect();
        let allowed_ids = self.gpu.i32s("allowed_ids", &ids);
        let allowed_range = self.ranges("allowed_range", |row| row.allowed.clone());
        let (vocab, stride) = (self.vocab(), self.stride);
        self.gpu.launch(
            &self.kernels.only("prepare_logits"),
            &[self.rows, self.splits],
            args![
                work: self.work, best: self.best, bad: self.bad, logits: self.logits, allowed_ids,
                allowed_range, vocab, stride,
            ],
        );
        self.fold_stats()
    }

    fn edit(&mut self) -> Stats {
        let batch = self.batch;
        let ids: Vec<i32> = batch.ids.iter().map(|&id| id as i32).collect();
        let suppressed_ids = self.gpu.i32s("suppressed_ids", &ids);
        let suppressed_range = self.ranges("suppressed_range", |row| Some(row.suppressed.clone()));
        let biased: Vec<i32> = batch.biases.iter().map(|b| b.0 as i32).collect();
        let bias_ids = self.gpu.i32s("bias_ids", &biased);
        let values: Vec<f32> = batch.biases.iter().map(|b| b.1).collect();
        let bias_values = self.gpu.floats("bias_values", Element::F32, &values);
        let bias_range = self.ranges("bias_range", |row| Some(row.bias.clone()));
        let seen: Vec<i32> = batch.seen.iter().map(|s| s.token as i32).collect();
        let seen_ids = self.gpu.i32s("seen_ids", &seen);
        let counts: Vec<i32> = batch.seen.iter().map(|s| s.output_count as i32).collect();
        let seen_counts = self.gpu.i32s("seen_counts", &counts);
        let seen_range = self.ranges("seen_range", |row| Some(row.seen.clone()));
        let repetition_penalty = self.floats("repetition", |row| row.repetition_penalty);
        let frequency_penalty = self.floats("frequency", |row| row.frequency_penalty);
        let presence_penalty = self.floats("presence", |row| row.presence_penalty);
        let (vocab, stride) = (self.vocab(), self.stride);
        self.gpu.launch(&self.kernels.only("edit_logits"), &[self.rows], args![
            work: self.work, suppressed_ids, suppressed_range, bias_ids, bias_values, bias_range,
            seen_ids, seen_counts, seen_range, repetition_penalty, frequency_penalty,
            presence_penalty, vocab, stride,
        ]);
        self.gpu.launch(
            &self.kernels.only("row_stats"),
            &[self.rows, self.splits],
            args![
                best: self.best, bad: self.bad, logits: self.work, vocab, stride,
            ],
        );
        self.fold_stats()
    }

    /// Scales the logits; the least key that each row keeps.
    fn cut(&mut self, row_max: u64) -> u64 {
        let (vocab, stride) = (self.vocab(), self.stride);
        let min_p = self.floats("min_p", |row| row.min_p);
        self.gpu.launch(
            &self.kernels.only("scale_logits"),
            &[self.rows, self.splits],
            args![
                work: self.work, row_max, temperature: self.temperature, min_p, vocab, stride,
            ],
        );
        let cut = self.gpu.empty("cut", 4 * self.rows);
        let top_k = self.ints("top_k", |row| row.top_k as i32);
        let top_p = self.floats("top_p", |row| row.top_p);
        self.gpu.launch(
            &self.kernels.only("cut_logits"),
            &[self.rows],
            args![
                cut, work: self.work, temperature: self.temperature, top_k, top_p, vocab, stride,
            ],
        );
        cut
    }

    fn choose(
        &mut self,
        cut: u64,
        raw_status: u64,
        (_, row_argmax, row_status): Stats,
    ) -> (u64, u64) {
        let (vocab, stride) = (self.vocab(), self.stride);
        let draws = self.gpu.empty("draws", 8 * self.rows * self.splits);
        let seeds: Vec<i64> = self.batch.rows.iter().map(|row| row.seed as i64).collect();
        let seed = self.gpu.i64s("seed", &seeds);
        let position = self.ints("position", |row| row.position as i32);
        self.gpu.launch(
            &self.kernels.only("draw_partials"),
            &[self.rows, self.splits],
            args![
                draws, work: self.work, cut, temperature: self.temperature, seed, position, vocab,
                stride,
            ],
        );
        let given = self.ints("given", |row| match row.target {
            RowTarget::Given(token) => token as i32,
            _ => -1,
        });
        let [token, status] = ["token", "status"].map(|name| self.gpu.empty(name, 4 * self.rows));
        self.gpu.launch(
            &self.kernels.only("choose_tokens"),
            &[self.rows],
            args![
                token, status, draws, raw_status, row_argmax, row_status,
                temperature: self.temperature, given, num_splits: self.splits,
            ],
        );
        (token, status)
    }

    /// ln p of each token; ids and ln p of the best ones; how many there may be.
    fn logprobs(&mut self, token: u64, row_max: u64) -> (u64, u64, u64, usize) {
        let wanted = self.batch.rows.iter().map(|row| row.logprobs.unwrap_or(0));
        let max_top = wanted.max().unwrap_or(0).max(1) as usize;
        let num_top = self.ints("num_top", |row| row.logprobs.map_or(-1, |n| n as i32));
        let sums = self.gpu.empty("sums", 8 * self.rows * self.splits);
        let (vocab, stride) = (self.vocab(), self.stride);
        self.gpu.launch(
            &self.kernels.only("sum_exp"),
            &[self.rows, self.splits],
            args![
                sums, logits: self.logits, row_max, vocab, stride,
            ],
        );
        let top = self.gpu.empty("top", 8 * self.rows * self.splits * max_top);
        self.gpu.launch(
            &self.kernels.only("top_partials"),
            &[self.rows, self.splits],
            args![
                top, logits: self.logits, num_top, max_top, vocab, stride,
            ],
        );
        let logprob = self.gpu.empty("logprob", 4 * self.rows);
        let top_ids = self.gpu.empty("top_ids", 4 * self.rows * max_top);
        let top_logprobs = self.gpu.empty("top_logprobs", 4 * self.rows * max_top);
        self.gpu.launch(
            &self.kernels.only("fold_logprobs"),
            &[self.rows],
            args![
                logprob, top_ids, top_logprobs, logits: self.logits, token, row_max, sums, top,
                num_top, max_top, num_splits: self.splits, vocab, stride,
            ],
        );
        (logprob, top_ids, top_logprobs, max_top)
    }

    fn outputs(
        &self,
        token: u64,
        status: u64,
        (logprob, top_ids, top_logprobs, max_top): (u64, u64, u64, usize),
    ) -> Vec<SampleOutput> {
        let tokens = self.gpu.read_i32s(token, self.rows);
        let statuses = self.gpu.read_i32s(status, self.rows);
        let one = |(i, row): (usize, &SamplingRow)| {
            let token = match statuses[i] {
                0 => Ok(tokens[i] as u32),
                1 => Err(RowError::NotANumber),
                2 => Err(RowError::NothingAllowed),
                other => panic!("row {i} has status {other}"),
            };
            let at = |base: u64, index: usize| base + 4 * index as u64;
            let logprobs = row.logprobs.filter(|_| token.is_ok()).map(|n| {
                let n = n as usize;
                let ids = self.gpu.read_i32s(at(top_ids, i * max_top), n);
                let values = self.gpu.read(at(top_logprobs, i * max_top), Element::F32, n);
                let own = self.gpu.read(at(logprob, i), Element::F32, 1)[0];
                let pair = |token: u32, logprob| TokenLogprob { token, logprob };
                TokenLogprobs {
                    sampled: pair(tokens[i] as u32, own),
                    top: ids.into_iter().zip(values).map(|(id, x)| pair(id as u32, x)).collect(),
                }
            });
            SampleOutput { token, logprobs }
        };
        self.batch.rows.iter().enumerate().map(one).collect()
    }
}

/// The CPU's answers.
fn expected(batch: &SamplingBatch, logits: &[f32]) -> Vec<SampleOutput> {
    let mut sampler = Sampler::new(Isa::Portable);
    let stride = logits.len() / batch.rows.len();
    let rows = batch.rows.iter().zip(logits.chunks_exact(stride));
    rows.map(|(row, logits)| {
        let mut logits = logits[..batch.vocab_limit].to_vec();
        sample_row(&mut sampler, &mut logits, row, batch)
    })
    .collect()
}

/// Rows of logits on few levels, so that ties are everywhere; what is past `vocab` is NaN.
pub fn logits(rows: usize, vocab: usize, stride: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    let mut out = Vec::with_capacity(rows * stride);
    for _ in 0..rows {
        out.extend((0..vocab).map(|_| rng.below(4096) as f32 / 256.0 - 8.0));
        out.resize(out.len() + stride - vocab, f32::NAN);
    }
    out
}

pub fn row(i: usize) -> SamplingRow {
    let seed = 0x9E37_79B9_7F4A_7C15u64.wrapping_mul(i as u64 + 1);
    SamplingRow { seed, position: 100 * i as u32, ..SamplingRow::default() }
}

fn check(kernels: &Kernels, batch: &SamplingBatch, logits: &[f32]) {
    let got = sample(kernels, batch, logits, CtaOrder::Forward);
    assert_samples(&got, &expected(batch, logits));
    assert_eq!(sample(kernels, batch, logits, CtaOrder::Shuffled(5)), got, "another order");
    // The last row alone.
    let stride = logits.len() / batch.rows.len();
    let alone =
        SamplingBatch { rows: batch.rows[batch.rows.len() - 1..].to_vec(), ..batch.clone() };
    let alone = sample(kernels, &alone, &logits[logits.len() - stride..], CtaOrder::Forward);
    assert_eq!(alone[..], got[got.len() - 1..], "the last row alone");
}

#[test]
fn a_vocabulary_of_151936() {
    let kernels = Kernels::load();
    let settings: [(f32, u32, f32, f32); 6] = [
        (1.0, 0, 1.0, 0.0),
        (0.7, 50, 1.0, 0.0),
        (1.3, 0, 0.9, 0.0),
        (0.9, 200, 0.5, 0.02),
        (0.0, 0, 1.0, 0.0),
        (1.0, 3000, 0.99, 0.0),
    ];
    let rows: Vec<SamplingRow> = settings
        .iter()
        .enumerate()
        .map(|(i, &(temperature, top_k, top_p, min_p))| SamplingRow {
            temperature,
            top_k,
            top_p,
            min_p,
            logprobs: (i % 2 == 0).then_some(i as u32),
            ..row(i)
        })
        .collect();
    let logits = logits(rows.len(), VOCAB, VOCAB, 11);
    let batch = SamplingBatch { rows, vocab_limit: VOCAB, ..SamplingBatch::default() };
    let got = sample(&kernels, &batch, &logits, CtaOrder::Reverse);
    assert_samples(&got, &expected(&batch, &logits));
}

#[test]
fn small_vocabularies_and_all_settings() {
    let kernels = Kernels::load();
    for (vocab, stride) in [(1000usize, 1008usize), (4096, 4096), (5001, 5008), (3, 16)] {
        let mut rng = Rng::new(vocab as u64);
        let mut batch = SamplingBatch { vocab_limit: vocab, ..SamplingBatch::default() };
        for i in 0..12 {
            let ids = |rng: &mut Rng, batch: &mut SamplingBatch, n: usize| {
                let mut ids: Vec<u32> =
                    (0..n.min(vocab - 1)).map(|_| rng.below(vocab) as u32).collect();
                ids.sort_unstable();
                ids.dedup();
                let start = batch.ids.len();
                batch.ids.extend(ids);
                start..batch.ids.len()
            };
            let allowed = (i % 4 == 1).then(|| ids(&mut rng, &mut batch, 700));
            let suppressed = if i % 3 == 1 { ids(&mut rng, &mut batch, 300) } else { 0..0 };
            let biased = ids(&mut rng, &mut batch, 20);
            let bias_start = batch.biases.len();
            let biases: Vec<u32> = batch.ids[biased].to_vec();
            batch.biases.extend(biases.into_iter().map(|id| (id, rng.signed() * 5.0)));
            let seen = ids(&mut rng, &mut batch, 260);
            let seen_start = batch.seen.len();
            let tokens: Vec<u32> = batch.ids[seen].to_vec();
            batch.seen.extend(
                tokens.into_iter().map(|token| SeenToken { token, output_count: token % 3 }),
            );
            batch.rows.push(SamplingRow {
                target: if i == 7 { RowTarget::Given(vocab as u32 - 1) } else { RowTarget::Sample },
                temperature: [1.0, 0.0, 0.3, 2.0, 1e-3][i % 5],
                top_k: [0, 1, 40, 0, 100_000][i % 5],
                top_p: [1.0, 0.9, 0.1, 0.999][i % 4],
                min_p: [0.0, 0.05, 0.0][i % 3],
                repetition_penalty: [1.0, 1.3, 0.7][i % 3],
                frequency_penalty: [0.0, 0.5][i % 2],
                presence_penalty: [0.0, -0.25, 1.0][i % 3],
                logprobs: [None, Some(0), Some(3)][i % 3],
                allowed,
                suppressed,
                bias: bias_start..batch.biases.len(),
                seen: seen_start..batch.seen.len(),
                ..row(i)
            });
        }
        let logits = logits(batch.rows.len(), vocab, stride, vocab as u64);
        check(&kernels, &batch, &logits);
    }
}

#[test]
fn rows_that_are_refused() {
    let kernels = Kernels::load();
    let (vocab, stride) = (4100usize, 4112usize);
    let mut values = logits(6, vocab, stride, 3);
    values[4099] = f32::NAN;
    values[stride + 17] = f32::INFINITY;
    values[2 * stride..][..vocab].fill(f32::NEG_INFINITY);
    values[3 * stride + 5] = f32::NEG_INFINITY;
    let mut batch = SamplingBatch { vocab_limit: vocab, ..SamplingBatch::default() };
    batch.ids = vec![5, 7];
    batch.rows = (0..6).map(row).collect();
    // Of two allowed ids one is suppressed, the other −∞.
    batch.rows[3].allowed = Some(0..2);
    batch.rows[3].suppressed = 1..2;
    batch.rows[4].allowed = Some(1..2);
    check(&kernels, &batch, &values);
    let got = sample(&kernels, &batch, &values, CtaOrder::Forward);
    let tokens: Vec<_> = got.into_iter().map(|output| output.token).collect();
    use RowError::{NotANumber, NothingAllowed};
    assert_eq!(tokens[..4], [NotANumber, NotANumber, NothingAllowed, NothingAllowed].map(Err));
    assert_eq!(tokens[4], Ok(7));
}
