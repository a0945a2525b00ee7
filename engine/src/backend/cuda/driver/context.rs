//! A device and its primary context.

use std::ffi::{CStr, c_int};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUcontext, CUctx_st, CUdevice, CUdevice_attribute, CUmod_st};
use quire_kernels_ptx::ComputeCapability;

use super::Handle;
use super::stream::Stream;
use super::symbols::{Driver, driver_version};
use crate::backend::cuda::error::{CudaError, Version};
use crate::memory::SystemMemory;

/// What a device is.
#[derive(Clone, Debug)]
pub(crate) struct DeviceInfo {
    /// NVIDIA's name of it.
    pub(crate) name: String,
    /// Which kernels it runs.
    pub(crate) capability: ComputeCapability,
    /// Streaming multiprocessors.
    pub(crate) num_multiprocessors: u32,
    /// Shared memory that a block can have when it asks for it.
    pub(crate) max_shared_bytes: u32,
    /// The CUDA version of the driver.
    pub(crate) driver_version: Version,
}

/// A device's primary context. Everything made from it keeps it alive.
#[derive(Clone)]
pub(crate) struct Context(Arc<Inner>);

struct Inner {
    driver: &'static Driver,
    device: CUdevice,
    context: Handle<CUctx_st>,
    info: DeviceInfo,
    /// Loaded modules. A graph may hold kernels of any of them.
    modules: Mutex<Vec<Handle<CUmod_st>>>,
}

impl Context {
    /// Takes the device.
    ///
    /// # Errors
    /// There is no driver, it is too old, or there is no such device.
    pub(crate) fn new(ordinal: usize) -> Result<Self, CudaError> {
        let driver = Driver::get()?;
        // SAFETY: 0 is the only flag there is.
        unsafe { driver.cuInit(0) }?;
        let device = find_device(driver, ordinal)?;
        let info = describe(driver, device)?;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: the device is one of the driver's.
        unsafe { driver.cuDevicePrimaryCtxRetain(&mut context, device) }?;
        let (context, modules) = (Handle(context), Mutex::default());
        let context = Context(Arc::new(Inner { driver, device, context, info, modules }));
        context.bind()?;
        Ok(context)
    }

    /// What the device is.
    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Makes this the context of the calling thread.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained.
        unsafe { self.0.driver.cuCtxSetCurrent(self.0.context.0) }
    }

    /// The device's memory, as far as this process may have it.
    pub(crate) fn memory(&self) -> Result<SystemMemory, CudaError> {
        let (mut available, mut total) = (0, 0);
        // SAFETY: both are written to at most.
        unsafe { self.driver()?.cuMemGetInfo_v2(&mut available, &mut total) }?;
        Ok(SystemMemory { total, available: available.min(total) })
    }

    /// Waits for all work on the device.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: takes nothing.
        unsafe { self.driver()?.cuCtxSynchronize() }
    }

    /// A stream that does not wait for the default stream.
    pub(crate) fn stream(&self) -> Result<Stream, CudaError> {
        Stream::new(self.clone())
    }

    /// The driver, with this context made current.
    pub(super) fn driver(&self) -> Result<&'static Driver, CudaError> {
        self.bind()?;
        Ok(self.0.driver)
    }

    /// Keeps a module until the context goes.
    pub(super) fn keep(&self, module: Handle<CUmod_st>) {
        self.0.modules.lock().unwrap_or_else(PoisonError::into_inner).push(module);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let modules = self.modules.get_mut().unwrap_or_else(PoisonError::into_inner);
        // What fails here is lost already, and nobody is left to tell. A context that cannot be made
        // current is gone, and the device's may be another one by now.
        // SAFETY: the context is retained, and all that was made in it but the modules is gone.
        if unsafe { self.driver.cuCtxSetCurrent(self.context.0) }.is_err() {
            return;
        }
        for module in modules.drain(..) {
            // SAFETY: loaded and not unloaded yet; functions and graphs of it keep the context.
            let _ = unsafe { self.driver.cuModuleUnload(module.0) };
        }
        // SAFETY: retained once by `new`.
        let _ = unsafe { self.driver.cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

fn find_device(driver: &Driver, ordinal: usize) -> Result<CUdevice, CudaError> {
    let mut count = 0;
    // SAFETY: the count is written to at most.
    unsafe { driver.cuDeviceGetCount(&mut count) }?;
    if count <= 0 {
        return Err(CudaError::NoDevice);
    }
    let Some(index) = c_int::try_from(ordinal).ok().filter(|index| *index < count) else {
        return Err(CudaError::UnknownDevice { ordinal, count: count.unsigned_abs() as usize });
    };
    let mut device = 0;
    // SAFETY: the device is written to at most.
    unsafe { driver.cuDeviceGet(&mut device, index) }?;
    Ok(device)
}

fn describe(driver: &Driver, device: CUdevice) -> Result<DeviceInfo, CudaError> {
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: the device is one of the driver's, the attribute one of CUDA 12.0.
        unsafe { driver.cuDeviceGetAttribute(&mut value, attribute, device) }?;
        Ok::<u32, CudaError>(value.unsigned_abs())
    };
    let mut name = [0u8; 128];
    // SAFETY: the driver writes at most as many bytes, a zero among them.
    unsafe { driver.cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, device) }?;
    let name = CStr::from_bytes_until_nul(&name).unwrap_or(c"CUDA device");
    use CUdevice_attribute::*;
    Ok(DeviceInfo {
        name: name.to_string_lossy().into_owned(),
        capability: ComputeCapability {
            major: attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        },
        num_multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        max_shared_bytes: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        driver_version: driver_version()?,
    })
}
