//! What a run amounted to: counts, rates, latencies.

use crate::output::{counted, two_columns};
use quire_engine::engine::EngineStats;
use quire_engine::{Engine, RequestOutput};
use serde::Serialize;
use std::time::Duration;

/// Counts and latencies of requests, as they end.
#[derive(Debug, Default)]
pub struct Tally {
    /// Requests that ended well.
    pub finished: u64,
    /// Requests refused or failed.
    pub failed: u64,
    /// Requests cut off by an interruption.
    pub aborted: u64,
    prompt_tokens: u64,
    output_tokens: u64,
    ttft_ms: Vec<f64>,
    tpot_ms: Vec<f64>,
}

impl Tally {
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
        self.ttft_ms.extend(output.metrics.ttft.map(milliseconds));
        self.tpot_ms.extend(output.metrics.tpot.map(milliseconds));
    }

    /// The summary of a run on `engine` that took `wall`.
    pub fn summary(&self, engine: &Engine, wall: Duration) -> Summary {
        let EngineStats { peak_blocks, num_preemptions, .. } = engine.stats();
        let seconds = wall.as_secs_f64();
        let rate = |tokens: u64| if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
        let num_blocks = engine.limits().num_blocks;
        Summary {
            finished: self.finished,
            failed: self.failed,
            aborted: self.aborted,
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            prompt_tokens_per_s: rate(self.prompt_tokens),
            output_tokens_per_s: rate(self.output_tokens),
            ttft_ms: Latency::of(&self.ttft_ms),
            tpot_ms: Latency::of(&self.tpot_ms),
            peak_kv_blocks: peak_blocks,
            num_kv_blocks: num_blocks,
            peak_kv_percent: 100.0 * peak_blocks as f64 / num_blocks as f64,
            preemptions: num_preemptions,
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
    preemptions: u64,
    wall_s: f64,
}

impl Summary {
    /// As a table; only the requests where none was run.
    pub fn table(&self) -> String {
        if self.finished + self.failed + self.aborted == 0 {
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
            ("preemptions", self.preemptions.to_string()),
            ("wall time", format!("{:.2} s", self.wall_s)),
        ])
    }
}

/// Mean and percentiles, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Latency {
    mean: f64,
    p50: f64,
    p99: f64,
}

impl Latency {
    /// `None` of nothing.
    fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        Some(Latency {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            p50: percentile(&sorted, 50)?,
            p99: percentile(&sorted, 99)?,
        })
    }
}

/// The smallest value that at least `percent` of the sorted values do not exceed (nearest rank).
fn percentile(sorted: &[f64], percent: usize) -> Option<f64> {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied()
}

/// Milliseconds, to the microsecond.
pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_the_nearest_rank() {
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        for (values, percent, expected) in [
            (&hundred[..], 50, Some(50.0)),
            (&hundred[..], 99, Some(99.0)),
            (&hundred[..1], 50, Some(1.0)),
            (&hundred[..1], 99, Some(1.0)),
            (&hundred[..2], 50, Some(1.0)),
            (&hundred[..2], 99, Some(2.0)),
            (&hundred[..3], 50, Some(2.0)),
            (&[][..], 50, None),
        ] {
            assert_eq!(percentile(values, percent), expected, "{} {percent}", values.len());
        }
    }

    #[test]
    fn a_table_has_what_there_is_to_say() {
        let summary = |finished, failed| Summary {
            finished,
            failed,
            aborted: 0,
            prompt_tokens: finished,
            output_tokens: 2 * finished,
            prompt_tokens_per_s: 1.0,
            output_tokens_per_s: 2.0,
            ttft_ms: None,
            tpot_ms: None,
            peak_kv_blocks: 1,
            num_kv_blocks: 2,
            peak_kv_percent: 50.0,
            preemptions: 0,
            wall_s: 1.0,
        };
        assert_eq!(summary(0, 0).table(), "no requests\n");
        assert_eq!(summary(0, 3).table(), "requests  0 finished, 3 failed\n");
        let table = summary(1, 0).table();
        assert!(table.contains("prompt       1 token, 1.0 tokens/s\n"), "{table}");
        assert!(table.contains("output       2 tokens, 2.0 tokens/s\n"), "{table}");
    }

    #[test]
    fn latencies_sort_and_average() {
        let latency = Latency::of(&[3.0, 1.0, 8.0]).unwrap();
        assert_eq!(latency, Latency { mean: 4.0, p50: 3.0, p99: 8.0 });
        assert_eq!(Latency::of(&[]), None);
    }
}
