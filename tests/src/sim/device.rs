//! The fake device: slots that know what was written to them.

use super::fake::History;
use quire_engine::kv::BlockId;
use quire_engine::ops::BlockTransfers;
use quire_engine::scheduler::{ScheduledSeq, Scheduler, SeqId, StepPlan};
use std::collections::{HashMap, HashSet};

/// What a slot holds: hash of the history up to its position, and the position.
type Slot = Option<(u64, usize)>;

/// A planned sequence with its block table as it was when the plan was made.
#[derive(Clone, Debug)]
struct Row {
    seq: ScheduledSeq,
    num_freed: usize,
    blocks: Vec<BlockId>,
}

/// What is handed to the device when a step is planned.
#[derive(Clone, Debug)]
pub struct Work {
    transfers: BlockTransfers,
    rows: Vec<Row>,
}

impl Work {
    /// Takes all that the device needs of `plan` from the scheduler.
    pub fn new(plan: &StepPlan, scheduler: &Scheduler) -> Self {
        let row = |&seq: &ScheduledSeq| {
            let table = &scheduler.sequence(seq.id).table;
            Row { seq, num_freed: table.num_freed(), blocks: table.blocks().to_vec() }
        };
        let rows = plan.scheduled.iter().map(row).collect();
        Work { transfers: plan.transfers.clone(), rows }
    }
}

/// How far a failing step gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Nothing was done.
    AtOnce,
    /// The transfers were.
    AfterTransfers,
    /// The transfers were, and what the step was to write is garbage.
    WhileWriting,
}

/// KV cache of the device and of the host.
#[derive(Debug)]
pub struct Device {
    slots: Vec<Slot>,
    host: Vec<Slot>,
    block_size: usize,
    window: Option<usize>,
}

impl Device {
    /// A device with the sizes of the scheduler, nothing written.
    pub fn new(scheduler: &Scheduler) -> Self {
        let config = scheduler.config();
        Device {
            slots: vec![None; config.num_blocks * config.block_size],
            host: vec![None; config.num_swap_blocks * config.block_size],
            block_size: config.block_size,
            window: config.window,
        }
    }

    /// Computes a step. Every read is checked against `histories`.
    pub fn execute(&mut self, work: &Work, histories: &HashMap<SeqId, History>) {
        self.transfer(&work.transfers);
        let mut written = HashSet::new();
        for row in &work.rows {
            let history = &histories[&row.seq.id];
            for position in writes(row) {
                let slot = self.slot(row, position);
                assert!(written.insert(slot), "slot {slot} is written twice in a step");
                self.slots[slot] = Some((history.hash(position), position));
            }
        }
        for row in &work.rows {
            let history = &histories[&row.seq.id];
            let first = self.window.map_or(0, |w| (row.seq.start + 1).saturating_sub(w));
            for position in first..end(row) {
                let expected = Some((history.hash(position), position));
                let found = self.slots[self.slot(row, position)];
                assert!(
                    found == expected,
                    "{:?} reads {found:x?} at {position}, not {expected:x?}: {row:?}",
                    row.seq.id
                );
            }
        }
    }

    /// A step that fails on the way.
    pub fn fail(&mut self, work: &Work, how: Failure) {
        if how == Failure::AtOnce {
            return;
        }
        self.transfer(&work.transfers);
        if how == Failure::WhileWriting {
            for row in &work.rows {
                for position in writes(row) {
                    let slot = self.slot(row, position);
                    self.slots[slot] = None;
                }
            }
        }
    }

    fn transfer(&mut self, transfers: &BlockTransfers) {
        let size = self.block_size;
        transfers.check(self.slots.len() / size, self.host.len() / size);
        let range = |block: u32| block as usize * size..(block as usize + 1) * size;
        for &(from, to) in &transfers.swap_out {
            self.host[range(to)].copy_from_slice(&self.slots[range(from)]);
        }
        for &(from, to) in &transfers.swap_in {
            self.slots[range(to)].copy_from_slice(&self.host[range(from)]);
        }
        for &(from, to) in &transfers.copies {
            self.slots.copy_within(range(from), range(to).start);
        }
    }

    fn slot(&self, row: &Row, position: usize) -> usize {
        let entry = position / self.block_size;
        let at = entry.checked_sub(row.num_freed);
        let at = at.unwrap_or_else(|| panic!("position {position} is in a freed block: {row:?}"));
        let block = row.blocks.get(at);
        let block = block.unwrap_or_else(|| panic!("position {position} has no block: {row:?}"));
        block.0 as usize * self.block_size + position % self.block_size
    }
}

fn end(row: &Row) -> usize {
    row.seq.start + row.seq.num_scheduled_tokens
}

fn writes(row: &Row) -> std::ops::Range<usize> {
    row.seq.write_from.max(row.seq.start)..end(row)
}
