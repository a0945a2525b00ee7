//! The memory plan is what the device gives: as many bytes are allocated when a model is loaded as
//! the plan says, steps allocate no more, and the plan leaves what others have taken.

use fakecuda::{Config, FakeCuda};
use half::bf16;
use quire_engine::backend::cuda::CudaDevice;
use quire_engine::backend::{CudaBackend, CudaOptions};
use quire_engine::config::{ConfigError, PreemptionMode};
use quire_engine::memory::{MemoryPlan, ModelMemory};
use quire_engine::ops::{Backend, TensorKind};
use quire_engine::sampling::NumLogprobs;
use quire_engine::{DType, Engine, EngineConfig, Request, SamplingParams};
use quire_model_zoo::{BackendKind, LoadOptions, ModelError, ModelFiles};
use quire_tests::fixtures::data_dir;
use quire_tests::oracle::{drain, greedy};

const GOLDENS: [&str; 6] = [
    "llama-gqa",
    "llama3-rope-tied",
    "mistral-full",
    "mistral-sliding",
    "qwen2-bias",
    "qwen3-qknorm",
];

fn golden(name: &str) -> ModelFiles {
    ModelFiles::open(&data_dir().join("goldens").join(name)).expect("a golden model")
}

fn options(dtype: DType, engine: EngineConfig) -> LoadOptions {
    let (backend, dtype) = (BackendKind::Cuda, Some(dtype));
    LoadOptions { backend, dtype, engine, ..LoadOptions::default() }
}

/// Sizes of several kinds; the last have swap space.
fn configs() -> [EngineConfig; 3] {
    let small = EngineConfig {
        max_num_batched_tokens: Some(7),
        max_num_seqs: 3,
        num_blocks: Some(5),
        block_size: 32,
        ..EngineConfig::default()
    };
    [
        EngineConfig { num_blocks: Some(40), ..EngineConfig::default() },
        EngineConfig { swap_bytes: 1 << 20, preemption: PreemptionMode::Swap, ..small.clone() },
        small,
    ]
}

fn null() -> Config {
    Config { null: true, ..Config::default() }
}

#[test]
fn the_plan_is_what_is_allocated() {
    let fake = FakeCuda::load(&null());
    for (name, dtype) in GOLDENS.iter().flat_map(|name| [(name, DType::F32), (name, DType::Bf16)]) {
        let files = golden(name);
        for config in configs() {
            let what = format!("{name} {dtype} {config:?}");
            fake.reset(&null());
            let options = options(dtype, config);
            let plan = files.plan(&options).expect("a valid configuration");
            assert_eq!(fake.stats().allocations, 0, "{what}: a plan takes no memory");
            let memory = plan.memory;
            assert_eq!(memory.swap, 0, "{what}: swap space is the host's");
            let engine = files.load_planned(&options, plan, &mut |_| ()).expect("memory is there");
            let stats = fake.stats();
            assert_eq!(stats.live_bytes as usize, memory.needed(), "{what}");
            assert_eq!(
                stats.peak_bytes, stats.live_bytes,
                "{what}: loading takes more for a while"
            );
            drop(engine);
        }
    }
}

#[test]
fn swap_space_is_page_locked_host_memory() {
    let fake = FakeCuda::load(&null());
    let files = golden("llama-gqa");
    let pinned = |swap_blocks: usize| {
        fake.reset(&null());
        let [_, config, _] = configs();
        let block_bytes = files.memory(&options(DType::Bf16, config.clone())).block_bytes(32);
        let swap_bytes = swap_blocks * block_bytes.expect("a small block");
        let options = options(DType::Bf16, EngineConfig { swap_bytes, ..config });
        let engine = files.load(&options, &mut |_| ()).expect("memory is there");
        assert_eq!(engine.limits().num_swap_blocks, swap_blocks);
        (fake.stats().live_pinned_bytes as usize, swap_bytes)
    };
    let [(without, _), (with, bytes)] = [0, 9].map(pinned);
    assert_eq!(with - without, bytes);
}

/// Requests that want all there is: prompts as long as can be, log-probabilities of everything,
/// lists of ids, several samples, beams.
fn demanding() -> Vec<Request> {
    let ids: Vec<u32> = (0..200).collect();
    let request = |i: usize| {
        let base = SamplingParams {
            allowed_token_ids: Some(ids.clone()),
            logprobs: Some(NumLogprobs::Top(20)),
            frequency_penalty: 0.5,
            ..greedy(4)
        };
        let params = match i % 4 {
            0 => SamplingParams { prompt_logprobs: Some(NumLogprobs::Top(20)), ..base },
            1 => SamplingParams { n: 3, temperature: 1.0, ..base },
            2 => SamplingParams { use_beam_search: true, beam_width: Some(3), ..greedy(4) },
            _ => base,
        };
        let len = if i < 8 { 252 } else { 1 + i % 40 };
        Request::new((0..len).map(|p| (p * 7 + i) as u32 % 256).collect::<Vec<_>>(), params)
    };
    (0..40).map(request).collect()
}

/// Bytes that the device gives while `requests` run.
fn growth(fake: &FakeCuda, engine: &mut Engine, requests: Vec<Request>) -> u64 {
    let before = fake.stats().live_bytes;
    for request in requests {
        engine.add_request(request).expect("a valid request");
    }
    drain(engine);
    engine.reset_prefix_cache();
    fake.stats().live_bytes - before
}

#[test]
fn steps_take_no_more_memory() {
    let fake = FakeCuda::load(&null());
    let config = EngineConfig {
        num_blocks: Some(60),
        max_num_seqs: 256,
        swap_bytes: 4 << 20,
        preemption: PreemptionMode::Swap,
        ..EngineConfig::default()
    };
    let loaded = golden("llama-gqa").load(&options(DType::Bf16, config), &mut |_| ());
    let engine = &mut loaded.expect("memory is there");
    // The list of blocks that are copied or swapped grows with its length.
    let more = growth(&fake, engine, demanding());
    assert!(more <= 1024, "{more} bytes");
    assert!(engine.stats().swap_bytes > 0, "nothing was swapped");
    assert_eq!(growth(&fake, engine, demanding()), 0);
}

/// There is room for 65536 entries in the lists of a step, of each kind; one that has more makes
/// room.
#[test]
fn a_step_with_longer_lists_than_any_before_takes_memory_once() {
    let fake = FakeCuda::load(&null());
    let config =
        EngineConfig { num_blocks: Some(800), max_num_seqs: 800, ..EngineConfig::default() };
    let loaded = golden("llama-gqa").load(&options(DType::Bf16, config), &mut |_| ());
    let engine = &mut loaded.expect("memory is there");
    let requests = |num: usize| -> Vec<Request> {
        let logit_bias = (0..300).map(|id| (id, 0.5)).collect();
        let params =
            SamplingParams { allowed_token_ids: Some((0..300).collect()), logit_bias, ..greedy(2) };
        (0..num).map(|i| Request::new(vec![i as u32 % 256, 7], params.clone())).collect()
    };
    assert_eq!(growth(&fake, engine, requests(200)), 0);
    let more = growth(&fake, engine, requests(800));
    assert!(more > 0 && more < 4 << 20, "{more} bytes");
    assert_eq!(growth(&fake, engine, requests(800)), 0);
}

/// The device's memory that is taken, as the driver has it.
fn taken() -> usize {
    let memory = CudaDevice::open(0).expect("a device").memory;
    memory.total - memory.available
}

#[test]
fn the_plan_leaves_what_others_have_taken() {
    const TOTAL: usize = 600 << 20;
    /// Each of some 60 allocations is rounded up to what the driver gives.
    const ROUNDING: usize = 60 * 512;
    let config = Config { device_bytes: TOTAL, ..null() };
    let fake = FakeCuda::load(&config);
    let files = golden("llama-gqa");
    for (share, others) in [(None, 0), (Some(0.5), 0), (None, 100 << 20), (Some(0.7), 90 << 20)] {
        fake.reset(&config);
        let mut other = CudaBackend::<bf16>::new(CudaOptions::default()).expect("a device");
        let _tensor = other.tensor(others / 1024, 256, TensorKind::F32).expect("there is memory");
        let before = taken();
        assert!(before >= others);
        let engine = EngineConfig { memory_utilization: share, ..EngineConfig::default() };
        let options = options(DType::Bf16, engine);
        let plan = files.plan(&options).expect("there is memory");
        let memory = plan.memory;
        assert_eq!((memory.total, memory.available), (TOTAL, TOTAL - before));
        let may_take = (TOTAL as f64 * f64::from(share.unwrap_or(0.9))) as usize;
        assert_eq!(memory.budget, may_take - before);
        let block = memory.kv_cache / plan.scheduler.num_blocks;
        let engine = files.load_planned(&options, plan, &mut |_| ()).expect("memory is there");
        // The KV cache takes what is left, but for a part of a block.
        let planned = taken();
        assert!(planned <= may_take + ROUNDING, "{planned} bytes of {may_take}");
        assert!(planned + block > may_take, "{planned} bytes of {may_take}");
        drop(engine);
    }
}

#[test]
fn a_share_that_others_have_filled_is_refused() {
    let config = Config { device_bytes: 600 << 20, ..null() };
    let fake = FakeCuda::load(&config);
    let mut other = CudaBackend::<bf16>::new(CudaOptions::default()).expect("a device");
    let _tensor = other.tensor(200 << 10, 256, TensorKind::F32).expect("there is memory");
    let allocations = fake.stats().allocations;
    let engine = EngineConfig { memory_utilization: Some(0.5), ..EngineConfig::default() };
    let refused = golden("llama-gqa").load(&options(DType::Bf16, engine), &mut |_| ());
    let Err(ModelError::Config(ConfigError::DoesNotFit { plan, .. })) = refused else {
        panic!("{:?}", refused.err())
    };
    let MemoryPlan { total, budget, .. } = *plan;
    assert_eq!(total, 600 << 20);
    assert!(budget < 100 << 20, "{budget}");
    assert_eq!(fake.stats().allocations, allocations);
}
