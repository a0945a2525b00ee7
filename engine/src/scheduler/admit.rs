//! Taking sequences in: what is found in the cache, what samples take over, what comes back from
//! the host.

use super::plan::StepPlan;
use super::sequence::{Sequence, State, SwappedBlock};
use super::{GroupKind, Scheduler, SeqId, name_blocks};
use crate::kv::{BlockId, BlockTable};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// What of a sequence is there already.
#[derive(Default)]
struct Found {
    /// Blocks to hold as well, after `num_freed` null entries.
    shared: Vec<BlockId>,
    /// Instead: this many blocks of the first beam, whose table is not there yet.
    of_first: usize,
    num_freed: usize,
    /// Tokens found.
    kv_len: usize,
    /// Tokens found in the prefix cache.
    num_cached: usize,
    /// The block after the shared ones, to be copied.
    copy: Option<BlockId>,
    /// The shared blocks are computed when this mate has computed so many tokens.
    waits_for: Option<(SeqId, usize)>,
}

impl Scheduler {
    /// Seats nobody has and no beams wait for.
    pub(super) fn num_free_seats(&self) -> usize {
        self.config.max_num_seqs - self.running.len() - self.reserved_seats
    }

    /// Seats that `id`, first of its unit, takes with it.
    pub(super) fn seats_to_admit(&self, id: SeqId) -> usize {
        match self.seqs.get(id).group.map(|g| self.groups[&g].kind) {
            Some(GroupKind::Beams { width }) => width,
            _ => 1,
        }
    }

    /// Seats that a running unit holds.
    pub(super) fn seats_held(&self, unit: Range<usize>) -> usize {
        self.seats_to_admit(self.running[unit.start])
    }

    /// Admits waiting sequences while seats, budget and blocks last.
    pub(super) fn admit(&mut self, plan: &mut StepPlan, budget: &mut usize) {
        while *budget > 0 {
            let Some(&front) = self.waiting.front() else { return };
            let preempted_now = plan.preempted.iter().any(|&(id, _)| id == front);
            if preempted_now || self.seats_to_admit(front) > self.num_free_seats() {
                return;
            }
            if self.stands_aside(front) {
                self.waiting.pop_front();
                self.seqs.get_mut(front).state = State::Pending;
                continue;
            }
            let unit = self.gang(front);
            if !self.take_in(&unit, plan) {
                if self.running.is_empty() && self.reclaim_swapped(plan) {
                    continue;
                }
                return;
            }
            let members = unit.len();
            self.reserved_seats += self.seats_to_admit(front) - members;
            for &id in &unit {
                let popped = self.waiting.pop_front();
                assert_eq!(popped, Some(id), "beams wait one behind the other");
                self.seat(id);
                let seq = self.seqs.get(id);
                if seq.num_computed_tokens >= seq.prompt_len {
                    self.prompt_is_computed(id);
                }
                let n = self.to_compute(id).min(*budget);
                if n > 0 {
                    *budget -= n;
                    self.push(plan, id, n);
                }
            }
        }
    }

    /// Whether a mate that is running computes the prompt of `id` just now. With a prefix cache
    /// its blocks are shared as they are written; without one it is worth waiting for.
    pub(super) fn stands_aside(&self, id: SeqId) -> bool {
        let seq = self.seqs.get(id);
        let Some(group) = seq.group.filter(|_| self.beams(id).is_none()) else { return false };
        if !matches!(seq.state, State::Waiting) || self.config.prefix_cache.is_some() {
            return false;
        }
        let mut mates = self.groups[&group].members.iter().filter(|&&m| m != id);
        let running = |&&m: &&SeqId| self.seqs.get(m).state == State::Running;
        let computing = |&m: &SeqId| running(&&m) && !self.has_computed_prompt(m);
        mates.clone().any(computing) && !mates.any(|&m| self.holds_prompt(m))
    }

    /// Whether `id` is running and its prompt was computed by earlier steps. One that came back
    /// in the step being planned may have found blocks that this very step fills.
    pub(super) fn has_computed_prompt(&self, id: SeqId) -> bool {
        let (seq, step) = (self.seqs.get(id), self.step + 1);
        seq.state == State::Running
            && seq.seated_in < step
            && seq.computed_before(step) >= seq.prompt_len
    }

    /// Whether the prompt can be taken over from `id`: all of it that its last token sees is
    /// there.
    fn holds_prompt(&self, id: SeqId) -> bool {
        let seq = self.seqs.get(id);
        let window = self.config.window.unwrap_or(usize::MAX);
        let first_seen = seq.prompt_len.saturating_sub(window);
        self.has_computed_prompt(id) && seq.table.num_freed() * self.config.block_size <= first_seen
    }

    /// Free blocks it takes to admit `front`, with all beams of its group, and the blocks in use
    /// that it will share, which others cannot give it.
    pub(super) fn blocks_to_admit(&mut self, front: SeqId) -> (usize, HashSet<BlockId>) {
        let unit = self.gang(front);
        if matches!(self.seqs.get(front).state, State::Swapped(_)) {
            return (self.blocks_to_swap_in(&unit), HashSet::new());
        }
        let found = self.find_unit(&unit);
        let in_use = found[0].shared.iter().filter(|&&block| self.pool.ref_cnt(block) > 0);
        (self.blocks_for(&unit, &found), in_use.copied().collect())
    }

    /// Free blocks that are to be left when `front` joins `num_running` others: one that was
    /// preempted shall not be preempted again at once, for want of a block that the others are
    /// about to need.
    pub(super) fn spare_blocks(&self, front: SeqId, num_running: usize) -> usize {
        match self.seqs.get(front).num_preemptions {
            0 => 0,
            _ => num_running.div_ceil(4),
        }
    }

    /// Gives a unit blocks for all of its tokens. False, and nothing happened: too few are free.
    fn take_in(&mut self, unit: &[SeqId], plan: &mut StepPlan) -> bool {
        let first = self.seqs.get(unit[0]);
        let spare = self.spare_blocks(unit[0], self.running.len());
        if matches!(first.state, State::Swapped(_)) {
            return self.swap_in(unit, spare, plan);
        }
        let found = self.find_unit(unit);
        if self.blocks_for(unit, &found) + spare > self.pool.num_free() {
            return false;
        }
        for (&id, found) in unit.iter().zip(found) {
            self.take_over(id, found, plan);
        }
        true
    }

    /// Free blocks that a unit takes beside what was `found`: fresh ones, and cached ones that
    /// nobody holds.
    fn blocks_for(&self, unit: &[SeqId], found: &[Found]) -> usize {
        let needed = unit.iter().zip(found).map(|(&id, found)| {
            let total = self.seqs.get(id).num_tokens().div_ceil(self.config.block_size);
            let revived = found.shared.iter().filter(|&&b| self.pool.ref_cnt(b) == 0).count();
            total - found.num_freed - found.shared.len() - found.of_first + revived
        });
        needed.sum()
    }

    /// What there is for each member of a unit.
    fn find_unit(&mut self, unit: &[SeqId]) -> Vec<Found> {
        if let &[id] = unit {
            return vec![self.find(id)];
        }
        // Beams take over from the first what they have in common with it; those that have less
        // see more of it, so it is taken from the start.
        let mut all = vec![self.find_cached(unit[0], None)];
        for &id in &unit[1..] {
            let (first, seq) = (self.seqs.get(unit[0]), self.seqs.get(id));
            let common = first.tokens.iter().zip(&seq.tokens).take_while(|(a, b)| a == b).count();
            let blocks = common.min(seq.tokens.len() - 1) / self.config.block_size;
            let kv_len = blocks * self.config.block_size;
            all.push(Found {
                of_first: blocks,
                kv_len,
                waits_for: (blocks > 0).then_some((unit[0], kv_len)),
                ..Found::default()
            });
        }
        all
    }

    /// What there is for one sequence: in the prefix cache, or with a mate, whichever is more.
    fn find(&mut self, id: SeqId) -> Found {
        let cached = self.find_cached(id, self.config.window);
        let seq = self.seqs.get(id);
        let Some(group) = seq.group.filter(|_| self.beams(id).is_none()) else { return cached };
        let block_size = self.config.block_size;
        let mates = &self.groups[&group].members;
        let mate = mates.iter().find(|&&mate| mate != id && self.holds_prompt(mate));
        match mate {
            Some(&mate) if seq.prompt_len > cached.kv_len && !seq.skip_cache => {
                let table = &self.seqs.get(mate).table;
                let (blocks, num_freed) = (table.blocks(), table.num_freed());
                let full = seq.prompt_len / block_size - num_freed;
                Found {
                    shared: blocks[..full].to_vec(),
                    num_freed,
                    kv_len: seq.prompt_len,
                    num_cached: cached.num_cached,
                    copy: (!seq.prompt_len.is_multiple_of(block_size)).then(|| blocks[full]),
                    ..Found::default()
                }
            }
            _ => cached,
        }
    }

    /// The longest prefix of full blocks in the cache. With a window, of a longer one the last
    /// `window − 1` tokens are enough.
    fn find_cached(&mut self, id: SeqId, window: Option<usize>) -> Found {
        let block_size = self.config.block_size;
        let Some(hasher) = &self.config.prefix_cache else { return Found::default() };
        let seq = self.seqs.get_mut(id);
        if seq.skip_cache || seq.root.is_none() {
            return Found::default();
        }
        let full = seq.tokens.len() / block_size;
        name_blocks(hasher, seq, full, block_size);
        let hits = seq.hashes[..full].iter().map(|hash| self.pool.find(hash));
        let Some(window) = window else {
            let shared: Vec<BlockId> = hits.map_while(|hit| hit).collect();
            return Found::cached(0, shared, block_size);
        };
        let hits: Vec<Option<BlockId>> = hits.collect();
        // How many hits in a row end before each block; the longest prefix with enough of them.
        let (mut run, mut best) = (0, None);
        for end in 1..=full {
            run = if hits[end - 1].is_some() { run + 1 } else { 0 };
            // The next token is computed at `end`; where that is all there is, at one before.
            let next = (end * block_size).min(seq.num_tokens() - 1);
            let first = (next + 1).saturating_sub(window) / block_size;
            if first + run >= end {
                best = Some(first.min(end)..end);
            }
        }
        let Some(best) = best else { return Found::default() };
        let shared = hits[best.clone()].iter().copied().flatten().collect();
        Found::cached(best.start, shared, block_size)
    }

    /// Gives `id` what was found and fresh blocks for the rest, which are there.
    fn take_over(&mut self, id: SeqId, found: Found, plan: &mut StepPlan) {
        let block_size = self.config.block_size;
        let mut shared = found.shared;
        if let Some((first, _)) = found.waits_for {
            shared.extend(&self.seqs.get(first).table.blocks()[..found.of_first]);
        }
        let seq = self.seqs.get_mut(id);
        let num_tokens = seq.num_tokens();
        seq.table = BlockTable::with_freed(found.num_freed);
        for &block in &shared {
            self.pool.share(block);
            seq.table.blocks_mut().push(block);
        }
        seq.num_published = seq.table.len();
        let fresh = num_tokens.div_ceil(block_size) - seq.table.len();
        let taken = self.pool.allocate(fresh, seq.table.blocks_mut());
        assert!(taken, "counted before");
        if let Some(source) = found.copy {
            let copy = seq.table.get(seq.num_published).expect("a fresh block");
            plan.transfers.copies.push((source.0, copy.0));
            self.stats.num_block_copies += 1;
        }
        seq.kv_len = found.kv_len;
        seq.num_computed_tokens = found.kv_len.min(num_tokens - 1);
        seq.waits_for = found.waits_for;
        if self.config.prefix_cache.is_some() && !seq.skip_cache {
            self.stats.prefix_queries += seq.tokens.len() as u64;
            self.stats.prefix_hits += found.num_cached as u64;
        }
        if seq.seated_in == 0 {
            seq.num_cached_tokens = found.num_cached.min(num_tokens - 1);
        }
        self.stats.num_forks += u64::from(found.kv_len > found.num_cached);
    }

    /// Free blocks it takes to bring a swapped unit back.
    fn blocks_to_swap_in(&self, unit: &[SeqId]) -> usize {
        let mut distinct = HashSet::new();
        let mut needed = 0;
        for &id in unit {
            let seq = self.seqs.get(id);
            let swapped = swapped_blocks(seq);
            let full = self.full_blocks(seq);
            for (i, entry) in swapped.iter().enumerate() {
                if let SwappedBlock::Host(host) = *entry {
                    needed += usize::from(i >= full || distinct.insert(host));
                }
            }
            let total = seq.num_tokens().div_ceil(self.config.block_size);
            needed += total - seq.table.num_freed() - swapped.len();
        }
        needed
    }

    /// Blocks of `seq`, after the freed ones, that are full: they can be shared. The one after
    /// them is written next, by each beam its own.
    fn full_blocks(&self, seq: &Sequence) -> usize {
        seq.kv_len / self.config.block_size - seq.table.num_freed()
    }

    /// Copies a swapped unit's blocks back. False, and nothing happened: too few are free.
    fn swap_in(&mut self, unit: &[SeqId], spare: usize, plan: &mut StepPlan) -> bool {
        if self.blocks_to_swap_in(unit) + spare > self.pool.num_free() {
            return false;
        }
        let mut block_of: HashMap<BlockId, BlockId> = HashMap::new();
        for &id in unit {
            let full = self.full_blocks(self.seqs.get(id));
            let seq = self.seqs.get_mut(id);
            let State::Swapped(swapped) = std::mem::replace(&mut seq.state, State::Waiting) else {
                unreachable!("a unit is swapped as a whole");
            };
            for (i, entry) in swapped.iter().enumerate() {
                let host = match *entry {
                    SwappedBlock::Device(block) => {
                        seq.table.blocks_mut().push(block);
                        continue;
                    }
                    SwappedBlock::Host(host) => host,
                };
                if let Some(&block) = block_of.get(&host).filter(|_| i < full) {
                    self.pool.retain(block);
                    seq.table.blocks_mut().push(block);
                    // The step under way keeps one hold, until it has copied.
                    self.host.release(host);
                    continue;
                }
                let taken = self.pool.allocate(1, seq.table.blocks_mut());
                assert!(taken, "counted above");
                let block = *seq.table.blocks().last().expect("just taken");
                block_of.insert(host, block);
                plan.transfers.swap_in.push((host.0, block.0));
                self.stats.num_blocks_swapped_in += 1;
            }
            // The blocks that came back have no name; those after them will get one.
            seq.num_published = seq.table.len().min(seq.kv_len / self.config.block_size);
            let total = seq.num_tokens().div_ceil(self.config.block_size);
            let fresh = total - seq.table.len();
            let taken = self.pool.allocate(fresh, seq.table.blocks_mut());
            assert!(taken, "counted above");
        }
        true
    }
}

impl Found {
    fn cached(num_freed: usize, shared: Vec<BlockId>, block_size: usize) -> Self {
        let kv_len = (num_freed + shared.len()) * block_size;
        Found { shared, num_freed, kv_len, num_cached: kv_len, ..Found::default() }
    }
}

fn swapped_blocks(seq: &Sequence) -> &[SwappedBlock] {
    match &seq.state {
        State::Swapped(blocks) => blocks,
        _ => unreachable!("a unit is swapped as a whole"),
    }
}
