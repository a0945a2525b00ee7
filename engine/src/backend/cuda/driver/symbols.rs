//! The driver's functions, by name.
//!
//! cudarc's own wrappers are not called, for two reasons. They panic when the driver lacks a symbol,
//! and they return a code as a Rust `enum` of what CUDA 12.0 knew: a newer driver's code (226, 721,
//! 915…) would be a value that the type does not have, which is undefined behaviour. So the
//! functions are looked up here, once and all together, in the library that cudarc loads, with
//! cudarc's types but the code as the number it is. The compiler holds each signature against
//! cudarc's.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
    CUfunction_attribute, CUgraph, CUgraphExec, CUmodule, CUstream, CUstreamCaptureMode,
    CUstreamCaptureStatus,
};

use crate::backend::cuda::error::{CudaError, Version};

/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(super) const OUT_OF_MEMORY: u32 = 2;
/// `CUDA_ERROR_STUB_LIBRARY`: the library is the toolkit's, to link with, and no driver.
const STUB_LIBRARY: u32 = 34;
/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: u32 = 100;
/// `CUDA_ERROR_JIT_COMPILER_NOT_FOUND`.
const JIT_COMPILER_NOT_FOUND: u32 = 221;
/// `CUDA_ERROR_UNSUPPORTED_PTX_VERSION`.
pub(super) const UNSUPPORTED_PTX_VERSION: u32 = 222;

/// Declares the table of a library: a field for each function, and a method that calls it and checks
/// its code. Those marked `raw` have a code as an argument and so cannot be held against cudarc's.
///
/// Where it stands, `sys` is cudarc's module, `symbol` finds a function by name, and the type has a
/// method `error` that says what a code means.
macro_rules! c_library {
    (
        $library:ident, $code:ty;
        $(fn $name:ident($($arg:ident: $type:ty),*);)*
        raw $(fn $raw:ident($($raw_arg:ident: $raw_type:ty),*);)*
    ) => {
        /// The library's functions.
        #[expect(non_snake_case, reason = "the names are the library's")]
        pub(super) struct $library {
            $($name: unsafe extern "C" fn($($type),*) -> u32,)*
            $($raw: unsafe extern "C" fn($($raw_type),*) -> u32,)*
        }

        $(const _: unsafe fn($($type),*) -> $code = sys::$name;)*

        impl $library {
            fn load() -> Result<Self, CudaError> {
                Ok($library {
                    // SAFETY: the type is the function's: cudarc's, but for the code, which C
                    // returns as an `unsigned int`.
                    $($name: unsafe { symbol(stringify!($name)) }?,)*
                    // SAFETY: the type is that of the C header.
                    $($raw: unsafe { symbol(stringify!($raw)) }?,)*
                })
            }

            $(
                /// # Safety
                /// What the library's manual asks of the arguments.
                #[expect(non_snake_case, reason = "the name is the library's")]
                #[allow(clippy::too_many_arguments, reason = "they are the library's")]
                pub(super) unsafe fn $name(&self, $($arg: $type),*) -> Result<(), CudaError> {
                    // SAFETY: the caller's.
                    let code = unsafe { (self.$name)($($arg),*) };
                    if code == 0 { Ok(()) } else { Err(self.error(stringify!($name), code)) }
                }
            )*
        }
    };
}
pub(super) use c_library;

c_library! {
    Driver, sys::CUresult;
    fn cuInit(flags: c_uint);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    fn cuCtxSetCurrent(context: CUcontext);
    fn cuCtxSynchronize();
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    fn cuMemFree_v2(address: CUdeviceptr);
    fn cuMemHostAlloc(host: *mut *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemFreeHost(host: *mut c_void);
    fn cuMemcpyHtoDAsync_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize, stream: CUstream);
    fn cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize, stream: CUstream);
    fn cuMemcpyDtoDAsync_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream);
    fn cuMemsetD8Async(dst: CUdeviceptr, value: c_uchar, bytes: usize, stream: CUstream);
    fn cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    fn cuStreamDestroy_v2(stream: CUstream);
    fn cuStreamSynchronize(stream: CUstream);
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    fn cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode);
    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    fn cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    fn cuEventCreate(event: *mut CUevent, flags: c_uint);
    fn cuEventDestroy_v2(event: CUevent);
    fn cuEventRecord(event: CUevent, stream: CUstream);
    fn cuEventSynchronize(event: CUevent);
    fn cuEventElapsedTime(ms: *mut f32, start: CUevent, end: CUevent);
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    fn cuModuleUnload(module: CUmodule);
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    fn cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int);
    fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        params: *mut *mut c_void,
        extra: *mut *mut c_void
    );
    fn cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
    fn cuGraphDestroy(graph: CUgraph);
    fn cuGraphExecDestroy(exec: CUgraphExec);
    fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream);
    raw
    fn cuGetErrorName(code: u32, name: *mut *const c_char);
    fn cuGetErrorString(code: u32, message: *mut *const c_char);
}

impl Driver {
    /// The driver, loaded by the first call.
    ///
    /// # Errors
    /// There is none, or it is too old. Tried anew by every call until one succeeds.
    pub(super) fn get() -> Result<&'static Driver, CudaError> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        if !is_present() {
            return Err(CudaError::NoDriver);
        }
        // Before the others, so that an old driver is told its version and not what it lacks.
        let driver = driver_version()?;
        if driver < Version::OLDEST {
            let needed = Version::OLDEST;
            return Err(CudaError::DriverTooOld { driver, needed, ptx: (8, 0) });
        }
        let driver = Driver::load()?;
        Ok(DRIVER.get_or_init(|| driver))
    }

    /// What a code that is not 0 means.
    fn error(&self, call: &'static str, code: u32) -> CudaError {
        match code {
            OUT_OF_MEMORY => {
                let what = format!("the driver's own use ({call})");
                return CudaError::OutOfMemory { what, bytes: 0, free: self.free_bytes() };
            }
            STUB_LIBRARY => return CudaError::NoDriver,
            NO_DEVICE => return CudaError::NoDevice,
            JIT_COMPILER_NOT_FOUND => {
                let reason = "the NVIDIA driver's PTX compiler (libnvidia-ptxjitcompiler.so) is \
                              missing; install all of the driver, or run with --device cpu";
                return CudaError::Unsupported { reason: reason.to_owned() };
            }
            _ => {}
        }
        if let Some(reason) = unavailable(call, code) {
            return CudaError::Unavailable { reason, code };
        }
        let name = text(self.cuGetErrorName, code).unwrap_or_else(|| "an unknown error".into());
        let message = text(self.cuGetErrorString, code)
            .unwrap_or_else(|| "the driver does not say why".into());
        if is_sticky(code) {
            CudaError::Lost { call, code, name, message }
        } else {
            CudaError::Driver { call, code, name, message }
        }
    }

    /// Free bytes of the current context's device; 0 where the driver does not say.
    pub(super) fn free_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are written to at most.
        let code = unsafe { (self.cuMemGetInfo_v2)(&mut free, &mut total) };
        if code == 0 { free } else { 0 }
    }
}

/// Whether a driver's library can be loaded.
fn is_present() -> bool {
    // SAFETY: runs the initialisers of the library that the system names `libcuda.so`, which is the
    // driver's as far as any program can know.
    unsafe { sys::is_culib_present() }
}

/// The version of CUDA that the driver supports. It is known without `cuInit`.
pub(super) fn driver_version() -> Result<Version, CudaError> {
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> u32;
    const _: unsafe fn(*mut c_int) -> sys::CUresult = sys::cuDriverGetVersion;
    const CALL: &str = "cuDriverGetVersion";
    // SAFETY: the type is cudarc's, but for the code.
    let get: GetVersion = unsafe { symbol(CALL) }?;
    let mut number = 0;
    // SAFETY: the number is written to at most.
    let code = unsafe { get(&mut number) };
    if code == STUB_LIBRARY {
        return Err(CudaError::NoDriver);
    }
    if code != 0 {
        let (name, message) = ("an error".to_owned(), "the driver tells no version".to_owned());
        return Err(CudaError::Driver { call: CALL, code, name, message });
    }
    Ok(Version::from_number(number.unsigned_abs()))
}

/// The function of that name.
///
/// # Safety
/// `F` is a function pointer of its type, and the library is present.
unsafe fn symbol<F: Copy>(name: &'static str) -> Result<F, CudaError> {
    // SAFETY: the library is present; it is never unloaded again, so the pointer stays valid.
    let library = unsafe { sys::culib() };
    // SAFETY: `F` is the type of the function.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| CudaError::MissingSymbol { symbol: name })
}

/// What the driver says of a code, if it knows it.
fn text(get: unsafe extern "C" fn(u32, *mut *const c_char) -> u32, code: u32) -> Option<String> {
    let mut text = std::ptr::null();
    // SAFETY: one of the two functions that take a code, any, and set the pointer.
    let result = unsafe { get(code, &mut text) };
    if result != 0 || text.is_null() {
        return None;
    }
    // SAFETY: the driver points to a constant of its own.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().into_owned())
}

/// Why a device cannot be had, where that is about the machine and not about this program.
fn unavailable(call: &str, code: u32) -> Option<&'static str> {
    Some(match code {
        46 => "another process has the device for itself (exclusive mode)",
        802 => {
            "the system is still starting; on machines with NVSwitch the fabric manager must run"
        }
        803 => "the driver was updated and its kernel module was not; restart the machine",
        804 => "the CUDA compatibility library that is installed does not know this device",
        805..=809 => "the MPS server cannot be reached or has no room; see nvidia-cuda-mps-control",
        999 if call == "cuInit" => {
            "the driver's kernel module does not answer; see nvidia-smi and who may use /dev/nvidia*"
        }
        _ => return None,
    })
}

/// Whether the code says that nothing more can be done with the context, or the process.
fn is_sticky(code: u32) -> bool {
    matches!(
        code,
        4           // the driver shuts down
        | 214       // uncorrectable ECC error
        | 220       // uncorrectable NVLink error
        | 226       // contained error of the device
        | 700       // illegal address
        | 702       // a kernel ran too long
        | 709       // the context is destroyed
        | 710       // a kernel's assertion
        | 810       // the MPS server ended this client
        | 714
            ..=719 // hardware stack, instruction, alignment, address space, program counter, other
        | 721       // tensor memory leaked
        | 999 // unknown
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_of_a_kernel_is_sticky_and_a_refused_call_is_not() {
        for code in [4, 214, 220, 226, 700, 702, 709, 710, 714, 716, 719, 721, 999] {
            assert!(is_sticky(code), "{code}");
        }
        for code in [1, 2, 100, 201, 218, 222, 400, 500, 600, 701, 703, 713, 720, 801, 900, 907] {
            assert!(!is_sticky(code), "{code}");
        }
    }

    #[test]
    fn without_a_library_there_is_no_driver() {
        let error = Driver::get().err();
        assert_eq!(error == Some(CudaError::NoDriver), !is_present(), "{error:?}");
    }
}
