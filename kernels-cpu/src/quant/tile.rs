//! What the register tiles of the formats are made of.

use super::kind::QuantKind;
use crate::matrix::PANEL;
use crate::simd::{IntSimd, LANES};

/// A run of units of a panel times a few rows.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// First word of the first row.
    pub(super) x: *const u32,
    /// Words from row to row.
    pub(super) x_stride: usize,
    /// First term of the first row; not read by `Int8`.
    pub(super) terms: *const u32,
    /// Terms from row to row.
    pub(super) terms_stride: usize,
    /// First unit.
    pub(super) b: *const u32,
    /// Number of units.
    pub(super) units: usize,
    /// [`Format::LOOP`], as a value that the compiler does not know: an unrolled loop is scheduled
    /// so that it spills.
    pub(super) count: usize,
    /// First column vector.
    pub(super) vector: usize,
    /// Sums of column 0 of the first row, `PANEL` apart from row to row.
    pub(super) c: *mut f32,
    /// Words from a unit to the one it prefetches.
    pub(super) ahead: usize,
    /// The first unit that prefetches, and how many units later the next one does.
    pub(super) prefetch: (usize, usize),
}

/// A format of weights as a type, so that kernels are compiled once for each.
pub(super) trait Format {
    const KIND: QuantKind;

    /// Whether a tile of more than two rows has at most two column vectors, for want of registers.
    const PAIRS: bool = true;

    /// Iterations of the loop within a unit.
    const LOOP: usize = 1;

    /// Adds the tile's products to its sums, in the order of K.
    ///
    /// # Safety
    /// The tile's pointers cover `R` rows, its units and `NV` column vectors; nobody else uses the
    /// sums.
    unsafe fn tile<S: IntSimd, const R: usize, const NV: usize>(s: S, t: &Tile);
}

/// A format whose units are blocks with scales.
pub(super) trait Blocks {
    /// As [`Format::KIND`].
    const BLOCK_KIND: QuantKind;

    /// As [`Format::LOOP`].
    const BLOCK_LOOP: usize;

    /// Adds the products of the first unit of `u` to its sums, and prefetches if `fetch`.
    ///
    /// # Safety
    /// As for [`Format::tile`].
    unsafe fn unit<S: IntSimd, const R: usize, const NV: usize>(s: S, u: &Tile, fetch: bool);
}

impl<B: Blocks> Format for B {
    const KIND: QuantKind = B::BLOCK_KIND;
    const LOOP: usize = B::BLOCK_LOOP;

    #[inline(always)]
    unsafe fn tile<S: IntSimd, const R: usize, const NV: usize>(s: S, t: &Tile) {
        let (mut next, interval) = t.prefetch;
        for i in 0..t.units {
            let unit = Tile {
                x: t.x.wrapping_add(i * Self::KIND.unit_steps()),
                terms: t.terms.wrapping_add(i * Self::KIND.terms()),
                b: t.b.wrapping_add(i * Self::KIND.unit_words()),
                ..*t
            };
            let fetch = i == next;
            next += if fetch { interval } else { 0 };
            // SAFETY: by the contract.
            unsafe { Self::unit::<S, R, NV>(s, &unit, fetch) };
        }
    }
}

/// First column of vector `v` of a tile of `NV`. Vectors are adjacent, except that a pair is half
/// a panel apart.
#[inline(always)]
pub(super) fn column<const NV: usize>(t: &Tile, v: usize) -> usize {
    (t.vector + if NV == 2 { 2 * v } else { v }) * LANES
}

/// The words of the tile's columns at word `at` of a unit.
///
/// # Safety
/// They are readable.
#[inline(always)]
pub(super) unsafe fn words<S: IntSimd, const NV: usize>(
    s: S,
    u: &Tile,
    at: usize,
    fetch: bool,
) -> [S::W; NV] {
    let mut words = [s.splat_w(0); NV];
    for (v, word) in words.iter_mut().enumerate() {
        let p = u.b.wrapping_add(at + column::<NV>(u, v));
        // SAFETY: by the contract.
        *word = s.load_w(unsafe { &*p.cast() });
        if fetch {
            s.prefetch(p.wrapping_add(u.ahead));
        }
    }
    words
}

/// The tile's columns of row `row` of the f16 values at the start of a unit.
///
/// # Safety
/// They are readable.
#[inline(always)]
pub(super) unsafe fn halves<S: IntSimd, const NV: usize>(s: S, u: &Tile, row: usize) -> [S::V; NV] {
    let mut values = [s.splat(0.0); NV];
    for (v, value) in values.iter_mut().enumerate() {
        let p = u.b.cast::<u16>().wrapping_add(row * PANEL + column::<NV>(u, v));
        // SAFETY: by the contract.
        *value = s.load_f16(unsafe { &*p.cast() });
    }
    values
}

/// Term `at` of row `r`.
///
/// # Safety
/// It is readable.
#[inline(always)]
pub(super) unsafe fn term(u: &Tile, r: usize, at: usize) -> u32 {
    // SAFETY: by the contract.
    unsafe { *u.terms.add(r * u.terms_stride + at) }
}

/// Dots that start from `factor` times term `at`, a sum of values.
///
/// # Safety
/// The term is readable for `R` rows.
#[inline(always)]
pub(super) unsafe fn start_dots<S: IntSimd, const R: usize, const NV: usize>(
    s: S,
    u: &Tile,
    at: usize,
    factor: i32,
) -> [[S::W; NV]; R] {
    let mut dots = [[s.splat_w(0); NV]; R];
    if factor != 0 {
        for (r, row) in dots.iter_mut().enumerate() {
            // SAFETY: by the contract.
            let sum = unsafe { term(u, r, at) };
            *row = [s.splat_w(sum.wrapping_mul(factor.cast_unsigned())); NV];
        }
    }
    dots
}

/// `dots += w · x` at step `step` of a unit; `SMALL` if no weight is above 127.
///
/// # Safety
/// The step is readable for `R` rows.
#[inline(always)]
pub(super) unsafe fn add_dots<S: IntSimd, const SMALL: bool, const R: usize, const NV: usize>(
    s: S,
    u: &Tile,
    step: usize,
    w: &[S::W; NV],
    dots: &mut [[S::W; NV]; R],
) {
    for (r, row) in dots.iter_mut().enumerate() {
        // SAFETY: by the contract.
        let x = s.splat_w(unsafe { *u.x.add(r * u.x_stride + step) });
        for (dot, &w) in row.iter_mut().zip(w) {
            *dot = if SMALL { s.dot_small(*dot, w, x) } else { s.dot_bytes(*dot, w, x) };
        }
    }
}

/// `dots += w · x` over four words of nibbles at word `at`, from step `step` on.
///
/// # Safety
/// As for [`words`] and [`add_dots`].
#[inline(always)]
pub(super) unsafe fn add_nibbles<S: IntSimd, const R: usize, const NV: usize>(
    s: S,
    (u, fetch): (&Tile, bool),
    at: usize,
    step: usize,
    dots: &mut [[S::W; NV]; R],
) {
    for j in 0..u.count {
        // SAFETY: by the contract.
        unsafe {
            let both = words::<S, NV>(s, u, at + j * PANEL, fetch);
            add_dots::<S, true, R, NV>(s, u, step + 2 * j, &low_nibbles(s, &both), dots);
            add_dots::<S, true, R, NV>(s, u, step + 2 * j + 1, &high_nibbles(s, &both), dots);
        }
    }
}

#[inline(always)]
pub(super) fn low_nibbles<S: IntSimd, const NV: usize>(s: S, words: &[S::W; NV]) -> [S::W; NV] {
    bits(s, words, 0, 0x0f0f_0f0f)
}

#[inline(always)]
pub(super) fn high_nibbles<S: IntSimd, const NV: usize>(s: S, words: &[S::W; NV]) -> [S::W; NV] {
    bits(s, words, 4, 0x0f0f_0f0f)
}

/// `words >> shift & mask`.
#[inline(always)]
pub(super) fn bits<S: IntSimd, const NV: usize>(
    s: S,
    words: &[S::W; NV],
    shift: i32,
    mask: u32,
) -> [S::W; NV] {
    let mut out = *words;
    for word in &mut out {
        *word = s.and_w(s.shr_w(*word, shift), s.splat_w(mask));
    }
    out
}

/// The minima of a block: a scale for each column, and the integers that it is multiplied with.
pub(super) struct Minima<S: IntSimd, const R: usize, const NV: usize> {
    pub(super) scales: [S::V; NV],
    pub(super) sums: [[S::W; NV]; R],
}

/// `c = fma(scale_w · scale_x, dot, c)`, then likewise with the minima, if any, and their sums.
///
/// # Safety
/// As for [`Blocks::unit`].
#[inline(always)]
pub(super) unsafe fn finish<S: IntSimd, const R: usize, const NV: usize>(
    s: S,
    u: &Tile,
    scales: &[S::V; NV],
    dots: &[[S::W; NV]; R],
    minima: Option<Minima<S, R, NV>>,
) {
    for (r, dots) in dots.iter().enumerate() {
        // SAFETY: by the contract.
        let scale_x = s.splat(f32::from_bits(unsafe { term(u, r, 0) }));
        for v in 0..NV {
            let c = u.c.wrapping_add(r * PANEL + column::<NV>(u, v));
            // SAFETY: by the contract.
            let c = unsafe { &mut *c.cast() };
            let mut sum = s.fused(s.mul(scales[v], scale_x), s.to_f32(dots[v]), s.load(c));
            if let Some(minima) = &minima {
                let scale = s.mul(minima.scales[v], scale_x);
                sum = s.fused(scale, s.to_f32(minima.sums[r][v]), sum);
            }
            s.store(sum, c);
        }
    }
}
