//! Checks and measurements on a machine with an NVIDIA GPU, within ten minutes: first that results
//! are right there, then how fast they come, in percent of what the machine could give.
//!
//! ```text
//! invariance   a request has the same bits alone and in a batch, in chunks, with graphs, preempted
//! conformance  each op against the reference; goldens
//! ceilings     copy bandwidth, matrix peak            ─┐
//! attention    decode and prefill, cost of the fold    │ in percent
//! gemm         matrix products of an 8B model          │ of these
//! block-size   decode over blocks of several sizes     │
//! overhead     what a step takes besides its kernels   │
//! end-to-end   whole models with random weights       ─┘
//! ```
//! A check that fails is recorded, and the run goes on as long as the device works. Each stage has a
//! share of the time; what it has no time left for is left out, and the report says so. What earlier
//! stages leave, later ones may take.
//!
//! A dry run does all of it at tiny sizes on a stand-in driver, on which no time means anything.

mod attention;
mod ceilings;
mod conformance;
mod end_to_end;
mod fold;
mod gemm;
mod goldens;
mod invariance;
mod kit;
mod overhead;
pub mod report;
mod sizes;
mod transformers;

use anyhow::Context;
use ceilings::Ceilings;
use quire_engine::backend::CudaOptions;
use quire_engine::backend::cuda::CudaDevice;
use report::{Check, DeviceReport, Figure, HostReport, Report, StageReport, today};
use sizes::{DRY, FULL, Sizes};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A part of the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Batch invariance.
    Invariance,
    /// Ops against the reference, and goldens.
    Conformance,
    /// What the machine could give.
    Ceilings,
    /// Attention.
    Attention,
    /// Matrix products.
    Gemm,
    /// Decode over blocks of several sizes.
    BlockSize,
    /// Steps with and without graphs.
    Overhead,
    /// Whole models.
    EndToEnd,
}

impl Stage {
    /// All of them, in the order in which they run.
    pub const ALL: [Stage; 8] = [
        Stage::Invariance,
        Stage::Conformance,
        Stage::Ceilings,
        Stage::Attention,
        Stage::Gemm,
        Stage::BlockSize,
        Stage::Overhead,
        Stage::EndToEnd,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Invariance => "invariance",
            Stage::Conformance => "conformance",
            Stage::Ceilings => "ceilings",
            Stage::Attention => "attention",
            Stage::Gemm => "gemm",
            Stage::BlockSize => "block-size",
            Stage::Overhead => "overhead",
            Stage::EndToEnd => "end-to-end",
        }
    }

    /// Its share of the time, in percent of all.
    fn share(self) -> f64 {
        match self {
            Stage::Invariance => 16.0,
            Stage::Conformance => 16.0,
            Stage::Ceilings => 4.0,
            Stage::Attention => 16.0,
            Stage::Gemm => 10.0,
            Stage::BlockSize => 5.0,
            Stage::Overhead => 7.0,
            Stage::EndToEnd => 26.0,
        }
    }

    fn run(self, run: &mut Run) -> anyhow::Result<()> {
        match self {
            Stage::Invariance => invariance::run(run),
            Stage::Conformance => conformance::run(run),
            Stage::Ceilings => run.ceilings().map(|_| ()),
            Stage::Attention => attention::run(run).and_then(|()| fold::run(run)),
            Stage::Gemm => gemm::run(run),
            Stage::BlockSize => attention::block_sizes(run),
            Stage::Overhead => overhead::run(run),
            Stage::EndToEnd => end_to_end::run(run),
        }
    }
}

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Options {
    /// At tiny sizes, and without claims about time.
    pub dry_run: bool,
    /// The folder with the folder of goldens.
    pub data: PathBuf,
    /// What runs; all of it where empty.
    pub only: Vec<Stage>,
    /// For everything.
    pub budget: Duration,
}

/// A run under way.
struct Run {
    dry_run: bool,
    sizes: &'static Sizes,
    data: PathBuf,
    /// Of the stage at work.
    deadline: Instant,
    ceilings: Option<Ceilings>,
    stage: StageReport,
}

/// Runs the stages.
///
/// # Errors
/// There is no device that could be used, or there are no goldens.
pub fn run(options: &Options) -> anyhow::Result<Report> {
    let start = Instant::now();
    let device = CudaDevice::open(0)?;
    let goldens = options.data.join("goldens");
    anyhow::ensure!(goldens.is_dir(), "{} is no folder; say --data FOLDER", goldens.display());
    let mut run = Run {
        dry_run: options.dry_run,
        sizes: if options.dry_run { &DRY } else { &FULL },
        data: options.data.clone(),
        deadline: start,
        ceilings: None,
        stage: StageReport::default(),
    };
    let wanted = |stage: &Stage| options.only.is_empty() || options.only.contains(stage);
    let stages: Vec<Stage> = Stage::ALL.into_iter().filter(wanted).collect();
    let shares: f64 = stages.iter().map(|stage| stage.share()).sum();
    let mut reports = Vec::new();
    let mut until = 0.0;
    for &stage in &stages {
        until += stage.share() / shares;
        run.deadline = start + options.budget.mul_f64(until);
        reports.push(run.stage(stage));
        if !reports.last().is_some_and(StageReport::passed)
            && let Err(error) = CudaDevice::open(0)
        {
            run.say(&format!("the device is lost: {error}"));
            let last: &mut StageReport = reports.last_mut().expect("one was pushed");
            last.error.get_or_insert_with(|| format!("the device is lost: {error}"));
            break;
        }
    }
    Ok(Report {
        benchmark: "gpu-check",
        version: env!("CARGO_PKG_VERSION"),
        dry_run: options.dry_run,
        date: today(),
        device: DeviceReport::from(&device),
        host: HostReport::here(),
        budget_s: options.budget.as_secs_f64(),
        seconds: start.elapsed().as_secs_f64(),
        passed: reports.iter().all(StageReport::passed) && reports.len() == stages.len(),
        stages: reports,
    })
}

impl Run {
    fn stage(&mut self, stage: Stage) -> StageReport {
        let start = Instant::now();
        let budget_s = self.time_left().as_secs_f64();
        self.stage = StageReport { name: stage.name(), budget_s, ..StageReport::default() };
        self.say(&format!("for {budget_s:.0} s"));
        if !self.has_time_for("all of it") {
            return std::mem::take(&mut self.stage);
        }
        if let Err(error) = caught(|| stage.run(self)) {
            self.say(&format!("FAILED: {error:#}"));
            self.stage.error = Some(format!("{error:#}"));
        }
        self.stage.seconds = start.elapsed().as_secs_f64();
        std::mem::take(&mut self.stage)
    }

    fn say(&self, what: &str) {
        eprintln!("{}: {what}", self.stage.name);
    }

    /// Until the stage has to end.
    fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Whether there is time for `what`; notes that it is left out where there is none.
    fn has_time_for(&mut self, what: &str) -> bool {
        let has_time = !self.time_left().is_zero();
        if !has_time {
            self.leave_out(what, "no time");
        }
        has_time
    }

    fn leave_out(&mut self, what: &str, why: &str) {
        self.say(&format!("{what}: left out, {why}"));
        self.stage.left_out.push(format!("{what}: {why}"));
    }

    /// Checks that `holds` neither fails nor panics, if there is time.
    fn check(&mut self, name: &str, holds: impl FnOnce() -> anyhow::Result<()>) {
        if !self.has_time_for(name) {
            return;
        }
        let start = Instant::now();
        let result = caught(holds);
        let seconds = start.elapsed().as_secs_f64();
        self.say(&match &result {
            Ok(()) => format!("{name}: ok, {seconds:.1} s"),
            Err(error) => format!("{name}: FAILED: {error:#}"),
        });
        let detail = result.err().map(|error| format!("{error:#}"));
        let name = name.to_owned();
        self.stage.checks.push(Check { name, passed: detail.is_none(), detail, seconds });
    }

    fn figure(&mut self, figure: Figure) {
        let figure = if self.dry_run { figure.without_times() } else { figure };
        let percent = figure.percent.map(|percent| format!(", {percent:.1} %")).unwrap_or_default();
        let value = figure.value.map_or("-".to_owned(), |value| format!("{value:.2}"));
        let params = serde_json::Value::from(figure.params.clone());
        self.say(&format!("{} {params}: {value} {}{percent}", figure.name, figure.unit));
        self.stage.figures.push(figure);
    }

    /// What the machine could give; measured when first asked for.
    fn ceilings(&mut self) -> anyhow::Result<Ceilings> {
        if self.ceilings.is_none() {
            self.ceilings = Some(ceilings::measure(self).context("ceilings")?);
        }
        Ok(self.ceilings.expect("just measured"))
    }

    /// Bytes of the device's memory that are free.
    fn free_bytes(&self) -> anyhow::Result<usize> {
        Ok(CudaDevice::open(0)?.memory.available)
    }
}

/// Each launch on its own.
const EAGER: CudaOptions =
    CudaOptions { device: 0, gemm: quire_engine::backend::GemmMode::Triton, enforce_eager: true };

/// The result of `work`, or its panic as an error.
fn caught<T>(work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(anyhow::anyhow!(text(&*panic))))
}

/// What a panic says.
fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
    text.unwrap_or_else(|| "a panic".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_all_of_the_time() {
        assert_eq!(Stage::ALL.iter().map(|stage| stage.share()).sum::<f64>(), 100.0);
    }

    #[test]
    fn a_panic_is_a_failed_check_and_the_next_one_runs() {
        let mut run = Run {
            dry_run: true,
            sizes: &DRY,
            data: PathBuf::new(),
            deadline: Instant::now() + Duration::from_secs(3600),
            ceilings: None,
            stage: StageReport::default(),
        };
        run.check("one", || {
            assert_eq!(1, 2, "numbers");
            Ok(())
        });
        run.check("two", || anyhow::bail!("an error"));
        run.check("three", || Ok(()));
        run.deadline = Instant::now();
        run.check("four", || Ok(()));
        let checks = &run.stage.checks;
        let passed: Vec<bool> = checks.iter().map(|check| check.passed).collect();
        assert_eq!(passed, [false, false, true]);
        assert!(checks[0].detail.as_ref().is_some_and(|detail| detail.contains("numbers")));
        assert_eq!(run.stage.left_out, ["four: no time"]);
        assert!(!run.stage.passed());
    }
}
