//! The register tile every matrix kernel is made of.

use crate::dtype::Elem;
use crate::matrix::PANEL;
use crate::simd::{LANES, Simd};

/// One step along K: `acc[r][v] += splat(a[r]) · b[v]`, over the elements of a word in order.
///
/// # Safety
/// `a + r·a_stride` is readable for every `r` below `R`.
#[inline(always)]
pub(crate) unsafe fn step<S: Simd, D: Elem, const R: usize, const NV: usize>(
    s: S,
    acc: &mut [[S::V; NV]; R],
    (a, a_stride): (*const u32, usize),
    b: &[S::W; NV],
) {
    for (r, row) in acc.iter_mut().enumerate() {
        // SAFETY: by the contract.
        let a = s.splat_w(unsafe { *a.add(r * a_stride) });
        for (sum, &b) in row.iter_mut().zip(b) {
            *sum = D::dot(s, *sum, a, b);
        }
    }
}

/// A piece of a packed panel times a few rows.
pub(crate) struct PanelTile {
    /// First word of the first row.
    pub(crate) a: *const u32,
    /// Words from row to row.
    pub(crate) a_stride: usize,
    /// First word of the first column vector at the first step.
    pub(crate) b: *const u32,
    /// Steps along K.
    pub(crate) steps: usize,
    /// Sums, `PANEL` apart from row to row, at the first column vector.
    pub(crate) c: *mut f32,
    /// Where step `k` prefetches its share of the panel, `k · PANEL` words further on.
    pub(crate) ahead: *const u32,
    /// The first step that prefetches, and how many steps later the next one does.
    pub(crate) prefetch: (usize, usize),
}

/// Adds the tile's products to its sums, in the order of K. Column vectors are adjacent, except
/// that a pair is half a panel apart.
///
/// # Safety
/// The tile's pointers cover `R` rows, `steps` steps and `NV` column vectors; nobody else uses
/// the sums.
#[inline(always)]
pub(crate) unsafe fn panel_tile<S: Simd, D: Elem, const R: usize, const NV: usize>(
    s: S,
    t: &PanelTile,
) {
    let spacing = if NV == 2 { PANEL / 2 } else { LANES };
    let mut acc = [[s.splat(0.0); NV]; R];
    for (r, row) in acc.iter_mut().enumerate() {
        for (v, sum) in row.iter_mut().enumerate() {
            // SAFETY: by the contract.
            *sum = s.load(unsafe { &*t.c.add(r * PANEL + v * spacing).cast() });
        }
    }
    let (mut prefetch_at, interval) = t.prefetch;
    for k in 0..t.steps {
        let mut b = [s.splat_w(0); NV];
        for (v, b) in b.iter_mut().enumerate() {
            // SAFETY: by the contract.
            *b = s.load_w(unsafe { &*t.b.add(k * PANEL + v * spacing).cast() });
        }
        if k == prefetch_at {
            prefetch_at += interval;
            for v in 0..NV {
                s.prefetch(t.ahead.wrapping_add(k * PANEL + v * spacing));
            }
        }
        // SAFETY: by the contract.
        unsafe { step::<S, D, R, NV>(s, &mut acc, (t.a.add(k), t.a_stride), &b) };
    }
    for (r, row) in acc.iter().enumerate() {
        for (v, &sum) in row.iter().enumerate() {
            // SAFETY: by the contract.
            s.store(sum, unsafe { &mut *t.c.add(r * PANEL + v * spacing).cast() });
        }
    }
}

/// Calls `$tile::<S, D, R, NV>(args)` with `R` the number of rows, at most `S::MR`.
macro_rules! by_rows {
    ($rows:expr, $s:ty, $tile:ident::<$d:ty, $nv:literal>($($arg:expr),*)) => {
        match $rows {
            1 => $tile::<$s, $d, 1, $nv>($($arg),*),
            2 => $tile::<$s, $d, 2, $nv>($($arg),*),
            3 => $tile::<$s, $d, 3, $nv>($($arg),*),
            4 => $tile::<$s, $d, 4, $nv>($($arg),*),
            5 if <$s>::MR > 4 => $tile::<$s, $d, 5, $nv>($($arg),*),
            6 if <$s>::MR > 4 => $tile::<$s, $d, 6, $nv>($($arg),*),
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}
pub(crate) use by_rows;

/// Rows `start..end` of tile `tile` when `rows` rows are spread evenly over tiles of at most `max`.
#[inline(always)]
pub(crate) fn tile_rows(rows: usize, max: usize, tile: usize) -> (usize, usize) {
    let tiles = rows.div_ceil(max);
    (tile * rows / tiles, (tile + 1) * rows / tiles)
}
