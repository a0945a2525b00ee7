//! Whole models with random weights, through the engine: tokens a second against what memory
//! bandwidth allows, and the time to the first token. Then the same shapes in transformers with
//! static batching, where that is installed.

use super::ceilings::{Ceilings, ROOFLINE};
use super::report::Figure;
use super::{Run, transformers};
use crate::models::{RandomWeights, Sizes};
use anyhow::{Context, ensure};
use half::bf16;
use quire_engine::backend::cuda::CudaDevice;
use quire_engine::backend::{CudaBackend, CudaBuffers, CudaOptions, GemmMode};
use quire_engine::config::ConfigError;
use quire_engine::engine::TextConfig;
use quire_engine::runner::{ModelRunner, RunnerSizes};
use quire_engine::{DType, Engine, EngineConfig, Request, SamplingParams};
use quire_model_zoo::decoder::{Decoder, DecoderLimits, model_info};
use quire_model_zoo::memory::DecoderMemory;
use quire_tests::fixtures::byte_tokenizer;
use quire_tests::oracle::greedy;
use quire_tests::rng::Rng;
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Instant;

/// Percent of the bandwidth that one sequence of an 8B model is to reach.
const AIM: f64 = 70.0;
/// Tokens of a step.
const BUDGET: usize = 4096;
const BLOCK_SIZE: usize = 16;
/// Ids of prompts.
const PROMPT_IDS: usize = 256;
/// Prompts whose first token is waited for; the first of them loads kernels.
const LONG_PROMPTS: u64 = 4;

/// Runs all models.
pub(super) fn run(run: &mut Run) -> anyhow::Result<()> {
    let ceilings = run.ceilings()?;
    for &(name, sizes) in run.sizes.models {
        if !run.has_time_for(name) {
            continue;
        }
        match model(run, (name, &sizes), &ceilings) {
            Ok(rates) => transformers::run(run, (name, &sizes), &rates),
            Err(error) if error.is::<ConfigError>() => run.leave_out(name, &format!("{error:#}")),
            Err(error) => return Err(error.context(name)),
        }
    }
    Ok(())
}

/// Tokens a second of a decode, by sequences.
pub(super) type Rates = BTreeMap<usize, f64>;

/// Runs a model; its memory is free again afterwards.
fn model(
    run: &mut Run,
    (name, sizes): (&str, &Sizes),
    ceilings: &Ceilings,
) -> anyhow::Result<Rates> {
    let start = Instant::now();
    let mut engine = engine(run, sizes)?;
    run.say(&format!("{name} loaded in {:.1} s", start.elapsed().as_secs_f64()));
    let mut seed = 0;
    let mut ttft = f64::INFINITY;
    for _ in 0..LONG_PROMPTS {
        seed += 1;
        ttft = ttft.min(first_token_ms(&mut engine, run.sizes.long_prompt, seed)?);
    }
    let tokens = run.sizes.long_prompt;
    let params = json!({"model": name, "prompt": tokens});
    run.figure(Figure::new("time to first token", "ms", params.clone()).ms(ttft).value(ttft));
    let flops = sizes.prefill_flops(tokens);
    let best = tokens as f64 / ceilings.seconds(sizes.step_weight_bytes() as f64, flops);
    let figure = Figure::new("prefill", "tok/s", params).ms(ttft);
    run.figure(figure.value(1e3 * tokens as f64 / ttft).ceiling(Some(best), ROOFLINE));
    let mut rates = Rates::new();
    for &batch in run.sizes.batches {
        if run.has_time_for(&format!("{name}, {batch} sequences")) {
            seed += 1;
            let decode = decode(&mut engine, run, batch, seed)?;
            rates.insert(batch, decode.rate());
            run.figure(figure_of(&decode, (name, sizes), ceilings));
        }
    }
    Ok(rates)
}

fn engine(run: &Run, sizes: &Sizes) -> anyhow::Result<Engine> {
    let largest = run.sizes.batches.iter().copied().max().unwrap_or(1);
    let longest = run.sizes.long_prompt.max(run.sizes.prompt + run.sizes.generated) + 1;
    let positions = longest.next_multiple_of(BLOCK_SIZE);
    let spec = sizes.spec(positions);
    let config = EngineConfig {
        max_num_seqs: largest,
        max_num_batched_tokens: Some(BUDGET.min(positions * largest)),
        max_model_len: Some(positions),
        block_size: BLOCK_SIZE,
        num_blocks: Some(largest * positions / BLOCK_SIZE),
        prefix_caching: false,
        max_logprobs: 1,
        ..Default::default()
    };
    let memory = DecoderMemory::new(&spec, CudaBuffers::new(DType::Bf16, GemmMode::Triton));
    let resolved = config.resolve(&memory, CudaDevice::open(0)?.memory)?;
    let scheduler = &resolved.scheduler;
    let mut backend = CudaBackend::<bf16>::new(CudaOptions::default())?;
    let limits =
        DecoderLimits { max_tokens: scheduler.max_num_batched_tokens, max_positions: positions };
    let source = RandomWeights::new(&spec);
    let decoder = Decoder::load(&spec, &source, &mut backend, &limits, &mut |_| ())?;
    let runner = ModelRunner::new(
        backend,
        decoder,
        RunnerSizes {
            layout: model_info(&spec).kv_layout(scheduler.num_blocks, BLOCK_SIZE, DType::Bf16),
            num_swap_blocks: 0,
            max_tokens: limits.max_tokens,
            max_seqs: largest,
            max_positions: positions,
            max_logprobs: 1,
        },
    )?;
    let text = TextConfig {
        tokenizer: byte_tokenizer(),
        prepend_bos: None,
        eos_token_ids: Vec::new(),
        chat_template: None,
    };
    Ok(Engine::new(Box::new(runner), text, resolved, 0))
}

/// A request with a prompt of its own.
fn request(prompt: usize, generated: usize, seed: u64) -> Request {
    let mut rng = Rng::new(seed);
    let ids: Vec<u32> = (0..prompt).map(|_| rng.below(PROMPT_IDS) as u32).collect();
    Request::new(ids, SamplingParams { detokenize: false, ..greedy(generated) })
}

/// Milliseconds until a prompt has its first token, nothing else being there.
fn first_token_ms(engine: &mut Engine, prompt: usize, seed: u64) -> anyhow::Result<f64> {
    engine.add_request(request(prompt, 1, seed))?;
    let mut ttft = None;
    while engine.num_unfinished() > 0 {
        let finished = engine.step()?.finished;
        ttft = ttft.or(finished.first().and_then(|output| output.metrics.ttft));
    }
    Ok(ttft.context("no first token")?.as_secs_f64() * 1e3)
}

/// Steps in which every sequence got a token.
struct Decode {
    batch: usize,
    steps: usize,
    seconds: f64,
    /// Keys of a sequence, on average over those steps.
    keys: f64,
}

impl Decode {
    /// Tokens a second.
    fn rate(&self) -> f64 {
        (self.batch * self.steps) as f64 / self.seconds
    }
}

/// Runs `batch` requests, and times the steps from the first in which all of them decode.
fn decode(engine: &mut Engine, run: &Run, batch: usize, seed: u64) -> anyhow::Result<Decode> {
    let (prompt, generated) = (run.sizes.prompt, run.sizes.generated);
    for i in 0..batch as u64 {
        engine.add_request(request(prompt, generated, (seed << 32) + i))?;
    }
    let mut full: Vec<Instant> = Vec::new();
    while engine.num_unfinished() > 0 {
        let before = engine.stats();
        let finished = engine.step()?.finished;
        let done = engine.stats().since(&before);
        let is_decode = done.num_steps == 1 && done.num_computed_tokens == batch as u64;
        if is_decode && done.num_generated_tokens == batch as u64 && finished.is_empty() {
            full.push(Instant::now());
        }
    }
    ensure!(full.len() > 1, "{batch} sequences never all decode; more tokens are needed");
    let (first, last) = (full[0], full[full.len() - 1]);
    let steps = full.len() - 1;
    // They are the last ones, but for that in which all end.
    let keys = (prompt + generated - 1) as f64 - steps as f64 / 2.0;
    Ok(Decode { batch, steps, seconds: (last - first).as_secs_f64(), keys })
}

fn figure_of(decode: &Decode, (name, sizes): (&str, &Sizes), ceilings: &Ceilings) -> Figure {
    let Decode { batch, steps, seconds, keys } = *decode;
    let bytes =
        sizes.step_weight_bytes() as f64 + batch as f64 * keys * sizes.kv_bytes_per_token() as f64;
    let flops = batch as f64 * sizes.step_flops(keys);
    let best = batch as f64 / ceilings.seconds(bytes, flops);
    let params = json!({"model": name, "batch": batch, "keys": keys.round()});
    let figure = Figure::new("decode", "tok/s", params)
        .ms(1e3 * seconds / steps as f64)
        .value(decode.rate())
        .ceiling(Some(best), ROOFLINE);
    if batch == 1 { figure.aim_percent(AIM) } else { figure }
}
