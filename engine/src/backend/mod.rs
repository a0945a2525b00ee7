//! The backends: `reference`, the specification, and `cpu`, the fast one.

pub mod cpu;
pub mod reference;

pub use cpu::CpuBackend;
pub use quire_kernels_cpu::Isa;
pub use reference::ReferenceBackend;
