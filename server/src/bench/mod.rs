//! `quire bench`: throughput and latency of a model on this machine, without a server.

pub mod args;
mod calibrate;
mod dataset;
mod drive;
mod latency;
mod machine;
mod plot;
mod predict;
mod report;
mod stats;
mod table;
mod throughput;

use crate::Outcome;
use crate::generate::output_file::{OutputFile, is_same_file};
use args::{BenchArgs, BenchCommand};
use quire_engine::scheduler::Policy;
use std::path::{Path, PathBuf};

/// Runs the command.
///
/// # Errors
/// An argument or a file is unusable, or a run could not go on.
pub fn run(args: &BenchArgs) -> anyhow::Result<Outcome> {
    match &args.command {
        BenchCommand::Throughput(args) => throughput::run(args),
        BenchCommand::Latency(args) => latency::run(args),
    }
}

/// A policy as the flags name it.
fn policy_name(policy: Policy) -> &'static str {
    match policy {
        Policy::Fcfs => "fcfs",
        Policy::Priority { .. } => "priority",
        Policy::Static => "static",
    }
}

/// The files that a benchmark writes at its end: results and picture.
struct Files([Option<OutputFile>; 2]);

impl Files {
    /// Checks that those asked for can be written and are none that are read.
    fn check(
        paths: [&Option<PathBuf>; 2],
        input: Option<&Path>,
        model: &Path,
    ) -> anyhow::Result<Self> {
        if let [Some(a), Some(b)] = paths {
            anyhow::ensure!(a != b && !is_same_file(a, b), "--output and --plot are one file");
        }
        let check = |path: &Option<PathBuf>| {
            let Some(path) = path else { return Ok(None) };
            OutputFile::check(path, input.unwrap_or(Path::new("-")), model).map(Some)
        };
        Ok(Files([check(paths[0])?, check(paths[1])?]))
    }

    /// Writes them.
    fn write(self, contents: [&dyn Fn() -> String; 2]) -> anyhow::Result<()> {
        for (file, content) in self.0.into_iter().zip(contents) {
            if let Some(file) = file {
                file.start(0)?.text(&content())?;
            }
        }
        Ok(())
    }
}
