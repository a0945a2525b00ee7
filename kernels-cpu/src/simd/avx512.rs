//! AVX-512: a vector is one `zmm`; with and without the bfloat16 dot product.

use core::arch::x86_64::*;
use core::mem::transmute;

use super::avx2::{max8, sum8};
use super::{IntKernel, IntSimd, Kernel, LANES, Simd};

/// Token of the AVX-512 paths; `BF16` and `VNNI` say which dot products are there.
#[derive(Clone, Copy)]
pub(super) struct Avx512<const BF16: bool, const VNNI: bool>(());

/// Runs `kernel` without the bfloat16 instructions.
///
/// # Safety
/// The CPU has AVX-512 F, BW, DQ and VL.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<false, false>(()))
}

/// Runs `kernel` with the bfloat16 instructions.
///
/// # Safety
/// The CPU has AVX-512 F, BW, DQ, VL and BF16.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn run_bf16<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<true, false>(()))
}

/// Runs `kernel` without the byte dot product.
///
/// # Safety
/// The CPU has AVX-512 F, BW, DQ and VL.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn run_int<K: IntKernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<false, false>(()))
}

/// Runs `kernel` with the byte dot product.
///
/// # Safety
/// The CPU has AVX-512 F, BW, DQ, VL and VNNI.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn run_vnni<K: IntKernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<false, true>(()))
}

/// Methods whose bodies are intrinsics without memory operands.
macro_rules! register_ops {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $body:block)*) => {
        $(#[inline(always)]
        fn $name(self, $($arg: $ty),*) -> $ret {
            // SAFETY: the token proves the instructions; no memory is touched.
            unsafe { $body }
        })*
    };
}

impl<const BF16: bool, const VNNI: bool> Simd for Avx512<BF16, VNNI> {
    type V = __m512;
    type W = __m512i;
    const MR: usize = 6;
    const NV: usize = 4;

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        // SAFETY: 16 lanes are readable; the token proves AVX-512.
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, v: Self::V, out: &mut [f32; LANES]) {
        // SAFETY: 16 lanes are writable; the token proves AVX-512.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), v) }
    }

    #[inline(always)]
    fn load_w(self, x: &[u32; LANES]) -> Self::W {
        // SAFETY: 16 lanes are readable; the token proves AVX-512.
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store_w(self, w: Self::W, out: &mut [u32; LANES]) {
        // SAFETY: 16 lanes are writable; the token proves AVX-512.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), w) }
    }

    #[inline(always)]
    fn join_w(self, lo: &[u32; 8], hi: &[u32; 8]) -> Self::W {
        // SAFETY: 8 lanes are readable at either pointer; the token proves AVX-512.
        unsafe {
            let low = _mm512_castsi256_si512(_mm256_loadu_si256(lo.as_ptr().cast()));
            _mm512_inserti64x4::<1>(low, _mm256_loadu_si256(hi.as_ptr().cast()))
        }
    }

    #[inline(always)]
    fn prefetch(self, p: *const u32) {
        // SAFETY: a prefetch does not fault, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    fn prefetch_l2(self, p: *const u32) {
        // SAFETY: a prefetch does not fault, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }

    register_ops! {
        fn splat(x: f32) -> Self::V { _mm512_set1_ps(x) }
        fn splat_w(x: u32) -> Self::W { _mm512_set1_epi32(x.cast_signed()) }
        fn and_w(a: Self::W, b: Self::W) -> Self::W { _mm512_and_si512(a, b) }
        fn add(a: Self::V, b: Self::V) -> Self::V { _mm512_add_ps(a, b) }
        fn sub(a: Self::V, b: Self::V) -> Self::V { _mm512_sub_ps(a, b) }
        fn mul(a: Self::V, b: Self::V) -> Self::V { _mm512_mul_ps(a, b) }
        fn div(a: Self::V, b: Self::V) -> Self::V { _mm512_div_ps(a, b) }
        fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V { _mm512_fmadd_ps(a, b, c) }
        fn max(a: Self::V, b: Self::V) -> Self::V { _mm512_max_ps(a, b) }
        fn min(a: Self::V, b: Self::V) -> Self::V { _mm512_min_ps(a, b) }
        fn select_lt(a: Self::V, b: Self::V, t: Self::V, f: Self::V) -> Self::V {
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), f, t)
        }
        fn scale2(x: Self::V, n: Self::V) -> Self::V { _mm512_scalef_ps(x, n) }
        fn dot_f32(acc: Self::V, a: Self::W, b: Self::W) -> Self::V {
            _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), acc)
        }
        fn dot_bf16(acc: Self::V, a: Self::W, b: Self::W) -> Self::V {
            if BF16 {
                _mm512_dpbf16_ps(
                    acc,
                    transmute::<__m512i, __m512bh>(a),
                    transmute::<__m512i, __m512bh>(b),
                )
            } else {
                let high = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
                let a_even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(a));
                let b_even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(b));
                let a_odd = _mm512_castsi512_ps(_mm512_and_si512(a, high));
                let b_odd = _mm512_castsi512_ps(_mm512_and_si512(b, high));
                _mm512_fmadd_ps(a_odd, b_odd, _mm512_fmadd_ps(a_even, b_even, acc))
            }
        }
        fn sum(v: Self::V) -> f32 {
            sum8(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)))
        }
        fn max_lane(v: Self::V) -> f32 {
            max8(_mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)))
        }
        fn pack_bf16(lo: Self::V, hi: Self::V) -> Self::W {
            if BF16 {
                transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(hi, lo))
            } else {
                let low = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(round_bf16(lo)));
                _mm512_inserti64x4::<1>(low, _mm512_cvtepi32_epi16(round_bf16(hi)))
            }
        }
    }
}

impl<const BF16: bool, const VNNI: bool> IntSimd for Avx512<BF16, VNNI> {
    const BYTE_BIAS: i32 = if VNNI { 128 } else { 0 };

    register_ops! {
        fn dot_small(acc: Self::W, w: Self::W, x: Self::W) -> Self::W {
            if VNNI { _mm512_dpbusd_epi32(acc, w, x) } else { add_products(acc, w, x) }
        }
        fn dot_bytes(acc: Self::W, w: Self::W, x: Self::W) -> Self::W {
            if VNNI {
                _mm512_dpbusd_epi32(acc, w, x)
            } else {
                // The sign moves from the weight to the activation, so a factor is unsigned.
                let w = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
                let negative = _mm512_movepi8_mask(w);
                let x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
                add_products(acc, _mm512_abs_epi8(w), x)
            }
        }
        fn dot_pairs(acc: Self::W, a: Self::W, b: Self::W) -> Self::W {
            if VNNI {
                _mm512_dpwssd_epi32(acc, a, b)
            } else {
                _mm512_add_epi32(acc, _mm512_madd_epi16(a, b))
            }
        }
        fn add_i(a: Self::W, b: Self::W) -> Self::W { _mm512_add_epi32(a, b) }
        fn mul_i(a: Self::W, b: Self::W) -> Self::W { _mm512_mullo_epi32(a, b) }
        fn or_w(a: Self::W, b: Self::W) -> Self::W { _mm512_or_si512(a, b) }
        fn shl_w(a: Self::W, n: i32) -> Self::W { _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)) }
        fn shr_w(a: Self::W, n: i32) -> Self::W { _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)) }
        fn to_f32(a: Self::W) -> Self::V { _mm512_cvtepi32_ps(a) }
    }

    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Self::V {
        // SAFETY: 16 halves are readable; the token proves AVX-512.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
    }

    #[inline(always)]
    fn round_i8(self, v: Self::V, out: &mut [u32; LANES / 4]) {
        // SAFETY: 16 bytes are writable; the token proves AVX-512.
        unsafe {
            let bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v));
            _mm_storeu_si128(out.as_mut_ptr().cast(), bytes);
        }
    }
}

/// `acc` plus four products of an unsigned byte up to 128 and a signed one above -128; two such
/// products fit in the 16 bits between the steps.
///
/// # Safety
/// The CPU has AVX-512 F and BW.
#[inline(always)]
unsafe fn add_products(acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
    // SAFETY: by this function's contract.
    unsafe {
        let pairs = _mm512_maddubs_epi16(w, x);
        _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
    }
}

/// The bf16 bits of each lane in its low half.
///
/// # Safety
/// The CPU has AVX-512 F and BW.
#[inline(always)]
unsafe fn round_bf16(x: __m512) -> __m512i {
    // SAFETY: by this function's contract.
    unsafe {
        let bits = _mm512_castps_si512(x);
        let high = _mm512_srli_epi32::<16>(bits);
        let odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
        let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
        let quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
        _mm512_mask_blend_epi32(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), rounded, quiet)
    }
}
