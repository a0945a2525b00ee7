//! What runs a model: what `--device` says, and what `auto` finds.

use quire_engine::backend::{CudaOptions, GemmMode};
use quire_model_zoo::BackendKind;
use serde::Serialize;
use std::fmt;

#[cfg(feature = "cuda")]
use quire_engine::backend::cuda::{CudaDevice, CudaError};
#[cfg(not(feature = "cuda"))]
use quire_model_zoo::ModelError;

/// What runs a model, as `--device` says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceFlag {
    /// The first CUDA device if it can be used, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// A CUDA device, counted from 0.
    Cuda(usize),
    /// The scalar specification.
    Reference,
}

impl DeviceFlag {
    /// Reads the value of `--device`.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(DeviceFlag::Auto),
            _ => Self::of_name(text)
                .ok_or_else(|| "must be auto, cpu, cuda, cuda:N or reference".to_owned()),
        }
    }

    /// The same where `auto` would not do.
    pub fn parse_one(text: &str) -> Result<Self, String> {
        Self::of_name(text).ok_or_else(|| "must be cpu, cuda, cuda:N or reference".to_owned())
    }

    fn of_name(text: &str) -> Option<Self> {
        match text {
            "cpu" => Some(DeviceFlag::Cpu),
            "cuda" => Some(DeviceFlag::Cuda(0)),
            "reference" => Some(DeviceFlag::Reference),
            _ => text.strip_prefix("cuda:")?.parse().ok().map(DeviceFlag::Cuda),
        }
    }

    /// What it stands for, after a look at what there is.
    pub fn choose(self) -> Choice {
        match self {
            DeviceFlag::Auto => auto(),
            DeviceFlag::Cpu => Choice::new(BackendKind::Cpu, 0),
            DeviceFlag::Cuda(device) => Choice::new(BackendKind::Cuda, device),
            DeviceFlag::Reference => Choice::new(BackendKind::Reference, 0),
        }
    }
}

impl fmt::Display for DeviceFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceFlag::Auto => f.write_str("auto"),
            DeviceFlag::Cpu => f.write_str("cpu"),
            DeviceFlag::Cuda(device) => write!(f, "cuda:{device}"),
            DeviceFlag::Reference => f.write_str("reference"),
        }
    }
}

/// What runs a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The implementation.
    pub backend: BackendKind,
    /// Which CUDA device.
    pub device: usize,
    /// What `auto` has to say of it.
    pub why: Option<Why>,
}

/// Why `auto` chose what it did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// It is what can be used here: a note among others.
    Usual(String),
    /// There is something that cannot be used, which is said in any case.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "such a build does not look"))]
    Unusable(String),
}

impl Choice {
    fn new(backend: BackendKind, device: usize) -> Self {
        Choice { backend, device, why: None }
    }

    /// `cpu`, `cuda:0` or `reference`.
    pub fn name(&self) -> String {
        match self.backend {
            BackendKind::Cpu => DeviceFlag::Cpu.to_string(),
            BackendKind::Cuda => DeviceFlag::Cuda(self.device).to_string(),
            BackendKind::Reference => DeviceFlag::Reference.to_string(),
        }
    }

    /// The name with what `auto` has to say of it in brackets.
    pub fn described(&self) -> String {
        match &self.why {
            Some(Why::Usual(why) | Why::Unusable(why)) => format!("{} ({why})", self.name()),
            None => self.name(),
        }
    }
}

/// What there is to say of the backend until it has run on hardware.
#[cfg(feature = "cuda")]
const UNPROVEN: &str = "unproven on hardware";

/// An error of the device without the advice that `auto` has followed.
#[cfg(feature = "cuda")]
fn without_advice(error: &str) -> String {
    let end = error.find(", or run with --device cpu").or(error.find("; run with --device cpu"));
    error[..end.unwrap_or(error.len())].to_owned()
}

/// What is there, if it can be used.
#[cfg(feature = "cuda")]
fn auto() -> Choice {
    let (backend, why) = match CudaDevice::open(0) {
        Ok(device) => (BackendKind::Cuda, Why::Usual(format!("{}; {UNPROVEN}", device.name))),
        Err(CudaError::NoDriver) => (BackendKind::Cpu, Why::Usual("no NVIDIA driver".to_owned())),
        Err(error) => (BackendKind::Cpu, Why::Unusable(without_advice(&error.to_string()))),
    };
    Choice { why: Some(why), ..Choice::new(backend, 0) }
}

#[cfg(not(feature = "cuda"))]
fn auto() -> Choice {
    let why = Why::Usual("this build has no CUDA backend".to_owned());
    Choice { why: Some(why), ..Choice::new(BackendKind::Cpu, 0) }
}

/// A CUDA device and how it is used, for `info`.
#[derive(Debug, Serialize)]
pub struct CudaReport {
    /// NVIDIA's name of it.
    pub name: String,
    /// `9.0`.
    pub compute_capability: String,
    /// The version of CUDA that the driver supports.
    pub driver_cuda_version: String,
    /// Who multiplies matrices.
    pub gemm: &'static str,
    /// Steps that only decode are replayed from graphs.
    pub graphs: bool,
    /// Page-locked host memory for swapped-out blocks, in bytes.
    pub host_swap: usize,
}

impl CudaReport {
    /// Looks at the device.
    ///
    /// # Errors
    /// It cannot be used.
    #[cfg(feature = "cuda")]
    pub fn new(options: CudaOptions, host_swap: usize) -> anyhow::Result<Self> {
        let device = CudaDevice::open(options.device)?;
        Ok(CudaReport {
            name: device.name,
            compute_capability: device.capability,
            driver_cuda_version: device.driver.to_string(),
            gemm: gemm_name(options.gemm),
            graphs: !options.enforce_eager,
            host_swap,
        })
    }

    /// Looks at the device, for which this build has no backend.
    ///
    /// # Errors
    /// Always.
    #[cfg(not(feature = "cuda"))]
    pub fn new(_: CudaOptions, _: usize) -> anyhow::Result<Self> {
        Err(ModelError::NoCuda.into())
    }
}

/// The name of a mode, as `--gemm` takes it.
pub fn gemm_name(mode: GemmMode) -> &'static str {
    match mode {
        GemmMode::Triton => "triton",
        GemmMode::Cublas => "cublas",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_one_name() {
        for flag in [DeviceFlag::Auto, DeviceFlag::Cpu, DeviceFlag::Cuda(7), DeviceFlag::Reference]
        {
            assert_eq!(DeviceFlag::parse(&flag.to_string()), Ok(flag));
            if flag != DeviceFlag::Auto {
                assert_eq!(flag.choose().described(), flag.to_string());
            }
        }
        assert_eq!(DeviceFlag::parse("cuda"), Ok(DeviceFlag::Cuda(0)));
        for wrong in ["gpu", "cuda:", "cuda:-1", "cuda:a", "cuda0", "CPU", ""] {
            assert!(DeviceFlag::parse(wrong).unwrap_err().contains("cuda:N"), "{wrong}");
        }
        assert!(DeviceFlag::parse_one("auto").is_err());
    }

    #[test]
    fn auto_says_why() {
        let choice = DeviceFlag::Auto.choose();
        let why = choice.why.as_ref().expect("a reason");
        assert!(choice.backend == BackendKind::Cpu || matches!(why, Why::Usual(_)), "{choice:?}");
        assert!(choice.described().starts_with(&format!("{} (", choice.name())), "{choice:?}");
    }
}
