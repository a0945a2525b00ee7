//! What must hold after every operation, and how full the cache is.

use super::plan::InFlight;
use super::sequence::{State, SwappedBlock};
use super::{GroupKind, KvUsage, Policy, Scheduler, SeqId};
use crate::kv::BlockId;

impl Scheduler {
    /// How full the KV cache is now. Takes time in proportion to the blocks held.
    pub fn kv_usage(&self) -> KvUsage {
        let block_size = self.config.block_size;
        let mut seen = vec![false; self.pool.num_blocks()];
        let mut num_held = 0;
        let mut first_time = |block: BlockId| {
            let first = !std::mem::replace(&mut seen[block.index()], true);
            num_held += usize::from(first);
            first
        };
        let mut num_live_tokens = 0;
        for seq in self.seqs.iter() {
            for (i, &block) in seq.table.blocks().iter().enumerate() {
                if first_time(block) {
                    let start = (seq.table.num_freed() + i) * block_size;
                    num_live_tokens += seq.kv_len.saturating_sub(start).min(block_size);
                }
            }
        }
        for &block in self.batch.tables().flatten() {
            first_time(block);
        }
        for block in self.seqs.iter().flat_map(swapped_on_device) {
            if first_time(block) {
                num_live_tokens += block_size;
            }
        }
        KvUsage {
            num_blocks: self.pool.num_blocks(),
            num_held,
            num_in_transit: self.pool.num_held() - num_held,
            num_cached_free: self.pool.num_cached_free(),
            num_live_tokens,
            num_wasted_slots: num_held * block_size - num_live_tokens,
            num_swapped: self.host.num_held(),
        }
    }

    /// Asserts every invariant of queues, tables, groups and pools; for tests, after every
    /// operation.
    pub fn check_integrity(&self) {
        self.check_blocks();
        self.check_queues();
        self.check_groups();
        for (id, seq) in self.seqs.iter_with_ids() {
            match &seq.state {
                State::Pending | State::Waiting => {
                    let clean = seq.table.is_empty() && seq.num_computed_tokens == 0;
                    assert!(clean && seq.kv_len == 0, "{id:?} waits with blocks");
                }
                State::Swapped(blocks) => {
                    assert!(seq.table.blocks().is_empty(), "{id:?} is swapped and holds blocks");
                    let used = seq.kv_len.div_ceil(self.config.block_size);
                    assert_eq!(seq.table.num_freed() + blocks.len(), used, "{id:?} swapped");
                }
                State::Running => self.check_running(id),
            }
            assert!(seq.num_tokens() <= self.config.max_model_len, "{id:?} exceeds the context");
        }
    }

    fn check_blocks(&self) {
        let mut tables: Vec<&[BlockId]> = self.seqs.iter().map(|s| s.table.blocks()).collect();
        let on_device: Vec<BlockId> = self.seqs.iter().flat_map(swapped_on_device).collect();
        tables.push(&on_device);
        tables.extend(self.in_flight.iter().map(|step| step.blocks.as_slice()));
        tables.extend(self.batch.tables());
        self.pool.check_integrity(tables.into_iter());

        let on_host: Vec<BlockId> = self.seqs.iter().flat_map(swapped_on_host).collect();
        let in_transit = self.in_flight.iter().map(|step: &InFlight| step.host_blocks.as_slice());
        self.host.check_integrity(std::iter::once(on_host.as_slice()).chain(in_transit));

        let usage = self.kv_usage();
        let free = self.pool.num_free() - usage.num_cached_free;
        let sum = free + usage.num_cached_free + usage.num_held + usage.num_in_transit;
        assert_eq!(sum, usage.num_blocks, "free + cached + held + in transit");
        assert!(usage.num_in_transit == 0 || !self.in_flight.is_empty(), "transit has ended");
    }

    fn check_queues(&self) {
        let pending = self.seqs.iter().filter(|s| s.state == State::Pending).count();
        assert_eq!(self.seqs.len(), self.running.len() + self.waiting.len() + pending);
        assert!(self.running.len() + self.reserved_seats <= self.config.max_num_seqs, "seats");
        let order = |id: &SeqId| self.seqs.get(*id).order;
        assert!(self.running.iter().map(order).is_sorted(), "running is out of order");
        assert!(self.waiting.iter().map(order).is_sorted(), "waiting is out of order");
        let state = |id: &SeqId| &self.seqs.get(*id).state;
        assert!(self.running.iter().all(|id| *state(id) == State::Running));
        let waits = |id| matches!(state(id), State::Waiting | State::Swapped(_));
        assert!(self.waiting.iter().all(waits));
        assert!(self.in_flight.iter().map(|f| f.step).is_sorted(), "steps out of order");
    }

    fn check_groups(&self) {
        let mut reserved = 0;
        for (group_id, group) in &self.groups {
            assert!(!group.members.is_empty(), "an empty group");
            let states = group.members.iter().map(|&id| &self.seqs.get(id).state);
            for &id in &group.members {
                assert_eq!(self.seqs.get(id).group, Some(*group_id));
            }
            match group.kind {
                GroupKind::Samples => {
                    let stuck = states.clone().all(|s| *s == State::Pending);
                    assert!(!stuck, "nobody computes the prompt of {group_id:?}");
                }
                GroupKind::Beams { width } => {
                    let running = states.clone().filter(|s| **s == State::Running).count();
                    let all = running == group.members.len();
                    assert!(all || running == 0, "beams of {group_id:?} were torn apart");
                    let swapped = states.filter(|s| matches!(s, State::Swapped(_))).count();
                    assert!(swapped == 0 || swapped == group.members.len());
                    reserved += if all { width - running } else { 0 };
                }
            }
        }
        assert_eq!(reserved, self.reserved_seats, "seats kept for beams");
        let in_groups = self.groups.values().map(|g| g.members.len()).sum::<usize>();
        let members = self.seqs.iter().filter(|s| s.group.is_some()).count();
        assert_eq!(in_groups, members, "members of groups");
    }

    fn check_running(&self, id: SeqId) {
        let (seq, block_size) = (self.seqs.get(id), self.config.block_size);
        assert!(seq.num_computed_tokens <= seq.kv_len, "{id:?}");
        assert!(seq.kv_len <= seq.table.len() * block_size, "{id:?}: tokens without blocks");
        assert!(seq.kv_len <= seq.num_tokens(), "{id:?}: K and V of tokens that are not there");
        if self.config.policy != Policy::Static {
            let needed = seq.num_tokens().div_ceil(block_size);
            assert!(seq.table.len() <= needed, "{id:?}: more blocks than tokens need");
        }
        assert!(seq.num_published <= seq.table.len(), "{id:?}: published blocks");
        let window = self.config.window.unwrap_or(usize::MAX);
        let first = (seq.num_computed_tokens + 1).saturating_sub(window);
        assert!(seq.table.num_freed() * block_size <= first, "{id:?}: freed what is still seen");
    }
}

fn swapped_on_device(seq: &super::Sequence) -> impl Iterator<Item = BlockId> {
    swapped(seq).filter_map(|entry| match entry {
        SwappedBlock::Device(block) => Some(block),
        SwappedBlock::Host(_) => None,
    })
}

fn swapped_on_host(seq: &super::Sequence) -> impl Iterator<Item = BlockId> {
    swapped(seq).filter_map(|entry| match entry {
        SwappedBlock::Host(block) => Some(block),
        SwappedBlock::Device(_) => None,
    })
}

fn swapped(seq: &super::Sequence) -> impl Iterator<Item = SwappedBlock> {
    let blocks = match &seq.state {
        State::Swapped(blocks) => blocks.as_slice(),
        _ => &[],
    };
    blocks.iter().copied()
}
