//! Static batching, the baseline: see [`Policy::Static`](super::Policy::Static).

use super::Scheduler;
use super::plan::StepPlan;
use super::sequence::State;
use crate::kv::BlockId;

/// The batch that is running.
#[derive(Debug, Default)]
pub(super) struct StaticBatch {
    /// Tokens of prompts padded to the longest that are still to be computed.
    padding: usize,
    /// Blocks of members that have ended: reserved until the last one has.
    ended: Vec<Vec<BlockId>>,
}

impl StaticBatch {
    pub(super) fn keep(&mut self, blocks: Vec<BlockId>) {
        self.ended.push(blocks);
    }

    pub(super) fn tables(&self) -> impl Iterator<Item = &[BlockId]> {
        self.ended.iter().map(Vec::as_slice)
    }
}

impl Scheduler {
    /// Whether sequences that have ended still wait for the rest of a static batch.
    pub fn static_batch_is_open(&self) -> bool {
        !self.batch.ended.is_empty()
    }

    pub(super) fn schedule_static(&mut self, plan: &mut StepPlan, mut budget: usize) {
        if self.running.is_empty() {
            self.take_static_batch();
        }
        // All prompts first, padded to the longest, in pieces of the budget.
        for i in 0..self.running.len() {
            let id = self.running[i];
            let seq = self.seqs.get(id);
            let n = seq.prompt_len.saturating_sub(seq.num_computed_tokens).min(budget);
            if n > 0 {
                budget -= n;
                self.push(plan, id, n);
            }
        }
        plan.num_padding_tokens = self.batch.padding.min(budget);
        self.batch.padding -= plan.num_padding_tokens;
        // Then a token each; members that have ended are computed like the others.
        if plan.is_empty() {
            for i in 0..self.running.len().min(budget) {
                let id = self.running[i];
                if self.to_compute(id) > 0 {
                    self.push(plan, id, 1);
                }
            }
            if !plan.is_empty() {
                budget -= plan.num_tokens();
                plan.num_padding_rows = self.batch.ended.len().min(budget);
            }
        }
        self.stats.num_padding_tokens += (plan.num_padding_tokens + plan.num_padding_rows) as u64;
    }

    /// Admits the next batch: every member reserves the greatest length.
    fn take_static_batch(&mut self) {
        let blocks = self.config.max_model_len.div_ceil(self.config.block_size);
        while let Some(&id) = self.waiting.front() {
            let seq = self.seqs.get_mut(id);
            if self.running.len() == self.config.max_num_seqs
                || !self.pool.allocate(blocks, seq.table.blocks_mut())
            {
                break;
            }
            seq.state = State::Running;
            self.waiting.pop_front();
            self.running.push(id);
        }
        let lens = self.running.iter().map(|&id| self.seqs.get(id).prompt_len);
        let longest = lens.clone().max().unwrap_or(0);
        self.batch.padding = lens.map(|len| longest - len).sum();
    }

    /// Frees what ended members of the batch had reserved, once the last one has ended.
    pub(super) fn close_static_batch(&mut self) {
        if self.running.is_empty() {
            self.batch.padding = 0;
            for mut blocks in std::mem::take(&mut self.batch.ended) {
                self.pool.release_all(&mut blocks);
            }
        }
    }
}
