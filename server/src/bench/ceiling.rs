//! `quire bench ceiling`: what this machine can do at best, whatever the model.

use super::Files;
use super::args::CeilingArgs;
use super::machine::{Machine, caches};
use super::roofline::read_size;
use super::table::{Row, aligned};
use crate::Outcome;
use crate::info::huge_pages;
use crate::output::{Output, counted, to_json, two_columns};
use crate::size::format_size;
use quire_engine::backend::Isa;
use quire_engine::backend::ceiling::{
    Ctx, MatrixKind, Pages, ReadBuffer, matrix_peak, read_bandwidth, usable_cores,
};
use quire_engine::memory::SystemMemory;
use serde::Serialize;
use std::path::Path;
use std::time::Duration;

/// How long memory, a cache and a matrix kernel are measured.
const MEMORY_BUDGET: Duration = Duration::from_millis(250);
const CACHE_BUDGET: Duration = Duration::from_millis(60);
const PEAK_BUDGET: Duration = Duration::from_millis(120);

/// What was found.
#[derive(Serialize)]
struct Report {
    benchmark: &'static str,
    version: &'static str,
    machine: Machine,
    isa: &'static str,
    /// Bytes that were read.
    memory: usize,
    huge_pages: String,
    /// One a number of threads.
    runs: Vec<Run>,
}

/// Bytes to read at least: with fewer, starting the threads takes longer.
const LEAST_READ: usize = 1 << 20;

/// With some threads. Bytes a second that are read, and operations a second, each multiplication
/// and each addition counted.
#[derive(Default, Serialize)]
struct Run {
    threads: usize,
    read_huge_pages: f64,
    read_small_pages: f64,
    /// Null where the cache is not known, or is no larger than those before it.
    read_l3: Option<f64>,
    read_l2: Option<f64>,
    bf16: f64,
    f32: f64,
    int8: f64,
}

/// Runs the command.
///
/// # Errors
/// An argument or the file is unusable, or memory is short.
pub fn run(args: &CeilingArgs) -> anyhow::Result<Outcome> {
    let files = Files::check(args.output.as_deref(), None, None, Path::new("-"))?;
    let isa = args.isa.unwrap_or_else(Isa::detect);
    let most = args.threads.unwrap_or_else(usable_cores);
    let memory = args.memory.unwrap_or_else(read_size);
    anyhow::ensure!(memory >= LEAST_READ, "--memory is {memory} bytes, less than 1 MiB");
    if let Some(available) = SystemMemory::read().map(|memory| memory.available) {
        anyhow::ensure!(
            memory <= available / 2,
            "--memory is {}, more than half of the {} that are available",
            format_size(memory),
            format_size(available)
        );
    }
    let threads = if most == 1 { vec![1] } else { vec![1, most] };
    let ctxs = threads.iter().map(|&n| Ctx::new(isa, n)).collect::<Result<Vec<_>, _>>()?;
    let report = Report {
        benchmark: "ceiling",
        version: env!("CARGO_PKG_VERSION"),
        machine: Machine::here(),
        isa: isa.name(),
        memory,
        huge_pages: huge_pages(),
        runs: runs(&ctxs, memory)?,
    };
    let mut output = Output::stdout();
    if args.json {
        output.json(&report)?;
    } else {
        output.text(&table(&report))?;
    }
    files.write(|| to_json(&report) + "\n", String::new)?;
    Ok(Outcome::Done)
}

fn runs(ctxs: &[Ctx], memory: usize) -> anyhow::Result<Vec<Run>> {
    let mut runs: Vec<Run> = ctxs.iter().map(|_| Run::default()).collect();
    let widest = ctxs.last().expect("a context a run");
    for pages in [Pages::Huge, Pages::Small] {
        let buffer = ReadBuffer::new(widest, memory, pages)?;
        for (run, ctx) in runs.iter_mut().zip(ctxs) {
            let rate = read_bandwidth(ctx, &buffer, MEMORY_BUDGET);
            match pages {
                Pages::Huge => run.read_huge_pages = rate,
                Pages::Small => run.read_small_pages = rate,
            }
        }
    }
    let (l2, l3) = (caches().l2, caches().l3);
    for (run, ctx) in runs.iter_mut().zip(ctxs) {
        run.threads = ctx.pool.threads();
        let cache = |bytes| -> anyhow::Result<f64> {
            Ok(read_bandwidth(ctx, &ReadBuffer::new(ctx, bytes, Pages::Huge)?, CACHE_BUDGET))
        };
        // Threads beyond the cores share their caches.
        let all_l2 = l2.map_or(0, |bytes| bytes * run.threads.min(usable_cores()));
        run.read_l2 = l2.map(|_| cache(all_l2 / 2)).transpose()?;
        let l3 = l3.map(|bytes| bytes / 2).filter(|&bytes| bytes > 2 * all_l2);
        run.read_l3 = l3.map(cache).transpose()?;
        let peak = |kind| matrix_peak(ctx, kind, PEAK_BUDGET);
        run.bf16 = peak(MatrixKind::Bf16);
        run.f32 = peak(MatrixKind::F32);
        run.int8 = peak(MatrixKind::Int8);
    }
    Ok(runs)
}

fn table(report: &Report) -> String {
    let runs = &report.runs;
    let row = |name: &str, get: fn(&Run) -> Option<f64>| {
        let values: Vec<_> = runs.iter().map(|run| Some(get(run)? / 1e9)).collect();
        Row { name: name.to_owned(), values, decimals: 1, compares: true }
    };
    let mut rows = vec![
        row("read, huge pages (GB/s)", |run| Some(run.read_huge_pages)),
        row("read, small pages (GB/s)", |run| Some(run.read_small_pages)),
        row("read, L3 cache (GB/s)", |run| run.read_l3),
        row("read, L2 cache (GB/s)", |run| run.read_l2),
        row("multiply, bf16 (GFLOP/s)", |run| Some(run.bf16)),
        row("multiply, f32 (GFLOP/s)", |run| Some(run.f32)),
        row("multiply, int8 (GOP/s)", |run| Some(run.int8)),
    ];
    rows.retain(|row| row.values.iter().any(Option::is_some));
    let names: Vec<String> = runs.iter().map(|run| counted(run.threads as u64, "thread")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let facts = two_columns(&[
        ("instruction set", report.isa.to_owned()),
        ("memory read", format_size(report.memory)),
        ("huge pages", report.huge_pages.clone()),
    ]);
    facts + "\n" + &aligned(&names, &rows)
}
