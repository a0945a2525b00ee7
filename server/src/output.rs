//! What is written: result lines, error lines, tables, and model text on a terminal.

use serde::Serialize;
use std::borrow::Cow;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, IsTerminal, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

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

    /// A file, of which the first `keep` bytes stay if it is a regular one.
    pub fn file(path: &Path, mut opened: File, keep: u64) -> Result<Self, OutputError> {
        let target = path.display().to_string();
        let cut = opened.metadata().and_then(|metadata| {
            if metadata.is_file() {
                opened.set_len(keep)?;
                opened.seek(SeekFrom::Start(keep))?;
            }
            Ok(())
        });
        match cut {
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

/// Control characters other than line feed and tab escaped: model text must not steer a terminal.
pub fn harmless(text: &str) -> Cow<'_, str> {
    escape(text, |c| c.is_control() && c != '\n' && c != '\t')
}

/// All control characters escaped: a name or path that takes no more than its place.
pub fn escaped(text: &str) -> Cow<'_, str> {
    escape(text, char::is_control)
}

fn escape(text: &str, which: fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(which) {
        return text.into();
    }
    let mut shown = String::new();
    for c in text.chars() {
        if which(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown.into()
}

/// Longest message, in characters; what it quotes may be a line of megabytes.
const MAX_MESSAGE_CHARS: usize = 1000;

/// `text` on one line, runs of white space as one space, control characters escaped, cut to
/// a length that can be read.
pub fn one_line(text: &str) -> String {
    let words = text.split_whitespace();
    let mut chars = words.flat_map(|word| std::iter::once(' ').chain(word.chars())).skip(1);
    let start: String = chars.by_ref().take(MAX_MESSAGE_CHARS).collect();
    let rest = if chars.next().is_some() { "…" } else { "" };
    cut(&(escaped(&start) + rest), MAX_MESSAGE_CHARS)
}

/// The first `max_chars` characters of `text`, with a mark if there are more.
pub fn cut(text: &str, max_chars: usize) -> String {
    match text.char_indices().nth(max_chars) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
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
    one_line(&text)
}

/// Milliseconds, to the microsecond.
pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}

/// A number of things, such as "1 token" or "2 tokens".
pub fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// Rows of name and value, the values in one column, each on its line.
pub fn two_columns(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in rows {
        let _ = writeln!(text, "{name:width$}  {}", escaped(value));
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
        let rows = [("a", "1".to_owned()), ("long", "2\n3".to_owned())];
        assert_eq!(two_columns(&rows), "a     1\nlong  2\\n3\n");
    }

    #[test]
    fn messages_are_one_line_of_bounded_length() {
        assert_eq!(one_line(" a\r\n b\u{1b}\tc "), "a b\\u{1b} c");
        let longest = "é".repeat(MAX_MESSAGE_CHARS);
        assert_eq!(one_line(&longest), longest);
        for long in [format!("{longest}é"), format!("{longest} x"), longest.repeat(1000)] {
            assert_eq!(one_line(&long), format!("{longest}…"));
        }
        assert_eq!(one_line(&"\u{1b}".repeat(999)).chars().count(), MAX_MESSAGE_CHARS + 1);
        let error = anyhow::Error::msg("a".repeat(1500)).context("b".repeat(600));
        assert_eq!(chain(&error).chars().count(), MAX_MESSAGE_CHARS + 1);
    }

    #[test]
    fn one_thing_is_singular() {
        let all = [0, 1, 2].map(|n| counted(n, "token"));
        assert_eq!(all, ["0 tokens", "1 token", "2 tokens"]);
    }
}
