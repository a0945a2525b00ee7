//! A program that is started with the driver on its library path: it knows nothing of this crate,
//! and is told what to do by environment variables. The program is this test, run again.

mod common;

use std::{env, fs, process::Command};

use common::outcome;
use cudarc::driver::CudaContext;
use fakecuda::{FakeCuda, Stats};

const CHILD: &str = "FAKECUDA_TEST_CHILD";

/// What the program does: two uploads of which the second fails, and it keeps an allocation.
fn child() {
    let context = CudaContext::new(0).expect("a device");
    assert_eq!(context.compute_capability(), Ok((8, 9)));
    assert_eq!(context.mem_get_info(), Ok((1 << 20, 1 << 20)));
    let stream = context.default_stream();
    let first = stream.clone_htod(&[1u32; 100]).expect("the first copy");
    assert_eq!(stream.synchronize(), Ok(()));
    assert_eq!(outcome(stream.clone_htod(&[2u32; 100])).err(), Some(719));
    std::mem::forget(first);
}

#[test]
fn a_program_finds_the_driver_and_obeys_the_environment() {
    if env::var_os(CHILD).is_some() {
        return child();
    }
    let scratch = env::temp_dir().join(format!("fakecuda-{}", std::process::id()));
    let folder = FakeCuda::library_folder(&scratch).expect("a folder");
    assert_eq!(FakeCuda::library_folder(&scratch).expect("again"), folder);
    let stats = scratch.join("stats.json");
    let output = Command::new(env::current_exe().expect("this test"))
        .arg("a_program_finds_the_driver_and_obeys_the_environment")
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", &folder)
        .env("FAKECUDA_CC", "8.9")
        .env("FAKECUDA_DEVICE_BYTES", "1048576")
        .env("FAKECUDA_FAIL", "copy:2:719")
        .env("FAKECUDA_STATS", &stats)
        .output()
        .expect("the test runs again");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let stats: Stats =
        serde_json::from_slice(&fs::read(&stats).expect("written at exit")).expect("JSON");
    assert_eq!((stats.live_allocations, stats.live_bytes), (1, 400));
    assert_eq!((stats.allocations, stats.copies_htod.count), (2, 1));
    fs::remove_dir_all(scratch).expect("the folder goes");
}
