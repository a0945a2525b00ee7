//! What the user says: messages and commands from a terminal, or a message a line.

use crate::lines::{Line, LineReader, MAX_LINE_BYTES};
use anyhow::Context;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};
use std::io::{IsTerminal, StdinLock, Write};

/// Asks for a message.
const PROMPT: &str = "> ";
/// Asks for more of it.
const MORE: &str = ". ";
/// Stands before and after a message of several lines.
const QUOTES: &str = "\"\"\"";

/// The commands, as `/help` shows them.
pub const HELP: &str = "\
/help         show this
/clear        start a new conversation; the system message stays
/system TEXT  set the system message; without TEXT take it away
/retry        answer the last message again
/exit         end, as Ctrl-D and Ctrl-C do here; Ctrl-C in an answer stops it
A line that ends in \\ goes on in the next; lines between two lines of \"\"\" are one message.
";

/// What comes next.
#[derive(Debug, PartialEq)]
pub enum Event {
    /// A message.
    Message(String),
    /// A command.
    Command(Command),
    /// Something that is neither; why.
    Bad(String),
    /// Ctrl-C.
    Interrupted,
    /// Ctrl-D, or the end of the file.
    End,
}

/// A command.
#[derive(Debug, PartialEq)]
pub enum Command {
    /// Show the commands.
    Help,
    /// Forget what was said.
    Clear,
    /// Set the system message.
    System(Option<String>),
    /// Answer again.
    Retry,
    /// End.
    Exit,
}

/// Where messages come from.
pub enum Input {
    /// A terminal, with history and editing.
    Editor(Box<DefaultEditor>),
    /// A terminal whose output goes elsewhere: prompts are shown on standard error.
    Terminal(LineReader<StdinLock<'static>>),
    /// No terminal.
    Lines(LineReader<StdinLock<'static>>),
}

impl Input {
    /// Standard input.
    ///
    /// # Errors
    /// The terminal cannot be used.
    pub fn new() -> anyhow::Result<Self> {
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            return Ok(Input::Lines(LineReader::new(stdin.lock())));
        }
        if !std::io::stdout().is_terminal() {
            return Ok(Input::Terminal(LineReader::new(stdin.lock())));
        }
        let config = Config::builder().auto_add_history(true).build();
        let editor = DefaultEditor::with_config(config).context("cannot use the terminal")?;
        Ok(Input::Editor(Box::new(editor)))
    }

    /// A person is typing.
    pub fn is_interactive(&self) -> bool {
        !matches!(self, Input::Lines(_))
    }

    /// Waits for what comes next.
    ///
    /// # Errors
    /// Standard input cannot be read.
    pub fn next(&mut self) -> anyhow::Result<Event> {
        match self {
            Input::Lines(lines) => Ok(match without_break(lines.next())? {
                Some(Ok(text)) => Event::Message(text),
                Some(Err(problem)) => Event::Bad(problem),
                None => Event::End,
            }),
            Input::Terminal(lines) => typed(&mut |prompt| {
                let _ = write!(std::io::stderr(), "{prompt}");
                Ok(match without_break(lines.next_or_blank())? {
                    Some(Ok(text)) => Typed::Line(text),
                    Some(Err(problem)) => Typed::Bad(problem),
                    None => Typed::End,
                })
            }),
            Input::Editor(editor) => typed(&mut |prompt| match editor.readline(prompt) {
                Ok(line) if line.len() > MAX_LINE_BYTES => Ok(Typed::Bad(format!(
                    "the line has {} bytes; the limit is {MAX_LINE_BYTES}",
                    line.len()
                ))),
                Ok(line) => Ok(Typed::Line(line)),
                Err(ReadlineError::Interrupted) => Ok(Typed::Interrupted),
                Err(ReadlineError::Eof) => Ok(Typed::End),
                Err(ReadlineError::Io(e)) if e.kind() == std::io::ErrorKind::InvalidData => {
                    Ok(Typed::Bad("what was typed is not UTF-8".to_owned()))
                }
                Err(error) => Err(error).context("cannot read the terminal"),
            }),
        }
    }
}

/// The text of a line without its line break, or what is wrong with it.
fn without_break(
    line: std::io::Result<Option<Line>>,
) -> anyhow::Result<Option<Result<String, String>>> {
    let line = line.context("cannot read standard input")?;
    Ok(line.map(|line| {
        let text = line.text.map_err(|problem| format!("line {}: {problem}", line.number))?;
        Ok(text.trim_end_matches(['\r', '\n']).to_owned())
    }))
}

/// What was typed on one line.
enum Typed {
    Line(String),
    Bad(String),
    Interrupted,
    End,
}

/// Puts lines together. `read` shows a prompt and waits for a line. Ctrl-C within a message drops
/// it.
fn typed(read: &mut dyn FnMut(&str) -> anyhow::Result<Typed>) -> anyhow::Result<Event> {
    let (mut text, mut within, mut quoted) = (String::new(), false, false);
    loop {
        let line = match read(if within { MORE } else { PROMPT })? {
            Typed::Line(line) => line,
            Typed::Bad(problem) => return Ok(Event::Bad(problem)),
            Typed::Interrupted if within => {
                (text, within, quoted) = (String::new(), false, false);
                continue;
            }
            Typed::Interrupted => return Ok(Event::Interrupted),
            Typed::End => return Ok(Event::End),
        };
        if line.trim() == QUOTES && (quoted || !within) {
            if quoted {
                text.pop();
                break;
            }
            (within, quoted) = (true, true);
        } else if quoted {
            text += &line;
            text.push('\n');
        } else if let Some(start) = line.strip_suffix('\\') {
            text += start;
            text.push('\n');
            within = true;
        } else if within {
            text += &line;
            break;
        } else if let Some(command) = line.strip_prefix('/') {
            return Ok(parse_command(command));
        } else if !line.trim().is_empty() {
            text = line;
            break;
        }
    }
    Ok(Event::Message(text))
}

/// What stands after the slash.
fn parse_command(text: &str) -> Event {
    let (name, argument) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let argument = Some(argument.trim()).filter(|argument| !argument.is_empty());
    Event::Command(match (name, argument) {
        ("help", None) => Command::Help,
        ("clear", None) => Command::Clear,
        ("system", text) => Command::System(text.map(str::to_owned)),
        ("retry", None) => Command::Retry,
        ("exit", None) => Command::Exit,
        ("help" | "clear" | "retry" | "exit", Some(_)) => {
            return Event::Bad(format!("/{name} takes nothing"));
        }
        _ => {
            return Event::Bad(format!(
                "there is no command /{name}; see /help. A message that begins with / stands \
                 between lines of {QUOTES}"
            ));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All events of `lines`, where `^C` is Ctrl-C, and the prompts shown.
    fn events(lines: &[&str]) -> (Vec<Event>, String) {
        let (mut lines, mut prompts) = (lines.iter(), String::new());
        let mut read = |prompt: &str| {
            prompts += prompt.trim_end();
            Ok(match lines.next() {
                Some(&"^C") => Typed::Interrupted,
                Some(line) => Typed::Line((*line).to_owned()),
                None => Typed::End,
            })
        };
        let mut events = Vec::new();
        while events.last() != Some(&Event::End) {
            events.push(typed(&mut read).unwrap());
        }
        (events, prompts)
    }

    fn message(text: &str) -> Event {
        Event::Message(text.to_owned())
    }

    #[test]
    fn messages_have_one_line_or_several() {
        let lines = [
            "", "one", " ", "a\\", "b\\", "", "\"\"\"", "/x", "", "y\\", " \"\"\"", "c\\", "\"\"\"",
        ];
        let (events, prompts) = events(&lines);
        let expected =
            [message("one"), message("a\nb\n"), message("/x\n\ny\\"), message("c\n\"\"\"")];
        assert_eq!(events[..4], expected);
        assert_eq!(prompts, ">>>>..>....>.>");
    }

    #[test]
    fn ctrl_c_drops_what_is_begun_and_else_ends() {
        let (events, prompts) =
            events(&["a\\", "^C", "\"\"\"", "b", "^C", "c", "^C", "\"\"\"", "d"]);
        assert_eq!(events, [message("c"), Event::Interrupted, Event::End]);
        assert_eq!(prompts, ">.>..>>>..");
    }

    #[test]
    fn commands_are_checked() {
        let (events, _) = events(&["/help", "/system  Be  brief. ", "/system", "/retry ", "/exit"]);
        let system = |text: Option<&str>| Command::System(text.map(str::to_owned));
        let commands = [
            Command::Help,
            system(Some("Be  brief.")),
            system(None),
            Command::Retry,
            Command::Exit,
        ];
        assert_eq!(events[..5], commands.map(Event::Command));
        let (events, _) = self::events(&["/clear all", "/etc/passwd what is it"]);
        assert_eq!(events[0], Event::Bad("/clear takes nothing".to_owned()));
        assert!(matches!(&events[1], Event::Bad(text) if text.contains("no command /etc/passwd;")));
    }
}
