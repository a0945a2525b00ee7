//! Graphs.

use std::ffi::c_int;

use super::{give_back, with_device};
use crate::code;
use crate::config::Call;
use crate::host::put;
use crate::work::Work;

/// # Safety
/// `executable` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphInstantiateWithFlags(
    executable: *mut u64,
    graph: u64,
    flags: u64,
) -> c_int {
    with_device(|driver, device| {
        // AUTO_FREE_ON_LAUNCH, UPLOAD and USE_NODE_PRIORITY; a device cannot launch graphs here.
        if flags & !0b1011 != 0 {
            return Err(code::INVALID_VALUE);
        }
        let handle = driver.instantiate(graph, device)?;
        // SAFETY: the caller's promise.
        unsafe { put(executable, handle) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphLaunch(executable: u64, stream: u64) -> c_int {
    with_device(|driver, device| {
        let stream = driver.stream(stream, device)?;
        let found = driver.executables.get(&executable).filter(|found| found.device == device);
        let works = found.ok_or(code::INVALID_HANDLE)?.works.clone();
        driver.inject(Call::GraphLaunch, device)?;
        driver.submit(stream, Work::Graph(works))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphUpload(executable: u64, stream: u64) -> c_int {
    with_device(|driver, device| {
        driver.stream(stream, device)?;
        driver.executables.get(&executable).map(|_| ()).ok_or(code::INVALID_HANDLE)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphExecDestroy(executable: u64) -> c_int {
    give_back(|driver, _| {
        driver.executables.remove(&executable).map(|_| ()).ok_or(code::INVALID_HANDLE)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphDestroy(graph: u64) -> c_int {
    give_back(|driver, _| driver.graphs.remove(&graph).map(|_| ()).ok_or(code::INVALID_VALUE))
}
