//! The CUDA backend: kernels compiled ahead of time to PTX, loaded through the driver.
//!
//! ```text
//! begin_step ── the step's arrays, one copy ─▶ placeholders ─▶ graph of this shape? replay it
//!   ops      ── launches (none while a graph does them; into a graph when one is captured)
//!   sample   ── ends graph or capture; tokens are chosen and stay on the device
//! end_step   ── results go back on a second stream
//! read_samples ─ waits for them, a step later
//! ```
//!
//! `driver` is the only unsafe code. Everything is enqueued on one stream that computes; results
//! and swapped blocks are copied by two others. Nothing here has run on hardware yet: it is tested
//! on a stand-in driver that interprets the kernels (`tests/fakecuda`).
//!
//! # Numerics
//! With [`GemmMode::Triton`](super::GemmMode) a row's result does not depend on what else is in the batch: every
//! choice made here by the number of rows (how a matrix product is cut, whether attention is split
//! over blocks of the grid) changes who computes a sum, not its order.

mod arena;
mod attention;
mod communicator;
pub(crate) mod driver;
mod element;
pub mod error;
mod gemm;
mod graphs;
mod launcher;
mod load;
mod ops;
mod probe;
mod sampling;
mod step;
mod swap;
mod tensors;

pub use element::Compute;
pub use error::CudaError;
pub use launcher::{LaunchRecord, Work};
pub use load::CudaBuffers;
pub use probe::CopyKind;
pub use tensors::{CudaHostCache, CudaKvCache, CudaMatrix, CudaTensor, CudaVector};

use super::{CudaOptions, GemmMode};
use crate::memory::SystemMemory;
use crate::ops::{DType, KvLayout};
use attention::Attention;
use communicator::{Communicator, SingleRank};
use driver::{Context, CublasLt, DeviceBuffer};
use gemm::GemmKernels;
use graphs::Graphs;
use launcher::{Kernel, Launcher};
use load::Uploader;
use quire_kernels_ptx::launch::{
    CopyBlocks, Embed, GatherRows, PatchTokens, QkNormRopeWriteKv, RmsNorm, SiluMul,
};
use sampling::DeviceSampler;
use std::sync::{Mutex, PoisonError};
use step::StepArrays;
use swap::Swap;
use tensors::ROW_MULTIPLE;

/// What there is in the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    /// Its name.
    pub name: String,
    /// Compute capability, `9.0`.
    pub capability: String,
    /// The version of CUDA that the driver supports.
    pub driver: error::Version,
    /// Memory of the device.
    pub memory: SystemMemory,
}

impl CudaDevice {
    /// Looks at a device; needs a driver.
    ///
    /// # Errors
    /// There is no driver, it is too old, or there is no such device or no kernel for it.
    pub fn open(device: usize) -> Result<Self, CudaError> {
        let context = Context::new(device)?;
        launcher::registry(&context)?;
        // The driver takes a context apart when nobody has it any more. Whoever looks at a device is
        // about to use it, and would wait for the next one to be made.
        static LOOKED_AT: Mutex<Option<Context>> = Mutex::new(None);
        *LOOKED_AT.lock().unwrap_or_else(PoisonError::into_inner) = Some(context.clone());
        let info = context.info();
        Ok(CudaDevice {
            name: info.name.clone(),
            capability: info.capability.to_string(),
            driver: info.driver_version,
            memory: context.memory()?,
        })
    }
}

/// Whether there are kernels for a model of these sizes.
///
/// # Errors
/// Names the size for which there are none.
pub fn check_sizes(
    dtype: DType,
    hidden_size: usize,
    intermediate_size: usize,
    head_dim: usize,
) -> Result<(), CudaError> {
    for (name, size) in [("hidden_size", hidden_size), ("intermediate_size", intermediate_size)] {
        if !size.is_multiple_of(ROW_MULTIPLE) {
            let reason = format!(
                "{name} is {size}: the kernels take multiples of {ROW_MULTIPLE}; run with --device \
                 cpu"
            );
            return Err(CudaError::Unsupported { reason });
        }
    }
    attention::head_width(dtype, head_dim).map(drop)
}

/// Device memory for what a launch leaves to the next: partial sums of matrix products and of
/// attention, never both at a time. Attention over the longest sequence needs more on some models.
const SCRATCH_BYTES: usize = 64 << 20;

/// Kernels that every model needs.
struct Kernels<T: Compute> {
    embed: Kernel<Embed<T>>,
    gather_rows: Kernel<GatherRows>,
    rms_norm: Kernel<RmsNorm<T>>,
    silu_mul: Kernel<SiluMul<T>>,
    /// For heads of up to 128 elements, and of more.
    rope: [Kernel<QkNormRopeWriteKv<T>>; 2],
    copy_blocks: Kernel<CopyBlocks>,
    patch_tokens: Kernel<PatchTokens>,
}

/// Kernels on an NVIDIA device, computing in `T`.
pub struct CudaBackend<T: Compute> {
    launcher: Launcher,
    options: CudaOptions,
    kernels: Kernels<T>,
    gemm: GemmKernels<T>,
    cublas: Option<CublasLt>,
    /// The KV cache's, from when it is allocated.
    layout: Option<KvLayout>,
    attention: Option<Attention<T>>,
    scratch: DeviceBuffer,
    step: StepArrays,
    graphs: Graphs,
    /// There from [`crate::ops::Backend::reserve`] on.
    sampler: Option<DeviceSampler>,
    swap: Swap,
    /// There while weights are loaded.
    uploader: Option<Uploader<T>>,
    communicator: Box<dyn Communicator>,
}

impl<T: Compute> CudaBackend<T> {
    /// A backend on a device.
    ///
    /// # Errors
    /// There is no driver, it is too old, there is no such device or no kernel for it, or cuBLASLt
    /// was asked for and is not there.
    pub fn new(options: CudaOptions) -> Result<Self, CudaError> {
        let context = Context::new(options.device)?;
        let mut launcher = Launcher::new(context.clone())?;
        let rope = |launcher: &mut Launcher, dim| launcher.select(&[("BLOCK_D", dim)]);
        let kernels = Kernels {
            embed: launcher.select(&[])?,
            gather_rows: launcher.select(&[])?,
            rms_norm: launcher.select(&[])?,
            silu_mul: launcher.select(&[])?,
            rope: [rope(&mut launcher, 128)?, rope(&mut launcher, 256)?],
            copy_blocks: launcher.select(&[])?,
            patch_tokens: launcher.select(&[])?,
        };
        let cublas = match options.gemm {
            GemmMode::Triton => None,
            GemmMode::Cublas => Some(CublasLt::new(&context)?),
        };
        Ok(CudaBackend {
            gemm: GemmKernels::new(&mut launcher)?,
            swap: Swap::new(&mut launcher)?,
            scratch: context.alloc(SCRATCH_BYTES, "partial results")?,
            step: StepArrays::new(&context)?,
            graphs: Graphs::default(),
            layout: None,
            attention: None,
            sampler: None,
            uploader: None,
            communicator: Box::new(SingleRank),
            launcher,
            options,
            kernels,
            cublas,
        })
    }

    /// Records launches from here on, or hands out what was recorded since. While a graph is
    /// replayed nothing is launched.
    pub fn record_launches(&mut self, on: bool) -> Vec<LaunchRecord> {
        self.launcher.record(on)
    }

    /// Swaps blocks in smaller pieces than the memory plan has room for: for tests, before there is
    /// a host cache.
    pub fn limit_swap_buffers(&mut self, bytes: usize) {
        self.swap.limit_buffers(bytes);
    }

    /// Graphs there are.
    pub fn num_graphs(&self) -> usize {
        self.graphs.len()
    }
}
