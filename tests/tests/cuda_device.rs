//! What the backend asks of the driver, apart from whole models: memory, a kernel's own faults,
//! threads, cuBLASLt.

use fakecuda::{Config, FakeCuda};
use half::bf16;
use quire_engine::backend::cuda::{Compute, CudaDevice, CudaError};
use quire_engine::backend::{CudaBackend, CudaOptions, GemmMode};
use quire_engine::ops::{Backend, BackendError, KvLayout, MatrixLayout, StepLimits, TensorKind};
use quire_engine::{DType, EngineConfig, Request};
use quire_tests::fixtures::{Setup, TinyModel};
use quire_tests::harness::{Harness, Rows};
use quire_tests::oracle::{drain, greedy};
use std::thread;

fn device_error(error: &BackendError) -> &CudaError {
    let BackendError::Device { source, .. } = error else { panic!("{error}") };
    source.downcast_ref().expect("an error of the backend")
}

fn free() -> usize {
    CudaDevice::open(0).expect("a device").memory.available
}

#[test]
fn memory_comes_and_goes_with_its_buffer() {
    let fake = FakeCuda::load(&Config::default());
    let mut backend = CudaBackend::<bf16>::new(CudaOptions::default()).expect("a device");
    let before = free();
    let tensor = backend.tensor(1024, 256, TensorKind::F32).expect("there is memory");
    assert_eq!(before - free(), 4 * 1024 * 256);
    drop(tensor);
    assert_eq!(free(), before);

    let allocations = fake.stats().allocations;
    let nothing = backend.tensor(0, 256, TensorKind::F32).expect("nothing is asked for");
    assert_eq!((fake.stats().allocations, free()), (allocations, before));
    drop(nothing);

    let refused = backend.tensor(1 << 30, 256, TensorKind::Compute).err().expect("too much");
    let CudaError::OutOfMemory { what, bytes, free } = device_error(&refused) else {
        panic!("{refused}")
    };
    assert_eq!((what.as_str(), *bytes, *free), ("activations", 512 << 30, before));
}

/// A kernel that writes where nothing is: no call of the driver is at fault, and a later one tells.
#[test]
fn a_fault_of_a_kernel_loses_the_device() {
    let fake = FakeCuda::load(&Config::default());
    let mut backend = CudaBackend::<bf16>::new(CudaOptions::default()).expect("a device");
    let layout = KvLayout {
        num_layers: 1,
        num_blocks: 2,
        block_size: 16,
        num_kv_heads: 1,
        head_dim: 64,
        dtype: DType::Bf16,
    };
    let mut kv = backend.kv_cache(&layout).expect("there is memory");
    let limits = StepLimits {
        max_tokens: 1,
        max_seqs: 1,
        max_positions: 16,
        max_logprobs: 1,
        block_size: 16,
        swap: false,
        vocab_size: 16,
        num_heads: 1,
    };
    backend.reserve(&limits).expect("there is memory");
    kv.fill(0).expect("the device works");
    backend.copy_blocks(&mut kv, &[(0, 1)]).expect("two blocks");
    backend.synchronize().expect("the device works");
    backend.copy_blocks(&mut kv, &[(0, 1 << 20)]).expect("it is launched");
    let lost = |result: Result<(), BackendError>| {
        let error = result.expect_err("the device is lost");
        assert!(error.is_lost(), "{error}");
        assert!(matches!(device_error(&error), CudaError::Lost { code: 700, .. }), "{error}");
    };
    lost(backend.synchronize());
    lost(backend.copy_blocks(&mut kv, &[(0, 1)]));
    lost(backend.vector(&[1.0]).map(drop));
    lost(backend.tensor(1, 16, TensorKind::F32).map(drop));
    drop((kv, backend));
    let stats = fake.stats();
    assert_eq!(stats.live_allocations + stats.live_pinned + stats.live_streams, 0, "{stats:?}");
}

#[test]
fn an_engine_goes_from_thread_to_thread_and_may_be_dropped_in_the_middle() {
    let fake = FakeCuda::load(&Config::default());
    let setup = Setup::cuda(DType::Bf16)
        .with(EngineConfig { num_blocks: Some(20), ..EngineConfig::default() });
    let request = |n: usize| Request::new(vec![1, 2, 3], greedy(n));
    let engine = thread::scope(|scope| {
        let made = scope.spawn(|| TinyModel::aligned(1).engine(&setup));
        let mut engine = made.join().expect("it is made");
        let first = scope.spawn(move || {
            engine.add_request(request(8)).expect("a valid request");
            let tokens = drain(&mut engine).remove(0).token_ids;
            (engine, tokens)
        });
        let (mut engine, tokens) = first.join().expect("it runs");
        engine.add_request(request(8)).expect("a valid request");
        assert_eq!(drain(&mut engine)[0].token_ids, tokens);
        engine
    });
    thread::spawn(move || {
        let mut engine = engine;
        engine.add_request(request(100)).expect("a valid request");
        for _ in 0..5 {
            engine.step().expect("the device works");
        }
        assert_eq!(engine.num_unfinished(), 1);
    })
    .join()
    .expect("it runs");
    let s = fake.stats();
    let alive = [s.live_allocations, s.live_pinned, s.live_streams, s.live_events, s.live_modules];
    assert_eq!((alive, s.live_graphs), ([0; 5], 0), "{s:?}");
}

/// Numbers so small that every sum is exact, whoever adds it up.
fn small(rows: usize, cols: usize, modulus: usize) -> Rows {
    let value = |i: usize| (i * 7 % modulus) as f32 - (modulus / 2) as f32;
    Rows::new((0..rows * cols).map(value).collect(), cols)
}

fn check_products<T: Compute>(gemm: GemmMode) {
    let options = CudaOptions { gemm, enforce_eager: true, ..CudaOptions::default() };
    let mut h = Harness::new(CudaBackend::<T>::new(options).expect("a device and cuBLASLt"));
    for (m, n, k) in [(1, 48, 32), (3, 16, 160), (40, 64, 64)] {
        let (x, w, bias) = (small(m, k, 7), small(n, k, 5), small(1, n, 9));
        let product = |i: usize, j: usize| -> f32 {
            x.row(i).iter().zip(w.row(j)).map(|(x, w)| x * w).sum::<f32>() + bias.data[j]
        };
        let want: Vec<f32> = (0..m * n).map(|at| product(at / n, at % n)).collect();
        let (weight, vector) = (h.weight(MatrixLayout::Plain, &w), h.vector(&bias.data));
        let input = h.compute_tensor(&x);
        let mut out = h.tensor(m, n, TensorKind::F32);
        h.backend.linear(&input, &weight, Some(&vector), &mut out);
        assert_eq!(h.read_f32(&out, m, n).data, want, "{gemm:?} {} {m} {n} {k}", T::COMPUTE);
        h.backend.linear_add(&input, &weight, Some(&vector), &mut out);
        let twice: Vec<f32> = want.iter().map(|x| 2.0 * x).collect();
        assert_eq!(h.read_f32(&out, m, n).data, twice, "{gemm:?} {} {m} {n} {k}", T::COMPUTE);
    }
}

#[test]
fn products_of_small_numbers_are_exact_whoever_makes_them() {
    let fake = FakeCuda::load(&Config::default());
    fake.load_cublaslt();
    for gemm in [GemmMode::Triton, GemmMode::Cublas] {
        check_products::<f32>(gemm);
        check_products::<bf16>(gemm);
    }
}
