//! Counters of an engine, as plain structs.

use crate::ops::ForwardInput;
use crate::scheduler::SchedulerStats;
use std::time::{Duration, Instant};

/// Where the time of steps went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Planning.
    pub schedule: Duration,
    /// Building the input.
    pub prepare: Duration,
    /// Copying blocks.
    pub transfer: Duration,
    /// Hidden states and logits.
    pub forward: Duration,
    /// Choosing tokens.
    pub sample: Duration,
    /// Applying the results: detokenising, stop checks, outputs.
    pub output: Duration,
}

impl StepTimes {
    /// All of it.
    pub fn total(&self) -> Duration {
        self.parts().iter().map(|part| part.1).sum()
    }

    /// Each part with its name, in the order of a step.
    pub fn parts(&self) -> [(&'static str, Duration); 6] {
        [
            ("schedule", self.schedule),
            ("prepare", self.prepare),
            ("transfer", self.transfer),
            ("forward", self.forward),
            ("sample", self.sample),
            ("output", self.output),
        ]
    }
}

/// What steps computed, padding included. Windows are not taken into account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// Tokens.
    pub tokens: u64,
    /// Rows of logits.
    pub logit_rows: u64,
    /// Keys of the sequences, each counted once a step.
    pub read_keys: u64,
    /// Pairs of a token and a key it sees.
    pub attended_keys: u64,
}

impl StepWork {
    /// The work of one step.
    pub fn of(input: &ForwardInput) -> Self {
        let mut work = StepWork {
            tokens: input.num_tokens() as u64,
            logit_rows: input.logits_indices.len() as u64,
            ..StepWork::default()
        };
        for (starts, &keys) in input.query_start_loc.windows(2).zip(&input.seq_lens) {
            let (tokens, keys) = (i64::from(starts[1] - starts[0]), i64::from(keys));
            work.read_keys += keys as u64;
            // The last token sees all keys, each one before it one less.
            work.attended_keys += (tokens * keys - tokens * (tokens - 1) / 2) as u64;
        }
        work
    }

    fn add(&mut self, other: &StepWork) {
        let StepWork { tokens, logit_rows, read_keys, attended_keys } = other;
        self.tokens += tokens;
        self.logit_rows += logit_rows;
        self.read_keys += read_keys;
        self.attended_keys += attended_keys;
    }
}

/// Counters since the engine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Steps computed.
    pub num_steps: u64,
    /// Tokens computed, recomputed ones included, padding not.
    pub num_computed_tokens: u64,
    /// Tokens sampled.
    pub num_generated_tokens: u64,
    /// Most KV blocks held at once.
    pub peak_blocks: usize,
    /// Bytes copied to the host and back.
    pub swap_bytes: u64,
    /// What steps computed.
    pub work: StepWork,
    /// What the scheduler counts.
    pub scheduler: SchedulerStats,
    /// Where the time went.
    pub times: StepTimes,
}

/// A struct of this type whose fields, all of them, are those of `$now` less those of `$before`.
macro_rules! differences {
    ($type:ident { $($field:ident),* }, $now:expr, $before:expr) => {
        $type { $($field: $now.$field - $before.$field),* }
    };
}

impl EngineStats {
    /// Counts a step of `tokens` that the plan asked for.
    pub(crate) fn count_step(&mut self, tokens: usize, input: &ForwardInput) {
        self.num_steps += 1;
        self.num_computed_tokens += tokens as u64;
        self.work.add(&StepWork::of(input));
    }

    /// What was counted after `before`, which is earlier; of `peak_blocks`, which is no count, the
    /// value now.
    pub fn since(&self, before: &EngineStats) -> EngineStats {
        EngineStats {
            num_steps: self.num_steps - before.num_steps,
            num_computed_tokens: self.num_computed_tokens - before.num_computed_tokens,
            num_generated_tokens: self.num_generated_tokens - before.num_generated_tokens,
            peak_blocks: self.peak_blocks,
            swap_bytes: self.swap_bytes - before.swap_bytes,
            work: differences!(
                StepWork { tokens, logit_rows, read_keys, attended_keys },
                self.work,
                before.work
            ),
            scheduler: differences!(
                SchedulerStats {
                    num_preempted_recompute,
                    num_preempted_swap,
                    num_swap_fallbacks,
                    num_blocks_swapped_out,
                    num_blocks_swapped_in,
                    prefix_queries,
                    prefix_hits,
                    num_forks,
                    num_block_copies,
                    num_window_freed,
                    num_cancelled_steps,
                    num_ended_in_flight,
                    num_padding_tokens
                },
                self.scheduler,
                before.scheduler
            ),
            times: differences!(
                StepTimes { schedule, prepare, transfer, forward, sample, output },
                self.times,
                before.times
            ),
        }
    }

    /// Sequences that gave up their blocks.
    pub fn num_preemptions(&self) -> u64 {
        self.scheduler.num_preemptions()
    }

    /// Tokens computed that were not just sampled: prompts, and what was computed anew.
    pub fn num_prompt_tokens(&self) -> u64 {
        self.num_computed_tokens.saturating_sub(self.num_generated_tokens)
    }
}

/// What the log line shows of this moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadSnapshot {
    /// Counters so far.
    pub stats: EngineStats,
    /// Sequences with a seat.
    pub num_running: usize,
    /// Sequences without.
    pub num_waiting: usize,
    /// Share of the KV blocks that is held, 0 to 1.
    pub kv_usage: f64,
}

/// The log line of a busy engine, every so often.
#[derive(Debug)]
pub struct LoadLog {
    last: Instant,
    stats: EngineStats,
}

impl LoadLog {
    /// How often there is a line.
    pub const INTERVAL: Duration = Duration::from_secs(10);

    /// Lines from `now` on, when the engine has counted `stats`.
    pub fn new(now: Instant, stats: EngineStats) -> Self {
        LoadLog { last: now, stats }
    }

    /// The line, when its time has come: rates since the one before, and how things are now.
    pub fn line(&mut self, now: Instant, load: impl FnOnce() -> LoadSnapshot) -> Option<String> {
        let elapsed = now.duration_since(self.last);
        if elapsed < Self::INTERVAL {
            return None;
        }
        let LoadSnapshot { stats, num_running, num_waiting, kv_usage } = load();
        let new = stats.since(&self.stats);
        (self.stats, self.last) = (stats, now);
        let rate = |tokens: u64| tokens as f64 / elapsed.as_secs_f64();
        let (queries, hits) = (new.scheduler.prefix_queries, new.scheduler.prefix_hits);
        let hit_rate = if queries == 0 { 0.0 } else { 100.0 * hits as f64 / queries as f64 };
        Some(format!(
            "prompt {:.1} tok/s, generation {:.1} tok/s, running {num_running}, waiting \
             {num_waiting}, KV cache {:.1} %, prefix cache hits {hit_rate:.1} %",
            rate(new.num_prompt_tokens()),
            rate(new.num_generated_tokens),
            100.0 * kv_usage,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_counted_by_sequence() {
        // Two tokens of a prompt after three, then a decode of the seventh token.
        let input = ForwardInput {
            token_ids: vec![1; 3],
            query_start_loc: vec![0, 2, 3],
            seq_lens: vec![5, 7],
            logits_indices: vec![2],
            ..ForwardInput::default()
        };
        let work = StepWork { tokens: 3, logit_rows: 1, read_keys: 12, attended_keys: 4 + 5 + 7 };
        assert_eq!(StepWork::of(&input), work);
        let mut stats = EngineStats::default();
        stats.count_step(3, &input);
        let before = stats;
        stats.count_step(3, &input);
        assert_eq!((stats.num_steps, stats.num_computed_tokens), (2, 6));
        assert_eq!(stats.since(&before).work, work);
        assert_eq!(StepWork::of(&ForwardInput::default()), StepWork::default());
    }

    #[test]
    fn the_line_comes_at_its_time_with_rates_since_the_last_one() {
        let start = Instant::now();
        let mut log = LoadLog::new(start, EngineStats::default());
        assert_eq!(log.line(start + Duration::from_secs(9), || unreachable!()), None);
        let mut load =
            LoadSnapshot { num_running: 3, num_waiting: 2, kv_usage: 0.25, ..Default::default() };
        load.stats.num_computed_tokens = 1500;
        load.stats.num_generated_tokens = 500;
        load.stats.scheduler.prefix_queries = 400;
        load.stats.scheduler.prefix_hits = 100;
        let line = log.line(start + Duration::from_secs(10), || load).unwrap();
        assert_eq!(
            line,
            "prompt 100.0 tok/s, generation 50.0 tok/s, running 3, waiting 2, KV cache 25.0 %, \
             prefix cache hits 25.0 %"
        );
        let line = log.line(start + Duration::from_secs(20), || load).unwrap();
        assert!(line.starts_with("prompt 0.0 tok/s, generation 0.0 tok/s"), "{line}");
        assert!(line.ends_with("hits 0.0 %"), "{line}");
    }
}
