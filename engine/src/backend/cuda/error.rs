//! What can go wrong with a device: each message is one line that says what to do.

use std::fmt;

use crate::ops::BackendError;

/// Version of CUDA that a driver supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 12 in 12.4.
    pub major: u32,
    /// 4 in 12.4.
    pub minor: u32,
}

impl Version {
    /// The oldest that Quire runs on.
    pub const OLDEST: Version = Version { major: 12, minor: 0 };

    /// From the driver's number, 12040 for 12.4.
    pub(crate) const fn from_number(number: u32) -> Self {
        Version { major: number / 1000, minor: number % 1000 / 10 }
    }

    /// The first that reads a version of the PTX ISA, which is given times ten: 12.0 for 80.
    pub(crate) const fn that_reads(ptx_version: u32) -> Self {
        let (major, minor) = match ptx_version {
            ..=80 => (12, 0),
            // 12.6 brought no new one.
            81..=85 => (12, ptx_version - 80),
            86..=88 => (12, ptx_version - 79),
            89.. => (ptx_version / 10 + 4, ptx_version % 10),
        };
        Version { major, minor }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Why the CUDA backend cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The driver's library cannot be loaded.
    #[error("no NVIDIA driver found (libcuda.so); install one, or run with --device cpu")]
    NoDriver,
    /// The driver lacks a function.
    #[error(
        "the NVIDIA driver lacks {symbol}; update it (CUDA {} or later), or run with --device cpu",
        Version::OLDEST
    )]
    MissingSymbol {
        /// Name of the function.
        symbol: &'static str,
    },
    /// The driver cannot read the kernels.
    #[error(
        "the NVIDIA driver supports CUDA {driver}, but kernels in PTX {}.{} need {needed}; update \
         the driver, or run with --device cpu", .ptx.0, .ptx.1
    )]
    DriverTooOld {
        /// What the driver supports.
        driver: Version,
        /// What the kernels need.
        needed: Version,
        /// Version of the kernels' PTX, (8, 0) for 8.0.
        ptx: (u32, u32),
    },
    /// The driver shows no device.
    #[error(
        "the NVIDIA driver finds no device; check nvidia-smi and CUDA_VISIBLE_DEVICES, or run \
         with --device cpu"
    )]
    NoDevice,
    /// There is no such device.
    #[error("there is no CUDA device {ordinal}: {count} found, counted from 0; choose another")]
    UnknownDevice {
        /// The device asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// There are no kernels for the device.
    #[error("{name} is not supported: {reason}; run with --device cpu")]
    UnsupportedDevice {
        /// Name of the device.
        name: String,
        /// What it lacks.
        reason: String,
    },
    /// The machine does not let this process use the device.
    #[error("the device cannot be used: {reason} (error {code}), or run with --device cpu")]
    Unavailable {
        /// Why, and what to look at.
        reason: &'static str,
        /// The driver's code.
        code: u32,
    },
    /// Device memory is full.
    #[error("no device memory for {what}: {}; lower --memory-utilization, \
             --max-num-batched-tokens or --max-num-seqs", Shortage { bytes: *bytes, free: *free })]
    OutOfMemory {
        /// What it was for.
        what: String,
        /// Bytes asked for; 0 where the driver needed them for itself and does not say.
        bytes: usize,
        /// Bytes that were free.
        free: usize,
    },
    /// Page-locked host memory could not be had.
    #[error(
        "no page-locked host memory for {what}: {bytes} bytes asked for; lower --swap-space, or \
         free memory"
    )]
    HostMemory {
        /// What it was for.
        what: String,
        /// Bytes asked for.
        bytes: usize,
    },
    /// A launch that the driver must not see.
    #[error("kernel {kernel} cannot be launched: {reason}; please report it")]
    Launch {
        /// Name of the kernel.
        kernel: &'static str,
        /// The limit that it breaks.
        reason: String,
    },
    /// The driver refused a call.
    #[error(
        "{call} failed: {name} ({code}), {message}; please report it, or run with --device cpu"
    )]
    Driver {
        /// The function.
        call: &'static str,
        /// What it returned.
        code: u32,
        /// Name of the code.
        name: String,
        /// What the driver says of it.
        message: String,
    },
    /// The device, or Quire's state on it, is broken: nothing more can be computed.
    #[error("{call} failed: {name} ({code}), {message}; the device is lost, restart the process")]
    Lost {
        /// The function that reported it; often a later one than that which failed.
        call: &'static str,
        /// What it returned.
        code: u32,
        /// Name of the code.
        name: String,
        /// What the driver says of it.
        message: String,
    },
    /// What was asked for cannot be had here.
    #[error("{reason}")]
    Unsupported {
        /// What, and what to do.
        reason: String,
    },
}

impl CudaError {
    /// The same, with the kernel whose launch it is about.
    pub(super) fn of_kernel(mut self, variant: &str) -> Self {
        if let CudaError::Driver { message, .. } | CudaError::Lost { message, .. } = &mut self {
            message.push_str(&format!(" (launching {variant})"));
        }
        self
    }

    /// Whether all calls from now on would fail, too.
    pub fn is_lost(&self) -> bool {
        matches!(self, CudaError::Lost { .. })
    }
}

/// How much was asked for, where that is known, and how much there was.
struct Shortage {
    bytes: usize,
    free: usize,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.bytes > 0 {
            write!(f, "{} bytes asked for, ", self.bytes)?;
        }
        write!(f, "{} free", self.free)
    }
}

impl From<CudaError> for BackendError {
    fn from(error: CudaError) -> Self {
        let lost = error.is_lost();
        BackendError::Device { source: Box::new(error), lost }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(major: u32, minor: u32) -> Version {
        Version { major, minor }
    }

    #[test]
    fn a_version_comes_from_the_drivers_number() {
        assert_eq!(Version::from_number(12040), version(12, 4));
        assert_eq!(Version::from_number(11080).to_string(), "11.8");
        assert_eq!(Version::from_number(13000), version(13, 0));
        assert!(version(11, 8) < Version::OLDEST && version(12, 10) > version(12, 9));
    }

    /// The table of NVIDIA's PTX ISA manual, "Release Notes".
    #[test]
    fn each_ptx_version_has_the_cuda_version_that_brought_it() {
        for (ptx, cuda) in [
            (78, (12, 0)), // 11.8, which is older than the oldest
            (80, (12, 0)),
            (81, (12, 1)),
            (84, (12, 4)),
            (85, (12, 5)),
            (86, (12, 7)),
            (87, (12, 8)),
            (88, (12, 9)),
            (90, (13, 0)),
            (91, (13, 1)),
        ] {
            assert_eq!(Version::that_reads(ptx), version(cuda.0, cuda.1), "PTX {ptx}");
        }
    }

    #[test]
    fn a_driver_that_is_too_old_is_told_both_versions() {
        let error =
            CudaError::DriverTooOld { driver: version(12, 2), needed: version(12, 8), ptx: (8, 7) };
        assert_eq!(
            error.to_string(),
            "the NVIDIA driver supports CUDA 12.2, but kernels in PTX 8.7 need 12.8; update the \
             driver, or run with --device cpu"
        );
    }

    #[test]
    fn a_shortage_says_how_much_was_asked_for_where_that_is_known() {
        let of = |bytes| CudaError::OutOfMemory { what: "KV cache".into(), bytes, free: 5 };
        assert!(
            of(7)
                .to_string()
                .starts_with("no device memory for KV cache: 7 bytes asked for, 5 free;")
        );
        assert!(of(0).to_string().starts_with("no device memory for KV cache: 5 free;"));
    }

    #[test]
    fn only_a_lost_device_is_lost_to_the_engine() {
        let (name, message) = ("CUDA_ERROR_X".to_owned(), "x".to_owned());
        let lost = CudaError::Lost { call: "cuX", code: 700, name, message };
        assert!(BackendError::from(lost).is_lost());
        assert!(!BackendError::from(CudaError::NoDevice).is_lost());
    }
}
