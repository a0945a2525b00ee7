//! Every op of the CUDA backend, in f32 and bf16, is the reference's within the bounds of its
//! arithmetic, and gives a row the same bits whatever is beside it; blocks are moved bit for bit.
//! The sizes are those that the kernels take.

use fakecuda::{Config, FakeCuda, Order};
use half::bf16;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{RngAlgorithm, TestCaseResult, TestRng, TestRunner};
use quire_engine::DType;
use quire_engine::backend::cuda::Compute;
use quire_engine::backend::{CudaBackend, CudaOptions};
use quire_engine::ops::{Backend, ForwardInput, MatrixLayout, TensorKind};
use quire_engine::sampling::{RowTarget, SampleOutput};
use quire_tests::conformance::{self, AttentionCase, GemmCase, Meanwhile};
use quire_tests::harness::{Harness, Rows, row_input};
use quire_tests::op_checks::{self, GemmResults, reference, sampling_batch};
use quire_tests::pools;
use quire_tests::rng::Rng;
use quire_tests::strategies;
use std::cell::RefCell;

/// How far a log-probability may be from the host's.
const LOGPROB_ERROR: f32 = 2e-5;

/// The backend, launching each op as it is called.
fn backend<T: Compute>() -> CudaBackend<T> {
    let options = CudaOptions { enforce_eager: true, ..Default::default() };
    CudaBackend::new(options).expect("a device")
}

/// Two harnesses of one type: the second computes whatever is compared with the first.
struct Pair<T: Compute>(Harness<CudaBackend<T>>, Harness<CudaBackend<T>>);

impl<T: Compute> Pair<T> {
    fn new() -> Self {
        Pair(Harness::new(backend()), Harness::new(backend()))
    }

    fn check_gemm(&mut self, case: &GemmCase) {
        let want = GemmResults::of(case, T::COMPUTE);
        op_checks::gemm(&name::<T>(), (&mut self.0, &mut self.1), case, &want);
    }

    fn check_rows(&mut self, x: &Rows) {
        let want = conformance::rms_norm(&mut reference(T::COMPUTE), x, 1e-5);
        op_checks::norm(&name::<T>(), (&mut self.0, &mut self.1), x, &want);
        op_checks::row_moves(&mut self.0, x);
    }

    fn check_attention(&mut self, case: &AttentionCase) {
        let seqs: Vec<usize> = (0..case.seqs.len()).collect();
        let r = &mut reference(T::COMPUTE);
        let want = conformance::attention(r, case, &seqs, Meanwhile::Nothing);
        op_checks::attention(&name::<T>(), (&mut self.0, &mut self.1), case, &want);
    }
}

fn name<T: Compute>() -> String {
    format!("cuda {}", T::COMPUTE)
}

/// Runs `cases` random cases with both dtypes.
fn random<S: Strategy>(
    cases: u32,
    strategy: S,
    mut check: impl FnMut(&mut Pair<f32>, &mut Pair<bf16>, S::Value),
) {
    let _fake = FakeCuda::load(&Config::default());
    let pairs = RefCell::new((Pair::new(), Pair::new(), &mut check));
    let config = ProptestConfig { cases, failure_persistence: None, ..Default::default() };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[1; 32]);
    let run = |case| -> TestCaseResult {
        let (f32s, bf16s, check) = &mut *pairs.borrow_mut();
        check(f32s, bf16s, case);
        Ok(())
    };
    if let Err(error) = TestRunner::new_with_rng(config, rng).run(&strategy, run) {
        panic!("{error}");
    }
}

#[test]
fn matrix_products() {
    let sizes = || select(vec![16usize, 48, 64, 144, 272]);
    random(6, strategies::gemm_of(sizes(), sizes()), |f32s, bf16s, case| {
        f32s.check_gemm(&case);
        bf16s.check_gemm(&case);
    });
}

#[test]
fn norms_and_row_moves() {
    let shapes = (1..20usize, (1..20usize).prop_map(|n| 16 * n), any::<u64>());
    random(10, shapes, |f32s, bf16s, (rows, cols, seed)| {
        let x = Rows::new(Rng::new(seed).floats(rows * cols, 8.0), cols);
        f32s.check_rows(&x);
        bf16s.check_rows(&x);
    });
}

/// Heads of 256 elements are for bf16.
#[test]
fn cached_attention() {
    random(6, strategies::attention_of(&[16, 64, 80, 96, 128]), |f32s, bf16s, case| {
        f32s.check_attention(&case);
        bf16s.check_attention(&case);
    });
}

/// Splits of 256 keys, windows that cross them, and the widest heads of either dtype.
#[test]
fn splits_windows_and_the_largest_heads() {
    let _fake = FakeCuda::load(&Config::default());
    let case = AttentionCase {
        num_kv_heads: 2,
        group: 3,
        head_dim: 16,
        block_size: 16,
        window: None,
        rot_dim: 8,
        interleaved: true,
        qk_norm: false,
        seqs: vec![vec![100, 100, 55, 1, 1, 1], vec![3, 60], vec![120, 120, 30]],
        seed: 3,
        block_seed: 4,
    };
    let windowed = |block_size, window| AttentionCase {
        block_size,
        window: Some(window),
        num_kv_heads: 1,
        group: 2,
        ..case.clone()
    };
    let wide = |group, head_dim| AttentionCase {
        num_kv_heads: 1,
        group,
        head_dim,
        rot_dim: head_dim,
        interleaved: false,
        qk_norm: true,
        seqs: vec![vec![5, 1], vec![2]],
        ..case.clone()
    };
    let freed = |block_size, window| AttentionCase {
        seqs: vec![[vec![23], vec![1; 18]].concat(), vec![30, 7, 13]],
        ..windowed(block_size, window)
    };
    let mut bf16s = Pair::<bf16>::new();
    for case in [case.clone(), windowed(32, 256), wide(8, 256), freed(8, 9), freed(16, 16)] {
        bf16s.check_attention(&case);
    }
    let mut f32s = Pair::<f32>::new();
    for case in [windowed(16, 40), wide(7, 128), freed(8, 24)] {
        f32s.check_attention(&case);
    }
}

#[test]
fn sampling() {
    let shapes = (1..12usize, 1..400usize, any::<u64>());
    random(12, shapes, |f32s, bf16s, (rows, vocab, seed)| {
        let mut rng = Rng::new(seed);
        let logits = Rows::new(rng.floats(rows * vocab, 6.0), vocab);
        let batch = sampling_batch(rows, vocab, &mut rng);
        let want = conformance::sample(&mut reference(DType::F32), &logits, &batch);
        let wanted = batch.rows.iter().filter(|row| row.target != RowTarget::Nothing).count();
        assert_eq!(want.len(), wanted);
        assert_sampled(&conformance::sample(&mut f32s.0, &logits, &batch), &want);
        assert_sampled(&conformance::sample(&mut bf16s.0, &logits, &batch), &want);
    });
}

/// Asserts equal tokens, and log-probabilities of the same tokens within [`LOGPROB_ERROR`].
fn assert_sampled(got: &[SampleOutput], want: &[SampleOutput]) {
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        conformance::assert_sample(got, want, LOGPROB_ERROR);
    }
}

/// Blocks of both sizes and dtypes, in pieces of every size that the buffers may have: all at once,
/// two blocks, one.
#[test]
fn transfers() {
    let fake = FakeCuda::load(&Config::default());
    for order in [Order::Lazy, Order::Eager] {
        fake.reset(&Config { order, ..Config::default() });
        for (block_size, blocks) in [(16, 9), (16, 2), (32, 1), (64, 2)] {
            check_transfers::<bf16>(block_size, blocks);
        }
        check_transfers::<f32>(32, 2);
        pools::check_order(backend::<bf16>());
        pools::check_without_swap_space(backend::<f32>());
    }
}

fn check_transfers<T: Compute>(block_size: usize, blocks: usize) {
    let mut backend = backend::<T>();
    backend.limit_swap_buffers(blocks * pools::block_bytes(block_size, T::COMPUTE));
    let name = format!("{}, {blocks} blocks at a time", name::<T>());
    pools::check(&name, backend, block_size);
}

/// A step larger than there was room for moves the arrays that graphs read.
#[test]
fn graphs_are_forgotten_when_what_they_read_moves() {
    let fake = FakeCuda::load(&Config::default());
    let backend = CudaBackend::<bf16>::new(CudaOptions::default()).expect("a device");
    let mut h = Harness::new(backend);
    let values = Rows::new((0..160).map(|x| x as f32).collect(), 16);
    let table = h.weight(MatrixLayout::Plain, &values);
    let mut out = h.tensor(1, 16, TensorKind::F32);
    let mut check = |h: &mut Harness<CudaBackend<bf16>>, token: u32| {
        h.begin(&ForwardInput { token_ids: vec![token], ..row_input(1) });
        h.backend.embed(&table, &mut out);
        assert_eq!(h.read_f32(&out, 1, 16), values.select([token as usize]));
    };
    // The first is launched, the second captured.
    (0..5).for_each(|token| check(&mut h, token));
    assert_eq!((h.backend.num_graphs(), fake.stats().graph_launches), (1, 4));
    h.begin(&row_input(10_000));
    assert_eq!(h.backend.num_graphs(), 0);
    (5..10).for_each(|token| check(&mut h, token));
    assert_eq!((h.backend.num_graphs(), fake.stats().graph_launches), (1, 8));
}
