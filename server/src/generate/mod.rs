//! `quire generate`: prompts of the command line, streamed, and JSONL batches.

mod batch;
mod progress;
mod request_line;
mod result_line;
mod source;
mod stream;
mod summary;

use crate::cli::{Format, GenerateArgs};
use crate::output::{Output, open_output, to_json};
use crate::{Outcome, interrupt, load};
use anyhow::Context;
use batch::Batch;
use progress::Progress;
use quire_engine::{Engine, Request, SamplingParams};
use quire_model_zoo::ModelFiles;
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
        Some(input) if args.output != Path::new("-") => {
            Some((args.output.as_path(), open_output(&args.output, Some(input))?))
        }
        _ => None,
    };
    let files = ModelFiles::open(&args.model.model)?;
    let params = defaults(args, &files.generation)?;
    let mut engine = load::load(&files, &args.model.load_options())?;
    params.validate(&engine.param_limits())?;
    interrupt::catch();

    let start = Instant::now();
    let requests = || args.prompt.iter().map(|text| Request::new(text.as_str(), params.clone()));
    let tally = match input {
        Some(input) => {
            let output = match output {
                Some((path, file)) => Output::file(path, file)?,
                None => Output::stdout(),
            };
            input.batch(&mut engine, params, (output, args.format))?.run()?
        }
        None if args.json => {
            let requests: Vec<Request> = requests().collect();
            let source = Source::Prompts(requests.into_iter().enumerate());
            let (name, progress) = ("prompt".to_owned(), Progress::hidden());
            let output = (Output::stdout(), Format::Jsonl);
            Batch::new(&mut engine, source, name, output, progress).run()?
        }
        None => stream::stream(&mut engine, requests().collect(), Output::stdout())?,
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
            "error: interrupted; {done} requests were done, {} were cut off",
            tally.aborted
        ));
    }
}

/// What holds where a line does not say otherwise: the engine's defaults, over them what the
/// model's publisher recommends, over that the flags.
fn defaults(
    args: &GenerateArgs,
    recommended: &GenerationDefaults,
) -> anyhow::Result<SamplingParams> {
    let mut params = SamplingParams::default();
    params.temperature = recommended.temperature.unwrap_or(params.temperature);
    params.top_p = recommended.top_p.unwrap_or(params.top_p);
    params.min_p = recommended.min_p.unwrap_or(params.min_p);
    params.top_k = match recommended.top_k {
        None | Some(-1) => 0,
        Some(k) => u32::try_from(k).with_context(|| {
            format!("generation_config.json: top_k is {k}; it must be -1 to {}", u32::MAX)
        })?,
    };
    params.repetition_penalty = recommended.repetition_penalty.unwrap_or(params.repetition_penalty);
    args.sampling.apply(&mut params);
    Ok(params)
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
        let name = path.display().to_string();
        let file = File::open(path).with_context(|| format!("cannot read {name}"))?;
        let metadata = file.metadata().with_context(|| format!("cannot read {name}"))?;
        anyhow::ensure!(!metadata.is_dir(), "cannot read {name}: it is a folder");
        let length = metadata.is_file().then_some(metadata.len());
        Ok(Input { name, reader: Box::new(file), length })
    }

    fn batch(
        self,
        engine: &mut Engine,
        params: SamplingParams,
        output: (Output, Format),
    ) -> anyhow::Result<Batch<'_>> {
        // Two things that draw on one terminal would disturb each other.
        let progress = if output.0.is_terminal() || !std::io::stderr().is_terminal() {
            Progress::hidden()
        } else {
            Progress::new(self.length)
        };
        let source = Source::lines(self.reader, self.length.is_some(), params);
        Ok(Batch::new(engine, source, self.name, output, progress))
    }
}
