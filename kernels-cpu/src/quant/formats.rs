//! The register tile of each format.

use super::kind::QuantKind;
use super::tile::{
    Blocks, Format, Minima, Tile, add_dots, add_nibbles, bits, column, finish, halves,
    high_nibbles, low_nibbles, start_dots, term, words,
};
use crate::matrix::PANEL;
use crate::simd::{IntSimd, LANES};

/// [`QuantKind::Int8`]: its sums are integers until [`int8_values`]; a unit is one step.
pub(super) struct Int8;

impl Format for Int8 {
    const KIND: QuantKind = QuantKind::Int8;
    const PAIRS: bool = false;

    #[inline(always)]
    unsafe fn tile<S: IntSimd, const R: usize, const NV: usize>(s: S, t: &Tile) {
        let c = t.c.cast::<u32>();
        let mut dots = [[s.splat_w(0); NV]; R];
        for (r, row) in dots.iter_mut().enumerate() {
            for (v, dot) in row.iter_mut().enumerate() {
                // SAFETY: by the contract.
                *dot = s.load_w(unsafe { &*c.add(r * PANEL + column::<NV>(t, v)).cast() });
            }
        }
        let (mut next, interval) = t.prefetch;
        for step in 0..t.units {
            let fetch = step == next;
            next += if fetch { interval } else { 0 };
            // SAFETY: by the contract.
            unsafe {
                let w = words::<S, NV>(s, t, step * PANEL, fetch);
                add_dots::<S, false, R, NV>(s, t, step, &w, &mut dots);
            }
        }
        for (r, row) in dots.iter().enumerate() {
            for (v, &dot) in row.iter().enumerate() {
                // SAFETY: by the contract.
                s.store_w(dot, unsafe { &mut *c.add(r * PANEL + column::<NV>(t, v)).cast() });
            }
        }
    }
}

/// Sets the sums of a row to what its dots start from, so that they end up free of the bias.
#[inline(always)]
pub(super) fn int8_start<S: IntSimd>(s: S, terms: &[u32], sums: &mut [f32; PANEL]) {
    let start = s.splat_w(terms[1].wrapping_mul((-S::BYTE_BIAS).cast_unsigned()));
    for sums in sums.as_chunks_mut::<LANES>().0 {
        s.store_w(start, bytemuck::cast_mut(sums));
    }
}

/// Turns the integer sums of a row into products: `scale_w · scale_x · dot`.
#[inline(always)]
pub(super) fn int8_values<S: IntSimd>(
    s: S,
    scales: &[u32; PANEL],
    terms: &[u32],
    sums: &mut [f32; PANEL],
) {
    let scales: &[f32; PANEL] = bytemuck::cast_ref(scales);
    let scale_x = s.splat(f32::from_bits(terms[0]));
    let (scales, sums) = (scales.as_chunks::<LANES>().0, sums.as_chunks_mut::<LANES>().0);
    for (scale, sums) in scales.iter().zip(sums) {
        let dot = s.to_f32(s.load_w(bytemuck::cast_ref(sums)));
        s.store(s.mul(s.mul(s.load(scale), scale_x), dot), sums);
    }
}

/// [`QuantKind::Q8_0`].
pub(super) struct Q8_0;

impl Blocks for Q8_0 {
    const BLOCK_KIND: QuantKind = QuantKind::Q8_0;
    const BLOCK_LOOP: usize = 8;

    #[inline(always)]
    unsafe fn unit<S: IntSimd, const R: usize, const NV: usize>(s: S, u: &Tile, fetch: bool) {
        // SAFETY: by the contract.
        unsafe {
            let mut dots = start_dots::<S, R, NV>(s, u, 1, -S::BYTE_BIAS);
            for step in 0..u.count {
                let w = words::<S, NV>(s, u, 32 + step * PANEL, fetch);
                add_dots::<S, false, R, NV>(s, u, step, &w, &mut dots);
            }
            finish(s, u, &halves::<S, NV>(s, u, 0), &dots, None);
        }
    }
}

/// [`QuantKind::Q4_0`].
pub(super) struct Q4_0;

impl Blocks for Q4_0 {
    const BLOCK_KIND: QuantKind = QuantKind::Q4_0;
    const BLOCK_LOOP: usize = 4;

    #[inline(always)]
    unsafe fn unit<S: IntSimd, const R: usize, const NV: usize>(s: S, u: &Tile, fetch: bool) {
        // SAFETY: by the contract.
        unsafe {
            let mut dots = start_dots::<S, R, NV>(s, u, 1, -8);
            add_nibbles::<S, R, NV>(s, (u, fetch), 32, 0, &mut dots);
            finish(s, u, &halves::<S, NV>(s, u, 0), &dots, None);
        }
    }
}

/// [`QuantKind::Q4_1`].
pub(super) struct Q4_1;

impl Blocks for Q4_1 {
    const BLOCK_KIND: QuantKind = QuantKind::Q4_1;
    const BLOCK_LOOP: usize = 4;

    #[inline(always)]
    unsafe fn unit<S: IntSimd, const R: usize, const NV: usize>(s: S, u: &Tile, fetch: bool) {
        // SAFETY: by the contract.
        unsafe {
            let mut dots = start_dots::<S, R, NV>(s, u, 1, 0);
            add_nibbles::<S, R, NV>(s, (u, fetch), 64, 0, &mut dots);
            let sums = start_dots::<S, R, NV>(s, u, 1, 1);
            let minima = halves::<S, NV>(s, u, 1);
            finish(s, u, &halves::<S, NV>(s, u, 0), &dots, Some(Minima { scales: minima, sums }));
        }
    }
}

/// `total += factor · dots`.
#[inline(always)]
fn add_scaled<S: IntSimd, const R: usize, const NV: usize>(
    s: S,
    total: &mut [[S::W; NV]; R],
    factor: &[S::W; NV],
    dots: &[[S::W; NV]; R],
) {
    for (total, dots) in total.iter_mut().zip(dots) {
        for v in 0..NV {
            total[v] = s.add_i(total[v], s.mul_i(factor[v], dots[v]));
        }
    }
}

/// [`QuantKind::Q4K`].
pub(super) struct Q4K;

/// The eight scales or minima of Q4_K, a byte each: the low six bits of `own`, and four bits of
/// `shared` from bit `shift` on under the top two of `own`.
#[inline(always)]
fn six_bit_bytes<S: IntSimd, const NV: usize>(
    s: S,
    own: &[S::W; NV],
    shared: &[S::W; NV],
    shift: i32,
) -> [[S::W; NV]; 2] {
    let mut high = bits(s, shared, shift, 0x0f0f_0f0f);
    let top = bits(s, own, 2, 0x3030_3030);
    for (high, &top) in high.iter_mut().zip(&top) {
        *high = s.or_w(*high, top);
    }
    [bits(s, own, 0, 0x3f3f_3f3f), high]
}

impl Blocks for Q4K {
    const BLOCK_KIND: QuantKind = QuantKind::Q4K;
    const BLOCK_LOOP: usize = 4;
    #[inline(always)]
    unsafe fn unit<S: IntSimd, const R: usize, const NV: usize>(s: S, u: &Tile, fetch: bool) {
        // SAFETY: by the contract.
        unsafe {
            let mut packed = [[s.splat_w(0); NV]; 3];
            for (i, packed) in packed.iter_mut().enumerate() {
                *packed = words::<S, NV>(s, u, 64 + i * PANEL, fetch);
            }
            let scales = six_bit_bytes(s, &packed[0], &packed[2], 0);
            let minima = six_bit_bytes(s, &packed[1], &packed[2], 4);
            let mut total = [[s.splat_w(0); NV]; R];
            for group in 0..8 {
                let mut dots = [[s.splat_w(0); NV]; R];
                let at = 256 + group * 4 * PANEL;
                add_nibbles::<S, R, NV>(s, (u, fetch), at, group * 8, &mut dots);
                let scale = bits(s, &scales[group / 4], (group % 4 * 8) as i32, 0xff);
                add_scaled(s, &mut total, &scale, &dots);
            }
            let mut sums = [[s.splat_w(0); NV]; R];
            for pair in 0..4 {
                let minima = bits(s, &minima[pair / 2], (pair % 2 * 8) as i32, 0x00ff_00ff);
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = s.splat_w(term(u, r, 1 + pair));
                    for (sum, &minimum) in sums.iter_mut().zip(&minima) {
                        *sum = s.dot_pairs(*sum, minimum, x);
                    }
                }
            }
            let minima = halves::<S, NV>(s, u, 1);
            finish(s, u, &halves::<S, NV>(s, u, 0), &total, Some(Minima { scales: minima, sums }));
        }
    }
}

/// [`QuantKind::Q6K`].
pub(super) struct Q6K;

/// The values of step `step` of the four in a word of bit pairs: `low` and a pair above it.
#[inline(always)]
fn six_bit_values<S: IntSimd, const NV: usize>(
    s: S,
    low: &[S::W; NV],
    pairs: &[S::W; NV],
    step: i32,
) -> [S::W; NV] {
    let mut values = *low;
    for (value, &pairs) in values.iter_mut().zip(pairs) {
        let moved =
            if step < 2 { s.shl_w(pairs, 4 - 2 * step) } else { s.shr_w(pairs, 2 * step - 4) };
        *value = s.or_w(*value, s.and_w(moved, s.splat_w(0x3030_3030)));
    }
    values
}

impl Blocks for Q6K {
    const BLOCK_KIND: QuantKind = QuantKind::Q6K;
    const BLOCK_LOOP: usize = 16;
    #[inline(always)]
    unsafe fn unit<S: IntSimd, const R: usize, const NV: usize>(s: S, u: &Tile, fetch: bool) {
        // SAFETY: by the contract.
        unsafe {
            let mut total = [[s.splat_w(0); NV]; R];
            for group in 0..u.count {
                let mut dots = start_dots::<S, R, NV>(s, u, 1 + group, -32);
                let at = 32 + (4 + 3 * group) * PANEL;
                let pairs = words::<S, NV>(s, u, at, fetch);
                for word in 0..2 {
                    let both = words::<S, NV>(s, u, at + (1 + word) * PANEL, fetch);
                    let (low, high) = (low_nibbles(s, &both), high_nibbles(s, &both));
                    let (step, first) = (2 * word as i32, 4 * group + 2 * word);
                    let w = six_bit_values(s, &low, &pairs, step);
                    add_dots::<S, true, R, NV>(s, u, first, &w, &mut dots);
                    let w = six_bit_values(s, &high, &pairs, step + 1);
                    add_dots::<S, true, R, NV>(s, u, first + 1, &w, &mut dots);
                }
                let packed = words::<S, NV>(s, u, 32 + group / 4 * PANEL, fetch && group % 4 == 0);
                let mut scale = bits(s, &packed, (group % 4 * 8) as i32, 0xff);
                for scale in &mut scale {
                    *scale = s.add_i(*scale, s.splat_w((-128_i32).cast_unsigned()));
                }
                add_scaled(s, &mut total, &scale, &dots);
            }
            finish(s, u, &halves::<S, NV>(s, u, 0), &total, None);
        }
    }
}
