//! The file that results go to: found usable before the model is loaded, changed after.

use crate::output::{Output, OutputError, one_line};
use anyhow::Context;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
#[cfg(unix)]
use std::{
    fs::Metadata,
    os::{fd::AsFd, unix::fs::MetadataExt},
};

/// A file that can be written and is none of those the run reads.
pub struct OutputFile {
    path: PathBuf,
    /// `None` for a file that is not there yet.
    existing: Option<File>,
}

/// Whether both paths lead to one file that is there.
pub fn is_same_file(a: &Path, b: &Path) -> bool {
    FileId::of(a).is_some_and(|id| FileId::of(b).as_ref() == Some(&id))
}

impl OutputFile {
    /// Checks that `path` can be written and would overwrite neither `input`, where `-` is
    /// standard input, nor a file of the `model`. Changes nothing.
    ///
    /// # Errors
    /// It cannot be written, or would overwrite what is read.
    pub fn check(path: &Path, input: &Path, model: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let there = path.exists();
        if let Some(id) = FileId::of(path) {
            let is_output = |other: &Path| FileId::of(other).as_ref() == Some(&id);
            anyhow::ensure!(!is_output(input), "{shown}: the output would overwrite the input");
            anyhow::ensure!(
                !model_files(model).iter().any(|file| is_output(file)),
                "{shown}: the output would overwrite a file of the model"
            );
        }
        let file = open(path)?;
        if there {
            return Ok(OutputFile { path: path.to_owned(), existing: Some(file) });
        }
        // Whatever ends the run before it has a result leaves no empty file. Through a link, what
        // was made is its target.
        let removed = path.canonicalize().and_then(std::fs::remove_file);
        removed.map_err(|source| error(path, source))?;
        Ok(OutputFile { path: path.to_owned(), existing: None })
    }

    /// What is in the file, to be read; `None` for a file that is not there yet.
    ///
    /// # Errors
    /// It cannot be read, or is no regular file.
    pub fn content(&self) -> anyhow::Result<Option<File>> {
        if self.existing.is_none() {
            return Ok(None);
        }
        let name = one_line(&self.path.display().to_string());
        let file = File::open(&self.path).with_context(|| format!("cannot read {name}"))?;
        let metadata = file.metadata().with_context(|| format!("cannot read {name}"))?;
        anyhow::ensure!(metadata.is_file(), "--resume needs a regular file; {name} is none");
        Ok(Some(file))
    }

    /// The output, of whose old content the first `keep` bytes stay.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn start(self, keep: u64) -> Result<Output, OutputError> {
        let file = match self.existing {
            Some(file) => file,
            None => open(&self.path)?,
        };
        Output::file(&self.path, file, keep)
    }
}

/// Checks that results on standard output would not be appended to `input`, which would never end.
///
/// # Errors
/// They would.
pub fn check_stdout(input: &Path) -> anyhow::Result<()> {
    let id = FileId::of_stdout();
    let same = id.is_some() && id == FileId::of(input);
    anyhow::ensure!(!same, "standard output: the output would overwrite the input");
    Ok(())
}

fn open(path: &Path) -> Result<File, OutputError> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    options.open(path).map_err(|source| error(path, source))
}

fn error(path: &Path, source: io::Error) -> OutputError {
    OutputError { target: path.display().to_string(), source }
}

/// The model's file, or those in its folder.
fn model_files(model: &Path) -> Vec<PathBuf> {
    match std::fs::read_dir(model) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(_) => vec![model.to_owned()],
    }
}

/// Tells regular files apart, whatever they are called.
#[derive(PartialEq, Eq)]
struct FileId {
    #[cfg(unix)]
    device_and_inode: (u64, u64),
    #[cfg(not(unix))]
    canonical: PathBuf,
}

impl FileId {
    /// `None` for what is no regular file; `-` is standard input.
    #[cfg(unix)]
    fn of(path: &Path) -> Option<Self> {
        if path == Path::new("-") { Self::of_open(io::stdin()) } else { Self::new(path.metadata()) }
    }

    #[cfg(unix)]
    fn of_stdout() -> Option<Self> {
        Self::of_open(io::stdout())
    }

    #[cfg(unix)]
    fn of_open(stream: impl AsFd) -> Option<Self> {
        Self::new(File::from(stream.as_fd().try_clone_to_owned().ok()?).metadata())
    }

    #[cfg(unix)]
    fn new(metadata: io::Result<Metadata>) -> Option<Self> {
        let metadata = metadata.ok().filter(Metadata::is_file)?;
        Some(FileId { device_and_inode: (metadata.dev(), metadata.ino()) })
    }

    /// `None` for what is no regular file.
    #[cfg(not(unix))]
    fn of(path: &Path) -> Option<Self> {
        let canonical = path.canonicalize().ok().filter(|path| path.is_file())?;
        Some(FileId { canonical })
    }

    /// Not known here.
    #[cfg(not(unix))]
    fn of_stdout() -> Option<Self> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_made_when_there_is_something_to_write() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let file = OutputFile::check(&path, Path::new("-"), dir.path()).unwrap();
        assert!(!path.exists());
        file.start(0).unwrap().text("xyz").unwrap();
        let again = || OutputFile::check(&path, Path::new("-"), Path::new("none")).unwrap();
        let file = again();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "xyz");
        file.start(2).unwrap().text("a").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "xya");
        again().start(0).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
    }

    #[test]
    fn what_is_read_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let [input, weights, link] = ["in", "weights", "link"].map(|name| dir.path().join(name));
        std::fs::write(&input, "i").unwrap();
        std::fs::write(&weights, "w").unwrap();
        std::fs::hard_link(&weights, &link).unwrap();
        let refused = |path: &Path, model: &Path| {
            OutputFile::check(path, &input, model).err().map(|error| error.to_string())
        };
        let nowhere = Path::new("none");
        assert!(refused(&input, nowhere).unwrap().ends_with("would overwrite the input"));
        for model in [dir.path(), &weights] {
            let error = refused(&link, model).unwrap();
            assert!(error.ends_with("would overwrite a file of the model"), "{error}");
        }
        assert_eq!(refused(&link, nowhere), None);
        assert_eq!(std::fs::read_to_string(&weights).unwrap(), "w");
    }
}
