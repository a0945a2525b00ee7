//! Row-wise kernels: RMS norm, conversion to words, gathering rows.

use crate::ctx::Ctx;
use crate::dtype::{Bf16, Dtype, Elem, F32};
use crate::ptr::SharedMut;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// `x · weight / √(mean(x²) + eps)` of each row, rounded to words.
///
/// `x` is `[rows][d]` where `d` is the length of `weight`; `out` is `[rows][words(d)]`.
/// Panics if a length does not fit.
pub fn rms_norm(
    ctx: &Ctx,
    x: &[f32],
    rows: usize,
    weight: &[f32],
    eps: f32,
    out: &mut [u32],
    dtype: Dtype,
) {
    let d = weight.len();
    row_kernel(ctx, x, (rows, d), out, dtype, Some(Norm { weight, eps }));
}

/// Rounds `[rows][d]` values to `[rows][words(d)]` words.
///
/// Panics if a length does not fit.
pub fn to_words(ctx: &Ctx, x: &[f32], rows: usize, d: usize, out: &mut [u32], dtype: Dtype) {
    row_kernel(ctx, x, (rows, d), out, dtype, None);
}

/// `out[i] = src[rows[i]]`, rows of `d` values.
///
/// Panics if a row is not in `src` or a length does not fit.
pub fn gather_rows(ctx: &Ctx, src: &[f32], d: usize, rows: &[u32], out: &mut [f32]) {
    assert_eq!(out.len(), rows.len() * d, "gather_rows: {} rows of {d}", rows.len());
    let out = SharedMut::new(out);
    ctx.for_rows(rows.len(), d, |start, end| {
        for (i, &row) in rows[start..end].iter().enumerate() {
            // SAFETY: an item has its own output rows.
            let out = unsafe { out.slice((start + i) * d, d) };
            out.copy_from_slice(&src[row as usize * d..][..d]);
        }
    });
}

/// The norm of a row.
#[derive(Clone, Copy)]
struct Norm<'a> {
    weight: &'a [f32],
    eps: f32,
}

fn row_kernel(
    ctx: &Ctx,
    x: &[f32],
    (rows, d): (usize, usize),
    out: &mut [u32],
    dtype: Dtype,
    norm: Option<Norm<'_>>,
) {
    let words = dtype.words(d);
    assert_eq!(x.len(), rows * d, "values of {rows} rows of {d}");
    assert_eq!(out.len(), rows * words, "words of {rows} rows of {d}");
    if d == 0 {
        return;
    }
    let out = SharedMut::new(out);
    ctx.for_rows(rows, d, |start, end| {
        // SAFETY: an item has its own output rows.
        let out = unsafe { out.slice(start * words, (end - start) * words) };
        dispatch(ctx.isa, Rows { x: &x[start * d..end * d], d, out, dtype, norm });
    });
}

struct Rows<'a> {
    x: &'a [f32],
    d: usize,
    out: &'a mut [u32],
    dtype: Dtype,
    norm: Option<Norm<'a>>,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.dtype {
            Dtype::F32 => self.convert::<S, F32>(s),
            Dtype::Bf16 => self.convert::<S, Bf16>(s),
        }
    }
}

impl Rows<'_> {
    #[inline(always)]
    fn convert<S: Simd, D: Elem>(self, s: S) {
        let words = self.out.chunks_exact_mut(self.d.div_ceil(D::PACK));
        for (x, out) in self.x.chunks_exact(self.d).zip(words) {
            match self.norm {
                None => D::put(s, x, out),
                Some(norm) => {
                    let factor = rms_factor(s, x, norm.eps);
                    // Whole word vectors at a time: the row need not be stored as f32.
                    let blocks = x.chunks(2 * LANES).zip(norm.weight.chunks(2 * LANES));
                    for ((x, w), out) in blocks.zip(out.chunks_mut(2 * LANES / D::PACK)) {
                        let mut y = [0.0; 2 * LANES];
                        for ((y, &x), &w) in y.iter_mut().zip(x).zip(w) {
                            *y = x * factor * w;
                        }
                        D::put(s, &y[..x.len()], out);
                    }
                }
            }
        }
    }
}

/// `1 / √(mean(x²) + eps)`; the squares are summed by lane, then in the fixed tree.
#[inline(always)]
pub(crate) fn rms_factor<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    let (blocks, tail) = x.as_chunks::<LANES>();
    let mut sums = s.splat(0.0);
    for block in blocks {
        let v = s.load(block);
        sums = s.fma(v, v, sums);
    }
    if !tail.is_empty() {
        let mut block = [0.0; LANES];
        block[..tail.len()].copy_from_slice(tail);
        let v = s.load(&block);
        sums = s.fma(v, v, sums);
    }
    1.0 / (s.sum(sums) / x.len() as f32 + eps).sqrt()
}
