//! One struct for each kernel, with its arguments by name and type. Generated from the manifest.
//!
//! What a pointer points to is part of its type:
//!
//! ```
//! use half::bf16;
//! use quire_kernels_ptx::{DevicePtr, Launch, launch::SiluMul};
//!
//! let gate_up = DevicePtr::<f32>::new(0x2000);
//! let launch = SiluMul { out: DevicePtr::<bf16>::new(0x1000), gate_up, width: 64 };
//! assert_eq!(launch.params()?.slots(), [0x1000, 0x2000, 64, 0, 0]);
//! # Ok::<(), quire_kernels_ptx::HintError>(())
//! ```
//!
//! So another array does not compile:
//!
//! ```compile_fail,E0308
//! use half::bf16;
//! use quire_kernels_ptx::{DevicePtr, Launch, launch::SiluMul};
//!
//! let gate_up = DevicePtr::<bf16>::new(0x2000);
//! let launch = SiluMul { out: DevicePtr::<bf16>::new(0x1000), gate_up, width: 64 };
//! ```

use crate::element::{DType, DevicePtr, Element};
use crate::kernel::{Arg, Kernel, Text, Variant};
use crate::params::{HintError, Params};
use crate::registry::{ComputeCapability, Target};

/// The arguments of a kernel, and which kernel it is.
pub trait Launch {
    /// The types that stand for the type variables of the kernel's arguments.
    const TYPES: &'static [(&'static str, DType)];

    /// The kernel.
    fn kernel() -> &'static Kernel;

    /// Adds the arguments in the kernel's order.
    #[doc(hidden)]
    fn push_args(&self, params: &mut Params);

    /// What the driver passes to the kernel's entry.
    ///
    /// # Errors
    /// An argument is not the multiple of 16 that the kernel was compiled for.
    fn params(&self) -> Result<Params, HintError> {
        let mut params = Params::new();
        self.push_args(&mut params);
        params.check(Self::kernel())?;
        // Global and profile scratch memory: the build script refuses kernels that need any.
        params.push(DevicePtr::<u8>::null());
        params.push(DevicePtr::<u8>::null());
        Ok(params)
    }

    /// Whether every argument is the multiple that the kernel was compiled for.
    ///
    /// # Errors
    /// Those of [`Launch::params`], which checks, too.
    fn check(&self) -> Result<(), HintError> {
        self.params().map(|_| ())
    }
}

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
