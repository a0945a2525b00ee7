//! Runs the simulation of scheduler and block pool over many seeds: `sim [SEEDS] [SEED]`. With a
//! SEED, only that one; a failure is made small and told.

use quire_tests::sim::{self, Outcome};
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let numbers: Result<Vec<u64>, _> = std::env::args().skip(1).map(|a| a.parse()).collect();
    let range = match numbers.as_deref() {
        Ok([]) => 0..20_000,
        Ok([seeds]) => 0..*seeds,
        Ok([_, seed]) => *seed..seed + 1,
        _ => {
            eprintln!("usage: sim [SEEDS] [SEED]");
            return ExitCode::from(2);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let start = Instant::now();
    let (total, shown) = (range.end - range.start, std::io::stderr().is_terminal());
    let progress = |done: u64| {
        if shown && done.is_multiple_of(128) {
            let _ = write!(std::io::stderr(), "\r{done} of {total} seeds ");
        }
    };
    let single = total == 1;
    let outcome = sim::run_seeds(range, threads, progress);
    if shown {
        eprint!("\r{:40}\r", "");
    }
    match outcome {
        Outcome::Failed(seed, _) => {
            eprint!("{}", sim::explain(seed));
            eprintln!("again: make sim SEED={seed}");
            ExitCode::FAILURE
        }
        Outcome::Passed(totals) => {
            for (name, count) in totals.counters() {
                println!("{name:<24} {count:>12}");
            }
            println!("{:<24} {:>11}%", "longest end, of bound", totals.worst_drain);
            println!("{:<24} {:>11.1}s", "time", start.elapsed().as_secs_f64());
            let idle = totals.counters().into_iter().find(|&(_, count)| count == 0);
            if let Some((name, _)) = idle.filter(|_| !single) {
                eprintln!("no {name}: these seeds prove nothing of it");
                return ExitCode::FAILURE;
            }
            ExitCode::SUCCESS
        }
    }
}
