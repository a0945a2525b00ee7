//! `gpu-check`: checks and measurements on a machine with an NVIDIA GPU.
//!
//! Progress goes to standard error, a table to standard output. Exit codes: 0 done; 1 a check failed;
//! 2 it could not run.

use anyhow::Context;
use clap::Parser;
use fakecuda::{Config, FakeCuda};
use quire_bench::gpu_check::report::Report;
use quire_bench::gpu_check::{Options, Stage, run};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Check a machine with an NVIDIA GPU: that results are right there, then how fast they come
#[derive(Parser)]
#[command(name = "gpu-check", version)]
struct Args {
    /// Do all of it at tiny sizes on a driver that interprets the kernels, and claim no speeds
    #[arg(long)]
    dry_run: bool,
    /// Folder with the recorded test data
    #[arg(long, value_name = "FOLDER", default_value = "tests/data")]
    data: PathBuf,
    /// Run only these stages, separated by commas
    #[arg(long, value_name = "STAGES", value_delimiter = ',', value_parser = stage)]
    only: Vec<Stage>,
    /// Seconds that it may take
    #[arg(long, value_name = "SECONDS", default_value_t = 540)]
    budget: u64,
    /// File for the report as JSON; default: one in bench/results, none for a dry run
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn stage(name: &str) -> Result<Stage, String> {
    let found = Stage::ALL.into_iter().find(|stage| stage.name() == name);
    found.ok_or_else(|| {
        let names = Stage::ALL.map(Stage::name).join(", ");
        format!("no such stage; there are {names}")
    })
}

fn main() -> ExitCode {
    let args = Args::parse();
    match checked(&args) {
        Ok(report) if report.passed => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn checked(args: &Args) -> anyhow::Result<Report> {
    let _fake = args.dry_run.then(|| {
        let fake = FakeCuda::load(&Config::default());
        fake.load_cublaslt();
        fake
    });
    // A check that panics says so in the report.
    std::panic::set_hook(Box::new(|_| {}));
    let report = run(&Options {
        dry_run: args.dry_run,
        data: args.data.clone(),
        only: args.only.clone(),
        budget: Duration::from_secs(args.budget),
    })?;
    print!("{}", report.table());
    let file = args
        .json
        .clone()
        .or_else(|| (!args.dry_run).then(|| Path::new("bench/results").join(report.file_name())));
    if let Some(file) = file {
        write(&report, &file).with_context(|| file.display().to_string())?;
        eprintln!("written: {}", file.display());
    }
    Ok(report)
}

fn write(report: &Report, file: &Path) -> anyhow::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    Ok(std::fs::write(file, serde_json::to_string_pretty(report)? + "\n")?)
}
