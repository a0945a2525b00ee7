//! `quire bench`: throughput and latency of a model on this machine, without a server, and what the
//! machine can do at best.

pub mod args;
mod calibrate;
mod ceiling;
mod dataset;
mod drive;
mod latency;
mod machine;
mod plot;
mod predict;
mod report;
mod roofline;
mod stats;
mod table;
mod throughput;

use crate::Outcome;
use crate::generate::output_file::{OutputFile, is_same_file};
use args::{BenchArgs, BenchCommand};
use std::path::Path;

/// Runs the command.
///
/// # Errors
/// An argument or a file is unusable, or a run could not go on.
pub fn run(args: &BenchArgs) -> anyhow::Result<Outcome> {
    match &args.command {
        BenchCommand::Throughput(args) => throughput::run(args),
        BenchCommand::Latency(args) => latency::run(args),
        BenchCommand::Ceiling(args) => ceiling::run(args),
    }
}

/// The files that a benchmark writes at its end.
struct Files {
    results: Option<OutputFile>,
    plot: Option<OutputFile>,
}

impl Files {
    /// Checks that those asked for can be written and are none that are read.
    fn check(
        results: Option<&Path>,
        plot: Option<&Path>,
        input: Option<&Path>,
        model: &Path,
    ) -> anyhow::Result<Self> {
        if let Some((a, b)) = results.zip(plot) {
            anyhow::ensure!(a != b && !is_same_file(a, b), "--output and --plot are one file");
        }
        let check = |path| OutputFile::check(path, input.unwrap_or(Path::new("-")), model);
        Ok(Files { results: results.map(check).transpose()?, plot: plot.map(check).transpose()? })
    }

    /// Writes them.
    fn write(
        self,
        results: impl FnOnce() -> String,
        plot: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        if let Some(file) = self.results {
            file.start(0)?.text(&results())?;
        }
        if let Some(file) = self.plot {
            file.start(0)?.text(&plot())?;
        }
        Ok(())
    }
}
