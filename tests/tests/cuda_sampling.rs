//! The CUDA backend's sampling, on the stand-in driver: the tokens and refusals of the CPU's
//! sampler, whatever the rows beside, with as few launches as the rows allow and two steps under
//! way.

use fakecuda::{Config, FakeCuda};
use quire_engine::DType;
use quire_engine::backend::cuda::{CudaKvCache, CudaMatrix, CudaTensor};
use quire_engine::backend::{CudaBackend, CudaOptions, Isa};
use quire_engine::ops::{Backend, KvLayout, MatrixLayout, StepLimits, TensorKind};
use quire_engine::sampling::{
    LogitsContext, LogitsProcessor, ProcessorCall, RowError, RowTarget, SampleOutput, Sampler,
    SamplingBatch, SamplingRow, SeenToken, sample_row,
};
use quire_tests::conformance::assert_samples;
use quire_tests::harness::{Rows, row_input};
use quire_tests::rng::Rng;
use std::ops::Range;
use std::sync::Arc;

/// Ids, and logits of a row with padding.
const VOCAB: usize = 1001;
const STRIDE: usize = 1008;
/// Rows of a slice.
const SLICE: usize = 64;
const MAX_ROWS: usize = 128;

/// A backend whose model is a table: token `t` has the logits of row `t`.
struct Device {
    backend: CudaBackend<f32>,
    table: CudaMatrix<f32>,
    all: CudaTensor<f32>,
    slice: CudaTensor<f32>,
    _kv: CudaKvCache<f32>,
    _fake: FakeCuda,
}

impl Device {
    fn new(logits: &Rows) -> Self {
        let fake = FakeCuda::load(&Config::default());
        let options = CudaOptions { enforce_eager: true, ..CudaOptions::default() };
        let mut backend = CudaBackend::new(options).expect("a device");
        let read = |row: usize, out: &mut [f32]| {
            out.copy_from_slice(logits.row(row));
            Ok(())
        };
        let table = backend.matrix(MatrixLayout::Plain, logits.len(), STRIDE, &read);
        let table = table.expect("memory");
        let tensor = |backend: &mut CudaBackend<f32>, rows| {
            backend.tensor(rows, STRIDE, TensorKind::F32).expect("memory")
        };
        let all = tensor(&mut backend, MAX_ROWS);
        let slice = tensor(&mut backend, SLICE);
        let layout = KvLayout {
            num_layers: 1,
            num_blocks: 1,
            num_kv_heads: 1,
            block_size: 16,
            head_dim: 64,
            dtype: DType::F32,
        };
        let kv = backend.kv_cache(&layout).expect("memory");
        let limits = StepLimits {
            max_tokens: MAX_ROWS,
            max_seqs: 1,
            max_positions: MAX_ROWS,
            max_logprobs: VOCAB,
            block_size: 16,
            swap: false,
            vocab_size: STRIDE,
            num_heads: 1,
        };
        backend.reserve(&limits).expect("memory");
        Device { backend, table, all, slice, _kv: kv, _fake: fake }
    }

    /// A step of a token for each row of `batch`. Placeholders: (row, row of the step before).
    fn step(&mut self, tokens: &[u32], placeholders: &[(u32, u32)], batch: &SamplingBatch) {
        self.begin(tokens, placeholders, batch);
        self.backend.end_step().expect("the device works");
    }

    /// The same without its end.
    fn begin(&mut self, tokens: &[u32], placeholders: &[(u32, u32)], batch: &SamplingBatch) {
        let rows = batch.rows.len();
        assert_eq!(tokens.len(), rows);
        let mut input = row_input(rows);
        input.token_ids = tokens.to_vec();
        input.placeholders = placeholders.to_vec();
        self.backend.begin_step(&input).expect("the device works");
        self.backend.embed(&self.table, &mut self.all);
        for start in (0..rows).step_by(SLICE) {
            let slice = start..rows.min(start + SLICE);
            self.backend.gather_rows(&self.all, slice.clone(), &mut self.slice);
            self.backend.sample(&mut self.slice, batch, slice).expect("the device works");
        }
    }

    fn read(&mut self) -> Vec<SampleOutput> {
        let mut out = Vec::new();
        self.backend.read_samples(&mut out).expect("the device works");
        out
    }

    /// What each row gets whose logits are those of the same row of the table.
    fn sample(&mut self, rows: Range<u32>, batch: &SamplingBatch) -> Vec<SampleOutput> {
        self.step(&rows.collect::<Vec<_>>(), &[], batch);
        self.read()
    }
}

/// The CPU's answers to rows of these tokens.
fn expected(logits: &Rows, tokens: &[u32], batch: &SamplingBatch) -> Vec<SampleOutput> {
    let mut sampler = Sampler::new(Isa::Portable);
    let rows = batch.rows.iter().zip(tokens).filter(|(row, _)| row.target != RowTarget::Nothing);
    rows.map(|(row, &token)| {
        let mut logits = logits.row(token as usize)[..batch.vocab_limit].to_vec();
        sample_row(&mut sampler, &mut logits, row, batch)
    })
    .collect()
}

/// Rows of logits on few levels, so that ties are everywhere; padding is NaN.
fn logits(rows: usize, seed: u64) -> Rows {
    let mut rng = Rng::new(seed);
    let value = |i: usize| match i % STRIDE {
        id if id < VOCAB => rng.below(1024) as f32 / 128.0 - 4.0,
        _ => f32::NAN,
    };
    Rows::new((0..rows * STRIDE).map(value).collect(), STRIDE)
}

fn batch(rows: Vec<SamplingRow>) -> SamplingBatch {
    SamplingBatch { rows, vocab_limit: VOCAB, ..SamplingBatch::default() }
}

fn greedy() -> SamplingRow {
    SamplingRow { temperature: 0.0, ..SamplingRow::default() }
}

/// Forbids all but a few ids, by what it is shown of the sequence.
struct OnlyAfter;

impl LogitsProcessor for OnlyAfter {
    fn process(&self, context: &LogitsContext<'_>, logits: &mut [f32]) {
        let first = context.prompt[0] as usize;
        logits[..first].fill(f32::NEG_INFINITY);
        logits[first + 5..].fill(f32::NEG_INFINITY);
    }
}

/// Ascending ids.
fn ids(rng: &mut Rng, n: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..n).map(|_| rng.below(VOCAB) as u32).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn append<T>(list: &mut Vec<T>, items: impl IntoIterator<Item = T>) -> Range<usize> {
    let start = list.len();
    list.extend(items);
    start..list.len()
}

/// Adds a row of the i-th kind: all parameters, all targets, the host's rows too.
fn add_row(batch: &mut SamplingBatch, i: usize, rng: &mut Rng) {
    let allowed = (i % 4 == 1).then(|| append(&mut batch.ids, ids(rng, 700)));
    // One of them is in no vocabulary.
    let suppressed = ids(rng, if i % 3 == 1 { 300 } else { 0 }).into_iter().chain([u32::MAX]);
    let suppressed = append(&mut batch.ids, suppressed);
    let biases = ids(rng, 20).into_iter().map(|id| (id, rng.signed() * 5.0));
    let biases: Vec<(u32, f32)> = biases.collect();
    let seen = ids(rng, 260).into_iter();
    let seen = seen.map(|token| SeenToken { token, output_count: token % 3 });
    let processor = (i % 12 == 10).then(|| ProcessorCall {
        processor: Arc::new(OnlyAfter),
        history: append(&mut batch.history, [7 * i as u32, 1, 2]),
        prompt_len: 2,
    });
    let row = SamplingRow {
        target: match i % 12 {
            7 => RowTarget::Given(VOCAB as u32 - 1),
            // Padding of the output matrix.
            9 => RowTarget::Given(VOCAB as u32 + 2),
            11 => RowTarget::Nothing,
            _ => RowTarget::Sample,
        },
        temperature: [1.0, 0.0, 0.3, 2.0, 1e-3][i % 5],
        top_k: [0, 1, 40, 0, u32::MAX][i % 5],
        top_p: [1.0, 0.9, 0.1, 0.999][i % 4],
        min_p: [0.0, 0.05, 0.0][i % 3],
        repetition_penalty: [1.0, 1.3, 0.7][i % 3],
        frequency_penalty: [0.0, 0.5][i % 2],
        presence_penalty: [0.0, -0.25, 1.0][i % 3],
        seed: rng.next_u64(),
        position: 100 * i as u32,
        logprobs: [None, Some(0), Some(3), Some(64), Some(65), None, Some(1)][i % 7],
        allowed,
        suppressed,
        bias: append(&mut batch.biases, biases),
        seen: append(&mut batch.seen, seen),
        processor,
    };
    batch.rows.push(row);
}

/// A slice of greedy rows, and one in which rows of every kind are together.
#[test]
fn rows_of_every_kind() {
    let mixed = 24;
    let logits = logits(SLICE + mixed, 1);
    let mut batch = batch(vec![greedy(); SLICE]);
    let mut rng = Rng::new(2);
    for i in 0..mixed {
        add_row(&mut batch, i, &mut rng);
    }
    let mut device = Device::new(&logits);
    let all = 0..(SLICE + mixed) as u32;
    let tokens: Vec<u32> = all.clone().collect();
    let got = device.sample(all.clone(), &batch);
    assert_samples(&got, &expected(&logits, &tokens, &batch));
    assert_eq!(device.sample(all, &batch), got, "again, into the other results");
    // Each alone, but for the host's, gets the same bits.
    let mut got = got.into_iter();
    for (i, row) in batch.rows.iter().enumerate() {
        if row.target == RowTarget::Nothing {
            continue;
        }
        let want = got.next().unwrap();
        if i % 3 == 1 {
            let alone = SamplingBatch { rows: vec![row.clone()], ..batch.clone() };
            assert_eq!(device.sample(i as u32..i as u32 + 1, &alone), [want], "row {i} alone");
        }
    }
}

fn launches(device: &mut Device, rows: Vec<SamplingRow>) -> Vec<&'static str> {
    let batch = SamplingBatch { ids: vec![3, 5], ..batch(rows) };
    device.backend.record_launches(true);
    device.sample(0..batch.rows.len() as u32, &batch);
    let launches = device.backend.record_launches(false);
    let is_sampling = |kernel: &&str| !["embed", "gather_rows", "patch_tokens"].contains(kernel);
    launches.into_iter().map(|launch| launch.kernel).filter(is_sampling).collect()
}

#[test]
fn nothing_is_launched_that_no_row_needs() {
    let mut device = Device::new(&logits(2, 3));
    let launches = |rows: Vec<SamplingRow>, device: &mut Device| launches(device, rows).join(" ");
    let device = &mut device;
    let nothing = SamplingRow { target: RowTarget::Nothing, ..SamplingRow::default() };
    assert_eq!(launches(vec![nothing.clone(); 2], device), "");
    assert_eq!(
        launches(vec![greedy(), nothing.clone()], device),
        "row_stats fold_stats choose_tokens"
    );
    let given =
        SamplingRow { target: RowTarget::Given(4), logprobs: Some(0), ..Default::default() };
    assert_eq!(
        launches(vec![given], device),
        "row_stats fold_stats choose_tokens sum_exp fold_logprobs"
    );
    let allowed = SamplingRow { allowed: Some(0..2), logprobs: Some(1), ..greedy() };
    assert_eq!(
        launches(vec![allowed, nothing], device),
        "prepare_logits fold_stats row_stats fold_stats choose_tokens \
         sum_exp top_partials fold_logprobs"
    );
    assert_eq!(
        launches(vec![SamplingRow::default(), greedy()], device),
        "prepare_logits fold_stats scale_logits cut_logits draw_partials choose_tokens"
    );
    let edited = SamplingRow { suppressed: 0..2, ..SamplingRow::default() };
    assert_eq!(
        launches(vec![edited], device),
        "prepare_logits fold_stats edit_logits row_stats fold_stats \
         scale_logits cut_logits draw_partials choose_tokens"
    );
}

#[test]
fn rows_that_are_refused() {
    let mut logits = logits(6, 4);
    logits.data[VOCAB - 1] = f32::NAN;
    logits.data[STRIDE + 17] = f32::INFINITY;
    logits.data[2 * STRIDE..][..VOCAB].fill(f32::NEG_INFINITY);
    logits.data[3 * STRIDE + 5] = f32::NEG_INFINITY;
    let drawn = SamplingRow { top_k: 5, top_p: 0.9, logprobs: Some(2), ..SamplingRow::default() };
    let mut batch = batch(vec![drawn.clone(); 6]);
    batch.ids = vec![5, 7];
    // Of two allowed ids one is suppressed, the other −∞.
    batch.rows[3].allowed = Some(0..2);
    batch.rows[3].suppressed = 1..2;
    batch.rows[4].allowed = Some(1..2);
    batch.rows[5].allowed = Some(1..1);
    let mut device = Device::new(&logits);
    let got = device.sample(0..6, &batch);
    assert_samples(&got, &expected(&logits, &[0, 1, 2, 3, 4, 5], &batch));
    let tokens: Vec<_> = got.into_iter().map(|output| output.token).collect();
    use RowError::{NotANumber, NothingAllowed};
    let refused = [NotANumber, NotANumber, NothingAllowed, NothingAllowed].map(Err);
    assert_eq!(tokens[..4], refused);
    assert_eq!(tokens[4..], [Ok(7), Err(NothingAllowed)]);
}

/// Each step's tokens are what the one before chose, the host's and a refused row's too, before
/// anybody has read them.
#[test]
fn the_next_step_begins_with_tokens_that_nobody_has_read() {
    let mut logits = logits(VOCAB, 5);
    // Token 0 leads nowhere, so its row is refused and it is chosen again.
    logits.data[..VOCAB].fill(f32::NEG_INFINITY);
    let call = ProcessorCall { processor: Arc::new(OnlyAfter), history: 0..2, prompt_len: 1 };
    let batch = |position| SamplingBatch {
        history: vec![500, 1],
        ..batch(vec![
            SamplingRow { position, ..SamplingRow::default() },
            SamplingRow { position, processor: Some(call.clone()), ..SamplingRow::default() },
            SamplingRow { position, ..greedy() },
            SamplingRow { position, top_k: 3, logprobs: Some(2), ..SamplingRow::default() },
        ])
    };
    let mut device = Device::new(&logits);
    let mut tokens = vec![1, 2, 0, 4];
    device.step(&tokens, &[], &batch(0));
    for position in 1..6 {
        // Rows in another order, so that a wrong row shows.
        let order = [3, 0, 2, 1];
        let places: Vec<(u32, u32)> = (0..4).zip(order).collect();
        device.step(&[0; 4], &places, &batch(position));
        let want = expected(&logits, &tokens, &batch(position - 1));
        let got = device.read();
        assert_samples(&got, &want);
        assert_eq!(got[2].token, Err(RowError::NothingAllowed));
        tokens = order.iter().map(|&row| got[row as usize].token.unwrap_or(0)).collect();
    }
    assert_samples(&device.read(), &expected(&logits, &tokens, &batch(5)));
}

/// A step without rows has no answers and keeps its place among the others.
#[test]
fn steps_without_rows_are_read_as_the_others() {
    let logits = logits(3, 6);
    let mut device = Device::new(&logits);
    let one = batch(vec![greedy()]);
    let read = |device: &mut Device, token| {
        assert_samples(&device.read(), &expected(&logits, &[token], &one));
    };
    device.step(&[1], &[], &one);
    device.step(&[], &[], &batch(Vec::new()));
    read(&mut device, 1);
    device.step(&[2], &[], &one);
    assert_eq!(device.read(), []);
    read(&mut device, 2);
}

#[test]
fn abandoned_steps_leave_nothing() {
    let logits = logits(3, 7);
    let mut device = Device::new(&logits);
    let one = batch(vec![SamplingRow { logprobs: Some(3), ..SamplingRow::default() }]);
    for _ in 0..3 {
        device.step(&[0], &[], &one);
        // Does not end.
        device.begin(&[1], &[], &one);
        device.backend.abandon_steps();
        device.step(&[2], &[], &one);
        assert_samples(&device.read(), &expected(&logits, &[2], &one));
    }
}

/// More allowed ids than there is room for at first.
#[test]
fn long_lists_find_room() {
    let rows = 80;
    let logits = logits(rows, 8);
    let mut batch = batch(Vec::new());
    for i in 0..rows {
        let odd = (0..VOCAB as u32).filter(|id| id % 50 != i as u32 % 50);
        let allowed = Some(append(&mut batch.ids, odd));
        batch.rows.push(SamplingRow { allowed, ..greedy() });
    }
    assert!(batch.ids.len() > 1 << 16);
    let tokens: Vec<u32> = (0..rows as u32).collect();
    let mut device = Device::new(&logits);
    for _ in 0..2 {
        let got = device.sample(0..rows as u32, &batch);
        assert_samples(&got, &expected(&logits, &tokens, &batch));
    }
}
