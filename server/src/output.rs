//! What is written: result lines, error lines, tables, and model text on a terminal.

use serde::Serialize;
use std::borrow::Cow;
use std::fmt::Write as _;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::Path;

/// Results could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {target}: {source}")]
pub struct OutputError {
    /// Where to.
    pub target: String,
    /// What the system said.
    pub source: io::Error,
}

/// Where results go, a line at a time.
pub struct Output {
    target: String,
    writer: Box<dyn Write>,
    terminal: bool,
}

impl Output {
    /// Standard output.
    pub fn stdout() -> Self {
        let stdout = io::stdout();
        let terminal = stdout.is_terminal();
        Output { target: "standard output".to_owned(), writer: Box::new(stdout), terminal }
    }

    /// A file, emptied. `opened` comes from [`open_output`].
    pub fn file(path: &Path, opened: File) -> Result<Self, OutputError> {
        let target = path.display().to_string();
        let emptied =
            opened.metadata().and_then(|m| if m.is_file() { opened.set_len(0) } else { Ok(()) });
        match emptied {
            Ok(()) => {
                Ok(Output { target, terminal: opened.is_terminal(), writer: Box::new(opened) })
            }
            Err(source) => Err(OutputError { target, source }),
        }
    }

    /// A person is watching.
    pub fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// Writes `text`, made harmless on a terminal, at once.
    pub fn text(&mut self, text: &str) -> Result<(), OutputError> {
        let text = if self.terminal { harmless(text) } else { text.into() };
        let written = self.writer.write_all(text.as_bytes());
        written.and_then(|()| self.writer.flush()).map_err(|source| self.error(source))
    }

    /// Writes `value` as one line of JSON, at once.
    pub fn json(&mut self, value: &impl Serialize) -> Result<(), OutputError> {
        let line = to_json(value);
        self.text(&(line + "\n"))
    }

    fn error(&self, source: io::Error) -> OutputError {
        OutputError { target: self.target.clone(), source }
    }
}

/// One line of JSON. Our own types have string keys and no failing parts.
pub fn to_json(value: &impl Serialize) -> String {
    let line = serde_json::to_string(value).expect("plain data is always JSON");
    // JSON escapes C0 controls only; the others work on terminals, too.
    if !line.contains(is_c1_or_delete) {
        return line;
    }
    let mut escaped = String::with_capacity(line.len() + 16);
    for c in line.chars() {
        if is_c1_or_delete(c) {
            let _ = write!(escaped, "\\u{:04x}", u32::from(c));
        } else {
            escaped.push(c);
        }
    }
    escaped
}

fn is_c1_or_delete(c: char) -> bool {
    matches!(c, '\u{7f}'..='\u{9f}')
}

/// Opens an output file for writing without emptying it, and refuses one that is also the input.
pub fn open_output(path: &Path, input: Option<&Path>) -> anyhow::Result<File> {
    let error = |source| OutputError { target: path.display().to_string(), source };
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).open(path).map_err(error)?;
    if let Some(input) = input {
        let (ours, theirs) = (file.metadata().map_err(error)?, input.metadata());
        let same = theirs.is_ok_and(|theirs| is_same_file(&ours, &theirs, path, input));
        anyhow::ensure!(!same, "{}: the output would overwrite the input", path.display());
    }
    Ok(file)
}

#[cfg(unix)]
fn is_same_file(a: &Metadata, b: &Metadata, _: &Path, _: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    a.is_file() && (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(not(unix))]
fn is_same_file(a: &Metadata, _: &Metadata, a_path: &Path, b_path: &Path) -> bool {
    a.is_file() && a_path.canonicalize().ok() == b_path.canonicalize().ok()
}

/// Control characters other than line feed and tab escaped: model text must not steer a terminal.
pub fn harmless(text: &str) -> Cow<'_, str> {
    let steers = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(steers) {
        return text.into();
    }
    let mut shown = String::new();
    for c in text.chars() {
        if steers(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown.into()
}

/// `text` on one line, runs of white space as one space, control characters escaped.
pub fn one_line(text: &str) -> String {
    harmless(&text.split_whitespace().collect::<Vec<_>>().join(" ")).into_owned()
}

/// An error and its causes on one line. Some errors show their cause themselves; it is not
/// repeated.
pub fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = one_line(&cause.to_string());
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            let _ = write!(text, ": {cause}");
        }
    }
    text
}

/// Rows of name and value, the values in one column.
pub fn two_columns(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in rows {
        let _ = writeln!(text, "{name:width$}  {value}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn escape_sequences_do_not_reach_a_terminal() {
        assert_eq!(harmless("a\n\tb é"), "a\n\tb é");
        assert_eq!(harmless("\u{1b}[2Jx\r\u{9b}1m"), "\\u{1b}[2Jx\\r\\u{9b}1m");
        assert_eq!(to_json(&"\u{1b}\u{9b}\u{7f}é"), "\"\\u001b\\u009b\\u007fé\"");
    }

    #[test]
    fn chains_name_each_cause_once() {
        let io = || io::Error::new(io::ErrorKind::NotFound, "no\nsuch file");
        let shown = OutputError { target: "x".into(), source: io() };
        let error = anyhow::Error::new(shown).context("outer");
        assert_eq!(chain(&error), "outer: cannot write x: no such file");
        let hidden = Err::<(), _>(io()).context("reading").unwrap_err();
        assert_eq!(chain(&hidden), "reading: no such file");
    }

    #[test]
    fn columns_are_aligned() {
        let rows = [("a", "1".to_owned()), ("long", "2".to_owned())];
        assert_eq!(two_columns(&rows), "a     1\nlong  2\n");
    }
}
