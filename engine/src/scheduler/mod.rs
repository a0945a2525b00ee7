//! Token-level continuous batching over KV blocks.
//!
//! There is no prefill phase and decode phase: a sequence has `num_tokens` and
//! `num_computed_tokens`, and each step gives it `num_scheduled_tokens` under
//! `max_num_batched_tokens` and `max_num_seqs`.
//!
//! ```text
//!             ┌──────────── tokens ────────────┐
//!  sequence:  │ computed │ scheduled │ to come │      a step computes `scheduled`; when it
//!             └──────────┴───────────┴─────────┘      reaches the last token it also samples
//!  blocks:    [ 3 ][ 7 ][ 1 ][ 4 ]                    table covers computed + scheduled
//! ```
//!
//! Policy, first come first served by arrival:
//! 1. running sequences with one token to compute (decodes), then those with more (partial
//!    prefills), each in arrival order;
//! 2. when a running sequence needs a block and none is free, the latest arrival among the running
//!    is preempted: its blocks go back and it is computed anew later;
//! 3. waiting sequences, in arrival order, while there is a seat, budget, and blocks for **all**
//!    tokens of the first one. Its blocks are taken at once, so that what was admitted can be
//!    computed; nothing is admitted in a step that preempted.
//!
//! The oldest running sequence is never preempted for another, and the pool holds at least one
//! sequence of the greatest length, so every step makes progress.

mod sequence;

pub use sequence::{FinishReason, SeqId, Sequence, StopRules};

use crate::kv::{BlockId, BlockPool};
use sequence::Slab;
use std::collections::VecDeque;

/// Limits of the scheduler; all at least 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Sequences in one step.
    pub max_num_seqs: usize,
    /// Tokens in one step, over all sequences.
    pub max_num_batched_tokens: usize,
    /// Tokens of one sequence, prompt and output.
    pub max_model_len: usize,
    /// Tokens a KV block holds.
    pub block_size: usize,
    /// KV blocks in the pool.
    pub num_blocks: usize,
}

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduledSeq {
    /// The sequence.
    pub id: SeqId,
    /// First token to compute: `num_computed_tokens` before the step.
    pub start: usize,
    /// Tokens to compute, at least 1.
    pub num_scheduled_tokens: usize,
    /// The step reaches the last token, so a new one is sampled.
    pub samples: bool,
}

/// What a step does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// In batch order.
    pub scheduled: Vec<ScheduledSeq>,
    /// Sequences that gave up their blocks to make room.
    pub preempted: Vec<SeqId>,
}

impl StepPlan {
    /// Tokens in the step.
    pub fn num_tokens(&self) -> usize {
        self.scheduled.iter().map(|s| s.num_scheduled_tokens).sum()
    }
}

/// Why a sequence can never run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// No tokens to compute.
    #[error("the prompt is empty and the tokenizer adds no BOS token")]
    EmptyPrompt,
    /// Prompt and output do not fit the context.
    #[error(
        "prompt has {prompt} tokens and max_tokens is {max_tokens}; together {} exceed the \
         context of {limit} tokens", .prompt.saturating_add(*.max_tokens)
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens asked for; at least one.
        max_tokens: usize,
        /// `max_model_len`.
        limit: usize,
    },
}

/// The scheduler: queues of sequences and the block pool they draw from.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    pool: BlockPool,
    seqs: Slab,
    /// Arrival order.
    waiting: VecDeque<SeqId>,
    /// Arrival order.
    running: Vec<SeqId>,
    num_preemptions: u64,
    next_arrival: u64,
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
            config,
            seqs: Slab::default(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            num_preemptions: 0,
            next_arrival: 0,
        }
    }

    /// The limits in force.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// The block pool, for counters.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Sequences waiting for admission.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences holding blocks.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Preemptions since the start.
    pub fn num_preemptions(&self) -> u64 {
        self.num_preemptions
    }

    /// A live sequence.
    pub fn sequence(&self, id: SeqId) -> &Sequence {
        self.seqs.get(id)
    }

    /// Adds a sequence at the end of the queue. `max_tokens` beyond the context, or a prompt
    /// that leaves no room for one token, is refused.
    pub fn add(&mut self, prompt: Vec<u32>, rules: StopRules) -> Result<SeqId, AdmissionError> {
        if prompt.is_empty() {
            return Err(AdmissionError::EmptyPrompt);
        }
        let max_tokens = rules.max_tokens.max(1);
        if prompt.len().saturating_add(max_tokens) > self.config.max_model_len {
            let limit = self.config.max_model_len;
            return Err(AdmissionError::TooLong { prompt: prompt.len(), max_tokens, limit });
        }
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        let id = self.seqs.insert(Sequence::new(prompt, rules, arrival));
        self.waiting.push_back(id);
        Ok(id)
    }

    /// Plans a step. An empty plan means that nothing is left to do. A plan is answered by
    /// [`Scheduler::update`] or dropped; the next one then has the same tokens again.
    pub fn schedule(&mut self, plan: &mut StepPlan) {
        plan.scheduled.clear();
        plan.preempted.clear();
        let mut budget = self.config.max_num_batched_tokens;
        self.schedule_running(plan, &mut budget, |remaining| remaining == 1);
        self.schedule_running(plan, &mut budget, |remaining| remaining > 1);
        if plan.preempted.is_empty() {
            self.admit(plan, &mut budget);
        }
        assert!(
            !plan.scheduled.is_empty() || (self.running.is_empty() && self.waiting.is_empty()),
            "a step without progress: {} running, {} waiting, {} blocks free",
            self.running.len(),
            self.waiting.len(),
            self.pool.num_free()
        );
    }

    /// Schedules the running sequences whose count of uncomputed tokens `class` accepts.
    fn schedule_running(
        &mut self,
        plan: &mut StepPlan,
        budget: &mut usize,
        class: fn(usize) -> bool,
    ) {
        let mut i = 0;
        // `running` shrinks from the end when a victim is taken.
        while i < self.running.len() && *budget > 0 {
            let id = self.running[i];
            i += 1;
            let remaining = self.seqs.get(id).num_uncomputed();
            if !class(remaining) {
                continue;
            }
            let n = remaining.min(*budget);
            if self.grow(id, n, plan) {
                *budget -= n;
                self.push(plan, id, n);
            }
        }
    }

    /// Gives `id` blocks for `n` more tokens, preempting later arrivals while there are too few.
    /// False: `id` was itself the latest and is now waiting.
    fn grow(&mut self, id: SeqId, n: usize, plan: &mut StepPlan) -> bool {
        loop {
            let seq = self.seqs.get_mut(id);
            let end = seq.num_computed_tokens + n;
            let missing = end.div_ceil(self.config.block_size).saturating_sub(seq.blocks.len());
            if self.pool.allocate(missing, &mut seq.blocks) {
                return true;
            }
            let victim = *self.running.last().expect("id is running");
            self.preempt(victim, plan);
            if victim == id {
                return false;
            }
        }
    }

    /// Takes all blocks of the last running sequence and puts it back at the head of the queue:
    /// whatever runs arrived before whatever waits. Only decodes need blocks while running, and
    /// they are planned in arrival order, so a victim is never part of the plan yet.
    fn preempt(&mut self, victim: SeqId, plan: &mut StepPlan) {
        let popped = self.running.pop();
        assert_eq!(popped, Some(victim), "victims come from the end");
        debug_assert!(plan.scheduled.iter().all(|s| s.id != victim), "the victim is planned");
        let seq = self.seqs.get_mut(victim);
        self.pool.release_table(&mut seq.blocks);
        seq.num_computed_tokens = 0;
        seq.num_preemptions += 1;
        self.num_preemptions += 1;
        self.waiting.push_front(victim);
        plan.preempted.push(victim);
    }

    /// Admits waiting sequences while seat, budget and blocks last.
    fn admit(&mut self, plan: &mut StepPlan, budget: &mut usize) {
        while *budget > 0 && self.running.len() < self.config.max_num_seqs {
            let Some(&id) = self.waiting.front() else { return };
            let seq = self.seqs.get_mut(id);
            let blocks = seq.tokens.len().div_ceil(self.config.block_size);
            if !self.pool.allocate(blocks, &mut seq.blocks) {
                return;
            }
            let n = seq.num_uncomputed().min(*budget);
            self.waiting.pop_front();
            self.running.push(id);
            *budget -= n;
            self.push(plan, id, n);
        }
    }

    fn push(&self, plan: &mut StepPlan, id: SeqId, num_scheduled_tokens: usize) {
        let seq = self.seqs.get(id);
        let start = seq.num_computed_tokens;
        plan.scheduled.push(ScheduledSeq {
            id,
            start,
            num_scheduled_tokens,
            samples: start + num_scheduled_tokens == seq.tokens.len(),
        });
    }

    /// Records a computed step: `sampled` holds one token for each planned sequence with
    /// `samples`, in plan order. Appends the sequences that ended to `finished`; they still
    /// hold their blocks until [`Scheduler::finish`].
    pub fn update(
        &mut self,
        plan: &StepPlan,
        sampled: impl IntoIterator<Item = u32>,
        finished: &mut Vec<(SeqId, FinishReason)>,
    ) {
        let mut sampled = sampled.into_iter();
        for s in &plan.scheduled {
            let seq = self.seqs.get_mut(s.id);
            assert_eq!(seq.num_computed_tokens, s.start, "plan is stale");
            seq.num_computed_tokens += s.num_scheduled_tokens;
            if s.samples {
                let token = sampled.next().expect("one token for each sampling sequence");
                seq.tokens.push(token);
                if let Some(reason) = seq.finish_reason() {
                    finished.push((s.id, reason));
                }
            }
        }
        assert!(sampled.next().is_none(), "more tokens than sampling sequences");
    }

    /// Ends a sequence (finished, stopped by text, failed or aborted): its blocks go back and
    /// it is returned. Not between `schedule` and `update`.
    pub fn finish(&mut self, id: SeqId) -> Sequence {
        let mut seq = self.seqs.remove(id);
        self.pool.release_table(&mut seq.blocks);
        if let Some(at) = self.running.iter().position(|&r| r == id) {
            self.running.remove(at);
        } else {
            let at = self.waiting.iter().position(|&w| w == id).expect("running or waiting");
            self.waiting.remove(at);
        }
        seq
    }

    /// Asserts every invariant of queues, tables and pool; for tests, after every operation.
    pub fn check_integrity(&self) {
        let tables: Vec<&[BlockId]> = self.seqs.iter().map(|s| s.blocks.as_slice()).collect();
        self.pool.check_integrity(tables.into_iter());
        assert_eq!(self.seqs.len(), self.running.len() + self.waiting.len());
        assert!(self.running.len() <= self.config.max_num_seqs);
        let arrival = |&id: &SeqId| self.seqs.get(id).arrival;
        assert!(self.running.iter().map(arrival).is_sorted(), "running is not by arrival");
        assert!(self.waiting.iter().map(arrival).is_sorted(), "waiting is not by arrival");
        for &id in &self.waiting {
            let seq = self.seqs.get(id);
            assert!(seq.blocks.is_empty() && seq.num_computed_tokens == 0, "waiting with blocks");
        }
        for &id in &self.running {
            let seq = self.seqs.get(id);
            let covered = seq.blocks.len() * self.config.block_size;
            assert!(seq.num_computed_tokens <= covered, "computed tokens without blocks");
            let needed = seq.tokens.len().div_ceil(self.config.block_size);
            assert!(seq.blocks.len() <= needed, "more blocks than tokens need");
            assert!(seq.num_computed_tokens < seq.tokens.len(), "nothing left to compute");
            assert!(seq.tokens.len() <= self.config.max_model_len, "longer than the context");
        }
    }
}
