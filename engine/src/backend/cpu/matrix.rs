//! Weights of the CPU backend: packed in its dtype, or quantised.

use crate::backend::Quantization;
use crate::ops::{BackendError, BlockFormat, MatrixLayout, MatrixShape, ReadError, WeightRows};
use quire_kernels_cpu::{
    Ctx, Dtype, PackedMatrix, QuantError, QuantKind, QuantMatrix, QuantRows, gate_up_rows,
    gate_up_source,
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
}

impl CpuMatrix {
    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        match &self.packed {
            Packed::Plain(packed) => packed.bytes(),
            Packed::Quantised(packed) => packed.bytes(),
        }
    }

    /// Reads back a row of a plain layout.
    pub(super) fn get_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(self.layout, MatrixLayout::Plain);
        match &self.packed {
            Packed::Plain(packed) => packed.get_row(row, out),
            Packed::Quantised(packed) => packed.get_row(row, out),
        }
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

    /// Packs a weight on the workers of `ctx`.
    pub fn pack(
        &self,
        ctx: &Ctx,
        shape: &MatrixShape,
        rows: &dyn WeightRows,
    ) -> Result<CpuMatrix, BackendError> {
        let &MatrixShape { layout, n, k, .. } = shape;
        let packed_n = packed_rows(shape);
        let packed = match self.kind(shape) {
            None => {
                let mut packed = PackedMatrix::zeroed(self.dtype, packed_n, k)
                    .map_err(|e| out_of_memory(e.bytes))?;
                let values = Values::new(shape, rows);
                packed.set_rows(ctx, 0, packed_n, &|row, out: &mut [f32]| values.read(row, out));
                values.finish()?;
                Packed::Plain(packed)
            }
            Some(kind) => {
                let mut packed = QuantMatrix::zeroed(kind, packed_n, k).map_err(|e| match e {
                    QuantError::Alloc(e) => out_of_memory(e.bytes),
                    e => BackendError::Unsupported { backend: "cpu", reason: e.to_string() },
                })?;
                if kind == QuantKind::Int8 {
                    let values = Values::new(shape, rows);
                    packed.set_values(ctx, 0, packed_n, &|row, out| values.read(row, out));
                    values.finish()?;
                } else {
                    packed.set_blocks(ctx, 0, packed_n, &|row, out| {
                        if let Some(row) = source_row(shape, row) {
                            let blocks = rows.blocks(row).expect("every row has the block format");
                            out.copy_from_slice(blocks);
                        }
                    });
                }
                Packed::Quantised(packed)
            }
        };
        Ok(CpuMatrix { packed, layout, n })
    }
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
