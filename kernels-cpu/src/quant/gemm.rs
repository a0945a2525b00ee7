//! The product of quantised rows and quantised weights; cut into items as in [`crate::gemm()`].

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::formats::{Int8, Q4_0, Q4_1, Q4K, Q6K, Q8_0, int8_start, int8_values};
use super::kind::QuantKind;
use super::matrix::QuantMatrix;
use super::rows::QuantRows;
use super::tile::{Format, Tile};
use crate::ctx::Ctx;
use crate::dtype::{Bf16, Dtype, F32};
use crate::gemm::{BLOCK_ROWS, Epilogue, Part, Plan, Sink, Sums};
use crate::matrix::PANEL;
use crate::simd::{IntKernel, IntPath, IntSimd, dispatch_int};
use crate::tile::{by_rows, tile_rows};

/// Words of a panel in a chunk when few rows share it: 32 KiB, which stay in L1.
const NARROW_CHUNK: usize = 8 << 10;

/// Words of a panel in a chunk when many rows share it: 256 KiB, which stay in L2.
const WIDE_CHUNK: usize = 64 << 10;

/// Multiplies quantised rows by `w`. SiLU·mul gives words of the type the rows came in.
///
/// Panics if the rows are not for weights of this kind, or a length does not fit the shapes.
pub fn gemm_quant(ctx: &Ctx, rows: &QuantRows, w: &QuantMatrix, ep: Epilogue<'_>) {
    gemm_on(IntPath::of(ctx.isa), ctx, rows, w, ep);
}

fn gemm_on(path: IntPath, ctx: &Ctx, rows: &QuantRows, w: &QuantMatrix, ep: Epilogue<'_>) {
    let (m, n) = (rows.m, w.n());
    assert!(rows.kind.same_rows(w.kind()), "gemm: rows for {}, weights of {}", rows.kind, w.kind());
    assert_eq!(rows.k, w.k(), "gemm: inputs of the rows and of the weights");
    let sink = Sink::new(ep, m, n, rows.dtype);
    if m == 0 || n == 0 {
        return;
    }
    let halves = 2 * n.div_ceil(PANEL);
    let plan = Plan::new(m, halves, ctx.pool.threads());
    ctx.pool.for_each(plan.column_items * plan.row_items, |_, item| {
        let (column, row) = (item / plan.row_items, item % plan.row_items);
        let block = Block {
            rows,
            w,
            sink: &sink,
            range: (row * m / plan.row_items, (row + 1) * m / plan.row_items),
            halves: (
                column * halves / plan.column_items,
                (column + 1) * halves / plan.column_items,
            ),
        };
        match w.kind() {
            QuantKind::Int8 => dispatch_int(path, Typed::<Int8>(block, PhantomData)),
            QuantKind::Q8_0 => dispatch_int(path, Typed::<Q8_0>(block, PhantomData)),
            QuantKind::Q4_0 => dispatch_int(path, Typed::<Q4_0>(block, PhantomData)),
            QuantKind::Q4_1 => dispatch_int(path, Typed::<Q4_1>(block, PhantomData)),
            QuantKind::Q4K => dispatch_int(path, Typed::<Q4K>(block, PhantomData)),
            QuantKind::Q6K => dispatch_int(path, Typed::<Q6K>(block, PhantomData)),
        }
    });
}

/// One item: a range of rows, at most [`BLOCK_ROWS`], times a range of half panels.
struct Block<'a> {
    rows: &'a QuantRows,
    w: &'a QuantMatrix,
    sink: &'a Sink<'a>,
    range: (usize, usize),
    halves: (usize, usize),
}

/// A block whose weights' format is a type.
struct Typed<'a, F>(Block<'a>, PhantomData<F>);

impl<F: Format> IntKernel for Typed<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: IntSimd>(self, s: S) {
        self.0.panels::<S, F>(s);
    }
}

impl Block<'_> {
    #[inline(always)]
    fn panels<S: IntSimd, F: Format>(&self, s: S) {
        let mut scratch = MaybeUninit::<Sums>::uninit();
        let rows = self.range.1 - self.range.0;
        assert!(rows <= BLOCK_ROWS, "an item of {rows} rows");
        let mut half = self.halves.0;
        while half < self.halves.1 {
            let (panel, part) = if half.is_multiple_of(2) && half + 2 <= self.halves.1 {
                (half / 2, Part::Full)
            } else {
                (half / 2, Part::Half(half % 2))
            };
            // SAFETY: the scratch has BLOCK_ROWS rows; all bytes zero is a valid `f32` row.
            let sums = unsafe {
                let sums = (&raw mut (*scratch.as_mut_ptr()).0).cast::<[f32; PANEL]>();
                sums.write_bytes(0, rows);
                std::slice::from_raw_parts_mut(sums, rows)
            };
            self.multiply::<S, F>(s, panel, part, sums);
            match self.rows.dtype {
                Dtype::F32 => self.sink.store::<S, F32>(s, self.range.0, panel, part, sums),
                Dtype::Bf16 => self.sink.store::<S, Bf16>(s, self.range.0, panel, part, sums),
            }
            half += part.vectors().len() / 2;
        }
    }

    /// `sums = x · panelᵀ`, chunk by chunk, of sums that are zero.
    #[inline(always)]
    fn multiply<S: IntSimd, F: Format>(
        &self,
        s: S,
        panel: usize,
        part: Part,
        sums: &mut [[f32; PANEL]],
    ) {
        let (row_words, row_terms) = (self.rows.row_words(), self.rows.row_terms());
        let x = &self.rows.quants[self.range.0 * row_words..][..sums.len() * row_words];
        let terms = &self.rows.terms[self.range.0 * row_terms..][..sums.len() * row_terms];
        let (header, b) = self.w.panel(panel).split_at(F::KIND.header_words());
        if F::KIND == QuantKind::Int8 {
            for (sums, terms) in sums.iter_mut().zip(terms.chunks_exact(row_terms)) {
                int8_start(s, terms, sums);
            }
        }
        let units = b.len() / F::KIND.unit_words();
        // `Int8` describes a row, not a unit.
        let unit_terms = if F::KIND == QuantKind::Int8 { 0 } else { F::KIND.terms() };
        assert_eq!(row_words, units * F::KIND.unit_steps(), "words of a quantised row");
        let tiles = sums.len().div_ceil(S::ROWS);
        let chunk = if tiles <= 4 { NARROW_CHUNK } else { WIDE_CHUNK };
        let chunk = (chunk / F::KIND.unit_words()).max(1);
        for first in (0..units).step_by(chunk) {
            for tile in 0..tiles {
                let (start, end) = tile_rows(sums.len(), S::ROWS, tile);
                let t = Tile {
                    x: x[start * row_words + first * F::KIND.unit_steps()..].as_ptr(),
                    x_stride: row_words,
                    terms: terms[start * row_terms + first * unit_terms..].as_ptr(),
                    terms_stride: row_terms,
                    b: b[first * F::KIND.unit_words()..].as_ptr(),
                    units: chunk.min(units - first),
                    count: std::hint::black_box(F::LOOP),
                    vector: 0,
                    c: sums[start..].as_mut_ptr().cast(),
                    ahead: chunk * F::KIND.unit_words(),
                    // Together the tiles prefetch all of the chunk to come.
                    prefetch: (tile, tiles),
                };
                // SAFETY: rows `start..end`, the units and the part's vectors are in bounds.
                unsafe { multiply_tile::<S, F>(s, t, end - start, part) };
            }
        }
        if let Ok(scales) = header.try_into() {
            for (sums, terms) in sums.iter_mut().zip(terms.chunks_exact(row_terms)) {
                int8_values(s, scales, terms, sums);
            }
        }
    }
}

/// # Safety
/// As for [`Format::tile`] with `rows` rows and the vectors of `part`.
#[inline(always)]
unsafe fn multiply_tile<S: IntSimd, F: Format>(s: S, t: Tile, rows: usize, part: Part) {
    let at = |vector: usize| Tile { vector, ..t };
    // The first vector of each pair.
    let pairs = &part.vectors()[..part.vectors().len() / 2];
    // SAFETY: by the contract.
    unsafe {
        match (part, rows) {
            _ if S::ROWS == 1 => {
                for &vector in part.vectors() {
                    format_tile::<S, F, 1, 1>(s, &at(vector));
                }
            }
            _ if S::NV == 1 => {
                for &vector in part.vectors() {
                    by_rows!(rows, S, format_tile::<F, 1>(s, &at(vector)));
                }
            }
            (Part::Full, 1) => format_tile::<S, F, 1, 4>(s, &t),
            (Part::Full, 2) => format_tile::<S, F, 2, 4>(s, &t),
            (Part::Full, _) if !F::PAIRS => by_rows!(rows, S, format_tile::<F, 4>(s, &t)),
            _ => {
                for &vector in pairs {
                    by_rows!(rows, S, format_tile::<F, 2>(s, &at(vector)));
                }
            }
        }
    }
}

/// # Safety
/// As for [`Format::tile`].
#[inline(always)]
unsafe fn format_tile<S: IntSimd, F: Format, const R: usize, const NV: usize>(s: S, t: &Tile) {
    // SAFETY: by the contract.
    unsafe { F::tile::<S, R, NV>(s, t) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    const PATHS: [IntPath; 6] = [
        IntPath::Portable,
        IntPath::Neon,
        IntPath::Avx2,
        IntPath::Avx2Vnni,
        IntPath::Avx512,
        IntPath::Avx512Vnni,
    ];

    /// Bytes of all kinds, so that weights and packed scales take every sign; small f16 scales.
    fn fill(i: usize, out: &mut [u8]) {
        for (j, byte) in out.iter_mut().enumerate() {
            *byte = ((i * 7919 + j * 104_729) >> 3) as u8;
        }
        for scale in out.as_chunks_mut::<2>().0 {
            // The exponent of every pair of bytes is kept from that of infinity.
            scale[1] &= 0xbf;
        }
    }

    /// A public path stands for the best of its integer paths; here each has its turn.
    #[test]
    fn every_path_has_the_same_bits() {
        let ctx = Ctx::new(Isa::detect(), 2).unwrap();
        for kind in QuantKind::ALL {
            let (m, n, k) = (13, 100, 512);
            let mut w = QuantMatrix::zeroed(kind, n, k).unwrap();
            if kind == QuantKind::Int8 {
                w.set_values(&ctx, 0, n, &|i, out| {
                    for (j, x) in out.iter_mut().enumerate() {
                        *x = ((i * 31 + j * 17) % 101) as f32 - 50.0;
                    }
                });
            } else {
                w.set_blocks(&ctx, 0, n, &fill);
            }
            let x: Vec<f32> = (0..m * k).map(|i| ((i * 37) % 211) as f32 - 105.0).collect();
            let mut want = None;
            for path in PATHS.into_iter().filter(|path| path.is_available()) {
                let mut rows = QuantRows::new();
                let x = (bytemuck::cast_slice(&x), Dtype::F32);
                rows.quantise_on(path, &ctx, x, (m, k), kind);
                let mut out = vec![f32::NAN; m * n];
                let ep = Epilogue::Store { bias: None, out: &mut out };
                gemm_on(path, &ctx, &rows, &w, ep);
                assert!(out.iter().all(|x| x.is_finite()), "{kind} on {path:?}");
                let bits: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
                assert!(*want.get_or_insert_with(|| bits.clone()) == bits, "{kind} on {path:?}");
            }
        }
    }
}
