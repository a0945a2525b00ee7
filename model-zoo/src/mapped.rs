//! Memory-mapped model files: the crate's one unsafe call.

use std::{fs::File, path::Path};

use memmap2::Mmap;

use crate::error::LoadError;

/// Maps a regular file read-only.
///
/// The file must not be changed or truncated while it is mapped: the bytes would change under the
/// reader, and touching a page past the new end kills the process.
pub(crate) fn map_file(path: &Path) -> Result<Mmap, LoadError> {
    let metadata = path.metadata().map_err(|e| LoadError::io(path, e))?;
    if !metadata.is_file() {
        return Err(LoadError::malformed(path, "is not a regular file"));
    }
    let file = File::open(path).map_err(|e| LoadError::io(path, e))?;
    // SAFETY: the mapping is read-only, and sound as long as nobody changes or truncates the file
    // while it lives: headers are borrowed from it as checked UTF-8, weights as plain bytes.
    // Keeping the file still is the documented duty of whoever runs the program, as it is for every
    // loader that maps its weights.
    unsafe { Mmap::map(&file) }.map_err(|e| LoadError::io(path, e))
}
