//! The backends: `reference`, the specification; `cpu`; and `cuda`, for NVIDIA devices.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod options;
pub mod reference;

pub use cpu::{CpuBackend, CpuBuffers};
#[cfg(feature = "cuda")]
pub use cuda::{CudaBackend, CudaBuffers};
pub use options::{CudaOptions, GemmMode, Quantization};
pub use quire_kernels_cpu::Isa;
pub use reference::{ReferenceBackend, ReferenceBuffers};

/// What the CPU can do at best, and what measuring that takes.
pub mod ceiling {
    pub use quire_kernels_cpu::{
        Ctx, CtxError, MatrixKind, Pages, ReadBuffer, matrix_peak, read_bandwidth, usable_cores,
    };
}
