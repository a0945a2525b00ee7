//! What can go wrong while reading model files: every variant says which file, what in it, and why.

use std::{io, path::Path, path::PathBuf};

use thiserror::Error;

/// Why a model could not be read. Nothing in a file on disk makes the loader panic.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The operating system could not read the file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The file breaks its own format.
    #[error("{}: {problem}", path.display())]
    Malformed {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong, with the values found.
        problem: String,
    },
    /// A size stated by, or of, the file is over a limit.
    #[error("{}: {what} is {value}; the limit is {limit}", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// What was measured, with its unit.
        what: String,
        /// The value found.
        value: u64,
        /// The largest accepted value.
        limit: u64,
    },
    /// A tensor is missing, unexpected, or not as described.
    #[error("{location}: tensor {tensor}: {problem}")]
    Tensor {
        /// The file or folder.
        location: String,
        /// The tensor's name, quoted.
        tensor: String,
        /// What is wrong, with the values found.
        problem: String,
    },
    /// A configuration or metadata key is missing or holds a bad value.
    #[error("{}: key {key}: {problem}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The key's name, quoted.
        key: String,
        /// What is wrong, with the value and the limit.
        problem: String,
    },
    /// The file asks for something that is known but not implemented, or not known at all.
    #[error("{}: {what} {name} is not supported", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The kind of thing, such as `architecture`.
        what: &'static str,
        /// Its name in the file, quoted.
        name: String,
    },
}

impl LoadError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn malformed(path: &Path, problem: impl Into<String>) -> Self {
        Self::Malformed { path: path.to_owned(), problem: problem.into() }
    }

    pub(crate) fn tensor(
        location: impl Into<String>,
        tensor: &str,
        problem: impl Into<String>,
    ) -> Self {
        Self::Tensor { location: location.into(), tensor: quoted(tensor), problem: problem.into() }
    }

    pub(crate) fn key(path: &Path, key: &str, problem: impl Into<String>) -> Self {
        Self::Key { path: path.to_owned(), key: quoted(key), problem: problem.into() }
    }

    pub(crate) fn unsupported(path: &Path, what: &'static str, name: &str) -> Self {
        Self::Unsupported { path: path.to_owned(), what, name: quoted(name) }
    }
}

/// Checks `value` against `limit`; `what` names it, with its unit.
pub(crate) fn check_limit(
    path: &Path,
    what: impl Into<String>,
    value: u64,
    limit: u64,
) -> Result<(), LoadError> {
    if value <= limit {
        return Ok(());
    }
    Err(LoadError::TooLarge { path: path.to_owned(), what: what.into(), value, limit })
}

/// `text` in backquotes, control characters escaped and cut to a length a message can hold: names
/// come from files, and a file may hold a name of megabytes or one that rewrites the terminal.
pub(crate) fn quoted(text: &str) -> String {
    const MAX_CHARS: usize = 160;
    let mut shown = String::from("`");
    let mut chars = text.chars();
    for c in chars.by_ref().take(MAX_CHARS) {
        if c.is_control() {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    if chars.next().is_some() {
        shown.push('…');
    }
    shown.push('`');
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_escapes_and_cuts() {
        assert_eq!(quoted("a\u{1b}[2J"), "`a\\u{1b}[2J`");
        let long = quoted(&"x".repeat(1_000_000));
        assert_eq!(long.chars().count(), 163);
    }

    #[test]
    fn messages_name_file_tensor_and_values() {
        let error = LoadError::tensor("m/model.safetensors", "w", "has 3 rows; the limit is 2");
        assert_eq!(
            error.to_string(),
            "m/model.safetensors: tensor `w`: has 3 rows; the limit is 2"
        );
    }
}
