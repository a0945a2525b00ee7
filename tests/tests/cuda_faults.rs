//! What a device can do wrong. Every call of the driver that can fail does, while a model is loaded
//! and in the middle of its steps: the error has a type and one line, a step that may be tried again
//! is, with the same bits, a device that is lost ends each request once, and nothing stays behind on
//! the device. And machines on which nothing can run.

use fakecuda::{Call, Config, FakeCuda};
use half::bf16;
use quire_engine::backend::cuda::error::Version;
use quire_engine::backend::cuda::{CudaDevice, CudaError};
use quire_engine::backend::{CudaBackend, CudaOptions};
use quire_engine::config::{ConfigError, PreemptionMode};
use quire_engine::engine::{EngineError, RequestError};
use quire_engine::ops::{Backend, BackendError, KvLayout};
use quire_engine::sampling::NumLogprobs;
use quire_engine::{
    DType, Engine, EngineConfig, FinishReason, Request, RequestOutput, SamplingParams,
};
use quire_model_zoo::{BackendKind, LoadOptions, ModelError, ModelFiles};
use quire_tests::fixtures::{Setup, TinyModel, data_dir};
use quire_tests::oracle::{Fingerprint, drain, greedy};
use std::process::Command;

const OUT_OF_MEMORY: i32 = 2;
const INVALID_VALUE: i32 = 1;
const ILLEGAL_ADDRESS: i32 = 700;

/// Every kind of call that the driver can be told to fail.
const CALLS: [Call; 7] = [
    Call::Alloc,
    Call::HostAlloc,
    Call::Launch,
    Call::Copy,
    Call::GraphLaunch,
    Call::ModuleLoad,
    Call::Sync,
];

/// A driver that computes nothing: calls are all that matters.
fn null() -> Config {
    Config { null: true, ..Config::default() }
}

#[track_caller]
fn assert_nothing_lives(fake: &FakeCuda, what: &str) {
    let s = fake.stats();
    let alive = [
        ("allocations", s.live_allocations),
        ("bytes", s.live_bytes),
        ("page-locked", s.live_pinned),
        ("streams", s.live_streams),
        ("events", s.live_events),
        ("modules", s.live_modules),
        ("graphs", s.live_graphs),
    ];
    let alive: Vec<_> = alive.into_iter().filter(|(_, count)| *count > 0).collect();
    assert!(alive.is_empty(), "{what} leaves {alive:?}");
}

fn device_error(error: &BackendError) -> &CudaError {
    let BackendError::Device { source, lost } = error else { panic!("{error}") };
    let error: &CudaError = source.downcast_ref().expect("an error of the backend");
    assert_eq!(error.is_lost(), *lost);
    error
}

/// The error is what a call that fails with `code` is to become, on one line.
#[track_caller]
fn assert_typed(error: &CudaError, call: Call, code: i32) {
    let fits = match (call, code) {
        (_, ILLEGAL_ADDRESS) => matches!(error, CudaError::Lost { code: 700, .. }),
        (Call::Alloc, OUT_OF_MEMORY) => {
            matches!(error, CudaError::OutOfMemory { what, bytes: 1.., .. } if !what.is_empty())
        }
        (Call::HostAlloc, OUT_OF_MEMORY) => {
            matches!(error, CudaError::HostMemory { what, bytes: 1.. } if !what.is_empty())
        }
        (_, OUT_OF_MEMORY) => matches!(error, CudaError::OutOfMemory { bytes: 0, .. }),
        _ => matches!(error, CudaError::Driver { code: 1, .. }),
    };
    assert!(fits, "{call:?} with code {code}: {error:?}");
    assert_eq!(error.to_string().lines().count(), 1, "{error}");
}

// ---- while a model is loaded ---------------------------------------------------------------

fn golden() -> ModelFiles {
    ModelFiles::open(&data_dir().join("goldens/llama-gqa")).expect("a golden model")
}

fn options() -> LoadOptions {
    LoadOptions {
        backend: BackendKind::Cuda,
        dtype: Some(DType::Bf16),
        engine: EngineConfig {
            max_num_batched_tokens: Some(32),
            num_blocks: Some(20),
            swap_bytes: 1 << 20,
            preemption: PreemptionMode::Swap,
            ..EngineConfig::default()
        },
        ..LoadOptions::default()
    }
}

#[test]
fn each_call_of_loading_that_fails_is_told_and_leaves_nothing() {
    let fake = FakeCuda::load(&null());
    let files = golden();
    let options = options();
    for (call, least) in
        [(Call::Alloc, 50), (Call::HostAlloc, 8), (Call::Copy, 20), (Call::Sync, 10)]
    {
        for code in [OUT_OF_MEMORY, INVALID_VALUE, ILLEGAL_ADDRESS] {
            let mut nth = 1;
            loop {
                fake.reset(&null());
                fake.fail(call, nth, code);
                let loaded = files.load(&options, &mut |_| ());
                let what = format!("{call:?} {nth} with code {code}");
                let error = match loaded {
                    Ok(engine) => {
                        drop(engine);
                        assert_nothing_lives(&fake, &what);
                        break;
                    }
                    Err(error) => error,
                };
                let ModelError::Backend(error) = &error else { panic!("{what}: {error}") };
                assert_typed(device_error(error), call, code);
                assert_nothing_lives(&fake, &what);
                nth += 1;
            }
            assert!(nth > least, "loading makes {} calls of {call:?}", nth - 1);
        }
    }
}

/// What is measured at the start may fail; the first step says so then.
#[test]
fn a_device_that_is_lost_while_it_is_measured_is_found_by_the_first_step() {
    let fake = FakeCuda::load(&null());
    let options = LoadOptions {
        engine: EngineConfig { preemption: PreemptionMode::Auto, ..options().engine },
        ..options()
    };
    fake.reset(&null());
    fake.fail(Call::Launch, 3, ILLEGAL_ADDRESS);
    let mut engine = golden().load(&options, &mut |_| ()).expect("loading launches nothing");
    engine.add_request(Request::new(vec![1, 2, 3], greedy(4))).expect("a valid request");
    let error = engine.step().expect_err("the device is lost");
    assert!(error.is_lost(), "{error}");
    let outputs = drain(&mut engine);
    assert!(matches!(outputs[..], [RequestOutput { .. }]), "{outputs:?}");
    drop(engine);
    assert_nothing_lives(&fake, "a lost device");
}

// ---- machines ------------------------------------------------------------------------------

#[track_caller]
fn refusal(fake: &FakeCuda, config: &Config, cuda: CudaOptions) -> CudaError {
    fake.reset(config);
    let loaded = golden().load(&LoadOptions { cuda, ..options() }, &mut |_| ());
    let Err(ModelError::Backend(error)) = loaded else { panic!("{:?}", loaded.err()) };
    assert_nothing_lives(fake, "a refusal");
    assert_eq!(error.to_string().lines().count(), 1, "{error}");
    device_error(&error).clone()
}

#[test]
fn a_device_that_cannot_be_used_is_refused() {
    let fake = FakeCuda::load(&null());
    let first = CudaOptions::default();
    let none = refusal(&fake, &Config { num_devices: 0, ..null() }, first);
    assert_eq!(none, CudaError::NoDevice);

    let two = Config { num_devices: 2, ..null() };
    let unknown = refusal(&fake, &two, CudaOptions { device: 2, ..first });
    assert_eq!(unknown, CudaError::UnknownDevice { ordinal: 2, count: 2 });
    assert!(CudaDevice::open(1).is_ok());

    let old = refusal(&fake, &Config { compute_capability: (7, 5), ..null() }, first);
    assert!(
        matches!(&old, CudaError::UnsupportedDevice { name, .. } if name == "Fake CUDA device")
    );
    assert!(old.to_string().contains("7.5"), "{old}");
}

#[test]
fn newer_devices_of_the_family_are_taken() {
    let fake = FakeCuda::load(&null());
    // Those with PTX of their own (9.0) run what the stand-in cannot read.
    for capability in [(8, 6), (8, 9), (10, 0), (12, 0)] {
        fake.reset(&Config { compute_capability: capability, ..null() });
        let mut engine = golden().load(&options(), &mut |_| ()).expect("a device that runs PTX");
        engine.add_request(Request::new(vec![1, 2, 3], greedy(2))).expect("a valid request");
        assert_eq!(drain(&mut engine)[0].token_ids.len(), 2, "{capability:?}");
    }
    // There is a kernel for each op there, too.
    fake.reset(&Config { compute_capability: (9, 0), ..null() });
    let mut backend = CudaBackend::<bf16>::new(CudaOptions::default()).expect("kernels");
    for head_dim in [16, 32, 64, 80, 128, 256] {
        let layout = golden().info().kv_layout(1, 16, DType::Bf16);
        backend.kv_cache(&KvLayout { head_dim, ..layout }).expect("kernels for heads of that size");
    }
}

#[test]
fn a_device_with_too_little_memory_is_refused_before_anything_is_allocated() {
    let fake = FakeCuda::load(&Config { device_bytes: 100 << 20, ..null() });
    let refused = golden().load(&options(), &mut |_| ());
    let Err(ModelError::Config(ConfigError::DoesNotFit { plan, .. })) = refused else {
        panic!("{:?}", refused.err())
    };
    assert_eq!(plan.total, 100 << 20);
    assert_eq!(fake.stats().allocations, 0);
    assert_nothing_lives(&fake, "a plan");
}

/// Somebody else takes the memory after the plan was made.
#[test]
fn a_plan_that_turns_out_wrong_fails_with_what_there_was_no_memory_for() {
    let fake = FakeCuda::load(&null());
    let files = golden();
    for (free, what) in [(60 << 20, "partial results"), (80 << 20, "blocks being swapped")] {
        fake.reset(&null());
        let plan = files.plan(&options()).expect("a device with much memory");
        fake.reset(&Config { device_bytes: free, ..null() });
        let loaded = files.load_planned(&options(), plan, &mut |_| ());
        let Err(ModelError::Backend(error)) = loaded else { panic!("{:?}", loaded.err()) };
        let error = device_error(&error).clone();
        let CudaError::OutOfMemory { what: found, bytes, free: left } = &error else {
            panic!("{error}")
        };
        assert_eq!(found, what);
        assert!(bytes > left && *left <= free, "{error}");
        assert_nothing_lives(&fake, what);
    }
}

/// The driver's version is asked for once in a process, so this one has a process of its own.
#[test]
fn a_driver_that_is_too_old_is_told_its_version_and_the_one_it_takes() {
    const CHILD: &str = "QUIRE_TEST_OLD_DRIVER";
    if std::env::var_os(CHILD).is_some() {
        let fake = FakeCuda::load(&null());
        let old = Config { driver_version: 11080, ..null() };
        let error = refusal(&fake, &old, CudaOptions::default());
        let version = |major, minor| Version { major, minor };
        let CudaError::DriverTooOld { driver, needed, .. } = &error else { panic!("{error:?}") };
        assert_eq!((*driver, *needed), (version(11, 8), version(12, 0)));
        let text = error.to_string();
        assert!(text.contains("11.8") && text.contains("12.0"), "{text}");
        return;
    }
    let output = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "a_driver_that_is_too_old_is_told_its_version_and_the_one_it_takes"])
        .env(CHILD, "1")
        .output()
        .expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

// ---- in the middle of steps ----------------------------------------------------------------

/// Steps of all kinds: chunks of prompts, graphs, copies of shared blocks, swaps, draws on the
/// device and on the host.
fn requests() -> Vec<Request> {
    let prompt = |from: u32, len: u32| (from..from + len).collect::<Vec<u32>>();
    let drawn = SamplingParams { temperature: 0.9, seed: Some(5), ..greedy(7) };
    let params = [
        (prompt(40, 20), SamplingParams { logprobs: Some(NumLogprobs::Top(3)), ..greedy(6) }),
        (prompt(9, 19), SamplingParams { n: 2, ..drawn.clone() }),
        (prompt(70, 5), SamplingParams { logprobs: Some(NumLogprobs::Top(70)), ..greedy(4) }),
        (
            prompt(100, 3),
            SamplingParams { use_beam_search: true, beam_width: Some(2), ..greedy(5) },
        ),
        (prompt(3, 14), SamplingParams { frequency_penalty: 0.5, ..drawn }),
        (prompt(60, 1), greedy(1)),
    ];
    params.into_iter().map(|(prompt, params)| Request::new(prompt, params)).collect()
}

fn setup() -> Setup {
    Setup::cuda(DType::Bf16).with(EngineConfig {
        max_num_batched_tokens: Some(24),
        max_model_len: Some(48),
        num_blocks: Some(7),
        max_num_seqs: 8,
        max_logprobs: 100,
        swap_bytes: 1 << 20,
        preemption: PreemptionMode::Swap,
        ..EngineConfig::default()
    })
}

/// How many calls of each kind they make, at least.
const LEAST: [usize; 7] = [1, 2, 300, 50, 8, 0, 20];

/// What became of some requests.
struct Outcome {
    outputs: Vec<RequestOutput>,
    errors: Vec<EngineError>,
}

fn add(engine: &mut Engine, requests: &[Request]) {
    for request in requests {
        engine.add_request(request.clone()).expect("a valid request");
    }
}

/// Steps until nothing is left, whatever fails; the outputs are in the order of the requests.
fn drain_with_faults(engine: &mut Engine, what: &str) -> Outcome {
    let mut outcome = Outcome { outputs: Vec::new(), errors: Vec::new() };
    while engine.num_unfinished() > 0 {
        match engine.step() {
            Ok(step) => outcome.outputs.extend(step.finished),
            Err(error) => outcome.errors.push(error),
        }
        assert!(outcome.errors.len() < 8, "{what} fails for ever: {:?}", outcome.errors);
        engine.check_integrity();
    }
    outcome.outputs.sort_by_key(|output| (output.request_id, output.index));
    outcome
}

fn fingerprints(outputs: &[RequestOutput]) -> Vec<Fingerprint> {
    outputs.iter().map(Fingerprint::from).collect()
}

/// What the requests give when nothing fails. They use all that can fail.
fn undisturbed(model: &TinyModel, fake: &FakeCuda) -> Vec<Fingerprint> {
    let mut engine = model.engine(&setup());
    add(&mut engine, &requests());
    let outputs = fingerprints(&drain(&mut engine));
    let stats = engine.stats();
    assert!(stats.swap_bytes > 0, "the pool is too large to preempt");
    let device = fake.stats();
    assert!(device.graph_launches > 0 && device.copies_dtoh.count > 0, "{device:?}");
    outputs
}

/// Runs the requests while a call fails; whether one did. All is as if it had not. A graph that fails
/// is not even told: its step is launched instead.
fn assert_tried_again(
    (engine, fake): (&mut Engine, &FakeCuda),
    (call, nth, code): (Call, u64, i32),
    (requests, expected): (&[Request], &[Fingerprint]),
) -> bool {
    let what = format!("{call:?} {nth} with code {code}");
    let failures = fake.stats().failures;
    fake.fail(call, nth, code);
    add(engine, requests);
    let Outcome { outputs, errors } = drain_with_faults(engine, &what);
    assert!(errors.len() <= 1, "{what}: {errors:?}");
    assert!(call != Call::GraphLaunch || errors.is_empty(), "{what}: {errors:?}");
    for error in &errors {
        let EngineError::Backend(error) = error else { panic!("{what}: {error}") };
        assert_typed(device_error(error), call, code);
    }
    assert_eq!(fingerprints(&outputs), expected, "{what}");
    assert_eq!(engine.num_held_blocks(), 0, "{what}");
    fake.stats().failures > failures
}

/// How many calls fail one after the other, each in a run of its own, until a run does not come to
/// one.
fn until_none_fails(nths: impl Iterator<Item = u64>, fails: impl FnMut(&u64) -> bool) -> usize {
    nths.take_while(fails).count()
}

#[test]
fn a_step_that_failed_is_tried_again_with_the_same_bits() {
    let fake = FakeCuda::load(&Config::default());
    let model = TinyModel::aligned(3);
    let (requests, expected) = (requests(), undisturbed(&model, &fake));
    // A shape whose graph failed has none any more.
    for (call, least) in CALLS.into_iter().zip([1, 1, 10, 8, 2, 0, 8]) {
        fake.reset(&Config::default());
        let mut engine = model.engine(&setup());
        // 1, 2, 3, 4, 6, 9, 13, 19, …
        let spread = std::iter::successors(Some(1u64), |n| Some(n + (n / 2).max(1)));
        let times = until_none_fails(spread, |&nth| {
            engine.reset_prefix_cache();
            let fault = (call, nth, OUT_OF_MEMORY);
            assert_tried_again((&mut engine, &fake), fault, (&requests, &expected))
        });
        assert!(times >= least, "{call:?} failed {times} times");
        drop(engine);
        assert_nothing_lives(&fake, &format!("{call:?}"));
    }
}

/// Each call there is, on an engine that has done nothing yet: kernels are loaded, buffers grow,
/// graphs are captured.
#[test]
fn a_step_that_failed_is_tried_again_wherever_it_failed() {
    let fake = FakeCuda::load(&null());
    let model = TinyModel::aligned(3);
    // Its first step with one row is the first to need the kernels for few rows.
    let alone = vec![Request::new((0..20u32).collect::<Vec<_>>(), greedy(5))];
    for (requests, least) in [(alone, [0, 0, 50, 10, 2, 0, 5]), (requests(), LEAST)] {
        fake.reset(&null());
        let mut engine = model.engine(&setup());
        add(&mut engine, &requests);
        let expected = fingerprints(&drain(&mut engine));
        drop(engine);
        for (call, least) in CALLS.into_iter().zip(least) {
            let times = until_none_fails(1.., |&nth| {
                fake.reset(&null());
                let mut engine = model.engine(&setup());
                let fault = (call, nth, INVALID_VALUE);
                let failed =
                    assert_tried_again((&mut engine, &fake), fault, (&requests, &expected));
                drop(engine);
                assert_nothing_lives(&fake, &format!("{call:?} {nth}"));
                failed
            });
            assert!(times >= least, "{call:?} failed {times} times");
        }
    }
}

/// A device is lost in the middle of requests: each ends, once, those that had not ended before
/// with the error, and those that come later are refused.
fn assert_lost(fake: &FakeCuda, (call, nth): (Call, u64)) -> bool {
    fake.reset(&null());
    let what = format!("{call:?} {nth} with code {ILLEGAL_ADDRESS}");
    let model = TinyModel::aligned(3);
    let requests = requests();
    let mut engine = model.engine(&setup());
    fake.fail(call, nth, ILLEGAL_ADDRESS);
    add(&mut engine, &requests);
    let Outcome { outputs, errors } = drain_with_faults(&mut engine, &what);
    let ended: Vec<_> = outputs.iter().map(|output| (output.request_id, output.index)).collect();
    let wanted: Vec<_> = requests
        .iter()
        .enumerate()
        .flat_map(|(id, request)| (0..request.params.n).map(move |i| (id as u64, i)))
        .collect();
    assert_eq!(ended.iter().map(|(id, i)| (id.0, *i)).collect::<Vec<_>>(), wanted, "{what}");
    let [error] = &errors[..] else {
        assert!(errors.is_empty(), "{what}: {errors:?}");
        return false;
    };
    assert!(error.is_lost(), "{what}: {error}");
    let EngineError::Backend(error) = error else { panic!("{what}: {error}") };
    assert_typed(device_error(error), call, ILLEGAL_ADDRESS);
    let reason = FinishReason::Error(error.to_string());
    assert!(outputs.iter().any(|output| output.finish_reason == reason), "{what}");
    for output in &outputs {
        let done = matches!(output.finish_reason, FinishReason::Length);
        assert!(done || output.finish_reason == reason, "{what}: {:?}", output.finish_reason);
    }
    let late = engine.add_request(requests[0].clone());
    let refused = matches!(&late, Err(RequestError::Lost(why)) if *why == error.to_string());
    assert!(refused, "{what}: {late:?}");
    assert!(engine.step().is_ok_and(|step| step.finished.is_empty()), "{what}");
    assert_eq!(engine.num_held_blocks(), 0, "{what}");
    drop(engine);
    assert_nothing_lives(fake, &what);
    true
}

#[test]
fn a_lost_device_ends_every_request_once() {
    let fake = FakeCuda::load(&null());
    for (call, least) in CALLS.into_iter().zip(LEAST) {
        let times = until_none_fails(1.., |&nth| assert_lost(&fake, (call, nth)));
        assert!(times >= least, "{call:?} failed {times} times");
    }
}
