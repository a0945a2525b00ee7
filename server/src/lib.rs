//! The quire command line: `generate`, `chat`, `info`, `verify` and `bench`.
//!
//! Exit codes: 0 done; 1 some requests failed, or a model differs from its golden file; 2 cannot
//! run (arguments, files, memory, a device that cannot be used); 101 a bug; 130 interrupted. An error is one line on standard
//! error, after a table of where the memory goes if that is the matter; results go to standard output, everything else to standard error.

mod bench;
mod chat;
mod cli;
mod conversation;
mod device;
mod explain;
mod generate;
mod info;
mod interrupt;
mod lines;
mod load;
mod memory;
mod output;
mod params;
mod result_line;
mod size;
mod verify;

use clap::Parser;
use cli::{Cli, Command};
use output::{OutputError, one_line};
use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::ExitCode;

/// How a command that could run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// Everything is well.
    Done,
    /// A request failed, or a model differs.
    Failed,
    /// Ctrl-C.
    Interrupted,
}

impl Outcome {
    /// Of a run in which something failed, or nothing did; Ctrl-C comes before either.
    fn of_run(failed: bool) -> Self {
        match failed {
            _ if interrupt::requested() => Outcome::Interrupted,
            true => Outcome::Failed,
            false => Outcome::Done,
        }
    }
}

/// Exit code of a command that cannot run.
const CANNOT_RUN: u8 = 2;
/// Exit code after Ctrl-C.
const INTERRUPTED: u8 = 130;
/// Exit code of a bug; the one Rust uses.
const BUG: u8 = 101;

/// Runs the command line `args`, the program's name first, and returns the exit code.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    std::panic::set_hook(Box::new(|panic| {
        if panic.location().is_some_and(|place| becomes_an_error(place.file())) {
            return;
        }
        let text = one_line(&panic.to_string());
        report(&format!("internal error: {text}; please report it"));
        // A panic on any thread ends the process: what goes on without it could hang.
        std::process::exit(BUG.into());
    }));
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let result = interrupt::install().and_then(|()| match &cli.command {
        Command::Generate(args) => generate::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Info(args) => info::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Bench(args) => bench::run(args),
    });
    match result {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Failed) => ExitCode::FAILURE,
        Ok(Outcome::Interrupted) => ExitCode::from(INTERRUPTED),
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            report(&format!("error: {}", output::chain(&error)));
            ExitCode::from(CANNOT_RUN)
        }
    }
}

/// Whether the engine turns a panic at this source file into an error: one of the `tokenizers`
/// crate, which panics at some texts and files.
fn becomes_an_error(file: &str) -> bool {
    let mut parts = Path::new(file).iter().filter_map(|part| part.to_str());
    parts.any(|part| part == "tokenizers" || part.starts_with("tokenizers-"))
}

/// Prints a line on standard error; if that fails there is nowhere left to say so.
fn report(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The reader of our standard output has seen enough (`quire … | head`).
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<OutputError>().is_some_and(|e| e.source.kind() == ErrorKind::BrokenPipe)
}

/// Help and version as they are; a wrong command line as one line.
fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.to_string();
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        report(text.trim_end());
    } else {
        // Paragraphs are the error and tips; the usage block that follows is for --help.
        let is_help = |text: &&str| text.starts_with("Usage:") || text.starts_with("For more");
        let tips = text.split("\n\n").take_while(|text| !is_help(text));
        let lines: Vec<String> = tips.map(one_line).collect();
        report(&format!("{}; see --help", one_line(&lines.join("; "))));
    }
    ExitCode::from(CANNOT_RUN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_panics_of_the_tokenizers_crate_become_errors() {
        for (file, expected) in [
            ("/home/u/.cargo/registry/src/index-1/tokenizers-0.22.1/src/lib.rs", true),
            ("vendor/tokenizers/src/lib.rs", true),
            ("model-zoo/src/gguf/tokenizer.rs", false),
            ("engine/src/text/tokenizers.rs", false),
            ("/rustc/0/library/core/src/str/mod.rs", false),
        ] {
            assert_eq!(becomes_an_error(file), expected, "{file}");
        }
    }
}
