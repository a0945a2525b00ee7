//! Integer dot products over every instruction set.
//!
//! Integers are exact and the f32 operations here are rounded once each, so a kernel over
//! [`IntSimd`] has the same bits on every path. That is why the paths are not those of [`Isa`]:
//! the byte dot product (VNNI) is used wherever it is, since nobody can tell.

use super::{LANES, Simd, portable};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::isa::Isa;

/// Sixteen-lane integer arithmetic of one instruction set.
pub(crate) trait IntSimd: Simd {
    /// What [`Self::dot_bytes`] adds to each weight.
    const BYTE_BIAS: i32;
    /// Rows of the register tile.
    const ROWS: usize = Self::MR;

    /// `a · b + c`, rounded once on every path.
    #[inline(always)]
    fn fused(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        self.fma(a, b, c)
    }
    /// `acc + Σ w·x` over the four bytes of each word; `w` is 0 to 127, `x` -127 to 127.
    fn dot_small(self, acc: Self::W, w: Self::W, x: Self::W) -> Self::W;
    /// `acc + Σ (w - 128 + BYTE_BIAS)·x` likewise; `w` is any unsigned byte.
    fn dot_bytes(self, acc: Self::W, w: Self::W, x: Self::W) -> Self::W;
    /// `acc + a₀·b₀ + a₁·b₁` over the signed 16-bit halves of each word.
    fn dot_pairs(self, acc: Self::W, a: Self::W, b: Self::W) -> Self::W;
    /// `a + b`, wrapping.
    fn add_i(self, a: Self::W, b: Self::W) -> Self::W;
    /// The low half of `a · b`.
    fn mul_i(self, a: Self::W, b: Self::W) -> Self::W;
    /// Bitwise or.
    fn or_w(self, a: Self::W, b: Self::W) -> Self::W;
    /// `a << n`, `n` below 32.
    fn shl_w(self, a: Self::W, n: i32) -> Self::W;
    /// `a >> n` of unsigned words, `n` below 32.
    fn shr_w(self, a: Self::W, n: i32) -> Self::W;
    /// Signed lanes as `f32`, to nearest even.
    fn to_f32(self, a: Self::W) -> Self::V;
    /// IEEE halves, widened.
    fn load_f16(self, x: &[u16; LANES]) -> Self::V;
    /// Lanes of at most 127.5 in magnitude to signed bytes, to nearest even.
    fn round_i8(self, v: Self::V, out: &mut [u32; LANES / 4]);
}

/// Work over [`IntSimd`], compiled once for each path.
pub(crate) trait IntKernel {
    /// What the work returns.
    type Output;

    /// Does the work; implementations are `#[inline(always)]`.
    fn run<S: IntSimd>(self, s: S) -> Self::Output;
}

/// A path of integer kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IntPath {
    /// Plain Rust.
    Portable,
    /// AArch64 Advanced SIMD.
    Neon,
    /// AVX2, FMA and F16C.
    Avx2,
    /// The same and AVX-VNNI.
    Avx2Vnni,
    /// AVX-512.
    Avx512,
    /// AVX-512 with VNNI.
    Avx512Vnni,
}

impl IntPath {
    /// The best path within `isa` on this machine.
    pub(crate) fn of(isa: Isa) -> Self {
        let candidates: &[Self] = match isa {
            Isa::Portable => &[],
            Isa::Neon => &[Self::Neon],
            Isa::Avx2 => &[Self::Avx2Vnni, Self::Avx2],
            Isa::Avx512 | Isa::Avx512Bf16 => &[Self::Avx512Vnni, Self::Avx512],
        };
        candidates.iter().copied().find(|path| path.is_available()).unwrap_or(Self::Portable)
    }

    /// Whether this machine runs the path.
    pub(crate) fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Neon => Isa::Neon.is_available(),
            Self::Avx512 => Isa::Avx512.is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Isa::Avx2.is_available() && is_x86_feature_detected!("f16c"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Vnni => Self::Avx2.is_available() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => {
                Self::Avx512.is_available() && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx2Vnni | Self::Avx512Vnni => false,
        }
    }
}

/// Runs `kernel` on `path`. Panics if this machine does not have it.
pub(crate) fn dispatch_int<K: IntKernel>(path: IntPath, kernel: K) -> K::Output {
    assert!(path.is_available(), "this machine does not run the {path:?} path");
    match path {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: availability was asserted.
        IntPath::Avx2 => unsafe { avx2::run_int(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: availability was asserted.
        IntPath::Avx2Vnni => unsafe { avx2::run_vnni(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: availability was asserted.
        IntPath::Avx512 => unsafe { avx512::run_int(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: availability was asserted.
        IntPath::Avx512Vnni => unsafe { avx512::run_vnni(kernel) },
        #[cfg(target_arch = "aarch64")]
        IntPath::Neon => kernel.run(super::neon::Neon::new()),
        _ => kernel.run(portable::Portable),
    }
}
