//! PTX text to a [`Module`].
//!
//! The subset: one file of PTX 8.0 for sm_80 as Triton prints it. Every directive, opcode,
//! modifier, operand form and type that is not listed in these modules is an error with its line,
//! and so is a register of the wrong width: nothing is guessed and nothing is skipped.
//!
//! ```text
//! text ─ lines ─▶ header (this file) ─▶ statements ─ operand ─▶ decode ─▶ Instr
//! ```

mod body;
mod decode;
mod memory;
mod operand;
mod predicate;
mod warp;

use crate::ParseError;
use crate::program::{Kernel, Module, Param, ParamType};

/// The versions whose meaning is implemented here.
const VERSION: &str = "8.0";
const TARGET: &str = "sm_80";

/// Largest block of any device.
const MAX_THREADS: u32 = 1024;

/// A non-empty line without its comment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line<'a> {
    number: usize,
    text: &'a str,
}

impl Line<'_> {
    fn error(&self, reason: impl Into<String>) -> ParseError {
        ParseError { line: self.number, text: collapse(self.text), reason: reason.into() }
    }
}

/// White space runs become one space.
fn collapse(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Parses a whole file.
pub(crate) fn module(ptx: &str) -> Result<Module, ParseError> {
    let lines: Vec<Line<'_>> = ptx
        .lines()
        .enumerate()
        .map(|(i, line)| (i + 1, line.split("//").next().unwrap_or("").trim()))
        .filter(|(_, text)| !text.is_empty())
        .map(|(number, text)| Line { number, text })
        .collect();
    let mut parser = Header { lines: &lines, at: 0, shared: None };
    parser.preamble()?;
    let mut kernels = Vec::new();
    while let Some(line) = parser.peek() {
        if line.text.starts_with(".visible .entry ") {
            kernels.push(parser.kernel()?);
        } else {
            parser.variable()?;
        }
    }
    if kernels.is_empty() {
        let end = Line { number: ptx.lines().count(), text: "" };
        return Err(end.error("the file has no .visible .entry"));
    }
    Ok(Module { kernels })
}

/// A cursor over what stands outside of kernel bodies.
struct Header<'a> {
    lines: &'a [Line<'a>],
    at: usize,
    /// Name of the dynamic shared memory, once declared.
    shared: Option<&'a str>,
}

impl<'a> Header<'a> {
    fn peek(&self) -> Option<Line<'a>> {
        self.lines.get(self.at).copied()
    }

    fn next(&mut self, wanted: &str) -> Result<Line<'a>, ParseError> {
        let line = self.peek().ok_or_else(|| {
            let last = self.lines.last().copied().unwrap_or(Line { number: 1, text: "" });
            last.error(format!("the file ends where {wanted} is expected"))
        })?;
        self.at += 1;
        Ok(line)
    }

    fn preamble(&mut self) -> Result<(), ParseError> {
        for (directive, wanted) in
            [(".version ", VERSION), (".target ", TARGET), (".address_size ", "64")]
        {
            let line = self.next(directive)?;
            if line.text.strip_prefix(directive).map(str::trim) != Some(wanted) {
                return Err(line.error(format!("expected {directive}{wanted}")));
            }
        }
        Ok(())
    }

    /// `.extern .shared` or a `.global` constant.
    fn variable(&mut self) -> Result<(), ParseError> {
        let line = self.next("a variable")?;
        let words: Vec<&str> = line.text.split_whitespace().collect();
        match words[..] {
            [".extern", ".shared", ".align", align, ".b8", name] => {
                let name = name.strip_suffix("[];").filter(|_| self.shared.is_none());
                let align =
                    align.parse::<u32>().ok().filter(|align| 1024u32.is_multiple_of(*align));
                self.shared = name;
                align.and(name).map(drop).ok_or_else(|| line.error("unknown shared variable"))
            }
            // Constants that LLVM leaves behind. No instruction can name one: it would be unknown.
            [".global", ".align", "1", ".b8", name, "=", ..]
                if name.ends_with(']') && line.text.ends_with("};") =>
            {
                Ok(())
            }
            _ => Err(line.error("unknown directive")),
        }
    }

    fn kernel(&mut self) -> Result<Kernel, ParseError> {
        let line = self.next(".entry")?;
        let name = line.text.trim_start_matches(".visible .entry ").strip_suffix('(');
        let name = name.ok_or_else(|| line.error("expected .visible .entry NAME("))?.trim();
        let params = self.params()?;
        let threads = self.threads()?;
        let open = self.next("{")?;
        if open.text != "{" {
            return Err(open.error("unknown directive"));
        }
        let start = self.at;
        while self.next("}")?.text != "}" {}
        let body = &self.lines[start..self.at - 1];
        let context = body::Context { params: &params, shared: self.shared };
        let parsed = body::parse(body, &context)?;
        Ok(Kernel { name: name.into(), threads, params, ..parsed })
    }

    fn params(&mut self) -> Result<Vec<Param>, ParseError> {
        let mut params = Vec::new();
        let mut end = 0usize;
        loop {
            let line = self.next(")")?;
            if line.text == ")" {
                return Ok(params);
            }
            let words: Vec<&str> = line.text.trim_end_matches(',').split_whitespace().collect();
            let (ty, name) = match words[..] {
                [".param", ".u64", ".ptr", ".global", ".align", _, name] => {
                    (ParamType::Pointer, name)
                }
                [".param", ".u64", name] => (ParamType::U64, name),
                [".param", ".u32", name] => (ParamType::U32, name),
                [".param", ".f32", name] => (ParamType::F32, name),
                _ => return Err(line.error("unknown parameter type")),
            };
            let offset = end.next_multiple_of(ty.bytes());
            end = offset + ty.bytes();
            params.push(Param { name: name.into(), ty, offset });
        }
    }

    fn threads(&mut self) -> Result<u32, ParseError> {
        let line = self.next(".reqntid")?;
        let count = line.text.strip_prefix(".reqntid ").and_then(|count| count.trim().parse().ok());
        let valid = |count: &u32| *count > 0 && *count <= MAX_THREADS && count.is_multiple_of(32);
        count.filter(valid).ok_or_else(|| {
            line.error(format!("expected .reqntid N, N a multiple of 32 up to {MAX_THREADS}"))
        })
    }
}
