//! The formats of quantised weights.

use std::fmt;

use crate::buf::AllocError;
use crate::matrix::PANEL;

/// How weights are quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantKind {
    /// Signed bytes, one f32 scale a row.
    Int8,
    /// 32 elements: f16 scale, 32 signed bytes.
    Q8_0,
    /// 32 elements: f16 scale, 4-bit values around 8.
    Q4_0,
    /// 32 elements: f16 scale, f16 minimum, 4-bit values.
    Q4_1,
    /// 256 elements: 4-bit values, eight 6-bit scales and minima, f16 scale, f16 minimum.
    Q4K,
    /// 256 elements: 6-bit values around 32, sixteen 8-bit scales, f16 scale.
    Q6K,
}

/// Why there is no quantised matrix of a shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantError {
    /// K is not whole blocks.
    #[error("{kind} weights come in blocks of {block}; a row of {k} is not whole blocks")]
    PartialBlock {
        /// The format.
        kind: QuantKind,
        /// Inputs asked for.
        k: usize,
        /// Elements of a block.
        block: usize,
    },
    /// The sum over K would not fit in 32 bits.
    #[error("{kind} weights have at most {limit} inputs, not {k}")]
    TooManyInputs {
        /// The format.
        kind: QuantKind,
        /// Inputs asked for.
        k: usize,
        /// Inputs there may be.
        limit: usize,
    },
    /// The system refused memory.
    #[error(transparent)]
    Alloc(#[from] AllocError),
}

impl QuantKind {
    /// Every format.
    pub const ALL: [Self; 6] =
        [Self::Int8, Self::Q8_0, Self::Q4_0, Self::Q4_1, Self::Q4K, Self::Q6K];

    /// Inputs that an `Int8` matrix may have: as many as 127² fits in an `i32`.
    pub const INT8_MAX_INPUTS: usize = i32::MAX as usize / (127 * 127);

    /// The name shown to users.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q4K => "Q4_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Elements of a block; 1 for `Int8`, whose rows may have any length.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::Int8 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 => 32,
            Self::Q4K | Self::Q6K => 256,
        }
    }

    /// Bytes of a row of `k` elements as a file holds it; `None` for `Int8`, which no file holds,
    /// and where `k` is not whole blocks or the row cannot be addressed.
    pub fn row_bytes(self, k: usize) -> Option<usize> {
        if self == Self::Int8 || !k.is_multiple_of(self.block_elements()) {
            return None;
        }
        (k / self.block_elements()).checked_mul(self.unit_bytes())
    }

    /// Whether rows quantised for weights of one kind serve the other.
    pub const fn same_rows(self, other: Self) -> bool {
        self.unit_steps() == other.unit_steps() && self.terms() == other.terms()
    }

    /// Bytes of a unit of one column: a block, or four elements of `Int8`.
    const fn unit_bytes(self) -> usize {
        match self {
            Self::Int8 => 4,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q4K => 144,
            Self::Q6K => 210,
        }
    }

    /// Words of a unit of a panel.
    pub(super) const fn unit_words(self) -> usize {
        self.unit_bytes() * PANEL / 4
    }

    /// Words of activations along a unit.
    pub(super) const fn unit_steps(self) -> usize {
        self.block_elements().div_ceil(4)
    }

    /// Words before the first unit of a panel.
    pub(super) const fn header_words(self) -> usize {
        if matches!(self, Self::Int8) { PANEL } else { 0 }
    }

    /// Words that describe a quantised block of activations: its scale, then sums of its values.
    ///
    /// The sums are over the block, over 16 elements each for `Q6K`, and for `Q4K` over 32
    /// elements each as 16-bit halves, sums 0 and 2, 1 and 3, 4 and 6, 5 and 7 in a word.
    pub(super) const fn terms(self) -> usize {
        match self {
            Self::Int8 | Self::Q8_0 | Self::Q4_0 | Self::Q4_1 => 2,
            Self::Q4K => 5,
            Self::Q6K => 17,
        }
    }

    /// Units along K.
    pub(super) const fn units(self, k: usize) -> usize {
        k.div_ceil(4) / self.unit_steps()
    }

    /// Blocks of activations along K: those of the weights, or one.
    pub(super) const fn row_blocks(self, k: usize) -> usize {
        if matches!(self, Self::Int8) { 1 } else { self.units(k) }
    }

    /// Whether a matrix may have `k` inputs.
    pub(super) fn check_inputs(self, k: usize) -> Result<(), QuantError> {
        let (block, limit) = (self.block_elements(), Self::INT8_MAX_INPUTS);
        if !k.is_multiple_of(block) {
            return Err(QuantError::PartialBlock { kind: self, k, block });
        }
        if self == Self::Int8 && k > limit {
            return Err(QuantError::TooManyInputs { kind: self, k, limit });
        }
        Ok(())
    }
}

impl fmt::Display for QuantKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
