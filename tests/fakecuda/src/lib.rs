//! A stand-in CUDA driver: programs written for an NVIDIA GPU run on it unchanged, without one.
//!
//! The library has the driver's name and functions. Device memory and kernels are
//! [`quire_ptxsim`]'s, so that a kernel's bad access is found and named; the driver's own rules are
//! checked here, with the driver's error codes.
//!
//! ```text
//! program ─ cudarc ─ dlopen("libcuda.so") ─▶ api ─▶ Driver ─▶ Stream ─ Work ─▶ quire_ptxsim
//!                                                     │ capture ─▶ Graph ──┘
//! test ─ FakeCuda ─ fakecuda_control ────────▶ config, failures, counts, log of launches
//! ```
//!
//! A test takes the driver into its process with [`FakeCuda::load`]; a program finds it in the
//! folder that [`FakeCuda::library_folder`] makes, and is told about it by the environment variables
//! of [`Config`]. The part of cuBLASLt that single products need is in the same library.
//!
//! # What it shows
//! * **Streams are queues.** In the lazy order, the default, work runs only when the driver
//!   guarantees that it has run, and of other streams only what waits between them demand. Copies
//!   to and from page-locked memory touch it when they run. A missing wait, or a staging buffer
//!   that is used again too early, gives a wrong result, always.
//! * **A graph** runs in the order of its dependencies that differs most from that of the capture.
//! * **Whatever the interpreter finds** (bounds, alignment, undefined values, races) is printed
//!   and becomes error 700, which every further call returns.
//! * **Fresh memory is undefined**, on the device and on the host; what of it is copied to the host
//!   is `0xff`. Freed addresses stay unused for long.
//!
//! # What it does not show
//! Anything about time: work of two streams never overlaps, and the clock of events counts pieces
//! of work. Several devices share one address space that all kernels can reach. Memory from
//! `cuMemAllocAsync` is there before the stream comes to it. A host that touches page-locked memory
//! while a copy is under way is found by its results alone. The per-thread default stream, host
//! functions in streams, memory pools, managed memory, child graphs, peers and textures are not
//! there; a program that asks for what is not there finds no symbol, or error 801.

mod api;
mod capture;
mod code;
mod config;
mod control;
mod driver;
mod host;
mod matmul;
mod memory;
mod module;
mod run;
mod stats;
mod stream;
mod work;

pub use config::{Call, Config, Order};
pub use control::FakeCuda;
pub use stats::{Copies, LaunchRecord, Stats};
