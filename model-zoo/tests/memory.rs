//! The memory plan against what the system says the process takes. Alone in its process, as other
//! tests would be counted too.
#![cfg(target_os = "linux")]

use quire_engine::backend::{CpuBackend, CpuBuffers};
use quire_engine::memory::SystemMemory;
use quire_engine::ops::ForwardInput;
use quire_engine::runner::{Executor, ExecutorOutput, ModelRunner, RunnerSizes, Step};
use quire_engine::sampling::{SamplingBatch, SamplingRow};
use quire_engine::{DType, EngineConfig};
use quire_model_zoo::ModelFiles;
use quire_model_zoo::decoder::{Decoder, DecoderLimits, model_info};
use quire_model_zoo::error::LoadError;
use quire_model_zoo::memory::DecoderMemory;
use quire_model_zoo::source::{SourceDtype, WeightSource};
use quire_model_zoo::spec::DecoderSpec;
use quire_model_zoo::weights::expected_weights;
use std::path::Path;

const MIB: usize = 1 << 20;
/// What a process takes besides the plan: stacks of threads, step arrays, the allocator's own.
const PROCESS: usize = 8 * MIB;
/// Buffers of at least a huge page, each of which may be rounded up to the next: gate and up of
/// four layers, their down projections, embedding, head, KV cache, swap space.
const LARGE_BUFFERS: usize = 4 + 4 + 4;
const TOKENS: usize = 128;
const VOCAB: usize = 8192;

/// Weights that take no memory until they are loaded.
struct Constant(Vec<(String, Vec<usize>)>);

impl WeightSource for Constant {
    fn shape(&self, name: &str) -> Option<&[usize]> {
        self.0.iter().find(|weight| weight.0 == name).map(|weight| weight.1.as_slice())
    }

    fn dtype(&self, _: &str) -> Option<SourceDtype> {
        Some(SourceDtype::F32)
    }

    fn names(&self) -> Vec<&str> {
        self.0.iter().map(|weight| weight.0.as_str()).collect()
    }

    fn read_row(&self, _: &str, _: usize, out: &mut [f32]) -> Result<(), LoadError> {
        out.fill(0.01);
        Ok(())
    }

    fn location(&self, _: &str) -> String {
        "memory".into()
    }
}

/// A model of some 24 million parameters.
fn spec() -> DecoderSpec {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/goldens/llama-gqa");
    let mut spec = ModelFiles::open(&golden).unwrap().spec;
    spec.vocab_size = VOCAB;
    spec.hidden_size = 512;
    spec.intermediate_size = 2048;
    spec.num_layers = 4;
    spec.windows = vec![None; 4];
    spec.tie_word_embeddings = false;
    spec
}

/// Memory of this process that is not a cached file.
fn anonymous_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() * 1024
}

/// One sequence of [`TOKENS`] tokens in the first blocks, sampled at every position.
fn step(block_size: usize) -> (ForwardInput, SamplingBatch) {
    let mut input = ForwardInput::default();
    input.clear(TOKENS / block_size);
    input.token_ids.resize(TOKENS, 7);
    input.positions.extend(0..TOKENS as u32);
    input.slot_mapping.extend(0..TOKENS as i64);
    input.query_start_loc.push(TOKENS as i32);
    input.seq_lens.push(TOKENS as i32);
    input.block_table.extend(0..(TOKENS / block_size) as i32);
    input.logits_indices.extend(0..TOKENS as u32);
    let row = SamplingRow { top_p: 0.9, logprobs: Some(1), ..Default::default() };
    let rows = vec![row; TOKENS];
    (input, SamplingBatch { rows, vocab_limit: VOCAB, ..Default::default() })
}

#[test]
fn a_process_takes_what_the_plan_says() {
    let spec = spec();
    let weights = expected_weights(&spec).into_iter().map(|w| (w.name, w.shape));
    let source = Constant(weights.collect());
    let config = EngineConfig {
        max_num_batched_tokens: Some(TOKENS),
        kv_cache_bytes: Some(32 * MIB),
        swap_bytes: 16 * MIB,
        ..Default::default()
    };
    let memory = DecoderMemory::new(&spec, CpuBuffers::new(DType::Bf16, Some(2)));
    let resolved = config.resolve(&memory, SystemMemory::unused(1 << 30)).unwrap();
    let (sizes, plan) = (&resolved.scheduler, resolved.memory);

    let before = anonymous_bytes();
    let mut backend = CpuBackend::new(DType::Bf16, None, Some(2)).unwrap();
    let limits = DecoderLimits { max_tokens: TOKENS, max_positions: sizes.max_model_len };
    let model = Decoder::load(&spec, &source, &mut backend, &limits, &mut |_| ()).unwrap();
    let layout = model_info(&spec).kv_layout(sizes.num_blocks, sizes.block_size, DType::Bf16);
    let room = RunnerSizes {
        layout,
        num_swap_blocks: sizes.num_swap_blocks,
        max_tokens: TOKENS,
        max_seqs: sizes.max_num_seqs,
        max_positions: sizes.max_model_len,
        max_logprobs: 20,
    };
    let mut runner = ModelRunner::new(backend, model, room).unwrap();
    // Memory is taken when it is first written.
    let (_, kv, host) = runner.parts_mut();
    kv.fill(0);
    host.fill(0);
    let (input, batch) = step(sizes.block_size);
    let mut out = ExecutorOutput::default();
    let step = Step { input: &input, sampling: &batch, capture: &[false; TOKENS] };
    runner.execute(step, &mut out).unwrap();
    assert_eq!(out.samples.len(), TOKENS);
    let taken = anonymous_bytes() - before;

    let bound = plan.needed() + PROCESS + LARGE_BUFFERS * 2 * MIB;
    assert!(taken <= bound, "{taken} bytes taken, {bound} expected at most: {plan:?}");
    // Nor is there in the plan what is never used, but for the samplers' worst case.
    let least = plan.needed() - plan.sampling;
    assert!(taken >= least, "{taken} bytes taken, {least} expected at least: {plan:?}");
}
