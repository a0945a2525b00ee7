//! What a decode step costs the host on the CUDA backend: with a driver that does nothing, all the
//! time is the host's, the driver's bookkeeping included.
//!
//! * `submit`: the input of a step to launches, of models with few and with many layers. In eager
//!   mode that is every launch of the model; with graphs those of a step of up to 256 sequences are
//!   one.
//! * `step`: the parts of steps each of which is planned before the results of the one before are
//!   applied: plan, prepare, submit, collect, update. Preparation is what a device may have to wait
//!   for once a step is planned, prepare and submit; it shall take 50 µs at 256 sequences.
//!
//! The time of an iteration is the median of all of a sample: others on the machine interrupt some.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use fakecuda::{Config, FakeCuda};
use quire_bench::models::{CudaRunner, Room, Sizes, TINY, cuda_runner};
use quire_bench::running::{BLOCK_SIZE, Plain, config, decoding};
use quire_engine::backend::CudaOptions;
use quire_engine::runner::{Executor, ExecutorOutput, Step, StepInput, prepare};
use quire_engine::scheduler::{Scheduler, SchedulerConfig, StepPlan};
use std::time::{Duration, Instant};

/// Tokens of the longest sequence.
const MAX_POSITIONS: usize = 1024;
/// Steps after which sequences begin anew: they have not grown to the longest.
const STEPS: usize = 500;

/// A step with all that belongs to it.
#[derive(Default)]
struct Flight {
    plan: StepPlan,
    input: StepInput,
    out: ExecutorOutput,
}

/// Sequences that decode, one step ahead.
struct Decoding {
    runner: CudaRunner,
    num_seqs: usize,
    scheduler: Scheduler,
    /// Submitted and not collected.
    ahead: Flight,
    next: Flight,
    steps: usize,
}

impl Decoding {
    fn new(layers: usize, num_seqs: usize, enforce_eager: bool) -> Self {
        let options = CudaOptions { enforce_eager, ..CudaOptions::default() };
        let room = Room {
            max_tokens: num_seqs,
            max_seqs: num_seqs,
            max_positions: MAX_POSITIONS,
            num_blocks: num_blocks(num_seqs),
            block_size: BLOCK_SIZE,
        };
        let runner = cuda_runner(&Sizes { layers, ..TINY }, options, &room).expect("a device");
        let scheduler = sequences(num_seqs);
        let (ahead, next, steps) = Default::default();
        let mut decoding = Decoding { runner, num_seqs, scheduler, ahead, next, steps };
        decoding.begin();
        decoding
    }

    /// Submits the first step.
    fn begin(&mut self) {
        let Decoding { runner, scheduler, ahead, .. } = self;
        ahead.input.sampling.vocab_limit = TINY.vocab;
        self.next.input.sampling.vocab_limit = TINY.vocab;
        scheduler.schedule(&mut ahead.plan);
        prepare(&ahead.plan, scheduler, |_| &Plain, None, &mut ahead.input);
        runner.submit(ahead.input.step()).expect("the driver works");
        self.steps = 1;
    }

    /// Makes the next step, and takes the results of the one before.
    fn step(&mut self) -> Times {
        if self.steps == STEPS {
            self.runner.collect(&mut self.ahead.out).expect("the driver works");
            self.scheduler = sequences(self.num_seqs);
            self.begin();
        }
        self.steps += 1;
        let Decoding { runner, scheduler, ahead, next, .. } = self;
        let mut clock = Clock(Instant::now());
        scheduler.schedule(&mut next.plan);
        let plan = clock.lap();
        prepare(&next.plan, scheduler, |_| &Plain, Some(&ahead.input), &mut next.input);
        let prepare = clock.lap();
        runner.submit(next.input.step()).expect("the driver works");
        let submit = clock.lap();
        runner.collect(&mut ahead.out).expect("the driver works");
        let collect = clock.lap();
        let tokens = ahead.out.samples.iter().map(|sample| sample.token.expect("a token"));
        scheduler.update(&ahead.plan, tokens, &mut Vec::new());
        let update = clock.lap();
        std::mem::swap(ahead, next);
        Times { plan, prepare, submit, collect, update }
    }

    /// How long it takes to submit the step that is ahead once more.
    fn submit(&mut self) -> Duration {
        self.runner.collect(&mut self.ahead.out).expect("the driver works");
        let start = Instant::now();
        self.runner.submit(self.ahead.input.step()).expect("the driver works");
        start.elapsed()
    }
}

/// Where the time of a step went.
struct Times {
    plan: Duration,
    prepare: Duration,
    submit: Duration,
    collect: Duration,
    update: Duration,
}

/// A part of a step, or several.
type Part = (&'static str, fn(&Times) -> Duration);

/// What is measured at every size.
const SUMS: [Part; 2] = [
    ("preparation", |times| times.prepare + times.submit),
    ("all", |times| times.plan + times.prepare + times.submit + times.collect + times.update),
];

const PARTS: [Part; 5] = [
    ("plan", |times| times.plan),
    ("prepare", |times| times.prepare),
    ("submit", |times| times.submit),
    ("collect", |times| times.collect),
    ("update", |times| times.update),
];

struct Clock(Instant);

impl Clock {
    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        now - std::mem::replace(&mut self.0, now)
    }
}

/// So many times the median of so many.
fn medians(iterations: u64, measure: impl FnMut(u64) -> Duration) -> Duration {
    let mut times: Vec<Duration> = (0..iterations).map(measure).collect();
    let middle = times.len() / 2;
    let (_, median, _) = times.select_nth_unstable(middle);
    median.mul_f64(iterations as f64)
}

fn num_blocks(num_seqs: usize) -> usize {
    num_seqs * MAX_POSITIONS / BLOCK_SIZE
}

fn sequences(num_seqs: usize) -> Scheduler {
    decoding(SchedulerConfig {
        max_model_len: MAX_POSITIONS,
        num_blocks: num_blocks(num_seqs),
        ..config(num_seqs, true)
    })
    .0
}

/// A prepared step, as an executor takes it.
trait AsStep {
    fn step(&self) -> Step<'_>;
}

impl AsStep for StepInput {
    fn step(&self) -> Step<'_> {
        let StepInput { forward, sampling, capture, .. } = self;
        Step { input: forward, sampling, capture }
    }
}

/// A driver that does nothing.
fn null_driver() -> FakeCuda {
    FakeCuda::load(&Config { null: true, device_bytes: 1 << 36, ..Config::default() })
}

fn submits(c: &mut Criterion) {
    let _fake = null_driver();
    let mut group = c.benchmark_group("cuda/submit");
    for layers in [2, 32] {
        for (name, eager) in [("graphs", false), ("eager", true)] {
            for num_seqs in [64, 256, 1024] {
                let mut decoding = Decoding::new(layers, num_seqs, eager);
                // The graph is captured.
                (0..4).for_each(|_| _ = decoding.submit());
                let id = BenchmarkId::new(format!("{name}/{layers}_layers"), num_seqs);
                group.bench_function(id, |b| {
                    b.iter_custom(|iterations| medians(iterations, |_| decoding.submit()))
                });
            }
        }
    }
    group.finish();
}

fn steps(c: &mut Criterion) {
    let _fake = null_driver();
    let mut group = c.benchmark_group("cuda/step");
    for layers in [2, 32] {
        for num_seqs in [64, 256, 1024] {
            let mut decoding = Decoding::new(layers, num_seqs, false);
            let parts = if num_seqs == 256 { &PARTS[..] } else { &[] };
            for (name, part) in SUMS.iter().chain(parts) {
                let id = BenchmarkId::new(format!("{name}/{layers}_layers"), num_seqs);
                group.bench_function(id, |b| {
                    b.iter_custom(|iterations| medians(iterations, |_| part(&decoding.step())))
                });
            }
        }
    }
    group.finish();
}

criterion_group!(benches, submits, steps);
criterion_main!(benches);
