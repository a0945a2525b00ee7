//! Token-level continuous batching over KV blocks.
//!
//! There is no prefill phase and decode phase: a sequence has `num_tokens` and
//! `num_computed_tokens`, and each step gives it `num_scheduled_tokens` under
//! `max_num_batched_tokens` and `max_num_seqs`.
//!
//! ```text
//!             ┌───────────────── tokens ─────────────────┐
//!  sequence:  │ found or computed │ scheduled │ to come  │  a step computes `scheduled`; when it
//!             └───────────────────┴───────────┴──────────┘  reaches the last token it samples
//!  table:     [ 3 ][ 7 ][ 1 ][ 4 ]                          covers found + computed + scheduled
//! ```
//!
//! # Order
//! 1. Running sequences with one token to compute (decodes), then those with more (partial
//!    prefills), each in order of arrival, or of priority and age.
//! 2. When a running sequence needs a block and none is free, the last of the running is
//!    preempted ([`Preemption`]) and waits in its old place.
//! 3. Waiting sequences while there is a seat, budget, and blocks for **all** tokens of the first
//!    one. Its blocks are taken at once, so that what was admitted can be computed; nothing is
//!    admitted in a step that ran short of blocks, and one that was preempted before comes back
//!    only with some blocks to spare for its mates.
//!
//! The first of the running is never preempted for want of blocks, and the pool holds at least
//! one sequence of the greatest length, so every step makes progress.
//!
//! # Steps under way
//! [`Scheduler::schedule`] may run ahead of [`Scheduler::update`]: tokens that steps under way
//! will sample count as placeholders. Plans are executed in the order they were made, so a block
//! may be taken from one sequence and given to another within a plan. A sequence that ends while
//! a step computes it leaves at once; its blocks are in transit until that step is updated. A
//! step that fails takes all steps under way with it ([`Scheduler::cancel`]): their sequences
//! wait again, and what they would have written is forgotten.

mod admit;
mod beams;
mod config;
mod error;
mod integrity;
mod plan;
mod preempt;
mod running;
mod sequence;
mod static_batch;
mod stats;

pub use config::{DEFAULT_AGING_STEPS, Policy, Preemption, PreemptionCosts, SchedulerConfig};
pub use error::AdmissionError;
pub use plan::{PreemptionKind, ScheduledSeq, StepPlan};
pub use sequence::{FinishReason, NewSequence, SeqId, Sequence, StopRules};
pub use stats::{KvUsage, SchedulerStats};

use crate::kv::{BlockId, BlockPool, CacheScope, PrefixHasher};
use plan::InFlight;
use sequence::{Order, Slab, State};
use static_batch::StaticBatch;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;

/// Identifies the samples or beams of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct GroupId(u64);

/// Sequences of one request.
#[derive(Debug)]
struct Group {
    members: Vec<SeqId>,
    kind: GroupKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GroupKind {
    /// Samples of one prompt: the first computes it, the others take it over.
    Samples,
    /// Beams: admitted, preempted and advanced together. This many seats are theirs.
    Beams { width: usize },
}

/// The scheduler: queues of sequences and the block pools they draw from.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    pool: BlockPool,
    /// Blocks in host memory.
    host: BlockPool,
    seqs: Slab,
    groups: HashMap<GroupId, Group>,
    /// In order.
    waiting: VecDeque<SeqId>,
    /// In order.
    running: Vec<SeqId>,
    /// Seats kept for beams that are not there yet.
    reserved_seats: usize,
    /// Groups whose prompt is computed while samples of it still stand aside.
    woken: Vec<GroupId>,
    /// Beams that got copies in the step being planned, whether it computes them or not.
    copied: Vec<SeqId>,
    /// Host blocks that the step being planned fills for nothing.
    given_up: Vec<BlockId>,
    in_flight: VecDeque<InFlight>,
    batch: StaticBatch,
    /// Steps planned.
    step: u64,
    next_arrival: u64,
    stats: SchedulerStats,
}

impl Scheduler {
    /// An idle scheduler. The pool must hold a sequence of `max_model_len`.
    pub fn new(config: SchedulerConfig) -> Self {
        let capacity = config.num_blocks * config.block_size;
        assert!(config.max_num_seqs >= 1 && config.max_num_batched_tokens >= 1);
        assert!(
            config.max_model_len <= capacity,
            "max_model_len {} exceeds the pool of {capacity} tokens",
            config.max_model_len
        );
        Scheduler {
            pool: BlockPool::new(config.num_blocks),
            host: BlockPool::new(config.num_swap_blocks),
            config,
            seqs: Slab::default(),
            groups: HashMap::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            reserved_seats: 0,
            woken: Vec::new(),
            copied: Vec::new(),
            given_up: Vec::new(),
            in_flight: VecDeque::new(),
            batch: StaticBatch::default(),
            step: 0,
            next_arrival: 0,
            stats: SchedulerStats::default(),
        }
    }

    /// The limits in force.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Changes how many tokens a step may have, at least 1.
    pub fn set_max_num_batched_tokens(&mut self, tokens: usize) {
        assert!(tokens >= 1);
        self.config.max_num_batched_tokens = tokens;
    }

    /// Changes what preemption does.
    pub fn set_preemption(&mut self, preemption: Preemption) {
        self.config.preemption = preemption;
    }

    /// The block pool, for counters.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Sequences waiting for admission, samples that stand aside included.
    pub fn num_waiting(&self) -> usize {
        self.seqs.len() - self.running.len()
    }

    /// Sequences holding a seat.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Counters.
    pub fn stats(&self) -> SchedulerStats {
        self.stats
    }

    /// A live sequence.
    pub fn sequence(&self, id: SeqId) -> &Sequence {
        self.seqs.get(id)
    }

    /// Whether `id` has not ended.
    pub fn is_live(&self, id: SeqId) -> bool {
        self.seqs.contains(id)
    }

    /// Forgets all cached prefixes: nothing computed so far, or from now on by sequences that
    /// live, is shared with later ones. What is shared already stays shared.
    pub fn reset_prefix_cache(&mut self) {
        self.pool.reset_cache();
        for seq in self.seqs.iter_mut() {
            seq.root = None;
        }
    }

    /// Whether `id` holds a seat.
    pub fn is_running(&self, id: SeqId) -> bool {
        self.seqs.get(id).state == State::Running
    }

    /// Whether `id` waits for a seat and blocks; not so a sample that waits for another one to
    /// compute their prompt.
    pub fn is_queued(&self, id: SeqId) -> bool {
        matches!(self.seqs.get(id).state, State::Waiting | State::Swapped(_))
    }

    /// Adds `n` samples of a prompt at their place in the queue. The prompt is computed once, as
    /// long as one that has computed it runs or the prefix cache holds it, and stored once for
    /// all that run. `max_tokens` beyond the context, or a prompt that leaves no room for one
    /// token, is refused.
    pub fn add(&mut self, new: NewSequence, n: usize) -> Result<Vec<SeqId>, AdmissionError> {
        assert!(n >= 1, "a request has samples");
        self.check_length(&new)?;
        let first = self.next_arrival;
        let mut ids = Vec::with_capacity(n);
        for _ in 1..n {
            ids.push(self.insert(new.clone()));
        }
        ids.push(self.insert(new));
        if n > 1 {
            let group = GroupId(first);
            for (i, &id) in ids.iter().enumerate() {
                let seq = self.seqs.get_mut(id);
                seq.group = Some(group);
                if i > 0 {
                    seq.state = State::Pending;
                }
            }
            let kind = GroupKind::Samples;
            self.groups.insert(group, Group { members: ids.clone(), kind });
        }
        self.enqueue(ids[0]);
        Ok(ids)
    }

    fn check_length(&self, new: &NewSequence) -> Result<(), AdmissionError> {
        let (prompt, limit) = (new.prompt.len(), self.config.max_model_len);
        if prompt == 0 {
            return Err(AdmissionError::EmptyPrompt);
        }
        let max_tokens = new.rules.max_tokens.max(1);
        if prompt.saturating_add(max_tokens) > limit {
            return Err(AdmissionError::TooLong { prompt, max_tokens, limit });
        }
        Ok(())
    }

    /// Makes a sequence; it is in no queue yet.
    fn insert(&mut self, new: NewSequence) -> SeqId {
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        let key = match self.config.policy {
            Policy::Priority { aging_steps } => {
                i64::from(new.priority) * i64::from(aging_steps) + self.step as i64
            }
            Policy::Fcfs | Policy::Static => 0,
        };
        let scope = CacheScope { adapter: None, salt: new.cache_salt.as_deref() };
        let root = self.config.prefix_cache.as_ref().map(|hasher| hasher.root(scope));
        self.seqs.insert(Sequence::new(new, root, Order { key, arrival }))
    }

    /// Puts `id` at its place in the queue. Its state is the caller's.
    fn enqueue(&mut self, id: SeqId) {
        let order = self.seqs.get(id).order;
        let at = self.waiting.partition_point(|&w| self.seqs.get(w).order <= order);
        self.waiting.insert(at, id);
    }

    fn seat(&mut self, id: SeqId) {
        let order = self.seqs.get(id).order;
        let at = self.running.partition_point(|&r| self.seqs.get(r).order <= order);
        self.running.insert(at, id);
        let seq = self.seqs.get_mut(id);
        seq.state = State::Running;
        seq.seated_in = self.step + 1;
    }

    /// The beams that `list[i]` belongs to, or it alone.
    fn unit(&self, list: &[SeqId], i: usize) -> Range<usize> {
        let Some(group) = self.beams(list[i]) else { return i..i + 1 };
        let same = |&&id: &&SeqId| self.seqs.get(id).group == Some(group);
        let before = list[..i].iter().rev().take_while(same).count();
        let after = list[i..].iter().take_while(same).count();
        i - before..i + after
    }

    /// All beams of the request of `id`, or it alone.
    fn gang(&self, id: SeqId) -> Vec<SeqId> {
        match self.beams(id) {
            Some(group) => self.groups[&group].members.clone(),
            None => vec![id],
        }
    }

    /// The group of `id`, if it is a beam.
    fn beams(&self, id: SeqId) -> Option<GroupId> {
        let group = self.seqs.get(id).group?;
        matches!(self.groups[&group].kind, GroupKind::Beams { .. }).then_some(group)
    }

    /// Plans a step. An empty plan means that nothing can be computed before a step under way is
    /// updated, or at all. Every other plan is answered by [`Scheduler::update`], in order, or by
    /// [`Scheduler::cancel`].
    pub fn schedule(&mut self, plan: &mut StepPlan) {
        plan.clear(self.step + 1);
        self.copied.clear();
        self.wake_samples();
        let mut budget = self.config.max_num_batched_tokens;
        if self.config.policy == Policy::Static {
            self.schedule_static(plan, budget);
        } else {
            self.preempt_for_urgent(plan);
            let short = self.schedule_decodes(plan, &mut budget);
            self.schedule_prefills(plan, &mut budget);
            if !short {
                self.admit(plan, &mut budget);
            }
        }
        if plan.is_empty() {
            let parked = |&id: &SeqId| self.beams(id).is_some();
            let waits = self.running.iter().all(parked) && !self.running.is_empty();
            assert!(
                !self.in_flight.is_empty() || waits || self.seqs.len() == 0,
                "a step without progress: {} running, {} waiting, {} blocks free",
                self.running.len(),
                self.waiting.len(),
                self.pool.num_free()
            );
            return;
        }
        self.step = plan.step;
        let swapped = plan.preempted.iter().filter(|p| p.1 == PreemptionKind::Swap).map(|p| p.0);
        let scheduled = plan.scheduled.iter().map(|s| s.id);
        let seqs = scheduled.chain(swapped).chain(self.copied.drain(..)).collect();
        let mut host_blocks = std::mem::take(&mut self.given_up);
        host_blocks.extend(plan.transfers.swap_in.iter().map(|pair| BlockId(pair.0)));
        self.in_flight.push_back(InFlight {
            step: plan.step,
            seqs,
            blocks: Vec::new(),
            host_blocks,
        });
    }

    /// Tokens of `id` that can be planned now.
    fn to_compute(&self, id: SeqId) -> usize {
        let seq = self.seqs.get(id);
        match seq.waits_for {
            Some((mate, tokens)) if self.seqs.get(mate).num_computed_tokens < tokens => 0,
            _ => seq.num_uncomputed(),
        }
    }

    fn push(&mut self, plan: &mut StepPlan, id: SeqId, num_scheduled_tokens: usize) {
        let seq = self.seqs.get_mut(id);
        let start = seq.num_computed_tokens;
        let end = start + num_scheduled_tokens;
        let samples = end == seq.num_tokens();
        let write_from = seq.kv_len.max(start);
        plan.scheduled.push(ScheduledSeq { id, start, num_scheduled_tokens, write_from, samples });
        seq.last_planned = (plan.step, start);
        seq.num_computed_tokens = end;
        seq.kv_len = seq.kv_len.max(end);
        seq.num_pending += usize::from(samples);
        if (start..end).contains(&(seq.prompt_len - 1)) {
            self.prompt_is_computed(id);
        }
        self.publish(id, plan.step);
    }

    /// Samples of the same request may follow in the next step.
    fn prompt_is_computed(&mut self, id: SeqId) {
        let group = self.seqs.get(id).group.filter(|group| self.woken.last() != Some(group));
        self.woken.extend(group);
    }

    /// Names the full blocks of `id` whose tokens are known. `step` is the latest that writes
    /// them.
    fn publish(&mut self, id: SeqId, step: u64) {
        let Some(hasher) = &self.config.prefix_cache else { return };
        let seq = self.seqs.get_mut(id);
        if seq.state != State::Running || seq.root.is_none() {
            return;
        }
        let full = seq.kv_len.min(seq.tokens.len()) / self.config.block_size;
        if full <= seq.num_published {
            return;
        }
        name_blocks(hasher, seq, full, self.config.block_size);
        for i in seq.num_published..full {
            if let Some(block) = seq.table.get(i) {
                self.pool.publish(block, seq.hashes[i], step);
            }
        }
        seq.num_published = full;
    }

    /// Lets the samples of a prompt that is computed now join the queue.
    fn wake_samples(&mut self) {
        for group in std::mem::take(&mut self.woken) {
            let Some(Group { members, kind: GroupKind::Samples }) = self.groups.get(&group) else {
                continue;
            };
            if members.iter().any(|&id| self.has_computed_prompt(id)) {
                self.wake(group, usize::MAX);
            }
        }
    }

    /// Lets the first `count` samples that stand aside join the queue.
    fn wake(&mut self, group: GroupId, count: usize) {
        let members = self.groups[&group].members.iter().copied();
        let pending = members.filter(|&id| self.seqs.get(id).state == State::Pending);
        for id in pending.take(count).collect::<Vec<_>>() {
            self.seqs.get_mut(id).state = State::Waiting;
            self.enqueue(id);
        }
    }

    /// Records the oldest step under way: `sampled` holds one token for each planned sequence
    /// with `samples`, in plan order, also for those that have ended meanwhile. Appends the
    /// sequences that ended to `finished`; they still hold their blocks until
    /// [`Scheduler::finish`]. The tokens of beams come with [`Scheduler::advance_beams`].
    pub fn update(
        &mut self,
        plan: &StepPlan,
        sampled: impl IntoIterator<Item = u32>,
        finished: &mut Vec<(SeqId, FinishReason)>,
    ) {
        let mut done = self.in_flight.pop_front().expect("a step is under way");
        assert_eq!(done.step, plan.step, "steps are updated in order");
        self.pool.steps_written(plan.step);
        self.pool.release_all(&mut done.blocks);
        self.host.release_all(&mut done.host_blocks);
        let mut sampled = sampled.into_iter();
        for s in plan.scheduled.iter().filter(|s| s.samples) {
            let token = sampled.next().expect("one token for each sampling sequence");
            if !self.seqs.contains(s.id) || self.beams(s.id).is_some() {
                continue;
            }
            let seq = self.seqs.get_mut(s.id);
            seq.num_pending -= 1;
            seq.tokens.push(token);
            if let Some(reason) = seq.finish_reason() {
                finished.push((s.id, reason));
            }
        }
        assert!(sampled.next().is_none(), "more tokens than sampling sequences");
    }

    /// Takes back all steps under way, as one of them failed: their sequences are computed anew
    /// as far as the prefix cache does not hold what earlier steps wrote.
    pub fn cancel(&mut self) {
        while let Some(mut step) = self.in_flight.pop_back() {
            self.stats.num_cancelled_steps += 1;
            self.pool.release_all(&mut step.blocks);
            self.host.release_all(&mut step.host_blocks);
            for id in step.seqs {
                if self.seqs.contains(id) {
                    self.restart(id);
                }
            }
        }
        self.pool.withdraw_unwritten();
        self.close_static_batch();
    }

    /// Ends a sequence (finished, stopped by text, failed or aborted) and returns it. Its blocks
    /// are free when this returns, or, where steps under way compute it, when those are updated.
    pub fn finish(&mut self, id: SeqId) -> Sequence {
        self.publish(id, self.step);
        if self.in_flight.is_empty() {
            self.pool.steps_written(self.step);
        }
        let mut seq = self.seqs.remove(id);
        let (mut blocks, mut host_blocks) = seq.take_blocks();
        match &seq.state {
            State::Running => {
                let at = self.running.iter().position(|&r| r == id).expect("running");
                self.running.remove(at);
            }
            State::Waiting | State::Swapped(_) => {
                // Beams are of one order, so it is there or a little behind.
                let before = |&w: &SeqId| w != id && self.seqs.get(w).order < seq.order;
                let from = self.waiting.partition_point(before);
                let ahead = self.waiting.iter().skip(from).position(|&w| w == id);
                self.waiting.remove(from + ahead.expect("waiting"));
            }
            State::Pending => {}
        }
        self.leave_group(id, &seq);
        if self.config.policy == Policy::Static && seq.state == State::Running {
            self.batch.keep(blocks);
        } else if let Some(step) = self.in_flight.iter_mut().rfind(|f| f.seqs.contains(&id)) {
            self.stats.num_ended_in_flight += 1;
            step.blocks.append(&mut blocks);
            step.host_blocks.append(&mut host_blocks);
        } else {
            self.pool.release_all(&mut blocks);
            self.host.release_all(&mut host_blocks);
        }
        self.close_static_batch();
        seq
    }

    /// Takes an ended sequence out of its group. If it was to compute the prompt for others, the
    /// next of them does.
    fn leave_group(&mut self, id: SeqId, seq: &Sequence) {
        let Some(group_id) = seq.group else { return };
        let group = self.groups.get_mut(&group_id).expect("the group of a live sequence");
        group.members.retain(|&m| m != id);
        if group.members.is_empty() {
            let group = self.groups.remove(&group_id).expect("just seen");
            if let GroupKind::Beams { width } = group.kind
                && seq.state == State::Running
            {
                self.reserved_seats -= width - 1;
            }
            return;
        }
        if let GroupKind::Beams { .. } = group.kind {
            // The seat stays the group's until the last beam leaves.
            self.reserved_seats += usize::from(seq.state == State::Running);
            return;
        }
        let mut members = self.groups[&group_id].members.iter();
        if members.all(|&id| self.seqs.get(id).state == State::Pending) {
            // With a prefix cache, all of them find what it has computed.
            let computed = seq.kv_len >= seq.prompt_len && seq.root.is_some() && !seq.skip_cache;
            self.wake(group_id, if computed { usize::MAX } else { 1 });
        }
    }
}

/// Names the first `count` blocks of `seq`.
fn name_blocks(hasher: &PrefixHasher, seq: &mut Sequence, count: usize, block_size: usize) {
    let root = seq.root.expect("a sequence whose blocks are named");
    let mut parent = seq.hashes.last().copied().unwrap_or(root);
    for i in seq.hashes.len()..count {
        parent = hasher.link(&parent, &seq.tokens[i * block_size..(i + 1) * block_size]);
        seq.hashes.push(parent);
    }
}
