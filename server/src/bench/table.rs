//! A report to be read: a column a run and, for two, the ratio of the second to the first.

use super::report::{Report, Run, over};
use super::roofline::{Share, Shares, described};
use crate::cli::scheduling::PolicyName;
use crate::output::escaped;
use std::fmt::Write as _;

/// A row: its name, and a number for each run.
pub struct Row {
    /// What it is.
    pub name: String,
    /// `None`: there is no such number.
    pub values: Vec<Option<f64>>,
    /// Digits after the point.
    pub decimals: usize,
    /// The ratio of these says something.
    pub compares: bool,
}

/// The report as text.
pub fn table(report: &Report) -> String {
    let runs = &report.runs;
    let mut rows = rate_rows(runs);
    rows.extend(latency_rows(runs));
    rows.extend(engine_rows(runs));
    rows.extend(class_rows(runs));
    rows.retain(|row| row.values.iter().any(Option::is_some));
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let mut text = aligned(&names, &rows);
    if let Some(ceilings) = &report.ceilings {
        let _ = writeln!(text, "ceilings: {}", described(ceilings));
    }
    for ratio in &report.ratios {
        let _ = write!(
            text,
            "{} over {}: {:.2} times the output token throughput",
            ratio.run, ratio.over, ratio.output_throughput
        );
        if let Some(predicted) = ratio.predicted_output_throughput {
            let _ = write!(text, ", {predicted:.2} predicted");
        }
        text.push('\n');
    }
    text
}

impl Row {
    fn new(name: &str, decimals: usize, runs: &[Run], get: impl Fn(&Run) -> Option<f64>) -> Self {
        let (name, values) = (name.to_owned(), runs.iter().map(get).collect());
        Row { name, values, decimals, compares: false }
    }

    /// The same, with a ratio.
    fn compared(self) -> Self {
        Row { compares: true, ..self }
    }
}

/// What was done, and how fast.
fn rate_rows(runs: &[Run]) -> Vec<Row> {
    let row =
        |name, decimals, get: fn(&Run) -> f64| Row::new(name, decimals, runs, |run| Some(get(run)));
    let failed = runs.iter().any(|run| run.failed > 0);
    let failed = failed.then(|| row("Failed sequences", 0, |r| r.failed as f64));
    let measured_over_predicted =
        |r: &Run| r.prediction.as_ref().map(|p| p.measured_over_predicted);
    let mut rows = vec![row("Successful requests", 0, |r| r.completed as f64)];
    rows.extend(failed);
    rows.extend([
        row("Benchmark duration (s)", 2, |r| r.duration).compared(),
        Row::new("Predicted duration (s)", 2, runs, predicted).compared(),
        Row::new("Measured / predicted", 2, runs, measured_over_predicted),
        row("Total input tokens", 0, |r| r.total_input_tokens as f64),
        row("Total generated tokens", 0, |r| r.total_output_tokens as f64),
        row("Request throughput (req/s)", 2, |r| r.request_throughput).compared(),
        row("Output token throughput (tok/s)", 2, |r| r.output_throughput).compared(),
        row("Total token throughput (tok/s)", 2, |r| r.total_token_throughput).compared(),
    ]);
    rows
}

fn latency_rows(runs: &[Run]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (key, name) in
        [("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2el", "E2EL"), ("queue", "queue")]
    {
        for (part, title) in [("mean", "Mean"), ("median", "Median"), ("p99", "P99")] {
            let field = format!("{part}_{key}_ms");
            let get = |run: &Run| run.latencies.get(&field).copied();
            rows.push(Row::new(&format!("{title} {name} (ms)"), 2, runs, get).compared());
        }
    }
    rows
}

/// What the engine did and where its time went.
fn engine_rows(runs: &[Run]) -> Vec<Row> {
    let row =
        |name, decimals, get: fn(&Run) -> f64| Row::new(name, decimals, runs, |run| Some(get(run)));
    let mut rows = vec![
        row("Steps", 0, |r| r.num_steps as f64).compared(),
        row("Padding tokens", 0, |r| r.num_padding_tokens as f64),
        row("Prefix cache hits (%)", 1, |r| {
            100.0 * over(r.prefix_cache.hits as f64, r.prefix_cache.queries as f64)
        }),
        row("Preemptions, recomputed", 0, |r| r.preemptions.recompute as f64),
        row("Preemptions, swapped", 0, |r| r.preemptions.swap as f64),
        row("Swapped (MB)", 1, |r| r.swap_bytes as f64 / 1e6),
        row("KV blocks", 0, |r| r.config.num_blocks as f64),
        row("KV blocks held, peak", 0, |r| r.kv_cache.peak_blocks as f64),
        row("KV live of pool, mean (%)", 1, |r| 100.0 * r.kv_cache.live_of_pool).compared(),
        row("KV live of held, mean (%)", 1, |r| 100.0 * r.kv_cache.live_of_held).compared(),
        // A static batch reserves on purpose.
        Row::new("KV waste per sequence (tokens)", 2, runs, |r| {
            (r.config.policy != PolicyName::Static).then_some(r.kv_cache.waste_per_sequence)
        }),
        Row::new("  expected, (block size - 1) / 2", 2, runs, |r| {
            (r.config.policy != PolicyName::Static).then_some(r.kv_cache.expected_waste)
        }),
    ];
    let share = |of: fn(&Shares) -> Option<Share>| {
        move |run: &Run| Some(of(run.ceiling.as_ref()?)?.percent)
    };
    rows.extend([
        Row::new("Of the read bandwidth, steps bound by it (%)", 1, runs, share(|s| s.reading)),
        Row::new("Of the matrix peak, steps bound by it (%)", 1, runs, share(|s| s.multiplying)),
    ]);
    for part in parts(runs) {
        let get = |run: &Run| run.step_times.get(part).copied();
        rows.push(Row::new(&format!("Time in {part} (s)"), 3, runs, get));
    }
    rows
}

fn predicted(run: &Run) -> Option<f64> {
    run.prediction.as_ref().map(|p| p.schedule.duration_s)
}

/// Parts of a step, longest first.
fn parts(runs: &[Run]) -> Vec<&'static str> {
    let Some(run) = runs.first() else { return Vec::new() };
    let mut parts: Vec<_> = run.step_times.iter().collect();
    parts.sort_by(|a, b| b.1.total_cmp(a.1));
    parts.into_iter().map(|(name, _)| *name).collect()
}

fn class_rows(runs: &[Run]) -> Vec<Row> {
    let mut rows = Vec::new();
    let Some(first) = runs.first() else { return rows };
    for (i, class) in first.classes.iter().enumerate() {
        let name = class.name.as_deref().map_or("no class".into(), escaped);
        let mut row = |what: &str, decimals, get: &dyn Fn(&super::report::Class) -> Option<f64>| {
            let values = runs.iter().map(|run| run.classes.get(i).and_then(get)).collect();
            let name = format!("{name}: {what}");
            rows.push(Row { name, values, decimals, compares: decimals > 0 });
        };
        row("completed", 0, &|c| Some(c.completed as f64));
        row("output tokens", 0, &|c| Some(c.output_tokens as f64));
        for (key, title) in
            [("queue", "queue"), ("ttft", "TTFT"), ("tpot", "TPOT"), ("e2el", "E2EL")]
        {
            for part in ["mean", "median", "p99"] {
                let field = format!("{part}_{key}_ms");
                row(&format!("{part} {title} (ms)"), 2, &|c| c.latencies.get(&field).copied());
            }
        }
    }
    rows
}

/// Names to the left, numbers to the right.
pub fn aligned(runs: &[&str], rows: &[Row]) -> String {
    let mut lines = vec![vec![String::new()]];
    let with_ratio = runs.len() == 2;
    lines[0].extend(runs.iter().map(|run| (*run).to_owned()));
    lines[0].extend(with_ratio.then(|| "ratio".to_owned()));
    for row in rows {
        let number = |value: &Option<f64>| match value {
            Some(value) => format!("{value:.*}", row.decimals),
            None => "-".to_owned(),
        };
        let mut line = vec![row.name.clone()];
        line.extend(row.values.iter().map(number));
        if with_ratio {
            line.push(match row.values[..] {
                [Some(first), Some(second)] if row.compares && first > 0.0 => {
                    format!("{:.2}", second / first)
                }
                _ => String::new(),
            });
        }
        lines.push(line);
    }
    let width =
        |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..lines[0].len()).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let mut shown = format!("{:1$}", line[0], widths[0]);
        for (cell, width) in line.iter().zip(&widths).skip(1) {
            let _ = write!(shown, "  {cell:>width$}");
        }
        text.push_str(shown.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_runs_are_compared() {
        let row = |name: &str, values, decimals, compares| Row {
            name: name.to_owned(),
            values,
            decimals,
            compares,
        };
        let rows = [
            row("duration", vec![Some(4.0), Some(2.0)], 2, true),
            row("requests", vec![Some(10.0), None], 0, false),
        ];
        assert_eq!(
            aligned(&["static", "fcfs"], &rows),
            "          static  fcfs  ratio\n\
             duration    4.00  2.00   0.50\n\
             requests      10     -\n"
        );
        let rows = [row("a", vec![Some(1.0)], 0, true)];
        assert_eq!(aligned(&["x"], &rows), "   x\na  1\n");
    }
}
