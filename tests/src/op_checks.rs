//! What must hold of the ops of any backend: results within the bounds of [`conformance`], a row's
//! bits whatever is beside it, and copies that are exact. A backend comes twice, in two set-ups
//! whose bits must not differ, such as one thread and two.

use crate::conformance::{self, AttentionCase, GemmCase, Meanwhile, assert_bits};
use crate::fixtures::Poison;
use crate::harness::{Harness, Rows, row_input};
use crate::rng::Rng;
use quire_engine::DType;
use quire_engine::backend::ReferenceBackend;
use quire_engine::ops::{Backend, MatrixLayout, TensorKind};
use quire_engine::sampling::{RowTarget, SamplingBatch, SamplingRow, SeenToken};

/// The backend that the others are compared with.
pub fn reference(dtype: DType) -> Harness<ReferenceBackend> {
    Harness::new(ReferenceBackend::new(dtype))
}

/// Runs `op` for all rows, and asserts that the other set-up gives the same, and each row alone.
/// Returns the rows.
pub fn invariant<B: Backend>(
    name: &str,
    (h, other): (&mut Harness<B>, &mut Harness<B>),
    rows: usize,
    op: impl Fn(&mut Harness<B>, &[usize]) -> Rows,
) -> Rows {
    let all: Vec<usize> = (0..rows).collect();
    let batch = op(h, &all);
    assert_bits(&format!("{name}, the other set-up"), &op(other, &all), &batch);
    for row in [0, rows / 2, rows - 1] {
        let alone = op(other, &[row]);
        assert_bits(&format!("{name}, row {row} alone"), &alone, &batch.select([row]));
    }
    batch
}

/// What the reference makes of a matrix product.
pub struct GemmResults {
    linear: Rows,
    added: Rows,
    gated: Rows,
}

impl GemmResults {
    /// By the reference.
    pub fn of(case: &GemmCase, dtype: DType) -> Self {
        let (r, all) = (&mut reference(dtype), Vec::from_iter(0..case.rows));
        GemmResults {
            linear: conformance::linear(r, case, &all),
            added: conformance::linear_add(r, case, &all),
            gated: conformance::gate_up(r, case, &all),
        }
    }
}

/// The three matrix products.
pub fn gemm<B: Backend<KvCache: Poison>>(
    name: &str,
    (h, other): (&mut Harness<B>, &mut Harness<B>),
    case: &GemmCase,
    want: &GemmResults,
) {
    let dtype = h.dtype();
    let got = invariant(name, (h, other), case.rows, |h, rows| conformance::linear(h, case, rows));
    conformance::assert_linear(case, dtype, false, &got, &want.linear);
    let got =
        invariant(name, (h, other), case.rows, |h, rows| conformance::linear_add(h, case, rows));
    conformance::assert_linear(case, dtype, true, &got, &want.added);
    let got = invariant(name, (h, other), case.rows, |h, rows| conformance::gate_up(h, case, rows));
    conformance::assert_gate_up(case, dtype, &got, &want.gated);
}

/// `rms_norm` of `x`, where `want` is the reference's.
pub fn norm<B: Backend<KvCache: Poison>>(
    name: &str,
    (h, other): (&mut Harness<B>, &mut Harness<B>),
    x: &Rows,
    want: &Rows,
) {
    let dtype = h.dtype();
    let got = invariant(name, (h, other), x.len(), |h, rows| {
        conformance::rms_norm(h, &x.select(rows.iter().copied()), 1e-5)
    });
    conformance::assert_rms_norm(dtype, &got, want);
}

/// Attention, where `want` is the reference's.
pub fn attention<B: Backend<KvCache: Poison>>(
    name: &str,
    (h, other): (&mut Harness<B>, &mut Harness<B>),
    case: &AttentionCase,
    want: &[Rows],
) {
    let seqs: Vec<usize> = (0..case.seqs.len()).collect();
    // The same tokens in other chunks and blocks of another size, elsewhere in the pool.
    let whole = AttentionCase {
        seqs: case.seqs.iter().map(|chunks| vec![chunks.iter().sum()]).collect(),
        block_size: if case.block_size == 8 { 64 } else { 8 },
        block_seed: case.block_seed ^ 1,
        ..case.clone()
    };
    let batch = conformance::attention(h, case, &seqs, Meanwhile::Rewrite);
    let in_one = conformance::attention(other, &whole, &seqs, Meanwhile::Nothing);
    for (seq, want) in want.iter().enumerate() {
        conformance::assert_attention(h.dtype(), &batch[seq], want);
        assert_bits(&format!("{name}, whole, sequence {seq}"), &in_one[seq], &batch[seq]);
    }
    let last = seqs.len() - 1;
    let alone = conformance::attention(other, case, &[last], Meanwhile::Nothing);
    assert_bits(&format!("{name}, sequence alone"), &alone[0], &batch[last]);
    transfers(name, h, case, &batch);
}

/// Swapped blocks, and freed ones where there is a window, leave every sequence the bits of `want`.
pub fn transfers<B: Backend<KvCache: Poison>>(
    name: &str,
    h: &mut Harness<B>,
    case: &AttentionCase,
    want: &[Rows],
) {
    let seqs: Vec<usize> = (0..case.seqs.len()).collect();
    let free = case.window.map(|_| [false, true].map(|null| Meanwhile::Free { null }));
    for meanwhile in free.into_iter().flatten().chain([Meanwhile::Swap]) {
        let got = conformance::attention(h, case, &seqs, meanwhile);
        for (seq, (got, want)) in got.iter().zip(want).enumerate() {
            assert_bits(&format!("{name}, {meanwhile:?}, sequence {seq}"), got, want);
        }
    }
}

/// `embed` and `gather_rows` are copies: exact on every backend.
pub fn row_moves<B: Backend<KvCache: Poison>>(h: &mut Harness<B>, x: &Rows) {
    let table = h.weight(MatrixLayout::Plain, x);
    let mut input = row_input(x.len());
    input.token_ids.reverse();
    // Every second row, for which logits would be wanted.
    input.logits_indices = (0..x.len() as u32).step_by(2).collect();
    h.begin(&input);
    let mut embedded = h.tensor(x.len(), x.cols, TensorKind::F32);
    h.backend.embed(&table, &mut embedded);
    let want = x.select((0..x.len()).rev()).rounded(h.dtype());
    assert_bits("embed", &h.read(&embedded, &want), &want);
    let first = usize::from(input.logits_indices.len() > 1);
    let rows = first..input.logits_indices.len();
    let want = want.select(input.logits_indices[rows.clone()].iter().map(|&i| i as usize));
    let mut gathered = h.tensor(x.len(), x.cols, TensorKind::F32);
    h.backend.gather_rows(&embedded, rows, &mut gathered);
    assert_bits("gather_rows", &h.read(&gathered, &want), &want);
}

/// Rows of every kind: greedy, drawn, filtered, suppressed, not sampled.
pub fn sampling_batch(rows: usize, vocab: usize, rng: &mut Rng) -> SamplingBatch {
    let id = |x: usize| x.min(vocab.saturating_sub(1)) as u32;
    let limit_id = |x: usize| id(x.min(vocab.saturating_sub(4)));
    // The ids of a row's list are distinct.
    let pairs = |x, y| if limit_id(x) == limit_id(y) { 2 } else { 3 };
    let limit = if vocab > 8 { vocab - 3 } else { vocab };
    let row = |i: usize, rng: &mut Rng| SamplingRow {
        target: match i % 7 {
            5 => RowTarget::Given(id(3)),
            6 => RowTarget::Nothing,
            _ => RowTarget::Sample,
        },
        temperature: [0.0, 1.0, 0.01, 2.5][i % 4],
        top_k: [0, 0, 4, 1000][rng.below(4)],
        top_p: [1.0, 0.9, 0.3][rng.below(3)],
        min_p: [0.0, 0.05][rng.below(2)],
        seed: rng.next_u64(),
        position: rng.below(1000) as u32,
        logprobs: [None, Some(0), Some(5)][rng.below(3)],
        suppressed: if rng.below(3) == 0 { 0..3 } else { 0..0 },
        bias: 0..rng.below(pairs(1, 2)),
        seen: 0..rng.below(pairs(1, 4)),
        repetition_penalty: [1.0, 1.3][rng.below(2)],
        presence_penalty: [0.0, -0.5][rng.below(2)],
        frequency_penalty: [0.0, 0.25][rng.below(2)],
        ..Default::default()
    };
    let rows = (0..rows).map(|i| row(i, rng)).collect();
    SamplingBatch {
        rows,
        ids: vec![0, vocab as u32 / 2, 1_000_000],
        biases: vec![(limit_id(1), 2.5), (limit_id(2), -100.0)],
        seen: vec![
            SeenToken { token: limit_id(1), output_count: 2 },
            SeenToken { token: limit_id(4), output_count: 0 },
        ],
        history: Vec::new(),
        vocab_limit: limit,
    }
}
