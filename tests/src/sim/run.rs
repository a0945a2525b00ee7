//! Runs from seeds; a failing one is made as small as it gets.

use super::driver::{Log, Sim};
use super::ops::{self, Op, SimConfig};
use super::totals::Totals;
use crate::rng::Rng;
use std::cell::{Cell, RefCell};
use std::fmt::Write;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

/// Lines of the story of a failure.
const LAST_LINES: usize = 40;

/// What became of runs.
#[derive(Debug)]
pub enum Outcome {
    /// All went well.
    Passed(Box<Totals>),
    /// This seed failed, with this message.
    Failed(u64, String),
}

/// Runs one seed.
pub fn run_seed(seed: u64) -> Result<Totals, String> {
    let (config, ops) = plan(seed);
    run(&config, &ops, None)
}

/// Runs the seeds of `range` on `threads` threads, and calls `progress` now and then with the
/// number of them that are done. Stops at the first that fails.
pub fn run_seeds(
    range: std::ops::Range<u64>,
    threads: usize,
    progress: impl Fn(u64) + Sync,
) -> Outcome {
    let next = AtomicU64::new(range.start);
    let worker = || {
        let mut totals = Totals::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= range.end {
                return Ok(totals);
            }
            match run_seed(seed) {
                Ok(run) => totals.add(&run),
                Err(message) => {
                    next.store(range.end, Ordering::Relaxed);
                    return Err((seed, message));
                }
            }
            progress(seed - range.start);
        }
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        handles.into_iter().map(|h| h.join().expect("failures are caught")).collect()
    });
    let mut totals = Totals::default();
    let mut failure: Option<(u64, String)> = None;
    for result in results {
        match result {
            Ok(run) => totals.add(&run),
            Err(f) => failure = Some(failure.map_or(f.clone(), |g| if g.0 < f.0 { g } else { f })),
        }
    }
    match failure {
        Some((seed, message)) => Outcome::Failed(seed, message),
        None => Outcome::Passed(Box::new(totals)),
    }
}

/// The story of a seed that fails: its configuration, the fewest operations that still fail, and
/// what happens then.
pub fn explain(seed: u64) -> String {
    let (config, mut ops) = plan(seed);
    let Err(first) = run(&config, &ops, None) else { return format!("seed {seed} passes") };
    shrink(&config, &mut ops);
    let log = Log::default();
    let last = run(&config, &ops, Some(log.clone())).expect_err("shrunk to a failure");
    let mut text = format!("seed {seed} fails: {first}\n{config:#?}\n");
    for (i, op) in ops.iter().enumerate() {
        let _ = writeln!(text, "{i:4} {op:?}");
    }
    let log = log.borrow();
    let _ = writeln!(text, "with these {} operations:", ops.len());
    for line in &log[log.len().saturating_sub(LAST_LINES)..] {
        let _ = writeln!(text, "{line}");
    }
    text += &last;
    text.push('\n');
    text
}

fn plan(seed: u64) -> (SimConfig, Vec<Op>) {
    let mut rng = Rng::named(seed, "simulation");
    let config = ops::config(&mut rng);
    let ops = ops::ops(&mut rng, &config);
    (config, ops)
}

/// Deletes operations while the run still fails, in ever smaller pieces.
fn shrink(config: &SimConfig, ops: &mut Vec<Op>) {
    let mut size = ops.len();
    while size > 0 {
        let mut deleted = false;
        let mut at = 0;
        while at < ops.len() {
            let mut fewer = ops.clone();
            fewer.drain(at..(at + size).min(ops.len()));
            if run(config, &fewer, None).is_err() {
                *ops = fewer;
                deleted = true;
            } else {
                at += size;
            }
        }
        if !deleted || size > 1 {
            size /= 2;
        }
    }
}

/// Does the operations, then lets all that is left end.
fn run(config: &SimConfig, ops: &[Op], log: Option<Log>) -> Result<Totals, String> {
    let at = Cell::new(0);
    let body = || {
        let mut sim = Sim::new(config.clone());
        sim.log = log;
        for (i, op) in ops.iter().enumerate() {
            at.set(i);
            sim.apply(op);
        }
        at.set(ops.len());
        sim.drain();
        sim.check_idle();
        sim.totals
    };
    catch(body).map_err(|message| match ops.get(at.get()) {
        Some(op) => format!("at operation {} ({op:?}): {message}", at.get()),
        None => format!("after the last operation: {message}"),
    })
}

thread_local! {
    /// Panics of this thread are caught, and what they said.
    static CAUGHT: RefCell<Option<String>> = const { RefCell::new(None) };
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body`; an assertion that fails is an error with its text and place.
fn catch<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let default = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if CATCHING.get() {
                CAUGHT.set(Some(info.to_string()));
            } else {
                default(info);
            }
        }));
    });
    CATCHING.set(true);
    let result = panic::catch_unwind(AssertUnwindSafe(body));
    CATCHING.set(false);
    result.map_err(|_| CAUGHT.take().unwrap_or_default())
}
