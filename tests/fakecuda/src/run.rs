//! Running a piece of work.

use quire_ptxsim::{Options, SimError};

use crate::code::{self, Code, Result};
use crate::driver::Driver;
use crate::matmul::Matmul;
use crate::stats::{Copies, LaunchRecord};
use crate::work::{Launch, Source, Work};

impl Driver {
    /// Runs one piece of work, all that it waits for being done. An error is the end of its
    /// context.
    pub fn run(&mut self, stream: u64, work: Work) -> Result {
        match work {
            Work::Graph(works) => {
                self.stats.graph_launches += 1;
                works.iter().try_for_each(|work| self.run_one(work, stream, true))
            }
            work => self.run_one(&work, stream, false),
        }
    }

    fn run_one(&mut self, work: &Work, stream: u64, in_graph: bool) -> Result {
        self.clock += 1;
        let null = self.config.null;
        match *work {
            Work::Kernel(ref launch) => {
                self.stats.launches += 1;
                if null { Ok(()) } else { self.run_kernel(launch, in_graph) }
            }
            Work::Matmul(ref matmul) => {
                self.stats.matmuls += 1;
                if null { Ok(()) } else { self.run_matmul(matmul, in_graph) }
            }
            Work::CopyIn { to, ref from, bytes } => {
                count(&mut self.stats.copies_htod, bytes);
                if null { Ok(()) } else { self.copy_in(to, from, bytes) }
            }
            Work::CopyOut { to, from, bytes } => {
                count(&mut self.stats.copies_dtoh, bytes);
                if null {
                    return Ok(());
                }
                let mut data = vec![0; bytes];
                self.memory.read_lossy(from, &mut data).map_err(report)?;
                self.write_pinned(to, &data)
            }
            Work::Copy { to, from, bytes } => {
                count(&mut self.stats.copies_dtod, bytes);
                if null { Ok(()) } else { self.memory.copy(to, from, bytes).map_err(report) }
            }
            Work::Fill { at, value, width, count } => {
                self.stats.memsets += 1;
                let pattern = &value.to_le_bytes()[..width];
                if null {
                    return Ok(());
                }
                self.memory.fill(at, pattern, width * count).map_err(report)
            }
            Work::Free { at } => {
                self.give_back(at);
                Ok(())
            }
            Work::Record { event } => {
                self.happen(event, stream);
                Ok(())
            }
            Work::Wait(ticket) => {
                assert!(self.is_done(ticket), "work runs only when what it waits for is done");
                Ok(())
            }
            Work::Graph(_) => unreachable!("a graph holds no graph"),
        }
    }

    /// The record of an event that has run last in `stream`: the event has happened, unless it was
    /// recorded again.
    fn happen(&mut self, event: u64, stream: u64) {
        let clock = self.clock;
        let Some(event) = self.events.get_mut(&event) else { return };
        let Some(ticket) = event.recorded.filter(|ticket| ticket.stream == stream) else { return };
        let state = &self.streams[&stream];
        if state.enqueued - state.queue.len() as u64 == ticket.end {
            event.time = Some(clock);
        }
    }

    fn run_kernel(&mut self, launch: &Launch, in_graph: bool) -> Result {
        let Launch { ref function, grid, block, shared, ref args } = *launch;
        let entry = &function.entry;
        let run = quire_ptxsim::Launch { entry, grid, block, dynamic_shared: shared, args };
        let options = Options::default();
        let profile = quire_ptxsim::launch(&function.module, &run, &mut self.memory, &options);
        let profile = profile.map_err(report)?;
        if let Some(log) = &mut self.log {
            log.push(LaunchRecord::new(launch, &profile, in_graph));
        }
        Ok(())
    }

    fn run_matmul(&mut self, matmul: &Matmul, in_graph: bool) -> Result {
        matmul.run(&mut self.memory).map_err(report)?;
        if let Some(log) = &mut self.log {
            log.push(LaunchRecord::of_matmul(matmul, in_graph));
        }
        Ok(())
    }

    fn copy_in(&mut self, to: u64, from: &Source, bytes: usize) -> Result {
        match from {
            Source::Staged(data) => self.memory.write(to, data).map_err(report),
            Source::Pinned(address) => {
                let data = self.read_pinned(*address, bytes)?;
                self.memory.write(to, &data).map_err(report)
            }
        }
    }
}

fn count(copies: &mut Copies, bytes: usize) {
    copies.count += 1;
    copies.bytes += bytes as u64;
}

/// Tells what went wrong, which the driver's code does not, and how the driver calls it.
fn report(error: SimError) -> Code {
    eprintln!("fakecuda: {error}");
    match error {
        SimError::Launch { .. } => code::LAUNCH_FAILED,
        SimError::Host(_) | SimError::Fault(_) => code::ILLEGAL_ADDRESS,
    }
}
