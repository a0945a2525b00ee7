//! GEMM against f64, and its bits under every way of cutting the work.

mod common;

use common::{assert_close, contexts, random, round, values, words};
use quire_kernels_cpu::{
    Ctx, Dtype, Epilogue, Isa, PackedMatrix, gate_up_rows, gate_up_source, gemm,
};

/// A random problem and its exact product.
struct Problem {
    dtype: Dtype,
    n: usize,
    k: usize,
    x: Vec<u32>,
    w: PackedMatrix,
    bias: Vec<f32>,
    product: Vec<f64>,
    /// `Σ|x·w|`, to which the rounding error is relative.
    scale: Vec<f64>,
}

fn problem(dtype: Dtype, m: usize, n: usize, k: usize) -> Problem {
    let x: Vec<f32> = random(1, m * k).into_iter().map(|x| round(dtype, x)).collect();
    let weights: Vec<f32> = random(2, n * k).into_iter().map(|x| round(dtype, x)).collect();
    let mut w = PackedMatrix::zeroed(dtype, n, k).unwrap();
    for (row, values) in weights.chunks(k).enumerate() {
        w.set_row(row, values);
    }
    let mut product = Vec::new();
    let mut scale = Vec::new();
    for x in x.chunks(k) {
        for w in weights.chunks(k) {
            let terms = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
            product.push(terms.clone().sum());
            scale.push(terms.map(f64::abs).sum());
        }
    }
    Problem { dtype, n, k, x: words(dtype, &x, k), w, bias: random(3, n), product, scale }
}

fn multiply(ctx: &Ctx, p: &Problem, rows: std::ops::Range<usize>) -> Vec<f32> {
    let words = p.dtype.words(p.k);
    let x = &p.x[rows.start * words..rows.end * words];
    let mut out = vec![f32::NAN; rows.len() * p.n];
    gemm(ctx, x, rows.len(), &p.w, Epilogue::Store { bias: None, out: &mut out });
    out
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

const DTYPES: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];

#[test]
fn products_match_f64_on_every_path() {
    let contexts = contexts(2);
    for dtype in DTYPES {
        for n in [1, 63, 65, 576] {
            for (k, m) in [(1, 5), (2, 3), (3, 14), (64, 1), (64, 13), (576, 7)] {
                let p = problem(dtype, m, n, k);
                for ctx in &contexts {
                    let what = format!("{} {dtype:?} {m}×{n}×{k}", ctx.isa);
                    let bound = |i: usize| 4e-7 * (k as f64).sqrt().max(4.0) * p.scale[i] + 1e-30;
                    assert_close(&multiply(ctx, &p, 0..m), &p.product, bound, &what);
                }
            }
        }
    }
}

#[test]
fn epilogues_add_bias_and_residual() {
    for ctx in contexts(2) {
        for dtype in DTYPES {
            for n in [63, 130] {
                let p = problem(dtype, 3, n, 34);
                let plain = multiply(&ctx, &p, 0..3);
                let mut stored = vec![f32::NAN; 3 * n];
                let ep = Epilogue::Store { bias: Some(&p.bias), out: &mut stored };
                gemm(&ctx, &p.x, 3, &p.w, ep);
                let old = random(4, 3 * n);
                let mut added = old.clone();
                gemm(&ctx, &p.x, 3, &p.w, Epilogue::Add { bias: Some(&p.bias), out: &mut added });
                for i in 0..3 * n {
                    assert_eq!(stored[i], plain[i] + p.bias[i % n], "{} {dtype:?}", ctx.isa);
                    assert_eq!(added[i], old[i] + stored[i], "{} {dtype:?}", ctx.isa);
                }
                let mut residual = old.clone();
                gemm(&ctx, &p.x, 3, &p.w, Epilogue::Add { bias: None, out: &mut residual });
                assert!((0..3 * n).all(|i| residual[i] == old[i] + plain[i]));
            }
        }
    }
}

#[test]
fn silu_mul_pairs_gate_and_up() {
    for ctx in contexts(2) {
        for dtype in DTYPES {
            for n_ff in [1, 31, 33, 96, 145] {
                let (m, k) = (7, 20);
                let source = random(5, 2 * n_ff * k);
                let row =
                    |is_up: bool, i: usize| &source[(usize::from(is_up) * n_ff + i) * k..][..k];
                let mut w = PackedMatrix::zeroed(dtype, gate_up_rows(n_ff), k).unwrap();
                w.set_rows(&ctx, 0, gate_up_rows(n_ff), &|packed, out| {
                    if let Some((is_up, i)) = gate_up_source(n_ff, packed) {
                        out.copy_from_slice(row(is_up, i));
                    }
                });
                let x = random(6, m * k);
                let mut out = vec![u32::MAX; m * dtype.words(n_ff)];
                let ep = Epilogue::SiluMul { out: &mut out, n_ff };
                gemm(&ctx, &words(dtype, &x, k), m, &w, ep);
                let dot = |x: &[f32], w: &[f32]| -> f64 {
                    let term = |(&x, &w): (&f32, &f32)| {
                        f64::from(round(dtype, x)) * f64::from(round(dtype, w))
                    };
                    x.iter().zip(w).map(term).sum()
                };
                let mut want = Vec::new();
                for x in x.chunks(k) {
                    for i in 0..n_ff {
                        let (gate, up) = (dot(x, row(false, i)), dot(x, row(true, i)));
                        want.push(gate / (1.0 + (-gate).exp()) * up);
                    }
                }
                let tolerance = if dtype == Dtype::F32 { 2e-6 } else { 5e-3 };
                let bound = |i: usize| tolerance * want[i].abs() + 1e-6;
                let what = format!("{} {dtype:?} n_ff {n_ff}", ctx.isa);
                assert_close(&values(dtype, &out, n_ff), &want, bound, &what);
                if dtype == Dtype::Bf16 && n_ff % 2 == 1 {
                    let row = dtype.words(n_ff);
                    assert!(out.chunks(row).all(|row| row[row.len() - 1] >> 16 == 0), "{what}");
                }
            }
        }
    }
}

#[test]
fn rows_have_the_same_bits_alone_and_together_on_any_number_of_threads() {
    for isa in Isa::available() {
        let one = Ctx::new(isa, 1).unwrap();
        let (two, three) = (Ctx::new(isa, 2).unwrap(), Ctx::new(isa, 3).unwrap());
        for dtype in DTYPES {
            // 300 words along K cross narrow chunks, 1100 wide ones.
            let shapes = [(14, 576, 64), (7, 200, 300), (110, 65, 40), (40, 70, 1100)];
            for (m, n, k) in shapes.map(|(m, n, words)| (m, n, words * dtype.pack())) {
                let p = problem(dtype, m, n, k);
                let all = bits(&multiply(&one, &p, 0..m));
                assert_eq!(bits(&multiply(&two, &p, 0..m)), all, "{isa} {dtype:?} {m}×{n}×{k}");
                assert_eq!(bits(&multiply(&three, &p, 0..m)), all, "{isa} {dtype:?} {m}×{n}×{k}");
                for rows in [0..1, 1..3, 2..5, 3..7, 0..5, m - 6..m, m - 1..m] {
                    let part = bits(&multiply(&two, &p, rows.clone()));
                    assert_eq!(part, all[rows.start * n..rows.end * n], "{isa} {dtype:?} {rows:?}");
                }
            }
        }
    }
}

#[test]
fn empty_products_are_fine() {
    let ctx = Ctx::new(Isa::detect(), 2).unwrap();
    let p = problem(Dtype::Bf16, 1, 3, 5);
    assert!(multiply(&ctx, &p, 0..0).is_empty());
}

#[test]
#[should_panic(expected = "words of 2 rows of 5 inputs")]
fn wrong_lengths_are_refused() {
    let ctx = Ctx::new(Isa::Portable, 1).unwrap();
    let p = problem(Dtype::Bf16, 1, 3, 5);
    let ep = Epilogue::Store { bias: None, out: &mut [0.0; 6] };
    gemm(&ctx, &p.x, 2, &p.w, ep);
}
