//! Speeds as shares of what this machine can do.
//!
//! Machines drift: what is compared is measured in turns, and the best of several turns counts.

use quire_kernels_cpu::{
    Ctx, Isa, MatrixKind, Pages, ReadBuffer, matrix_peak, read_bandwidth, usable_cores,
};
use std::time::{Duration, Instant};

/// Bytes that are read to learn the bandwidth of memory; caches keep little of them.
const READ_BYTES: usize = 512 << 20;
/// Turns.
const ROUNDS: usize = 5;
/// How long a turn is, or one call where that takes longer.
const TURN: Duration = Duration::from_millis(12);

/// Whether the command line asks for measurements: `cargo bench` does; not so `cargo test`, which
/// runs every bench once, nor a list.
pub fn measures() -> bool {
    let given = |flag: &str| std::env::args().any(|arg| arg == flag);
    given("--bench") && !given("--test") && !given("--list")
}

/// The kernels' context, and what its ceilings are measured with.
pub struct Machine {
    /// All cores, and the best instruction set.
    pub ctx: Ctx,
    buffer: ReadBuffer,
}

/// What a call does.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Bytes it reads at least.
    pub bytes: f64,
    /// Multiplications and additions.
    pub ops: f64,
}

/// Calls measured in turns with the machine's ceilings.
pub struct Measured {
    /// Of each call, the mean of the best turn, in seconds.
    pub seconds: Vec<f64>,
    /// Bytes a second that are read at best.
    pub bandwidth: f64,
    /// bf16 operations a second at best.
    pub peak: f64,
}

impl Default for Machine {
    fn default() -> Self {
        let ctx = Ctx::new(Isa::detect(), usable_cores()).expect("the detected path runs here");
        let bytes = if measures() { READ_BYTES } else { 1 };
        let buffer = ReadBuffer::new(&ctx, bytes, Pages::Huge).expect("the buffer fits here");
        Machine { ctx, buffer }
    }
}

impl Machine {
    /// Runs `calls`, which are numbered, and the ceilings.
    pub fn in_turns(&self, calls: usize, mut call: impl FnMut(usize)) -> Measured {
        let mut measured =
            Measured { seconds: vec![f64::INFINITY; calls], bandwidth: 0.0, peak: 0.0 };
        for _ in 0..ROUNDS {
            let bandwidth = read_bandwidth(&self.ctx, &self.buffer, 2 * TURN);
            measured.bandwidth = measured.bandwidth.max(bandwidth);
            let peak = matrix_peak(&self.ctx, MatrixKind::Bf16, TURN / 2);
            measured.peak = measured.peak.max(peak);
            for (i, best) in measured.seconds.iter_mut().enumerate() {
                let (turn, mut done) = (Instant::now(), 0.0);
                while turn.elapsed() < TURN {
                    call(i);
                    done += 1.0;
                }
                *best = best.min(turn.elapsed().as_secs_f64() / done);
            }
        }
        measured
    }
}

impl Measured {
    /// How close call `i` comes to the ceiling that bounds it, such as `93 % of bandwidth`.
    pub fn share(&self, i: usize, work: Work) -> String {
        let (read, multiply) = (work.bytes / self.bandwidth, work.ops / self.peak);
        let ceiling = if read >= multiply { "bandwidth" } else { "peak" };
        format!("{:.0} % of {ceiling}", 100.0 * read.max(multiply) / self.seconds[i])
    }
}

/// Prints rows of cells, the first of which are the headings, in columns.
pub fn print_table(rows: &[Vec<String>]) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |i: usize| {
        let cells = rows.iter().filter_map(|row| row.get(i));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    println!();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:>width$}"));
        println!("{}", cells.collect::<Vec<_>>().join("  "));
    }
}

/// A row of a table.
pub fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}
