//! Every op of the CPU backend, on every instruction set and dtype, is the reference's within the
//! bounds of its arithmetic, and gives a row the same bits whatever is beside it, on one thread or
//! two, for every block size and chunking.

use proptest::prelude::*;
use quire_engine::DType;
use quire_engine::backend::{CpuBackend, ReferenceBackend};
use quire_engine::ops::{Backend, MatrixLayout, TensorKind};
use quire_engine::sampling::{RowTarget, SamplingBatch, SamplingRow, SeenToken};
use quire_tests::conformance::{self, AttentionCase, GemmCase, Meanwhile, assert_bits};
use quire_tests::fixtures::{Poison, every_path};
use quire_tests::harness::{Harness, Rows, row_input};
use quire_tests::rng::Rng;
use quire_tests::strategies;

const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

fn reference(dtype: DType) -> Harness<ReferenceBackend> {
    Harness::new(ReferenceBackend::new(dtype))
}

/// A harness of `threads` threads for each instruction set of `dtype`, with the set's name.
fn cpus(dtype: DType, threads: usize) -> Vec<(String, Harness<CpuBackend>)> {
    let paths = every_path().into_iter().filter(|&(_, d)| d == dtype);
    let harness = |isa| CpuBackend::new(dtype, Some(isa), Some(threads)).expect("available");
    paths.map(|(isa, d)| (format!("{isa} {d}"), Harness::new(harness(isa)))).collect()
}

/// Runs `op` for all rows on two threads, and asserts that each row alone on one thread is the
/// same. Returns the rows.
fn invariant<B: Backend>(
    name: &str,
    (two, one): (&mut Harness<B>, &mut Harness<B>),
    rows: usize,
    op: impl Fn(&mut Harness<B>, &[usize]) -> Rows,
) -> Rows {
    let all: Vec<usize> = (0..rows).collect();
    let batch = op(two, &all);
    assert_bits(&format!("{name}, one thread"), &op(one, &all), &batch);
    for row in [0, rows / 2, rows - 1] {
        let alone = op(one, &[row]);
        assert_bits(&format!("{name}, row {row} alone"), &alone, &batch.select([row]));
    }
    batch
}

fn check_gemm(case: &GemmCase) {
    let all: Vec<usize> = (0..case.rows).collect();
    for dtype in DTYPES {
        let mut r = reference(dtype);
        let linear = conformance::linear(&mut r, case, &all);
        let added = conformance::linear_add(&mut r, case, &all);
        let gated = conformance::gate_up(&mut r, case, &all);
        for ((name, mut two), (_, mut one)) in cpus(dtype, 2).into_iter().zip(cpus(dtype, 1)) {
            let got = invariant(&name, (&mut two, &mut one), case.rows, |h, rows| {
                conformance::linear(h, case, rows)
            });
            conformance::assert_linear(case, dtype, false, &got, &linear);
            let got = invariant(&name, (&mut two, &mut one), case.rows, |h, rows| {
                conformance::linear_add(h, case, rows)
            });
            conformance::assert_linear(case, dtype, true, &got, &added);
            let got = invariant(&name, (&mut two, &mut one), case.rows, |h, rows| {
                conformance::gate_up(h, case, rows)
            });
            conformance::assert_gate_up(case, dtype, &got, &gated);
        }
    }
}

fn check_attention(case: &AttentionCase) {
    let seqs: Vec<usize> = (0..case.seqs.len()).collect();
    // The same tokens in other chunks and blocks of another size, elsewhere in the pool.
    let whole = AttentionCase {
        seqs: case.seqs.iter().map(|chunks| vec![chunks.iter().sum()]).collect(),
        block_size: if case.block_size == 8 { 64 } else { 8 },
        block_seed: case.block_seed ^ 1,
        ..case.clone()
    };
    for dtype in DTYPES {
        let mut r = reference(dtype);
        let want = conformance::attention(&mut r, case, &seqs, Meanwhile::Nothing);
        check_transfers("reference", &mut r, case, &want);
        for ((name, mut two), (_, mut one)) in cpus(dtype, 2).into_iter().zip(cpus(dtype, 1)) {
            let batch = conformance::attention(&mut two, case, &seqs, Meanwhile::Rewrite);
            let other = conformance::attention(&mut one, &whole, &seqs, Meanwhile::Nothing);
            for (seq, want) in want.iter().enumerate() {
                conformance::assert_attention(dtype, &batch[seq], want);
                assert_bits(&format!("{name}, whole, sequence {seq}"), &other[seq], &batch[seq]);
            }
            let last = seqs.len() - 1;
            let alone = conformance::attention(&mut one, case, &[last], Meanwhile::Nothing);
            assert_bits(&format!("{name}, sequence alone"), &alone[0], &batch[last]);
            check_transfers(&name, &mut two, case, &batch);
        }
    }
}

/// Swapped blocks, and freed ones where there is a window, leave every sequence the bits of `want`.
fn check_transfers<B: Backend<KvCache: Poison>>(
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..Default::default() })]

    #[test]
    fn matrix_products(case in strategies::gemm()) {
        check_gemm(&case);
    }

    #[test]
    fn norms_and_row_moves(rows in 1..20usize, cols in 1..300usize, seed in any::<u64>()) {
        let values = Rng::new(seed).floats(rows * cols, 8.0);
        let x = Rows::new(values, cols);
        for dtype in DTYPES {
            let want = conformance::rms_norm(&mut reference(dtype), &x, 1e-5);
            for ((name, mut two), (_, mut one)) in cpus(dtype, 2).into_iter().zip(cpus(dtype, 1)) {
                let got = invariant(&name, (&mut two, &mut one), rows, |h, rows| {
                    conformance::rms_norm(h, &x.select(rows.iter().copied()), 1e-5)
                });
                conformance::assert_rms_norm(dtype, &got, &want);
                check_row_moves(&mut two, &x);
            }
            check_row_moves(&mut reference(dtype), &x);
        }
    }

    #[test]
    fn cached_attention(case in strategies::attention()) {
        check_attention(&case);
    }

    #[test]
    fn sampling(rows in 1..12usize, vocab in 1..400usize, seed in any::<u64>()) {
        let mut rng = Rng::new(seed);
        let logits = Rows::new(rng.floats(rows * vocab, 6.0), vocab);
        let batch = sampling_batch(rows, vocab, &mut rng);
        let want = conformance::sample(&mut reference(DType::F32), &logits, &batch);
        prop_assert_eq!(want.len(), batch.rows.iter().filter(|r| r.target != RowTarget::Nothing).count());
        // The contract of the sampler is stronger than that of the ops: equal on every path.
        for (name, mut h) in cpus(DType::F32, 2).into_iter().chain(cpus(DType::Bf16, 1)) {
            prop_assert_eq!(&conformance::sample(&mut h, &logits, &batch), &want, "{}", name);
        }
    }
}

/// The widest head group of the widest head, which the random cases leave out.
#[test]
fn the_largest_heads() {
    for (group, head_dim) in [(8, 256), (7, 128)] {
        check_attention(&AttentionCase {
            num_kv_heads: 1,
            group,
            head_dim,
            block_size: 16,
            window: None,
            rot_dim: head_dim,
            interleaved: false,
            qk_norm: true,
            seqs: vec![vec![5, 1], vec![2]],
            seed: 1,
            block_seed: 2,
        });
    }
}

/// A sequence across a split boundary, in every block size, with a window that crosses it too.
#[test]
fn splits_and_windows() {
    for (block_size, window) in [(8, None), (16, Some(40)), (32, Some(256)), (64, None)] {
        check_attention(&AttentionCase {
            num_kv_heads: 2,
            group: 3,
            head_dim: 16,
            block_size,
            window,
            rot_dim: 8,
            interleaved: true,
            qk_norm: false,
            seqs: vec![vec![100, 100, 55, 1, 1, 1], vec![3, 60], vec![120, 120, 30]],
            seed: 3,
            block_seed: 4,
        });
    }
}

/// Single tokens whose window begins at every offset of a block and of a tile of 16 keys: whichever
/// block has just left the window is not looked at.
#[test]
fn blocks_are_freed_as_soon_as_no_row_sees_them() {
    for (block_size, window) in [(8, 1), (8, 9), (8, 24), (16, 16), (16, 17), (32, 5)] {
        check_attention(&AttentionCase {
            num_kv_heads: 1,
            group: 2,
            head_dim: 16,
            block_size,
            window: Some(window),
            rot_dim: 16,
            interleaved: false,
            qk_norm: false,
            seqs: vec![[vec![23], vec![1; 34]].concat(), vec![30, 7, 13]],
            seed: 5,
            block_seed: 6,
        });
    }
}

/// `embed` and `gather_rows` are copies: exact on every backend.
fn check_row_moves<B: Backend<KvCache: Poison>>(h: &mut Harness<B>, x: &Rows) {
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
fn sampling_batch(rows: usize, vocab: usize, rng: &mut Rng) -> SamplingBatch {
    let id = |x: usize| x.min(vocab.saturating_sub(1)) as u32;
    let limit_id = |x: usize| id(x.min(vocab.saturating_sub(4)));
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
        bias: 0..rng.below(3),
        seen: 0..rng.below(3),
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
