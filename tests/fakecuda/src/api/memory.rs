//! Allocation, copies, memsets.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use super::{give_back, with_device};
use crate::code::{self, Result};
use crate::config::Call;
use crate::driver::Driver;
use crate::host::{put, read, write};
use crate::work::{HostAddress, Source, Work};

/// # Safety
/// Both are null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    with_device(|driver, device| {
        // SAFETY: the caller's promise.
        unsafe {
            put(free, driver.free_bytes(device))?;
            put(total, driver.config.device_bytes)
        }
    })
}

/// # Safety
/// `address` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int {
    with_device(|driver, device| {
        driver.check_captures()?;
        driver.inject(Call::Alloc, device)?;
        let allocated = driver.alloc(device, bytes)?;
        // SAFETY: the caller's promise.
        unsafe { put(address, allocated) }
    })
}

/// The memory is there at once: use before the stream has come to the allocation goes unseen.
///
/// # Safety
/// `address` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: u64) -> c_int {
    with_device(|driver, device| {
        let stream = driver.stream(stream, device)?;
        driver.check_not_capturing(stream)?;
        driver.inject(Call::Alloc, device)?;
        let allocated = driver.alloc(device, bytes)?;
        // SAFETY: the caller's promise.
        unsafe { put(address, allocated) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    give_back(|driver, device| {
        driver.check_captures()?;
        driver.allocation(address, device)?;
        driver.run_all(device);
        driver.give_back(address);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: u64, stream: u64) -> c_int {
    give_back(|driver, device| {
        let stream = driver.stream(stream, device)?;
        driver.allocation(address, device)?;
        if driver.devices[device].lost.is_some() {
            driver.give_back(address);
            return Ok(());
        }
        driver.check_not_capturing(stream)?;
        driver.begin_free(address);
        driver.submit(stream, Work::Free { at: address })
    })
}

/// # Safety
/// `start` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(start: *mut *mut c_void, bytes: usize, flags: c_uint) -> c_int {
    with_device(|driver, device| {
        driver.check_captures()?;
        if flags > 7 || start.is_null() {
            return Err(code::INVALID_VALUE);
        }
        driver.inject(Call::HostAlloc, device)?;
        let allocated = driver.alloc_pinned(bytes)?;
        // SAFETY: the caller's promise.
        unsafe { put(start, allocated as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(start: *mut c_void) -> c_int {
    give_back(|driver, device| {
        driver.check_captures()?;
        driver.run_all(device);
        driver.free_pinned(start as usize)
    })
}

/// Takes the bytes of a copy to the device, or notes where they are.
///
/// # Safety
/// `from` is null or points to `bytes` readable bytes.
unsafe fn source(driver: &Driver, from: *const c_void, bytes: usize) -> Result<Source> {
    if driver.is_pinned(from as usize, bytes) {
        return Ok(Source::Pinned(HostAddress(from as usize)));
    }
    if driver.config.null {
        return Ok(Source::Staged(Arc::new([])));
    }
    // SAFETY: the caller's promise.
    unsafe { read(from.cast(), bytes) }.map(|data| Source::Staged(data.into()))
}

/// # Safety
/// `from` is null or points to `bytes` readable bytes; if they are page-locked, until the stream
/// has run the copy.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    bytes: usize,
    stream: u64,
) -> c_int {
    with_device(|driver, device| {
        let stream = driver.stream(stream, device)?;
        driver.inject(Call::Copy, device)?;
        driver.check_range(to, bytes)?;
        // SAFETY: the caller's promise.
        let from = unsafe { source(driver, from, bytes) }?;
        driver.submit(stream, Work::CopyIn { to, from, bytes })
    })
}

/// # Safety
/// `from` is null or points to `bytes` readable bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> c_int {
    with_device(|driver, device| {
        driver.check_captures()?;
        driver.inject(Call::Copy, device)?;
        driver.check_range(to, bytes)?;
        let stream = driver.stream(0, device)?;
        // SAFETY: the caller's promise.
        let from = unsafe { source(driver, from, bytes) }?;
        driver.submit_and_wait(stream, Work::CopyIn { to, from, bytes })
    })
}

/// Copies to memory that is not page-locked: when this returns, the bytes are there.
///
/// # Safety
/// `to` is null or points to `bytes` writable bytes.
unsafe fn copy_out_now(
    driver: &mut Driver,
    stream: u64,
    (to, from, bytes): (*mut c_void, u64, usize),
) -> Result {
    let before = driver.tail(stream);
    driver.submit_and_wait(stream, Work::Wait(before))?;
    driver.stats.copies_dtoh.count += 1;
    driver.stats.copies_dtoh.bytes += bytes as u64;
    if driver.config.null {
        return Ok(());
    }
    let mut data = vec![0; bytes];
    driver.memory.read_lossy(from, &mut data).map_err(|_| code::INVALID_VALUE)?;
    // SAFETY: the caller's promise.
    unsafe { write(to.cast(), &data) }
}

/// # Safety
/// `to` is null or points to `bytes` writable bytes; if they are page-locked, until the stream has
/// run the copy.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    bytes: usize,
    stream: u64,
) -> c_int {
    with_device(|driver, device| {
        let stream = driver.stream(stream, device)?;
        driver.inject(Call::Copy, device)?;
        driver.check_range(from, bytes)?;
        if driver.is_pinned(to as usize, bytes) {
            let to = HostAddress(to as usize);
            return driver.submit(stream, Work::CopyOut { to, from, bytes });
        }
        // SAFETY: the caller's promise.
        unsafe { copy_out_now(driver, stream, (to, from, bytes)) }
    })
}

/// # Safety
/// `to` is null or points to `bytes` writable bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> c_int {
    with_device(|driver, device| {
        driver.check_captures()?;
        driver.inject(Call::Copy, device)?;
        driver.check_range(from, bytes)?;
        let stream = driver.stream(0, device)?;
        // SAFETY: the caller's promise.
        unsafe { copy_out_now(driver, stream, (to, from, bytes)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) -> c_int {
    with_device(|driver, device| {
        let stream = driver.stream(stream, device)?;
        driver.inject(Call::Copy, device)?;
        driver.check_range(to, bytes)?;
        driver.check_range(from, bytes)?;
        driver.submit(stream, Work::Copy { to, from, bytes })
    })
}

/// As on hardware, the program does not wait for it.
#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) -> c_int {
    cuMemcpyDtoDAsync_v2(to, from, bytes, 0)
}

/// A memset of elements of `width` bytes.
fn memset(at: u64, value: u32, (width, count): (usize, usize), stream: u64) -> c_int {
    with_device(|driver, device| {
        let stream = driver.stream(stream, device)?;
        let bytes = width.checked_mul(count).ok_or(code::INVALID_VALUE)?;
        driver.check_range(at, bytes)?;
        if !at.is_multiple_of(width as u64) {
            return Err(code::INVALID_VALUE);
        }
        driver.submit(stream, Work::Fill { at, value, width, count })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(at: u64, value: u8, count: usize, stream: u64) -> c_int {
    memset(at, value.into(), (1, count), stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD16Async(at: u64, value: u16, count: usize, stream: u64) -> c_int {
    memset(at, value.into(), (2, count), stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD32Async(at: u64, value: u32, count: usize, stream: u64) -> c_int {
    memset(at, value, (4, count), stream)
}

/// As on hardware, the program does not wait for it.
#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8_v2(at: u64, value: u8, count: usize) -> c_int {
    memset(at, value.into(), (1, count), 0)
}

/// As [`cuMemsetD8_v2`].
#[unsafe(no_mangle)]
extern "C" fn cuMemsetD32_v2(at: u64, value: u32, count: usize) -> c_int {
    memset(at, value, (4, count), 0)
}
