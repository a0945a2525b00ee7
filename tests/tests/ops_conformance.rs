//! Every op of the CPU backend, on every instruction set and dtype, is the reference's within the
//! bounds of its arithmetic, and gives a row the same bits whatever is beside it, on one thread or
//! two, for every block size and chunking.

use proptest::prelude::*;
use quire_engine::DType;
use quire_engine::backend::CpuBackend;
use quire_engine::sampling::RowTarget;
use quire_tests::conformance::{self, AttentionCase, GemmCase, Meanwhile};
use quire_tests::fixtures::every_path;
use quire_tests::harness::{Harness, Rows};
use quire_tests::op_checks::{self, GemmResults, reference, sampling_batch};
use quire_tests::rng::Rng;
use quire_tests::strategies;

const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// A harness of `threads` threads for each instruction set of `dtype`, with the set's name.
fn cpus(dtype: DType, threads: usize) -> Vec<(String, Harness<CpuBackend>)> {
    let paths = every_path().into_iter().filter(|&(_, d)| d == dtype);
    let harness = |isa| CpuBackend::new(dtype, Some(isa), Some(threads)).expect("available");
    paths.map(|(isa, d)| (format!("{isa} {d}"), Harness::new(harness(isa)))).collect()
}

fn check_gemm(case: &GemmCase) {
    for dtype in DTYPES {
        let want = GemmResults::of(case, dtype);
        for ((name, mut two), (_, mut one)) in cpus(dtype, 2).into_iter().zip(cpus(dtype, 1)) {
            op_checks::gemm(&name, (&mut two, &mut one), case, &want);
        }
    }
}

fn check_attention(case: &AttentionCase) {
    let seqs: Vec<usize> = (0..case.seqs.len()).collect();
    for dtype in DTYPES {
        let mut r = reference(dtype);
        let want = conformance::attention(&mut r, case, &seqs, Meanwhile::Nothing);
        op_checks::transfers("reference", &mut r, case, &want);
        for ((name, mut two), (_, mut one)) in cpus(dtype, 2).into_iter().zip(cpus(dtype, 1)) {
            op_checks::attention(&name, (&mut two, &mut one), case, &want);
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
                op_checks::norm(&name, (&mut two, &mut one), &x, &want);
                op_checks::row_moves(&mut two, &x);
            }
            op_checks::row_moves(&mut reference(dtype), &x);
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
