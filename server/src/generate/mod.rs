//! `quire generate`: prompts of the command line, streamed, and JSONL batches.

mod batch;
mod output_file;
mod progress;
mod request_line;
mod result_line;
mod source;
mod stream;
mod summary;

use crate::cli::{Format, GenerateArgs};
use crate::output::{Output, counted, one_line, to_json};
use crate::{Outcome, interrupt, load};
use anyhow::Context;
use batch::Batch;
use output_file::OutputFile;
use progress::Progress;
use quire_engine::sampling::ParamLimits;
use quire_engine::{Engine, Request, SamplingParams};
use quire_model_zoo::config::GenerationDefaults;
use source::Source;
use std::fs::File;
use std::io::{IsTerminal, Read};
use std::path::Path;
use std::time::Instant;
use summary::Tally;

/// Runs the command.
///
/// # Errors
/// An argument or a file is unusable, or the run could not go on.
pub fn run(args: &GenerateArgs) -> anyhow::Result<Outcome> {
    // Files first: whoever mistyped a name should not wait for a model.
    let input = args.input.as_deref().map(Input::open).transpose()?;
    let output = match &args.input {
        Some(input) if args.output == Path::new("-") => {
            output_file::check_stdout(input)?;
            None
        }
        Some(input) => Some(OutputFile::check(&args.output, input, &args.model.model)?),
        None => None,
    };
    let options = args.model.load_options();
    let files = load::open(&args.model.model)?;
    let recommended = recommended(&files.generation, &args.model.model)?;
    let mut engine = load::load(&files, &options)?;
    let params = params(args, &recommended, &engine.param_limits())?;
    interrupt::catch();

    let start = Instant::now();
    let seed = options.engine.seed;
    let tally = match input {
        Some(input) => {
            let output = match output {
                Some(file) => file.start()?,
                None => Output::stdout(),
            };
            input.batch(&mut engine, (params, seed), (output, args.format)).run()?
        }
        None if args.json => {
            let source = Source::Prompts(requests(args, &params, seed).into_iter().enumerate());
            let (name, progress) = ("prompt".to_owned(), Progress::hidden());
            let output = (Output::stdout(), Format::Jsonl);
            Batch::new(&mut engine, source, name, output, progress).run()?
        }
        None => stream::stream(&mut engine, requests(args, &params, seed), Output::stdout())?,
    };
    report_summary(&tally, &engine, start, args.json);
    Ok(match () {
        () if interrupt::requested() => Outcome::Interrupted,
        () if tally.failed > 0 => Outcome::Failed,
        () => Outcome::Done,
    })
}

fn report_summary(tally: &Tally, engine: &Engine, start: Instant, json: bool) {
    let summary = tally.summary(engine, start.elapsed());
    if json {
        crate::report(&to_json(&summary));
    } else {
        crate::report(summary.table().trim_end());
    }
    if interrupt::requested() {
        let done = tally.finished + tally.failed;
        crate::report(&format!(
            "error: interrupted; {} done, {} cut off",
            counted(done, "request"),
            tally.aborted
        ));
    }
}

/// What holds where neither a line nor a flag says otherwise: the engine's defaults, over them
/// what the model's publisher recommends.
fn recommended(file: &GenerationDefaults, model: &Path) -> anyhow::Result<SamplingParams> {
    let mut params = SamplingParams::default();
    params.temperature = file.temperature.unwrap_or(params.temperature);
    params.top_p = file.top_p.unwrap_or(params.top_p);
    params.min_p = file.min_p.unwrap_or(params.min_p);
    params.top_k = match file.top_k {
        None | Some(-1) => 0,
        Some(k) => u32::try_from(k).with_context(|| {
            let path = generation_config(model);
            format!("{path}: top_k is {k}; it must be -1 to {}", u32::MAX)
        })?,
    };
    params.repetition_penalty = file.repetition_penalty.unwrap_or(params.repetition_penalty);
    Ok(params)
}

/// What holds where a line does not say otherwise: `recommended`, over it the flags.
fn params(
    args: &GenerateArgs,
    recommended: &SamplingParams,
    limits: &ParamLimits,
) -> anyhow::Result<SamplingParams> {
    let mut params = recommended.clone();
    args.sampling.apply(&mut params);
    let Err(error) = params.validate(limits) else { return Ok(params) };
    // Flags are not to blame for what is wrong without them.
    let of_file = recommended.validate(limits).is_err_and(|other| other == error);
    let error = anyhow::Error::from(error);
    Err(if of_file { error.context(generation_config(&args.model.model)) } else { error })
}

/// The prompts of the command line.
fn requests(args: &GenerateArgs, params: &SamplingParams, engine_seed: u64) -> Vec<Request> {
    let request = |(text, number): (&String, u64)| {
        let mut request = Request::new(text.as_str(), params.clone());
        source::seed(&mut request, engine_seed, number);
        request
    };
    args.prompt.iter().zip(1..).map(request).collect()
}

/// The path of the file with the publisher's recommendations, to be shown.
fn generation_config(model: &Path) -> String {
    model.join("generation_config.json").display().to_string()
}

/// An open JSONL input.
struct Input {
    name: String,
    reader: Box<dyn Read + Send>,
    /// Length of a regular file, in bytes.
    length: Option<u64>,
}

impl Input {
    /// Opens a file, or standard input for `-`.
    fn open(path: &Path) -> anyhow::Result<Self> {
        if path == Path::new("-") {
            let reader = Box::new(std::io::stdin());
            return Ok(Input { name: "standard input".to_owned(), reader, length: None });
        }
        let name = one_line(&path.display().to_string());
        let file = File::open(path).with_context(|| format!("cannot read {name}"))?;
        let metadata = file.metadata().with_context(|| format!("cannot read {name}"))?;
        anyhow::ensure!(!metadata.is_dir(), "cannot read {name}: it is a folder");
        let length = metadata.is_file().then_some(metadata.len());
        Ok(Input { name, reader: Box::new(file), length })
    }

    /// `defaults` and an engine's seed for what lines do not say.
    fn batch(
        self,
        engine: &mut Engine,
        (defaults, seed): (SamplingParams, u64),
        output: (Output, Format),
    ) -> Batch<'_> {
        // Two things that draw on one terminal would disturb each other.
        let progress = if output.0.is_terminal() || !std::io::stderr().is_terminal() {
            Progress::hidden()
        } else {
            Progress::new(self.length)
        };
        let source = Source::lines(self.reader, self.length.is_some(), defaults, seed);
        Batch::new(engine, source, self.name, output, progress)
    }
}
