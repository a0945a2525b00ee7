//! exp and ln defined by a scalar formula, and slice reductions, for sampling.
//!
//! Only correctly rounded operations are used (fma, mul, add, div, bit moves), in a fixed order,
//! so every instruction set gives the same bits. The polynomials are those of Cephes `expf` and
//! `logf`.

use std::f32::consts::LOG2_E;

use crate::isa::Isa;
use crate::simd::{Kernel, LANES, ROUND_MAGIC, Simd, dispatch, tree_sum};

/// ln 2 in two parts; the first has so few bits that its product with an exponent is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// Below this e^x is not a normal number.
const EXP_MIN: f32 = -87.336_54;
/// Above this e^x overflows.
const EXP_MAX: f32 = 88.722_84;

/// `x · 2^n` for integral `n` in `[-127, 128]`, in two steps so that the factors stay normal.
#[inline(always)]
pub(crate) fn scale2(x: f32, n: f32) -> f32 {
    // Adding the magic number leaves `n` in the low bits.
    let n = (n + ROUND_MAGIC).to_bits().wrapping_sub(ROUND_MAGIC.to_bits()).cast_signed();
    let half = n >> 1;
    let pow = |n: i32| f32::from_bits((n + 127).cast_unsigned() << 23);
    x * pow(half) * pow(n - half)
}

/// `e^x` within 2 ulp; 0 where the result would be denormal, ∞ on overflow, NaN of NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Written so that NaN falls through the comparisons.
    let clamped = if x < EXP_MIN { EXP_MIN } else { x };
    let clamped = if clamped > EXP_MAX { EXP_MAX } else { clamped };
    let n = (clamped * LOG2_E + ROUND_MAGIC) - ROUND_MAGIC;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, clamped));
    let mut p = 1.987_569_1e-4_f32;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p.mul_add(r, c);
    }
    let y = scale2((p * r).mul_add(r, r) + 1.0, n);
    let y = if x < EXP_MIN { 0.0 } else { y };
    if x > EXP_MAX { f32::INFINITY } else { y }
}

/// `ln x` within 2 ulp; −∞ of 0, NaN below 0 and of NaN, ∞ of ∞. Denormals count as 0.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    // m in [√½, √2): subtracting the bits of √½ carries into the exponent.
    let offset = x.to_bits().wrapping_sub(std::f32::consts::FRAC_1_SQRT_2.to_bits());
    let exponent = (offset.cast_signed() >> 23) as f32;
    let m = (offset & 0x007f_ffff).wrapping_add(std::f32::consts::FRAC_1_SQRT_2.to_bits());
    let f = f32::from_bits(m) - 1.0;
    let mut p = 7.037_683_6e-2_f32;
    for c in [
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ] {
        p = p.mul_add(f, c);
    }
    let square = f * f;
    let low = exponent.mul_add(LN2_LOW, f * square * p);
    let y = exponent.mul_add(LN2_HIGH, square.mul_add(-0.5, low) + f);
    if x.is_nan() || x < 0.0 {
        f32::NAN
    } else if x < f32::MIN_POSITIVE {
        f32::NEG_INFINITY
    } else if x == f32::INFINITY {
        f32::INFINITY
    } else {
        y
    }
}

/// `out[i] = exp(x[i] - max)`, the bits of the scalar [`exp`]. Lengths must agree.
pub fn exp_sub_slice(isa: Isa, x: &[f32], max: f32, out: &mut [f32]) {
    struct ExpSub<'a>(&'a [f32], f32, &'a mut [f32]);
    impl Kernel for ExpSub<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, _: S) {
            for (y, &x) in self.2.iter_mut().zip(self.0) {
                *y = exp(x - self.1);
            }
        }
    }
    assert_eq!(x.len(), out.len(), "exp_sub_slice: input and output lengths");
    dispatch(isa, ExpSub(x, max, out));
}

/// `Σ exp(x[i] - max)`: lane `i mod 16` sums in index order, then the lanes in a fixed tree.
pub fn sum_exp_sub(isa: Isa, x: &[f32], max: f32) -> f32 {
    struct SumExp<'a>(&'a [f32], f32);
    impl Kernel for SumExp<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> f32 {
            let (blocks, tail) = self.0.as_chunks::<LANES>();
            let mut sums = [0.0; LANES];
            for block in blocks {
                for i in 0..LANES {
                    sums[i] += exp(block[i] - self.1);
                }
            }
            for (sum, &x) in sums.iter_mut().zip(tail) {
                *sum += exp(x - self.1);
            }
            tree_sum(sums)
        }
    }
    dispatch(isa, SumExp(x, max))
}

/// `Σ ⌊x[i] · one⌋` over the values of at least `least`, exactly; values must be in [0, 1] and
/// the sum below 2⁶⁴.
pub fn fixed_sum(isa: Isa, x: &[f32], least: f32, one: f32) -> u64 {
    struct Sum<'a>(&'a [f32], f32, f32);
    impl Kernel for Sum<'_> {
        type Output = u64;
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> u64 {
            let term = |x: f32| (if x >= self.1 { x * self.2 } else { 0.0 }) as u64;
            let (blocks, tail) = self.0.as_chunks::<LANES>();
            let mut sums = [0; LANES];
            for block in blocks {
                for i in 0..LANES {
                    sums[i] += term(block[i]);
                }
            }
            sums.iter().sum::<u64>() + tail.iter().map(|&x| term(x)).sum::<u64>()
        }
    }
    dispatch(isa, Sum(x, least, one))
}

/// Largest value; NaN is ignored, −∞ where there is no other.
pub fn max_slice(isa: Isa, x: &[f32]) -> f32 {
    struct Max<'a>(&'a [f32]);
    impl Kernel for Max<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> f32 {
            let (blocks, tail) = self.0.as_chunks::<LANES>();
            let mut best = [f32::NEG_INFINITY; LANES];
            for block in blocks {
                for i in 0..LANES {
                    best[i] = if block[i] > best[i] { block[i] } else { best[i] };
                }
            }
            let larger = |m: f32, &x: &f32| if x > m { x } else { m };
            best.iter().chain(tail).fold(f32::NEG_INFINITY, larger)
        }
    }
    dispatch(isa, Max(x))
}

/// Lowest index of the largest value; NaN is ignored, 0 where there is no other value.
pub fn argmax(isa: Isa, x: &[f32]) -> usize {
    const BLOCK: usize = 256;
    let max = max_slice(isa, x);
    // Whole blocks first, without an early exit inside, so that the search vectorises.
    let has_max = |block: &[f32]| block.iter().fold(false, |any, &value| any | (value == max));
    let start = x.chunks(BLOCK).position(has_max).unwrap_or(0) * BLOCK;
    x[start..].iter().position(|&value| value == max).map_or(0, |i| start + i)
}

/// Whether any value is NaN.
pub fn has_nan(isa: Isa, x: &[f32]) -> bool {
    struct HasNan<'a>(&'a [f32]);
    impl Kernel for HasNan<'_> {
        type Output = bool;
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> bool {
            // No early exit within a block, so that it vectorises.
            self.0.chunks(256).any(|block| block.iter().fold(false, |any, x| any | x.is_nan()))
        }
    }
    dispatch(isa, HasNan(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Error in units of the last place of `want`.
    fn ulps(got: f32, want: f64) -> f64 {
        let nearest = want as f32;
        let ulp = f64::from(f32::from_bits(nearest.abs().to_bits() + 1)) - f64::from(nearest.abs());
        ((f64::from(got) - want) / ulp).abs()
    }

    #[test]
    fn exp_and_ln_stay_within_two_ulp() {
        let (mut worst_exp, mut worst_ln) = (0.0_f64, 0.0_f64);
        for i in 0..200_000_u32 {
            let x = -87.3 + 176.0 * (i as f32 / 200_000.0);
            worst_exp = worst_exp.max(ulps(exp(x), f64::from(x).exp()));
            let y = f32::from_bits(f32::MIN_POSITIVE.to_bits() + i * 10_600);
            worst_ln = worst_ln.max(ulps(ln(y), f64::from(y).ln()));
            let near_one = 0.5 + i as f32 / 200_000.0;
            if near_one != 1.0 {
                worst_ln = worst_ln.max(ulps(ln(near_one), f64::from(near_one).ln()));
            }
        }
        assert!(worst_exp <= 2.0, "exp is off by {worst_exp} ulp");
        assert!(worst_ln <= 2.0, "ln is off by {worst_ln} ulp");
    }

    #[test]
    fn special_values() {
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(100.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan() && ln(f32::NAN).is_nan() && ln(-1.0).is_nan());
        assert_eq!(ln(0.0), f32::NEG_INFINITY);
        assert_eq!(ln(1.0), 0.0);
        assert_eq!(ln(f32::INFINITY), f32::INFINITY);
    }

    #[test]
    fn slices_have_the_scalar_bits_on_every_path() {
        let x: Vec<f32> = (0..1003).map(|i| ((i * 7919) % 1009) as f32 * -0.1).collect();
        let want: Vec<u32> = x.iter().map(|x| exp(x - 0.25).to_bits()).collect();
        let sum = sum_exp_sub(Isa::Portable, &x, 0.25).to_bits();
        for isa in Isa::available() {
            let mut out = vec![0.0; x.len()];
            exp_sub_slice(isa, &x, 0.25, &mut out);
            assert_eq!(out.iter().map(|y| y.to_bits()).collect::<Vec<_>>(), want, "{isa}");
            assert_eq!(sum_exp_sub(isa, &x, 0.25).to_bits(), sum, "{isa}");
            let one = (1u64 << 40) as f32;
            let naive = |least| {
                let kept = out.iter().filter(|&&y| y >= least);
                kept.map(|&y| (y * one) as u64).sum::<u64>()
            };
            for least in [0.0, 1e-3] {
                assert_eq!(fixed_sum(isa, &out, least, one), naive(least), "{isa}");
            }
        }
    }

    #[test]
    fn maxima_ignore_nan_and_ties_go_to_the_lowest_index() {
        let mut x = vec![0.5_f32; 777];
        for isa in Isa::available() {
            assert!(!has_nan(isa, &x));
            x[3] = f32::NAN;
            x[770] = 2.0;
            x[400] = 2.0;
            assert_eq!((argmax(isa, &x), max_slice(isa, &x)), (400, 2.0), "{isa}");
            assert!(has_nan(isa, &x), "{isa}");
            x.fill(0.5);
            assert_eq!(argmax(isa, &[f32::NAN, f32::NEG_INFINITY]), 1, "{isa}");
            assert_eq!((argmax(isa, &[]), max_slice(isa, &[])), (0, f32::NEG_INFINITY), "{isa}");
        }
    }

    #[test]
    fn exp2_is_accurate_and_exact_where_attention_needs_it() {
        struct Exp2(f32);
        impl Kernel for Exp2 {
            type Output = f32;
            #[inline(always)]
            fn run<S: Simd>(self, s: S) -> f32 {
                s.to_array(s.exp2(s.splat(self.0)))[0]
            }
        }
        for isa in Isa::available() {
            let exp2 = |x| dispatch(isa, Exp2(x));
            assert_eq!(exp2(f32::NEG_INFINITY).to_bits(), 0, "{isa}");
            assert_eq!(exp2(f32::INFINITY), f32::INFINITY, "{isa}");
            assert_eq!(exp2(128.0), f32::INFINITY, "{isa}");
            assert!(exp2(f32::NAN).is_nan(), "{isa}");
            for n in -126..128 {
                assert_eq!(exp2(n as f32), 2.0_f32.powi(n), "{isa}");
            }
            let worst = (0..20_000)
                .map(|i| -126.0 + 253.9 * (i as f32 / 20_000.0))
                .map(|x| ulps(exp2(x), f64::from(x).exp2()))
                .fold(0.0, f64::max);
            assert!(worst <= 2.0, "{isa}: exp2 is off by {worst} ulp");
        }
    }
}
