//! Where weights come from: a set of named tensors, read row by row as f32.
//!
//! Names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`) whatever the file format,
//! and shapes are `[rows, cols]` with rows the output features, so that a decoder is built the same
//! way from safetensors and from GGUF.

use std::fmt;
use std::ops::Range;

use crate::error::LoadError;
use quire_engine::ops::BlockFormat;

/// Element or block type of a tensor on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceDtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 32 elements: f16 scale, 32 signed bytes.
    Q8_0,
    /// 32 elements: f16 scale, 4-bit values around 8.
    Q4_0,
    /// 32 elements: f16 scale, f16 minimum, 4-bit values.
    Q4_1,
    /// 32 elements: f16 scale, 5-bit values around 16.
    Q5_0,
    /// 32 elements: f16 scale, f16 minimum, 5-bit values.
    Q5_1,
    /// 256 elements: 2-bit values, sixteen 4-bit scales and minima, f16 scale, f16 minimum.
    Q2K,
    /// 256 elements: 3-bit values around 4, sixteen 6-bit scales, f16 scale.
    Q3K,
    /// 256 elements: 4-bit values, eight 6-bit scales and minima, f16 scale, f16 minimum.
    Q4K,
    /// 256 elements: 5-bit values, eight 6-bit scales and minima, f16 scale, f16 minimum.
    Q5K,
    /// 256 elements: 6-bit values around 32, sixteen 8-bit scales, f16 scale.
    Q6K,
    /// 32 elements: f16 scale, 4-bit indices of a table.
    Iq4Nl,
    /// 256 elements: f16 scale, eight 6-bit scales, 4-bit indices of a table.
    Iq4Xs,
    /// 32 elements: power-of-two scale, 4-bit floats (OCP microscaling).
    Mxfp4,
}

impl SourceDtype {
    /// Elements in one block; 1 for plain floats.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Iq4Nl | Self::Mxfp4 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Iq4Xs => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Iq4Nl => 18,
            Self::Iq4Xs => 136,
            Self::Mxfp4 => 17,
        }
    }

    /// The format of its blocks, where a backend may multiply them as they are.
    pub const fn block_format(self) -> Option<BlockFormat> {
        match self {
            Self::Q8_0 => Some(BlockFormat::Q8_0),
            Self::Q4_0 => Some(BlockFormat::Q4_0),
            Self::Q4_1 => Some(BlockFormat::Q4_1),
            Self::Q4K => Some(BlockFormat::Q4K),
            Self::Q6K => Some(BlockFormat::Q6K),
            _ => None,
        }
    }

    /// The name shown to users.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Iq4Nl => "IQ4_NL",
            Self::Iq4Xs => "IQ4_XS",
            Self::Mxfp4 => "MXFP4",
        }
    }
}

impl fmt::Display for SourceDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Named tensors of one model, readable from many threads at once.
pub trait WeightSource: Send + Sync {
    /// Shape of a tensor, `[rows, cols]` for a matrix; `None` if there is no such tensor.
    fn shape(&self, name: &str) -> Option<&[usize]>;

    /// Type of a tensor on disk; `None` if there is no such tensor.
    fn dtype(&self, name: &str) -> Option<SourceDtype>;

    /// Every tensor's name, sorted.
    fn names(&self) -> Vec<&str>;

    /// Reads one row of a matrix, or the whole of a vector as row 0, into `out` as f32.
    ///
    /// # Errors
    /// The tensor does not exist or is neither vector nor matrix, `row` is out of range, or `out`
    /// is not one row long.
    fn read_row(&self, name: &str, row: usize, out: &mut [f32]) -> Result<(), LoadError>;

    /// The bytes of a row of a matrix as the file holds it, of the tensor's type and little endian;
    /// `None` where they are not at hand, or there is no such row.
    fn stored_row(&self, _name: &str, _row: usize) -> Option<&[u8]> {
        None
    }

    /// Says that rows of a matrix have been read for now; what memory holds of them, being in a
    /// file, may be let go.
    fn release(&self, _name: &str, _rows: Range<usize>) {}

    /// The file that holds a tensor, or the model's path if there is no such tensor; for messages.
    fn location(&self, name: &str) -> String;
}

/// The type of all of the matrices `names`, where it is one.
pub(crate) fn common_dtype(source: &dyn WeightSource, names: &[String]) -> Option<SourceDtype> {
    let mut dtypes = names.iter().map(|name| source.dtype(name));
    let first = dtypes.next()??;
    dtypes.all(|dtype| dtype == Some(first)).then_some(first)
}

/// The bytes of `row` within a tensor's data; `Err` says what is wrong with the request.
pub(crate) fn row_bytes(
    shape: &[usize],
    dtype: SourceDtype,
    row: usize,
    out_len: usize,
) -> Result<Range<usize>, String> {
    let (rows, cols) = match *shape {
        [cols] => (1, cols),
        [rows, cols] => (rows, cols),
        _ => return Err(format!("has shape {shape:?}; only vectors and matrices have rows")),
    };
    if row >= rows {
        return Err(format!("row {row} was asked for; there are {rows}"));
    }
    if out_len != cols {
        return Err(format!("a row has {cols} elements; the output has {out_len}"));
    }
    let bytes = cols / dtype.block_elements() * dtype.block_bytes();
    Ok(row * bytes..(row + 1) * bytes)
}
