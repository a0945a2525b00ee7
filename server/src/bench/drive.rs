//! Runs the requests of a benchmark and reads the clocks.

use super::dataset::BenchRequest;
use super::roofline::TimedStep;
use crate::interrupt;
use crate::load::style;
use crate::output::milliseconds;
use anyhow::Context;
use indicatif::ProgressBar;
use quire_engine::metrics::{EngineStats, LoadLog};
use quire_engine::{Engine, FinishReason, RequestId, RequestOutput};
use serde::Serialize;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The KV cache is read at most every so many times of what reading it takes: what requests wait
/// for it is below one percent.
const READING_PERIOD: u32 = 128;
/// Longest wait for an arrival before looking whether Ctrl-C was pressed.
const PATIENCE: Duration = Duration::from_millis(50);

/// A sequence that ended well.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// Place of its request.
    pub request: usize,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Those of them that came from the prefix cache when it was first admitted.
    pub cached_tokens: usize,
    /// Tokens of its output.
    pub output_tokens: usize,
    /// Arrival → first time in a step, in ms.
    pub queue_ms: Option<f64>,
    /// Arrival → first token, in ms.
    pub ttft_ms: Option<f64>,
    /// Mean time between tokens after the first, in ms; `None` with fewer than two.
    pub tpot_ms: Option<f64>,
    /// Arrival → end, in ms.
    pub e2e_ms: f64,
}

/// The KV cache after a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct KvPoint {
    /// Seconds since the start.
    pub t_s: f64,
    /// Seconds since the point before.
    pub step_s: f64,
    /// Sequences with a seat.
    pub num_running: usize,
    /// Blocks held.
    pub held_blocks: usize,
    /// Tokens whose K and V are held.
    pub live_tokens: usize,
    /// Slots of held blocks without a token.
    pub wasted_slots: usize,
    /// Live tokens over tokens of the pool.
    pub live_of_pool: f64,
    /// Live tokens over slots of held blocks; 1 where none is held.
    pub live_of_held: f64,
}

/// What a run brought.
#[derive(Debug, Default)]
pub struct Measured {
    /// From the start to the last output, or to Ctrl-C.
    pub wall: Duration,
    /// Sequences that ended well, in the order of their end.
    pub samples: Vec<Sample>,
    /// What became of requests that failed.
    pub failures: Vec<String>,
    /// Times between tokens that came one after the other, in ms.
    pub itl_ms: Vec<f64>,
    /// What the engine counted.
    pub stats: EngineStats,
    /// Each step; with asynchronous scheduling a time is that of the step after.
    pub steps: Vec<TimedStep>,
    /// Most KV blocks held after a step.
    pub peak_blocks: usize,
    /// Of the KV cache, one a step or, where reading it takes long, one every few steps.
    pub kv: Vec<KvPoint>,
    /// Time that reading the KV cache took; part of `wall`.
    pub kv_reading: Duration,
    /// Ctrl-C was pressed; requests under way are in nothing above.
    pub interrupted: bool,
}

/// Runs `requests`, in order of arrival, on an idle engine. Lines about the load and a progress
/// bar are on standard error.
///
/// # Errors
/// A step failed.
pub fn run(engine: &mut Engine, requests: &[BenchRequest], name: &str) -> anyhow::Result<Measured> {
    let bar = ProgressBar::new(requests.len() as u64);
    bar.set_style(style("{msg} {bar:30} {pos}/{len} requests [{elapsed}<{eta}]"));
    bar.set_message(name.to_owned());
    let (start, base) = (Instant::now(), engine.stats());
    let driver = Driver {
        base,
        engine,
        requests,
        num_arrived: 0,
        live: HashMap::new(),
        start,
        next_reading: start,
        log: LoadLog::new(start, base),
        measured: Measured::default(),
        bar,
    };
    driver.run()
}

/// A request under way.
struct Live {
    request: usize,
    /// From when it should have arrived until the step under way let it.
    late: Duration,
    /// Of each of its sequences, when the last token came.
    last_token: HashMap<usize, Instant>,
}

struct Driver<'a> {
    engine: &'a mut Engine,
    requests: &'a [BenchRequest],
    num_arrived: usize,
    live: HashMap<RequestId, Live>,
    start: Instant,
    /// What was counted before.
    base: EngineStats,
    /// When the KV cache is read again.
    next_reading: Instant,
    log: LoadLog,
    measured: Measured,
    bar: ProgressBar,
}

impl Driver<'_> {
    fn run(mut self) -> anyhow::Result<Measured> {
        while !interrupt::requested() {
            self.arrive()?;
            if self.engine.num_unfinished() == 0 {
                let Some(next) = self.requests.get(self.num_arrived) else { break };
                let wait = Duration::from_secs_f64(next.at_s).saturating_sub(self.start.elapsed());
                std::thread::sleep(wait.min(PATIENCE));
                continue;
            }
            let (before, start) = (self.engine.stats(), Instant::now());
            let out = self.engine.step().context("the engine failed")?;
            let now = Instant::now();
            let work = self.engine.stats().since(&before).work;
            let seconds = (now - start).as_secs_f64();
            self.measured.steps.push(TimedStep { work, seconds });
            for delta in &out.deltas {
                let live = self.live.get_mut(&delta.request_id).expect("a request of ours");
                if let Some(before) = live.last_token.insert(delta.index, now) {
                    self.measured.itl_ms.push(milliseconds(now - before));
                }
            }
            for output in &out.finished {
                self.finished(output);
            }
            self.watch_kv(now);
            self.log_load(now);
        }
        self.measured.interrupted = interrupt::requested();
        for id in self.live.keys() {
            self.engine.abort(*id);
        }
        self.measured.wall = self.start.elapsed();
        self.measured.stats = self.engine.stats().since(&self.base);
        self.bar.finish_and_clear();
        Ok(self.measured)
    }

    /// Adds the requests whose time has come.
    fn arrive(&mut self) -> anyhow::Result<()> {
        while let Some(next) = self.requests.get(self.num_arrived) {
            let at = Duration::from_secs_f64(next.at_s);
            let Some(late) = self.start.elapsed().checked_sub(at) else { break };
            let mut request = next.request.clone();
            // Beams are known at the end only.
            request.stream = !request.params.use_beam_search;
            let id = self.engine.add_request(request).map_err(crate::conversation::refusal)?;
            // All at once means at the start, not when the engine has taken those before it.
            let live = Live { request: self.num_arrived, late, last_token: HashMap::new() };
            self.live.insert(id, live);
            self.num_arrived += 1;
        }
        Ok(())
    }

    fn finished(&mut self, output: &RequestOutput) {
        let live = &self.live[&output.request_id];
        if let FinishReason::Error(message) = &output.finish_reason {
            self.measured.failures.push(format!("request {}: {message}", live.request + 1));
        } else {
            let ms = |since_added: Duration| milliseconds(since_added + live.late);
            self.measured.samples.push(Sample {
                request: live.request,
                prompt_tokens: output.prompt_token_ids.len(),
                cached_tokens: output.metrics.num_cached_tokens,
                output_tokens: output.token_ids.len(),
                queue_ms: output.metrics.queue.map(ms),
                ttft_ms: output.metrics.ttft.map(ms),
                tpot_ms: output.metrics.tpot.map(milliseconds),
                e2e_ms: ms(output.metrics.e2e),
            });
        }
        self.bar.inc(1);
    }

    fn watch_kv(&mut self, now: Instant) {
        let peak = &mut self.measured.peak_blocks;
        *peak = (*peak).max(self.engine.num_held_blocks());
        if now < self.next_reading {
            return;
        }
        let usage = self.engine.kv_usage();
        let block_size = self.engine.limits().block_size;
        let live_of = |blocks: usize| usage.num_live_tokens as f64 / (blocks * block_size) as f64;
        let t_s = (now - self.start).as_secs_f64();
        self.measured.kv.push(KvPoint {
            t_s,
            step_s: t_s - self.measured.kv.last().map_or(0.0, |before| before.t_s),
            num_running: self.engine.load().num_running,
            held_blocks: usage.num_held,
            live_tokens: usage.num_live_tokens,
            wasted_slots: usage.num_wasted_slots,
            live_of_pool: live_of(usage.num_blocks),
            live_of_held: if usage.num_held == 0 { 1.0 } else { live_of(usage.num_held) },
        });
        let took = now.elapsed();
        self.measured.kv_reading += took;
        self.next_reading = now + took * READING_PERIOD;
    }

    fn log_load(&mut self, now: Instant) {
        let engine = &*self.engine;
        if let Some(line) = self.log.line(now, || engine.load()) {
            self.bar.suspend(|| crate::report(&line));
        }
    }
}
