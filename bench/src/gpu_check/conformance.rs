//! Each op against the reference backend, on the cases that other backends are tested by, and goldens.

use super::{EAGER, Run, caught, goldens};
use anyhow::Context;
use half::bf16;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use quire_engine::DType;
use quire_engine::backend::CudaBackend;
use quire_engine::backend::cuda::Compute;
use quire_tests::conformance::{self, AttentionCase, GemmCase, Meanwhile};
use quire_tests::harness::{Harness, Rows};
use quire_tests::op_checks::{self, GemmResults, reference, sampling_batch};
use quire_tests::rng::Rng;
use quire_tests::{pools, strategies};

/// How far a log-probability may be from the host's.
const LOGPROB_ERROR: f32 = 2e-5;

/// Checks ops of both types, then goldens.
pub(super) fn run(run: &mut Run) -> anyhow::Result<()> {
    ops::<bf16>(run);
    ops::<f32>(run);
    let folders = goldens::folders(run)?;
    for &dtype in run.sizes.golden_dtypes {
        let ways = goldens::WAYS.iter().filter(|way| way.is_ample()).cycle();
        for (folder, way) in folders.iter().zip(ways) {
            goldens::check(run, folder, way, dtype);
        }
    }
    Ok(())
}

/// Two harnesses: the second computes whatever is compared with the first.
struct Pair<T: Compute>(Harness<CudaBackend<T>>, Harness<CudaBackend<T>>);

impl<T: Compute> Pair<T> {
    fn new() -> anyhow::Result<Self> {
        Ok(Pair(Harness::new(CudaBackend::new(EAGER)?), Harness::new(CudaBackend::new(EAGER)?)))
    }

    fn gemm(&mut self, case: &GemmCase) {
        let want = GemmResults::of(case, T::COMPUTE);
        op_checks::gemm("device", (&mut self.0, &mut self.1), case, &want);
    }

    fn norm(&mut self, x: &Rows) {
        let want = conformance::rms_norm(&mut reference(T::COMPUTE), x, 1e-5);
        op_checks::norm("device", (&mut self.0, &mut self.1), x, &want);
        op_checks::row_moves(&mut self.0, x);
    }

    fn attention(&mut self, case: &AttentionCase) {
        let seqs: Vec<usize> = (0..case.seqs.len()).collect();
        let r = &mut reference(T::COMPUTE);
        let want = conformance::attention(r, case, &seqs, Meanwhile::Nothing);
        op_checks::attention("device", (&mut self.0, &mut self.1), case, &want);
    }

    fn sampling(&mut self, (rows, vocab, seed): (usize, usize, u64)) {
        let mut rng = Rng::new(seed);
        let logits = Rows::new(rng.floats(rows * vocab, 6.0), vocab);
        let batch = sampling_batch(rows, vocab, &mut rng);
        let want = conformance::sample(&mut reference(DType::F32), &logits, &batch);
        let got = conformance::sample(&mut self.0, &logits, &batch);
        assert_eq!(got.len(), want.len(), "rows");
        for (got, want) in got.iter().zip(&want) {
            conformance::assert_sample(got, want, LOGPROB_ERROR);
        }
    }
}

/// Checks every op that computes in `T`.
fn ops<T: Compute>(run: &mut Run) {
    let (cases, dtype) = (run.sizes.op_cases, T::COMPUTE);
    run.check(&format!("matrix products, {dtype}"), || {
        let sizes = || proptest::sample::select(vec![16usize, 48, 64, 144, 272]);
        let mut pair = Pair::<T>::new()?;
        drawn(cases, strategies::gemm_of(sizes(), sizes()), |case| pair.gemm(&case))
    });
    run.check(&format!("norms and moves of rows, {dtype}"), || {
        let mut pair = Pair::<T>::new()?;
        drawn(cases, (1..20usize, 1..20usize, proptest::num::u64::ANY), |(rows, cols, seed)| {
            let values = Rng::new(seed).floats(16 * rows * cols, 8.0);
            pair.norm(&Rows::new(values, 16 * cols));
        })
    });
    run.check(&format!("attention, {dtype}"), || {
        let mut pair = Pair::<T>::new()?;
        let dims = [16, 64, 80, 96, 128];
        drawn(cases, strategies::attention_of(&dims), |case| pair.attention(&case))?;
        for case in delicate().iter().take(cases as usize - 1) {
            pair.attention(case);
        }
        Ok(())
    });
    run.check(&format!("sampling, {dtype}"), || {
        let mut pair = Pair::<T>::new()?;
        let shapes = (1..12usize, 1..400usize, proptest::num::u64::ANY);
        drawn(cases, shapes, |shape| pair.sampling(shape))
    });
    run.check(&format!("moves of blocks, {dtype}"), || {
        for block_size in [16, 32, 64].into_iter().take(cases as usize) {
            let mut backend = CudaBackend::<T>::new(EAGER)?;
            backend.limit_swap_buffers(2 * pools::block_bytes(block_size, dtype));
            pools::check("device", backend, block_size);
        }
        pools::check_order(CudaBackend::<T>::new(EAGER)?);
        Ok(())
    });
}

/// Splits of 256 keys, windows that cross them, and the widest heads that both types have.
fn delicate() -> [AttentionCase; 3] {
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
    let windowed = AttentionCase { block_size: 32, window: Some(256), ..case.clone() };
    let wide = AttentionCase {
        num_kv_heads: 1,
        group: 7,
        head_dim: 128,
        rot_dim: 128,
        interleaved: false,
        qk_norm: true,
        seqs: vec![vec![5, 1], vec![2]],
        ..case.clone()
    };
    [case, windowed, wide]
}

/// Runs `check`, which panics where something is wrong, on so many cases, the same in every run.
fn drawn<S: Strategy>(
    cases: u32,
    strategy: S,
    mut check: impl FnMut(S::Value),
) -> anyhow::Result<()> {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[1; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    for _ in 0..cases {
        let tree = strategy.new_tree(&mut runner);
        let tree = tree.map_err(|reason| anyhow::anyhow!("no case: {reason}"))?;
        let checked = caught(|| {
            check(tree.current());
            Ok(())
        });
        checked.with_context(|| format!("{:?}", tree.current()))?;
    }
    Ok(())
}
