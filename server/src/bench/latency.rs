//! `quire bench latency`: one batch, again and again.

use super::Files;
use super::args::LatencyArgs;
use super::dataset::{BenchRequest, Random, greedy};
use super::drive;
use super::machine::{BackendReport, Machine};
use super::roofline::{Ceilings, Roofline, Share, Shares, described};
use super::stats::{Distribution, percentile};
use crate::output::{Output, counted, to_json, two_columns};
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
    ttft: Distribution,
    /// Between tokens after the first, over all requests; null where there is one token.
    tpot: Option<Distribution>,
    /// What the machine can do at best; null: not asked for, or something else than the CPU
    /// computes.
    ceilings: Option<Ceilings>,
    /// How close the steps came; null likewise.
    ceiling: Option<Shares>,
}

/// Runs the command.
///
/// # Errors
/// An argument or a file is unusable, or a run could not go on.
pub fn run(args: &LatencyArgs) -> anyhow::Result<Outcome> {
    let files = Files::check(args.report.output.as_deref(), None, None, &args.model.model)?;
    let model_files = load::open(&args.model.model)?;
    let mut setup = args.model.setup()?;
    let options = &mut setup.options;
    if !args.model.sets_num_seqs() {
        options.engine.max_num_seqs = options.engine.max_num_seqs.max(args.batch_size);
    }
    anyhow::ensure!(
        options.engine.max_num_seqs >= args.batch_size,
        "--batch-size is {}, more than --max-num-seqs {}",
        args.batch_size,
        options.engine.max_num_seqs
    );
    let roofline = match args.ceiling.no_ceiling {
        true => None,
        false => Roofline::measure(&model_files, options)?,
    };
    let mut engine = load::load(&model_files, options)?;
    let batch = batch(args, &mut engine, options.engine.seed)?;
    if args.report.shows_memory() {
        load::show(&engine, &setup);
    }
    for _ in 0..args.num_iters_warmup {
        drive::run(&mut engine, &batch, "warming up")?;
        engine.reset_prefix_cache();
    }
    interrupt::catch();
    let (mut latencies, mut ttft, mut tpot) = (Vec::new(), Vec::new(), Vec::new());
    let (mut failures, mut steps) = (Vec::new(), Vec::new());
    while latencies.len() < args.num_iters {
        let name = format!("batch {} of {}", latencies.len() + 1, args.num_iters);
        let measured = drive::run(&mut engine, &batch, &name)?;
        engine.reset_prefix_cache();
        if measured.interrupted {
            break;
        }
        latencies.push(measured.wall.as_secs_f64());
        ttft.extend(measured.samples.iter().filter_map(|s| Some(s.ttft_ms? / 1e3)));
        tpot.extend(measured.samples.iter().filter_map(|s| Some(s.tpot_ms? / 1e3)));
        failures.extend(measured.failures);
        steps.extend(measured.steps);
    }
    anyhow::ensure!(failures.is_empty(), "{}", failures[0]);
    let Some((latency, ttft)) = Distribution::of(&latencies).zip(Distribution::of(&ttft)) else {
        return Ok(Outcome::Interrupted);
    };
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
        avg_latency: latency.mean,
        percentiles: percentiles(&latencies),
        latencies,
        ttft,
        tpot: Distribution::of(&tpot),
        ceilings: roofline.map(|roofline| roofline.ceilings),
        ceiling: roofline.map(|roofline| roofline.shares(&steps)),
    };
    if interrupt::requested() {
        let (done, wanted) = (report.latencies.len(), args.num_iters);
        crate::report(&format!("error: interrupted after {done} of {wanted} batches"));
    }
    let mut output = Output::stdout();
    if args.report.json {
        output.json(&report)?;
    } else {
        output.text(&table(&report, &latency))?;
    }
    files.write(|| to_json(&report) + "\n", String::new)?;
    Ok(Outcome::of_run(false))
}

/// The requests of a batch, which the engine has checked.
fn batch(args: &LatencyArgs, engine: &mut Engine, seed: u64) -> anyhow::Result<Vec<BenchRequest>> {
    let mut random = Random::new(seed);
    let vocab_size = engine.vocab_size();
    let mut batch = Vec::new();
    for _ in 0..args.batch_size {
        let request = Request::new(random.ids(args.input_len, vocab_size), greedy(args.output_len));
        let id = engine.add_request(request.clone());
        engine.abort(id?);
        batch.push(BenchRequest { request, class: None, at_s: 0.0 });
    }
    Ok(batch)
}

/// The percentiles that vLLM's benchmark gives, by name.
fn percentiles(values: &[f64]) -> BTreeMap<&'static str, f64> {
    [("10", 10.0), ("25", 25.0), ("50", 50.0), ("75", 75.0), ("90", 90.0), ("99", 99.0)]
        .into_iter()
        .filter_map(|(name, percent)| Some((name, percentile(values, percent)?)))
        .collect()
}

fn table(report: &Report, latency: &Distribution) -> String {
    let ms = |seconds: &Distribution| {
        let Distribution { mean, p50, p90, p99, .. } = *seconds;
        let [mean, p50, p90, p99] = [mean, p50, p90, p99].map(|s| s * 1e3);
        format!("mean {mean:.2} ms, p50 {p50:.2} ms, p90 {p90:.2} ms, p99 {p99:.2} ms")
    };
    let (size, input, output) = (report.batch_size, report.input_len, report.output_len);
    let mut rows = vec![
        ("batch", format!("{size} requests, {input} + {output} tokens")),
        ("batches", report.latencies.len().to_string()),
        ("latency", ms(latency)),
        ("TTFT", ms(&report.ttft)),
        ("per token", report.tpot.as_ref().map_or("none".to_owned(), ms)),
    ];
    if let Some((ceilings, shares)) = report.ceilings.as_ref().zip(report.ceiling) {
        rows.push(("ceilings", described(ceilings)));
        let share = |share: Share, of: &str| {
            format!(
                "{:.1} % of the {of}, in the {} it bounds",
                share.percent,
                counted(share.num_steps as u64, "step")
            )
        };
        rows.extend(shares.reading.map(|s| ("reading", share(s, "read bandwidth"))));
        rows.extend(shares.multiplying.map(|s| ("multiplying", share(s, "matrix peak"))));
    }
    two_columns(&rows)
}
