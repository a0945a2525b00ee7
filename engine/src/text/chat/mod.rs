//! Chat templates: from messages to the prompt that a model was trained on.
//!
//! ```text
//!   model files ── find_template ──▶ ChatTemplate        (Jinja, as Hugging Face configures it)
//!   request ── ChatMessage ──▶ ChatTemplate::render ──▶ ChatPrompt { text, … }
//!                                                            │ ChatTemplate::encode
//!                                                            ▼
//!                                                         token ids
//! ```
//!
//! Invariants:
//! * What a message, a tool or another argument of a request contains never becomes a control
//!   token, and never costs more than the limits below.
//! * A template that loops, grows or recurses ends with an error after a bounded amount of work
//!   and memory, on a thread of its own.
//! * A prompt begins with at most one BOS.
//!
//! Known differences from Jinja2: there is no unary plus; `"\/"` is `/`; a line break behind
//! `{% raw %}` is dropped; iterating `none` is iterating nothing; integers have 64 bits;
//! comparisons of constants of different types do not fail; `%` knows `%s`, `%d` and `%%`. A template
//! that fails on a message without content is rendered again with empty content.

mod clock;
mod compile;
mod encode;
mod env;
mod input;
mod lists;
mod marks;
mod message;
mod methods;
mod ops;
mod source;
mod value;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use minijinja::{AutoEscape, ErrorKind, machinery};
use serde_json::Value as Json;

use clock::DateTime;
pub use encode::control_tokens;
use input::Input;
use marks::{ControlTokens, Marks};
pub use message::{ChatMessage, Content};
pub use source::{FoundTemplate, TemplateFiles, find_template};

/// The longest template, in bytes.
pub const MAX_TEMPLATE_BYTES: usize = 1 << 20;

/// The most text that a request may have in all its messages and arguments, in bytes.
pub const MAX_INPUT_BYTES: usize = 16 << 20;

/// The longest prompt that a template may render, in bytes.
pub const MAX_PROMPT_BYTES: usize = 32 << 20;

/// What every rendering may use. One unit is one instruction, or 64 bytes of data.
const BASE_FUEL: u64 = 1_000_000;

/// What a rendering may use besides for each byte of input.
const FUEL_PER_INPUT_BYTE: u64 = 4;

/// What no rendering may pass: at 64 bytes a unit, a quarter of a GiB.
const MAX_FUEL: u64 = 4_000_000;

/// Stack of the thread that compiles and renders. Parser, code generator and values are recursive,
/// all to limited depth; this is several times what they need at their limits.
const STACK_BYTES: usize = 64 << 20;

/// What can go wrong with a chat template or the messages for it.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// A file of the model is not of the expected form.
    #[error("{file}: {reason}")]
    File {
        /// Its name.
        file: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The template is longer than [`MAX_TEMPLATE_BYTES`].
    #[error("the chat template has {bytes} bytes; the limit is {MAX_TEMPLATE_BYTES}")]
    TemplateTooLarge {
        /// Its length.
        bytes: usize,
    },
    /// The template does not compile.
    #[error("the chat template does not compile: {reason}")]
    Syntax {
        /// What the parser said, with the line.
        reason: String,
    },
    /// `messages` is not a list.
    #[error("messages is {kind}, not a list")]
    Messages {
        /// What it is.
        kind: &'static str,
    },
    /// A message is not of the expected form.
    #[error("{place} {reason}")]
    Message {
        /// Message and field, as in `messages[2].content`.
        place: String,
        /// What is wrong there.
        reason: String,
    },
    /// The template refused the messages: the text of its `raise_exception`.
    #[error("{0}")]
    Raised(String),
    /// The template failed on the messages.
    #[error("the chat template failed{}: {reason}", at_line(*line))]
    Render {
        /// Where in the template, if known.
        line: Option<usize>,
        /// What failed.
        reason: String,
    },
    /// The template used more work or memory than the request may cost.
    #[error("the chat template did not end within {fuel} steps")]
    TooMuchWork {
        /// The limit: one step is one instruction, or 64 bytes of data.
        fuel: u64,
    },
    /// The request is longer than [`MAX_INPUT_BYTES`].
    #[error("the messages and their arguments have {bytes} bytes; the limit is {MAX_INPUT_BYTES}")]
    InputTooLarge {
        /// The length up to where counting stopped.
        bytes: usize,
    },
    /// The request is nested too deeply.
    #[error("the messages or their arguments are nested more than {limit} levels deep")]
    InputTooDeep {
        /// The limit.
        limit: usize,
    },
    /// The prompt is longer than [`MAX_PROMPT_BYTES`].
    #[error("the chat template rendered {bytes} bytes; the limit is {MAX_PROMPT_BYTES}")]
    PromptTooLarge {
        /// Its length.
        bytes: usize,
    },
    /// An argument for the template has the name of something that the template always has.
    #[error("chat_template_kwargs must not set {0:?}")]
    ReservedArgument(String),
    /// Both a new answer and the continuation of the last one are asked for.
    #[error("add_generation_prompt and continue_final_message exclude each other")]
    Continuation,
    /// There is no last message with text to continue, or the template did not render it.
    #[error("continue_final_message: the last message {reason}")]
    FinalMessage {
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The request contains every private-use character of Unicode.
    #[error("the messages use all private-use characters; one must be left")]
    NoFreeCharacter,
    /// The system gives no thread to render on.
    #[error("cannot start a thread for the chat template: {0}")]
    Thread(#[from] std::io::Error),
}

fn at_line(line: Option<usize>) -> String {
    line.map_or(String::new(), |line| format!(" in line {line}"))
}

/// What a template knows of its model.
#[derive(Clone, Debug, Default)]
pub struct ChatTemplateOptions {
    /// Texts of special tokens by the names that templates use: `bos_token`, `eos_token`, ….
    pub special_tokens: BTreeMap<String, String>,
    /// Texts that must not come from a request; see [`control_tokens`].
    pub control_tokens: Vec<String>,
}

/// What a request asks of a template.
#[derive(Clone, Debug)]
pub struct RenderOptions<'a> {
    /// End with the start of an answer.
    pub add_generation_prompt: bool,
    /// End within the last message, so that the model goes on with it.
    pub continue_final_message: bool,
    /// Tools that the model may call.
    pub tools: Option<&'a [Json]>,
    /// Documents to answer from.
    pub documents: Option<&'a [Json]>,
    /// Further variables, such as `enable_thinking`.
    pub template_kwargs: serde_json::Map<String, Json>,
    /// What `strftime_now` takes for now, in UTC.
    pub now: SystemTime,
}

impl Default for RenderOptions<'_> {
    /// A new answer, without tools, now.
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            continue_final_message: false,
            tools: None,
            documents: None,
            template_kwargs: serde_json::Map::new(),
            now: SystemTime::now(),
        }
    }
}

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatPrompt {
    text: String,
    /// Bytes of `text` that come from the request and where a control token could start.
    outside: Vec<usize>,
}

impl ChatPrompt {
    /// The prompt as text. Encoding it as text would make control tokens of what a user spells
    /// like one; [`ChatTemplate::encode`] does not.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// A chat template that compiles.
#[derive(Debug)]
pub struct ChatTemplate {
    /// After the changes of [`compile::prepare`].
    source: String,
    special_tokens: BTreeMap<String, String>,
    control: ControlTokens,
}

impl ChatTemplate {
    /// Checks and takes a template.
    ///
    /// # Errors
    /// The source is longer than [`MAX_TEMPLATE_BYTES`] or does not compile.
    pub fn new(source: &str, options: ChatTemplateOptions) -> Result<Self, ChatError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            return Err(ChatError::TemplateTooLarge { bytes: source.len() });
        }
        let syntax = |e: minijinja::Error| ChatError::Syntax { reason: describe(&e) };
        let prepared = apart(|| {
            let prepared = compile::prepare(source)?;
            compile::compile(&prepared.source)?;
            Ok(prepared)
        })?
        .map_err(syntax)?;
        Ok(Self {
            source: prepared.source,
            special_tokens: options.special_tokens,
            control: ControlTokens::new(&options.control_tokens, &prepared.literals),
        })
    }

    /// Renders a conversation. Takes a fraction of a millisecond for usual templates, plus what
    /// the text costs; blocks for at most some hundred milliseconds.
    ///
    /// # Errors
    /// What the template refuses ([`ChatError::Raised`]), a template that fails or does not end,
    /// a limit, or options that exclude each other.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        options: &RenderOptions<'_>,
    ) -> Result<ChatPrompt, ChatError> {
        if options.add_generation_prompt && options.continue_final_message {
            return Err(ChatError::Continuation);
        }
        let prompt = self.render_once(messages, options);
        let has_null = messages.iter().any(|message| message.content == Content::Null);
        if !(has_null && matches!(prompt, Err(ChatError::Render { .. }))) {
            return prompt;
        }
        // Templates that put content together without a look take no content as empty content.
        let filled: Vec<ChatMessage> = messages.iter().map(ChatMessage::with_text).collect();
        self.render_once(&filled, options).or(prompt)
    }

    fn render_once(
        &self,
        messages: &[ChatMessage],
        options: &RenderOptions<'_>,
    ) -> Result<ChatPrompt, ChatError> {
        let input = Input { messages, options, special_tokens: &self.special_tokens };
        let (bytes, mut used) = input.measure()?;
        used.add(&self.source);
        let marks = Marks::new(&self.control, &used)?;
        let context = input.context(&marks);
        let now = DateTime::new(options.now);
        let fuel = (BASE_FUEL + FUEL_PER_INPUT_BYTE * bytes as u64).min(MAX_FUEL);
        let mut text = apart(|| evaluate(&self.source, context, now, fuel))?
            .map_err(|error| restore_error(error, &marks))?;
        if text.len() > MAX_PROMPT_BYTES {
            return Err(ChatError::PromptTooLarge { bytes: text.len() });
        }
        if options.continue_final_message {
            cut_after_final_message(&mut text, messages, &marks)?;
        }
        let (text, outside) = marks.restore(&text);
        Ok(ChatPrompt { text, outside })
    }
}

/// Runs `work` on a thread with a stack that its recursion fits in.
fn apart<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, ChatError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("quire-chat".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, work)?;
        thread.join().map_err(|_| ChatError::Render {
            line: None,
            reason: "the template engine panicked".to_owned(),
        })
    })
}

/// Renders a prepared template.
fn evaluate(
    source: &str,
    context: minijinja::Value,
    now: DateTime,
    fuel: u64,
) -> Result<String, ChatError> {
    let raised = env::Raised::default();
    let mut text = String::new();
    let result = (|| {
        let environment = env::environment(fuel, now, &raised);
        let instructions = compile::compile(source)?;
        let blocks = BTreeMap::new();
        let mut out = machinery::make_string_output(&mut text);
        machinery::eval(&environment, &instructions, context, &blocks, &mut out, AutoEscape::None)
            .map(drop)
    })();
    match result {
        Ok(()) => Ok(text),
        Err(_) if raised.get().is_some() => {
            Err(ChatError::Raised(Arc::unwrap_or_clone(raised).into_inner().unwrap_or_default()))
        }
        Err(error) if is_out_of_fuel(&error) => Err(ChatError::TooMuchWork { fuel }),
        Err(error) => {
            Err(ChatError::Render { line: error.line(), reason: reason(&error).to_owned() })
        }
    }
}

/// Whether the fuel ran out, be it in something that reported another error for it.
fn is_out_of_fuel(error: &minijinja::Error) -> bool {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if error.downcast_ref().is_some_and(|e: &minijinja::Error| e.kind() == ErrorKind::OutOfFuel)
        {
            return true;
        }
        next = error.source();
    }
    false
}

fn reason(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => detail.to_owned(),
        None => error.kind().to_string(),
    }
}

fn describe(error: &minijinja::Error) -> String {
    reason(error) + &at_line(error.line())
}

fn restore_error(error: ChatError, marks: &Marks<'_>) -> ChatError {
    let restore = |text: &str| marks.restore(text).0;
    match error {
        ChatError::Raised(message) => ChatError::Raised(restore(&message)),
        ChatError::Render { line, reason } => ChatError::Render { line, reason: restore(&reason) },
        other => other,
    }
}

/// Cuts `text` after the text of the last message, with the white space at its end if the template
/// kept it.
fn cut_after_final_message(
    text: &mut String,
    messages: &[ChatMessage],
    marks: &Marks<'_>,
) -> Result<(), ChatError> {
    let fault = |reason| ChatError::FinalMessage { reason };
    let message = messages.last().ok_or_else(|| fault("does not exist"))?;
    let Content::Text(content) = &message.content else {
        return Err(fault("has no text"));
    };
    let content = marks.mark(content);
    let trimmed = content.trim();
    let at = text.rfind(trimmed).ok_or_else(|| fault("does not occur in the rendered text"))?;
    let kept = content.trim_start();
    let length = if text[at..].starts_with(kept) { kept.len() } else { trimmed.len() };
    text.truncate(at + length);
    Ok(())
}

#[cfg(test)]
mod tests;
