//! AArch64 Advanced SIMD, part of the architecture's baseline: a vector is four `q` registers.

use core::arch::aarch64::*;

use super::{IntSimd, LANES, Simd};

/// Token of the NEON path.
#[derive(Clone, Copy)]
pub(super) struct Neon(());

impl Neon {
    /// Every AArch64 CPU the crate is built for runs this path.
    pub(super) fn new() -> Self {
        Self(())
    }
}

/// Methods that apply an expression to the four quarters of their vectors.
macro_rules! quarter_ops {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty = $q:ident => $e:expr;)*) => {
        $(#[inline(always)]
        fn $name(self, $($arg: $ty),*) -> $ret {
            // SAFETY: NEON is in the baseline; no memory is touched.
            unsafe {
                [
                    { let $q = 0; $e },
                    { let $q = 1; $e },
                    { let $q = 2; $e },
                    { let $q = 3; $e },
                ]
            }
        })*
    };
}

impl Simd for Neon {
    type V = [float32x4_t; 4];
    type W = [uint32x4_t; 4];
    const MR: usize = 4;
    const NV: usize = 1;

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        let p = x.as_ptr();
        // SAFETY: 16 lanes are readable at `p`.
        unsafe { [vld1q_f32(p), vld1q_f32(p.add(4)), vld1q_f32(p.add(8)), vld1q_f32(p.add(12))] }
    }

    #[inline(always)]
    fn store(self, v: Self::V, out: &mut [f32; LANES]) {
        let p = out.as_mut_ptr();
        // SAFETY: 16 lanes are writable at `p`.
        unsafe {
            vst1q_f32(p, v[0]);
            vst1q_f32(p.add(4), v[1]);
            vst1q_f32(p.add(8), v[2]);
            vst1q_f32(p.add(12), v[3]);
        }
    }

    #[inline(always)]
    fn load_w(self, x: &[u32; LANES]) -> Self::W {
        let p = x.as_ptr();
        // SAFETY: 16 lanes are readable at `p`.
        unsafe { [vld1q_u32(p), vld1q_u32(p.add(4)), vld1q_u32(p.add(8)), vld1q_u32(p.add(12))] }
    }

    #[inline(always)]
    fn store_w(self, w: Self::W, out: &mut [u32; LANES]) {
        let p = out.as_mut_ptr();
        // SAFETY: 16 lanes are writable at `p`.
        unsafe {
            vst1q_u32(p, w[0]);
            vst1q_u32(p.add(4), w[1]);
            vst1q_u32(p.add(8), w[2]);
            vst1q_u32(p.add(12), w[3]);
        }
    }

    #[inline(always)]
    fn join_w(self, lo: &[u32; 8], hi: &[u32; 8]) -> Self::W {
        let (l, h) = (lo.as_ptr(), hi.as_ptr());
        // SAFETY: 8 lanes are readable at either pointer.
        unsafe { [vld1q_u32(l), vld1q_u32(l.add(4)), vld1q_u32(h), vld1q_u32(h.add(4))] }
    }

    // No stable prefetch intrinsic; the hardware prefetchers follow the panels.
    #[inline(always)]
    fn prefetch(self, _: *const u32) {}

    #[inline(always)]
    fn prefetch_l2(self, _: *const u32) {}

    quarter_ops! {
        fn splat(x: f32) -> Self::V = _q => vdupq_n_f32(x);
        fn splat_w(x: u32) -> Self::W = _q => vdupq_n_u32(x);
        fn and_w(a: Self::W, b: Self::W) -> Self::W = q => vandq_u32(a[q], b[q]);
        fn add(a: Self::V, b: Self::V) -> Self::V = q => vaddq_f32(a[q], b[q]);
        fn sub(a: Self::V, b: Self::V) -> Self::V = q => vsubq_f32(a[q], b[q]);
        fn mul(a: Self::V, b: Self::V) -> Self::V = q => vmulq_f32(a[q], b[q]);
        fn div(a: Self::V, b: Self::V) -> Self::V = q => vdivq_f32(a[q], b[q]);
        fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V = q => vfmaq_f32(c[q], a[q], b[q]);
        fn max(a: Self::V, b: Self::V) -> Self::V =
            q => vbslq_f32(vcgtq_f32(a[q], b[q]), a[q], b[q]);
        fn min(a: Self::V, b: Self::V) -> Self::V =
            q => vbslq_f32(vcltq_f32(a[q], b[q]), a[q], b[q]);
        fn select_lt(a: Self::V, b: Self::V, t: Self::V, f: Self::V) -> Self::V =
            q => vbslq_f32(vcltq_f32(a[q], b[q]), t[q], f[q]);
        fn scale2(x: Self::V, n: Self::V) -> Self::V = q => scale2(x[q], n[q]);
        fn dot_f32(acc: Self::V, a: Self::W, b: Self::W) -> Self::V =
            q => vfmaq_f32(acc[q], vreinterpretq_f32_u32(a[q]), vreinterpretq_f32_u32(b[q]));
        fn dot_bf16(acc: Self::V, a: Self::W, b: Self::W) -> Self::V =
            q => dot_bf16(acc[q], a[q], b[q]);
    }

    #[inline(always)]
    fn pack_bf16(self, lo: Self::V, hi: Self::V) -> Self::W {
        // SAFETY: NEON is in the baseline; no memory is touched.
        unsafe {
            [
                pack_bf16(lo[0], lo[1]),
                pack_bf16(lo[2], lo[3]),
                pack_bf16(hi[0], hi[1]),
                pack_bf16(hi[2], hi[3]),
            ]
        }
    }
}

impl IntSimd for Neon {
    const BYTE_BIAS: i32 = 0;

    quarter_ops! {
        fn dot_small(acc: Self::W, w: Self::W, x: Self::W) -> Self::W =
            q => add_products(acc[q], vreinterpretq_s8_u32(w[q]), x[q]);
        fn dot_bytes(acc: Self::W, w: Self::W, x: Self::W) -> Self::W =
            q => add_products(acc[q], signed_bytes(w[q]), x[q]);
        fn dot_pairs(acc: Self::W, a: Self::W, b: Self::W) -> Self::W =
            q => add_pairs(acc[q], a[q], b[q]);
        fn add_i(a: Self::W, b: Self::W) -> Self::W = q => vaddq_u32(a[q], b[q]);
        fn mul_i(a: Self::W, b: Self::W) -> Self::W = q => vmulq_u32(a[q], b[q]);
        fn or_w(a: Self::W, b: Self::W) -> Self::W = q => vorrq_u32(a[q], b[q]);
        fn shl_w(a: Self::W, n: i32) -> Self::W = q => vshlq_u32(a[q], vdupq_n_s32(n));
        fn shr_w(a: Self::W, n: i32) -> Self::W = q => vshlq_u32(a[q], vdupq_n_s32(-n));
        fn to_f32(a: Self::W) -> Self::V = q => vcvtq_f32_s32(vreinterpretq_s32_u32(a[q]));
    }

    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Self::V {
        let p = x.as_ptr();
        // SAFETY: 16 halves are readable at `p`.
        unsafe {
            [
                widen_f16(vld1_u16(p)),
                widen_f16(vld1_u16(p.add(4))),
                widen_f16(vld1_u16(p.add(8))),
                widen_f16(vld1_u16(p.add(12))),
            ]
        }
    }

    #[inline(always)]
    fn round_i8(self, v: Self::V, out: &mut [u32; LANES / 4]) {
        // SAFETY: 16 bytes are writable at `out`.
        unsafe {
            let lo = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(v[0])), vmovn_s32(vcvtnq_s32_f32(v[1])));
            let hi = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(v[2])), vmovn_s32(vcvtnq_s32_f32(v[3])));
            vst1q_s8(out.as_mut_ptr().cast(), vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
        }
    }
}

/// Bytes less 128.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn signed_bytes(w: uint32x4_t) -> int8x16_t {
    // SAFETY: by this function's contract.
    unsafe { vreinterpretq_s8_u32(veorq_u32(w, vdupq_n_u32(0x8080_8080))) }
}

/// `acc` plus the products of four signed bytes; the dot product instruction is not in the
/// baseline.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn add_products(acc: uint32x4_t, w: int8x16_t, x: uint32x4_t) -> uint32x4_t {
    // SAFETY: by this function's contract.
    unsafe {
        let x = vreinterpretq_s8_u32(x);
        let lo = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
        let hi = vpaddlq_s16(vmull_high_s8(w, x));
        vaddq_u32(acc, vreinterpretq_u32_s32(vpaddq_s32(lo, hi)))
    }
}

/// `acc` plus the products of two signed 16-bit halves.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn add_pairs(acc: uint32x4_t, a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
    // SAFETY: by this function's contract.
    unsafe {
        let (a, b) = (vreinterpretq_s16_u32(a), vreinterpretq_s16_u32(b));
        let lo = vmull_s16(vget_low_s16(a), vget_low_s16(b));
        vaddq_u32(acc, vreinterpretq_u32_s32(vpaddq_s32(lo, vmull_high_s16(a, b))))
    }
}

/// Four IEEE halves, widened.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn widen_f16(x: uint16x4_t) -> float32x4_t {
    // SAFETY: by this function's contract.
    unsafe {
        let bits = vmovl_u16(x);
        let sign = vshlq_n_u32::<16>(vandq_u32(bits, vdupq_n_u32(0x8000)));
        let magnitude = vshlq_n_u32::<13>(vandq_u32(bits, vdupq_n_u32(0x7fff)));
        // 2^112 moves the bias from 15 to 127; infinity and NaN get their exponent whole.
        let scaled = vmulq_n_f32(vreinterpretq_f32_u32(magnitude), f32::from_bits(239 << 23));
        let special = vcgeq_u32(magnitude, vdupq_n_u32(0x7c00 << 13));
        let exponent = vandq_u32(special, vdupq_n_u32(0x7f80_0000));
        let value = vorrq_u32(vreinterpretq_u32_f32(scaled), exponent);
        vreinterpretq_f32_u32(vorrq_u32(value, sign))
    }
}

/// `x · 2^n`, in two steps so that the factors stay normal.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn scale2(x: float32x4_t, n: float32x4_t) -> float32x4_t {
    // SAFETY: by this function's contract.
    unsafe {
        let n = vcvtq_s32_f32(n);
        let half = vshrq_n_s32::<1>(n);
        let rest = vsubq_s32(n, half);
        let bias = vdupq_n_s32(127);
        let pow_half = vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(half, bias)));
        let pow_rest = vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(rest, bias)));
        vmulq_f32(vmulq_f32(x, pow_half), pow_rest)
    }
}

/// Even then odd elements, one FMA each.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn dot_bf16(acc: float32x4_t, a: uint32x4_t, b: uint32x4_t) -> float32x4_t {
    // SAFETY: by this function's contract.
    unsafe {
        let high = vdupq_n_u32(0xffff_0000);
        let a_even = vreinterpretq_f32_u32(vshlq_n_u32::<16>(a));
        let b_even = vreinterpretq_f32_u32(vshlq_n_u32::<16>(b));
        let a_odd = vreinterpretq_f32_u32(vandq_u32(a, high));
        let b_odd = vreinterpretq_f32_u32(vandq_u32(b, high));
        vfmaq_f32(vfmaq_f32(acc, a_even, b_even), a_odd, b_odd)
    }
}

/// Eight values to bf16, in order.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn pack_bf16(lo: float32x4_t, hi: float32x4_t) -> uint32x4_t {
    // SAFETY: by this function's contract.
    unsafe {
        let lo = vmovn_u32(round_bf16(lo));
        let hi = vmovn_u32(round_bf16(hi));
        vreinterpretq_u32_u16(vcombine_u16(lo, hi))
    }
}

/// The bf16 bits of each lane in its low half.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn round_bf16(x: float32x4_t) -> uint32x4_t {
    // SAFETY: by this function's contract.
    unsafe {
        let bits = vreinterpretq_u32_f32(x);
        let high = vshrq_n_u32::<16>(bits);
        let odd = vandq_u32(high, vdupq_n_u32(1));
        let bias = vaddq_u32(odd, vdupq_n_u32(0x7fff));
        let rounded = vshrq_n_u32::<16>(vaddq_u32(bits, bias));
        let quiet = vorrq_u32(high, vdupq_n_u32(0x40));
        vbslq_u32(vceqq_f32(x, x), rounded, quiet)
    }
}
