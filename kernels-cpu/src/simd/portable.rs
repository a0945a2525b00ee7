//! The path without intrinsics: arrays that the compiler vectorises for its baseline.

use super::{IntSimd, LANES, ROUND_MAGIC, Simd};

/// Token of the portable path.
#[derive(Clone, Copy)]
pub(super) struct Portable;

/// Lane-wise `$f` over one, two or three vectors.
macro_rules! lanes {
    ($i:ident => $f:expr) => {{
        let mut out = [Default::default(); LANES];
        for $i in 0..LANES {
            out[$i] = $f;
        }
        out
    }};
}

impl Simd for Portable {
    type V = [f32; LANES];
    type W = [u32; LANES];
    const MR: usize = 4;
    const NV: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        *x
    }

    #[inline(always)]
    fn store(self, v: Self::V, out: &mut [f32; LANES]) {
        *out = v;
    }

    #[inline(always)]
    fn splat_w(self, x: u32) -> Self::W {
        [x; LANES]
    }

    #[inline(always)]
    fn load_w(self, x: &[u32; LANES]) -> Self::W {
        *x
    }

    #[inline(always)]
    fn store_w(self, w: Self::W, out: &mut [u32; LANES]) {
        *out = w;
    }

    #[inline(always)]
    fn join_w(self, lo: &[u32; 8], hi: &[u32; 8]) -> Self::W {
        lanes!(i => if i < 8 { lo[i] } else { hi[i - 8] })
    }

    #[inline(always)]
    fn and_w(self, a: Self::W, b: Self::W) -> Self::W {
        lanes!(i => a[i] & b[i])
    }

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] / b[i])
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Not `mul_add`, which calls libm where the baseline has no FMA.
        lanes!(i => a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, t: Self::V, f: Self::V) -> Self::V {
        lanes!(i => if a[i] < b[i] { t[i] } else { f[i] })
    }

    #[inline(always)]
    fn scale2(self, x: Self::V, n: Self::V) -> Self::V {
        lanes!(i => crate::vecmath::scale2(x[i], n[i]))
    }

    #[inline(always)]
    fn dot_f32(self, acc: Self::V, a: Self::W, b: Self::W) -> Self::V {
        lanes!(i => acc[i] + f32::from_bits(a[i]) * f32::from_bits(b[i]))
    }

    #[inline(always)]
    fn dot_bf16(self, acc: Self::V, a: Self::W, b: Self::W) -> Self::V {
        lanes!(i => {
            let even = acc[i] + f32::from_bits(a[i] << 16) * f32::from_bits(b[i] << 16);
            even + f32::from_bits(a[i] & 0xffff_0000) * f32::from_bits(b[i] & 0xffff_0000)
        })
    }

    #[inline(always)]
    fn pack_bf16(self, lo: Self::V, hi: Self::V) -> Self::W {
        let (lo, hi) = (lanes!(i => round_bf16(lo[i])), lanes!(i => round_bf16(hi[i])));
        lanes!(i => {
            let half = if i < 8 { &lo } else { &hi };
            half[2 * i % LANES] | half[2 * i % LANES + 1] << 16
        })
    }

    #[inline(always)]
    fn prefetch(self, _: *const u32) {}

    #[inline(always)]
    fn prefetch_l2(self, _: *const u32) {}
}

impl IntSimd for Portable {
    const BYTE_BIAS: i32 = 0;
    // Without vector registers to fill, more rows are only more code.
    const ROWS: usize = 1;

    #[inline(always)]
    fn fused(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lanes!(i => a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn dot_small(self, acc: Self::W, w: Self::W, x: Self::W) -> Self::W {
        lanes!(i => {
            let products = (0..4).map(|byte| i32::from(w[i].to_le_bytes()[byte])
                * i32::from(x[i].to_le_bytes()[byte].cast_signed()));
            acc[i].wrapping_add_signed(products.sum())
        })
    }

    #[inline(always)]
    fn dot_bytes(self, acc: Self::W, w: Self::W, x: Self::W) -> Self::W {
        lanes!(i => {
            let products = (0..4).map(|byte| (i32::from(w[i].to_le_bytes()[byte]) - 128)
                * i32::from(x[i].to_le_bytes()[byte].cast_signed()));
            acc[i].wrapping_add_signed(products.sum())
        })
    }

    #[inline(always)]
    fn dot_pairs(self, acc: Self::W, a: Self::W, b: Self::W) -> Self::W {
        let low = |x: u32| i32::from(x as i16);
        let high = |x: u32| x.cast_signed() >> 16;
        lanes!(i => {
            acc[i].wrapping_add_signed(low(a[i]) * low(b[i]) + high(a[i]) * high(b[i]))
        })
    }

    #[inline(always)]
    fn add_i(self, a: Self::W, b: Self::W) -> Self::W {
        lanes!(i => a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    fn mul_i(self, a: Self::W, b: Self::W) -> Self::W {
        lanes!(i => a[i].wrapping_mul(b[i]))
    }

    #[inline(always)]
    fn or_w(self, a: Self::W, b: Self::W) -> Self::W {
        lanes!(i => a[i] | b[i])
    }

    #[inline(always)]
    fn shl_w(self, a: Self::W, n: i32) -> Self::W {
        lanes!(i => a[i] << n)
    }

    #[inline(always)]
    fn shr_w(self, a: Self::W, n: i32) -> Self::W {
        lanes!(i => a[i] >> n)
    }

    #[inline(always)]
    fn to_f32(self, a: Self::W) -> Self::V {
        lanes!(i => a[i].cast_signed() as f32)
    }

    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Self::V {
        lanes!(i => half::f16::from_bits(x[i]).to_f32())
    }

    #[inline(always)]
    fn round_i8(self, v: Self::V, out: &mut [u32; LANES / 4]) {
        // Adding the magic number leaves the integer in the low bits.
        let bytes: [u8; LANES] = lanes!(i => (v[i] + ROUND_MAGIC).to_bits() as u8);
        *out = bytemuck::cast(bytes);
    }
}

/// The bits of `x` rounded to bf16, to nearest even.
#[inline(always)]
fn round_bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() { (bits >> 16) | 0x40 } else { (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 }
}
