//! Kernels and the PTX files that they were compiled to.

use std::fmt;
use std::sync::OnceLock;

use crate::element::DType;
use crate::launch::KERNELS;

/// The PTX of all kernels, compressed one by one.
static BLOB: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/ptx.lz4"));

/// A kernel: one source, compiled for several types, constants and targets.
#[derive(Debug)]
pub struct Kernel {
    /// Its name, unique.
    pub name: &'static str,
    /// The folder of its source.
    pub family: &'static str,
    /// What it is for.
    pub why: &'static str,
    /// The arguments that are given at launch, in order.
    pub args: &'static [Arg],
    /// Its PTX files, of all targets.
    pub variants: &'static [Variant],
}

/// An argument of a kernel.
#[derive(Debug)]
pub struct Arg {
    /// Its name.
    pub name: &'static str,
    /// Whether it is an address in device memory.
    pub pointer: bool,
    /// Bytes of the parameter.
    pub size: usize,
    /// What it must be a multiple of: an address in bytes, a number in its own unit.
    pub multiple: Option<u64>,
}

/// One PTX file, and how to launch it.
#[derive(Debug)]
pub struct Variant {
    /// Name, unique within its target.
    pub name: &'static str,
    /// The architecture it was compiled for, `sm_80`.
    pub target: &'static str,
    /// PTX ISA version times ten, which decides how old a driver may be: 80 for 8.0 (CUDA 12.0).
    pub ptx_version: u32,
    /// Name of its `.entry`.
    pub entry: &'static str,
    /// The types that stand for the type variables of the arguments.
    pub types: &'static [(&'static str, DType)],
    /// Compile-time constants by name; false and true are 0 and 1.
    pub constants: &'static [(&'static str, i64)],
    /// Warps of a block.
    pub num_warps: u32,
    /// Stages of the software pipeline.
    pub num_stages: u32,
    /// Bytes of dynamic shared memory. Above 48 KiB a launch has to ask for it.
    pub shared_bytes: u32,
    /// Threads of a block; its shape is `(num_threads, 1, 1)`.
    pub num_threads: u32,
    pub(crate) text: &'static Text,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// All kernels.
pub fn kernels() -> &'static [Kernel] {
    &KERNELS
}

impl Variant {
    /// The PTX. The first call for a kernel decompresses the texts of all its variants.
    pub fn ptx(&self) -> &'static str {
        &self.text.get()[self.start..self.end]
    }

    /// The value of a constant, if the kernel has it.
    pub fn constant(&self, name: &str) -> Option<i64> {
        self.constants.iter().find(|(key, _)| *key == name).map(|(_, value)| *value)
    }

    /// The type that stands for a variable, if the kernel has it.
    pub fn dtype(&self, variable: &str) -> Option<DType> {
        self.types.iter().find(|(key, _)| *key == variable).map(|(_, dtype)| *dtype)
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {}", Settings(self.types, self.constants), self.target)
    }
}

/// Types and constants as text: `dtype=bf16 HEAD_DIM=128`.
pub(crate) struct Settings<'a>(pub &'a [(&'a str, DType)], pub &'a [(&'a str, i64)]);

impl fmt::Display for Settings<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let types = self.0.iter().map(|(name, dtype)| format!("{name}={dtype}"));
        let constants = self.1.iter().map(|(name, value)| format!("{name}={value}"));
        f.write_str(&types.chain(constants).collect::<Vec<_>>().join(" "))
    }
}

/// The PTX of a kernel's variants, one after the other.
#[derive(Debug)]
pub(crate) struct Text {
    /// Where it is in the blob.
    start: usize,
    end: usize,
    /// Bytes when decompressed.
    bytes: usize,
    plain: OnceLock<String>,
}

impl Text {
    pub(crate) const fn new(start: usize, end: usize, bytes: usize) -> Self {
        Text { start, end, bytes, plain: OnceLock::new() }
    }

    fn get(&self) -> &str {
        self.plain.get_or_init(|| {
            let plain = lz4_flex::block::decompress(&BLOB[self.start..self.end], self.bytes);
            String::from_utf8(plain.expect("the blob is intact")).expect("PTX is text")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The limit that `kernels-triton/variants.yaml` states, too.
    const MAX_COMPRESSED_BYTES: usize = 10_000_000;

    #[test]
    fn the_blob_is_no_larger_than_agreed() {
        assert!(BLOB.len() <= MAX_COMPRESSED_BYTES, "{} bytes", BLOB.len());
    }
}
