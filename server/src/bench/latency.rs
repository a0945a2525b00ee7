//! `quire bench latency`: one batch, again and again.

use super::Files;
use super::args::LatencyArgs;
use super::dataset::{BenchRequest, MAX_LEN, Random, greedy};
use super::drive;
use super::machine::{BackendReport, Machine};
use super::stats::{mean, percentile};
use crate::output::{Output, to_json, two_columns};
use crate::{Outcome, interrupt, load};
use quire_engine::{Engine, Request};
use serde::Serialize;
use std::collections::BTreeMap;

/// What was found; times in seconds.
#[derive(Serialize)]
struct Report {
    benchmark: &'static str,
    version: &'static str,
    model: String,
    machine: Machine,
    backend: BackendReport,
    input_len: usize,
    output_len: usize,
    batch_size: usize,
    interrupted: bool,
    /// Of a whole batch.
    avg_latency: f64,
    latencies: Vec<f64>,
    percentiles: BTreeMap<&'static str, f64>,
    /// Start of the batch → first token, over all requests.
    ttft: Spread,
    /// Between tokens after the first, over all requests; null where there is one token.
    tpot: Option<Spread>,
}

/// Seconds.
#[derive(Serialize)]
struct Spread {
    mean: f64,
    p50: f64,
    p90: f64,
    p99: f64,
}

impl Spread {
    /// Of values in ms; `None` of nothing.
    fn of_ms(values: &[f64]) -> Option<Self> {
        let percentile = |percent| percentile(values, percent).map(|ms| ms / 1e3);
        Some(Spread {
            mean: mean(values)? / 1e3,
            p50: percentile(50.0)?,
            p90: percentile(90.0)?,
            p99: percentile(99.0)?,
        })
    }

    fn shown(&self) -> String {
        let [mean, p50, p90, p99] = [self.mean, self.p50, self.p90, self.p99].map(|s| s * 1e3);
        format!("mean {mean:.2} ms, p50 {p50:.2} ms, p90 {p90:.2} ms, p99 {p99:.2} ms")
    }
}

/// Runs the command.
///
/// # Errors
/// An argument or a file is unusable, or a run could not go on.
pub fn run(args: &LatencyArgs) -> anyhow::Result<Outcome> {
    let files = Files::check([&args.report.output, &None], None, &args.model.model)?;
    let model_files = load::open(&args.model.model)?;
    let mut options = args.model.load_options();
    if !args.model.sets_num_seqs() {
        options.engine.max_num_seqs = options.engine.max_num_seqs.max(args.batch_size);
    }
    anyhow::ensure!(
        options.engine.max_num_seqs >= args.batch_size,
        "--batch-size is {}, more than --max-num-seqs {}",
        args.batch_size,
        options.engine.max_num_seqs
    );
    let mut engine = load::load(&model_files, &options)?;
    let batch = batch(args, &mut engine, options.engine.seed)?;
    for _ in 0..args.num_iters_warmup {
        drive::run(&mut engine, &batch, "warming up")?;
        engine.reset_prefix_cache();
    }
    interrupt::catch();
    let (mut latencies, mut ttft_ms, mut tpot_ms) = (Vec::new(), Vec::new(), Vec::new());
    let mut failures = Vec::new();
    while latencies.len() < args.num_iters {
        let name = format!("batch {} of {}", latencies.len() + 1, args.num_iters);
        let measured = drive::run(&mut engine, &batch, &name)?;
        engine.reset_prefix_cache();
        if measured.interrupted {
            break;
        }
        latencies.push(measured.wall.as_secs_f64());
        ttft_ms.extend(measured.samples.iter().filter_map(|s| s.ttft_ms));
        tpot_ms.extend(measured.samples.iter().filter_map(|s| s.tpot_ms));
        failures.extend(measured.failures);
    }
    anyhow::ensure!(failures.is_empty(), "{}", failures[0]);
    let Some((avg_latency, ttft)) = mean(&latencies).zip(Spread::of_ms(&ttft_ms)) else {
        return Ok(Outcome::Interrupted);
    };
    let percentiles =
        [("10", 10.0), ("25", 25.0), ("50", 50.0), ("75", 75.0), ("90", 90.0), ("99", 99.0)];
    let percentiles = percentiles
        .into_iter()
        .filter_map(|(name, percent)| Some((name, percentile(&latencies, percent)?)));
    let report = Report {
        benchmark: "latency",
        version: env!("CARGO_PKG_VERSION"),
        model: args.model.model.display().to_string(),
        machine: Machine::here(),
        backend: engine.backend().into(),
        input_len: args.input_len,
        output_len: args.output_len,
        batch_size: args.batch_size,
        interrupted: interrupt::requested(),
        avg_latency,
        percentiles: percentiles.collect(),
        latencies,
        ttft,
        tpot: Spread::of_ms(&tpot_ms),
    };
    let mut output = Output::stdout();
    if args.report.json {
        output.json(&report)?;
    } else {
        output.text(&table(&report))?;
    }
    files.write([&|| to_json(&report) + "\n", &String::new])?;
    Ok(if report.interrupted { Outcome::Interrupted } else { Outcome::Done })
}

/// The requests of a batch, which the engine has checked.
fn batch(args: &LatencyArgs, engine: &mut Engine, seed: u64) -> anyhow::Result<Vec<BenchRequest>> {
    let mut random = Random::new(seed);
    let vocab_size = engine.vocab_size();
    anyhow::ensure!(
        args.input_len <= MAX_LEN,
        "--input-len is {}; it must be at most {MAX_LEN}",
        args.input_len
    );
    let mut batch = Vec::new();
    for _ in 0..args.batch_size {
        let request = Request::new(random.ids(args.input_len, vocab_size), greedy(args.output_len));
        let id = engine.add_request(request.clone());
        engine.abort(id?);
        batch.push(BenchRequest { request, class: None, at_s: 0.0 });
    }
    Ok(batch)
}

fn table(report: &Report) -> String {
    let latencies: Vec<f64> = report.latencies.iter().map(|s| s * 1e3).collect();
    let spread = |spread: Option<&Spread>| spread.map_or("none".to_owned(), Spread::shown);
    two_columns(&[
        (
            "batch",
            format!(
                "{} requests, {} + {} tokens",
                report.batch_size, report.input_len, report.output_len
            ),
        ),
        ("batches", report.latencies.len().to_string()),
        ("latency", spread(Spread::of_ms(&latencies).as_ref())),
        ("TTFT", spread(Some(&report.ttft))),
        ("per token", spread(report.tpot.as_ref())),
    ])
}
