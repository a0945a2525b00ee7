//! Going on with an interrupted run: which results it has left can stay.
//!
//! Input and results are read side by side. What stays is the longest start of the file that an
//! uninterrupted run would have, too:
//!
//! ```text
//!   input     1   2   3   4   5   6 …
//!   results   1   2   3       5   6 (cut)    ─▶ 1, 2 and 3 stay; the run goes on with line 4
//! ```
//!
//! A run that was killed leaves at most a cut line at the end; one that Ctrl-C or a failure ended
//! may leave results behind one that is missing. An error at the end is run again: whoever used
//! `--fail-fast` has mended the line.

use super::source::{Entry, Next, Source};
use super::summary::Kept;
use crate::output::cut;
use anyhow::Context;
use serde::Deserialize;
use serde_json::Value;
use std::io::{BufRead, Read};

/// Longest line of results, in bytes: hundreds of tokens with log-probabilities of all others.
const MAX_RESULT_BYTES: u64 = 1 << 30;
/// Most characters shown of an id or a line.
const MAX_SHOWN_CHARS: usize = 60;

/// What an earlier run has left that stays.
#[derive(Debug, Default, PartialEq)]
pub struct Resumed {
    /// Bytes of results.
    pub bytes: u64,
    /// Bytes of the input that they answer.
    pub input_bytes: u64,
    /// The requests that they belong to.
    pub kept: Kept,
}

/// How errors name the two files.
#[derive(Clone, Copy)]
pub struct Names<'a> {
    /// The results.
    pub results: &'a str,
    /// The input.
    pub input: &'a str,
}

/// Finds what of `results` stays, and leaves `source` at the first request to be run.
///
/// # Errors
/// Something cannot be read, or the results are not those of this input.
pub fn resume(
    results: impl BufRead,
    source: &mut Source,
    names: Names<'_>,
) -> anyhow::Result<Resumed> {
    let mut results = Results { reader: results, names, number: 0, end: 0, next: None };
    let mut resumed = Resumed::default();
    while let Some(number) = results.peek()?.map(|found| found.number) {
        let Some(entry) = next_entry(source, names.input)? else {
            anyhow::bail!("{}:{number}: there is no request for this result", names.results);
        };
        let Some(failed) = results.take_group(&entry)? else {
            source.unread(entry);
            break;
        };
        resumed.bytes = results.taken();
        resumed.input_bytes = entry.end;
        resumed.kept.requests += 1;
        resumed.kept.failed += u64::from(failed);
    }
    Ok(resumed)
}

fn next_entry(source: &mut Source, name: &str) -> anyhow::Result<Option<Box<Entry>>> {
    loop {
        match source.next(true).with_context(|| format!("cannot read {name}"))? {
            Next::Entry(entry) => return Ok(Some(entry)),
            Next::Later => {}
            Next::End => return Ok(None),
        }
    }
}

/// A result as far as it says where it belongs.
#[derive(Deserialize)]
struct Fields {
    id: Value,
    line: Option<u64>,
    index: Option<usize>,
    error: Option<ErrorFields>,
}

#[derive(Deserialize)]
struct ErrorFields {
    line: u64,
}

/// A result and where it belongs.
struct Found {
    id: Value,
    /// Line of the input.
    line: u64,
    /// Which of the request's sequences; errors do not say.
    index: Option<usize>,
    /// Its own line.
    number: u64,
    /// Where that begins.
    start: u64,
}

/// Results that are whole.
struct Results<'a, R> {
    reader: R,
    names: Names<'a>,
    /// Lines read.
    number: u64,
    /// Bytes read.
    end: u64,
    next: Option<Found>,
}

impl<R: BufRead> Results<'_, R> {
    /// The next result; `None` at the end, and at a line that is cut.
    fn peek(&mut self) -> anyhow::Result<Option<&Found>> {
        if self.next.is_none() {
            self.next = self.read()?;
        }
        Ok(self.next.as_ref())
    }

    fn read(&mut self) -> anyhow::Result<Option<Found>> {
        let name = self.names.results;
        let mut bytes = Vec::new();
        let mut limited = self.reader.by_ref().take(MAX_RESULT_BYTES);
        let read = limited.read_until(b'\n', &mut bytes);
        read.with_context(|| format!("cannot read {name}"))?;
        let number = self.number + 1;
        if bytes.len() as u64 == MAX_RESULT_BYTES {
            anyhow::bail!("{name}:{number}: the line has more than {MAX_RESULT_BYTES} bytes");
        }
        if bytes.last() != Some(&b'\n') {
            return Ok(None);
        }
        let fields: Option<Fields> = serde_json::from_slice(&bytes).ok();
        let found = fields.and_then(|fields| {
            let line = fields.error.map(|error| error.line).or(fields.line)?;
            let Fields { id, index, .. } = fields;
            Some(Found { id, line, index, number, start: self.end })
        });
        self.number = number;
        self.end += bytes.len() as u64;
        found.map(Some).with_context(|| {
            let text = String::from_utf8_lossy(&bytes);
            format!("{name}:{number}: not a result: {}", cut(text.trim(), MAX_SHOWN_CHARS))
        })
    }

    /// Bytes up to the next result.
    fn taken(&self) -> u64 {
        self.next.as_ref().map_or(self.end, |found| found.start)
    }

    /// Takes the results of a request, and says whether one is an error. `None`: they are not all
    /// there, or are to be made again.
    fn take_group(&mut self, entry: &Entry) -> anyhow::Result<Option<bool>> {
        let n = entry.request.request.as_ref().map_or(1, |request| request.params.n);
        let (mut count, mut failed) = (0, false);
        while count < n {
            let names = self.names;
            let Some(found) = self.peek()? else { break };
            if found.line > entry.line {
                break;
            }
            check(found, entry, count, names)?;
            failed |= found.index.is_none();
            count += 1;
            self.next = None;
        }
        // A request that was refused has one error for all its sequences.
        let complete = count == n || count == 1 && failed;
        let last = self.peek()?.is_none();
        Ok((complete && !(failed && last)).then_some(failed))
    }
}

/// Whether a result is number `index` of those that `entry` has.
fn check(found: &Found, entry: &Entry, index: usize, names: Names<'_>) -> anyhow::Result<()> {
    let place = format!("{}:{}", names.results, found.number);
    let of = format!("line {} of {}", entry.line, names.input);
    anyhow::ensure!(
        found.line == entry.line,
        "{place}: this is a result of line {}; one of {of} is expected",
        found.line
    );
    let shown = |id: &Value| cut(&id.to_string(), MAX_SHOWN_CHARS);
    anyhow::ensure!(
        found.id == entry.request.id,
        "{place}: this result has the id {}, but {of} has {}",
        shown(&found.id),
        shown(&entry.request.id)
    );
    anyhow::ensure!(
        found.index.is_none_or(|found| found == index),
        "{place}: this is result {} of {of}; number {index} is expected",
        found.index.unwrap_or_default()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::request_line::Defaults;
    use super::*;
    use quire_engine::SamplingParams;

    const INPUT: &str = concat!(
        "{\"prompt\": \"x\", \"id\": \"a\"}\n",
        "\n",
        "{\"prompt\": \"x\", \"n\": 2, \"temperature\": 1}\n",
        "bad\n",
        "{\"prompt\": \"x\", \"n\": 2}\n",
        "{\"prompt\": \"x\", \"id\": 6}\n",
    );

    fn result(id: &str, line: u64, index: usize) -> String {
        format!("{{\"id\":{id},\"line\":{line},\"index\":{index},\"text\":\"\"}}\n")
    }

    fn error(id: &str, line: u64) -> String {
        format!("{{\"id\":{id},\"error\":{{\"message\":\"m\",\"line\":{line}}}}}\n")
    }

    /// What stays, and the line that the run goes on with.
    fn run(results: &str) -> Result<(Resumed, Option<u64>), String> {
        let defaults =
            Defaults { prompt: SamplingParams::default(), chat: SamplingParams::default() };
        let mut source = Source::lines(Box::new(INPUT.as_bytes()), true, defaults, 0);
        let names = Names { results: "out", input: "in" };
        let resumed = resume(results.as_bytes(), &mut source, names).map_err(|e| e.to_string())?;
        let next = next_entry(&mut source, "in").unwrap();
        Ok((resumed, next.map(|entry| entry.line)))
    }

    #[test]
    fn whole_groups_stay() {
        let groups = [
            result("\"a\"", 1, 0),
            result("null", 3, 0) + &result("null", 3, 1),
            error("null", 4),
            // Refused as a whole.
            error("null", 5),
            result("6", 6, 0),
        ];
        let all = groups.concat();
        let lines = [1, 3, 4, 5, 6];
        for cut in 0..=all.len() {
            let (resumed, next) = run(&all[..cut]).unwrap();
            let ends = groups.iter().scan(0, |end, group| {
                *end += group.len();
                Some(*end)
            });
            let mut whole = ends.take_while(|end| *end <= cut).count();
            // Errors at the end are made again, up to where what follows shows that they ended.
            let shown = &all[..cut];
            let last_line = shown[..shown.rfind('\n').map_or(0, |at| at + 1)].lines().last();
            if last_line.is_some_and(|line| line.contains("error")) {
                whole -= 1;
            }
            assert_eq!(resumed.kept.requests, whole as u64, "{cut}");
            assert_eq!(resumed.bytes, groups[..whole].concat().len() as u64, "{cut}");
            assert_eq!(next, lines.get(whole).copied(), "{cut}");
            let failed = groups[..whole].iter().filter(|group| group.contains("error")).count();
            assert_eq!(resumed.kept.failed, failed as u64, "{cut}");
        }
    }

    #[test]
    fn what_stands_behind_a_gap_is_made_again() {
        let behind = result("\"a\"", 1, 0) + &result("6", 6, 0);
        let (resumed, next) = run(&behind).unwrap();
        assert_eq!((resumed.kept.requests, next), (1, Some(3)));
        assert_eq!(run(&result("6", 6, 0)).unwrap(), (Resumed::default(), Some(1)));
    }

    #[test]
    fn results_of_another_input_are_refused() {
        let a = result("\"a\"", 1, 0);
        for (results, text) in [
            (
                result("\"b\"", 1, 0),
                "out:1: this result has the id \"b\", but line 1 of in has \"a\"",
            ),
            (a.repeat(2), "out:2: this is a result of line 1; one of line 3 of in is expected"),
            (format!("{a}{}", result("null", 3, 1)), "result 1 of line 3 of in; number 0"),
            (format!("{a}x\n"), "out:2: not a result: x"),
            ("{\"id\":\"a\",\"text\":\"\"}\n".to_owned(), "out:1: not a result: {\"id\""),
        ] {
            let error = run(&results).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
        let six = result("null", 3, 0) + &result("null", 3, 1) + &error("null", 4);
        let more = a + &six + &error("null", 5) + &result("6", 6, 0) + &result("7", 7, 0);
        assert!(run(&more).unwrap_err().ends_with("out:7: there is no request for this result"));
    }
}
