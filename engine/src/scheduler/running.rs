//! The running: their tokens of a step, and the blocks these are written to.

use super::plan::StepPlan;
use super::{Scheduler, SeqId};
use crate::kv::BlockId;
use std::ops::Range;

impl Scheduler {
    /// Schedules the running sequences that have one token to compute; whether blocks ran short.
    pub(super) fn schedule_decodes(&mut self, plan: &mut StepPlan, budget: &mut usize) -> bool {
        let mut short = false;
        let mut i = 0;
        // `running` shrinks from the end when a victim is taken.
        while i < self.running.len() && *budget > 0 {
            let unit = self.unit(&self.running, i);
            i = unit.end;
            let preempted = plan.preempted.len();
            let room = self.make_room(unit.clone(), plan);
            short |= plan.preempted.len() > preempted || !room;
            if !room {
                continue;
            }
            for k in unit {
                let id = self.running[k];
                if *budget > 0 && self.to_compute(id) == 1 {
                    *budget -= 1;
                    self.push(plan, id, 1);
                }
            }
        }
        short
    }

    /// Schedules the running sequences with more to compute; their blocks are theirs already.
    pub(super) fn schedule_prefills(&mut self, plan: &mut StepPlan, budget: &mut usize) {
        for i in 0..self.running.len() {
            let id = self.running[i];
            let n = self.to_compute(id);
            if n > 1 && *budget > 0 {
                self.free_window(id);
                let n = n.min(*budget);
                *budget -= n;
                self.push(plan, id, n);
            }
        }
    }

    /// Gives the decodes of a unit the blocks they write to, preempting later units while there
    /// are too few. False: they cannot be computed now. Either blocks in transit will do soon,
    /// or the unit was itself the last and is waiting now.
    fn make_room(&mut self, unit: Range<usize>, plan: &mut StepPlan) -> bool {
        let num_copies = plan.transfers.copies.len();
        for k in unit.clone() {
            let id = self.running[k];
            if self.to_compute(id) != 1 {
                continue;
            }
            self.free_window(id);
            while !self.grow(id, 1, plan) {
                let comes_free = |&block: &BlockId| self.pool.ref_cnt(block) == 1;
                if self.in_flight.iter().any(|step| step.blocks.iter().any(comes_free)) {
                    return false;
                }
                if self.reclaim_swapped(plan) {
                    continue;
                }
                let last = self.unit(&self.running, self.running.len() - 1);
                if last.start == unit.start {
                    // Copies into blocks that are given back are not made; what they were to
                    // hold is computed anew.
                    let copied = plan.transfers.copies.len() > num_copies;
                    plan.transfers.copies.truncate(num_copies);
                    self.preempt(last, plan, copied);
                    return false;
                }
                self.preempt(last, plan, false);
            }
        }
        true
    }

    /// Gives `id` blocks for `n` more tokens, copying the one it writes to if others hold it
    /// too; false, and nothing happened: too few are free.
    fn grow(&mut self, id: SeqId, n: usize, plan: &mut StepPlan) -> bool {
        let block_size = self.config.block_size;
        let seq = self.seqs.get_mut(id);
        let end = seq.num_computed_tokens + n;
        let missing = end.div_ceil(block_size).saturating_sub(seq.table.len());
        let first = seq.kv_len / block_size;
        let shared = (first < seq.table.len() && seq.kv_len < end)
            .then(|| seq.table.get(first).expect("a block that is written is not freed"))
            .filter(|&block| self.pool.ref_cnt(block) > 1);
        let copies = usize::from(shared.is_some());
        if missing + copies > self.pool.num_free() {
            return false;
        }
        let taken = self.pool.allocate(missing, seq.table.blocks_mut());
        assert!(taken, "counted above");
        if let Some(source) = shared {
            let mut copy = Vec::with_capacity(1);
            let taken = self.pool.allocate(1, &mut copy);
            assert!(taken, "counted above");
            seq.table.replace(first, copy[0]);
            self.pool.release(source);
            plan.transfers.copies.push((source.0, copy[0].0));
            self.copied.push(id);
            self.stats.num_block_copies += 1;
        }
        true
    }

    /// Frees the blocks that every token still to come is past.
    fn free_window(&mut self, id: SeqId) {
        let Some(window) = self.config.window else { return };
        let seq = self.seqs.get_mut(id);
        let first_seen = (seq.num_computed_tokens + 1).saturating_sub(window);
        let before = first_seen / self.config.block_size;
        // Cached as they are, they may be found again: the earliest is the first to be reused.
        for block in seq.table.free_before(before) {
            self.pool.release(block);
            self.stats.num_window_freed += 1;
        }
    }
}
