//! The one way a kernel is launched: arguments and grid are checked, every return code is looked at,
//! and each launch can be recorded.
//!
//! Ops of [`Backend`](crate::ops::Backend) return nothing, so the first failure is kept, what follows
//! is not launched, and the op that may fail next hands it out ([`Launcher::take_failure`]).

use super::driver::{Context, Function, Graph, Stream};
use super::error::CudaError;
use quire_kernels_ptx::{Launch, Registry, SelectError, Variant};
use std::marker::PhantomData;

/// A kernel chosen for this device; its arguments are an `L`.
pub(super) struct Kernel<L> {
    index: usize,
    variant: &'static Variant,
    arguments: PhantomData<fn(L)>,
}

impl<L> Clone for Kernel<L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L> Copy for Kernel<L> {}

impl<L> Kernel<L> {
    /// The size of a tile, which the kernel was compiled with.
    pub fn tile(&self, name: &str) -> usize {
        let value = self.variant.constant(name).unwrap_or_else(|| panic!("no constant {name}"));
        usize::try_from(value).expect("a size")
    }
}

/// What a launch moves and computes, by its formula: the least that any implementation would.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes of global memory read and written.
    pub bytes: u64,
    /// Multiplications and additions of matrix products; others are not counted.
    pub flops: u64,
}

impl Work {
    /// A launch that only moves memory.
    pub(super) fn bytes(bytes: usize) -> Self {
        Work { bytes: bytes as u64, flops: 0 }
    }
}

/// A launch as it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchRecord {
    /// Name of the kernel, and of the variant.
    pub kernel: &'static str,
    /// The PTX entry's variant.
    pub variant: &'static str,
    /// Blocks of the grid.
    pub grid: [u32; 3],
    /// What it moves and computes.
    pub work: Work,
}

/// What becomes of launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// They are made.
    Eager,
    /// They are recorded into a graph.
    Capturing,
    /// They are not made: the graph that was replayed has them.
    Replaying,
}

/// Launches kernels on the stream that computes.
pub(super) struct Launcher {
    context: Context,
    stream: Stream,
    registry: Registry,
    /// By [`Kernel::index`]; there from [`Launcher::load_kernels`] on.
    functions: Vec<Option<Function>>,
    variants: Vec<&'static Variant>,
    mode: Mode,
    failure: Option<CudaError>,
    records: Option<Vec<LaunchRecord>>,
}

impl Launcher {
    pub fn new(context: Context) -> Result<Self, CudaError> {
        let registry = registry(&context)?;
        let stream = context.stream()?;
        Ok(Launcher {
            context,
            stream,
            registry,
            functions: Vec::new(),
            variants: Vec::new(),
            mode: Mode::Eager,
            failure: None,
            records: None,
        })
    }

    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The stream that computes.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Chooses the variant of a kernel with these constants.
    pub fn select<L: Launch>(&mut self, constants: &[(&str, i64)]) -> Result<Kernel<L>, CudaError> {
        let variant = self.registry.select::<L>(constants);
        let variant = variant.map_err(|e| unsupported(&self.context, &e))?;
        self.functions.push(None);
        self.variants.push(variant);
        Ok(Kernel { index: self.functions.len() - 1, variant, arguments: PhantomData })
    }

    /// Loads the kernels that were chosen and are not loaded yet. The driver compiles a kernel when
    /// it first sees it, which takes time and memory that no step should have to find.
    pub fn load_kernels(&mut self) -> Result<(), CudaError> {
        for (function, variant) in self.functions.iter_mut().zip(&self.variants) {
            if function.is_none() {
                *function = Some(self.context.load(variant)?);
            }
        }
        Ok(())
    }

    /// Launches `kernel` over `grid`, unless something failed before or a graph has done it.
    pub fn launch<L: Launch>(
        &mut self,
        kernel: Kernel<L>,
        grid: [usize; 3],
        args: &L,
        work: impl FnOnce() -> Work,
    ) {
        if self.mode == Mode::Replaying || self.failure.is_some() || grid.contains(&0) {
            return;
        }
        if let Err(error) = self.try_launch(kernel, grid, args, work) {
            self.failure = Some(error);
        }
    }

    fn try_launch<L: Launch>(
        &mut self,
        kernel: Kernel<L>,
        grid: [usize; 3],
        args: &L,
        work: impl FnOnce() -> Work,
    ) -> Result<(), CudaError> {
        let name = L::kernel().name;
        let refused = |reason: String| CudaError::Launch { kernel: name, reason };
        let mut params = args.params().map_err(|e| refused(e.to_string()))?;
        let blocks = |axis: usize| {
            let n = grid[axis];
            u32::try_from(n).map_err(|_| refused(format!("a grid of {n} blocks on axis {axis}")))
        };
        let grid = [blocks(0)?, blocks(1)?, blocks(2)?];
        let function = self.functions[kernel.index].as_ref().expect("it was loaded");
        let launched = self.stream.launch(function, grid, &mut params);
        launched.map_err(|error| error.of_kernel(kernel.variant.name))?;
        if let Some(records) = &mut self.records {
            let variant = kernel.variant.name;
            records.push(LaunchRecord { kernel: name, variant, grid, work: work() });
        }
        Ok(())
    }

    /// Whether launches are not made because a graph has them.
    pub fn is_replaying(&self) -> bool {
        self.mode == Mode::Replaying
    }

    /// Does `work` on the stream unless something failed before or a graph has done it; its failure
    /// is kept.
    pub fn enqueue(&mut self, work: impl FnOnce(&Stream) -> Result<(), CudaError>) {
        if self.mode == Mode::Replaying || self.failure.is_some() {
            return;
        }
        if let Err(error) = work(&self.stream) {
            self.failure = Some(error);
        }
    }

    /// Whether there is a failure to be handed out.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Hands out the first failure since the last call.
    pub fn take_failure(&mut self) -> Result<(), CudaError> {
        self.failure.take().map_or(Ok(()), Err)
    }

    /// From here on launches go into a graph.
    pub fn begin_capture(&mut self) -> Result<(), CudaError> {
        self.stream.begin_capture()?;
        self.mode = Mode::Capturing;
        Ok(())
    }

    /// What was launched since [`Launcher::begin_capture`]; a failure is handed out, and there is no
    /// capture any more.
    pub fn end_capture(&mut self) -> Result<Graph, CudaError> {
        self.mode = Mode::Eager;
        let failure = self.take_failure();
        let graph = self.stream.end_capture();
        failure.and(graph)
    }

    /// From here on launches are those that `graph` makes now.
    pub fn replay(&mut self, graph: &Graph) -> Result<(), CudaError> {
        self.stream.replay(graph)?;
        self.mode = Mode::Replaying;
        Ok(())
    }

    /// Launches are made again.
    pub fn end_replay(&mut self) {
        self.mode = Mode::Eager;
    }

    /// Forgets a failure, a capture and a replay that did not end.
    pub fn reset(&mut self) {
        if self.mode == Mode::Capturing {
            self.stream.abort_capture();
        }
        self.mode = Mode::Eager;
        self.failure = None;
    }

    /// Records launches from here on, or hands out what was recorded.
    pub fn record(&mut self, on: bool) -> Vec<LaunchRecord> {
        std::mem::replace(&mut self.records, on.then(Vec::new)).unwrap_or_default()
    }
}

/// The kernels for a device.
///
/// # Errors
/// There are none.
pub(super) fn registry(context: &Context) -> Result<Registry, CudaError> {
    Registry::new(context.info().capability).map_err(|e| unsupported(context, &e))
}

fn unsupported(context: &Context, error: &SelectError) -> CudaError {
    CudaError::UnsupportedDevice { name: context.info().name.clone(), reason: error.to_string() }
}
