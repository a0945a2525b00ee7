//! Modules, functions and kernel launches.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use quire_ptxsim::{Arg, Kernel, ParamType};

use super::{give_back, with_device};
use crate::code::{self, Result};
use crate::config::Call;
use crate::host::put;
use crate::work::{Launch, Work};

/// Largest grid and block: x, y, z. Threads of a block in all.
const MAX_GRID: [c_uint; 3] = [c_int::MAX as c_uint, 65_535, 65_535];
const MAX_BLOCK: [c_uint; 3] = [1024, 1024, 64];
const MAX_THREADS: c_uint = 1024;

/// `CU_FUNC_ATTRIBUTE_…`.
const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
const PREFERRED_SHARED_MEMORY_CARVEOUT: c_int = 9;

/// # Safety
/// `module` is null or may be written; `image` is null or points to text that ends with a NUL.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut u64, image: *const c_void) -> c_int {
    with_device(|driver, device| {
        driver.check_captures()?;
        if image.is_null() || module.is_null() {
            return Err(code::INVALID_VALUE);
        }
        driver.inject(Call::ModuleLoad, device)?;
        // SAFETY: the caller's promise; it is not null.
        let text = unsafe { CStr::from_ptr(image.cast()) };
        let ptx = text.to_str().map_err(|_| code::INVALID_IMAGE)?;
        let handle = driver.load_module(device, ptx)?;
        // SAFETY: the caller's promise.
        unsafe { put(module, handle) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: u64) -> c_int {
    give_back(|driver, device| driver.unload_module(module, device))
}

/// # Safety
/// `function` is null or may be written; `name` is null or points to text that ends with a NUL.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    function: *mut u64,
    module: u64,
    name: *const c_char,
) -> c_int {
    with_device(|driver, device| {
        if name.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller's promise; it is not null.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| code::NOT_FOUND)?;
        let handle = driver.get_function(module, name, device)?;
        // SAFETY: the caller's promise.
        unsafe { put(function, handle) }
    })
}

/// # Safety
/// `value` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuFuncGetAttribute(
    value: *mut c_int,
    attribute: c_int,
    function: u64,
) -> c_int {
    with_device(|driver, device| {
        let (major, minor) = driver.config.compute_capability;
        let function = driver.function(function, device)?;
        let found = match attribute {
            // MAX_THREADS_PER_BLOCK.
            0 => function.kernel().threads() as c_int,
            // SHARED_SIZE_BYTES, CONST_SIZE_BYTES and LOCAL_SIZE_BYTES: the shared memory of these
            // kernels is dynamic.
            1..=3 => 0,
            // PTX_VERSION and BINARY_VERSION.
            5 => 80,
            6 => (10 * major + minor) as c_int,
            MAX_DYNAMIC_SHARED_SIZE_BYTES => function.max_shared_bytes as c_int,
            _ => return Err(code::INVALID_VALUE),
        };
        // SAFETY: the caller's promise.
        unsafe { put(value, found) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncSetAttribute(function: u64, attribute: c_int, value: c_int) -> c_int {
    with_device(|driver, device| {
        let limit = driver.config.max_shared_bytes();
        let function = driver.function(function, device)?;
        match attribute {
            MAX_DYNAMIC_SHARED_SIZE_BYTES => {
                let bytes = usize::try_from(value).ok().filter(|&bytes| bytes <= limit);
                function.max_shared_bytes = bytes.ok_or(code::INVALID_VALUE)?;
                Ok(())
            }
            PREFERRED_SHARED_MEMORY_CARVEOUT if (-1..=100).contains(&value) => Ok(()),
            _ => Err(code::INVALID_VALUE),
        }
    })
}

/// # Safety
/// `params` is null or points to one pointer for each parameter of the kernel, each to a value of
/// its type.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: u64,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    stream: u64,
    params: *const *const c_void,
    extra: *const *const c_void,
) -> c_int {
    with_device(|driver, device| {
        let stream = driver.stream(stream, device)?;
        driver.inject(Call::Launch, device)?;
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let shared = shared as usize;
        let loaded = driver.function(function, device)?;
        let kernel = loaded.kernel();
        let fits = is_shape(grid, MAX_GRID)
            && is_shape(block, MAX_BLOCK)
            && block.iter().product::<c_uint>() <= MAX_THREADS
            && block == [kernel.threads(), 1, 1]
            && shared <= loaded.max_shared_bytes;
        if !fits {
            return Err(code::INVALID_VALUE);
        }
        if !extra.is_null() {
            return Err(code::NOT_SUPPORTED);
        }
        // SAFETY: the caller's promise.
        let args = unsafe { arguments(kernel, params) }?;
        let launch = Launch { function: loaded.function.clone(), grid, block, shared, args };
        driver.submit(stream, Work::Kernel(Arc::new(launch)))
    })
}

fn is_shape(shape: [c_uint; 3], max: [c_uint; 3]) -> bool {
    shape.iter().zip(max).all(|(&count, max)| (1..=max).contains(&count))
}

/// # Safety
/// As for [`cuLaunchKernel`].
unsafe fn arguments(kernel: &Kernel, params: *const *const c_void) -> Result<Vec<Arg>> {
    let types = kernel.params().iter().map(|param| param.ty);
    if params.is_null() && types.len() > 0 {
        return Err(code::INVALID_VALUE);
    }
    let argument = |(i, ty): (usize, ParamType)| {
        // SAFETY: `params` has a pointer for each parameter.
        let value = unsafe { params.add(i).read() };
        if value.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the value has the parameter's type, whose size this is; it need not be aligned.
        let argument = unsafe {
            match ty {
                ParamType::U32 => Arg::U32(value.cast::<u32>().read_unaligned()),
                ParamType::F32 => Arg::F32(value.cast::<f32>().read_unaligned()),
                ParamType::U64 => Arg::U64(value.cast::<u64>().read_unaligned()),
                ParamType::Pointer => Arg::Pointer(value.cast::<u64>().read_unaligned()),
            }
        };
        Ok(argument)
    };
    types.enumerate().map(argument).collect()
}
