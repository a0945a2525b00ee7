//! What can go wrong while reading model files: every variant says which file, what in it, and why.

use std::{io, path::Path, path::PathBuf};

use thiserror::Error;

/// Why a model could not be read. Nothing in a file on disk makes the loader panic.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The operating system could not read the file.
    #[error("{}: {source}", shown_path(path))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The file breaks its own format.
    #[error("{}: {problem}", shown_path(path))]
    Malformed {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong, with the values found.
        problem: String,
    },
    /// A size stated by, or of, the file is over a limit.
    #[error("{}: {what} is {value}; the limit is {limit}", shown_path(path))]
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
    #[error("{}: key {key}: {problem}", shown_path(path))]
    Key {
        /// The file.
        path: PathBuf,
        /// The key's name, quoted.
        key: String,
        /// What is wrong, with the value and the limit.
        problem: String,
    },
    /// The file asks for something that is known but not implemented, or not known at all.
    #[error("{}: {what} {name} is not supported", shown_path(path))]
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
        Self::Malformed { path: path.to_owned(), problem: shown(&problem.into()) }
    }

    pub(crate) fn tensor(
        location: impl Into<String>,
        tensor: &str,
        problem: impl Into<String>,
    ) -> Self {
        Self::Tensor {
            location: shown(&location.into()),
            tensor: quoted(tensor),
            problem: shown(&problem.into()),
        }
    }

    pub(crate) fn key(path: &Path, key: &str, problem: impl Into<String>) -> Self {
        Self::Key { path: path.to_owned(), key: quoted(key), problem: shown(&problem.into()) }
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

/// Longest name in a message, in characters.
const MAX_NAME_CHARS: usize = 160;
/// Longest path or description in a message, in characters.
const MAX_TEXT_CHARS: usize = 500;

/// `text` in backquotes, control characters escaped and cut to a length a message can hold: names
/// come from files, and a file may hold a name of megabytes or one that rewrites the terminal.
pub(crate) fn quoted(text: &str) -> String {
    format!("`{}`", printable(text, MAX_NAME_CHARS))
}

/// A description, which may hold what a parser quotes from a file, made printable likewise.
fn shown(text: &str) -> String {
    printable(text, MAX_TEXT_CHARS)
}

/// A path, made printable likewise.
fn shown_path(path: &Path) -> String {
    shown(&path.display().to_string())
}

fn printable(text: &str, max_chars: usize) -> String {
    let mut shown = String::new();
    let mut chars = text.chars();
    for c in chars.by_ref().take(max_chars) {
        if c.is_control() {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    if chars.next().is_some() {
        shown.push('…');
    }
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

    #[test]
    fn messages_are_short_and_cannot_steer_a_terminal() {
        let path = PathBuf::from(format!("a\n\u{1b}[2J{}", "x".repeat(100_000)));
        let long = "y\u{7}".repeat(100_000);
        let location = path.display().to_string();
        for error in [
            LoadError::malformed(&path, long.clone()),
            LoadError::tensor(location, &long, long.clone()),
            LoadError::key(&path, &long, long.clone()),
            LoadError::unsupported(&path, "architecture", &long),
            LoadError::io(&path, io::ErrorKind::NotFound.into()),
            check_limit(&path, "size", 2, 1).unwrap_err(),
        ] {
            let message = error.to_string();
            assert!(message.starts_with("a\\n\\u{1b}[2Jxx"), "{message}");
            assert!(!message.contains(char::is_control), "{message}");
            assert!(message.len() < 10_000, "{}", message.len());
        }
    }
}
