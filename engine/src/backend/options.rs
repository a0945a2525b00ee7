//! How a device is used, and what becomes of weights; there whether or not the CUDA backend is
//! built in.

/// Who multiplies matrices on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GemmMode {
    /// Quire's own kernels: a row's bits do not depend on the batch.
    #[default]
    Triton,
    /// cuBLASLt, whose results may change with the number of rows.
    Cublas,
}

/// How the CUDA backend is set up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// Which device, counted from 0.
    pub device: usize,
    /// Who multiplies matrices.
    pub gemm: GemmMode,
    /// Launch every kernel of every step: no graphs.
    pub enforce_eager: bool,
}

/// What becomes of quantised weights, and of others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quantization {
    /// Every weight is kept in the backend's dtype.
    #[default]
    None,
    /// A weight whose rows are all stored in one [`BlockFormat`](crate::ops::BlockFormat) is kept
    /// and multiplied in it; others are kept in the backend's dtype.
    Stored,
    /// Every weight is rounded to 8 bits, with a scale for each row.
    Int8,
}
