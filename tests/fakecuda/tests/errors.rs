//! The driver's codes, errors that stay, failures on demand, and what is left behind.

mod common;

use common::{Gpu, Outcome, WIDTH, input, is_silu, outcome};
use cudarc::driver::sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
use cudarc::driver::{CudaContext, result};
use fakecuda::{Call, Config};

const BYTES: usize = 4 * WIDTH;
const SHAPE: ([u32; 3], [u32; 3], u32) = ([1, 1, 1], [128, 1, 1], 0);

#[test]
fn devices_that_are_not_there() {
    let gpu = Gpu::new(&Config::default());
    assert_eq!(outcome(CudaContext::new(1)).err(), Some(101));
    assert_eq!(outcome(result::device::get(-1)).err(), Some(101));
    drop(gpu);
    let gpu = fakecuda::FakeCuda::load(&Config { num_devices: 0, ..Config::default() });
    assert_eq!(outcome(CudaContext::new(0)).err(), Some(100));
    gpu.reset(&Config::default());
    assert_eq!(outcome(result::device::get_count()), Err(3), "before cuInit");
}

#[test]
fn a_thread_without_a_context() {
    let gpu = Gpu::new(&Config::default());
    gpu.leave_context().unwrap();
    assert_eq!(gpu.alloc(4), Err(201));
    assert_eq!(outcome(result::ctx::synchronize()), Err(201));
    gpu.context.bind_to_thread().unwrap();
    assert!(gpu.alloc(4).is_ok());
}

#[test]
fn memory_has_an_end() {
    let gpu = Gpu::new(&Config { device_bytes: 4096, ..Config::default() });
    let first = gpu.alloc(3000).unwrap();
    assert_eq!(outcome(result::mem_get_info()), Ok((1024, 4096)));
    assert_eq!(gpu.alloc(1025), Err(2));
    assert_eq!(gpu.alloc(usize::MAX), Err(2));
    assert_eq!(gpu.alloc(0), Err(1));
    gpu.free(first).unwrap();
    assert_eq!(gpu.free(first), Err(1), "freed twice");
    let second = gpu.alloc(4096).unwrap();
    assert_eq!(gpu.free(second + 256), Err(1), "not the start");
    assert_eq!(gpu.upload_now(&[0.0; 1025], second), Err(1), "past the end");
    assert_eq!(gpu.zero(gpu.default_stream(), second, 4097), Err(1));
    assert_eq!(gpu.download_now(first, 1), Err(1), "freed");
}

#[test]
fn modules_that_do_not_load() {
    let gpu = Gpu::new(&Config { driver_version: 11080, ..Config::default() });
    let header = |version: &str| format!(".version {version}\n.target sm_80\n.address_size 64\n");
    assert_eq!(gpu.load(&header("8.0")).err(), Some(222));
    assert_eq!(gpu.load("this is no PTX").err(), Some(218));
    assert_eq!(gpu.load(&header("7.8")).err(), Some(218), "no kernel in it");
    assert_eq!(gpu.fake.stats().live_modules, 0);
}

#[test]
fn launches_that_do_not_fit() {
    let gpu = Gpu::new(&Config::default());
    let (silu, stream) = (gpu.silu(), gpu.stream());
    let (x, out) = (gpu.alloc(2 * BYTES).unwrap(), gpu.alloc(BYTES).unwrap());
    let (grid, block, _) = SHAPE;
    for (what, shape) in [
        ("block unlike .reqntid", (grid, [64, 1, 1], 0)),
        ("too many threads", (grid, [1024, 2, 1], 0)),
        ("empty grid", ([0, 1, 1], block, 0)),
        ("grid y", ([1, 65_536, 1], block, 0)),
        ("grid x", ([1 << 31, 1, 1], block, 0)),
        ("shared memory not asked for", (grid, block, 48 * 1024 + 1)),
    ] {
        assert_eq!(gpu.launch_shaped(silu, shape, stream, (out, x, WIDTH)), Err(1), "{what}");
    }
    assert_eq!(gpu.set_shared(silu, 163 * 1024 + 1), Err(1));
    gpu.set_shared(silu, 163 * 1024).unwrap();
    gpu.upload_now(&input(1.0), x).unwrap();
    let shape = (grid, block, 163 * 1024);
    gpu.launch_shaped(silu, shape, stream, (out, x, WIDTH)).unwrap();
    gpu.synchronize(stream).unwrap();
    assert!(is_silu(&gpu.download_now(out, WIDTH).unwrap(), 1.0));
}

#[test]
fn handles_that_are_gone() {
    let gpu = Gpu::new(&Config::default());
    let module =
        gpu.load(include_str!("../../../kernels-ptx/ptx/sm_80/silu_mul_fp32_block1024_w4_s1.ptx"));
    let module = module.unwrap();
    assert_eq!(gpu.function(module, "gemm").err(), Some(500));
    let silu = gpu.function(module, "silu_mul").unwrap();
    let (stream, event) = (gpu.stream(), gpu.event(CU_EVENT_DISABLE_TIMING));
    gpu.unload(module).unwrap();
    assert_eq!(gpu.launch(silu, stream, 0, 0), Err(400));
    assert_eq!(gpu.unload(module), Err(400));
    gpu.destroy_event(event).unwrap();
    assert_eq!(gpu.record(event, stream), Err(400));
    assert_eq!(gpu.destroy_event(event), Err(400));
    gpu.destroy_stream(stream).unwrap();
    assert_eq!(gpu.zero(stream, 0, 4), Err(400));
    assert_eq!(gpu.destroy_stream(gpu.default_stream()), Err(1));
}

#[test]
fn errors_have_names() {
    let _gpu = Gpu::new(&Config::default());
    let error = CudaContext::new(5).expect_err("one device");
    assert_eq!(error.error_name().unwrap().to_str(), Ok("CUDA_ERROR_INVALID_DEVICE"));
    assert_eq!(error.error_string().unwrap().to_str(), Ok("invalid device ordinal"));
}

/// A kernel that leaves its memory: the launch succeeds, the wait does not, and nothing does after
/// that. What is given back all the same is no leak.
#[test]
fn a_fault_stays() {
    let gpu = Gpu::new(&Config::default());
    let (silu, stream, other) = (gpu.silu(), gpu.stream(), gpu.stream());
    let (x, small) = (gpu.alloc(2 * BYTES).unwrap(), gpu.alloc(BYTES / 2).unwrap());
    let (staging, event) = (gpu.pinned(1).unwrap(), gpu.event(CU_EVENT_DISABLE_TIMING));
    gpu.upload_now(&input(1.0), x).unwrap();
    gpu.launch(silu, stream, small, x).unwrap();
    gpu.launch(silu, stream, small, x).unwrap();
    assert_eq!(gpu.synchronize(stream), Err(700));
    assert_eq!(gpu.fake.stats().launches, 1, "what stood behind it is dropped");
    let after: [Outcome; 5] = [
        gpu.synchronize(other),
        gpu.zero(other, x, BYTES),
        gpu.alloc(4).map(drop),
        gpu.query(other),
        gpu.download_now(x, 1).map(drop),
    ];
    assert_eq!(after, [Err(700); 5]);
    let given_back = [
        gpu.free(x),
        gpu.free(small),
        gpu.free_pinned(staging),
        gpu.destroy_event(event),
        gpu.destroy_stream(stream),
        gpu.destroy_stream(other),
    ];
    assert_eq!(given_back, [Err(700); 6]);
    let stats = gpu.fake.stats();
    assert_eq!((stats.live_allocations, stats.live_pinned), (0, 0));
    assert_eq!((stats.live_streams, stats.live_events), (0, 0));
    assert_eq!(outcome(CudaContext::new(0)).err(), Some(700));
    gpu.fake.reset(&Config::default());
    assert!(CudaContext::new(0).is_ok());
}

#[test]
fn each_kind_of_call_fails_on_demand() {
    type Make<'a> = &'a dyn Fn(&Gpu) -> Outcome;
    let calls: [(Call, Make<'_>); 7] = [
        (Call::Alloc, &|gpu| gpu.alloc(4).map(drop)),
        (Call::HostAlloc, &|gpu| gpu.pinned(4).map(drop)),
        (Call::ModuleLoad, &|gpu| {
            gpu.load(include_str!(
                "../../../kernels-ptx/ptx/sm_80/silu_mul_fp32_block1024_w4_s1.ptx"
            ))
            .map(drop)
        }),
        (Call::Sync, &|gpu| gpu.synchronize(gpu.default_stream())),
        (Call::Copy, &|gpu| {
            let there = gpu.alloc(4).unwrap();
            gpu.upload_now(&[1.0], there)
        }),
        (Call::Launch, &|gpu| {
            let (x, out) = (gpu.alloc(2 * BYTES).unwrap(), gpu.alloc(BYTES).unwrap());
            gpu.zero(gpu.default_stream(), x, 2 * BYTES).unwrap();
            gpu.launch(gpu.silu(), gpu.default_stream(), out, x)
        }),
        (Call::GraphLaunch, &|gpu| {
            let stream = gpu.stream();
            gpu.begin_capture(stream).unwrap();
            let graph = gpu.end_capture(stream).unwrap();
            gpu.launch_graph(graph, stream)
        }),
    ];
    for (call, make) in calls {
        let gpu = Gpu::new(&Config::default());
        gpu.fake.fail(call, 2, 2);
        gpu.fake.fail(call, 4, 719);
        let outcomes: Vec<Outcome> = (0..4).map(|_| make(&gpu)).collect();
        assert_eq!(outcomes, [Ok(()), Err(2), Ok(()), Err(719)], "{call:?}");
        assert_eq!(gpu.alloc(4), Err(719), "{call:?}: an error that stays");
    }
}

#[test]
fn leaks_are_counted() {
    let gpu = Gpu::new(&Config::default());
    let kept = gpu.alloc(100).unwrap();
    gpu.free(gpu.alloc(1000).unwrap()).unwrap();
    let staging = gpu.pinned(25).unwrap();
    let stats = gpu.fake.stats();
    assert_eq!((stats.live_allocations, stats.live_bytes, stats.peak_bytes), (1, 100, 1100));
    assert_eq!((stats.live_pinned, stats.live_pinned_bytes, stats.allocations), (1, 100, 2));
    gpu.free(kept).unwrap();
    gpu.free_pinned(staging).unwrap();
    assert_eq!(gpu.free_pinned(staging), Err(1));
    let stats = gpu.fake.stats();
    assert_eq!((stats.live_allocations, stats.live_bytes, stats.live_pinned), (0, 0, 0));
}

/// An allocation costs what is touched of it, and a freed one nothing.
#[test]
fn allocations_are_cheap() {
    let gpu = Gpu::new(&Config { device_bytes: 8 << 30, ..Config::default() });
    let start = std::time::Instant::now();
    for _ in 0..10_000 {
        let large = gpu.alloc(64 << 20).unwrap();
        gpu.upload_now(&[1.0], large).unwrap();
        gpu.free(large).unwrap();
    }
    let (kept, took) = (gpu.alloc(4 << 30), start.elapsed());
    assert!(kept.is_ok());
    assert!(took.as_secs() < 30, "10,000 allocations of 64 MiB took {took:?}");
}
