//! The choice of a variant: for a device, by kernel, types and constants.
//!
//! A device runs the target of its very architecture (`sm_90a` on 9.0), or else an earlier portable
//! one (`sm_80` from 8.0 on). Not every variant is compiled for every target, so the target is
//! chosen for each kernel, its types and those constants that say what is computed. Constants of
//! tiles (`TILE`, `BLOCK…`) then choose among the variants of that target alone: a tile that it does
//! not have is an error, not a reason to take another target, whose sums may have other bits.

use std::fmt;

use crate::element::DType;
use crate::kernel::{Kernel, Settings, Variant, kernels};
use crate::launch::{Launch, TARGETS};

/// Compute capability of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComputeCapability {
    /// 9 in 9.0.
    pub major: u32,
    /// 0 in 9.0.
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// An architecture that PTX was compiled for.
#[derive(Debug)]
pub struct Target {
    /// `sm_80`.
    pub name: &'static str,
    /// Its compute capability.
    pub capability: ComputeCapability,
    /// Whether no other runs it (`sm_90a`); if not, all later ones do.
    pub exact: bool,
}

impl Target {
    /// Whether the device runs PTX of this target.
    pub fn runs_on(&self, device: ComputeCapability) -> bool {
        if self.exact { device == self.capability } else { device >= self.capability }
    }
}

/// The variants that a device can run.
#[derive(Debug)]
pub struct Registry {
    capability: ComputeCapability,
    /// Best first; at least one.
    targets: Vec<&'static Target>,
}

/// No variant, or more than one.
#[derive(Debug, thiserror::Error)]
pub enum SelectError {
    /// The device is older than all targets.
    #[error("compute capability {capability} runs none of the kernels, which are for {targets}")]
    UnsupportedDevice {
        /// That of the device.
        capability: ComputeCapability,
        /// The capabilities there are kernels for.
        targets: String,
    },
    /// No kernel has this name.
    #[error("there is no kernel {kernel}")]
    UnknownKernel {
        /// The name.
        kernel: String,
    },
    /// No variant is like that.
    #[error(
        "kernel {kernel} is not compiled for {wanted} on compute capability {capability}; it is \
         for: {existing}"
    )]
    MissingVariant {
        /// Name of the kernel.
        kernel: &'static str,
        /// Types and constants.
        wanted: String,
        /// That of the device.
        capability: ComputeCapability,
        /// The kernel's variants that the device runs.
        existing: String,
    },
    /// What was asked for does not decide.
    #[error("kernel {kernel} has several variants for {wanted}: {matching}")]
    AmbiguousVariant {
        /// Name of the kernel.
        kernel: &'static str,
        /// Types and constants.
        wanted: String,
        /// The variants.
        matching: String,
    },
}

impl Registry {
    /// What a device with this compute capability can run.
    ///
    /// # Errors
    /// [`SelectError::UnsupportedDevice`].
    pub fn new(capability: ComputeCapability) -> Result<Self, SelectError> {
        let targets: Vec<_> = TARGETS.iter().filter(|target| target.runs_on(capability)).collect();
        if targets.is_empty() {
            let takes = |target: &Target| match target.exact {
                true => target.capability.to_string(),
                false => format!("{} and later", target.capability),
            };
            let targets: Vec<_> = TARGETS.iter().map(takes).collect();
            return Err(SelectError::UnsupportedDevice { capability, targets: targets.join(", ") });
        }
        Ok(Registry { capability, targets })
    }

    /// The variant for the arguments of `L` with these constants. A constant that is not named may
    /// have any value.
    ///
    /// # Errors
    /// [`SelectError::MissingVariant`] or [`SelectError::AmbiguousVariant`].
    pub fn select<L: Launch>(
        &self,
        constants: &[(&str, i64)],
    ) -> Result<&'static Variant, SelectError> {
        self.select_in(L::kernel(), L::TYPES, constants)
    }

    /// The variant of the kernel with that name, these types and these constants.
    ///
    /// # Errors
    /// Any of [`SelectError`] but [`SelectError::UnsupportedDevice`].
    pub fn select_by_name(
        &self,
        kernel: &str,
        types: &[(&str, DType)],
        constants: &[(&str, i64)],
    ) -> Result<&'static Variant, SelectError> {
        let found = kernels().iter().find(|known| known.name == kernel);
        let found =
            found.ok_or_else(|| SelectError::UnknownKernel { kernel: kernel.to_owned() })?;
        self.select_in(found, types, constants)
    }

    fn select_in(
        &self,
        kernel: &'static Kernel,
        types: &[(&str, DType)],
        constants: &[(&str, i64)],
    ) -> Result<&'static Variant, SelectError> {
        let (tiles, problem): (Vec<_>, Vec<_>) =
            constants.iter().partition(|(key, _)| is_tile(key));
        let runnable = self.targets.iter().flat_map(|target| of_target(kernel, target));
        let mut solving = runnable.clone().filter(|variant| has(variant, types, &problem));
        let target = solving.next().map(|variant| variant.target);
        let matching: Vec<_> = runnable
            .clone()
            .filter(|variant| Some(variant.target) == target)
            .filter(|variant| has(variant, types, &problem) && has(variant, &[], &tiles))
            .collect();
        let wanted = || Settings(types, constants).to_string();
        match matching[..] {
            [variant] => Ok(variant),
            [] => Err(SelectError::MissingVariant {
                kernel: kernel.name,
                wanted: wanted(),
                capability: self.capability,
                existing: list(runnable),
            }),
            _ => Err(SelectError::AmbiguousVariant {
                kernel: kernel.name,
                wanted: wanted(),
                matching: list(matching.into_iter()),
            }),
        }
    }
}

/// The variants of a kernel for a target.
fn of_target(
    kernel: &'static Kernel,
    target: &'static Target,
) -> impl Iterator<Item = &'static Variant> + Clone {
    kernel.variants.iter().filter(|variant| variant.target == target.name)
}

/// Whether a constant is the size of a tile, which does not change what a kernel computes.
fn is_tile(name: &str) -> bool {
    name == "TILE" || name.starts_with("BLOCK")
}

fn has(variant: &Variant, types: &[(&str, DType)], constants: &[(&str, i64)]) -> bool {
    types.iter().all(|(name, dtype)| variant.dtype(name) == Some(*dtype))
        && constants.iter().all(|(name, value)| variant.constant(name) == Some(*value))
}

fn list(variants: impl Iterator<Item = &'static Variant>) -> String {
    variants.map(Variant::to_string).collect::<Vec<_>>().join("; ")
}
