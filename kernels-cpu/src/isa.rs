//! Instruction sets the kernels are compiled for, chosen at run time.

use std::fmt;
use std::str::FromStr;

/// An instruction-set path. Results are bitwise reproducible within one path, not across paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust; runs everywhere.
    Portable,
    /// x86-64 AVX2 with FMA.
    Avx2,
    /// x86-64 AVX-512 (F, BW, DQ, VL).
    Avx512,
    /// AVX-512 with the bfloat16 dot product.
    Avx512Bf16,
    /// AArch64 Advanced SIMD.
    Neon,
}

/// The name given is not an instruction-set path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown instruction set {name:?}; expected portable, avx2, avx512, avx512bf16 or neon")]
pub struct UnknownIsa {
    /// The name as given.
    pub name: String,
}

impl Isa {
    const ALL: [Self; 5] = [Self::Portable, Self::Neon, Self::Avx2, Self::Avx512, Self::Avx512Bf16];

    /// The fastest path this machine runs.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rfind(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }

    /// Every path this machine runs, slowest first.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Whether this machine runs the path.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Neon => cfg!(target_arch = "aarch64"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => {
                Self::Avx512.is_available() && is_x86_feature_detected!("avx512bf16")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Avx512Bf16 => false,
        }
    }

    /// The lower-case name, as [`FromStr`] reads it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Neon => "neon",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Isa {
    type Err = UnknownIsa;

    fn from_str(name: &str) -> Result<Self, UnknownIsa> {
        Self::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| UnknownIsa { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse(), Ok(isa));
        }
        assert!("sse9".parse::<Isa>().unwrap_err().to_string().contains("sse9"));
    }

    #[test]
    fn detected_path_is_the_last_available() {
        assert_eq!(Isa::available().last(), Some(&Isa::detect()));
        assert_eq!(Isa::available().first(), Some(&Isa::Portable));
    }
}
