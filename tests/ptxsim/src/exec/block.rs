//! One block: each warp runs to the next barrier, then all go on together.

use super::Machine;
use super::warp::{Stop, Warp};
use crate::error::{Fault, FaultKind};
use crate::program::Kernel;

pub(super) struct Block {
    warps: Vec<Warp>,
    /// The order in which warps run between barriers.
    order: Vec<u32>,
}

impl Block {
    pub fn new(kernel: &Kernel, order: Vec<u32>) -> Self {
        Block { warps: (0..order.len()).map(|index| Warp::new(kernel, index)).collect(), order }
    }

    /// Runs block number `index` of the grid.
    pub fn run(&mut self, machine: &mut Machine<'_>, index: u32) -> Result<(), Box<Fault>> {
        machine.shared.reset();
        self.warps.iter_mut().for_each(Warp::reset);
        let mut stops = vec![Stop::Exited; self.warps.len()];
        loop {
            for &warp in &self.order {
                stops[warp as usize] = self.warps[warp as usize].run(machine, index)?;
            }
            if stops.iter().all(|&stop| stop == Stop::Exited) {
                return Ok(());
            }
            if let Some((warp, reason)) = diverged(machine.kernel, &stops) {
                let kind = FaultKind::DivergentBarrier { reason };
                return Err(self.warps[warp].fault(machine, index, None, kind));
            }
            machine.shared.barrier();
            self.warps.iter_mut().for_each(Warp::pass_barrier);
        }
    }
}

/// A warp at a barrier and why it waits in vain.
fn diverged(kernel: &Kernel, stops: &[Stop]) -> Option<(usize, String)> {
    let waiting = |stop: &Stop| matches!(stop, Stop::Barrier(_));
    let warp = stops.iter().position(waiting)?;
    let (other, stop) = stops.iter().enumerate().find(|(_, stop)| **stop != stops[warp])?;
    let reason = match stop {
        Stop::Exited => format!("warp {other} has exited"),
        Stop::Barrier(pc) => format!("warp {other} waits at line {}", kernel.code[*pc].line),
    };
    Some((warp, reason))
}
