//! What happened in runs: a run in which nothing happens proves nothing.

use quire_engine::scheduler::{Scheduler, SchedulerStats};

/// Sums over runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Runs.
    pub runs: u64,
    /// Steps planned.
    pub steps: u64,
    /// Tokens computed.
    pub tokens: u64,
    /// Requests taken.
    pub requests: u64,
    /// Requests refused.
    pub refused: u64,
    /// Requests and samples aborted.
    pub aborted: u64,
    /// Sequences that there were.
    pub started: u64,
    /// Sequences that ended.
    pub ended: u64,
    /// Beams that were not continued.
    pub dropped: u64,
    /// Times that beams were compared.
    pub beams_advanced: u64,
    /// Cached blocks reused.
    pub evictions: u64,
    /// Percent of the bound that the longest end of a run without faults took.
    pub worst_drain: usize,
    /// The scheduler's counters.
    pub scheduler: SchedulerStats,
}

impl Totals {
    /// Takes the counters of a scheduler that is done.
    pub fn add_scheduler(&mut self, scheduler: &Scheduler) {
        self.runs += 1;
        self.evictions += scheduler.pool().num_evictions();
        self.scheduler = scheduler.stats();
    }

    /// Adds those of another run.
    pub fn add(&mut self, other: &Totals) {
        self.worst_drain = self.worst_drain.max(other.worst_drain);
        for (mine, (_, theirs)) in self.counters_mut().into_iter().zip(other.counters()) {
            *mine += theirs;
        }
    }

    /// Every counter with its name.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut copy = self.clone();
        NAMES.iter().copied().zip(copy.counters_mut().into_iter().map(|c| *c)).collect()
    }

    fn counters_mut(&mut self) -> [&mut u64; NAMES.len()] {
        let s = &mut self.scheduler;
        [
            &mut self.runs,
            &mut self.steps,
            &mut self.tokens,
            &mut self.requests,
            &mut self.refused,
            &mut self.aborted,
            &mut self.started,
            &mut self.ended,
            &mut self.dropped,
            &mut self.beams_advanced,
            &mut self.evictions,
            &mut s.num_preempted_recompute,
            &mut s.num_preempted_swap,
            &mut s.num_swap_fallbacks,
            &mut s.num_blocks_swapped_out,
            &mut s.num_blocks_swapped_in,
            &mut s.prefix_queries,
            &mut s.prefix_hits,
            &mut s.num_forks,
            &mut s.num_block_copies,
            &mut s.num_window_freed,
            &mut s.num_cancelled_steps,
            &mut s.num_ended_in_flight,
            &mut s.num_padding_tokens,
        ]
    }
}

const NAMES: [&str; 24] = [
    "runs",
    "steps",
    "tokens computed",
    "requests",
    "requests refused",
    "aborts",
    "sequences started",
    "sequences ended",
    "beams dropped",
    "beams advanced",
    "cached blocks evicted",
    "preempted, recomputed",
    "preempted, swapped",
    "swap fallbacks",
    "blocks swapped out",
    "blocks swapped in",
    "prefix tokens looked up",
    "prefix tokens found",
    "forks",
    "blocks copied",
    "window blocks freed",
    "steps cancelled",
    "ended in flight",
    "padding tokens",
];
