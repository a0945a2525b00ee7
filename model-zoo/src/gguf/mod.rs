//! GGUF files: metadata, weights and tokenizer of a model in one file.
//!
//! ```text
//! [magic "GGUF"][version][tensor count][key count]
//! [keys: name, type, value …][tensors: name, dimensions, type, offset …]
//! [padding to the alignment][tensor data, each at a multiple of the alignment]
//! ```
//!
//! Little-endian files of versions 2 and 3 are read. A file may come from anyone: every count,
//! length and offset is checked against the file's size before anything is allocated for it.

mod header;
mod metadata;
mod names;
mod reader;
mod rope;
mod source;
mod spec;
mod tokenizer;
mod types;

use std::{
    ops::{Deref, Range},
    path::{Path, PathBuf},
};

use memmap2::Mmap;

pub use metadata::{Array, Metadata, Value};
pub use source::GgufSource;
pub use tokenizer::GgufTokenizer;

use crate::{
    dequant::dequantise,
    error::LoadError,
    mapped::{map_file, release},
    source::row_bytes,
    spec::DecoderSpec,
};
use header::{Header, TensorInfo};

/// One GGUF file, memory-mapped or in memory. A mapped file must not change while this lives.
pub struct GgufFile {
    path: PathBuf,
    data: Bytes,
    header: Header,
}

enum Bytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}

impl GgufFile {
    /// Maps a file and checks its header; no weights are read.
    ///
    /// # Errors
    /// The file cannot be mapped, is malformed, or holds a tensor of an unsupported type.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        Self::new(path, Bytes::Mapped(map_file(path)?))
    }

    /// Takes a file's contents; `path` is what messages call it.
    ///
    /// # Errors
    /// Those of [`GgufFile::open`] but for mapping.
    pub fn from_bytes(path: &Path, contents: Vec<u8>) -> Result<Self, LoadError> {
        Self::new(path, Bytes::Owned(contents))
    }

    fn new(path: &Path, data: Bytes) -> Result<Self, LoadError> {
        let header = header::parse(path, &data)?;
        Ok(Self { path: path.to_owned(), data, header })
    }

    /// The file's path, as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The metadata keys.
    pub fn metadata(&self) -> &Metadata {
        &self.header.metadata
    }

    /// The decoder the file describes.
    ///
    /// # Errors
    /// A key is missing, of the wrong type or out of range; the architecture or rope scaling is not
    /// supported.
    pub fn spec(&self) -> Result<DecoderSpec, LoadError> {
        spec::read_spec(self)
    }

    /// The tokenizer the file holds.
    ///
    /// # Errors
    /// A key is missing or bad; the tokenizer's model or pre-tokenizer is not supported.
    pub fn tokenizer(&self) -> Result<GgufTokenizer, LoadError> {
        tokenizer::read_tokenizer(self.metadata())
    }

    /// The file's weights, under Hugging Face names.
    ///
    /// # Errors
    /// Those of [`GgufFile::spec`]; a tensor has a name that no supported architecture has, or
    /// query or key rows that are not whole heads.
    pub fn into_source(self) -> Result<GgufSource, LoadError> {
        let spec = self.spec()?;
        GgufSource::new(self, &spec)
    }

    fn tensor(&self, gguf_name: &str) -> Option<&TensorInfo> {
        self.header.tensors.iter().find(|tensor| tensor.name == gguf_name)
    }

    /// Reads one row of a tensor of this file.
    fn read_row(&self, tensor: &TensorInfo, row: usize, out: &mut [f32]) -> Result<(), LoadError> {
        let bytes = row_bytes(&tensor.shape, tensor.dtype, row, out.len())
            .map_err(|problem| self.tensor_error(&tensor.name, problem))?;
        dequantise(tensor.dtype, &self.data[tensor.data.clone()][bytes], out);
        Ok(())
    }

    /// The bytes of a row that a matrix of this file has.
    fn stored_row(&self, matrix: &TensorInfo, row: usize) -> &[u8] {
        let bytes = row_bytes(&matrix.shape, matrix.dtype, row, matrix.shape[1]);
        &self.data[matrix.data.clone()][bytes.expect("the matrix has the row")]
    }

    /// Lets memory go that mirrors rows of a tensor of this file.
    fn release(&self, tensor: &TensorInfo, rows: Range<usize>) {
        if let Bytes::Mapped(map) = &self.data {
            release(map, &tensor.shape, &tensor.data, rows);
        }
    }

    fn tensor_error(&self, name: &str, problem: impl Into<String>) -> LoadError {
        LoadError::tensor(self.path.display().to_string(), name, problem)
    }
}

#[cfg(test)]
mod block_tests;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
