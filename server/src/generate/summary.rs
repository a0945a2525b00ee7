//! What a run amounted to: counts, rates, latencies.

use super::latency::{Latencies, Latency};
use super::progress::Progress;
use crate::output::{counted, one_line, two_columns};
use anyhow::Context;
use quire_engine::metrics::EngineStats;
use quire_engine::{Engine, EngineError, RequestOutput};
use serde::Serialize;
use std::time::Duration;

/// What is said when a step fails.
const STEP_FAILED: &str = "the engine failed";

/// Steps that may fail one after the other before a run gives up: what was short may be there again.
const MAX_FAILED_STEPS: usize = 3;

/// Counts and latencies of requests, as they end.
#[derive(Debug, Default)]
pub struct Tally {
    /// Requests that ended well.
    pub finished: u64,
    /// Requests refused or failed.
    pub failed: u64,
    /// Requests cut off by an interruption.
    pub aborted: u64,
    /// The run ended at a failure.
    pub stopped: bool,
    /// The run ended as nothing more could be computed, which was said.
    pub lost: bool,
    /// Steps that failed one after the other.
    pub failed_steps: usize,
    /// What an earlier run has left.
    pub kept: Kept,
    prompt_tokens: u64,
    output_tokens: u64,
    ttft: Latencies,
    tpot: Latencies,
}

/// Requests whose results an earlier run has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// All of them.
    pub requests: u64,
    /// Those with an error.
    pub failed: u64,
}

impl Tally {
    /// Nothing yet, after an earlier run.
    pub fn after(kept: Kept) -> Self {
        Tally { kept, ..Default::default() }
    }

    /// Counts a request that ended well.
    pub fn finished(&mut self, output: &RequestOutput) {
        self.finished += 1;
        self.add_tokens(output);
    }

    /// Counts a request that was cut off.
    pub fn aborted(&mut self, output: &RequestOutput) {
        self.aborted += 1;
        self.add_tokens(output);
    }

    fn add_tokens(&mut self, output: &RequestOutput) {
        self.prompt_tokens += output.prompt_token_ids.len() as u64;
        self.output_tokens += output.token_ids.len() as u64;
        output.metrics.ttft.into_iter().for_each(|ttft| self.ttft.add(ttft));
        output.metrics.tpot.into_iter().for_each(|tpot| self.tpot.add(tpot));
    }

    /// A request failed, in this run or the one it goes on with.
    pub fn any_failed(&self) -> bool {
        self.lost || self.failed + self.kept.failed > 0
    }

    /// Takes note of a step that failed, and says so: if it cannot be tried again, the next one
    /// hands out what the engine has ended.
    ///
    /// # Errors
    /// It has been tried often enough.
    pub fn step_failed(&mut self, error: EngineError, progress: &Progress) -> anyhow::Result<()> {
        if !error.is_lost() && self.failed_steps < MAX_FAILED_STEPS {
            self.failed_steps += 1;
            progress.report(&format!("note: tried again: {}", one_line(&error.to_string())));
            return Ok(());
        }
        if self.lost || !error.is_lost() {
            return Err(error).context(STEP_FAILED);
        }
        self.lost = true;
        progress.report(&format!("error: {STEP_FAILED}: {}", one_line(&error.to_string())));
        Ok(())
    }

    /// The summary of a run on `engine` that took `wall`.
    pub fn summary(&self, engine: &Engine, wall: Duration) -> Summary {
        let stats = engine.stats();
        let EngineStats { peak_blocks, .. } = stats;
        let seconds = wall.as_secs_f64();
        let rate = |tokens: u64| if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
        let num_blocks = engine.limits().num_blocks;
        Summary {
            finished: self.finished,
            failed: self.failed,
            aborted: self.aborted,
            kept: self.kept.requests,
            kept_failed: self.kept.failed,
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            prompt_tokens_per_s: rate(self.prompt_tokens),
            output_tokens_per_s: rate(self.output_tokens),
            ttft_ms: self.ttft.summary(),
            tpot_ms: self.tpot.summary(),
            peak_kv_blocks: peak_blocks,
            num_kv_blocks: num_blocks,
            peak_kv_percent: 100.0 * peak_blocks as f64 / num_blocks as f64,
            prefix_queries: stats.scheduler.prefix_queries,
            prefix_hits: stats.scheduler.prefix_hits,
            preemptions: stats.num_preemptions(),
            preemptions_swapped: stats.scheduler.num_preempted_swap,
            wall_s: seconds,
        }
    }
}

/// A run in numbers.
#[derive(Debug, PartialEq, Serialize)]
pub struct Summary {
    finished: u64,
    failed: u64,
    aborted: u64,
    kept: u64,
    kept_failed: u64,
    prompt_tokens: u64,
    output_tokens: u64,
    prompt_tokens_per_s: f64,
    output_tokens_per_s: f64,
    /// Null where no request got a token.
    ttft_ms: Option<Latency>,
    /// Null where no request got two tokens.
    tpot_ms: Option<Latency>,
    peak_kv_blocks: usize,
    num_kv_blocks: usize,
    peak_kv_percent: f64,
    /// Prompt tokens looked up in the prefix cache, those of resumed sequences included.
    prefix_queries: u64,
    /// Those of them that were found, and not computed.
    prefix_hits: u64,
    preemptions: u64,
    /// Those whose blocks were copied to the swap space.
    preemptions_swapped: u64,
    wall_s: f64,
}

impl Summary {
    /// As a table; only the requests where none was run.
    pub fn table(&self) -> String {
        if self.finished + self.failed + self.aborted + self.kept == 0 {
            return "no requests\n".to_owned();
        }
        let latency = |latency: Option<Latency>| match latency {
            Some(Latency { mean, p50, p99 }) => {
                format!("mean {mean:.1} ms, p50 {p50:.1} ms, p99 {p99:.1} ms")
            }
            None => "none".to_owned(),
        };
        let mut requests = format!("{} finished, {} failed", self.finished, self.failed);
        if self.aborted > 0 {
            requests.push_str(&format!(", {} aborted", self.aborted));
        }
        if self.kept > 0 {
            requests.push_str(&format!(", {} done before", self.kept));
            if self.kept_failed > 0 {
                requests.push_str(&format!(" ({} of them failed)", self.kept_failed));
            }
        }
        if self.finished + self.aborted == 0 {
            return two_columns(&[("requests", requests)]);
        }
        let tokens = |n, rate: f64| format!("{}, {rate:.1} tokens/s", counted(n, "token"));
        two_columns(&[
            ("requests", requests),
            ("prompt", tokens(self.prompt_tokens, self.prompt_tokens_per_s)),
            ("output", tokens(self.output_tokens, self.output_tokens_per_s)),
            ("TTFT", latency(self.ttft_ms)),
            ("TPOT", latency(self.tpot_ms)),
            (
                "peak KV use",
                format!(
                    "{} of {} blocks ({:.1} %)",
                    self.peak_kv_blocks, self.num_kv_blocks, self.peak_kv_percent
                ),
            ),
            ("prefix hits", self.prefix_cache()),
            ("preemptions", self.preemptions()),
            ("wall time", format!("{:.2} s", self.wall_s)),
        ])
    }
}

impl Summary {
    fn prefix_cache(&self) -> String {
        if self.prefix_queries == 0 {
            return "not used".to_owned();
        }
        let (hits, queries) = (self.prefix_hits, self.prefix_queries);
        let percent = 100.0 * hits as f64 / queries as f64;
        format!("{hits} of {queries} tokens found ({percent:.1} %)")
    }

    fn preemptions(&self) -> String {
        match self.preemptions_swapped {
            0 => self.preemptions.to_string(),
            swapped => format!("{}, {swapped} of them by swap", self.preemptions),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_what_there_is_to_say() {
        let summary = |finished, failed| Summary {
            finished,
            failed,
            aborted: 0,
            kept: 0,
            kept_failed: 0,
            prompt_tokens: finished,
            output_tokens: 2 * finished,
            prompt_tokens_per_s: 1.0,
            output_tokens_per_s: 2.0,
            ttft_ms: None,
            tpot_ms: None,
            peak_kv_blocks: 1,
            num_kv_blocks: 2,
            peak_kv_percent: 50.0,
            prefix_queries: 40,
            prefix_hits: 10,
            preemptions: 3,
            preemptions_swapped: 1,
            wall_s: 1.0,
        };
        assert_eq!(summary(0, 0).table(), "no requests\n");
        assert_eq!(summary(0, 3).table(), "requests  0 finished, 3 failed\n");
        let table = summary(1, 0).table();
        assert!(table.contains("prompt       1 token, 1.0 tokens/s\n"), "{table}");
        assert!(table.contains("output       2 tokens, 2.0 tokens/s\n"), "{table}");
        assert!(table.contains("prefix hits  10 of 40 tokens found (25.0 %)\n"), "{table}");
        assert!(table.contains("preemptions  3, 1 of them by swap\n"), "{table}");
    }
}
