//! Where a batch's requests come from: a JSONL stream, read ahead on a thread of its own so that
//! a slow writer never holds up running requests, or the prompts of the command line.

use super::request_line::{RequestLine, parse_line};
use quire_engine::{Request, SamplingParams, derived_seed};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

/// Longest input line, in bytes.
pub const MAX_LINE_BYTES: usize = 32 << 20;
/// Lines read ahead.
const READ_AHEAD: usize = 4;
/// How long to wait for a line before looking whether Ctrl-C was pressed.
const PATIENCE: Duration = Duration::from_millis(50);

/// A request, or what stands in its place.
pub struct Entry {
    /// Line of the file, or number of the prompt, from 1.
    pub line: u64,
    /// Bytes of the input up to here.
    pub end: u64,
    /// What was read.
    pub request: RequestLine,
}

/// What a source has to give.
pub enum Next {
    /// A request.
    Entry(Box<Entry>),
    /// Nothing yet.
    Later,
    /// Nothing any more.
    End,
}

/// A source of requests.
pub enum Source {
    /// A JSONL stream.
    Lines {
        /// From the reading thread.
        lines: Receiver<std::io::Result<Line>>,
        /// A regular file: its next line is always about to come.
        is_file: bool,
        /// What lines do not say.
        defaults: Box<SamplingParams>,
        /// Makes the seeds of lines that have none.
        engine_seed: u64,
    },
    /// Requests made of `--prompt`.
    Prompts(std::iter::Enumerate<std::vec::IntoIter<Request>>),
}

impl Source {
    /// Reads lines from `input` on a thread. `is_file`: reading never waits for anyone.
    /// `engine_seed` and its number make the seed of a line that has none.
    pub fn lines(
        input: Box<dyn Read + Send>,
        is_file: bool,
        defaults: SamplingParams,
        engine_seed: u64,
    ) -> Self {
        let (sender, lines) = sync_channel(READ_AHEAD);
        std::thread::spawn(move || send_lines(BufReader::new(input), &sender));
        Source::Lines { lines, is_file, defaults: Box::new(defaults), engine_seed }
    }

    /// The next request. `idle`: there is nothing else to do, so it may wait a little.
    ///
    /// # Errors
    /// The input cannot be read.
    pub fn next(&mut self, idle: bool) -> std::io::Result<Next> {
        match self {
            Source::Prompts(requests) => Ok(match requests.next() {
                Some((i, request)) => {
                    let request = RequestLine { id: Value::Null, request: Ok(request) };
                    Next::Entry(Box::new(Entry { line: i as u64 + 1, end: 0, request }))
                }
                None => Next::End,
            }),
            Source::Lines { lines, is_file, defaults, engine_seed } => {
                let received = if idle || *is_file {
                    lines.recv_timeout(PATIENCE)
                } else {
                    lines.try_recv().map_err(|e| match e {
                        TryRecvError::Empty => RecvTimeoutError::Timeout,
                        TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
                    })
                };
                match received {
                    Ok(line) => {
                        line.map(|line| Next::Entry(Box::new(line.parse(defaults, *engine_seed))))
                    }
                    Err(RecvTimeoutError::Timeout) => Ok(Next::Later),
                    Err(RecvTimeoutError::Disconnected) => Ok(Next::End),
                }
            }
        }
    }
}

/// A line as read; blank ones are left out.
#[derive(Debug, PartialEq)]
pub struct Line {
    number: u64,
    end: u64,
    text: Result<String, String>,
}

impl Line {
    fn parse(self, defaults: &SamplingParams, engine_seed: u64) -> Entry {
        let mut request = match self.text {
            Ok(text) => parse_line(&text, defaults),
            Err(problem) => RequestLine { id: Value::Null, request: Err(problem) },
        };
        if let Ok(request) = &mut request.request {
            seed(request, engine_seed, self.number);
        }
        Entry { line: self.number, end: self.end, request }
    }
}

/// Gives a request that has no seed the one of its line or prompt, counted from 1: unlike the
/// engine's own, it does not depend on how many others were accepted before.
pub fn seed(request: &mut Request, engine_seed: u64, number: u64) {
    request.params.seed.get_or_insert_with(|| derived_seed(engine_seed, number));
}

/// Sends lines until the input or the interest in it ends.
fn send_lines(mut input: impl BufRead, sender: &SyncSender<std::io::Result<Line>>) {
    let mut reader = LineReader { number: 0, end: 0, limit: MAX_LINE_BYTES };
    while let Some(line) = reader.next(&mut input).transpose() {
        let failed = line.is_err();
        if sender.send(line).is_err() || failed {
            return;
        }
    }
}

struct LineReader {
    number: u64,
    end: u64,
    limit: usize,
}

impl LineReader {
    /// The next line that is not blank; `None` at the end. At most `limit` bytes are kept of any.
    fn next(&mut self, input: &mut impl BufRead) -> std::io::Result<Option<Line>> {
        loop {
            let mut bytes = Vec::new();
            let limit = self.limit as u64 + 1;
            let mut read = input.by_ref().take(limit).read_until(b'\n', &mut bytes)? as u64;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            let too_long = read == limit && bytes.last() != Some(&b'\n');
            if too_long {
                read += skip_line(input)?;
            }
            self.end += read;
            if self.number == 1 && bytes.starts_with(b"\xef\xbb\xbf") {
                bytes.drain(..3);
            }
            let text = if too_long {
                Err(format!("the line has {read} bytes; the limit is {}", self.limit))
            } else {
                String::from_utf8(bytes)
                    .map_err(|e| format!("not UTF-8 at byte {}", e.utf8_error().valid_up_to() + 1))
            };
            if text.as_ref().is_ok_and(|text| text.trim().is_empty()) {
                continue;
            }
            return Ok(Some(Line { number: self.number, end: self.end, text }));
        }
    }
}

/// Skips to the next line and says how many bytes that took.
fn skip_line(input: &mut impl BufRead) -> std::io::Result<u64> {
    let mut skipped = 0;
    loop {
        let buffer = match input.fill_buf() {
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            buffer => buffer?,
        };
        let newline = buffer.iter().position(|&b| b == b'\n');
        let n = newline.map_or(buffer.len(), |at| at + 1);
        input.consume(n);
        skipped += n as u64;
        if newline.is_some() || n == 0 {
            return Ok(skipped);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(mut input: &[u8], limit: usize) -> Vec<(u64, u64, Result<String, String>)> {
        let mut reader = LineReader { number: 0, end: 0, limit };
        let next = || reader.next(&mut input).unwrap();
        std::iter::from_fn(next).map(|line| (line.number, line.end, line.text)).collect()
    }

    #[test]
    fn lines_are_numbered_and_blank_ones_left_out() {
        let ok = |text: &str| Ok(text.to_owned());
        assert_eq!(
            lines(b"\xef\xbb\xbfa\n\n \r\nb\r\nc", 9),
            [(1, 5, ok("a\n")), (4, 12, ok("b\r\n")), (5, 13, ok("c"))]
        );
        assert_eq!(lines(b"", 9), []);
    }

    #[test]
    fn long_lines_are_refused_and_skipped() {
        let long = |bytes| Err(format!("the line has {bytes} bytes; the limit is 4"));
        assert_eq!(
            lines(b"1234\n12345\n12345678\nx", 4),
            [
                (1, 5, Ok("1234\n".to_owned())),
                (2, 11, long(6)),
                (3, 20, long(9)),
                (4, 21, Ok("x".to_owned()))
            ]
        );
        assert_eq!(lines(b"12345678", 4), [(1, 8, long(8))]);
    }

    #[test]
    fn lines_that_are_no_text_are_refused() {
        let refused = |at| Err(format!("not UTF-8 at byte {at}"));
        assert_eq!(lines(b"ab\xff\nx", 9), [(1, 4, refused(3)), (2, 5, Ok("x".to_owned()))]);
    }
}
