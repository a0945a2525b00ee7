//! What a throughput benchmark found, as JSON and as a table. Names are vLLM's where the meaning
//! is the same.

use super::dataset::BenchRequest;
use super::drive::{KvPoint, Measured, Sample};
use super::machine::{BackendReport, Machine};
use super::predict::{Schedule, StepModel};
use super::roofline::{Ceilings, Shares};
use super::stats::{Distribution, mean};
use crate::cli::scheduling::PolicyName;
use crate::memory::PlanJson;
use quire_engine::scheduler::SchedulerConfig;
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Most points of a curve over time.
const MAX_POINTS: usize = 1000;

/// All runs of a benchmark.
#[derive(Serialize)]
pub struct Report {
    /// `throughput`.
    pub benchmark: &'static str,
    /// Of quire.
    pub version: &'static str,
    /// Path of the model.
    pub model: String,
    /// What was run.
    pub dataset: Value,
    /// Requests a second; null: all at once, or as the lines say.
    pub request_rate: Option<f64>,
    /// Where.
    pub machine: Machine,
    /// The step times that predictions are made of; null: none are wanted, or the
    /// context is too short.
    pub step_model: Option<StepModel>,
    /// What the machine can do at best; null: not asked for, or something else than the CPU
    /// computes.
    pub ceilings: Option<Ceilings>,
    /// One a configuration.
    pub runs: Vec<Run>,
    /// Each later run over the first.
    pub ratios: Vec<Ratio>,
}

/// One run.
#[derive(Serialize)]
pub struct Run {
    /// Policy, seats and, where several are compared, block size.
    pub name: String,
    /// The engine's limits.
    pub config: RunConfig,
    /// Where the memory went, in bytes.
    pub memory: PlanJson,
    /// What computed.
    pub backend: BackendReport,
    /// Ctrl-C ended it.
    pub interrupted: bool,
    /// Seconds.
    pub duration: f64,
    /// Requests of which every sequence ended well.
    pub completed: usize,
    /// Sequences that failed.
    pub failed: usize,
    /// What became of the first of them.
    pub failures: Vec<String>,
    /// Tokens of the prompts of completed requests.
    pub total_input_tokens: usize,
    /// Tokens of outputs.
    pub total_output_tokens: usize,
    /// Requests a second.
    pub request_throughput: f64,
    /// Tokens of outputs a second.
    pub output_throughput: f64,
    /// Tokens of prompts and outputs a second.
    pub total_token_throughput: f64,
    /// `{mean,median,std,p99}_{queue,ttft,tpot,itl,e2el}_ms`.
    #[serde(flatten)]
    pub latencies: BTreeMap<String, f64>,
    /// Each class, where requests have one.
    pub classes: Vec<Class>,
    /// Steps.
    pub num_steps: u64,
    /// Tokens computed for padding.
    pub num_padding_tokens: u64,
    /// Where the time went, in seconds; `other` is what is outside of steps.
    pub step_times: BTreeMap<&'static str, f64>,
    /// Tokens looked up in the prefix cache, and found.
    pub prefix_cache: PrefixReport,
    /// Sequences that gave up their blocks.
    pub preemptions: PreemptionReport,
    /// Bytes copied to the host and back.
    pub swap_bytes: u64,
    /// How full the KV cache was.
    pub kv_cache: KvReport,
    /// What the duration should have been; null: not asked for, or prefixes were shared.
    pub prediction: Option<Prediction>,
    /// How close its steps came to what the machine can do; null where that is not known.
    pub ceiling: Option<Shares>,
}

/// The limits of an engine, under the names of `SchedulerConfig` and `EngineConfig`.
#[derive(Serialize)]
pub struct RunConfig {
    pub policy: PolicyName,
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    pub max_model_len: usize,
    pub block_size: usize,
    pub num_blocks: usize,
    pub num_swap_blocks: usize,
    pub prefix_caching: bool,
    pub async_scheduling: bool,
    pub seed: u64,
}

/// Requests of a class.
#[derive(Serialize)]
pub struct Class {
    /// Its name; null for requests without one.
    pub name: Option<String>,
    /// Sequences that ended well.
    pub completed: usize,
    /// Their tokens.
    pub output_tokens: usize,
    /// `{mean,median,std,p99}_{queue,ttft,tpot,e2el}_ms`.
    #[serde(flatten)]
    pub latencies: BTreeMap<String, f64>,
}

/// The prefix cache.
#[derive(Serialize)]
pub struct PrefixReport {
    /// Tokens looked up.
    pub queries: u64,
    /// Tokens found.
    pub hits: u64,
}

/// Preemptions by kind.
#[derive(Serialize)]
pub struct PreemptionReport {
    /// Computed anew.
    pub recompute: u64,
    /// Copied to the host.
    pub swap: u64,
    /// Of those computed anew: the host had no room.
    pub swap_fallbacks: u64,
}

/// The KV cache over a run.
#[derive(Debug, PartialEq, Serialize)]
pub struct KvReport {
    /// Tokens the pool holds.
    pub pool_tokens: usize,
    /// Most blocks held after a step.
    pub peak_blocks: usize,
    /// Live tokens over tokens of the pool, mean over time.
    pub live_of_pool: f64,
    /// Live tokens over slots of held blocks, mean over time.
    pub live_of_held: f64,
    /// Held slots without a token, for each running sequence, mean over points.
    pub waste_per_sequence: f64,
    /// What that is for a random length: (block size − 1) / 2.
    pub expected_waste: f64,
    /// At most 1000 points, evenly.
    pub over_time: Vec<KvPoint>,
}

/// What the duration should have been.
#[derive(Serialize)]
pub struct Prediction {
    /// The ideal schedule and its time.
    #[serde(flatten)]
    pub schedule: Schedule,
    /// Measured over predicted duration.
    pub measured_over_predicted: f64,
}

/// A run over the first one.
#[derive(Serialize)]
pub struct Ratio {
    /// Name of the run.
    pub run: String,
    /// Name of the first.
    pub over: String,
    /// Of output tokens a second.
    pub output_throughput: f64,
    /// The same, as predicted.
    pub predicted_output_throughput: Option<f64>,
}

impl Ratio {
    /// Of `run` over `first`.
    pub fn new(run: &Run, first: &Run) -> Self {
        let predicted = |run: &Run| run.prediction.as_ref().map(|p| p.schedule.duration_s);
        let predicted = predicted(first).zip(predicted(run));
        Ratio {
            run: run.name.clone(),
            over: first.name.clone(),
            output_throughput: over(run.output_throughput, first.output_throughput),
            // Both generate the same tokens.
            predicted_output_throughput: predicted.map(|(first, run)| over(first, run)),
        }
    }
}

/// A quotient, 0 where there is none.
pub fn over(a: f64, b: f64) -> f64 {
    if b == 0.0 { 0.0 } else { a / b }
}

/// What of a run comes from elsewhere.
pub struct RunFacts {
    /// Its name.
    pub name: String,
    /// The engine's limits.
    pub config: RunConfig,
    /// Where the memory went.
    pub memory: PlanJson,
    /// What computed.
    pub backend: BackendReport,
}

impl Run {
    /// The report of a run of `requests`; its prediction and its ceiling come later.
    pub fn new(facts: RunFacts, requests: &[BenchRequest], measured: &Measured) -> Self {
        let samples = &measured.samples;
        let duration = measured.wall.as_secs_f64();
        let mut missing: HashMap<usize, usize> = HashMap::new();
        for sample in samples {
            let n = requests[sample.request].request.params.n;
            let missing = missing.entry(sample.request).or_insert(n);
            *missing = missing.saturating_sub(1);
        }
        missing.retain(|_, missing| *missing == 0);
        let of_prompt: HashMap<usize, usize> =
            samples.iter().map(|s| (s.request, s.prompt_tokens)).collect();
        let total_input_tokens = missing.keys().map(|request| of_prompt[request]).sum();
        let total_output_tokens = samples.iter().map(|s| s.output_tokens).sum();
        let mut latencies = latencies(samples.iter());
        if let Some(itl) = Distribution::of(&measured.itl_ms) {
            itl.named("itl", &mut latencies);
        }
        let stats = &measured.stats;
        let kv_cache = KvReport::new(measured, facts.config.block_size, facts.config.num_blocks);
        Run {
            name: facts.name,
            config: facts.config,
            memory: facts.memory,
            backend: facts.backend,
            interrupted: measured.interrupted,
            duration,
            completed: missing.len(),
            failed: measured.failures.len(),
            failures: measured.failures.iter().take(10).cloned().collect(),
            total_input_tokens,
            total_output_tokens,
            request_throughput: over(missing.len() as f64, duration),
            output_throughput: over(total_output_tokens as f64, duration),
            total_token_throughput: over(
                (total_input_tokens + total_output_tokens) as f64,
                duration,
            ),
            latencies,
            classes: classes(requests, samples),
            num_steps: stats.num_steps,
            num_padding_tokens: stats.scheduler.num_padding_tokens,
            step_times: step_times(measured),
            prefix_cache: PrefixReport {
                queries: stats.scheduler.prefix_queries,
                hits: stats.scheduler.prefix_hits,
            },
            preemptions: PreemptionReport {
                recompute: stats.scheduler.num_preempted_recompute,
                swap: stats.scheduler.num_preempted_swap,
                swap_fallbacks: stats.scheduler.num_swap_fallbacks,
            },
            swap_bytes: stats.swap_bytes,
            kv_cache,
            prediction: None,
            ceiling: None,
        }
    }
}

impl RunConfig {
    /// Of an engine's `limits`; the rest is in its options.
    pub fn new(limits: &SchedulerConfig) -> Self {
        RunConfig {
            policy: limits.policy.into(),
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_model_len: limits.max_model_len,
            block_size: limits.block_size,
            num_blocks: limits.num_blocks,
            num_swap_blocks: limits.num_swap_blocks,
            prefix_caching: limits.prefix_cache.is_some(),
            async_scheduling: false,
            seed: 0,
        }
    }
}

fn latencies<'a>(samples: impl Iterator<Item = &'a Sample> + Clone) -> BTreeMap<String, f64> {
    type Get = fn(&Sample) -> Option<f64>;
    let kinds: [(&str, Get); 4] = [
        ("queue", |s| s.queue_ms),
        ("ttft", |s| s.ttft_ms),
        ("tpot", |s| s.tpot_ms),
        ("e2el", |s| Some(s.e2e_ms)),
    ];
    let mut named = BTreeMap::new();
    for (name, get) in kinds {
        let values: Vec<f64> = samples.clone().filter_map(get).collect();
        if let Some(values) = Distribution::of(&values) {
            values.named(name, &mut named);
        }
    }
    named
}

/// In order of the first request of each; nothing where no request has a class.
fn classes(requests: &[BenchRequest], samples: &[Sample]) -> Vec<Class> {
    let mut seen = HashSet::new();
    let names = requests.iter().map(|r| &r.class).filter(|&class| seen.insert(class));
    let names: Vec<&Option<String>> = names.collect();
    if names.iter().all(|name| name.is_none()) {
        return Vec::new();
    }
    let class = |name: &&Option<String>| {
        let of_class = samples.iter().filter(|s| requests[s.request].class == **name);
        Class {
            name: (*name).clone(),
            completed: of_class.clone().count(),
            output_tokens: of_class.clone().map(|s| s.output_tokens).sum(),
            latencies: latencies(of_class),
        }
    };
    names.iter().map(class).collect()
}

fn step_times(measured: &Measured) -> BTreeMap<&'static str, f64> {
    let parts = measured.stats.times.parts();
    let mut times: BTreeMap<_, _> =
        parts.iter().map(|(name, time)| (*name, time.as_secs_f64())).collect();
    let known = measured.stats.times.total() + measured.kv_reading;
    times.insert("kv_reading", measured.kv_reading.as_secs_f64());
    times.insert("other", measured.wall.saturating_sub(known).as_secs_f64());
    times
}

impl KvReport {
    /// Of a run with a pool of `num_blocks`.
    fn new(measured: &Measured, block_size: usize, num_blocks: usize) -> Self {
        let points = &measured.kv;
        let total_s: f64 = points.iter().map(|p| p.step_s).sum();
        let over_time = |get: fn(&KvPoint) -> f64| {
            let weighted = points.iter().map(|p| get(p) * p.step_s);
            over(weighted.sum(), total_s)
        };
        let waste = points.iter().filter(|p| p.num_running > 0);
        let waste: Vec<f64> = waste.map(|p| p.wasted_slots as f64 / p.num_running as f64).collect();
        let every = points.len().div_ceil(MAX_POINTS).max(1);
        KvReport {
            pool_tokens: block_size * num_blocks,
            peak_blocks: measured.peak_blocks,
            live_of_pool: over_time(|p| p.live_of_pool),
            live_of_held: over_time(|p| p.live_of_held),
            waste_per_sequence: mean(&waste).unwrap_or(0.0),
            expected_waste: (block_size as f64 - 1.0) / 2.0,
            over_time: points.iter().step_by(every).copied().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::dataset::greedy;
    use super::*;
    use quire_engine::Request;
    use quire_engine::memory::MemoryPlan;
    use std::time::Duration;

    #[test]
    fn the_kv_cache_is_weighed_by_time() {
        let point = |t_s, step_s, live_of_pool, live_of_held| KvPoint {
            t_s,
            step_s,
            num_running: 2,
            wasted_slots: 3,
            live_of_pool,
            live_of_held,
            ..KvPoint::default()
        };
        let report = |kv| KvReport::new(&Measured { kv, ..Measured::default() }, 4, 4);
        let kv = report(vec![point(1.0, 1.0, 0.5, 1.0), point(4.0, 3.0, 0.25, 0.5)]);
        assert_eq!(kv.pool_tokens, 16);
        assert_eq!(kv.live_of_pool, 0.5 * 0.25 + 0.25 * 0.75);
        assert_eq!(kv.live_of_held, 1.0 * 0.25 + 0.5 * 0.75);
        assert_eq!((kv.waste_per_sequence, kv.expected_waste), (1.5, 1.5));
        let kv = report((0..2500).map(|i| point(f64::from(i), 1.0, 0.5, 1.0)).collect());
        assert_eq!((kv.over_time.len(), kv.over_time[1].t_s), (834, 3.0));
        assert_eq!(report(Vec::new()).over_time, []);
    }

    #[test]
    fn requests_are_counted_once_and_by_class() {
        let request = |class: Option<&str>, n| {
            let mut params = greedy(2);
            params.n = n;
            let class = class.map(str::to_owned);
            BenchRequest { request: Request::new(vec![1, 2, 3], params), class, at_s: 0.0 }
        };
        let requests = [request(Some("a"), 2), request(None, 1), request(Some("a"), 2)];
        let sample = |request, e2e_ms| Sample {
            request,
            prompt_tokens: 3,
            output_tokens: 2,
            ttft_ms: Some(1.0),
            e2e_ms,
            ..Sample::default()
        };
        // One sample of the third request is missing.
        let samples = vec![sample(0, 4.0), sample(0, 6.0), sample(1, 1.0), sample(2, 8.0)];
        let wall = Duration::from_secs(2);
        let measured = Measured { samples, wall, ..Measured::default() };
        let limits = SchedulerConfig::default();
        let facts = RunFacts {
            name: "x".to_owned(),
            config: RunConfig::new(&limits),
            memory: MemoryPlan::default().into(),
            backend: BackendReport::default(),
        };
        let run = Run::new(facts, &requests, &measured);
        assert_eq!((run.completed, run.total_input_tokens, run.total_output_tokens), (2, 6, 8));
        assert_eq!((run.request_throughput, run.total_token_throughput), (1.0, 7.0));
        let classes: Vec<_> =
            run.classes.iter().map(|c| (c.name.as_deref(), c.completed)).collect();
        assert_eq!(classes, [(Some("a"), 3), (None, 1)]);
        assert_eq!(run.classes[0].latencies["mean_e2el_ms"], 6.0);
        assert!(!run.latencies.contains_key("mean_tpot_ms"));
        assert_eq!(run.step_times["other"], 2.0);
    }
}
