//! Norms, conversions and the QKV epilogue against plain formulas.

mod common;

use common::{assert_close, contexts, random, round, values, words};
use quire_kernels_cpu::{
    Dtype, KvCache, KvShape, QkvArgs, gather_rows, qk_norm_rope_write_kv, rms_norm, to_words,
};

const DTYPES: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];

fn tolerance(dtype: Dtype) -> f64 {
    if dtype == Dtype::F32 { 2e-6 } else { 4.5e-3 }
}

fn norm(x: &[f64], weight: &[f32], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, &w)| x / (mean + eps).sqrt() * f64::from(w)).collect()
}

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

#[test]
fn rms_norm_matches_its_formula_whatever_the_other_rows() {
    for ctx in contexts(2) {
        for dtype in DTYPES {
            for (rows, d) in [(1, 1), (3, 33), (40, 576), (5, 47), (2, 64)] {
                let (x, weight) = (random(1, rows * d), random(2, d));
                let mut out = vec![u32::MAX; rows * dtype.words(d)];
                rms_norm(&ctx, &x, rows, &weight, 1e-5, &mut out, dtype);
                let want: Vec<f64> =
                    x.chunks(d).flat_map(|row| norm(&widen(row), &weight, 1e-5)).collect();
                let bound = |i: usize| tolerance(dtype) * want[i].abs() + 1e-12;
                let what = format!("{} {dtype:?} {rows}×{d}", ctx.isa);
                assert_close(&values(dtype, &out, d), &want, bound, &what);
                let mut last = vec![0; dtype.words(d)];
                rms_norm(&ctx, &x[(rows - 1) * d..], 1, &weight, 1e-5, &mut last, dtype);
                assert_eq!(last, out[out.len() - last.len()..], "{what}");
            }
        }
    }
}

#[test]
fn to_words_rounds_to_nearest_even_and_keeps_nan() {
    for ctx in contexts(2) {
        for (rows, d) in [(3, 31), (2, 32), (4, 65), (300, 64)] {
            let mut x = random(3, rows * d);
            x[..4].copy_from_slice(&[f32::INFINITY, f32::NAN, 1.003_906_2, 1.011_718_8]);
            for dtype in DTYPES {
                let mut out = vec![u32::MAX; rows * dtype.words(d)];
                to_words(&ctx, &x, rows, d, &mut out, dtype);
                let got = values(dtype, &out, d);
                assert!(got[1].is_nan(), "{} {dtype:?}", ctx.isa);
                for (i, (&got, &x)) in got.iter().zip(&x).enumerate().filter(|&(i, _)| i != 1) {
                    assert_eq!(got, round(dtype, x), "{} {dtype:?} element {i}", ctx.isa);
                }
            }
        }
    }
}

#[test]
fn gather_copies_rows_in_order() {
    let src = random(4, 10 * 7);
    for ctx in contexts(2) {
        let rows = [9, 0, 3, 3];
        let mut out = vec![0.0; rows.len() * 7];
        gather_rows(&ctx, &src, 7, &rows, &mut out);
        for (out, row) in out.chunks(7).zip(rows) {
            assert_eq!(out, &src[row as usize * 7..][..7]);
        }
    }
}

/// A QKV case.
#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: Dtype,
    head_dim: usize,
    rot_dim: usize,
    interleaved: bool,
    norms: bool,
}

const Q_HEADS: usize = 6;
const KV_HEADS: usize = 2;
const BLOCK: usize = 16;
const MAX_POS: usize = 100;

/// Norm, then rotation of the leading elements.
fn transform(case: Case, x: &[f32], weight: &[f32], cos: &[f32], sin: &[f32]) -> Vec<f64> {
    let mut y = widen(x);
    if case.norms {
        y = norm(&y, weight, 1e-6);
    }
    let half = case.rot_dim / 2;
    let before = y.clone();
    for i in 0..half {
        let (a, b) = if case.interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
        let (cos, sin) = (f64::from(cos[i]), f64::from(sin[i]));
        y[a] = before[a] * cos - before[b] * sin;
        y[b] = before[b] * cos + before[a] * sin;
    }
    y
}

#[test]
fn qkv_epilogue_matches_its_formula() {
    let contexts = contexts(2);
    for dtype in DTYPES {
        for (head_dim, rot_dim) in [(16, 16), (64, 64), (80, 32), (256, 128), (48, 0)] {
            for (interleaved, norms) in [(false, false), (true, false), (false, true)] {
                let case = Case { dtype, head_dim, rot_dim, interleaved, norms };
                for ctx in &contexts {
                    check_qkv(ctx, case);
                }
            }
        }
    }
}

fn check_qkv(ctx: &quire_kernels_cpu::Ctx, case: Case) {
    let (d, half) = (case.head_dim, case.rot_dim / 2);
    let shape = KvShape {
        layers: 2,
        num_blocks: 6,
        block_size: BLOCK,
        kv_heads: KV_HEADS,
        head_dim: d,
        dtype: case.dtype,
    };
    let mut kv = KvCache::new(shape).unwrap();
    kv.fill(u32::MAX);
    let tokens = 35;
    // Every slot of two blocks but one, in a shuffled order, and one token that is not written.
    let slots: Vec<i64> =
        (0..tokens).map(|t| if t == 7 { -1 } else { (t * 13 % 36 + 30) as i64 }).collect();
    let positions: Vec<u32> = (0..tokens).map(|t| (t * 29 % MAX_POS) as u32).collect();
    let angles = random(5, MAX_POS * half);
    let cos: Vec<f32> = angles.iter().map(|x| (3.0 * x).cos()).collect();
    let sin: Vec<f32> = angles.iter().map(|x| (3.0 * x).sin()).collect();
    let (q_norm, k_norm) = (random(6, d), random(7, d));
    let heads = Q_HEADS + 2 * KV_HEADS;
    let qkv = random(8, tokens * heads * d);
    let args = QkvArgs {
        qkv: &qkv,
        positions: &positions,
        slots: &slots,
        q_heads: Q_HEADS,
        q_norm: case.norms.then_some(&q_norm),
        k_norm: case.norms.then_some(&k_norm),
        eps: 1e-6,
        cos: &cos,
        sin: &sin,
        rot_dim: case.rot_dim,
        interleaved: case.interleaved,
        layer: 1,
    };
    let mut q = vec![u32::MAX; tokens * Q_HEADS * case.dtype.words(d)];
    qk_norm_rope_write_kv(ctx, &args, &mut kv, &mut q);
    let q = values(case.dtype, &q, d);
    let what = format!("{} {case:?}", ctx.isa);
    let close = |got: &[f32], want: &[f64]| {
        assert_close(got, want, |i| tolerance(case.dtype) * want[i].abs() + 3e-7, &what);
    };
    let mut got = vec![0.0; d];
    for t in 0..tokens {
        let row = &qkv[t * heads * d..][..heads * d];
        let at = positions[t] as usize * half;
        let (cos, sin) = (&cos[at..at + half], &sin[at..at + half]);
        for h in 0..Q_HEADS {
            let want = transform(case, &row[h * d..][..d], &q_norm, cos, sin);
            close(&q[(t * Q_HEADS + h) * d..][..d], &want);
        }
        let Ok(slot) = usize::try_from(slots[t]) else { continue };
        for h in 0..KV_HEADS {
            let key = &row[(Q_HEADS + h) * d..][..d];
            kv.read_k(1, slot / BLOCK, slot % BLOCK, h, &mut got);
            close(&got, &transform(case, key, &k_norm, cos, sin));
            let value = &row[(Q_HEADS + KV_HEADS + h) * d..][..d];
            kv.read_v(1, slot / BLOCK, slot % BLOCK, h, &mut got);
            assert_eq!(words(case.dtype, &got, d), words(case.dtype, value, d), "{what}");
        }
    }
    // What was not written is as it was.
    let untouched = (0..6 * BLOCK).filter(|&slot| !slots.contains(&(slot as i64)));
    for slot in untouched {
        kv.read_k(1, slot / BLOCK, slot % BLOCK, 0, &mut got);
        assert!(got.iter().all(|x| x.is_nan()), "{what}: slot {slot}");
        kv.read_v(1, slot / BLOCK, slot % BLOCK, 1, &mut got);
        assert!(got.iter().all(|x| x.is_nan()), "{what}: slot {slot}");
    }
    kv.read_k(0, 2, 0, 0, &mut got);
    assert!(got.iter().all(|x| x.is_nan()), "{what}: the other layer");
}
