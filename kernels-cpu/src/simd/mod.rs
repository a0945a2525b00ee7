//! One vector vocabulary over every instruction set.
//!
//! A kernel is written once, generic over [`Simd`], and is compiled once for each path by
//! [`dispatch`]. The token `S` proves that the CPU runs the path, so the arithmetic is safe to
//! call. Everything generic over `S` must be `#[inline(always)]`: it has no target feature of its
//! own and takes those of the function it ends up in. For the same reason kernels avoid closures.
//!
//! A vector is 16 `f32` (or 16 `u32` words) on every path, and reductions over its lanes run in
//! one fixed tree, so a result depends on the data and the path alone.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod int;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use crate::isa::Isa;

pub(crate) use int::{IntKernel, IntPath, IntSimd, dispatch_int};

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// `0.0, 1.0, … 15.0`.
const IOTA: [f32; LANES] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];

/// Adding then subtracting this rounds `|x| < 2^22` to the nearest integer, ties to even.
pub(crate) const ROUND_MAGIC: f32 = 12_582_912.0;

/// Sixteen-lane arithmetic of one instruction set.
pub(crate) trait Simd: Copy {
    /// 16 × `f32`.
    type V: Copy;
    /// 16 × `u32`.
    type W: Copy;
    /// Rows of the register tile.
    const MR: usize;
    /// Vectors across the register tile: 4 or 1.
    const NV: usize;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Lanes from memory.
    fn load(self, x: &[f32; LANES]) -> Self::V;
    /// Lanes to memory.
    fn store(self, v: Self::V, out: &mut [f32; LANES]);
    /// All lanes `x`.
    fn splat_w(self, x: u32) -> Self::W;
    /// Lanes from memory.
    fn load_w(self, x: &[u32; LANES]) -> Self::W;
    /// Lanes to memory.
    fn store_w(self, w: Self::W, out: &mut [u32; LANES]);
    /// Lanes 0..8 from `lo` and 8..16 from `hi`.
    fn join_w(self, lo: &[u32; 8], hi: &[u32; 8]) -> Self::W;
    /// Bitwise and.
    fn and_w(self, a: Self::W, b: Self::W) -> Self::W;
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a · b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`, correctly rounded.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`; fused except on the portable path.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b`, so `b` when they do not compare.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? a : b`, so `b` when they do not compare.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? t : f`.
    fn select_lt(self, a: Self::V, b: Self::V, t: Self::V, f: Self::V) -> Self::V;
    /// `x · 2^n` for integral `n` in `[-127, 128]` and `x` in `[0.5, 2]`.
    fn scale2(self, x: Self::V, n: Self::V) -> Self::V;
    /// `acc + a·b` of words that hold one `f32`.
    fn dot_f32(self, acc: Self::V, a: Self::W, b: Self::W) -> Self::V;
    /// `acc + a₀·b₀ + a₁·b₁` of words that hold two `bf16`.
    fn dot_bf16(self, acc: Self::V, a: Self::W, b: Self::W) -> Self::V;
    /// 32 consecutive values, rounded to nearest even, NaN kept.
    fn pack_bf16(self, lo: Self::V, hi: Self::V) -> Self::W;
    /// Asks for the cache line at `p`, any address, into L1.
    fn prefetch(self, p: *const u32);
    /// Asks for the cache line at `p`, any address, into L2.
    fn prefetch_l2(self, p: *const u32);

    /// `0.0, 1.0, … 15.0`.
    #[inline(always)]
    fn iota(self) -> Self::V {
        self.load(&IOTA)
    }

    /// The lanes as an array.
    #[inline(always)]
    fn to_array(self, v: Self::V) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        lanes
    }

    /// Sum of the lanes: halves folded onto each other, 8, 4, 2, 1.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        tree_sum(self.to_array(v))
    }

    /// Largest lane.
    #[inline(always)]
    fn max_lane(self, v: Self::V) -> f32 {
        let mut lanes = self.to_array(v);
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                let (a, b) = (lanes[i], lanes[i + width]);
                lanes[i] = if a > b { a } else { b };
            }
        }
        lanes[0]
    }

    /// `2^x` within 2 ulp; exactly 1 at 0, 0 below −126 (no denormals), ∞ from 128, NaN of NaN.
    #[inline(always)]
    fn exp2(self, x: Self::V) -> Self::V {
        // Cephes exp2f: 2^f = 1 + f·P(f) on [-0.5, 0.5].
        let magic = self.splat(ROUND_MAGIC);
        let clamped = self.min(self.splat(128.0), self.max(self.splat(-127.0), x));
        let n = self.sub(self.add(clamped, magic), magic);
        let f = self.sub(clamped, n);
        let mut p = self.splat(1.535_336_2e-4);
        for c in [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0] {
            p = self.fma(p, f, self.splat(c));
        }
        self.select_lt(x, self.splat(-126.0), self.splat(0.0), self.scale2(p, n))
    }

    /// `x / (1 + e^-x)`.
    #[inline(always)]
    fn silu(self, x: Self::V) -> Self::V {
        let e = self.exp2(self.mul(x, self.splat(-std::f32::consts::LOG2_E)));
        self.div(x, self.add(e, self.splat(1.0)))
    }
}

/// Sum of 16 lanes in the one order every reduction uses.
#[inline(always)]
pub(crate) fn tree_sum(mut lanes: [f32; LANES]) -> f32 {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// Work compiled once for each instruction set.
pub(crate) trait Kernel {
    /// What the work returns.
    type Output;

    /// Does the work; implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// Runs `kernel` on the path `isa`.
///
/// Panics if this machine does not have it: [`crate::Ctx::new`] refuses such a path.
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    assert!(isa.is_available(), "this machine does not run the {isa} path");
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: availability was asserted.
        Isa::Avx2 => unsafe { avx2::run(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: availability was asserted.
        Isa::Avx512 => unsafe { avx512::run(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: availability was asserted.
        Isa::Avx512Bf16 => unsafe { avx512::run_bf16(kernel) },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => kernel.run(neon::Neon::new()),
        _ => kernel.run(portable::Portable),
    }
}
