//! Weights of the CPU backend: packed in its dtype, or quantised.

use crate::backend::Quantization;
use crate::ops::{
    BackendError, BlockFormat, DType, MatrixLayout, MatrixShape, ReadError, WeightRows,
};
use quire_kernels_cpu::{
    Arena, Ctx, Dtype, PANEL, PackedMatrix, QuantError, QuantKind, QuantMatrix, QuantRows,
    gate_up_rows, gate_up_source,
};
use std::sync::Mutex;

/// A packed weight.
pub struct CpuMatrix {
    pub(super) packed: Packed,
    pub(super) layout: MatrixLayout,
    /// Rows as the model counts them; the packed matrix may be padded.
    pub(super) n: usize,
}

/// How a weight is kept.
pub(super) enum Packed {
    Plain(PackedMatrix),
    Quantised(QuantMatrix),
    /// Rows one after the other.
    Stacked(Vec<CpuMatrix>),
}

impl CpuMatrix {
    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        match &self.packed {
            Packed::Plain(packed) => packed.bytes(),
            Packed::Quantised(packed) => packed.bytes(),
            Packed::Stacked(parts) => parts.iter().map(CpuMatrix::bytes).sum(),
        }
    }

    /// Reads back a row of a plain layout.
    pub(super) fn get_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(self.layout, MatrixLayout::Plain);
        match &self.packed {
            Packed::Plain(packed) => packed.get_row(row, out),
            Packed::Quantised(packed) => packed.get_row(row, out),
            Packed::Stacked(_) => unreachable!("stacked weights are no embeddings"),
        }
    }

    /// The matrix of the rows of `parts`.
    pub(super) fn stacked(parts: Vec<Self>) -> Self {
        assert!(parts.iter().all(|part| part.layout == MatrixLayout::Plain));
        let n = parts.iter().map(|part| part.n).sum();
        CpuMatrix { packed: Packed::Stacked(parts), layout: MatrixLayout::Plain, n }
    }
}

/// How weights become matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packing {
    /// Of what is not quantised.
    pub dtype: Dtype,
    pub quantization: Quantization,
}

impl Packing {
    /// The format a weight is quantised in; `None` where it is kept in the dtype.
    pub fn kind(&self, matrix: &MatrixShape) -> Option<QuantKind> {
        let kind = match self.quantization {
            Quantization::None => return None,
            Quantization::Int8 => QuantKind::Int8,
            Quantization::Stored => match matrix.blocks? {
                BlockFormat::Q8_0 => QuantKind::Q8_0,
                BlockFormat::Q4_0 => QuantKind::Q4_0,
                BlockFormat::Q4_1 => QuantKind::Q4_1,
                BlockFormat::Q4K => QuantKind::Q4K,
                BlockFormat::Q6K => QuantKind::Q6K,
            },
        };
        let fits = match kind {
            QuantKind::Int8 => matrix.k <= QuantKind::INT8_MAX_INPUTS,
            _ => kind.row_bytes(matrix.k).is_some(),
        };
        fits.then_some(kind)
    }

    /// Bytes of a packed weight; `None` where no address can name them.
    pub fn bytes(&self, matrix: &MatrixShape) -> Option<usize> {
        let rows = packed_rows(matrix);
        match self.kind(matrix) {
            None => PackedMatrix::bytes_of(self.dtype, rows, matrix.k),
            Some(kind) => QuantMatrix::bytes_of(kind, rows, matrix.k),
        }
    }

    /// Bytes of the quantised inputs of the widest of `matrices`, in steps of `max_tokens`.
    pub fn rows_bytes(&self, matrices: &[MatrixShape], max_tokens: usize) -> Option<usize> {
        let words = matrices.iter().filter_map(|m| Some(QuantRows::words_of(self.kind(m)?, m.k)));
        let [values, terms] = words.fold([0; 2], |a, b| [a[0].max(b[0]), a[1].max(b[1])]);
        max_tokens.checked_mul(values.checked_add(terms)?)?.checked_mul(4)
    }

    /// Packs a weight into `arena` on the workers of `ctx`.
    pub fn pack(
        &self,
        ctx: &Ctx,
        arena: &mut Arena,
        shape: &MatrixShape,
        rows: &dyn WeightRows,
    ) -> Result<CpuMatrix, BackendError> {
        let packed = match self.kind(shape) {
            None => Packed::Plain(self.pack_plain(ctx, arena, shape, rows)?),
            Some(kind) => Packed::Quantised(pack_quantised(ctx, arena, kind, shape, rows)?),
        };
        Ok(CpuMatrix { packed, layout: shape.layout, n: shape.n })
    }

    fn pack_plain(
        &self,
        ctx: &Ctx,
        arena: &mut Arena,
        shape: &MatrixShape,
        rows: &dyn WeightRows,
    ) -> Result<PackedMatrix, BackendError> {
        let mut packed = PackedMatrix::zeroed_in(arena, self.dtype, packed_rows(shape), shape.k)
            .map_err(|e| out_of_memory(e.bytes))?;
        let values = Values::new(shape, rows);
        let as_stored = self.dtype == Dtype::Bf16 && rows.stored_type() == Some(DType::Bf16);
        for_slices(shape, rows, |first, count| {
            if as_stored {
                packed.set_bf16_rows(ctx, first, count, &|row| stored(shape, rows, row));
            } else {
                packed.set_rows(ctx, first, count, &|i, out| values.read(first + i, out));
            }
        });
        values.finish()?;
        Ok(packed)
    }
}

fn pack_quantised(
    ctx: &Ctx,
    arena: &mut Arena,
    kind: QuantKind,
    shape: &MatrixShape,
    rows: &dyn WeightRows,
) -> Result<QuantMatrix, BackendError> {
    let packed = QuantMatrix::zeroed_in(arena, kind, packed_rows(shape), shape.k);
    let mut packed = packed.map_err(|e| match e {
        QuantError::Alloc(e) => out_of_memory(e.bytes),
        e => BackendError::Unsupported { backend: "cpu", reason: e.to_string() },
    })?;
    let values = Values::new(shape, rows);
    for_slices(shape, rows, |first, count| {
        if kind == QuantKind::Int8 {
            packed.set_values(ctx, first, count, &|i, out| values.read(first + i, out));
            return;
        }
        packed.set_blocks(ctx, first, count, &|i, out| {
            if let Some(blocks) = stored(shape, rows, first + i) {
                out.copy_from_slice(blocks);
            }
        });
    });
    values.finish()?;
    Ok(packed)
}

/// Elements of the slices that a weight is packed in.
const SLICE: usize = 4 << 20;

/// Calls `pack(first, count)` for slices of the packed rows, each of whole panels, and lets go of
/// what each was read from: of a file that is mapped, little more than a slice is in memory.
fn for_slices(shape: &MatrixShape, rows: &dyn WeightRows, mut pack: impl FnMut(usize, usize)) {
    let (n, ff) = (packed_rows(shape), shape.n / 2);
    let step = (SLICE / shape.k.max(1)).next_multiple_of(PANEL).max(PANEL);
    for first in (0..n).step_by(step) {
        let end = n.min(first + step);
        pack(first, end - first);
        match shape.layout {
            MatrixLayout::Plain => rows.release(first..end),
            // A panel is half gate, half up.
            MatrixLayout::GateUp => {
                let part = first / 2..ff.min(end / 2);
                rows.release(ff + part.start..ff + part.end);
                rows.release(part);
            }
        }
    }
}

/// The bytes of the model's row at `row` of the packed matrix, where that is not padding.
fn stored<'a>(shape: &MatrixShape, rows: &'a dyn WeightRows, row: usize) -> Option<&'a [u8]> {
    source_row(shape, row).map(|row| rows.stored(row).expect("every row is stored so"))
}

/// Rows of the packed matrix.
fn packed_rows(matrix: &MatrixShape) -> usize {
    match matrix.layout {
        MatrixLayout::Plain => matrix.n,
        MatrixLayout::GateUp => gate_up_rows(matrix.n / 2),
    }
}

/// The model's row at `row` of the packed matrix, where that is not padding.
fn source_row(matrix: &MatrixShape, row: usize) -> Option<usize> {
    let ff = matrix.n / 2;
    match matrix.layout {
        MatrixLayout::Plain => Some(row),
        MatrixLayout::GateUp => {
            gate_up_source(ff, row).map(|(is_up, i)| if is_up { ff + i } else { i })
        }
    }
}

/// The rows of a weight as f32, in the order of the packed matrix; keeps the first failure.
struct Values<'a> {
    shape: &'a MatrixShape,
    rows: &'a dyn WeightRows,
    failure: Mutex<Option<ReadError>>,
}

impl<'a> Values<'a> {
    fn new(shape: &'a MatrixShape, rows: &'a dyn WeightRows) -> Self {
        Values { shape, rows, failure: Mutex::new(None) }
    }

    fn read(&self, row: usize, out: &mut [f32]) {
        match source_row(self.shape, row) {
            None => out.fill(0.0),
            Some(row) => {
                if let Err(error) = self.rows.read(row, out) {
                    self.failure.lock().expect("no panic holds it").get_or_insert(error);
                }
            }
        }
    }

    fn finish(self) -> Result<(), BackendError> {
        match self.failure.into_inner().expect("no panic holds it") {
            None => Ok(()),
            Some(error) => Err(BackendError::Source(error)),
        }
    }
}

fn out_of_memory(bytes: usize) -> BackendError {
    BackendError::OutOfMemory { what: "a weight".to_owned(), bytes }
}

/// What users call a format.
pub(super) const fn label(kind: QuantKind) -> &'static str {
    match kind {
        QuantKind::Int8 => "int8",
        QuantKind::Q8_0 => "Q8_0 as stored",
        QuantKind::Q4_0 => "Q4_0 as stored",
        QuantKind::Q4_1 => "Q4_1 as stored",
        QuantKind::Q4K => "Q4_K as stored",
        QuantKind::Q6K => "Q6_K as stored",
    }
}
