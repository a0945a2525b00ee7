//! A small safe layer over the CUDA driver: the only `unsafe` code of the backend.
//!
//! ```text
//! Context ─┬─ alloc        ─▶ DeviceBuffer      load ─▶ Function
//!          ├─ alloc_pinned ─▶ PinnedBuffer      event, timer ─▶ Event
//!          └─ stream       ─▶ Stream: copies, launches, capture ─▶ Graph ─▶ replay
//! ```
//!
//! # What makes it safe
//! * Nothing is called before the library is known to be there, to be new enough and to have every
//!   function used, so no symbol is missing later.
//! * Every code is checked. The context is made current by each call that needs one, so a value
//!   may move to another thread; `cuCtxSetCurrent` is all that costs.
//! * Ranges of copies are asserted to be inside both buffers. Host memory that a copy reads or
//!   writes while Rust may look at it is only [`PinnedBuffer`]'s, which waits for its copies before
//!   it gives out a slice or frees, and no copy of it can be captured into a graph.
//! * A value keeps the context alive, and the context keeps every module that it loaded: a graph
//!   may replay a kernel whose [`Function`] is gone. A stream, an event or a graph that is
//!   destroyed under way is freed by the driver at completion, and `cuMemFree` waits.
//!
//! # What is left to the caller
//! A kernel writes where its [`DevicePtr`](quire_kernels_ptx::DevicePtr)s point. They must point
//! into live [`DeviceBuffer`]s, with as many elements as the kernel's arguments say; then host
//! memory is out of its reach. A graph must not be replayed after a buffer that it names is freed.
//! Nothing is freed or synchronised between [`Stream::begin_capture`] and the end of the capture on
//! the thread that captures: the driver would refuse it and void the capture.
#![expect(unsafe_code, reason = "the driver is a C library")]

mod context;
mod cublaslt;
mod event;
mod function;
mod memory;
mod stream;
mod symbols;

pub(crate) use context::Context;
pub(crate) use cublaslt::{CUBLAS_BYTES, CublasLt, MatmulArgs};
pub(crate) use event::Event;
pub(crate) use function::Function;
pub(crate) use memory::{DeviceBuffer, PinnedBuffer};
pub(crate) use stream::{Graph, Stream};

/// A name that the driver gave a thing of its own.
struct Handle<T>(*mut T);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

// SAFETY: what it points to is the driver's and is never read here; the driver's functions may be
// called from any thread, also at the same time.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}
