//! `quire chat`: a conversation, its answers streamed.

mod history;
mod input;

use crate::cli::ChatArgs;
use crate::conversation::{self, answer_request, refusal};
use crate::output::{Output, chain, one_line};
use crate::result_line::{error_line, result_line};
use crate::{Outcome, interrupt, load, params};
use anyhow::Context;
use history::{Fitted, History};
use input::{Command, Event, HELP, Input};
use quire_engine::text::chat::RenderOptions;
use quire_engine::{Engine, FinishReason, RequestError, RequestOutput, SamplingParams};
use serde_json::Value;

/// A conversation under way.
struct Session {
    engine: Engine,
    params: SamplingParams,
    /// Most tokens of an answer that the model's publisher recommends.
    recommended_tokens: Option<usize>,
    history: History,
    output: Output,
    json: bool,
    /// Messages so far.
    number: u64,
    /// There was a message without an answer.
    failed: bool,
}

/// Runs the command.
///
/// # Errors
/// An argument or the model is unusable, or the conversation could not go on.
pub fn run(args: &ChatArgs) -> anyhow::Result<Outcome> {
    let model = &args.model.model;
    let template = args.chat_template.as_deref().map(conversation::read_template).transpose()?;
    let mut setup = args.model.setup()?;
    let options = &mut setup.options;
    if !args.model.sets_num_seqs() {
        options.engine.max_num_seqs = 1;
    }
    let mut files = load::open(model)?;
    if let Some(template) = template {
        conversation::set_template(&mut files, model, template)?;
    }
    if files.text.chat_template.is_none() {
        return Err(refusal(RequestError::NoChatTemplate).context(model.display().to_string()));
    }
    let recommended = params::recommended(&files.generation, model)?;
    let engine = load::load(&files, options)?;
    engine.check_chat_template()?;
    // Unlike the continuation of a prompt an answer ends by itself.
    let mut params = SamplingParams { max_tokens: None, ..recommended.clone() };
    args.sampling.apply(&mut params);
    params::check(&params, &recommended, &engine.param_limits(), model)?;
    if !(args.quiet || args.json) {
        load::show(&engine, &setup);
    }
    let session = Session {
        engine,
        params,
        recommended_tokens: files.generation.max_new_tokens,
        history: History::new(args.system.clone()),
        output: Output::stdout(),
        json: args.json,
        number: 0,
        failed: false,
    };
    session.run(Input::new()?)
}

impl Session {
    fn run(mut self, mut input: Input) -> anyhow::Result<Outcome> {
        let interactive = input.is_interactive();
        if interactive {
            let context = self.engine.limits().max_model_len;
            crate::report(&format!("context of {context} tokens; /help lists the commands"));
        }
        loop {
            let interrupted = match input.next()? {
                Event::Message(text) => {
                    self.number += 1;
                    self.history.ask(text);
                    self.answer()?
                }
                Event::Command(Command::Exit) | Event::End => break,
                Event::Command(command) => self.command(command)?,
                Event::Bad(problem) if interactive => {
                    crate::report(&format!("error: {problem}"));
                    false
                }
                Event::Bad(problem) => {
                    self.number += 1;
                    self.fail(&problem)?;
                    false
                }
                // It may have been meant for an answer that has just ended.
                Event::Interrupted if interactive => {
                    crate::report("Ctrl-D or /exit ends the conversation");
                    false
                }
                Event::Interrupted => return Ok(Outcome::Interrupted),
            };
            if interrupted && !interactive {
                return Ok(Outcome::Interrupted);
            }
        }
        Ok(if self.failed { Outcome::Failed } else { Outcome::Done })
    }

    /// Returns whether Ctrl-C was pressed meanwhile.
    fn command(&mut self, command: Command) -> anyhow::Result<bool> {
        match command {
            Command::Help => crate::report(HELP.trim_end()),
            Command::Clear => self.history.clear(),
            Command::System(text) => self.history.system = text,
            Command::Retry if self.history.retry() => return self.answer(),
            Command::Retry => crate::report("error: there is no message to answer again"),
            Command::Exit => unreachable!("ends the loop"),
        }
        Ok(false)
    }

    /// Answers the last message; a message that cannot be answered is taken back. Returns whether
    /// Ctrl-C was pressed meanwhile, which ends the answer.
    fn answer(&mut self) -> anyhow::Result<bool> {
        interrupt::catch();
        let answer = self.generate();
        let interrupted = interrupt::release();
        match answer? {
            Ok(RequestOutput { finish_reason: FinishReason::Error(message), .. }) => {
                self.refuse(&message)?;
            }
            Ok(output) => {
                if self.json {
                    let tokenizer = &self.engine.text().tokenizer;
                    let line = result_line(&Value::Null, self.number, &output, tokenizer)?;
                    self.output.text(&(line + "\n"))?;
                } else if output.finish_reason == FinishReason::Length {
                    let tokens = output.token_ids.len();
                    crate::report(&format!("note: the answer was cut off after {tokens} tokens"));
                }
                self.history.answer(output.text);
            }
            Err(error) => self.refuse(&chain(&refusal(error)))?,
        }
        Ok(interrupted)
    }

    /// Runs the request for an answer and shows what comes.
    fn generate(&mut self) -> anyhow::Result<Result<RequestOutput, RequestError>> {
        let prompt = match self.prompt() {
            Ok(prompt) => prompt,
            Err(error) => return Ok(Err(error)),
        };
        let Fitted { prompt, left_out } = prompt;
        let mut request =
            answer_request(&self.engine, prompt, self.params.clone(), self.recommended_tokens);
        request.stream = !self.json;
        let id = match self.engine.add_request(request) {
            Ok(id) => id,
            Err(error) => return Ok(Err(error)),
        };
        if left_out > 0 {
            self.history.forget(left_out);
            let messages = match left_out {
                1 => "the oldest message and its answer are".to_owned(),
                _ => format!("the {left_out} oldest messages and their answers are"),
            };
            let context = self.engine.limits().max_model_len;
            crate::report(&format!(
                "note: the context of {context} tokens is full; {messages} left out from here on"
            ));
        }
        let mut shown = 0;
        let output = loop {
            if interrupt::requested()
                && let Some(output) = self.engine.abort(id).pop()
            {
                break output;
            }
            let mut step = self.engine.step().context("the engine failed")?;
            for delta in step.deltas {
                shown += delta.text.len();
                self.output.text(&delta.text)?;
            }
            if let Some(output) = step.finished.pop() {
                break output;
            }
        };
        if !self.json {
            let rest = output.text.get(shown..).unwrap_or_default();
            self.output.text(&format!("{rest}\n"))?;
        }
        Ok(Ok(output))
    }

    /// The prompt for an answer. It leaves as much of the context as the answer may have or, where
    /// nobody says, a quarter.
    fn prompt(&self) -> Result<Fitted, RequestError> {
        let context = self.engine.limits().max_model_len;
        let usual = context.div_ceil(4);
        let recommended = self.recommended_tokens.map_or(usual, |tokens| tokens.min(usual));
        let reserved = self.params.max_tokens.unwrap_or(recommended);
        let options = RenderOptions::default();
        self.history.fit(context.saturating_sub(reserved), |messages| {
            self.engine.encode_chat(messages, &options)
        })
    }

    /// Takes the last message back, which gets no answer.
    fn refuse(&mut self, message: &str) -> anyhow::Result<()> {
        self.history.take_back();
        self.fail(message)
    }

    /// Shows why a message gets no answer.
    fn fail(&mut self, message: &str) -> anyhow::Result<()> {
        self.failed = true;
        let message = one_line(message);
        crate::report(&format!("error: message {}: {message}", self.number));
        if self.json {
            let line = error_line(&Value::Null, &message, self.number);
            self.output.text(&(line + "\n"))?;
        }
        Ok(())
    }
}
