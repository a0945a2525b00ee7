//! A cursor over a GGUF header that never reads, and never lets anyone allocate, past the file.

use std::path::Path;

use crate::error::LoadError;

pub(super) struct Reader<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(path: &'a Path, bytes: &'a [u8]) -> Self {
        Self { path, bytes, position: 0 }
    }

    pub(super) fn path(&self) -> &'a Path {
        self.path
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    pub(super) fn error(&self, problem: impl Into<String>) -> LoadError {
        let problem = format!("at byte {}: {}", self.position, problem.into());
        LoadError::malformed(self.path, problem)
    }

    fn remaining(&self) -> &'a [u8] {
        &self.bytes[self.position..]
    }

    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], LoadError> {
        match self.remaining().first_chunk() {
            Some(chunk) => {
                self.position += N;
                Ok(*chunk)
            }
            None => Err(self.error(format!("the file ends within {what}"))),
        }
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, LoadError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, LoadError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of things that take at least `min_bytes` bytes each in the rest of the file.
    pub(super) fn count(&mut self, min_bytes: usize, what: &str) -> Result<usize, LoadError> {
        let count = self.u64(what)?;
        let limit = self.remaining().len() / min_bytes;
        match usize::try_from(count) {
            Ok(count) if count <= limit => Ok(count),
            _ => Err(self.error(format!("{what} is {count}; the rest of the file holds {limit}"))),
        }
    }

    pub(super) fn string(&mut self, what: &str) -> Result<&'a str, LoadError> {
        let length = self.count(1, &format!("the length of {what}"))?;
        let bytes = &self.remaining()[..length];
        match str::from_utf8(bytes) {
            Ok(text) => {
                self.position += length;
                Ok(text)
            }
            Err(_) => Err(self.error(format!("{what} is not UTF-8"))),
        }
    }
}
