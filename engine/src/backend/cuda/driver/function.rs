//! Kernels on a device.

use std::ffi::CString;

use cudarc::driver::sys::{CUfunc_st, CUfunction, CUfunction_attribute, CUmodule};
use quire_kernels_ptx::{Kernel, Variant, kernels};

use super::Handle;
use super::context::Context;
use super::symbols::UNSUPPORTED_PTX_VERSION;
use crate::backend::cuda::error::{CudaError, Version};

/// Dynamic shared memory that a block has without asking for it.
const PLAIN_SHARED_BYTES: u32 = 48 << 10;

/// The pointers to scratch memory that end every kernel's parameters.
const NUM_SCRATCH: usize = 2;

/// A variant of a kernel, compiled by the driver.
#[derive(Clone)]
pub(crate) struct Function {
    /// Holds the module.
    _context: Context,
    function: Handle<CUfunc_st>,
    kernel: &'static Kernel,
    variant: &'static Variant,
}

impl Context {
    /// Compiles a variant for the device. It stays loaded as long as the context.
    ///
    /// # Errors
    /// The driver is too old for its PTX, the device has too little shared memory for it, or what
    /// the driver says.
    pub(crate) fn load(&self, variant: &'static Variant) -> Result<Function, CudaError> {
        let kernel = kernel_of(variant);
        let info = self.info();
        if info.driver_version < Version::that_reads(variant.ptx_version) {
            return Err(too_old(info.driver_version, variant));
        }
        if variant.shared_bytes > info.max_shared_bytes {
            let (needed, limit) = (variant.shared_bytes, info.max_shared_bytes);
            let reason =
                format!("it needs {needed} bytes of shared memory, and a block can have {limit}");
            return Err(CudaError::Launch { kernel: kernel.name, reason });
        }
        let driver = self.driver()?;
        let ptx = CString::new(variant.ptx()).expect("PTX has no zeros");
        let mut module: CUmodule = std::ptr::null_mut();
        // SAFETY: the image is text that ends with a zero; the driver copies what it needs.
        let loaded = unsafe { driver.cuModuleLoadData(&mut module, ptx.as_ptr().cast()) };
        match loaded {
            Err(CudaError::Driver { code: UNSUPPORTED_PTX_VERSION, .. }) => {
                return Err(too_old(info.driver_version, variant));
            }
            loaded => loaded?,
        }
        self.keep(Handle(module));
        let entry = CString::new(variant.entry).expect("a name has no zeros");
        let mut function: CUfunction = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name ends with a zero.
        unsafe { driver.cuModuleGetFunction(&mut function, module, entry.as_ptr()) }?;
        if variant.shared_bytes > PLAIN_SHARED_BYTES {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is of a loaded module; the device has that much.
            unsafe {
                driver.cuFuncSetAttribute(function, attribute, variant.shared_bytes.cast_signed())
            }?;
        }
        Ok(Function { _context: self.clone(), function: Handle(function), kernel, variant })
    }
}

impl Function {
    /// What it was compiled from.
    pub(crate) fn variant(&self) -> &'static Variant {
        self.variant
    }

    /// The kernel that it is a variant of.
    pub(crate) fn kernel(&self) -> &'static Kernel {
        self.kernel
    }

    /// How many parameters its entry has.
    pub(super) fn num_params(&self) -> usize {
        self.kernel.args.len() + NUM_SCRATCH
    }

    pub(super) fn handle(&self) -> CUfunction {
        self.function.0
    }
}

/// The kernel that a variant is of.
fn kernel_of(variant: &'static Variant) -> &'static Kernel {
    let variant: *const Variant = variant;
    kernels()
        .iter()
        .find(|kernel| kernel.variants.as_ptr_range().contains(&variant))
        .expect("variants exist in the table of kernels alone")
}

fn too_old(driver: Version, variant: &Variant) -> CudaError {
    let ptx = variant.ptx_version;
    let needed = Version::that_reads(ptx);
    CudaError::DriverTooOld { driver, needed, ptx: (ptx / 10, ptx % 10) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_has_the_parameters_that_a_launch_passes() {
        for kernel in kernels() {
            for variant in kernel.variants {
                assert_eq!(kernel_of(variant).name, kernel.name);
            }
            let Some(variant) = kernel.variants.first() else { continue };
            let ptx = variant.ptx();
            let start = ptx.find(".entry").expect("an entry");
            let head = ptx[start..].split(')').next().expect("a list of parameters");
            let declared = head.matches(".param ").count();
            assert_eq!(declared, kernel.args.len() + NUM_SCRATCH, "{}", kernel.name);
        }
    }
}
