//! Streams: work in order, and its capture into graphs.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{
    CUgraph, CUgraphExec, CUgraphExec_st, CUstream, CUstream_flags, CUstream_st,
    CUstreamCaptureMode, CUstreamCaptureStatus,
};
use quire_kernels_ptx::Params;

use super::Handle;
use super::context::Context;
use super::event::Event;
use super::function::Function;
use super::memory::{DeviceBuffer, PinnedBuffer};
use super::symbols::Driver;
use crate::backend::cuda::error::CudaError;

/// Blocks that a grid may have in x, y and z, on every device there is.
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// Which stream; the driver's names come again, these do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamId(u64);

/// Work that the device does in the order given. Copies and launches return before they are done.
pub(crate) struct Stream {
    context: Context,
    stream: Handle<CUstream_st>,
    id: StreamId,
}

impl Stream {
    pub(super) fn new(context: Context) -> Result<Self, CudaError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut stream: CUstream = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the flags are the driver's.
        unsafe { context.driver()?.cuStreamCreate(&mut stream, flags) }?;
        let id = StreamId(NEXT.fetch_add(1, Ordering::Relaxed));
        Ok(Stream { context, stream: Handle(stream), id })
    }

    /// Waits until all of its work is done.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { self.context.driver()?.cuStreamSynchronize(self.stream.0) }
    }

    /// Sets the event when the work so far is done.
    pub(crate) fn record(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live as long as the references.
        unsafe { self.context.driver()?.cuEventRecord(event.handle(), self.stream.0) }
    }

    /// Work from here on begins after the event as it was recorded last.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live as long as the references.
        unsafe { self.context.driver()?.cuStreamWaitEvent(self.stream.0, event.handle(), 0) }
    }

    // ---- copies ----------------------------------------------------------------------------

    /// Copies bytes of host memory to byte `at` of the device's.
    pub(crate) fn upload(
        &self,
        src: &mut PinnedBuffer,
        range: Range<usize>,
        dst: &DeviceBuffer,
        at: usize,
    ) -> Result<(), CudaError> {
        let bytes = range.len();
        let from: *const c_void = src.range(&range).cast();
        let to = dst.range(&span(at, bytes));
        self.host_copy(src, bytes, |driver| {
            // SAFETY: both ranges are inside of their buffers. The host's is not written or freed
            // before the copy ends: `host_copy` sees to that; the device's waits when it is freed.
            unsafe { driver.cuMemcpyHtoDAsync_v2(to, from, bytes, self.stream.0) }
        })
    }

    /// Copies bytes of the device's memory to byte `at` of the host's.
    pub(crate) fn download(
        &self,
        src: &DeviceBuffer,
        range: Range<usize>,
        dst: &mut PinnedBuffer,
        at: usize,
    ) -> Result<(), CudaError> {
        let bytes = range.len();
        let from = src.range(&range);
        let to: *mut c_void = dst.range(&span(at, bytes)).cast();
        self.host_copy(dst, bytes, |driver| {
            // SAFETY: as for `upload`; nor is the host's range read before the copy ends.
            unsafe { driver.cuMemcpyDtoHAsync_v2(to, from, bytes, self.stream.0) }
        })
    }

    /// Copies to byte `at` of the device's memory, after the work so far, and waits for it.
    pub(crate) fn upload_now(
        &self,
        src: &[u8],
        dst: &DeviceBuffer,
        at: usize,
    ) -> Result<(), CudaError> {
        let to = dst.range(&span(at, src.len()));
        if src.is_empty() {
            return Ok(());
        }
        let driver = self.host_driver()?;
        // SAFETY: as many bytes are there. The driver reads memory that is not page-locked before
        // it returns; for any other, the slice outlives the wait below.
        let copied = unsafe {
            driver.cuMemcpyHtoDAsync_v2(to, src.as_ptr().cast(), src.len(), self.stream.0)
        };
        self.synchronize()?;
        copied
    }

    /// Copies from the device's memory, after the work so far, and waits for it.
    pub(crate) fn download_now(
        &self,
        src: &DeviceBuffer,
        range: Range<usize>,
        dst: &mut [u8],
    ) -> Result<(), CudaError> {
        assert_eq!(range.len(), dst.len(), "bytes of the range and of what it is copied to");
        let from = src.range(&range);
        if dst.is_empty() {
            return Ok(());
        }
        let driver = self.host_driver()?;
        // SAFETY: as many bytes are there. The driver has written memory that is not page-locked
        // when it returns; for any other, the slice outlives the wait below.
        let copied = unsafe {
            driver.cuMemcpyDtoHAsync_v2(dst.as_mut_ptr().cast(), from, dst.len(), self.stream.0)
        };
        self.synchronize()?;
        copied
    }

    /// Copies within the device's memory. The two ranges must not overlap.
    pub(crate) fn copy(
        &self,
        src: &DeviceBuffer,
        range: Range<usize>,
        dst: &DeviceBuffer,
        at: usize,
    ) -> Result<(), CudaError> {
        let bytes = range.len();
        let (from, to) = (src.range(&range), dst.range(&span(at, bytes)));
        if bytes == 0 {
            return Ok(());
        }
        assert!(
            from.abs_diff(to) >= bytes as u64,
            "{bytes} bytes at {from:#x} and {to:#x} overlap"
        );
        // SAFETY: both ranges are inside of their buffers, which wait for it when they are freed.
        unsafe { self.context.driver()?.cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream.0) }
    }

    /// Sets bytes to 0.
    pub(crate) fn zero(&self, dst: &DeviceBuffer, range: Range<usize>) -> Result<(), CudaError> {
        let to = dst.range(&range);
        if range.is_empty() {
            return Ok(());
        }
        // SAFETY: the range is inside of its buffer, which waits for it when it is freed.
        unsafe { self.context.driver()?.cuMemsetD8Async(to, 0, range.len(), self.stream.0) }
    }

    /// Enqueues a copy of `bytes` from or to `host`, which may not be touched before it ends.
    fn host_copy(
        &self,
        host: &mut PinnedBuffer,
        bytes: usize,
        enqueue: impl FnOnce(&Driver) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        let driver = self.host_driver()?;
        let (copied_by, event) = host.last_copy();
        if copied_by.is_some_and(|stream| stream != self.id) {
            self.wait(event)?;
        }
        enqueue(driver)?;
        if let Err(error) = self.record(event) {
            // The event does not know of the copy, so it has to end now.
            self.synchronize()?;
            return Err(error);
        }
        host.set_copied_by(self.id);
        Ok(())
    }

    /// The driver for a copy with host memory.
    ///
    /// # Errors
    /// The stream captures: a graph would copy again when the memory may be gone.
    fn host_driver(&self) -> Result<&'static Driver, CudaError> {
        let driver = self.context.driver()?;
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream lives as long as `self`; the status is one of the three there are.
        unsafe { driver.cuStreamIsCapturing(self.stream.0, &mut status) }?;
        if status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Ok(driver);
        }
        let reason = "a copy with host memory cannot be part of a graph; please report it";
        Err(CudaError::Unsupported { reason: reason.to_owned() })
    }

    // ---- kernels ---------------------------------------------------------------------------

    /// Launches a kernel over a grid of blocks.
    ///
    /// # Errors
    /// [`CudaError::Launch`] for a grid that is empty or beyond the limits, or what the driver says;
    /// a fault of the kernel itself shows in a later call.
    pub(crate) fn launch(
        &self,
        function: &Function,
        grid: [u32; 3],
        params: &mut Params,
    ) -> Result<(), CudaError> {
        check_grid(function.kernel().name, grid)?;
        let (given, declared) = (params.slots().len(), function.num_params());
        assert_eq!(given, declared, "parameters for {}", function.kernel().name);
        let driver = self.context.driver()?;
        let (variant, [x, y, z]) = (function.variant(), grid);
        params.with_addresses(|params| {
            // SAFETY: the function is loaded, and there is an address for each parameter that its
            // entry declares, of 8 bytes, which no parameter is longer than; the driver copies them
            // before it returns. What the kernel does with them is the caller's, see the module.
            unsafe {
                driver.cuLaunchKernel(
                    function.handle(),
                    x,
                    y,
                    z,
                    variant.num_threads,
                    1,
                    1,
                    variant.shared_bytes,
                    self.stream.0,
                    params.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            }
        })
    }

    // ---- graphs ----------------------------------------------------------------------------

    /// From here on, work is written down and not done, up to the end of the capture by the same
    /// thread.
    pub(crate) fn begin_capture(&self) -> Result<(), CudaError> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `self`.
        unsafe { self.context.driver()?.cuStreamBeginCapture_v2(self.stream.0, mode) }
    }

    /// What was captured. The stream does its work again, also when this fails.
    pub(crate) fn end_capture(&self) -> Result<Graph, CudaError> {
        let driver = self.context.driver()?;
        let graph = self.end()?;
        let mut exec: CUgraphExec = std::ptr::null_mut();
        // SAFETY: the graph is captured and not destroyed; without flags.
        let made = unsafe { driver.cuGraphInstantiateWithFlags(&mut exec, graph, 0) };
        // SAFETY: destroyed here alone; what was made of it does not need it.
        let destroyed = unsafe { driver.cuGraphDestroy(graph) };
        made?;
        let graph = Graph { context: self.context.clone(), exec: Handle(exec) };
        destroyed?;
        Ok(graph)
    }

    /// Throws away what was captured.
    pub(crate) fn abort_capture(&self) {
        let Ok(driver) = self.context.driver() else { return };
        // An error is what a capture that the driver voided ends with.
        if let Ok(graph) = self.end() {
            // SAFETY: captured, and destroyed here alone.
            let _ = unsafe { driver.cuGraphDestroy(graph) };
        }
    }

    fn end(&self) -> Result<CUgraph, CudaError> {
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: the stream lives as long as `self`.
        unsafe { self.context.driver()?.cuStreamEndCapture(self.stream.0, &mut graph) }?;
        Ok(graph)
    }

    /// Does the work of a graph.
    pub(crate) fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        // SAFETY: both live as long as the references; the context keeps all kernels loaded, and no
        // copy with host memory is in it.
        unsafe { self.context.driver()?.cuGraphLaunch(graph.exec.0, self.stream.0) }
    }

    pub(super) fn handle(&self) -> CUstream {
        self.stream.0
    }

    pub(super) fn id(&self) -> StreamId {
        self.id
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(driver) = self.context.driver() else { return };
        // SAFETY: created by `new`, destroyed here alone; the driver ends its work first.
        let _ = unsafe { driver.cuStreamDestroy_v2(self.stream.0) };
    }
}

/// Captured work, which can be done any number of times, at one time on one stream.
pub(crate) struct Graph {
    context: Context,
    exec: Handle<CUgraphExec_st>,
}

impl Drop for Graph {
    fn drop(&mut self) {
        let Ok(driver) = self.context.driver() else { return };
        // SAFETY: made by `end_capture`, destroyed here alone; the driver ends its work first.
        let _ = unsafe { driver.cuGraphExecDestroy(self.exec.0) };
    }
}

fn span(at: usize, bytes: usize) -> Range<usize> {
    at..at.checked_add(bytes).expect("a range ends in the address space")
}

fn check_grid(kernel: &'static str, grid: [u32; 3]) -> Result<(), CudaError> {
    let fits = |(blocks, max): (&u32, &u32)| *blocks > 0 && blocks <= max;
    if grid.iter().zip(&MAX_GRID).all(fits) {
        return Ok(());
    }
    let reason = format!("a grid of {grid:?} blocks has to be from [1, 1, 1] to {MAX_GRID:?}");
    Err(CudaError::Launch { kernel, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_has_limits() {
        for grid in [[1, 1, 1], [i32::MAX as u32, 65_535, 65_535]] {
            assert_eq!(check_grid("k", grid), Ok(()));
        }
        for grid in
            [[0, 1, 1], [1, 0, 1], [1, 1, 0], [1 << 31, 1, 1], [1, 65_536, 1], [1, 1, 65_536]]
        {
            let refused = check_grid("k", grid).expect_err("a bad grid");
            assert!(matches!(refused, CudaError::Launch { kernel: "k", .. }), "{grid:?}");
        }
    }
}
