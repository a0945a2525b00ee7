//! `quire generate`: prompts of the command line, streamed, and JSONL batches.

mod batch;
mod latency;
#[cfg(test)]
mod lost_tests;
pub mod output_file;
mod progress;
pub mod request_line;
mod resume;
mod source;
mod stream;
mod summary;

use crate::cli::{Format, GenerateArgs, Setup};
use crate::output::{Output, counted, one_line, to_json};
use crate::{Outcome, conversation, interrupt, load, params};
use anyhow::Context;
use batch::{Batch, BatchOptions};
use output_file::OutputFile;
use progress::Progress;
use quire_engine::{Engine, Request, SamplingParams};
use request_line::Defaults;
use resume::{Names, Resumed, resume};
use source::Source;
use std::fs::File;
use std::io::{BufReader, IsTerminal, Read};
use std::path::Path;
use std::time::Instant;
use summary::Tally;

/// Runs the command.
///
/// # Errors
/// An argument or a file is unusable, or the run could not go on.
pub fn run(args: &GenerateArgs) -> anyhow::Result<Outcome> {
    // Files first: whoever mistyped a name should not wait for a model.
    let files = args.input.as_deref().map(|input| open_files(args, input)).transpose()?;
    let model = &args.model.model;
    let template = args.chat_template.as_deref().map(conversation::read_template).transpose()?;
    let setup = args.model.setup()?;
    let mut model_files = load::open(model)?;
    if let Some(template) = template {
        conversation::set_template(&mut model_files, model, template)?;
    }
    let recommended = params::recommended(&model_files.generation, model)?;
    let mut engine = load::load(&model_files, &setup.options)?;
    let mut params = recommended.clone();
    args.apply(&mut params);
    params::check(&params, &recommended, &engine.param_limits(), model)?;

    let start = Instant::now();
    let tally = match files {
        Some((input, output)) => {
            let chat = SamplingParams { max_tokens: args.sampling.max_tokens(), ..params.clone() };
            let defaults = Defaults { prompt: params, chat };
            let batch = BatchOptions {
                fail_fast: args.fail_fast,
                answer_tokens: model_files.generation.max_new_tokens,
                ..Default::default()
            };
            run_batch((args, &setup), (input, output), defaults, batch, &mut engine)?
        }
        None => {
            begin((args, &setup), &engine);
            let requests = requests(args, &params, setup.options.engine.seed);
            if args.json {
                let (name, progress) = ("prompt".to_owned(), Progress::hidden());
                let output = (Output::stdout(), Format::Jsonl);
                let source = Source::prompts(requests);
                Batch::new(&mut engine, source, name, output, progress, Default::default()).run()?
            } else {
                stream::stream(&mut engine, requests, Output::stdout())?
            }
        }
    };
    report_summary(&tally, &engine, start, args.json);
    Ok(Outcome::of_run(tally.any_failed()))
}

/// What comes before the first request, once nothing can be refused any more.
fn begin((args, setup): (&GenerateArgs, &Setup), engine: &Engine) {
    if !(args.quiet || args.json) {
        load::show(engine, setup);
    }
    interrupt::catch();
}

/// The input and, unless it is standard output, the file for the results.
fn open_files(args: &GenerateArgs, input: &Path) -> anyhow::Result<(Input, Option<OutputFile>)> {
    let opened = Input::open(input)?;
    if args.output == Path::new("-") {
        anyhow::ensure!(!args.resume, "--resume needs the results of the first run: --output FILE");
        output_file::check_stdout(input)?;
        return Ok((opened, None));
    }
    anyhow::ensure!(!args.resume || args.format == Format::Jsonl, "--resume needs --format jsonl");
    if let Some(template) = &args.chat_template {
        anyhow::ensure!(
            !output_file::is_same_file(template, &args.output),
            "{}: the output would overwrite the chat template",
            args.output.display()
        );
    }
    Ok((opened, Some(OutputFile::check(&args.output, input, &args.model.model)?)))
}

/// Runs the requests of a file. `defaults` and an engine's seed stand for what lines do not say.
fn run_batch(
    (args, setup): (&GenerateArgs, &Setup),
    (input, output): (Input, Option<OutputFile>),
    defaults: Defaults,
    mut options: BatchOptions,
    engine: &mut Engine,
) -> anyhow::Result<Tally> {
    let seed = setup.options.engine.seed;
    let mut source = Source::lines(input.reader, input.length.is_some(), defaults, seed);
    let results = match &output {
        Some(file) if args.resume => file.content()?,
        _ => None,
    };
    let resumed = match results {
        Some(results) => {
            let path = one_line(&args.output.display().to_string());
            let names = Names { results: &path, input: &input.name };
            resume(BufReader::new(results), &mut source, names)?
        }
        None => Resumed::default(),
    };
    begin((args, setup), engine);
    options.resumable = output.is_some();
    let output = match output {
        Some(file) => file.start(resumed.bytes)?,
        None => Output::stdout(),
    };
    // Two things that draw on one terminal would disturb each other.
    let progress = if output.is_terminal() || !std::io::stderr().is_terminal() {
        Progress::hidden()
    } else {
        Progress::new(input.length)
    };
    progress.skip(resumed.input_bytes);
    options.kept = resumed.kept;
    // Whoever keeps what is written there has no progress line to look at.
    options.log_load = !std::io::stderr().is_terminal();
    Batch::new(engine, source, input.name, (output, args.format), progress, options).run()
}

fn report_summary(tally: &Tally, engine: &Engine, start: Instant, json: bool) {
    let summary = tally.summary(engine, start.elapsed());
    if json {
        crate::report(&to_json(&summary));
    } else {
        crate::report(summary.table().trim_end());
    }
    let why = match () {
        () if interrupt::requested() => "interrupted",
        () if tally.lost => "stopped, as the device is lost (with --output, --resume goes on)",
        () if tally.stopped => "stopped at the first failure",
        () => return,
    };
    let (finished, failed) = (counted(tally.finished, "request"), tally.failed);
    let cut = tally.aborted;
    crate::report(&format!("error: {why}; {finished} finished, {failed} failed, {cut} cut off"));
}

/// The prompts of the command line.
fn requests(args: &GenerateArgs, params: &SamplingParams, engine_seed: u64) -> Vec<Request> {
    let request = |(text, number): (&String, u64)| {
        let mut request = Request::new(text.as_str(), params.clone());
        source::seed(&mut request.params, engine_seed, number);
        request
    };
    args.prompt.iter().zip(1..).map(request).collect()
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
}
