//! `quire bench throughput`: the same requests under one or several configurations.

use super::Files;
use super::args::{PolicySpec, ThroughputArgs};
use super::calibrate::calibrate;
use super::dataset::{BenchRequest, Dataset};
use super::drive::{self, Measured};
use super::machine::Machine;
use super::plot::svg;
use super::predict::{Limits, Shape, StepModel, replay};
use super::report::{Prediction, Ratio, Report, Run, RunConfig, RunFacts, over};
use super::roofline::Roofline;
use super::table::table;
use crate::cli::Setup;
use crate::cli::scheduling::PolicyName;
use crate::generate::request_line::Defaults;
use crate::memory::PlanJson;
use crate::output::{Output, to_json};
use crate::{Outcome, interrupt, load, params};
use anyhow::Context;
use quire_engine::Engine;
use quire_engine::scheduler::{DEFAULT_AGING_STEPS, Policy, SchedulerConfig};
use quire_model_zoo::ModelFiles;

/// Runs the command.
///
/// # Errors
/// An argument or a file is unusable, or a run could not go on.
pub fn run(args: &ThroughputArgs) -> anyhow::Result<Outcome> {
    let model = &args.model.model;
    let input = args.dataset.input.as_deref();
    let files = Files::check(args.report.output.as_deref(), args.plot.as_deref(), input, model)?;
    let model_files = load::open(model)?;
    let recommended = params::recommended(&model_files.generation, model)?;
    let defaults = Defaults { prompt: recommended.clone(), chat: recommended };
    let dataset = Dataset::open(&args.dataset, &defaults)?;
    let variants = variants(args, &args.model.setup()?);
    // Before the first run of many, as the last one would fail.
    for variant in &variants {
        load::plan(&model_files, &variant.setup.options).with_context(|| variant.name.clone())?;
    }
    // What it takes of a machine is the same for all.
    let roofline = match args.ceiling.no_ceiling {
        true => None,
        false => Roofline::measure(&model_files, &variants[0].setup.options)?,
    };
    let mut report = Report {
        benchmark: "throughput",
        version: env!("CARGO_PKG_VERSION"),
        model: model.display().to_string(),
        dataset: dataset.describe(),
        request_rate: args.request_rate,
        machine: Machine::here(),
        step_model: None,
        ceilings: roofline.map(|roofline| roofline.ceilings),
        runs: Vec::new(),
        ratios: Vec::new(),
    };
    if !args.no_prediction {
        report.step_model = step_model(args, &model_files, &dataset, &variants)?;
    }
    let num_variants = variants.len();
    for variant in variants {
        let run = run_variant(args, &model_files, &dataset, variant, (&report, roofline))?;
        report.runs.push(run);
        if interrupt::requested() {
            break;
        }
    }
    if let [first, rest @ ..] = &report.runs[..] {
        report.ratios = rest.iter().map(|run| Ratio::new(run, first)).collect();
    }
    let mut output = Output::stdout();
    if args.report.json {
        output.json(&report)?;
    } else {
        output.text(&table(&report))?;
    }
    files.write(|| to_json(&report) + "\n", || svg(&report.runs))?;
    if interrupt::requested() {
        let completed = report.runs.last().map_or(0, |run| run.completed);
        let (runs, of) = (report.runs.len(), num_variants);
        crate::report(&format!(
            "error: interrupted in run {runs} of {of}, when {completed} requests were answered"
        ));
    }
    for failure in report.runs.iter().flat_map(|run| &run.failures) {
        crate::report(&format!("error: {failure}"));
    }
    Ok(Outcome::of_run(report.runs.iter().any(|run| run.failed > 0)))
}

/// A configuration to run with.
struct Variant {
    name: String,
    setup: Setup,
}

/// Each policy with each block size.
fn variants(args: &ThroughputArgs, setup: &Setup) -> Vec<Variant> {
    let engine = &setup.options.engine;
    let own = PolicySpec { policy: engine.policy.into(), max_num_seqs: None };
    let policies = if args.policy.is_empty() { vec![own] } else { args.policy.clone() };
    let own = engine.block_size;
    let sizes = if args.block_sizes.is_empty() { vec![own] } else { args.block_sizes.clone() };
    let mut variants = Vec::new();
    for spec in &policies {
        for &block_size in &sizes {
            let mut setup = setup.clone();
            let engine = &mut setup.options.engine;
            // Flags that say how priorities age hold for it.
            if PolicyName::from(engine.policy) != spec.policy {
                engine.policy = spec.policy.policy(DEFAULT_AGING_STEPS);
            }
            engine.max_num_seqs = spec.max_num_seqs.unwrap_or(engine.max_num_seqs);
            engine.block_size = block_size;
            let mut name = format!("{}:{}", spec.policy, engine.max_num_seqs);
            if sizes.len() > 1 {
                name.push_str(&format!(" block {block_size}"));
            }
            variants.push(Variant { name, setup });
        }
    }
    variants
}

/// Step times for all of them: what they are is no matter of policy, and a machine that others
/// use would give each its own. `None`: the context is too short to measure them.
fn step_model(
    args: &ThroughputArgs,
    files: &ModelFiles,
    dataset: &Dataset,
    variants: &[Variant],
) -> anyhow::Result<Option<StepModel>> {
    let widest = variants.iter().max_by_key(|variant| variant.setup.options.engine.max_num_seqs);
    let mut options = widest.expect("there is a variant").setup.options.clone();
    options.engine.policy = Policy::Fcfs;
    // No budget that an engine may choose is larger.
    let budget = load::plan(files, &options)?.scheduler.max_num_batched_tokens;
    options.engine.max_num_batched_tokens = Some(budget);
    let mut engine = load::load(files, &options)?;
    // What cannot run is said before the work.
    dataset.requests(&mut engine, options.engine.seed, args.request_rate)?;
    calibrate(&mut engine).context("the engine failed")
}

/// Runs `variant`; the report has the runs before it, and the step times.
fn run_variant(
    args: &ThroughputArgs,
    files: &ModelFiles,
    dataset: &Dataset,
    variant: Variant,
    (report, roofline): (&Report, Option<Roofline>),
) -> anyhow::Result<Run> {
    let Variant { name, setup } = variant;
    let options = &setup.options;
    let mut engine = load::load(files, options)?;
    let memory = PlanJson::from(*engine.memory());
    let is_shown = report.runs.last().is_some_and(|run| run.memory.has_parts_of(&memory));
    if args.report.shows_memory() && !is_shown {
        load::show(&engine, &setup);
    }
    let seed = options.engine.seed;
    let requests = dataset.requests(&mut engine, seed, args.request_rate)?;
    let warmup: Vec<BenchRequest> = requests
        .iter()
        .take(args.warmup)
        .map(|request| BenchRequest { at_s: 0.0, ..request.clone() })
        .collect();
    drive::run(&mut engine, &warmup, "warming up")?;
    engine.reset_prefix_cache();

    interrupt::catch();
    let measured = drive::run(&mut engine, &requests, &name)?;
    let config = RunConfig {
        async_scheduling: engine.async_scheduling(),
        seed,
        ..RunConfig::new(engine.limits())
    };
    let facts = RunFacts { name, config, memory, backend: engine.backend().into() };
    let mut run = Run::new(facts, &requests, &measured);
    run.ceiling = roofline.map(|roofline| roofline.shares(&measured.steps));
    let shared = measured.samples.iter().any(|sample| sample.cached_tokens > 0);
    let predictable = !shared && !run.interrupted;
    if let Some(step_model) = report.step_model.as_ref().filter(|_| predictable) {
        let shapes = shapes(&requests, &measured);
        let schedule = replay(&shapes, &replay_limits(&engine), |work| step_model.seconds(work));
        let measured_over_predicted = over(run.duration, schedule.duration_s);
        run.prediction = Some(Prediction { schedule, measured_over_predicted });
    }
    Ok(run)
}

/// The lengths that the requests turned out to have, in order of arrival.
fn shapes(requests: &[BenchRequest], measured: &Measured) -> Vec<Shape> {
    let mut samples: Vec<_> = measured.samples.iter().filter(|s| s.output_tokens > 0).collect();
    samples.sort_by_key(|sample| sample.request);
    let shape = |sample: &&drive::Sample| Shape {
        arrival_s: requests[sample.request].at_s,
        prompt: sample.prompt_tokens,
        output: sample.output_tokens,
    };
    samples.iter().map(shape).collect()
}

fn replay_limits(engine: &Engine) -> Limits {
    let SchedulerConfig { policy, max_model_len, block_size, .. } = *engine.limits();
    Limits {
        seats: engine.limits().max_num_seqs,
        budget: engine.limits().max_num_batched_tokens,
        block_size,
        num_blocks: engine.limits().num_blocks,
        reserved_blocks: (policy == Policy::Static).then(|| max_model_len.div_ceil(block_size)),
    }
}
