//! What the driver counts.

use std::collections::HashMap;

use quire_ptxsim::Profile;
use serde::{Deserialize, Serialize};

use crate::code::{Code, Result};
use crate::config::{Call, Failure};
use crate::matmul::Matmul;
use crate::work::Launch;

/// Copies in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copies {
    /// How many have run.
    pub count: u64,
    /// Bytes that they moved.
    pub bytes: u64,
}

/// Counts since the last reset: what is alive, and what has run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Allocations of device memory.
    pub allocations: u64,
    /// Allocations of device memory that were not given back.
    pub live_allocations: u64,
    /// Their bytes, as asked for.
    pub live_bytes: u64,
    /// The most that `live_bytes` was.
    pub peak_bytes: u64,
    /// Allocations of page-locked host memory that were not given back.
    pub live_pinned: u64,
    /// Their bytes.
    pub live_pinned_bytes: u64,
    /// Streams, the default one not counted.
    pub live_streams: u64,
    /// Events.
    pub live_events: u64,
    /// Modules.
    pub live_modules: u64,
    /// Graphs and executable graphs.
    pub live_graphs: u64,
    /// Objects of cuBLASLt.
    pub live_blas: u64,
    /// Kernels, those in graphs included.
    pub launches: u64,
    /// Products of cuBLASLt, those in graphs included.
    pub matmuls: u64,
    /// Launches of graphs.
    pub graph_launches: u64,
    /// Copies from the host.
    pub copies_htod: Copies,
    /// Copies to the host.
    pub copies_dtoh: Copies,
    /// Copies within the device.
    pub copies_dtod: Copies,
    /// Memsets.
    pub memsets: u64,
    /// Waits for a stream, an event or the context.
    pub synchronisations: u64,
    /// Calls that failed because they were told to.
    pub failures: u64,
}

/// One kernel that has run, or one product of cuBLASLt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchRecord {
    /// Name of the kernel, or `cublasLtMatmul`, which has no shape.
    pub entry: String,
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    /// Dynamic shared memory, in bytes.
    pub shared: usize,
    /// Whether a graph launched it.
    pub in_graph: bool,
    /// Floating-point operations.
    pub flops: u64,
    /// Warp instructions.
    pub warp_instructions: u64,
    /// Bytes that lanes asked to read from global memory.
    pub read_bytes: u64,
    /// Bytes that lanes asked to write to global memory.
    pub written_bytes: u64,
    /// Bytes of the 32-byte sectors that are read, counted once a block.
    pub read_footprint_bytes: u64,
    /// Bytes of the 32-byte sectors that are written, counted once a block.
    pub written_footprint_bytes: u64,
}

impl LaunchRecord {
    pub(crate) fn new(launch: &Launch, profile: &Profile, in_graph: bool) -> Self {
        LaunchRecord {
            entry: launch.function.entry.clone(),
            grid: launch.grid,
            block: launch.block,
            shared: launch.shared,
            in_graph,
            flops: profile.flops,
            warp_instructions: profile.warp_instructions(),
            read_bytes: profile.global.read_bytes,
            written_bytes: profile.global.written_bytes,
            read_footprint_bytes: 32 * profile.global.read_footprint,
            written_footprint_bytes: 32 * profile.global.written_footprint,
        }
    }

    pub(crate) fn of_matmul(matmul: &Matmul, in_graph: bool) -> Self {
        LaunchRecord {
            entry: "cublasLtMatmul".into(),
            grid: [0; 3],
            block: [0; 3],
            shared: 0,
            in_graph,
            flops: matmul.flops(),
            warp_instructions: 0,
            read_bytes: matmul.read_bytes(),
            written_bytes: matmul.written_bytes(),
            read_footprint_bytes: matmul.read_bytes(),
            written_footprint_bytes: matmul.written_bytes(),
        }
    }
}

/// Failures that were asked for and are to come.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    due: HashMap<Call, Vec<Failure>>,
}

impl Failures {
    pub fn add(&mut self, failure: Failure) {
        self.due.entry(failure.call).or_default().push(failure);
    }

    /// Counts a call, which fails where one was asked for.
    pub fn check(&mut self, call: Call) -> Result {
        let Some(due) = self.due.get_mut(&call) else { return Ok(()) };
        due.iter_mut().for_each(|failure| failure.nth -= 1);
        let found = due.iter().position(|failure| failure.nth == 0);
        let failed = found.map(|found| Code(due.swap_remove(found).code));
        // Of two failures of one call, the other one hits the next.
        due.iter_mut().for_each(|failure| failure.nth = failure.nth.max(1));
        if due.is_empty() {
            self.due.remove(&call);
        }
        failed.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_call_of_a_kind_fails_once() {
        let mut failures = Failures::default();
        for (nth, code) in [(3, 2), (3, 700), (1, 1)] {
            failures.add(Failure { call: Call::Alloc, nth, code });
        }
        let outcomes: Vec<i32> = (0..6)
            .map(|_| {
                failures.check(Call::Copy).expect("no failure of copies");
                failures.check(Call::Alloc).map_or_else(|code| code.0, |()| 0)
            })
            .collect();
        assert_eq!(outcomes, [1, 0, 2, 700, 0, 0]);
    }
}
