//! One compressed blob of all PTX: a kernel's variants are compressed together, as they are alike.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::files::read;
use super::manifest::{Kernel, Manifest};
use super::sources::sha256;

/// The blob and its index.
pub struct Packed {
    pub blob: Vec<u8>,
    /// One entry a kernel, in the manifest's order.
    pub kernels: Vec<PackedKernel>,
}

/// Where a kernel's PTX is.
pub struct PackedKernel {
    /// In the blob.
    pub compressed: Range<usize>,
    /// Bytes of the text when decompressed.
    pub text_bytes: usize,
    /// Where each variant is in the text, in the manifest's order.
    pub variants: Vec<Range<usize>>,
}

/// Reads, checks and compresses the PTX that the manifest lists.
pub fn pack(manifest: &Manifest, folder: &Path) -> Result<Packed> {
    let mut packed = Packed { blob: Vec::new(), kernels: Vec::new() };
    for kernel in &manifest.kernels {
        let (text, variants) = texts(kernel, folder)?;
        let start = packed.blob.len();
        packed.blob.extend(lz4_flex::block::compress(text.as_bytes()));
        let compressed = start..packed.blob.len();
        packed.kernels.push(PackedKernel { compressed, text_bytes: text.len(), variants });
    }
    Ok(packed)
}

/// The texts of a kernel's variants in one, and where each is.
fn texts(kernel: &Kernel, folder: &Path) -> Result<(String, Vec<Range<usize>>)> {
    let (mut all, mut ranges) = (String::new(), Vec::new());
    for variant in &kernel.variants {
        let path = folder.join(&variant.file);
        let bytes = read(&path)?;
        let digest = sha256(&bytes);
        ensure!(
            digest == variant.sha256,
            "{}: SHA-256 is {digest}; the manifest has {}. Restore it, or run `make kernels`",
            path.display(),
            variant.sha256
        );
        let start = all.len();
        all += str::from_utf8(&bytes).with_context(|| path.display().to_string())?;
        ranges.push(start..all.len());
    }
    Ok((all, ranges))
}
