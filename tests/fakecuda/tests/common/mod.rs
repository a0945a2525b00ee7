//! A thin safe layer over cudarc for these tests: the driver's calls with their codes, and one
//! shipped kernel.
#![allow(dead_code, reason = "each test file uses a part")]

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::{Activation, CudaBlasLT, Matmul, MatmulConfig};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream, sys};
use fakecuda::{Config, FakeCuda};

const SILU_MUL: &str =
    include_str!("../../../../kernels-ptx/ptx/sm_80/silu_mul_fp32_block1024_w4_s1.ptx");

/// Columns that the kernel gets.
pub const WIDTH: usize = 16;

/// A value, or the driver's code.
pub type Outcome<T = ()> = Result<T, i32>;

pub fn outcome<T>(result: Result<T, DriverError>) -> Outcome<T> {
    result.map_err(|DriverError(code)| code as i32)
}

#[derive(Clone, Copy)]
pub struct Stream(sys::CUstream);

#[derive(Clone, Copy)]
pub struct Event(sys::CUevent);

#[derive(Clone, Copy)]
pub struct Function(sys::CUfunction);

#[derive(Clone, Copy)]
pub struct Module(sys::CUmodule);

#[derive(Clone, Copy)]
pub struct Graph(sys::CUgraph, sys::CUgraphExec);

/// Page-locked floats.
#[derive(Clone, Copy)]
pub struct Pinned {
    start: *mut f32,
    len: usize,
}

impl Pinned {
    pub fn get(&self) -> Vec<f32> {
        // SAFETY: the allocation has that many floats; no call that writes them is under way.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }.to_vec()
    }

    pub fn set(&self, values: &[f32]) {
        assert_eq!(values.len(), self.len);
        // SAFETY: as in `get`.
        unsafe { self.start.copy_from_nonoverlapping(values.as_ptr(), self.len) };
    }

    pub fn fill(&self, value: f32) {
        self.set(&vec![value; self.len]);
    }
}

/// A context, and the driver that it is in.
pub struct Gpu {
    pub context: Arc<CudaContext>,
    pub fake: FakeCuda,
}

// Memory and handles are the driver's, which checks them: no call in here can touch memory that is
// not there, but for host slices, which live as long as the call, and page-locked memory.
impl Gpu {
    pub fn new(config: &Config) -> Gpu {
        let fake = FakeCuda::load(config);
        let context = CudaContext::new(0).expect("a device");
        Gpu { context, fake }
    }

    pub fn load(&self, ptx: &str) -> Outcome<Module> {
        let text = CString::new(ptx).expect("no NUL");
        // SAFETY: text with a NUL, which the driver reads before it returns.
        let module = unsafe { result::module::load_data(text.as_ptr().cast::<c_void>()) };
        outcome(module).map(Module)
    }

    pub fn unload(&self, Module(module): Module) -> Outcome {
        // SAFETY: the driver checks the handle.
        outcome(unsafe { result::module::unload(module) })
    }

    pub fn function(&self, Module(module): Module, name: &str) -> Outcome<Function> {
        let name = CString::new(name).expect("no NUL");
        // SAFETY: the driver checks the handle.
        outcome(unsafe { result::module::get_function(module, name) }).map(Function)
    }

    pub fn silu(&self) -> Function {
        let module = self.load(SILU_MUL).expect("a shipped kernel");
        self.function(module, "silu_mul").expect("its entry")
    }

    pub fn set_shared(&self, Function(function): Function, bytes: i32) -> Outcome {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the driver checks the handle.
        outcome(unsafe { result::function::set_function_attribute(function, attribute, bytes) })
    }

    /// `out[i] = silu(x[i]) · x[width + i]`; with the wrong shape if asked for.
    pub fn launch_shaped(
        &self,
        Function(function): Function,
        (grid, block, shared): ([u32; 3], [u32; 3], u32),
        Stream(stream): Stream,
        (out, x, width): (u64, u64, usize),
    ) -> Outcome {
        let mut values = [out, x, width as u64, 0, 0];
        let params = values.each_mut().map(|value| std::ptr::from_mut(value).cast::<c_void>());
        let ([gx, gy, gz], [bx, by, bz]) = (grid, block);
        let (grid, block) = ((gx, gy, gz), (bx, by, bz));
        let mut params = params;
        // SAFETY: the kernel has five parameters of at most 8 bytes; a smaller one takes the low
        // bytes.
        outcome(unsafe {
            result::launch_kernel(function, grid, block, shared, stream, &mut params)
        })
    }

    pub fn launch(&self, function: Function, stream: Stream, out: u64, x: u64) -> Outcome {
        let shape = ([1, 1, 1], [128, 1, 1], 0);
        self.launch_shaped(function, shape, stream, (out, x, WIDTH))
    }

    pub fn alloc(&self, bytes: usize) -> Outcome<u64> {
        // SAFETY: nothing reads what is not written: the driver keeps book.
        outcome(unsafe { result::malloc_sync(bytes) })
    }

    pub fn free(&self, address: u64) -> Outcome {
        // SAFETY: the driver checks the address.
        outcome(unsafe { result::free_sync(address) })
    }

    pub fn pinned(&self, len: usize) -> Outcome<Pinned> {
        // SAFETY: `Pinned` is written by the driver before a test reads it.
        let start = outcome(unsafe { result::malloc_host(4 * len, 0) })?;
        Ok(Pinned { start: start.cast(), len })
    }

    pub fn free_pinned(&self, pinned: Pinned) -> Outcome {
        // SAFETY: the driver checks the address; the tests do not use it any more.
        outcome(unsafe { result::free_host(pinned.start.cast()) })
    }

    /// One that does not wait for the default stream.
    pub fn stream(&self) -> Stream {
        let kind = result::stream::StreamKind::NonBlocking;
        Stream(result::stream::create(kind).expect("a stream"))
    }

    pub fn blocking_stream(&self) -> Stream {
        let kind = result::stream::StreamKind::Default;
        Stream(result::stream::create(kind).expect("a stream"))
    }

    pub fn default_stream(&self) -> Stream {
        Stream(std::ptr::null_mut())
    }

    pub fn destroy_stream(&self, Stream(stream): Stream) -> Outcome {
        // SAFETY: the driver checks the handle.
        outcome(unsafe { result::stream::destroy(stream) })
    }

    pub fn synchronize(&self, Stream(stream): Stream) -> Outcome {
        // SAFETY: the driver checks the handle.
        outcome(unsafe { result::stream::synchronize(stream) })
    }

    pub fn query(&self, Stream(stream): Stream) -> Outcome {
        // SAFETY: the driver checks the handle.
        outcome(unsafe { sys::cuStreamQuery(stream) }.result())
    }

    pub fn event(&self, flags: sys::CUevent_flags) -> Event {
        Event(result::event::create(flags).expect("an event"))
    }

    pub fn destroy_event(&self, Event(event): Event) -> Outcome {
        // SAFETY: the driver checks the handle.
        outcome(unsafe { result::event::destroy(event) })
    }

    pub fn record(&self, Event(event): Event, Stream(stream): Stream) -> Outcome {
        // SAFETY: the driver checks the handles.
        outcome(unsafe { result::event::record(event, stream) })
    }

    pub fn wait(&self, Stream(stream): Stream, Event(event): Event) -> Outcome {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the driver checks the handles.
        outcome(unsafe { result::stream::wait_event(stream, event, flags) })
    }

    pub fn query_event(&self, Event(event): Event) -> Outcome {
        // SAFETY: the driver checks the handle.
        outcome(unsafe { result::event::query(event) })
    }

    pub fn synchronize_event(&self, Event(event): Event) -> Outcome {
        // SAFETY: the driver checks the handle.
        outcome(unsafe { result::event::synchronize(event) })
    }

    pub fn elapsed(&self, Event(start): Event, Event(end): Event) -> Outcome<f32> {
        // SAFETY: the driver checks the handles.
        outcome(unsafe { result::event::elapsed(start, end) })
    }

    pub fn upload(&self, stream: Stream, from: Pinned, to: u64) -> Outcome {
        // SAFETY: the floats are there until the test gives them back.
        let from = unsafe { std::slice::from_raw_parts(from.start, from.len) };
        // SAFETY: the driver checks the address.
        outcome(unsafe { result::memcpy_htod_async(to, from, stream.0) })
    }

    pub fn download(&self, stream: Stream, from: u64, to: Pinned) -> Outcome {
        // SAFETY: the floats are there until the test gives them back.
        let to = unsafe { std::slice::from_raw_parts_mut(to.start, to.len) };
        // SAFETY: the driver checks the address.
        outcome(unsafe { result::memcpy_dtoh_async(to, from, stream.0) })
    }

    /// From memory that is not page-locked: it can be reused when this returns.
    pub fn upload_staged(&self, stream: Stream, from: &[f32], to: u64) -> Outcome {
        // SAFETY: the driver checks the address and takes the floats before it returns.
        outcome(unsafe { result::memcpy_htod_async(to, from, stream.0) })
    }

    pub fn upload_now(&self, from: &[f32], to: u64) -> Outcome {
        // SAFETY: the driver checks the address.
        outcome(unsafe { result::memcpy_htod_sync(to, from) })
    }

    pub fn download_now(&self, from: u64, len: usize) -> Outcome<Vec<f32>> {
        let mut to = vec![0.0; len];
        // SAFETY: the driver checks the address and is done when it returns.
        outcome(unsafe { result::memcpy_dtoh_sync(&mut to, from) }).map(|()| to)
    }

    pub fn copy(&self, stream: Stream, to: u64, from: u64, bytes: usize) -> Outcome {
        // SAFETY: the driver checks the addresses.
        outcome(unsafe { result::memcpy_dtod_async(to, from, bytes, stream.0) })
    }

    pub fn zero(&self, stream: Stream, at: u64, bytes: usize) -> Outcome {
        // SAFETY: the driver checks the address.
        outcome(unsafe { result::memset_d8_async(at, 0, bytes, stream.0) })
    }

    pub fn begin_capture(&self, Stream(stream): Stream) -> Outcome {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the driver checks the handle.
        outcome(unsafe { result::stream::begin_capture(stream, mode) })
    }

    pub fn end_capture(&self, Stream(stream): Stream) -> Outcome<Graph> {
        // SAFETY: the driver checks the handles.
        let graph = outcome(unsafe { result::stream::end_capture(stream) })?;
        let flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the driver checks the handle.
        let executable = outcome(unsafe { result::graph::instantiate(graph, flags) })?;
        Ok(Graph(graph, executable))
    }

    pub fn launch_graph(&self, Graph(_, graph): Graph, Stream(stream): Stream) -> Outcome {
        // SAFETY: the driver checks the handles.
        outcome(unsafe { result::graph::launch(graph, stream) })
    }

    pub fn destroy_graph(&self, Graph(graph, executable): Graph) -> Outcome {
        // SAFETY: the driver checks the handles.
        outcome(unsafe { result::graph::exec_destroy(executable) })?;
        // SAFETY: as above.
        outcome(unsafe { result::graph::destroy(graph) })
    }

    /// No context is current on this thread any more.
    pub fn leave_context(&self) -> Outcome {
        // SAFETY: null is no context.
        outcome(unsafe { result::ctx::set_current(std::ptr::null_mut()) })
    }
}

/// Input of the kernel: gates of 2, and `up` for the other half.
pub fn input(up: f32) -> Vec<f32> {
    [[2.0; WIDTH], [up; WIDTH]].concat()
}

/// Whether the kernel's output is that of [`input`].
pub fn is_silu(out: &[f32], up: f32) -> bool {
    let want = 2.0 / (1.0 + (-2f32).exp()) * up;
    out.len() == WIDTH && out.iter().all(|out| (out - want).abs() <= 1e-6 * want.abs())
}

/// `[A, B, C]` up, the product of cuBLASLt, and D down.
pub fn multiply(
    blas: &CudaBlasLT,
    stream: &Arc<CudaStream>,
    config: MatmulConfig,
    [a, b, c]: [&[f32]; 3],
    (bias, activation): (Option<&[f32]>, Option<&Activation>),
) -> Result<Vec<f32>, CublasError> {
    let up = |values: &[f32]| stream.clone_htod(values).expect("an upload");
    let (a, b, mut c, bias) = (up(a), up(b), up(c), bias.map(up));
    // SAFETY: the driver checks that the matrices are in their allocations.
    unsafe { blas.matmul(config, &a, &b, &mut c, bias.as_ref(), activation) }?;
    Ok(stream.clone_dtoh(&c).expect("a download"))
}

/// A graph of one product of zeros. Its matrices stay for good.
pub fn captured_product(
    blas: &CudaBlasLT,
    stream: &Arc<CudaStream>,
    config: MatmulConfig,
) -> CudaGraph {
    let zeros = || stream.alloc_zeros::<f32>(100).expect("an allocation");
    let (a, b, mut c) = (zeros(), zeros(), zeros());
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).expect("a capture");
    // SAFETY: the driver checks that the matrices are in their allocations.
    unsafe { blas.matmul(config, &a, &b, &mut c, None, None) }.expect("a product");
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
    std::mem::forget((a, b, c));
    graph.expect("a graph").expect("a graph")
}

pub fn disable_event_tracking(context: &CudaContext) {
    // SAFETY: the test uses one stream.
    unsafe { context.disable_event_tracking() };
}
