//! Initialisation, devices, contexts, and the names of errors.

use std::ffi::{c_char, c_int, c_uint};

use super::{with_device, with_driver};
use crate::code::{self, Code};
use crate::config::{Call, Config};
use crate::host::{put, write};

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> c_int {
    with_driver(|driver| match (flags, driver.devices.len()) {
        (1.., _) => Err(code::INVALID_VALUE),
        (_, 0) => Err(code::NO_DEVICE),
        _ => {
            driver.initialised = true;
            Ok(())
        }
    })
}

/// # Safety
/// `version` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the caller's promise.
    with_driver(|driver| unsafe { put(version, driver.config.driver_version as c_int) })
}

/// # Safety
/// `count` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    with_driver(|driver| {
        if !driver.initialised {
            return Err(code::NOT_INITIALIZED);
        }
        // SAFETY: the caller's promise.
        unsafe { put(count, driver.devices.len() as c_int) }
    })
}

/// # Safety
/// `device` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    with_driver(|driver| {
        driver.device(ordinal)?;
        // SAFETY: the caller's promise.
        unsafe { put(device, ordinal) }
    })
}

/// # Safety
/// `name` is null or points to `len` writable bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> c_int {
    with_driver(|driver| {
        driver.device(device)?;
        let room = usize::try_from(len).ok().and_then(|len| len.checked_sub(1));
        let room = room.ok_or(code::INVALID_VALUE)?;
        let mut bytes = driver.config.name.as_bytes().to_vec();
        bytes.truncate(room);
        bytes.push(0);
        // SAFETY: the caller's promise; with its NUL the name fits in `len`.
        unsafe { write(name.cast(), &bytes) }
    })
}

/// # Safety
/// `bytes` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_int {
    with_driver(|driver| {
        driver.device(device)?;
        // SAFETY: the caller's promise.
        unsafe { put(bytes, driver.config.device_bytes) }
    })
}

/// # Safety
/// `uuid` is null or points to 16 writable bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) -> c_int {
    with_driver(|driver| {
        let mut bytes = *b"fake CUDA device";
        bytes[15] = driver.device(device)? as u8;
        // SAFETY: the caller's promise.
        unsafe { put(uuid, bytes) }
    })
}

/// # Safety
/// As [`cuDeviceGetUuid`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { cuDeviceGetUuid(uuid, device) }
}

/// # Safety
/// `value` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_int,
    device: c_int,
) -> c_int {
    with_driver(|driver| {
        driver.device(device)?;
        let found = attribute_value(&driver.config, attribute).ok_or(code::INVALID_VALUE)?;
        // SAFETY: the caller's promise.
        unsafe { put(value, found) }
    })
}

/// `CU_DEVICE_ATTRIBUTE_…` by number: those that a program without graphics may ask for.
fn attribute_value(config: &Config, attribute: c_int) -> Option<c_int> {
    let value = match attribute {
        // MAX_THREADS_PER_BLOCK, MAX_BLOCK_DIM_X, _Y, _Z.
        1..=3 => 1024,
        4 => 64,
        // MAX_GRID_DIM_X, _Y, _Z.
        5 => c_int::MAX,
        6 | 7 => 65_535,
        // MAX_SHARED_MEMORY_PER_BLOCK, TOTAL_CONSTANT_MEMORY, WARP_SIZE.
        8 => 48 * 1024,
        9 => 64 * 1024,
        10 => 32,
        // MAX_REGISTERS_PER_BLOCK and _PER_MULTIPROCESSOR.
        12 | 82 => 65_536,
        // CLOCK_RATE and MEMORY_CLOCK_RATE in kHz.
        13 => 1_410_000,
        36 => 1_215_000,
        16 => config.num_multiprocessors as c_int,
        // KERNEL_EXEC_TIMEOUT, INTEGRATED, COMPUTE_MODE.
        17 | 18 | 20 => 0,
        // CAN_MAP_HOST_MEMORY, CONCURRENT_KERNELS, UNIFIED_ADDRESSING, STREAM_PRIORITIES_SUPPORTED,
        // COOPERATIVE_LAUNCH, MEMORY_POOLS_SUPPORTED.
        19 | 31 | 41 | 78 | 95 | 115 => 1,
        // ECC_ENABLED, PCI_BUS_ID, PCI_DEVICE_ID, PCI_DOMAIN_ID, MANAGED_MEMORY.
        32..=34 | 50 | 83 => 0,
        // GLOBAL_MEMORY_BUS_WIDTH in bits, L2_CACHE_SIZE.
        37 => 5120,
        38 => 40 << 20,
        // MAX_THREADS_PER_MULTIPROCESSOR, ASYNC_ENGINE_COUNT.
        39 => 2048,
        40 => 3,
        // COMPUTE_CAPABILITY_MAJOR and _MINOR.
        75 => config.compute_capability.0 as c_int,
        76 => config.compute_capability.1 as c_int,
        // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN.
        81 => config.max_shared_bytes() as c_int + 1024,
        97 => config.max_shared_bytes() as c_int,
        _ => return None,
    };
    Some(value)
}

/// # Safety
/// `context` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) -> c_int {
    with_driver(|driver| {
        let device = driver.device(device)?;
        let retained = driver.retain(device)?;
        // SAFETY: the caller's promise.
        unsafe { put(context, retained) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    with_driver(|driver| {
        let device = driver.device(device)?;
        driver.release(device)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxSetFlags_v2(device: c_int, _flags: c_uint) -> c_int {
    with_driver(|driver| driver.device(device).map(|_| ()))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: u64) -> c_int {
    with_driver(|driver| match driver.initialised {
        true => driver.set_current(context),
        false => Err(code::NOT_INITIALIZED),
    })
}

/// # Safety
/// `context` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut u64) -> c_int {
    with_driver(|driver| {
        if !driver.initialised {
            return Err(code::NOT_INITIALIZED);
        }
        // SAFETY: the caller's promise.
        unsafe { put(context, driver.current_context()) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetFlags(_flags: c_uint) -> c_int {
    with_device(|_, _| Ok(()))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> c_int {
    with_device(|driver, device| {
        driver.check_captures()?;
        driver.inject(Call::Sync, device)?;
        driver.stats.synchronisations += 1;
        driver.run_all(device);
        driver.devices[device].lost.map_or(Ok(()), Err)
    })
}

/// # Safety
/// Both are null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> c_int {
    with_device(|_, _| {
        // SAFETY: the caller's promise.
        unsafe { put(least, 0).and_then(|()| put(greatest, -5)) }
    })
}

/// # Safety
/// `text` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(error: c_int, text: *mut *const c_char) -> c_int {
    let found = Code(error).name();
    // SAFETY: the caller's promise.
    unsafe { put_text(found, text) }
}

/// # Safety
/// `text` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(error: c_int, text: *mut *const c_char) -> c_int {
    let found = Code(error).description();
    // SAFETY: the caller's promise.
    unsafe { put_text(found, text) }
}

/// Null and an error where there is no text.
///
/// # Safety
/// `text` is null or may be written.
unsafe fn put_text(found: Option<&'static std::ffi::CStr>, text: *mut *const c_char) -> c_int {
    let start = found.map_or(std::ptr::null(), |found| found.as_ptr());
    // SAFETY: the caller's promise.
    let put = unsafe { put(text, start) };
    super::status(put.and(found.map(|_| ()).ok_or(code::INVALID_VALUE)))
}
