//! Lines of text from outside: numbered, bounded, checked to be UTF-8.

use std::io::{BufRead, Read};

/// Longest line, in bytes.
pub const MAX_LINE_BYTES: usize = 32 << 20;

/// A line as read.
#[derive(Debug, PartialEq)]
pub struct Line {
    /// From 1.
    pub number: u64,
    /// Bytes of the input up to its end.
    pub end: u64,
    /// With its line break, or what is wrong with it.
    pub text: Result<String, String>,
}

/// Reads lines.
pub struct LineReader<R> {
    input: R,
    number: u64,
    end: u64,
    limit: usize,
}

impl<R: BufRead> LineReader<R> {
    /// Lines of `input` of at most [`MAX_LINE_BYTES`].
    pub fn new(input: R) -> Self {
        LineReader { input, number: 0, end: 0, limit: MAX_LINE_BYTES }
    }

    /// The next line that is not blank; `None` at the end.
    ///
    /// # Errors
    /// The input cannot be read.
    pub fn next(&mut self) -> std::io::Result<Option<Line>> {
        loop {
            let line = self.next_or_blank()?;
            let text = line.as_ref().and_then(|line| line.text.as_ref().ok());
            if text.is_none_or(|text| !text.trim().is_empty()) {
                return Ok(line);
            }
        }
    }

    /// The next line; `None` at the end. At most `limit` bytes are kept of any.
    ///
    /// # Errors
    /// The input cannot be read.
    pub fn next_or_blank(&mut self) -> std::io::Result<Option<Line>> {
        let mut bytes = Vec::new();
        let limit = self.limit as u64 + 1;
        let mut read = self.input.by_ref().take(limit).read_until(b'\n', &mut bytes)? as u64;
        if read == 0 {
            return Ok(None);
        }
        self.number += 1;
        let too_long = read == limit && bytes.last() != Some(&b'\n');
        if too_long {
            read += skip_line(&mut self.input)?;
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
        Ok(Some(Line { number: self.number, end: self.end, text }))
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

    fn lines(input: &[u8], limit: usize) -> Vec<(u64, u64, Result<String, String>)> {
        let mut reader = LineReader { input, number: 0, end: 0, limit };
        let next = || reader.next().unwrap();
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
