//! What streams and graphs hold.

use std::sync::Arc;

use quire_ptxsim::{Arg, Module};

use crate::matmul::Matmul;

/// A kernel of a loaded module.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub module: Arc<Module>,
    pub entry: String,
}

/// A kernel launch, its arguments taken when it was asked for.
#[derive(Debug)]
pub(crate) struct Launch {
    pub function: Function,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory, in bytes.
    pub shared: usize,
    pub args: Vec<Arg>,
}

/// An address in the program's own memory, in a page-locked allocation that is looked up whenever
/// the address is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostAddress(pub usize);

/// Where a copy to the device takes its bytes.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// They are read when the copy runs.
    Pinned(HostAddress),
    /// They were read when it was asked for.
    Staged(Arc<[u8]>),
}

/// A place in a stream: done once the stream has run that many pieces of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    pub stream: u64,
    pub end: u64,
}

/// What a stream runs.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    Kernel(Arc<Launch>),
    CopyIn {
        to: u64,
        from: Source,
        bytes: usize,
    },
    /// To page-locked memory.
    CopyOut {
        to: HostAddress,
        from: u64,
        bytes: usize,
    },
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
    Matmul(Arc<Matmul>),
    /// Repeats the first `width` bytes of `value`, `count` times.
    Fill {
        at: u64,
        value: u32,
        width: usize,
        count: usize,
    },
    /// Gives memory back.
    Free {
        at: u64,
    },
    /// The event with that handle has happened, if its last record is this one.
    Record {
        event: u64,
    },
    /// Nothing after this runs before that.
    Wait(Ticket),
    /// Work without dependencies on each other that its order does not respect.
    Graph(Arc<[Work]>),
}
