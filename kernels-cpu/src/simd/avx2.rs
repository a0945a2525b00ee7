//! AVX2 with FMA: a vector is two `ymm`.

use core::arch::x86_64::*;

use super::{IntKernel, IntSimd, Kernel, LANES, Simd};

/// Token of the AVX2 paths; `VNNI` says whether the byte dot product is there.
#[derive(Clone, Copy)]
pub(super) struct Avx2<const VNNI: bool>(());

/// Runs `kernel` on this path.
///
/// # Safety
/// The CPU has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2::<false>(()))
}

/// Runs `kernel` on this path.
///
/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run_int<K: IntKernel>(kernel: K) -> K::Output {
    kernel.run(Avx2::<false>(()))
}

/// Runs `kernel` with the byte dot product.
///
/// # Safety
/// The CPU has AVX2, FMA, F16C and AVX-VNNI.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(super) unsafe fn run_vnni<K: IntKernel>(kernel: K) -> K::Output {
    kernel.run(Avx2::<true>(()))
}

/// Methods whose bodies are intrinsics without memory operands.
macro_rules! register_ops {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $body:block)*) => {
        $(#[inline(always)]
        fn $name(self, $($arg: $ty),*) -> $ret {
            // SAFETY: the token proves AVX2 and FMA; no memory is touched.
            unsafe { $body }
        })*
    };
}

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    type V = [__m256; 2];
    type W = [__m256i; 2];
    const MR: usize = 4;
    const NV: usize = 1;

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        let p = x.as_ptr();
        // SAFETY: 16 lanes are readable at `p`; the token proves AVX2.
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }

    #[inline(always)]
    fn store(self, v: Self::V, out: &mut [f32; LANES]) {
        let p = out.as_mut_ptr();
        // SAFETY: 16 lanes are writable at `p`; the token proves AVX2.
        unsafe {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }
    }

    #[inline(always)]
    fn load_w(self, x: &[u32; LANES]) -> Self::W {
        let p = x.as_ptr().cast::<__m256i>();
        // SAFETY: 16 lanes are readable at `p`; the token proves AVX2.
        unsafe { [_mm256_loadu_si256(p), _mm256_loadu_si256(p.add(1))] }
    }

    #[inline(always)]
    fn store_w(self, w: Self::W, out: &mut [u32; LANES]) {
        let p = out.as_mut_ptr().cast::<__m256i>();
        // SAFETY: 16 lanes are writable at `p`; the token proves AVX2.
        unsafe {
            _mm256_storeu_si256(p, w[0]);
            _mm256_storeu_si256(p.add(1), w[1]);
        }
    }

    #[inline(always)]
    fn join_w(self, lo: &[u32; 8], hi: &[u32; 8]) -> Self::W {
        // SAFETY: 8 lanes are readable at either pointer; the token proves AVX2.
        unsafe { [_mm256_loadu_si256(lo.as_ptr().cast()), _mm256_loadu_si256(hi.as_ptr().cast())] }
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
        fn splat(x: f32) -> Self::V { [_mm256_set1_ps(x); 2] }
        fn splat_w(x: u32) -> Self::W { [_mm256_set1_epi32(x.cast_signed()); 2] }
        fn and_w(a: Self::W, b: Self::W) -> Self::W {
            [_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])]
        }
        fn add(a: Self::V, b: Self::V) -> Self::V {
            [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])]
        }
        fn sub(a: Self::V, b: Self::V) -> Self::V {
            [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])]
        }
        fn mul(a: Self::V, b: Self::V) -> Self::V {
            [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
        }
        fn div(a: Self::V, b: Self::V) -> Self::V {
            [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])]
        }
        fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
            [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
        }
        fn max(a: Self::V, b: Self::V) -> Self::V {
            [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])]
        }
        fn min(a: Self::V, b: Self::V) -> Self::V {
            [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])]
        }
        fn select_lt(a: Self::V, b: Self::V, t: Self::V, f: Self::V) -> Self::V {
            [
                _mm256_blendv_ps(f[0], t[0], _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0])),
                _mm256_blendv_ps(f[1], t[1], _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])),
            ]
        }
        fn scale2(x: Self::V, n: Self::V) -> Self::V { [scale2(x[0], n[0]), scale2(x[1], n[1])] }
        fn dot_f32(acc: Self::V, a: Self::W, b: Self::W) -> Self::V {
            [
                _mm256_fmadd_ps(_mm256_castsi256_ps(a[0]), _mm256_castsi256_ps(b[0]), acc[0]),
                _mm256_fmadd_ps(_mm256_castsi256_ps(a[1]), _mm256_castsi256_ps(b[1]), acc[1]),
            ]
        }
        fn dot_bf16(acc: Self::V, a: Self::W, b: Self::W) -> Self::V {
            [dot_bf16(acc[0], a[0], b[0]), dot_bf16(acc[1], a[1], b[1])]
        }
        fn sum(v: Self::V) -> f32 { sum8(_mm256_add_ps(v[0], v[1])) }
        fn max_lane(v: Self::V) -> f32 { max8(_mm256_max_ps(v[0], v[1])) }
        fn pack_bf16(lo: Self::V, hi: Self::V) -> Self::W {
            [pack_bf16(lo[0], lo[1]), pack_bf16(hi[0], hi[1])]
        }
    }
}

/// Methods that apply an expression to both halves of their vectors.
macro_rules! half_ops {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty = $h:ident => $e:expr;)*) => {
        $(#[inline(always)]
        fn $name(self, $($arg: $ty),*) -> $ret {
            // SAFETY: the token proves the instructions; no memory is touched.
            unsafe { [{ let $h = 0; $e }, { let $h = 1; $e }] }
        })*
    };
}

impl<const VNNI: bool> IntSimd for Avx2<VNNI> {
    const BYTE_BIAS: i32 = if VNNI { 128 } else { 0 };

    half_ops! {
        fn dot_small(acc: Self::W, w: Self::W, x: Self::W) -> Self::W = h => if VNNI {
            _mm256_dpbusd_avx_epi32(acc[h], w[h], x[h])
        } else {
            add_products(acc[h], w[h], x[h])
        };
        fn dot_bytes(acc: Self::W, w: Self::W, x: Self::W) -> Self::W = h => if VNNI {
            _mm256_dpbusd_avx_epi32(acc[h], w[h], x[h])
        } else {
            // The sign moves from the weight to the activation, so a factor is unsigned.
            let w = _mm256_xor_si256(w[h], _mm256_set1_epi8(-128));
            add_products(acc[h], _mm256_abs_epi8(w), _mm256_sign_epi8(x[h], w))
        };
        fn dot_pairs(acc: Self::W, a: Self::W, b: Self::W) -> Self::W =
            h => _mm256_add_epi32(acc[h], _mm256_madd_epi16(a[h], b[h]));
        fn add_i(a: Self::W, b: Self::W) -> Self::W = h => _mm256_add_epi32(a[h], b[h]);
        fn mul_i(a: Self::W, b: Self::W) -> Self::W = h => _mm256_mullo_epi32(a[h], b[h]);
        fn or_w(a: Self::W, b: Self::W) -> Self::W = h => _mm256_or_si256(a[h], b[h]);
        fn shl_w(a: Self::W, n: i32) -> Self::W = h => _mm256_sll_epi32(a[h], _mm_cvtsi32_si128(n));
        fn shr_w(a: Self::W, n: i32) -> Self::W = h => _mm256_srl_epi32(a[h], _mm_cvtsi32_si128(n));
        fn to_f32(a: Self::W) -> Self::V = h => _mm256_cvtepi32_ps(a[h]);
    }

    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Self::V {
        let p = x.as_ptr().cast::<__m128i>();
        // SAFETY: 16 halves are readable at `p`; the token proves F16C.
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p.add(1)))] }
    }

    #[inline(always)]
    fn round_i8(self, v: Self::V, out: &mut [u32; LANES / 4]) {
        // SAFETY: 16 bytes are writable at `out`; the token proves AVX2.
        unsafe {
            let packed = _mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
            // `packs` works within 128-bit lanes.
            let ordered = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            let (lo, hi) =
                (_mm256_castsi256_si128(ordered), _mm256_extracti128_si256::<1>(ordered));
            _mm_storeu_si128(out.as_mut_ptr().cast(), _mm_packs_epi16(lo, hi));
        }
    }
}

/// `acc` plus four products of an unsigned byte up to 128 and a signed one above -128; two such
/// products fit in the 16 bits between the steps.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn add_products(acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
    // SAFETY: by this function's contract.
    unsafe {
        let pairs = _mm256_maddubs_epi16(w, x);
        _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }
}

/// Folds 8 lanes as the default tree does: 4, 2, 1.
macro_rules! fold8 {
    ($v:expr, $op:ident, $op_last:ident) => {{
        let v = $op(_mm256_castps256_ps128($v), _mm256_extractf128_ps::<1>($v));
        let v = $op(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32($op_last(v, _mm_movehdup_ps(v)))
    }};
}

/// Sum of 8 lanes.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(super) unsafe fn sum8(v: __m256) -> f32 {
    // SAFETY: by this function's contract.
    unsafe { fold8!(v, _mm_add_ps, _mm_add_ss) }
}

/// Largest of 8 lanes.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(super) unsafe fn max8(v: __m256) -> f32 {
    // SAFETY: by this function's contract.
    unsafe { fold8!(v, _mm_max_ps, _mm_max_ss) }
}

/// `x · 2^n`, in two steps so that the factors stay normal.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn scale2(x: __m256, n: __m256) -> __m256 {
    // SAFETY: by this function's contract.
    unsafe {
        let n = _mm256_cvtps_epi32(n);
        let half = _mm256_srai_epi32::<1>(n);
        let rest = _mm256_sub_epi32(n, half);
        let bias = _mm256_set1_epi32(127);
        let pow_half = _mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias));
        let pow_rest = _mm256_slli_epi32::<23>(_mm256_add_epi32(rest, bias));
        let scaled = _mm256_mul_ps(x, _mm256_castsi256_ps(pow_half));
        _mm256_mul_ps(scaled, _mm256_castsi256_ps(pow_rest))
    }
}

/// Even then odd elements, one FMA each.
///
/// # Safety
/// The CPU has AVX2 and FMA.
#[inline(always)]
unsafe fn dot_bf16(acc: __m256, a: __m256i, b: __m256i) -> __m256 {
    // SAFETY: by this function's contract.
    unsafe {
        let high = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
        let a_even = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(a));
        let b_even = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b));
        let a_odd = _mm256_castsi256_ps(_mm256_and_si256(a, high));
        let b_odd = _mm256_castsi256_ps(_mm256_and_si256(b, high));
        _mm256_fmadd_ps(a_odd, b_odd, _mm256_fmadd_ps(a_even, b_even, acc))
    }
}

/// Sixteen values to bf16, in order.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn pack_bf16(lo: __m256, hi: __m256) -> __m256i {
    // SAFETY: by this function's contract.
    unsafe {
        let packed = _mm256_packus_epi32(round_bf16(lo), round_bf16(hi));
        // `packus` works within 128-bit lanes: lo₀ hi₀ lo₁ hi₁.
        _mm256_permute4x64_epi64::<0b11_01_10_00>(packed)
    }
}

/// The bf16 bits of each lane in its low half.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn round_bf16(x: __m256) -> __m256i {
    // SAFETY: by this function's contract.
    unsafe {
        let bits = _mm256_castps_si256(x);
        let high = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
        let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
        let quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        _mm256_blendv_epi8(rounded, quiet, nan)
    }
}
