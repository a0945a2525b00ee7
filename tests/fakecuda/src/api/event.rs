//! Events. The time between two is that of a clock that ticks once for each piece of work.

use std::ffi::{c_int, c_uint};

use super::{give_back, with_device};
use crate::code;
use crate::config::Call;
use crate::host::put;
use crate::stream::Event;

/// `CU_EVENT_DISABLE_TIMING`; the other flags are 1, blocking wait, and 4, for other processes.
const DISABLE_TIMING: c_uint = 2;

/// # Safety
/// `event` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut u64, flags: c_uint) -> c_int {
    with_device(|driver, device| {
        if flags > 7 || event.is_null() {
            return Err(code::INVALID_VALUE);
        }
        let handle = driver.new_handle();
        let timing = flags & DISABLE_TIMING == 0;
        driver.events.insert(handle, Event { device, timing, ..Event::default() });
        // SAFETY: the caller's promise.
        unsafe { put(event, handle) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: u64) -> c_int {
    give_back(|driver, device| {
        driver.event(event, device)?;
        driver.events.remove(&event);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: u64, stream: u64) -> c_int {
    with_device(|driver, device| {
        let stream = driver.stream(stream, device)?;
        driver.event(event, device)?;
        driver.record(event, stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: u64) -> c_int {
    with_device(|driver, device| {
        driver.event(event, device)?;
        driver.check_not_captured(event)?;
        driver.inject(Call::Sync, device)?;
        driver.stats.synchronisations += 1;
        if let Some(ticket) = driver.event(event, device)?.recorded {
            driver.run_to(ticket);
        }
        driver.devices[device].lost.map_or(Ok(()), Err)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: u64) -> c_int {
    with_device(|driver, device| {
        driver.event(event, device)?;
        driver.check_not_captured(event)?;
        match driver.event(event, device)?.recorded {
            Some(ticket) => driver.query(ticket),
            None => Ok(()),
        }
    })
}

/// # Safety
/// `milliseconds` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, start: u64, end: u64) -> c_int {
    with_device(|driver, device| {
        let mut time = |event: u64| {
            let event = driver.event(event, device)?;
            match (event.timing, event.recorded, event.time) {
                (false, ..) | (_, None, _) => Err(code::INVALID_HANDLE),
                (_, _, None) => Err(code::NOT_READY),
                (_, _, Some(time)) => Ok(time),
            }
        };
        let (start, end) = (time(start)?, time(end)?);
        let elapsed = (end as f64 - start as f64) / 1000.0;
        // SAFETY: the caller's promise.
        unsafe { put(milliseconds, elapsed as f32) }
    })
}
