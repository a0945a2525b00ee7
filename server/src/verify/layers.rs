//! `quire verify --layers`: two implementations, op by op.

use crate::Outcome;
use crate::cli::VerifyArgs;
use crate::output::{Output, counted};
use anyhow::{Context, ensure};
use quire_engine::backend::{CudaOptions, Quantization};
use quire_engine::derived_seed;
use quire_model_zoo::loader::ModelFormat;
use quire_model_zoo::trace::{LayerReport, OpDifference, Side, compare};
use quire_model_zoo::verify::Golden;
use quire_model_zoo::{BackendKind, LoadOptions, ModelFiles};
use safetensors::SafeTensors;
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;

/// Most tokens taken of a recorded sequence.
const MAX_RECORDED: usize = 64;
/// Tokens of a sequence that is made up.
const MADE_UP: u64 = 40;
/// Most tokens of `--tokens`: every op's output is kept for all of them.
const MAX_TOKENS: usize = 1024;

#[derive(Serialize)]
struct Report<'a> {
    model: String,
    against: &'a str,
    backend: &'a str,
    isa: Option<String>,
    dtype: String,
    quantization: &'static str,
    tokens: &'a [u32],
    passed: bool,
    first_difference: Option<&'a OpDifference>,
    #[serde(flatten)]
    report: &'a LayerReport,
}

/// Compares and shows the differences.
///
/// # Errors
/// The model, the golden file or the tokens are unusable.
pub fn run(
    args: &VerifyArgs,
    files: &ModelFiles,
    options: &LoadOptions,
) -> anyhow::Result<Outcome> {
    let tokens = tokens(args, files)?;
    let dtype = options.dtype.unwrap_or_else(|| files.default_dtype());
    let choice = args.against.choose();
    let against = Side {
        backend: choice.backend,
        isa: None,
        threads: options.threads,
        quantization: Quantization::None,
        cuda: CudaOptions { device: choice.device, ..options.cuda },
    };
    let LoadOptions { backend, isa, threads, cuda, .. } = *options;
    // Unless somebody asks for it: the other side has none, and would differ everywhere.
    let quantization = options.quantization.unwrap_or_default();
    let side = Side { backend, isa, threads, quantization, cuda };
    let report = compare(files, dtype, &tokens, (against, side))?;
    let first = report.first_difference();
    let mut output = Output::stdout();
    if args.json {
        output.json(&Report {
            model: args.model.model.display().to_string(),
            against: name(against.backend),
            backend: name(side.backend),
            isa: side.isa.map(|isa| isa.to_string()),
            dtype: dtype.to_string(),
            quantization: quantization_name(quantization),
            tokens: &tokens,
            passed: first.is_none(),
            first_difference: first,
            report: &report,
        })?;
    } else {
        let mut text = table(&report);
        let verdict = match first {
            None => format!("passed: every op within {:.0e}", report.bound),
            Some(OpDifference { part, op, relative, max_abs, .. }) => format!(
                "DIFFERS: {op} of {part} is the first over {:.0e}: {relative:.1e}, an element by \
                 {max_abs:.1e}",
                report.bound
            ),
        };
        let backends = format!("{} against {}", name(side.backend), name(against.backend));
        let count = counted(tokens.len() as u64, "token");
        let quantised = match quantization {
            Quantization::None => String::new(),
            other => format!("weights {}, ", quantization_name(other)),
        };
        let _ = writeln!(text, "{verdict} ({backends}, {dtype}, {quantised}{count})");
        output.text(&text)?;
    }
    Ok(if first.is_none() { Outcome::Done } else { Outcome::Failed })
}

fn name(backend: BackendKind) -> &'static str {
    match backend {
        BackendKind::Reference => "reference",
        BackendKind::Cpu => "cpu",
        BackendKind::Cuda => "cuda",
    }
}

fn quantization_name(quantization: Quantization) -> &'static str {
    match quantization {
        Quantization::None => "none",
        Quantization::Stored => "stored",
        Quantization::Int8 => "int8",
    }
}

/// The sequence to compute: `--tokens`, else a recorded one, else one that is made up.
fn tokens(args: &VerifyArgs, files: &ModelFiles) -> anyhow::Result<Vec<u32>> {
    let info = files.info();
    let tokens = match (&args.tokens, &args.golden, files.format) {
        (Some(tokens), ..) => {
            ensure!(
                tokens.len() <= MAX_TOKENS,
                "--tokens has {} ids; the limit is {MAX_TOKENS}",
                tokens.len()
            );
            tokens.clone()
        }
        (None, Some(golden), _) => recorded(golden, info.vocab_size)?,
        (None, None, ModelFormat::HuggingFace) => match Golden::in_folder(&args.model.model) {
            Ok(golden) => recorded(&golden, info.vocab_size)?,
            Err(_) => made_up(info.vocab_size),
        },
        (None, None, ModelFormat::Gguf) => made_up(info.vocab_size),
    };
    let outside = tokens.iter().find(|&&id| id as usize >= info.vocab_size);
    if let Some(id) = outside {
        anyhow::bail!("token id {id} is outside the vocabulary of {} tokens", info.vocab_size);
    }
    Ok(tokens)
}

fn made_up(vocab_size: usize) -> Vec<u32> {
    (0..MADE_UP).map(|i| (derived_seed(0, i) % vocab_size as u64) as u32).collect()
}

/// The longest recorded sequence of at most [`MAX_RECORDED`] tokens or, if all are longer, the
/// start of the first.
fn recorded(path: &Path, vocab_size: usize) -> anyhow::Result<Vec<u32>> {
    let count = Golden::open(path, vocab_size)?.len();
    let shown = path.display();
    let data = std::fs::read(path).with_context(|| format!("cannot read {shown}"))?;
    let tensors = SafeTensors::deserialize(&data).with_context(|| shown.to_string())?;
    let sequence = |i: usize| -> anyhow::Result<Vec<u32>> {
        let ids = tensors.tensor(&format!("ids_{i}")).with_context(|| shown.to_string())?;
        let (ids, _) = ids.data().as_chunks::<8>();
        let id = |bytes: &[u8; 8]| u32::try_from(i64::from_le_bytes(*bytes));
        ids.iter().map(id).collect::<Result<_, _>>().with_context(|| shown.to_string())
    };
    let mut sequences = (0..count).map(sequence).collect::<anyhow::Result<Vec<_>>>()?;
    let short = sequences.iter().enumerate().filter(|(_, ids)| ids.len() <= MAX_RECORDED);
    // Of several of one length the first.
    let longest = short.rev().max_by_key(|(_, ids)| ids.len()).map_or(0, |(i, _)| i);
    let mut ids = sequences.swap_remove(longest);
    ids.truncate(MAX_RECORDED);
    Ok(ids)
}

/// A row for each part of the model, a column for each of its ops, in the order of computation; a
/// new head wherever the ops are other ones.
fn table(report: &LayerReport) -> String {
    let first = report.ops.iter().position(|op| !op.ok);
    let cell = |(i, op): (usize, &OpDifference)| {
        format!("{:.1e}{}", op.relative, if first == Some(i) { " !" } else { "" })
    };
    let parts = report.ops.iter().map(|op| op.part.chars().count());
    let width = parts.max().unwrap_or(0);
    let (mut text, mut head) = (String::new(), Vec::new());
    let mut start = 0;
    for ops in report.ops.chunk_by(|a, b| a.part == b.part) {
        let names: Vec<&str> = ops.iter().map(|op| op.op).collect();
        if names != head {
            let _ = writeln!(text, "{:width$}  {}", "", names.join("  "));
            head = names;
        }
        let cells = (start..).zip(ops).map(|(i, op)| {
            let (cell, width) = (cell((i, op)), op.op.len());
            format!("{cell:>width$}")
        });
        let _ = writeln!(text, "{:width$}  {}", ops[0].part, cells.collect::<Vec<_>>().join("  "));
        start += ops.len();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_marks_the_first_op_over_its_bound() {
        let op = |part: &str, op, relative| OpDifference {
            part: part.to_owned(),
            op,
            relative,
            max_abs: relative,
            ok: relative <= 1e-4,
        };
        let report = LayerReport {
            ops: vec![
                op("embedding", "embed", 0.0),
                op("layer 0", "rms_norm", 1e-7),
                op("layer 0", "attention", 2e-5),
                op("layer 1", "rms_norm", 3e-4),
                op("layer 1", "attention", 4e-4),
            ],
            bound: 1e-4,
        };
        let expected = "           embed\n\
                        embedding  0.0e0\n           rms_norm  attention\n\
                        layer 0      1.0e-7     2.0e-5\n\
                        layer 1    3.0e-4 !     4.0e-4\n";
        assert_eq!(table(&report), expected);
    }

    #[test]
    fn made_up_tokens_are_in_the_vocabulary_and_always_the_same() {
        let tokens = made_up(320);
        assert_eq!(tokens.len(), 40);
        assert!(tokens.iter().all(|&id| id < 320));
        assert_eq!(tokens, made_up(320));
    }
}
