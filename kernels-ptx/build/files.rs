//! File access whose errors name the file.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A file's bytes.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| path.display().to_string())
}

/// Writes a file, and the folder it is in where that is missing.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().context("a file has a folder")?;
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    fs::write(path, bytes).with_context(|| path.display().to_string())
}

/// What lies in a folder, in no order.
pub fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let entries = entries.with_context(|| folder.display().to_string())?;
    Ok(entries.into_iter().map(|entry| entry.path()).collect())
}

/// Copies a file, or a folder with everything below it.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    if !from.is_dir() {
        return write(to, &read(from)?);
    }
    for path in list(from)? {
        let name = path.file_name().context("a listed file has a name")?;
        copy(&path, &to.join(name))?;
    }
    Ok(())
}
