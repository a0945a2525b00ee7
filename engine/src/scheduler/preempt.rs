//! Giving blocks up: victims, swapping out, starting anew.

use super::plan::{PreemptionKind, StepPlan};
use super::sequence::{State, SwappedBlock};
use super::{GroupKind, Policy, Preemption, Scheduler, SeqId};
use crate::kv::{BlockId, BlockTable};
use std::collections::HashMap;
use std::ops::Range;

impl Scheduler {
    /// Takes the blocks of the last unit of the running, which goes back to its place in the
    /// queue. `recompute`: what it holds is of no use. Only decodes need blocks while running,
    /// and they are planned in order, so a victim is never part of the plan yet.
    pub(super) fn preempt(&mut self, unit: Range<usize>, plan: &mut StepPlan, recompute: bool) {
        assert_eq!(unit.end, self.running.len(), "victims come from the end");
        let ids = self.running.split_off(unit.start);
        // Beams that are computed anew are compared anew.
        let beams = self.beams(ids[0]).is_some();
        self.release_reserved_seats(ids[0]);
        for &id in &ids {
            debug_assert!(plan.scheduled.iter().all(|s| s.id != id), "the victim is planned");
            self.publish(id, plan.step);
        }
        let swapped = !recompute && self.swap_out(&ids, plan);
        let kind = if swapped { PreemptionKind::Swap } else { PreemptionKind::Recompute };
        for &id in ids.iter().rev() {
            let seq = self.seqs.get_mut(id);
            seq.num_preemptions += 1;
            if !swapped {
                self.pool.release_all(&mut seq.table.split_off(0));
                seq.restart();
                seq.state = State::Waiting;
                if beams {
                    seq.num_pending = 0;
                }
            }
        }
        for &id in &ids {
            self.enqueue(id);
            plan.preempted.push((id, kind));
        }
        let count = match kind {
            PreemptionKind::Recompute => &mut self.stats.num_preempted_recompute,
            PreemptionKind::Swap => &mut self.stats.num_preempted_swap,
        };
        *count += ids.len() as u64;
    }

    /// Gives back the seats kept for beams to come, if `id` is a running beam.
    fn release_reserved_seats(&mut self, id: SeqId) {
        if let Some(group) = self.beams(id) {
            let group = &self.groups[&group];
            if let GroupKind::Beams { width } = group.kind {
                self.reserved_seats -= width - group.members.len();
            }
        }
    }

    /// Copies what only `ids` hold to the host, where the policy says so and there is room.
    /// False: nothing happened.
    fn swap_out(&mut self, ids: &[SeqId], plan: &mut StepPlan) -> bool {
        if self.config.preemption == Preemption::Recompute {
            return false;
        }
        // Times that each block with content is held by this unit.
        let mut held: HashMap<BlockId, u32> = HashMap::new();
        let mut num_tokens = 0;
        for &id in ids {
            let (seq, used) = (self.seqs.get(id), self.used_blocks(id));
            // Beams that were sampled are to be compared, which they are while running only.
            if seq.num_pending > 0 && self.beams(id).is_some() {
                return false;
            }
            // A mate's blocks that no step has computed yet hold nothing to keep.
            if seq.waits_for.is_some_and(|(m, n)| self.seqs.get(m).num_computed_tokens < n) {
                return false;
            }
            num_tokens += seq.kv_len;
            for &block in &seq.table.blocks()[..used] {
                *held.entry(block).or_default() += 1;
            }
        }
        held.retain(|&block, count| self.pool.ref_cnt(block) == *count);
        match self.config.preemption {
            Preemption::Auto(costs) if !costs.prefers_swap(num_tokens, held.len()) => return false,
            _ => {}
        }
        if num_tokens == 0 || held.len() > self.host.num_free() {
            self.stats.num_swap_fallbacks += u64::from(num_tokens > 0);
            return false;
        }
        let mut host_of: HashMap<BlockId, BlockId> = HashMap::new();
        for &id in ids {
            let used = self.used_blocks(id);
            let seq = self.seqs.get_mut(id);
            let num_freed = seq.table.num_freed();
            let mut blocks = seq.table.split_off(0);
            // Blocks taken for tokens that are not computed yet hold nothing.
            self.pool.release_all(&mut blocks.split_off(used));
            let mut swapped = Vec::with_capacity(used);
            for &block in &blocks {
                if !held.contains_key(&block) {
                    swapped.push(SwappedBlock::Device(block));
                    continue;
                }
                let host = match host_of.get(&block) {
                    Some(&host) => {
                        self.host.retain(host);
                        host
                    }
                    None => {
                        let mut taken = Vec::with_capacity(1);
                        assert!(self.host.allocate(1, &mut taken), "counted above");
                        plan.transfers.swap_out.push((block.0, taken[0].0));
                        self.stats.num_blocks_swapped_out += 1;
                        host_of.insert(block, taken[0]);
                        taken[0]
                    }
                };
                swapped.push(SwappedBlock::Host(host));
            }
            blocks.retain(|block| held.contains_key(block));
            self.pool.release_all(&mut blocks);
            seq.table = BlockTable::with_freed(num_freed);
            seq.state = State::Swapped(swapped);
        }
        true
    }

    /// Blocks of `id`, after the freed ones, that hold tokens.
    fn used_blocks(&self, id: SeqId) -> usize {
        let seq = self.seqs.get(id);
        seq.kv_len.div_ceil(self.config.block_size) - seq.table.num_freed()
    }

    /// Takes back the blocks that the last of the swapped sequences left in the pool, as others
    /// held them then; it is computed anew. False: none did.
    pub(super) fn reclaim_swapped(&mut self, plan: &StepPlan) -> bool {
        if self.config.preemption == Preemption::Recompute {
            return false;
        }
        let on_device = |&&id: &&SeqId| match &self.seqs.get(id).state {
            State::Swapped(blocks) => blocks.iter().any(|b| matches!(b, SwappedBlock::Device(_))),
            _ => false,
        };
        let Some(&id) = self.waiting.iter().rev().find(on_device) else { return false };
        self.give_up_swapped(id, plan);
        true
    }

    /// Makes a swapped sequence one that is computed anew. Beams come back together or not at
    /// all, so all of them are.
    fn give_up_swapped(&mut self, id: SeqId, plan: &StepPlan) {
        for id in self.gang(id) {
            let seq = self.seqs.get_mut(id);
            let (mut blocks, mut host_blocks) = seq.take_blocks();
            self.pool.release_all(&mut blocks);
            // The copy to the host may be part of this very plan, or under way.
            if plan.preempted.iter().any(|&(victim, _)| victim == id) {
                self.given_up.append(&mut host_blocks);
            } else if let Some(step) = self.in_flight.iter_mut().rfind(|f| f.seqs.contains(&id)) {
                step.host_blocks.append(&mut host_blocks);
            } else {
                self.host.release_all(&mut host_blocks);
            }
            seq.restart();
            seq.state = State::Waiting;
        }
    }

    /// Puts `id`, which a cancelled step was to compute or copy, back into the queue without
    /// blocks; with it all beams of its group.
    pub(super) fn restart(&mut self, id: SeqId) {
        let mut release_seats = true;
        for id in self.gang(id) {
            if self.seqs.get(id).state == State::Running {
                if std::mem::take(&mut release_seats) {
                    self.release_reserved_seats(id);
                }
                let at = self.running.iter().position(|&r| r == id).expect("running");
                self.running.remove(at);
                self.enqueue(id);
            }
            let seq = self.seqs.get_mut(id);
            let (mut blocks, mut host_blocks) = seq.take_blocks();
            self.pool.release_all(&mut blocks);
            self.host.release_all(&mut host_blocks);
            seq.restart();
            seq.num_pending = 0;
            // One that stands aside meanwhile, as a sample whose swapped blocks were taken back
            // may, is in no queue.
            if seq.state != State::Pending {
                seq.state = State::Waiting;
            }
        }
    }

    /// With priorities: preempts the last of the running where a more urgent request waits for
    /// their seats or blocks, and only as far as that lets it in.
    pub(super) fn preempt_for_urgent(&mut self, plan: &mut StepPlan) {
        if !matches!(self.config.policy, Policy::Priority { .. }) {
            return;
        }
        let Some(&front) = self.waiting.front() else { return };
        if self.stands_aside(front) {
            return;
        }
        let (needed, shared) = self.blocks_to_admit(front);
        let seats = self.seats_to_admit(front);
        let urgent = self.seqs.get(front);
        let (priority, order) = (urgent.priority, urgent.order);
        let (mut free_blocks, mut free_seats) = (self.pool.num_free(), self.num_free_seats());
        let mut given: HashMap<BlockId, u32> = HashMap::new();
        let mut victims = Vec::new();
        let mut end = self.running.len();
        while free_blocks < needed + self.spare_blocks(front, end) || free_seats < seats {
            if end == 0 {
                return;
            }
            let unit = self.unit(&self.running, end - 1);
            let victim = self.seqs.get(self.running[unit.start]);
            // Equals wait for one another, or they would take turns in preempting each other.
            if victim.priority <= priority || victim.order <= order {
                return;
            }
            end = unit.start;
            free_seats += self.seats_held(unit.clone());
            // What one unit shares with another stays where it is when they are swapped.
            if self.config.preemption != Preemption::Recompute {
                given.clear();
            }
            for &id in &self.running[unit.clone()] {
                for &block in self.seqs.get(id).table.blocks() {
                    let count = given.entry(block).or_default();
                    *count += 1;
                    let comes_free = *count == self.pool.ref_cnt(block) && !shared.contains(&block);
                    free_blocks += usize::from(comes_free);
                }
            }
            victims.push(unit);
        }
        // Those before it come first, and may leave nothing of the step.
        let others: usize = self.running[..end].iter().map(|&id| self.to_compute(id)).sum();
        if others < self.config.max_num_batched_tokens {
            for unit in victims {
                self.preempt(unit, plan, false);
            }
        }
    }
}
