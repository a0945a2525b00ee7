//! Weights packed for the GEMM kernel, one format for every instruction set.
//!
//! `[ceil(N/64)][words(K)][64]` words: a panel holds 64 output columns, and the words of one
//! step along K lie side by side. Columns past N and elements past K are zero.

use crate::buf::{AllocError, Arena, Words};
use crate::ctx::Ctx;
use crate::dtype::Dtype;
use crate::ptr::SharedMut;

/// Output columns in a panel.
pub const PANEL: usize = 64;

/// An N × K weight matrix, packed.
pub struct PackedMatrix {
    n: usize,
    k: usize,
    dtype: Dtype,
    words: Words,
}

impl PackedMatrix {
    /// An all-zero matrix of `n` output columns and `k` inputs.
    pub fn zeroed(dtype: Dtype, n: usize, k: usize) -> Result<Self, AllocError> {
        Ok(Self { n, k, dtype, words: Words::zeroed(Self::words_of(dtype, n, k)?)? })
    }

    /// The same in `arena`.
    pub fn zeroed_in(
        arena: &mut Arena,
        dtype: Dtype,
        n: usize,
        k: usize,
    ) -> Result<Self, AllocError> {
        Ok(Self { n, k, dtype, words: arena.zeroed(Self::words_of(dtype, n, k)?)? })
    }

    fn words_of(dtype: Dtype, n: usize, k: usize) -> Result<usize, AllocError> {
        let bytes = Self::bytes_of(dtype, n, k).ok_or(AllocError { bytes: usize::MAX })?;
        Ok(bytes / 4)
    }

    /// Bytes that a matrix of `n` output columns and `k` inputs takes; `None` where no address can
    /// name them.
    pub fn bytes_of(dtype: Dtype, n: usize, k: usize) -> Option<usize> {
        n.div_ceil(PANEL).checked_mul(PANEL * 4)?.checked_mul(dtype.words(k))
    }

    /// Output columns.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Bytes the packed form takes.
    pub fn bytes(&self) -> usize {
        4 * self.words.len()
    }

    /// Whether the matrix asked for huge pages.
    pub fn huge_pages_requested(&self) -> bool {
        self.words.huge_pages_requested()
    }

    /// The packed words.
    pub(crate) fn words(&self) -> &[u32] {
        self.words.as_slice()
    }

    /// Sets the `k` weights of output `row`, rounded to nearest even.
    ///
    /// Panics if `row` or the number of values does not fit.
    pub fn set_row(&mut self, row: usize, values: &[f32]) {
        assert!(row < self.n, "row {row} of a matrix of {} rows", self.n);
        assert_eq!(values.len(), self.k, "values of a row of {} weights", self.k);
        let (dtype, panel_words) = (self.dtype, self.panel_words());
        let panel = row / PANEL * panel_words;
        let panel = &mut self.words.as_mut_slice()[panel..panel + panel_words];
        pack_column(dtype, values, panel, row % PANEL);
    }

    /// Sets rows `first_row..first_row + rows` in parallel.
    ///
    /// `fetch(i, out)` fills the zeroed `out[..k]` with row `first_row + i`; it runs on the
    /// workers. Panics if the rows do not fit.
    pub fn set_rows(
        &mut self,
        ctx: &Ctx,
        first_row: usize,
        rows: usize,
        fetch: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        let end = first_row.checked_add(rows).filter(|&end| end <= self.n);
        let Some(end) = end else {
            panic!("rows {first_row}+{rows} of a matrix of {} rows", self.n)
        };
        let (dtype, k, panel_words) = (self.dtype, self.k, self.panel_words());
        let words = SharedMut::new(self.words.as_mut_slice());
        let first_panel = first_row / PANEL;
        ctx.pool.for_each(end.div_ceil(PANEL) - first_panel, |_, item| {
            let panel = first_panel + item;
            // SAFETY: each item has its own panel.
            let column = unsafe { words.slice(panel * panel_words, panel_words) };
            let mut values = vec![0.0; k];
            for row in first_row.max(panel * PANEL)..end.min((panel + 1) * PANEL) {
                values.fill(0.0);
                fetch(row - first_row, &mut values);
                pack_column(dtype, &values, column, row % PANEL);
            }
        });
    }

    /// Sets rows `first_row..first_row + rows` of a bf16 matrix to bf16 values that are there
    /// already, in parallel. `first_row` starts a panel of 64 rows, and the rows fill panels
    /// unless they are the last.
    ///
    /// `fetch(row)` gives the 2·k bytes of a row, little endian, or nothing for a row of zeros;
    /// it runs on the workers. Panics if the matrix is of another type, or a length does not fit.
    pub fn set_bf16_rows<'a>(
        &mut self,
        ctx: &Ctx,
        first_row: usize,
        rows: usize,
        fetch: &(dyn Fn(usize) -> Option<&'a [u8]> + Sync),
    ) {
        assert_eq!(self.dtype, Dtype::Bf16, "rows of bf16");
        let (n, k, panel_words) = (self.n, self.k, self.panel_words());
        let end = first_row + rows;
        assert!(
            end <= n && first_row.is_multiple_of(PANEL) && (end == n || end.is_multiple_of(PANEL)),
            "rows {first_row}+{rows} of {n} are not whole panels"
        );
        let words = SharedMut::new(self.words.as_mut_slice());
        ctx.pool.for_each(rows.div_ceil(PANEL), |_, item| {
            let first = first_row + item * PANEL;
            let mut rows: [&[u8]; PANEL] = [&[]; PANEL];
            for (row, bytes) in (first..end).zip(&mut rows) {
                *bytes = fetch(row).unwrap_or_default();
                assert!(bytes.is_empty() || bytes.len() == 2 * k, "bytes of {k} bf16 values");
            }
            // SAFETY: each item has its own panel.
            let panel = unsafe { words.slice(first / PANEL * panel_words, panel_words) };
            pack_bf16(&rows, panel);
        });
    }

    /// Reads back the `k` weights of output `row`, as stored.
    ///
    /// Panics if `row` or the length of `out` does not fit.
    pub fn get_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n, "row {row} of a matrix of {} rows", self.n);
        assert_eq!(out.len(), self.k, "values of a row of {} weights", self.k);
        let pack = self.dtype.pack();
        let panel = &self.words()[row / PANEL * self.panel_words()..];
        for (i, value) in out.iter_mut().enumerate() {
            *value = self.dtype.extract(panel[i / pack * PANEL + row % PANEL], i % pack);
        }
    }

    fn panel_words(&self) -> usize {
        self.dtype.words(self.k) * PANEL
    }
}

/// Writes `values` as column `column` of a panel.
fn pack_column(dtype: Dtype, values: &[f32], panel: &mut [u32], column: usize) {
    let slots = panel[column..].iter_mut().step_by(PANEL);
    match dtype {
        Dtype::F32 => {
            for (slot, value) in slots.zip(values) {
                *slot = value.to_bits();
            }
        }
        Dtype::Bf16 => {
            let bits = |x: f32| u32::from(half::bf16::from_f32(x).to_bits());
            for (slot, pair) in slots.zip(values.chunks(2)) {
                *slot = bits(pair[0]) | bits(pair.get(1).copied().unwrap_or(0.0)) << 16;
            }
        }
    }
}

/// Words along K that [`pack_bf16`] moves at a time: a cache line of each row.
const PACK_WORDS: usize = 16;

/// Writes a zeroed panel whose columns are `rows` of bf16 pairs; an empty row stays zero.
fn pack_bf16(rows: &[&[u8]; PANEL], panel: &mut [u32]) {
    let steps = panel.as_chunks_mut::<PANEL>().0;
    for (chunk, steps) in steps.chunks_mut(PACK_WORDS).enumerate() {
        let mut tile = [[0; PACK_WORDS]; PANEL];
        for (line, row) in tile.iter_mut().zip(rows) {
            let Some(rest) = row.get(4 * PACK_WORDS * chunk..) else { continue };
            for (word, bytes) in line.iter_mut().zip(rest.chunks(4)) {
                // The last element of an odd K is alone in its word.
                let bytes = bytes.try_into().unwrap_or_else(|_| [bytes[0], bytes[1], 0, 0]);
                *word = u32::from_le_bytes(bytes);
            }
        }
        for (k, step) in steps.iter_mut().enumerate() {
            for (word, line) in step.iter_mut().zip(&tile) {
                *word = line[k];
            }
        }
    }
}

/// Gate or up columns in a panel of a gate/up matrix.
pub(crate) const GATE_COLUMNS: usize = PANEL / 2;

/// Rows of the packed gate/up matrix of an MLP of width `n_ff`.
///
/// Each panel holds 32 gate columns, then their 32 up columns, so that one register tile has
/// both operands of SiLU·mul. `n_ff` is padded to a multiple of 32 with zero rows.
pub const fn gate_up_rows(n_ff: usize) -> usize {
    n_ff.div_ceil(GATE_COLUMNS) * PANEL
}

/// The packed row of gate (or up) row `i`, below `n_ff`.
pub fn gate_up_row(n_ff: usize, is_up: bool, i: usize) -> usize {
    assert!(i < n_ff, "row {i} of an MLP of width {n_ff}");
    i / GATE_COLUMNS * PANEL + i % GATE_COLUMNS + if is_up { GATE_COLUMNS } else { 0 }
}

/// The `(is_up, i)` of packed row `row`, the inverse of [`gate_up_row`]; `None` for padding.
pub fn gate_up_source(n_ff: usize, row: usize) -> Option<(bool, usize)> {
    let i = row / PANEL * GATE_COLUMNS + row % GATE_COLUMNS;
    (i < n_ff).then_some((row % PANEL >= GATE_COLUMNS, i))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    #[test]
    fn rows_read_back_rounded() {
        for (dtype, n, k) in [(Dtype::F32, 65, 3), (Dtype::Bf16, 65, 3), (Dtype::Bf16, 130, 64)] {
            let value = |row: usize, i: usize| (row * 1000 + i) as f32 * 0.37 - 20.0;
            let ctx = Ctx::new(Isa::Portable, 2).unwrap();
            let mut bulk = PackedMatrix::zeroed(dtype, n, k).unwrap();
            bulk.set_rows(&ctx, 1, n - 1, &|row, out| {
                out.iter_mut().enumerate().for_each(|(i, v)| *v = value(row + 1, i));
            });
            assert_eq!(Some(bulk.bytes()), PackedMatrix::bytes_of(dtype, n, k));
            let mut single = PackedMatrix::zeroed(dtype, n, k).unwrap();
            let mut row_values = vec![0.0; k];
            for row in 1..n {
                row_values.iter_mut().enumerate().for_each(|(i, v)| *v = value(row, i));
                single.set_row(row, &row_values);
            }
            assert_eq!(bulk.words(), single.words());
            for row in 0..n {
                bulk.get_row(row, &mut row_values);
                for (i, &got) in row_values.iter().enumerate() {
                    let exact = if row == 0 { 0.0 } else { value(row, i) };
                    let want = match dtype {
                        Dtype::F32 => exact,
                        Dtype::Bf16 => half::bf16::from_f32(exact).to_f32(),
                    };
                    assert_eq!(got, want, "row {row}, input {i}");
                }
            }
        }
    }

    #[test]
    fn stored_rows_are_packed_as_they_are() {
        for (n, k) in [(1, 1), (65, 3), (130, 64), (64, 33), (200, 100)] {
            let bits = |row: usize, i: usize| (row * 251 + i * 7 + 1) as u16 & 0x7f7f;
            let bytes = |row: usize| -> Vec<u8> {
                (0..k).flat_map(|i| bits(row, i).to_le_bytes()).collect()
            };
            let rows: Vec<Vec<u8>> = (0..n).map(bytes).collect();
            let ctx = Ctx::new(Isa::Portable, 2).unwrap();
            let mut arena = Arena::default();
            let mut stored = PackedMatrix::zeroed_in(&mut arena, Dtype::Bf16, n, k).unwrap();
            let fetch = |row: usize| (row != 2).then(|| &rows[row][..]);
            let half = n / 2 / PANEL * PANEL;
            stored.set_bf16_rows(&ctx, half, n - half, &fetch);
            stored.set_bf16_rows(&ctx, 0, half, &fetch);
            let mut values = PackedMatrix::zeroed_in(&mut arena, Dtype::Bf16, n, k).unwrap();
            for row in (0..n).filter(|&row| row != 2) {
                let row_values: Vec<f32> =
                    (0..k).map(|i| half::bf16::from_bits(bits(row, i)).to_f32()).collect();
                values.set_row(row, &row_values);
            }
            assert_eq!(stored.words(), values.words(), "{n} × {k}");
        }
    }

    #[test]
    #[should_panic(expected = "bytes of 4 bf16 values")]
    fn a_stored_row_of_another_length_is_refused() {
        let ctx = Ctx::new(Isa::Portable, 1).unwrap();
        let mut matrix = PackedMatrix::zeroed(Dtype::Bf16, 2, 4).unwrap();
        matrix.set_bf16_rows(&ctx, 0, 2, &|_| Some(&[0; 6]));
    }

    #[test]
    fn gate_up_rows_are_a_bijection_with_padding() {
        for n_ff in [1, 32, 33, 1536] {
            let mut used = 0;
            for row in 0..gate_up_rows(n_ff) {
                if let Some((is_up, i)) = gate_up_source(n_ff, row) {
                    assert_eq!(gate_up_row(n_ff, is_up, i), row);
                    used += 1;
                }
            }
            assert_eq!(used, 2 * n_ff);
        }
    }

    #[test]
    fn impossible_shapes_are_errors() {
        assert!(PackedMatrix::zeroed(Dtype::F32, usize::MAX, 1).is_err());
        assert!(PackedMatrix::zeroed(Dtype::Bf16, 1 << 40, 1 << 40).is_err());
    }
}
