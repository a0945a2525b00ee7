//! `x · Wᵀ` with fused epilogues.
//!
//! Workers own disjoint columns, and each walks its panels once, so weights are read from memory
//! once a call. Within a panel, a block of rows takes one chunk of K after another; its sums wait
//! in a scratch block between chunks. An element is therefore one chain of multiply-adds in the
//! order of K, whatever the number of rows, workers or chunks.

use std::mem::MaybeUninit;

use crate::ctx::Ctx;
use crate::dtype::{Bf16, Dtype, Elem, F32};
use crate::matrix::{GATE_COLUMNS, PANEL, PackedMatrix, gate_up_rows};
use crate::ptr::SharedMut;
use crate::simd::{Kernel, LANES, Simd, dispatch};
use crate::tile::{PanelTile, by_rows, panel_tile, tile_rows};

/// Rows of a block at most: its sums stay in the L1 cache beside the streams.
pub(crate) const BLOCK_ROWS: usize = 96;

/// Words along K of a chunk when few rows share it: 32 KiB of a panel, which stays in L1.
const NARROW_CHUNK: usize = 128;

/// Words along K of a chunk when many rows share it: 256 KiB of a panel, which stays in L2.
const WIDE_CHUNK: usize = 1024;

/// What happens to the product before it is stored.
pub enum Epilogue<'a> {
    /// `out = x·Wᵀ (+ bias)`.
    Store {
        /// `[N]`.
        bias: Option<&'a [f32]>,
        /// `[M][N]`.
        out: &'a mut [f32],
    },
    /// `out += x·Wᵀ (+ bias)`.
    Add {
        /// `[N]`.
        bias: Option<&'a [f32]>,
        /// `[M][N]`, the residual stream.
        out: &'a mut [f32],
    },
    /// `out[.., first..first + N] = x·Wᵀ (+ bias)`: one of several matrices with the same inputs.
    StoreColumns {
        /// `[N]`.
        bias: Option<&'a [f32]>,
        /// `[M][stride]`.
        out: &'a mut [f32],
        /// First column.
        first: usize,
        /// Columns of a row.
        stride: usize,
    },
    /// `out = silu(gate) · up`, for weights packed by [`crate::gate_up_row`].
    SiluMul {
        /// `[M][words(n_ff)]` words of the type of `x`.
        out: &'a mut [u32],
        /// Width of the MLP.
        n_ff: usize,
    },
}

/// [`Epilogue`] as the workers share it.
pub(crate) enum Sink<'a> {
    Rows(RowSink<'a>),
    SiluMul(SiluSink<'a>),
}

/// Columns `first..first + n` of `[M][stride]` outputs, replaced or added to.
pub(crate) struct RowSink<'a> {
    bias: Option<&'a [f32]>,
    out: SharedMut<'a, f32>,
    n: usize,
    first: usize,
    stride: usize,
    add: bool,
}

/// `[M][words(n_ff)]` outputs.
pub(crate) struct SiluSink<'a> {
    out: SharedMut<'a, u32>,
    n_ff: usize,
}

/// Multiplies `m` rows of `x`, `[M][words(K)]` words of the weights' type, by `w`.
///
/// Panics if a length does not fit the shapes.
pub fn gemm(ctx: &Ctx, x: &[u32], m: usize, w: &PackedMatrix, ep: Epilogue<'_>) {
    let (n, words) = (w.n(), w.dtype().words(w.k()));
    assert_eq!(x.len(), m * words, "gemm: words of {m} rows of {} inputs", w.k());
    let sink = Sink::new(ep, m, n, w.dtype());
    if m == 0 || n == 0 {
        return;
    }
    let (threads, halves) = (ctx.pool.threads(), 2 * n.div_ceil(PANEL));
    let plan = Plan::new(m, halves, threads);
    ctx.pool.for_each(plan.column_items * plan.row_items, |_, item| {
        let (column, row) = (item / plan.row_items, item % plan.row_items);
        let block = Block {
            x,
            w,
            sink: &sink,
            rows: (row * m / plan.row_items, (row + 1) * m / plan.row_items),
            halves: (
                column * halves / plan.column_items,
                (column + 1) * halves / plan.column_items,
            ),
        };
        dispatch(ctx.isa, block);
    });
}

/// How a product is cut into items for the workers.
pub(crate) struct Plan {
    pub(crate) column_items: usize,
    pub(crate) row_items: usize,
}

impl Plan {
    /// For `m` rows and twice `halves` panels. The cut does not touch the arithmetic.
    pub(crate) fn new(m: usize, halves: usize, threads: usize) -> Self {
        if m <= BLOCK_ROWS {
            // Long contiguous runs, so that prefetching crosses panels; several a worker if
            // there are enough panels, for the sake of a worker that is held up.
            let items = if halves >= 16 * threads { 4 * threads } else { threads };
            return Self { column_items: items.min(halves), row_items: 1 };
        }
        let panels = halves / 2;
        let wanted = (4 * threads).div_ceil(panels).min(m.div_ceil(BLOCK_ROWS / 4));
        Self { column_items: panels, row_items: m.div_ceil(BLOCK_ROWS).max(wanted) }
    }
}

impl<'a> Sink<'a> {
    /// For `m` rows of `n` products, and SiLU·mul of words of `dtype`. Panics if a length does not
    /// fit.
    pub(crate) fn new(ep: Epilogue<'a>, m: usize, n: usize, dtype: Dtype) -> Self {
        match ep {
            Epilogue::SiluMul { out, n_ff } => {
                assert_eq!(n, gate_up_rows(n_ff), "gemm: rows of the gate/up weights");
                let len = m * dtype.words(n_ff);
                assert_eq!(out.len(), len, "gemm: words of {m} rows of {n_ff} outputs");
                Self::SiluMul(SiluSink { out: SharedMut::new(out), n_ff })
            }
            Epilogue::Store { bias, out } => Self::rows(m, n, bias, (out, 0, n), false),
            Epilogue::Add { bias, out } => Self::rows(m, n, bias, (out, 0, n), true),
            Epilogue::StoreColumns { bias, out, first, stride } => {
                Self::rows(m, n, bias, (out, first, stride), false)
            }
        }
    }

    fn rows(
        m: usize,
        n: usize,
        bias: Option<&'a [f32]>,
        (out, first, stride): (&'a mut [f32], usize, usize),
        add: bool,
    ) -> Self {
        assert_eq!(out.len(), m * stride, "gemm: outputs of {m} rows of {stride}");
        assert!(
            first <= stride && n <= stride - first,
            "gemm: columns {first}+{n} of rows of {stride}"
        );
        if let Some(bias) = bias {
            assert_eq!(bias.len(), n, "gemm: biases of {n} outputs");
        }
        Self::Rows(RowSink { bias, out: SharedMut::new(out), n, first, stride, add })
    }
}

/// One item: a range of rows, at most [`BLOCK_ROWS`], times a range of half panels.
struct Block<'a> {
    x: &'a [u32],
    w: &'a PackedMatrix,
    sink: &'a Sink<'a>,
    rows: (usize, usize),
    halves: (usize, usize),
}

/// The sums of a block of rows in one panel.
#[repr(align(64))]
pub(crate) struct Sums(pub(crate) [[f32; PANEL]; BLOCK_ROWS]);

/// The column vectors of a panel that an item computes. Half a panel is a pair 32 columns apart,
/// so that it has gate columns with their up columns.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    Full,
    Half(usize),
}

impl Part {
    #[inline(always)]
    pub(crate) fn vectors(self) -> &'static [usize] {
        match self {
            Self::Full => &[0, 1, 2, 3],
            Self::Half(0) => &[0, 2],
            Self::Half(_) => &[1, 3],
        }
    }
}

impl Kernel for Block<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.w.dtype() {
            Dtype::F32 => self.panels::<S, F32>(s),
            Dtype::Bf16 => self.panels::<S, Bf16>(s),
        }
    }
}

impl Block<'_> {
    #[inline(always)]
    fn panels<S: Simd, D: Elem>(&self, s: S) {
        let mut scratch = MaybeUninit::<Sums>::uninit();
        let rows = self.rows.1 - self.rows.0;
        let mut half = self.halves.0;
        while half < self.halves.1 {
            let part = if half.is_multiple_of(2) && half + 2 <= self.halves.1 {
                Part::Full
            } else {
                Part::Half(half % 2)
            };
            // SAFETY: the scratch has BLOCK_ROWS rows; all bytes zero is a valid `f32` row.
            let sums = unsafe {
                let sums = (&raw mut (*scratch.as_mut_ptr()).0).cast::<[f32; PANEL]>();
                sums.write_bytes(0, rows);
                std::slice::from_raw_parts_mut(sums, rows)
            };
            self.multiply::<S, D>(s, half / 2, part, sums);
            self.sink.store::<S, D>(s, self.rows.0, half / 2, part, sums);
            half += part.vectors().len() / 2;
        }
    }

    /// Adds `x · panelᵀ` to `sums`, chunk by chunk.
    #[inline(always)]
    fn multiply<S: Simd, D: Elem>(
        &self,
        s: S,
        panel: usize,
        part: Part,
        sums: &mut [[f32; PANEL]],
    ) {
        let words = self.w.dtype().words(self.w.k());
        let b = self.w.words()[panel * words * PANEL..][..words * PANEL].as_ptr();
        let a = self.x[self.rows.0 * words..][..sums.len() * words].as_ptr();
        let tiles = sums.len().div_ceil(S::MR);
        let chunk = if tiles <= 4 { NARROW_CHUNK } else { WIDE_CHUNK };
        // What is prefetched is never further ahead than the next panel: an item has only a few.
        let chunk = chunk.min(words);
        for first in (0..words).step_by(chunk.max(1)) {
            let steps = chunk.min(words - first);
            for tile in 0..tiles {
                let (start, end) = tile_rows(sums.len(), S::MR, tile);
                // SAFETY: `start` is below the number of rows, `first` below the words of a row.
                let t = unsafe {
                    PanelTile {
                        a: a.add(start * words + first),
                        a_stride: words,
                        b: b.add(first * PANEL),
                        steps,
                        c: sums.as_mut_ptr().add(start).cast(),
                        ahead: b.wrapping_add((first + chunk) * PANEL),
                        // Together the tiles prefetch all of the chunk to come.
                        prefetch: (tile, tiles),
                    }
                };
                // SAFETY: rows `start..end`, `steps` words and the part's vectors are in bounds.
                unsafe { multiply_tile::<S, D>(s, &t, end - start, part) };
            }
        }
    }
}

/// # Safety
/// As for [`panel_tile`] with `rows` rows and the vectors of `part`.
#[inline(always)]
unsafe fn multiply_tile<S: Simd, D: Elem>(s: S, t: &PanelTile, rows: usize, part: Part) {
    let at = |vector: usize| PanelTile {
        b: t.b.wrapping_add(vector * LANES),
        c: t.c.wrapping_add(vector * LANES),
        ahead: t.ahead.wrapping_add(vector * LANES),
        ..*t
    };
    // SAFETY: by the contract.
    unsafe {
        if S::NV == 1 {
            for &vector in part.vectors() {
                let t = at(vector);
                by_rows!(rows, S, panel_tile::<D, 1>(s, &t));
            }
        } else if let Part::Half(half) = part {
            let t = at(half);
            by_rows!(rows, S, panel_tile::<D, 2>(s, &t));
        } else {
            by_rows!(rows, S, panel_tile::<D, 4>(s, t));
        }
    }
}

impl Sink<'_> {
    /// Finishes the sums of one panel.
    #[inline(always)]
    pub(crate) fn store<S: Simd, D: Elem>(
        &self,
        s: S,
        first_row: usize,
        panel: usize,
        part: Part,
        sums: &[[f32; PANEL]],
    ) {
        for (row, sums) in sums.iter().enumerate() {
            let row = first_row + row;
            match self {
                Self::Rows(sink) => sink.store(s, row, panel, part, sums),
                Self::SiluMul(sink) => sink.store::<S, D>(s, row, panel, part, sums),
            }
        }
    }
}

impl RowSink<'_> {
    #[inline(always)]
    fn store<S: Simd>(&self, s: S, row: usize, panel: usize, part: Part, sums: &[f32; PANEL]) {
        let (vectors, _) = sums.as_chunks::<LANES>();
        for &vector in part.vectors() {
            let column = panel * PANEL + vector * LANES;
            let len = LANES.min(self.n.saturating_sub(column));
            if len == 0 {
                continue;
            }
            // SAFETY: an item has its own rows and columns.
            let out = unsafe { self.out.slice(row * self.stride + self.first + column, len) };
            let bias = self.bias.map(|bias| &bias[column..column + len]);
            if let Ok(full) = <&mut [f32; LANES]>::try_from(&mut *out) {
                self.finish(s, &vectors[vector], bias, full);
            } else {
                let (mut old, mut padded_bias) = ([0.0; LANES], [0.0; LANES]);
                old[..len].copy_from_slice(out);
                if let Some(bias) = bias {
                    padded_bias[..len].copy_from_slice(bias);
                }
                self.finish(s, &vectors[vector], bias.map(|_| &padded_bias[..]), &mut old);
                out.copy_from_slice(&old[..len]);
            }
        }
    }

    /// `out = sums (+ bias)`, or `out += …`.
    #[inline(always)]
    fn finish<S: Simd>(
        &self,
        s: S,
        sums: &[f32; LANES],
        bias: Option<&[f32]>,
        out: &mut [f32; LANES],
    ) {
        let mut y = s.load(sums);
        if let Some(Ok(bias)) = bias.map(<&[f32; LANES]>::try_from) {
            y = s.add(y, s.load(bias));
        }
        if self.add {
            y = s.add(s.load(out), y);
        }
        s.store(y, out);
    }
}

impl SiluSink<'_> {
    #[inline(always)]
    fn store<S: Simd, D: Elem>(
        &self,
        s: S,
        row: usize,
        panel: usize,
        part: Part,
        sums: &[f32; PANEL],
    ) {
        let (vectors, _) = sums.as_chunks::<LANES>();
        let (first, count) = match part {
            Part::Full => (0, 2),
            Part::Half(half) => (half, 1),
        };
        let mut values = [[0.0; LANES]; 2];
        for (i, value) in values.iter_mut().take(count).enumerate() {
            let gate = s.load(&vectors[first + i]);
            let up = s.load(&vectors[first + i + 2]);
            s.store(s.mul(s.silu(gate), up), value);
        }
        let column = panel * GATE_COLUMNS + first * LANES;
        let len = (count * LANES).min(self.n_ff.saturating_sub(column));
        let row_words = self.n_ff.div_ceil(D::PACK);
        let (start, words) = (row * row_words + column / D::PACK, len.div_ceil(D::PACK));
        if len > 0 {
            // SAFETY: an item has its own rows and columns, and 16 columns are whole words.
            let out = unsafe { self.out.slice(start, words) };
            D::put(s, &values.as_flattened()[..len], out);
        }
    }
}
