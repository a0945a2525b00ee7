//! Where a batch's requests come from: a JSONL stream, read ahead on a thread of its own so that
//! a slow writer never holds up running requests, or the prompts of the command line.

use super::request_line::{Defaults, LineRequest, RequestLine, parse_line};
use crate::lines::{Line, LineReader};
use quire_engine::{Request, SamplingParams, derived_seed};
use serde_json::Value;
use std::io::{BufReader, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

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
pub struct Source {
    kind: Kind,
    /// Given back, to be given out again.
    unread: Option<Box<Entry>>,
}

enum Kind {
    /// A JSONL stream.
    Lines {
        /// From the reading thread.
        lines: Receiver<std::io::Result<Line>>,
        /// A regular file: its next line is always about to come.
        is_file: bool,
        /// What lines do not say.
        defaults: Box<Defaults>,
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
        defaults: Defaults,
        engine_seed: u64,
    ) -> Self {
        let (sender, lines) = sync_channel(READ_AHEAD);
        std::thread::spawn(move || send_lines(BufReader::new(input), &sender));
        let defaults = Box::new(defaults);
        Source { kind: Kind::Lines { lines, is_file, defaults, engine_seed }, unread: None }
    }

    /// The prompts of the command line.
    pub fn prompts(requests: Vec<Request>) -> Self {
        Source { kind: Kind::Prompts(requests.into_iter().enumerate()), unread: None }
    }

    /// Puts the entry that was read last before those to come.
    pub fn unread(&mut self, entry: Box<Entry>) {
        assert!(self.unread.is_none(), "one entry is unread at a time");
        self.unread = Some(entry);
    }

    /// The next request. `idle`: there is nothing else to do, so it may wait a little.
    ///
    /// # Errors
    /// The input cannot be read.
    pub fn next(&mut self, idle: bool) -> std::io::Result<Next> {
        if let Some(entry) = self.unread.take() {
            return Ok(Next::Entry(entry));
        }
        match &mut self.kind {
            Kind::Prompts(requests) => Ok(match requests.next() {
                Some((i, request)) => {
                    let request = Ok(LineRequest::from(request));
                    let request = RequestLine { id: Value::Null, request };
                    Next::Entry(Box::new(Entry { line: i as u64 + 1, end: 0, request }))
                }
                None => Next::End,
            }),
            Kind::Lines { lines, is_file, defaults, engine_seed } => {
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
                        line.map(|line| Next::Entry(Box::new(parse(line, defaults, *engine_seed))))
                    }
                    Err(RecvTimeoutError::Timeout) => Ok(Next::Later),
                    Err(RecvTimeoutError::Disconnected) => Ok(Next::End),
                }
            }
        }
    }
}

fn parse(line: Line, defaults: &Defaults, engine_seed: u64) -> Entry {
    let mut request = match line.text {
        Ok(text) => parse_line(&text, defaults),
        Err(problem) => RequestLine { id: Value::Null, request: Err(problem) },
    };
    if let Ok(request) = &mut request.request {
        seed(&mut request.params, engine_seed, line.number);
    }
    Entry { line: line.number, end: line.end, request }
}

/// Gives a request that has no seed the one of its line or prompt, counted from 1: unlike the
/// engine's own, it does not depend on how many others were accepted before.
pub fn seed(params: &mut SamplingParams, engine_seed: u64, number: u64) {
    params.seed.get_or_insert_with(|| derived_seed(engine_seed, number));
}

/// Sends lines until the input or the interest in it ends.
fn send_lines(input: BufReader<Box<dyn Read + Send>>, sender: &SyncSender<std::io::Result<Line>>) {
    let mut reader = LineReader::new(input);
    while let Some(line) = reader.next().transpose() {
        let failed = line.is_err();
        if sender.send(line).is_err() || failed {
            return;
        }
    }
}
