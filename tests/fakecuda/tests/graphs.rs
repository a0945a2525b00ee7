//! Stream capture and graphs.

mod common;

use common::{Gpu, WIDTH, input, is_silu};
use cudarc::driver::sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
use fakecuda::{Config, Order};

const BYTES: usize = 4 * WIDTH;

/// Captured once, replayed with what the staging buffer holds at that time.
#[test]
fn a_graph_runs_as_often_as_it_is_launched() {
    for order in [Order::Eager, Order::Lazy] {
        let gpu = Gpu::new(&Config { order, ..Config::default() });
        let (silu, stream) = (gpu.silu(), gpu.stream());
        let (x, out) = (gpu.alloc(2 * BYTES).unwrap(), gpu.alloc(BYTES).unwrap());
        let (staging, result) = (gpu.pinned(2 * WIDTH).unwrap(), gpu.pinned(WIDTH).unwrap());
        gpu.begin_capture(stream).unwrap();
        gpu.upload(stream, staging, x).unwrap();
        gpu.launch(silu, stream, out, x).unwrap();
        gpu.download(stream, out, result).unwrap();
        let graph = gpu.end_capture(stream).unwrap();
        gpu.synchronize(stream).unwrap();
        assert_eq!(gpu.fake.stats().launches, 0, "a capture runs nothing");
        gpu.fake.log_launches(true);
        for up in [1.0, 2.0, 3.0] {
            staging.set(&input(up));
            gpu.launch_graph(graph, stream).unwrap();
            gpu.synchronize(stream).unwrap();
            assert!(is_silu(&result.get(), up));
        }
        let launches = gpu.fake.take_launches();
        assert!(launches.len() == 3 && launches.iter().all(|launch| launch.in_graph));
        assert_eq!(gpu.fake.stats().live_graphs, 2);
        gpu.destroy_graph(graph).unwrap();
        let stats = gpu.fake.stats();
        assert_eq!((stats.live_graphs, stats.graph_launches, stats.launches), (0, 3, 3));
        assert_eq!(gpu.launch_graph(graph, stream), Err(400));
    }
}

/// A second stream joins, and its work runs in the graph. Without the wait that orders them, the
/// lazy order puts the kernel before the upload.
#[test]
fn streams_join_a_capture() {
    for waits in [false, true] {
        let gpu = Gpu::new(&Config::default());
        let (silu, stream, copies) = (gpu.silu(), gpu.stream(), gpu.stream());
        let (x, out) = (gpu.alloc(2 * BYTES).unwrap(), gpu.alloc(BYTES).unwrap());
        let staging = gpu.pinned(2 * WIDTH).unwrap();
        let [fork, join] = [(); 2].map(|()| gpu.event(CU_EVENT_DISABLE_TIMING));
        gpu.upload_now(&input(1.0), x).unwrap();
        staging.set(&input(2.0));
        gpu.begin_capture(stream).unwrap();
        gpu.record(fork, stream).unwrap();
        gpu.wait(copies, fork).unwrap();
        gpu.upload(copies, staging, x).unwrap();
        gpu.record(join, copies).unwrap();
        if waits {
            gpu.wait(stream, join).unwrap();
        }
        gpu.launch(silu, stream, out, x).unwrap();
        gpu.wait(stream, join).unwrap();
        let graph = gpu.end_capture(stream).unwrap();
        gpu.launch_graph(graph, stream).unwrap();
        gpu.synchronize(stream).unwrap();
        let up = if waits { 2.0 } else { 1.0 };
        assert!(is_silu(&gpu.download_now(out, WIDTH).unwrap(), up), "waits: {waits}");
    }
}

#[test]
fn unjoined_work_ends_a_capture_badly() {
    let gpu = Gpu::new(&Config::default());
    let (stream, other) = (gpu.stream(), gpu.stream());
    let (there, fork) = (gpu.alloc(BYTES).unwrap(), gpu.event(CU_EVENT_DISABLE_TIMING));
    gpu.begin_capture(stream).unwrap();
    gpu.record(fork, stream).unwrap();
    gpu.wait(other, fork).unwrap();
    gpu.zero(other, there, BYTES).unwrap();
    assert_eq!(gpu.end_capture(stream).err(), Some(904));
    // Both are free again.
    gpu.zero(other, there, BYTES).unwrap();
    gpu.begin_capture(stream).unwrap();
    gpu.end_capture(stream).unwrap();
}

#[test]
fn what_a_capture_forbids_spoils_it() {
    let gpu = Gpu::new(&Config::default());
    let (stream, other) = (gpu.stream(), gpu.stream());
    let (there, event) = (gpu.alloc(BYTES).unwrap(), gpu.event(CU_EVENT_DISABLE_TIMING));
    let outside = gpu.event(CU_EVENT_DISABLE_TIMING);
    gpu.record(outside, other).unwrap();
    type Forbidden<'a> = (&'a str, i32, &'a dyn Fn() -> common::Outcome);
    let forbidden: [Forbidden<'_>; 11] = [
        ("allocation", 900, &|| gpu.alloc(4).map(drop)),
        ("free", 900, &|| gpu.free(there)),
        ("host allocation", 900, &|| gpu.pinned(1).map(drop)),
        ("upload", 900, &|| gpu.upload_now(&[1.0], there)),
        ("download", 900, &|| gpu.download_now(there, 1).map(drop)),
        ("upload of pageable memory", 900, &|| gpu.upload_staged(stream, &[1.0], there)),
        ("wait for the stream", 900, &|| gpu.synchronize(stream)),
        ("wait for another stream", 900, &|| gpu.synchronize(other)),
        ("question about the stream", 900, &|| gpu.query(stream)),
        ("wait for an event in it", 907, &|| gpu.synchronize_event(event)),
        ("wait for an event before it", 905, &|| gpu.wait(stream, outside)),
    ];
    for (what, code, call) in forbidden {
        gpu.begin_capture(stream).unwrap();
        gpu.record(event, stream).unwrap();
        assert_eq!(call(), Err(code), "{what}");
        assert_eq!(gpu.zero(stream, there, BYTES), Err(901), "{what}");
        assert_eq!(gpu.end_capture(stream).err(), Some(901), "{what}");
    }
    assert_eq!(gpu.end_capture(stream).err(), Some(401), "no capture is under way");
    assert_eq!(gpu.begin_capture(gpu.default_stream()), Err(900));
    gpu.free(there).unwrap();
}

#[test]
fn captures_stay_apart() {
    let gpu = Gpu::new(&Config::default());
    let (first, second, blocking) = (gpu.stream(), gpu.stream(), gpu.blocking_stream());
    let (there, event) = (gpu.alloc(BYTES).unwrap(), gpu.event(CU_EVENT_DISABLE_TIMING));
    gpu.begin_capture(first).unwrap();
    gpu.begin_capture(second).unwrap();
    gpu.record(event, first).unwrap();
    assert_eq!(gpu.wait(second, event), Err(902));
    assert_eq!(gpu.end_capture(first).err(), Some(901));
    assert_eq!(gpu.end_capture(second).err(), Some(901));
    // Work in the default stream would have to wait for the capturing stream.
    gpu.begin_capture(blocking).unwrap();
    assert_eq!(gpu.zero(gpu.default_stream(), there, BYTES), Err(906));
    assert_eq!(gpu.end_capture(blocking).err(), Some(901));
    // A stream that has joined cannot end it.
    gpu.begin_capture(first).unwrap();
    gpu.record(event, first).unwrap();
    gpu.wait(second, event).unwrap();
    assert_eq!(gpu.end_capture(second).err(), Some(903));
    assert_eq!(gpu.end_capture(first).err(), Some(901));
}

/// Another thread is not bound by a capture of this one, but cannot end it.
#[test]
fn a_capture_is_of_its_thread() {
    let gpu = Gpu::new(&Config::default());
    let stream = gpu.context.new_stream().expect("a stream");
    let mode = cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).expect("a capture");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let other = gpu.context.default_stream();
            let there = other.clone_htod(&[1u32; 4]).expect("an upload of another thread");
            assert_eq!(other.clone_dtoh(&there), Ok(vec![1; 4]));
            let flags = cudarc::driver::sys::CUgraphInstantiate_flags(0);
            let error = stream.end_capture(flags).err().expect("another thread's capture");
            assert_eq!(error.0 as i32, 908);
        });
    });
    let flags = cudarc::driver::sys::CUgraphInstantiate_flags(0);
    stream.end_capture(flags).expect("still valid").expect("a graph").launch().expect("launch");
}

/// A graph outlives the page-locked memory that it reads.
#[test]
fn a_graph_that_reads_freed_host_memory_faults() {
    let gpu = Gpu::new(&Config::default());
    let (stream, there) = (gpu.stream(), gpu.alloc(BYTES).unwrap());
    let staging = gpu.pinned(WIDTH).unwrap();
    gpu.begin_capture(stream).unwrap();
    gpu.upload(stream, staging, there).unwrap();
    let graph = gpu.end_capture(stream).unwrap();
    gpu.free_pinned(staging).unwrap();
    gpu.launch_graph(graph, stream).unwrap();
    assert_eq!(gpu.synchronize(stream), Err(700));
}
