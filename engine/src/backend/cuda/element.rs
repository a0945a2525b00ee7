//! The types that weights, GEMM inputs and the KV cache may have.

use crate::ops::DType;
use bytemuck::Pod;
use half::bf16;
use quire_kernels_ptx::Element;

/// A type that models are computed in.
pub trait Compute: Element + Pod + Send + Sync {
    /// Its name in the engine.
    const COMPUTE: DType;

    /// The nearest value.
    fn from_f32(value: f32) -> Self;
}

impl Compute for bf16 {
    const COMPUTE: DType = DType::Bf16;

    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
}

impl Compute for f32 {
    const COMPUTE: DType = DType::F32;

    fn from_f32(value: f32) -> Self {
        value
    }
}
