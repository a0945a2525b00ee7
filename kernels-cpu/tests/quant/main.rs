//! Quantised products, bit for bit against the plain arithmetic and within a bound of f64.

#[path = "../common/mod.rs"]
mod common;
mod naive;

use common::{assert_close, random, round, values, words};
use half::f16;
use naive::Block;
use quire_kernels_cpu::{
    Ctx, Dtype, Epilogue, Isa, QuantKind, QuantMatrix, QuantRows, gate_up_rows, gate_up_source,
    gemm_quant,
};

/// Bytes of random rows whose f16 scales are finite and small.
fn random_blocks(kind: QuantKind, rows: usize, k: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = random(7, rows * kind.row_bytes(k).unwrap())
        .into_iter()
        .map(|x| (x * 128.0).floor() as i8 as u8)
        .collect();
    let size = kind.row_bytes(kind.block_elements()).unwrap();
    let scales = random(8, 2 * bytes.len() / size);
    for (block, scales) in bytes.chunks_mut(size).zip(scales.chunks(2)) {
        let halves: &[usize] = match kind {
            QuantKind::Q6K => &[208],
            QuantKind::Q4_1 | QuantKind::Q4K => &[0, 2],
            _ => &[0],
        };
        for (&at, scale) in halves.iter().zip(scales) {
            block[at..at + 2].copy_from_slice(&f16::from_f32(scale * 0.01).to_le_bytes());
        }
    }
    bytes
}

/// A random problem: weights, as the kernel and as the plain arithmetic have them.
struct Problem {
    kind: QuantKind,
    k: usize,
    w: QuantMatrix,
    rows: Vec<Vec<Block>>,
}

fn problem(kind: QuantKind, n: usize, k: usize) -> Problem {
    let ctx = Ctx::new(Isa::Portable, 2).unwrap();
    let mut w = QuantMatrix::zeroed(kind, n, k).unwrap();
    let rows = if kind == QuantKind::Int8 {
        let source = random(9, n * k);
        w.set_values(&ctx, 0, n, &|row, out| out.copy_from_slice(&source[row * k..][..k]));
        source.chunks(k).map(naive::int8_row).collect()
    } else {
        let (source, row_bytes) = (random_blocks(kind, n, k), kind.row_bytes(k).unwrap());
        // In two parts that meet inside a panel.
        for (first, rows) in [(0, n / 2), (n / 2, n - n / 2)] {
            let fetch = |row: usize, out: &mut [u8]| {
                out.copy_from_slice(&source[(first + row) * row_bytes..][..row_bytes]);
            };
            w.set_blocks(&ctx, first, rows, &fetch);
        }
        source.chunks(row_bytes).map(|row| naive::blocks(kind, row)).collect()
    };
    assert_eq!(Some(w.bytes()), QuantMatrix::bytes_of(kind, n, k));
    Problem { kind, k, w, rows }
}

impl Problem {
    /// Elements of a block of activations.
    fn block(&self) -> usize {
        if self.kind == QuantKind::Int8 { self.k } else { self.kind.block_elements() }
    }

    fn expected(&self, x: &[f32]) -> Vec<f32> {
        let mut out = Vec::new();
        for x in x.chunks(self.k) {
            let x: Vec<_> = x.chunks(self.block()).map(naive::quantise).collect();
            out.extend(self.rows.iter().map(|w| naive::dot(self.kind, &x, w)));
        }
        out
    }

    fn multiply(&self, ctx: &Ctx, x: &[f32], dtype: Dtype) -> Vec<f32> {
        let m = x.len() / self.k;
        let mut rows = QuantRows::new();
        rows.quantise(ctx, (&words(dtype, x, self.k), dtype), (m, self.k), self.kind);
        let mut out = vec![f32::NAN; m * self.w.n()];
        gemm_quant(ctx, &rows, &self.w, Epilogue::Store { bias: None, out: &mut out });
        out
    }
}

/// Bits, with one pattern for every NaN.
fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect()
}

/// Lengths that are whole blocks, or odd for `Int8`.
fn inputs(kind: QuantKind, blocks: usize) -> usize {
    if kind == QuantKind::Int8 { blocks * 256 + 77 } else { blocks * 256 }
}

#[test]
fn products_have_the_bits_of_the_plain_arithmetic_everywhere() {
    for kind in QuantKind::ALL {
        let p = problem(kind, 139, inputs(kind, 2));
        let x = random(10, 130 * p.k);
        let want = bits(&p.expected(&x));
        for isa in Isa::available() {
            for threads in 1..=3 {
                let ctx = Ctx::new(isa, threads).unwrap();
                for m in [1, 2, 3, 7, 16, 64, 130] {
                    let got = bits(&p.multiply(&ctx, &x[..m * p.k], Dtype::F32));
                    assert!(got == want[..m * 139], "{kind} on {isa}, {m} rows, {threads} threads");
                }
            }
        }
    }
}

#[test]
fn long_rows_cross_chunks() {
    for kind in QuantKind::ALL {
        let p = problem(kind, 33, inputs(kind, 31));
        let x = random(11, 26 * p.k);
        let want = bits(&p.expected(&x));
        for isa in Isa::available() {
            let ctx = Ctx::new(isa, 2).unwrap();
            for m in [1, 26] {
                let got = bits(&p.multiply(&ctx, &x[..m * p.k], Dtype::F32));
                assert!(got == want[..m * 33], "{kind} on {isa}, {m} rows");
            }
        }
    }
}

#[test]
fn bf16_rows_are_quantised_as_the_values_they_hold() {
    let ctx = Ctx::new(Isa::detect(), 2).unwrap();
    for kind in QuantKind::ALL {
        let p = problem(kind, 5, inputs(kind, 1));
        let x: Vec<f32> = random(12, 3 * p.k).into_iter().map(|x| round(Dtype::Bf16, x)).collect();
        assert_eq!(p.multiply(&ctx, &x, Dtype::Bf16), p.expected(&x), "{kind}");
    }
}

#[test]
fn weights_read_back_as_ggml_dequantises_them() {
    for kind in QuantKind::ALL {
        let p = problem(kind, 67, inputs(kind, 2));
        let mut row = vec![0.0; p.k];
        for (i, want) in p.rows.iter().enumerate() {
            p.w.get_row(i, &mut row);
            assert_eq!(bits(&row), bits(&naive::dequantise(kind, want)), "{kind}, row {i}");
        }
    }
}

/// Only the activations are rounded: half a step each, weighed by the weights. Then come the
/// roundings of the chain: of two scales, two integers and two sums a block, relative to terms that
/// may cancel.
#[test]
fn the_error_is_that_of_the_rounded_activations() {
    let ctx = Ctx::new(Isa::detect(), 2).unwrap();
    for kind in QuantKind::ALL {
        let p = problem(kind, 21, inputs(kind, 4));
        let x = random(13, 3 * p.k);
        let chain = 6.0 * (p.k / p.block()) as f64 * 2.0_f64.powi(-24);
        let (mut product, mut bound) = (Vec::new(), Vec::new());
        for x in x.chunks(p.k) {
            for row in &p.rows {
                let w = naive::dequantise(kind, row);
                let products = x.iter().zip(&w).map(|(&x, &w)| f64::from(x) * f64::from(w));
                product.push(products.sum::<f64>());
                let rounded = x.chunks(p.block()).zip(w.chunks(p.block())).map(|(x, w)| {
                    let step = f64::from(naive::quantise(x).scale);
                    0.5001 * step * w.iter().map(|&w| f64::from(w.abs())).sum::<f64>()
                });
                // The activations are at most 1.
                let terms: f64 = row.iter().map(naive::largest_terms).sum();
                bound.push(rounded.sum::<f64>() + chain * terms);
            }
        }
        let got = p.multiply(&ctx, &x, Dtype::F32);
        assert_close(&got, &product, |i| bound[i], kind.name());
        let largest = product.iter().fold(0.0_f64, |a, x| a.max(x.abs()));
        assert_close(&got, &product, |_| 0.03 * largest, kind.name());
    }
}

#[test]
fn epilogues_add_bias_and_residual() {
    for isa in Isa::available() {
        let ctx = Ctx::new(isa, 2).unwrap();
        for kind in QuantKind::ALL {
            let (m, n) = (3, 75);
            let p = problem(kind, n, inputs(kind, 1));
            let x = random(14, m * p.k);
            let plain = p.multiply(&ctx, &x, Dtype::F32);
            let mut rows = QuantRows::new();
            let x = (&words(Dtype::F32, &x, p.k)[..], Dtype::F32);
            rows.quantise(&ctx, x, (m, p.k), kind);
            let (bias, old) = (random(15, n), random(16, m * n));
            let (mut stored, mut added) = (vec![f32::NAN; m * n], old.clone());
            let ep = Epilogue::Store { bias: Some(&bias), out: &mut stored };
            gemm_quant(&ctx, &rows, &p.w, ep);
            let ep = Epilogue::Add { bias: Some(&bias), out: &mut added };
            gemm_quant(&ctx, &rows, &p.w, ep);
            for i in 0..m * n {
                assert_eq!(stored[i], plain[i] + bias[i % n], "{kind} on {isa}");
                assert_eq!(added[i], old[i] + stored[i], "{kind} on {isa}");
            }
        }
    }
}

#[test]
fn silu_mul_pairs_gate_and_up() {
    let kind = QuantKind::Q8_0;
    for isa in Isa::available() {
        let ctx = Ctx::new(isa, 2).unwrap();
        for (n_ff, dtype) in [(1, Dtype::F32), (33, Dtype::Bf16), (96, Dtype::Bf16)] {
            let (m, k) = (7, 64);
            let (row_bytes, source) =
                (kind.row_bytes(k).unwrap(), random_blocks(kind, 2 * n_ff, k));
            let row = |is_up: bool, i: usize| {
                &source[(usize::from(is_up) * n_ff + i) * row_bytes..][..row_bytes]
            };
            let mut w = QuantMatrix::zeroed(kind, gate_up_rows(n_ff), k).unwrap();
            w.set_blocks(&ctx, 0, gate_up_rows(n_ff), &|packed, out| {
                if let Some((is_up, i)) = gate_up_source(n_ff, packed) {
                    out.copy_from_slice(row(is_up, i));
                }
            });
            let x: Vec<f32> = random(17, m * k).into_iter().map(|x| round(dtype, x)).collect();
            let mut rows = QuantRows::new();
            rows.quantise(&ctx, (&words(dtype, &x, k), dtype), (m, k), kind);
            let mut out = vec![u32::MAX; m * dtype.words(n_ff)];
            gemm_quant(&ctx, &rows, &w, Epilogue::SiluMul { out: &mut out, n_ff });
            let mut want = Vec::new();
            for x in x.chunks(k) {
                let x: Vec<_> = x.chunks(32).map(naive::quantise).collect();
                let dot = |row: &[u8]| f64::from(naive::dot(kind, &x, &naive::blocks(kind, row)));
                for i in 0..n_ff {
                    let (gate, up) = (dot(row(false, i)), dot(row(true, i)));
                    want.push(gate / (1.0 + (-gate).exp()) * up);
                }
            }
            let tolerance = if dtype == Dtype::F32 { 2e-6 } else { 5e-3 };
            let bound = |i: usize| tolerance * want[i].abs() + 1e-6;
            let what = format!("{isa} {dtype:?} n_ff {n_ff}");
            assert_close(&values(dtype, &out, n_ff), &want, bound, &what);
        }
    }
}

#[test]
fn a_row_that_is_not_finite_is_nan_and_no_other_row_sees_it() {
    for isa in Isa::available() {
        let ctx = Ctx::new(isa, 2).unwrap();
        for kind in QuantKind::ALL {
            let p = problem(kind, 35, inputs(kind, 2));
            let mut x = random(18, 9 * p.k);
            let last = p.k - 1;
            for (row, bad) in [(1, f32::NAN), (4, f32::INFINITY), (7, f32::NEG_INFINITY)] {
                x[row * p.k + if row == 4 { 300 } else { last }] = bad;
            }
            // Zeros, and values so small that they count as zeros.
            x[5 * p.k..6 * p.k].fill(0.0);
            x[6 * p.k..7 * p.k].fill(1e-38);
            let got = p.multiply(&ctx, &x, Dtype::F32);
            assert_eq!(bits(&got), bits(&p.expected(&x)), "{kind} on {isa}");
            for (row, out) in got.chunks(35).enumerate() {
                let nan = [1, 4, 7].contains(&row);
                assert!(out.iter().all(|x| x.is_nan() == nan), "{kind} on {isa}, row {row}");
                if [5, 6].contains(&row) {
                    assert!(out.iter().all(|&x| x == 0.0), "{kind} on {isa}, row {row}");
                }
            }
        }
    }
}

/// Every byte of the quants and packed scales at an extreme, and activations of full magnitude.
#[test]
fn extreme_weights_do_not_saturate() {
    for kind in QuantKind::ALL.into_iter().filter(|&kind| kind != QuantKind::Int8) {
        let k = 512;
        for fill in [0x00, 0x80, 0x7f, 0xff] {
            let mut source = random_blocks(kind, 1, k);
            let scales = random_blocks(kind, 1, k);
            source.fill(fill);
            let size = kind.row_bytes(kind.block_elements()).unwrap();
            let halves = if kind == QuantKind::Q6K { 208..210 } else { 0..2 };
            for (block, scales) in source.chunks_mut(size).zip(scales.chunks(size)) {
                block[halves.clone()].copy_from_slice(&scales[halves.clone()]);
                if matches!(kind, QuantKind::Q4_1 | QuantKind::Q4K) {
                    block[2..4].copy_from_slice(&scales[2..4]);
                }
            }
            let mut w = QuantMatrix::zeroed(kind, 1, k).unwrap();
            let ctx = Ctx::new(Isa::Portable, 1).unwrap();
            w.set_blocks(&ctx, 0, 1, &|_, out| out.copy_from_slice(&source));
            let p = Problem { kind, k, w, rows: vec![naive::blocks(kind, &source)] };
            let alternating = (0..k).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 });
            for x in [vec![1.0; k], vec![-1.0; k], alternating.collect()] {
                for isa in Isa::available() {
                    let ctx = Ctx::new(isa, 1).unwrap();
                    let got = p.multiply(&ctx, &x, Dtype::F32);
                    assert_eq!(bits(&got), bits(&p.expected(&x)), "{kind} {fill:#x} on {isa}");
                }
            }
        }
    }
}

#[test]
fn the_longest_int8_row_does_not_overflow() {
    let k = QuantKind::INT8_MAX_INPUTS;
    let mut w = QuantMatrix::zeroed(QuantKind::Int8, 2, k).unwrap();
    let ctx = Ctx::new(Isa::Portable, 1).unwrap();
    w.set_values(&ctx, 0, 2, &|row, out| out.fill(if row == 0 { 127.0 } else { -127.0 }));
    let x = vec![127.0_f32; k];
    let dot = (127 * 127 * k) as f32;
    for isa in Isa::available() {
        let ctx = Ctx::new(isa, 1).unwrap();
        let mut rows = QuantRows::new();
        rows.quantise(&ctx, (bytemuck::cast_slice(&x), Dtype::F32), (1, k), QuantKind::Int8);
        let mut out = [0.0; 2];
        gemm_quant(&ctx, &rows, &w, Epilogue::Store { bias: None, out: &mut out });
        assert_eq!(out, [dot, -dot], "{isa}");
    }
}

#[test]
fn kinds_with_the_same_blocks_share_rows_and_others_do_not() {
    let ctx = Ctx::new(Isa::detect(), 1).unwrap();
    let p = problem(QuantKind::Q4_1, 3, 32);
    let x = random(19, 32);
    let mut rows = QuantRows::new();
    let x = (bytemuck::cast_slice(&x), Dtype::F32);
    rows.quantise(&ctx, x, (1, 32), QuantKind::Q8_0);
    let mut out = [0.0; 3];
    gemm_quant(&ctx, &rows, &p.w, Epilogue::Store { bias: None, out: &mut out });
    assert_eq!(out, p.multiply(&ctx, &random(19, 32), Dtype::F32)[..]);
    for (a, b) in [(QuantKind::Q4K, QuantKind::Q6K), (QuantKind::Int8, QuantKind::Q8_0)] {
        assert!(!a.same_rows(b) && !b.same_rows(a));
    }
}

#[test]
#[should_panic(expected = "rows for int8, weights of Q4_0")]
fn rows_of_another_kind_are_refused() {
    let ctx = Ctx::new(Isa::Portable, 1).unwrap();
    let p = problem(QuantKind::Q4_0, 1, 32);
    let mut rows = QuantRows::new();
    rows.quantise(&ctx, (&[0; 32], Dtype::F32), (1, 32), QuantKind::Int8);
    gemm_quant(&ctx, &rows, &p.w, Epilogue::Store { bias: None, out: &mut [0.0] });
}

#[test]
fn empty_products_are_fine() {
    let ctx = Ctx::new(Isa::detect(), 2).unwrap();
    for kind in QuantKind::ALL {
        assert!(problem(kind, 3, inputs(kind, 1)).multiply(&ctx, &[], Dtype::F32).is_empty());
        let w = QuantMatrix::zeroed(kind, 2, 0).unwrap();
        let mut rows = QuantRows::new();
        rows.quantise(&ctx, (&[], Dtype::F32), (3, 0), kind);
        let mut out = [f32::NAN; 6];
        gemm_quant(&ctx, &rows, &w, Epilogue::Store { bias: None, out: &mut out });
        assert_eq!(out, [0.0; 6], "{kind}");
    }
}
