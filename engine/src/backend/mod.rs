//! The backends: `reference`, the specification, and `cpu`, the fast one.

pub mod cpu;
pub mod reference;

pub use cpu::{CpuBackend, CpuBuffers};
pub use quire_kernels_cpu::Isa;
pub use reference::{ReferenceBackend, ReferenceBuffers};
