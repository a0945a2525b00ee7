//! Streams and captures.

use std::ffi::{c_int, c_uint};

use super::{give_back, with_device};
use crate::capture::Mode;
use crate::code;
use crate::config::Call;
use crate::host::put;

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

/// # Safety
/// `stream` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut u64, flags: c_uint) -> c_int {
    with_device(|driver, device| {
        if flags > NON_BLOCKING || stream.is_null() {
            return Err(code::INVALID_VALUE);
        }
        let handle = driver.add_stream(device, flags != NON_BLOCKING);
        // SAFETY: the caller's promise.
        unsafe { put(stream, handle) }
    })
}

/// The priority changes nothing.
///
/// # Safety
/// As [`cuStreamCreate`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut u64,
    flags: c_uint,
    _priority: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { cuStreamCreate(stream, flags) }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: u64) -> c_int {
    give_back(|driver, device| {
        let stream = driver.stream(stream, device)?;
        driver.destroy_stream(stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: u64) -> c_int {
    with_device(|driver, device| {
        let stream = driver.stream(stream, device)?;
        driver.check_not_capturing(stream)?;
        driver.inject(Call::Sync, device)?;
        driver.stats.synchronisations += 1;
        driver.run_to(driver.tail(stream));
        driver.devices[device].lost.map_or(Ok(()), Err)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(stream: u64) -> c_int {
    with_device(|driver, device| {
        let stream = driver.stream(stream, device)?;
        driver.check_not_capturing(stream)?;
        driver.query(driver.tail(stream))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) -> c_int {
    with_device(|driver, device| {
        let stream = driver.stream(stream, device)?;
        driver.event(event, device)?;
        driver.wait_event(stream, event)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(stream: u64, mode: c_uint) -> c_int {
    with_device(|driver, device| {
        let stream = driver.stream(stream, device)?;
        let mode = match mode {
            0 => Mode::Global,
            1 => Mode::ThreadLocal,
            2 => Mode::Relaxed,
            _ => return Err(code::INVALID_VALUE),
        };
        driver.begin_capture(stream, mode)
    })
}

/// # Safety
/// `graph` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamEndCapture(stream: u64, graph: *mut u64) -> c_int {
    with_device(|driver, device| {
        let stream = driver.stream(stream, device)?;
        let captured = driver.end_capture(stream);
        // SAFETY: the caller's promise.
        unsafe { put(graph, captured.unwrap_or(0)) }?;
        captured.map(|_| ())
    })
}

/// # Safety
/// `status` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamIsCapturing(stream: u64, status: *mut c_uint) -> c_int {
    with_device(|driver, device| {
        let stream = driver.stream(stream, device)?;
        let capture = driver.streams[&stream].capture;
        // NONE, ACTIVE, INVALIDATED.
        let found = capture.map_or(0, |capture| 1 + c_uint::from(driver.is_invalid(capture)));
        // SAFETY: the caller's promise.
        unsafe { put(status, found) }
    })
}
