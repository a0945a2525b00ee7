//! `quire verify`: a model against its golden file, or against another implementation.

mod layers;

use crate::Outcome;
use crate::cli::VerifyArgs;
use crate::device::gemm_name;
use crate::load;
use crate::output::{Output, counted};
use anyhow::Context;
use quire_engine::backend::CudaOptions;
use quire_engine::ops::BackendInfo;
use quire_model_zoo::BackendKind;
use quire_model_zoo::loader::ModelFormat;
use quire_model_zoo::verify::{Bounded, Golden, SequenceReport, VerifyReport, verify};
use serde::Serialize;
use std::fmt::Write;

/// Tokens in a step, unless the flags say otherwise: few enough that prompts are cut into chunks.
const BATCHED_TOKENS: usize = 64;

#[derive(Serialize)]
struct Report<'a> {
    model: String,
    backend: &'a str,
    isa: &'a str,
    threads: usize,
    dtype: String,
    quantization: String,
    /// Null but for CUDA devices.
    gemm: Option<&'static str>,
    /// Null but for CUDA devices.
    graphs: Option<bool>,
    block_size: usize,
    max_num_batched_tokens: usize,
    #[serde(flatten)]
    report: &'a VerifyReport,
}

/// Runs the command.
///
/// # Errors
/// The model or the golden file is unusable, or they do not fit each other.
pub fn run(args: &VerifyArgs) -> anyhow::Result<Outcome> {
    let model = &args.model.model;
    let against = args.layers.then_some(args.against);
    let mut setup = args.model.setup_against(against)?;
    let options = &mut setup.options;
    if !args.model.sets_batched_tokens() {
        options.engine.max_num_batched_tokens = Some(BATCHED_TOKENS);
    }
    let files = load::open(model)?;
    if args.layers {
        return layers::run(args, &files, options);
    }
    let golden = match (&args.golden, files.format) {
        (Some(golden), _) => golden.clone(),
        (None, ModelFormat::HuggingFace) => {
            Golden::in_folder(model).context("give a golden file with --golden")?
        }
        (None, ModelFormat::Gguf) => {
            anyhow::bail!("{}: a GGUF file needs --golden", model.display())
        }
    };
    let golden_file = Golden::open(&golden, files.info().vocab_size)?;
    let mut engine = load::load(&files, options)?;
    let report = verify(&mut engine, &golden_file).with_context(|| golden.display().to_string())?;
    let backend = engine.backend();
    let cuda = (options.backend == BackendKind::Cuda).then_some(options.cuda);
    let mut output = Output::stdout();
    if args.json {
        output.json(&Report {
            model: model.display().to_string(),
            backend: backend.name,
            isa: &backend.isa,
            threads: backend.threads,
            dtype: backend.dtype.to_string(),
            quantization: backend.quantization.to_string(),
            gemm: cuda.map(|cuda| gemm_name(cuda.gemm)),
            graphs: cuda.map(|cuda| !cuda.enforce_eager),
            block_size: options.engine.block_size,
            max_num_batched_tokens: engine.limits().max_num_batched_tokens,
            report: &report,
        })?;
    } else {
        output.text(&table(&report, (&backend, cuda)))?;
    }
    Ok(if report.passed { Outcome::Done } else { Outcome::Failed })
}

fn table(report: &VerifyReport, computer: (&BackendInfo, Option<CudaOptions>)) -> String {
    let header = [
        "sequence",
        "tokens",
        "max |Δ|",
        "mean |Δ|",
        "KL",
        "greedy",
        "gap",
        "generated",
        "decode",
        "result",
    ];
    let mut rows = vec![header.map(str::to_owned)];
    rows.extend(report.sequences.iter().enumerate().map(|(i, sequence)| row(i, sequence)));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..header.len()).filter_map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
        let _ = writeln!(text, "{}", cells.collect::<Vec<_>>().join("  "));
    }
    let passed = report.sequences.iter().filter(|sequence| sequence.passed).count();
    let _ = writeln!(
        text,
        "{}: {passed} of {} sequences within tolerance ({})",
        if report.passed { "passed" } else { "DIFFERS" },
        report.sequences.len(),
        circumstances(report, computer),
    );
    text
}

/// What computed, and what was in its way.
fn circumstances(
    report: &VerifyReport,
    (backend, cuda): (&BackendInfo, Option<CudaOptions>),
) -> String {
    let mut parts =
        vec![format!("{} backend", backend.name), backend.isa.clone(), backend.dtype.to_string()];
    if backend.quantization.is_quantised() {
        parts.push(backend.quantization.to_string());
    }
    parts.push(counted(report.num_steps, "step"));
    if let Some(CudaOptions { gemm, enforce_eager, .. }) = cuda {
        let graphs = if enforce_eager { "no graphs" } else { "graphs" };
        parts.extend([gemm_name(gemm).to_owned(), graphs.to_owned()]);
    }
    for (count, how) in
        [(report.num_preempted_recompute, "recompute"), (report.num_preempted_swap, "swap")]
    {
        if count > 0 {
            parts.push(format!("{} by {how}", counted(count, "preemption")));
        }
    }
    parts.join(", ")
}

fn row(i: usize, sequence: &SequenceReport) -> [String; 10] {
    let of_greedy = |count: usize| format!("{count}/{}", sequence.greedy_tokens);
    [
        i.to_string(),
        sequence.prompt_tokens.to_string(),
        bounded(sequence.max_abs_diff),
        bounded(sequence.mean_abs_diff),
        format!("{:.1e}", sequence.kl_divergence),
        of_greedy(sequence.greedy_agree),
        bounded(sequence.greedy_gap),
        of_greedy(sequence.generated_agree),
        if sequence.decode_equals_prefill { "equal" } else { "DIFFERS" }.to_owned(),
        if sequence.passed { "ok" } else { "DIFFERS" }.to_owned(),
    ]
}

/// A value, its limit where it has one, and a mark where it is over.
fn bounded(bounded: Bounded) -> String {
    let Bounded { value, limit } = bounded;
    if limit.is_infinite() {
        return format!("{value:.1e}");
    }
    format!("{value:.1e} {} {limit:.1e}", if bounded.holds() { "≤" } else { ">" })
}
