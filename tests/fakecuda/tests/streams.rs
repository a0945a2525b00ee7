//! Copies, kernels, streams and events, through unmodified cudarc.

mod common;

use std::thread;

use common::{Gpu, WIDTH, input, is_silu};
use cudarc::driver::sys::CUevent_flags::{CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING};
use cudarc::driver::{CudaContext, sys};
use fakecuda::{Config, Order};

const BYTES: usize = 4 * WIDTH;

fn both_orders() -> [Config; 2] {
    [Order::Eager, Order::Lazy].map(|order| Config { order, ..Config::default() })
}

#[test]
fn the_device_is_what_the_configuration_says() {
    let config = Config {
        device_bytes: 1 << 20,
        num_devices: 2,
        compute_capability: (8, 6),
        driver_version: 12020,
        num_multiprocessors: 7,
        name: "Small".into(),
        ..Config::default()
    };
    let gpu = Gpu::new(&config);
    assert_eq!(CudaContext::device_count(), Ok(2));
    assert_eq!(gpu.context.name().as_deref(), Ok("Small"));
    assert_eq!(gpu.context.compute_capability(), Ok((8, 6)));
    assert_eq!(gpu.context.mem_get_info(), Ok((1 << 20, 1 << 20)));
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    assert_eq!(gpu.context.attribute(attribute), Ok(99 * 1024));
    let other = CudaContext::new(1).expect("a second device");
    assert_ne!(other.uuid().map(|uuid| uuid.bytes), gpu.context.uuid().map(|uuid| uuid.bytes));
}

/// cudarc's own safe types, with its events between streams.
#[test]
fn copies_make_the_round_trip() {
    for config in both_orders() {
        let gpu = Gpu::new(&config);
        for stream in [gpu.context.default_stream(), gpu.context.new_stream().expect("a stream")] {
            let values: Vec<u32> = (0..1000).collect();
            let there = stream.clone_htod(&values).expect("upload");
            let mut zeros = stream.alloc_zeros::<u32>(1000).expect("memset");
            assert_eq!(stream.clone_dtoh(&zeros), Ok(vec![0; 1000]));
            stream.memcpy_dtod(&there.slice(100..600), &mut zeros.slice_mut(0..500)).expect("copy");
            let back = stream.clone_dtoh(&zeros).expect("download");
            assert_eq!(back[..500], values[100..600]);
            assert_eq!(back[500..], [0; 500]);
        }
        let stats = gpu.fake.stats();
        assert_eq!((stats.copies_htod.count, stats.copies_htod.bytes), (2, 8000));
        assert_eq!((stats.copies_dtod.count, stats.copies_dtod.bytes), (2, 4000));
        assert_eq!((stats.copies_dtoh.count, stats.copies_dtoh.bytes), (4, 16_000));
        assert_eq!((stats.memsets, stats.live_bytes), (2, 0));
        assert_eq!(stats.peak_bytes, 8000);
    }
}

#[test]
fn a_shipped_kernel_runs() {
    for config in both_orders() {
        let gpu = Gpu::new(&config);
        let (silu, stream) = (gpu.silu(), gpu.stream());
        let (x, out) = (gpu.alloc(2 * BYTES).unwrap(), gpu.alloc(BYTES).unwrap());
        gpu.fake.log_launches(true);
        gpu.upload_now(&input(3.0), x).unwrap();
        gpu.launch(silu, stream, out, x).unwrap();
        gpu.synchronize(stream).unwrap();
        assert!(is_silu(&gpu.download_now(out, WIDTH).unwrap(), 3.0));
        let launches = gpu.fake.take_launches();
        assert_eq!(launches.len(), 1);
        assert_eq!((launches[0].entry.as_str(), launches[0].grid), ("silu_mul", [1, 1, 1]));
        assert_eq!((launches[0].block, launches[0].in_graph), ([128, 1, 1], false));
        assert_eq!(launches[0].read_footprint_bytes, 2 * BYTES as u64);
        assert_eq!(launches[0].written_footprint_bytes, BYTES as u64);
        assert!(gpu.fake.take_launches().is_empty());
    }
}

/// The kernel's stream does not wait for the upload's: lazily, the result is that of old input.
#[test]
fn a_missing_wait_gives_a_wrong_result() {
    for config in both_orders() {
        for waits in [false, true] {
            let gpu = Gpu::new(&config);
            let (silu, copies, kernels) = (gpu.silu(), gpu.stream(), gpu.stream());
            let (x, out) = (gpu.alloc(2 * BYTES).unwrap(), gpu.alloc(BYTES).unwrap());
            gpu.upload_now(&input(1.0), x).unwrap();
            let (staging, uploaded) = (gpu.pinned(2 * WIDTH).unwrap(), gpu.event(CU_EVENT_DEFAULT));
            staging.set(&input(5.0));
            gpu.upload(copies, staging, x).unwrap();
            gpu.record(uploaded, copies).unwrap();
            if waits {
                gpu.wait(kernels, uploaded).unwrap();
            }
            gpu.launch(silu, kernels, out, x).unwrap();
            gpu.synchronize(kernels).unwrap();
            let up = if waits || config.order == Order::Eager { 5.0 } else { 1.0 };
            assert!(is_silu(&gpu.download_now(out, WIDTH).unwrap(), up), "{config:?}, {waits}");
        }
    }
}

#[test]
fn a_staging_buffer_used_again_too_early_gives_a_wrong_result() {
    let gpu = Gpu::new(&Config::default());
    let (stream, there) = (gpu.stream(), gpu.alloc(BYTES).unwrap());
    let staging = gpu.pinned(WIDTH).unwrap();
    for (synchronizes, want) in [(false, 2.0), (true, 1.0)] {
        staging.fill(1.0);
        gpu.upload(stream, staging, there).unwrap();
        if synchronizes {
            gpu.synchronize(stream).unwrap();
        }
        staging.fill(2.0);
        gpu.synchronize(stream).unwrap();
        assert_eq!(gpu.download_now(there, WIDTH).unwrap(), [want; WIDTH]);
    }
    // Memory that is not page-locked is taken when the call is made.
    let mut pageable = vec![3.0; WIDTH];
    gpu.upload_staged(stream, &pageable, there).unwrap();
    pageable.fill(4.0);
    gpu.synchronize(stream).unwrap();
    assert_eq!(gpu.download_now(there, WIDTH).unwrap(), [3.0; WIDTH]);
}

#[test]
fn a_download_is_there_when_it_is_waited_for() {
    let gpu = Gpu::new(&Config::default());
    let (stream, there) = (gpu.stream(), gpu.alloc(BYTES).unwrap());
    let (result, done) = (gpu.pinned(WIDTH).unwrap(), gpu.event(CU_EVENT_DISABLE_TIMING));
    assert!(result.get().iter().all(|fresh| fresh.is_nan()));
    gpu.zero(stream, there, BYTES).unwrap();
    gpu.download(stream, there, result).unwrap();
    gpu.record(done, stream).unwrap();
    assert!(result.get().iter().all(|early| early.is_nan()));
    // Not ready, once: the question makes the work run.
    assert_eq!(gpu.query_event(done), Err(600));
    assert_eq!(gpu.query_event(done), Ok(()));
    assert_eq!(result.get(), [0.0; WIDTH]);
    assert_eq!(gpu.query(stream), Ok(()));
}

/// What nothing has written comes out as NaN, and a copy does not make it defined.
#[test]
fn fresh_memory_is_undefined() {
    let gpu = Gpu::new(&Config::default());
    let (silu, stream) = (gpu.silu(), gpu.default_stream());
    let (fresh, x) = (gpu.alloc(2 * BYTES).unwrap(), gpu.alloc(2 * BYTES).unwrap());
    assert!(gpu.download_now(fresh, 2 * WIDTH).unwrap().iter().all(|x| x.is_nan()));
    gpu.copy(stream, x, fresh, 2 * BYTES).unwrap();
    gpu.launch(silu, stream, fresh, x).unwrap();
    assert_eq!(gpu.synchronize(stream), Err(700));
}

#[test]
fn the_default_stream_waits_for_blocking_streams_and_they_for_it() {
    let gpu = Gpu::new(&Config::default());
    let (blocking, other) = (gpu.blocking_stream(), gpu.stream());
    let (staging, there) = (gpu.pinned(WIDTH).unwrap(), gpu.alloc(BYTES).unwrap());
    staging.fill(1.0);
    gpu.zero(gpu.default_stream(), there, BYTES).unwrap();
    gpu.upload(blocking, staging, there).unwrap();
    // A synchronous copy is in the default stream: it comes after the zeros and the upload.
    assert_eq!(gpu.download_now(there, WIDTH).unwrap(), [1.0; WIDTH]);
    gpu.zero(gpu.default_stream(), there, BYTES).unwrap();
    gpu.upload(blocking, staging, there).unwrap();
    gpu.synchronize(blocking).unwrap();
    assert_eq!(gpu.download_now(there, WIDTH).unwrap(), [1.0; WIDTH]);
    gpu.zero(other, there, BYTES).unwrap();
    assert_eq!(
        gpu.download_now(there, WIDTH).unwrap(),
        [1.0; WIDTH],
        "not blocking, not waited for"
    );
    gpu.synchronize(other).unwrap();
    assert_eq!(gpu.download_now(there, WIDTH).unwrap(), [0.0; WIDTH]);
}

/// A long chain of waits back and forth, none of which is asked for before the end.
#[test]
fn chains_of_waits_run_in_order() {
    let gpu = Gpu::new(&Config::default());
    let (streams, event) = ([gpu.stream(), gpu.stream()], gpu.event(CU_EVENT_DISABLE_TIMING));
    let buffers = [gpu.alloc(BYTES).unwrap(), gpu.alloc(BYTES).unwrap()];
    let staging = gpu.pinned(WIDTH).unwrap();
    staging.fill(7.0);
    gpu.upload(streams[0], staging, buffers[0]).unwrap();
    for i in 0..100_000 {
        let (from, to) = (i % 2, (i + 1) % 2);
        gpu.record(event, streams[from]).unwrap();
        gpu.wait(streams[to], event).unwrap();
        gpu.copy(streams[to], buffers[to], buffers[from], BYTES).unwrap();
    }
    gpu.synchronize(streams[0]).unwrap();
    assert_eq!(gpu.download_now(buffers[0], WIDTH).unwrap(), [7.0; WIDTH]);
}

#[test]
fn the_clock_counts_pieces_of_work() {
    for config in both_orders() {
        let gpu = Gpu::new(&config);
        let (stream, there) = (gpu.stream(), gpu.alloc(BYTES).unwrap());
        let [start, end, never] = [(); 3].map(|()| gpu.event(CU_EVENT_DEFAULT));
        gpu.record(start, stream).unwrap();
        (0..9).for_each(|_| gpu.zero(stream, there, BYTES).unwrap());
        gpu.record(end, stream).unwrap();
        if config.order == Order::Lazy {
            assert_eq!(gpu.elapsed(start, end), Err(600));
        }
        gpu.synchronize_event(end).unwrap();
        assert_eq!(gpu.elapsed(start, end), Ok(0.01));
        assert_eq!(gpu.elapsed(start, never), Err(400));
        let untimed = gpu.event(CU_EVENT_DISABLE_TIMING);
        gpu.record(untimed, stream).unwrap();
        gpu.synchronize_event(untimed).unwrap();
        assert_eq!(gpu.elapsed(start, untimed), Err(400));
        assert_eq!(gpu.query_event(never), Ok(()));
    }
}

/// Work of a stream that was destroyed still runs, and freed host memory is read before it goes.
#[test]
fn nothing_goes_before_its_work_is_done() {
    let gpu = Gpu::new(&Config::default());
    let (stream, there) = (gpu.stream(), gpu.alloc(BYTES).unwrap());
    let staging = gpu.pinned(WIDTH).unwrap();
    staging.fill(1.0);
    gpu.upload(stream, staging, there).unwrap();
    gpu.destroy_stream(stream).unwrap();
    assert_eq!(gpu.fake.stats().live_streams, 0);
    assert_eq!(gpu.synchronize(stream), Err(400));
    gpu.free_pinned(staging).unwrap();
    assert_eq!(gpu.download_now(there, WIDTH).unwrap(), [1.0; WIDTH]);
}

#[test]
fn two_threads_share_a_context() {
    let gpu = Gpu::new(&Config::default());
    let context = &gpu.context;
    thread::scope(|scope| {
        for thread in 0..2u32 {
            scope.spawn(move || {
                let stream = context.new_stream().expect("a stream");
                for i in 0..200 {
                    let values = vec![thread << 16 | i; 300];
                    let there = stream.clone_htod(&values).expect("upload");
                    assert_eq!(stream.clone_dtoh(&there), Ok(values));
                }
            });
        }
    });
    let stats = gpu.fake.stats();
    assert_eq!((stats.live_allocations, stats.live_streams, stats.live_events), (0, 0, 0));
    assert_eq!(stats.copies_htod.count, 400);
}

#[test]
fn a_null_driver_only_counts() {
    let gpu = Gpu::new(&Config { null: true, ..Config::default() });
    let (silu, stream) = (gpu.silu(), gpu.stream());
    let (x, out) = (gpu.alloc(2 * BYTES).unwrap(), gpu.alloc(BYTES).unwrap());
    let result = gpu.pinned(WIDTH).unwrap();
    gpu.launch(silu, stream, out, x).unwrap();
    gpu.begin_capture(stream).unwrap();
    gpu.launch(silu, stream, out, x).unwrap();
    gpu.download(stream, out, result).unwrap();
    let graph = gpu.end_capture(stream).unwrap();
    gpu.launch_graph(graph, stream).unwrap();
    gpu.launch_graph(graph, stream).unwrap();
    gpu.synchronize(stream).unwrap();
    assert_eq!(result.get(), [0.0; WIDTH]);
    let stats = gpu.fake.stats();
    assert_eq!((stats.launches, stats.graph_launches, stats.copies_dtoh.count), (3, 2, 2));
}
