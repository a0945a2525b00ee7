//! Quantised weights packed for the kernel.

use super::codec::{pack_block, unpack_block};
use super::kind::{QuantError, QuantKind};
use super::{round_i8, scale_and_inverse};
use crate::buf::{AllocError, Arena, Words};
use crate::ctx::Ctx;
use crate::matrix::PANEL;
use crate::ptr::SharedMut;

/// Packs a row into a column: the row's number, a buffer, the panel, the column.
type SetColumn<'a, T> = &'a (dyn Fn(usize, &mut [T], &mut [u32], usize) + Sync);

/// An N × K matrix of quantised weights, packed.
///
/// Gate and up rows are interleaved as in [`crate::PackedMatrix`], by [`crate::gate_up_row`].
pub struct QuantMatrix {
    kind: QuantKind,
    n: usize,
    k: usize,
    words: Words,
}

impl QuantMatrix {
    /// A matrix of `n` output columns and `k` inputs whose scales are all zero.
    pub fn zeroed(kind: QuantKind, n: usize, k: usize) -> Result<Self, QuantError> {
        Ok(Self { kind, n, k, words: Words::zeroed(Self::words_of(kind, n, k)?)? })
    }

    /// The same in `arena`.
    pub fn zeroed_in(
        arena: &mut Arena,
        kind: QuantKind,
        n: usize,
        k: usize,
    ) -> Result<Self, QuantError> {
        Ok(Self { kind, n, k, words: arena.zeroed(Self::words_of(kind, n, k)?)? })
    }

    fn words_of(kind: QuantKind, n: usize, k: usize) -> Result<usize, QuantError> {
        kind.check_inputs(k)?;
        let bytes = Self::bytes_of(kind, n, k).ok_or(AllocError { bytes: usize::MAX })?;
        Ok(bytes / 4)
    }

    /// Bytes that a matrix of `n` output columns and `k` inputs takes; `None` where there is no
    /// such matrix or no address can name them.
    pub fn bytes_of(kind: QuantKind, n: usize, k: usize) -> Option<usize> {
        kind.check_inputs(k).ok()?;
        let words = kind.units(k).checked_mul(kind.unit_words())?;
        let panel = words.checked_add(kind.header_words())?;
        n.div_ceil(PANEL).checked_mul(panel)?.checked_mul(4)
    }

    /// Format.
    pub fn kind(&self) -> QuantKind {
        self.kind
    }

    /// Output columns.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes the packed form takes.
    pub fn bytes(&self) -> usize {
        4 * self.words.len()
    }

    /// Whether the matrix asked for huge pages.
    pub fn huge_pages_requested(&self) -> bool {
        self.words.huge_pages_requested()
    }

    /// The packed words of a panel.
    pub(super) fn panel(&self, panel: usize) -> &[u32] {
        &self.words.as_slice()[panel * self.panel_words()..][..self.panel_words()]
    }

    /// Sets rows `first_row..first_row + rows` from GGUF blocks, in parallel.
    ///
    /// `fetch(i, out)` fills the zeroed `out` with the [`QuantKind::row_bytes`] of row
    /// `first_row + i`; it runs on the workers. Panics if the rows do not fit or the matrix is
    /// `Int8`.
    pub fn set_blocks(
        &mut self,
        ctx: &Ctx,
        first_row: usize,
        rows: usize,
        fetch: &(dyn Fn(usize, &mut [u8]) + Sync),
    ) {
        let (kind, words) = (self.kind, self.kind.unit_words());
        let bytes = kind.row_bytes(self.k);
        let bytes = bytes.unwrap_or_else(|| panic!("{kind} weights are not set from blocks"));
        let block_bytes = bytes / kind.units(self.k).max(1);
        self.for_columns(ctx, first_row, rows, bytes, &|i, buffer: &mut [u8], panel, column| {
            fetch(i, buffer);
            let blocks = buffer.chunks_exact(block_bytes.max(1));
            for (block, unit) in blocks.zip(panel.chunks_exact_mut(words)) {
                pack_block(kind, block, unit, column);
            }
        });
    }

    /// Quantises rows `first_row..first_row + rows` of an `Int8` matrix, in parallel.
    ///
    /// `fetch(i, out)` fills the zeroed `out[..k]` with row `first_row + i`; it runs on the
    /// workers. A row with a NaN or an infinity gives NaN. Panics if the rows do not fit or the
    /// matrix is not `Int8`.
    pub fn set_values(
        &mut self,
        ctx: &Ctx,
        first_row: usize,
        rows: usize,
        fetch: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        assert_eq!(self.kind, QuantKind::Int8, "weights set from values");
        let k = self.k;
        self.for_columns(ctx, first_row, rows, k, &|i, values: &mut [f32], panel, column| {
            fetch(i, values);
            pack_values(values, panel, column);
        });
    }

    /// Calls `set(i, buffer, panel, column)` for row `first_row + i`, with a zeroed buffer of `len`
    /// elements.
    fn for_columns<T: Copy + Default>(
        &mut self,
        ctx: &Ctx,
        first_row: usize,
        rows: usize,
        len: usize,
        set: SetColumn<'_, T>,
    ) {
        let end = first_row.checked_add(rows).filter(|&end| end <= self.n);
        let Some(end) = end else {
            panic!("rows {first_row}+{rows} of a matrix of {} rows", self.n)
        };
        let panel_words = self.panel_words();
        let words = SharedMut::new(self.words.as_mut_slice());
        let first_panel = first_row / PANEL;
        ctx.pool.for_each(end.div_ceil(PANEL) - first_panel, |_, item| {
            let panel = first_panel + item;
            // SAFETY: each item has its own panel.
            let packed = unsafe { words.slice(panel * panel_words, panel_words) };
            let mut buffer = vec![T::default(); len];
            for row in first_row.max(panel * PANEL)..end.min((panel + 1) * PANEL) {
                buffer.fill(T::default());
                set(row - first_row, &mut buffer, packed, row % PANEL);
            }
        });
    }

    /// Reads back the `k` weights of output `row`, dequantised.
    ///
    /// Panics if `row` or the length of `out` does not fit.
    pub fn get_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n, "row {row} of a matrix of {} rows", self.n);
        assert_eq!(out.len(), self.k, "values of a row of {} weights", self.k);
        let (panel, column) = (self.panel(row / PANEL), row % PANEL);
        if self.kind == QuantKind::Int8 {
            let scale = f32::from_bits(panel[column]);
            for (i, out) in out.iter_mut().enumerate() {
                let word = panel[(1 + i / 4) * PANEL + column];
                *out = scale * f32::from((word.to_le_bytes()[i % 4] ^ 0x80).cast_signed());
            }
            return;
        }
        let units = panel.chunks_exact(self.kind.unit_words());
        for (unit, out) in units.zip(out.chunks_exact_mut(self.kind.block_elements())) {
            unpack_block(self.kind, unit, column, out);
        }
    }

    fn panel_words(&self) -> usize {
        self.kind.header_words() + self.kind.units(self.k) * self.kind.unit_words()
    }
}

/// Quantises `values` into column `column` of an `Int8` panel.
fn pack_values(values: &[f32], panel: &mut [u32], column: usize) {
    let (mut max_abs, mut poison) = (0.0_f32, 0.0);
    for &value in values {
        max_abs = max_abs.max(value.abs());
        poison += value * 0.0;
    }
    let (scale, inverse) = scale_and_inverse(max_abs, poison);
    panel[column] = scale.to_bits();
    for (i, values) in values.chunks(4).enumerate() {
        let mut bytes = [0x80; 4];
        for (byte, &value) in bytes.iter_mut().zip(values) {
            let q = if poison.is_nan() { 0 } else { round_i8(value * inverse) };
            *byte = q.cast_unsigned() ^ 0x80;
        }
        panel[(1 + i) * PANEL + column] = u32::from_le_bytes(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    #[test]
    fn impossible_shapes_are_errors() {
        let partial = QuantMatrix::zeroed(QuantKind::Q4K, 1, 384).err().unwrap();
        assert_eq!(partial, QuantError::PartialBlock { kind: QuantKind::Q4K, k: 384, block: 256 });
        assert!(partial.to_string().contains("blocks of 256; a row of 384"), "{partial}");
        let limit = QuantKind::INT8_MAX_INPUTS;
        assert!(QuantMatrix::zeroed(QuantKind::Int8, 1, limit).is_ok());
        let long = QuantMatrix::zeroed(QuantKind::Int8, 1, limit + 1).err().unwrap();
        assert!(matches!(long, QuantError::TooManyInputs { limit: l, .. } if l == limit));
        assert!(QuantMatrix::zeroed(QuantKind::Q8_0, usize::MAX, 32).is_err());
        assert!(QuantMatrix::zeroed(QuantKind::Q6K, 1 << 40, 1 << 40).is_err());
        assert_eq!(QuantMatrix::bytes_of(QuantKind::Q4_0, 1, 33), None);
    }

    #[test]
    fn packed_blocks_take_the_bytes_of_the_file() {
        for kind in QuantKind::ALL {
            let Some(row) = kind.row_bytes(512) else { continue };
            assert_eq!(QuantMatrix::bytes_of(kind, 128, 512), Some(128 * row), "{kind}");
            assert_eq!(QuantMatrix::bytes_of(kind, 65, 512), Some(128 * row), "{kind}");
        }
        assert_eq!(QuantMatrix::bytes_of(QuantKind::Int8, 64, 5), Some(64 * (4 + 8)));
    }

    #[test]
    fn a_row_that_is_not_finite_is_nan_and_its_neighbours_are_not() {
        let ctx = Ctx::new(Isa::Portable, 2).unwrap();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut w = QuantMatrix::zeroed(QuantKind::Int8, 3, 5).unwrap();
            w.set_values(&ctx, 0, 3, &|row, out| {
                out.fill(0.5);
                out[3] = if row == 1 { bad } else { 0.25 };
            });
            let mut values = [0.0; 5];
            w.get_row(1, &mut values);
            assert!(values.iter().all(|value| value.is_nan()));
            w.get_row(2, &mut values);
            assert_eq!(values[0], 0.5);
        }
    }

    #[test]
    #[should_panic(expected = "int8 weights are not set from blocks")]
    fn int8_takes_no_blocks() {
        let ctx = Ctx::new(Isa::Portable, 1).unwrap();
        let mut w = QuantMatrix::zeroed(QuantKind::Int8, 1, 32).unwrap();
        w.set_blocks(&ctx, 0, 1, &|_, _| ());
    }
}
