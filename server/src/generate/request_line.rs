//! One line of a JSONL input: a request in strict JSON.
//!
//! Every field has one type; what is unknown, doubled, or not supported is an error that names
//! it, since a misspelt parameter that is silently ignored gives wrong results. A field that is
//! null counts as not given. Ranges are checked by the engine.

use crate::conversation::Conversation;
use crate::output::cut;
use quire_engine::engine::Prompt;
use quire_engine::sampling::{EarlyStopping, NumLogprobs};
use quire_engine::text::chat::ChatMessage;
use quire_engine::{Request, SamplingParams};
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use std::fmt;

/// Longest id, in bytes.
const MAX_ID_BYTES: usize = 1024;

/// Fields that say what to continue; a line has one of them.
const PROMPT_FIELDS: [&str; 3] = ["prompt", "prompt_token_ids", "messages"];

/// Fields that say how messages become a prompt.
const CHAT_FIELDS: [&str; 3] =
    ["chat_template_kwargs", "add_generation_prompt", "continue_final_message"];

/// Sampling parameters that a line may set.
const SAMPLING_FIELDS: &[&str] = &[
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "allowed_token_ids",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
    "use_beam_search",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "priority",
    "cache_salt",
];

/// Fields that other engines know.
const NOT_SUPPORTED: &[&str] = &[
    "best_of",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "response_format",
    "tools",
    "tool_choice",
    "documents",
    "stream",
    "echo",
    "suffix",
];

/// A line as far as it could be read.
#[derive(Debug, PartialEq)]
pub struct RequestLine {
    /// Null where the line has none, or none that could be read.
    pub id: Value,
    /// The request, or what is wrong with it.
    pub request: Result<LineRequest, String>,
}

/// What a line asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct LineRequest {
    /// What to continue.
    pub input: LineInput,
    /// How.
    pub params: SamplingParams,
}

impl From<Request> for LineRequest {
    fn from(request: Request) -> Self {
        LineRequest { input: LineInput::Prompt(request.prompt), params: request.params }
    }
}

/// What a line gives to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum LineInput {
    /// A prompt.
    Prompt(Prompt),
    /// Messages, which the chat template makes a prompt.
    Chat(Box<Conversation>),
}

/// What holds where a line does not say otherwise.
#[derive(Clone, Debug)]
pub struct Defaults {
    /// For prompts.
    pub prompt: SamplingParams,
    /// For messages; without `max_tokens`, their number follows from the context.
    pub chat: SamplingParams,
}

/// Reads a line; `defaults` holds what it does not say.
pub fn parse_line(text: &str, defaults: &Defaults) -> RequestLine {
    parse_line_with([], text, defaults).0
}

/// The same for a line that may have the fields `more`, too; their values come with it, null where
/// they are absent.
pub fn parse_line_with<const N: usize>(
    more: [&str; N],
    text: &str,
    defaults: &Defaults,
) -> (RequestLine, [Value; N]) {
    // The parser counts columns from the last line break.
    let text = text.trim_end_matches(['\r', '\n']);
    let mut parser = serde_json::Deserializer::from_str(text);
    let fields = FieldsSeed { more: &more }.deserialize(&mut parser);
    match fields.and_then(|fields| parser.end().map(|()| fields)) {
        Ok(mut fields) => {
            let more = more.map(|name| fields.take(name));
            (read_fields(fields, defaults), more)
        }
        Err(e) => {
            let line = RequestLine { id: Value::Null, request: Err(syntax_error(&e, text)) };
            (line, more.map(|_| Value::Null))
        }
    }
}

fn read_fields(Fields { known, problem }: Fields, defaults: &Defaults) -> RequestLine {
    let id = known.iter().find(|(name, _)| name == "id").map_or(&Value::Null, |(_, id)| id);
    let (id, id_problem) = match check_id(id) {
        Ok(()) => (id.clone(), None),
        Err(problem) => (Value::Null, Some(problem)),
    };
    let request = match id_problem.or(problem) {
        Some(problem) => Err(problem),
        None => request(&known, defaults),
    };
    RequestLine { id, request }
}

/// A line's fields.
struct Fields {
    /// Those with a meaning, in the order of the line, each once.
    known: Vec<(String, Value)>,
    /// What is wrong with the first of the others, which are not kept.
    problem: Option<String>,
}

/// Reads [`Fields`], of which `more` have a meaning beside those of every line.
struct FieldsSeed<'a> {
    more: &'a [&'a str],
}

impl<'de> DeserializeSeed<'de> for FieldsSeed<'_> {
    type Value = Fields;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Fields, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FieldsSeed<'_> {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
        let mut fields = Fields { known: Vec::new(), problem: None };
        while let Some(name) = map.next_key::<String>()? {
            // Numbers out of range and NaN end here; the message names their field.
            fields
                .read(&name, self.more, &mut map)
                .map_err(|e| A::Error::custom(format!("field {}: {e}", shown(&name))))?;
        }
        Ok(fields)
    }
}

impl Fields {
    /// Takes a field's value out; null where it is absent.
    fn take(&mut self, name: &str) -> Value {
        let at = self.known.iter().position(|(other, _)| other == name);
        at.map_or(Value::Null, |at| self.known.remove(at).1)
    }

    /// Reads the value of field `name`.
    fn read<'de, A: MapAccess<'de>>(
        &mut self,
        name: &str,
        more: &[&str],
        map: &mut A,
    ) -> Result<(), A::Error> {
        let problem = if !is_known(name) && !more.contains(&name) {
            let given = map.next_value::<Option<IgnoredAny>>()?.is_some();
            match NOT_SUPPORTED.contains(&name) {
                true => given.then(|| format!("field {name:?} is not supported")),
                false => Some(unknown(name, more)),
            }
        } else if self.known.iter().any(|(other, _)| other == name) {
            map.next_value::<IgnoredAny>()?;
            Some(format!("field {name:?} is there twice"))
        } else {
            self.known.push((name.to_owned(), map.next_value()?));
            None
        };
        self.problem = self.problem.take().or(problem);
        Ok(())
    }
}

fn is_known(name: &str) -> bool {
    name == "id"
        || [&PROMPT_FIELDS[..], &CHAT_FIELDS, SAMPLING_FIELDS].iter().any(|set| set.contains(&name))
}

fn unknown(name: &str, more: &[&str]) -> String {
    format!(
        "unknown field {}; a line has {}, one of {}, with messages {}, and of the sampling \
         parameters {}",
        shown(name),
        [&["id"], more].concat().join(", "),
        PROMPT_FIELDS.join(", "),
        CHAT_FIELDS.join(", "),
        SAMPLING_FIELDS.join(", ")
    )
}

/// What the parser says, with the column and the text there instead of "line 1".
fn syntax_error(error: &serde_json::Error, text: &str) -> String {
    let (message, column) = (error.to_string(), error.column());
    let place = format!(" at line {} column {column}", error.line());
    let mut shown =
        format!("not a valid request: {}", message.strip_suffix(&place).unwrap_or(&message));
    if column > 0 {
        shown.push_str(&format!(" at column {column}"));
    }
    let near = token_at(text, column);
    if !near.is_empty() {
        shown.push_str(&format!(", near {}", cut(&near, MAX_SHOWN_CHARS)));
    }
    // A list of requests, or one object over several lines.
    if error.is_eof() || !text.trim_start().starts_with('{') {
        shown.push_str("; one JSON object a line (JSONL) is expected");
    }
    shown
}

/// What stands around a column, counted in bytes from 1, up to the delimiters.
fn token_at(text: &str, column: usize) -> String {
    let delimiter = |b: &u8| b" \t,:[]{}".contains(b);
    let bytes = text.as_bytes();
    let at = column.saturating_sub(1).min(bytes.len());
    let start = bytes[..at].iter().rposition(delimiter).map_or(0, |i| i + 1);
    let end = bytes[at..].iter().position(delimiter).map_or(bytes.len(), |i| at + i);
    String::from_utf8_lossy(&bytes[start..end]).into_owned()
}

fn check_id(id: &Value) -> Result<(), String> {
    // Beyond 2^53 a number would come back as another one.
    let exact = |n: &serde_json::Number| !n.is_f64() || n.as_f64().is_some_and(|x| x.abs() < 9e15);
    match id {
        Value::String(text) if text.len() > MAX_ID_BYTES => {
            Err(format!("id must be at most {MAX_ID_BYTES} bytes, got {} bytes", text.len()))
        }
        Value::Null | Value::String(_) => Ok(()),
        Value::Number(n) if exact(n) => Ok(()),
        other => Err(wrong("id", "a string or a number below 9e15", other)),
    }
}

fn request(fields: &[(String, Value)], defaults: &Defaults) -> Result<LineRequest, String> {
    let given = || fields.iter().filter(|(_, value)| !value.is_null());
    let has = |name: &str| given().any(|(other, _)| other == name);
    let inputs: Vec<&str> = PROMPT_FIELDS.into_iter().filter(|name| has(name)).collect();
    let is_chat = inputs.contains(&"messages");
    if let Some(name) = CHAT_FIELDS.iter().find(|name| !is_chat && has(name)) {
        return Err(format!("{name:?} is given without \"messages\""));
    }
    let mut params = if is_chat { defaults.chat.clone() } else { defaults.prompt.clone() };
    let mut input = None;
    for (name, value) in given().filter(|(name, _)| name != "id") {
        match name.as_str() {
            "prompt" => {
                input = Some(LineInput::Prompt(Prompt::Text(string(name, value)?)));
            }
            "prompt_token_ids" => {
                input = Some(LineInput::Prompt(Prompt::Tokens(ids(name, value)?)))
            }
            "messages" => input = Some(LineInput::Chat(Box::new(conversation(fields, value)?))),
            name if CHAT_FIELDS.contains(&name) => {}
            name => set(&mut params, name, value)?,
        }
    }
    if inputs.len() > 1 {
        return Err(format!("both {:?} and {:?} are given", inputs[0], inputs[1]));
    }
    let input = input.ok_or_else(|| {
        let [prompt, ids, messages] = PROMPT_FIELDS;
        format!("none of {prompt:?}, {ids:?} and {messages:?} is given")
    })?;
    Ok(LineRequest { input, params })
}

/// The messages of a line with what [`CHAT_FIELDS`] say.
fn conversation(fields: &[(String, Value)], messages: &Value) -> Result<Conversation, String> {
    let field = |name: &str| {
        let found = fields.iter().find(|(other, value)| other == name && !value.is_null());
        found.map(|(_, value)| value)
    };
    let flag = |name| field(name).map(|value| boolean(name, value)).transpose();
    let Value::Array(messages) = messages else {
        let rule = "a list of messages, such as [{\"role\": \"user\", \"content\": \"…\"}]";
        return Err(wrong("messages", rule, messages));
    };
    if messages.is_empty() {
        return Err("messages must not be empty".to_owned());
    }
    let read = |(i, message)| ChatMessage::from_json(i, message).map_err(|e| e.to_string());
    let continue_final_message = flag("continue_final_message")?.unwrap_or(false);
    Ok(Conversation {
        messages: messages.iter().enumerate().map(read).collect::<Result<_, _>>()?,
        add_generation_prompt: flag("add_generation_prompt")?.unwrap_or(!continue_final_message),
        continue_final_message,
        template_kwargs: match field("chat_template_kwargs") {
            None => serde_json::Map::new(),
            Some(Value::Object(kwargs)) => kwargs.clone(),
            Some(other) => return Err(wrong("chat_template_kwargs", "an object", other)),
        },
    })
}

/// Sets one of [`SAMPLING_FIELDS`] to a value that is not null.
fn set(params: &mut SamplingParams, name: &str, value: &Value) -> Result<(), String> {
    match name {
        "n" => params.n = whole(name, value, 1)?,
        "presence_penalty" => params.presence_penalty = float(name, value)?,
        "frequency_penalty" => params.frequency_penalty = float(name, value)?,
        "repetition_penalty" => params.repetition_penalty = float(name, value)?,
        "bad_words" => params.bad_words = strings(name, value)?,
        "allowed_token_ids" => params.allowed_token_ids = Some(ids(name, value)?),
        "logit_bias" => params.logit_bias = bias(name, value)?,
        "prompt_logprobs" => params.prompt_logprobs = Some(num_logprobs(name, value)?),
        // Decoding never puts spaces between special tokens of its own accord.
        "spaces_between_special_tokens" => drop(boolean(name, value)?),
        "max_tokens" => params.max_tokens = Some(whole(name, value, 1)?),
        "min_tokens" => params.min_tokens = whole(name, value, 0)?,
        "temperature" => params.temperature = float(name, value)?,
        "top_k" => params.top_k = top_k(name, value)?,
        "top_p" => params.top_p = float(name, value)?,
        "min_p" => params.min_p = float(name, value)?,
        "seed" => params.seed = Some(whole(name, value, 0)?),
        "stop" => params.stop = strings(name, value)?,
        "stop_token_ids" => params.stop_token_ids = ids(name, value)?,
        "include_stop_str_in_output" => params.include_stop_str_in_output = boolean(name, value)?,
        "ignore_eos" => params.ignore_eos = boolean(name, value)?,
        "logprobs" => params.logprobs = Some(num_logprobs(name, value)?),
        "skip_special_tokens" => params.skip_special_tokens = boolean(name, value)?,
        "detokenize" => params.detokenize = boolean(name, value)?,
        "use_beam_search" => params.use_beam_search = boolean(name, value)?,
        "beam_width" => params.beam_width = Some(whole(name, value, 1)?),
        "length_penalty" => params.length_penalty = float(name, value)?,
        "early_stopping" => params.early_stopping = early_stopping(name, value)?,
        "priority" => params.priority = priority(name, value)?,
        "cache_salt" => params.cache_salt = Some(string(name, value)?),
        _ => unreachable!("{name} is none of the fields that are kept"),
    }
    Ok(())
}

fn whole<T: TryFrom<u64>>(name: &str, value: &Value, least: u64) -> Result<T, String> {
    let number = value.as_u64().filter(|&n| n >= least).and_then(|n| T::try_from(n).ok());
    let most = u64::MAX >> (64 - 8 * size_of::<T>());
    number.ok_or_else(|| wrong(name, &format!("a whole number from {least} to {most}"), value))
}

fn float(name: &str, value: &Value) -> Result<f32, String> {
    let number = value.as_f64().map(|x| x as f32).filter(|x| x.is_finite());
    number.ok_or_else(|| wrong(name, "a number within the range of 32-bit floats", value))
}

fn top_k(name: &str, value: &Value) -> Result<u32, String> {
    if value.as_i64() == Some(-1) {
        return Ok(0);
    }
    let k = value.as_u64().and_then(|k| u32::try_from(k).ok());
    k.ok_or_else(|| wrong(name, &format!("a whole number from -1 to {}", u32::MAX), value))
}

fn num_logprobs(name: &str, value: &Value) -> Result<NumLogprobs, String> {
    if value.as_i64() == Some(-1) {
        return Ok(NumLogprobs::All);
    }
    let n = value.as_u64().and_then(|n| u32::try_from(n).ok());
    let rule = format!("a whole number from -1 to {}", u32::MAX);
    n.map(NumLogprobs::Top).ok_or_else(|| wrong(name, &rule, value))
}

fn early_stopping(name: &str, value: &Value) -> Result<EarlyStopping, String> {
    match value {
        Value::Bool(false) => Ok(EarlyStopping::Heuristic),
        Value::Bool(true) => Ok(EarlyStopping::Always),
        Value::String(text) if text == "never" => Ok(EarlyStopping::Never),
        other => Err(wrong(name, "true, false or \"never\"", other)),
    }
}

fn priority(name: &str, value: &Value) -> Result<i32, String> {
    let number = value.as_i64().and_then(|n| i32::try_from(n).ok());
    let rule = format!("a whole number from {} to {}", i32::MIN, i32::MAX);
    number.ok_or_else(|| wrong(name, &rule, value))
}

fn string(name: &str, value: &Value) -> Result<String, String> {
    value.as_str().map(str::to_owned).ok_or_else(|| wrong(name, "a string", value))
}

/// An object of token ids (as JSON keys, so strings) and numbers.
fn bias(name: &str, value: &Value) -> Result<Vec<(u32, f32)>, String> {
    let rule = "an object of token ids and numbers, such as {\"17\": -1.5}";
    let Value::Object(entries) = value else { return Err(wrong(name, rule, value)) };
    let entry = |(id, bias): (&String, &Value)| {
        let id = id.parse().map_err(|_| wrong(name, rule, &Value::String(id.clone())))?;
        Ok((id, float(name, bias)?))
    };
    entries.iter().map(entry).collect()
}

fn boolean(name: &str, value: &Value) -> Result<bool, String> {
    value.as_bool().ok_or_else(|| wrong(name, "true or false", value))
}

fn strings(name: &str, value: &Value) -> Result<Vec<String>, String> {
    let rule = "a string or a list of strings";
    match value {
        Value::String(one) => Ok(vec![one.clone()]),
        Value::Array(all) => {
            let string = |item: &Value| item.as_str().map(str::to_owned);
            all.iter().map(|item| string(item).ok_or_else(|| wrong(name, rule, item))).collect()
        }
        other => Err(wrong(name, rule, other)),
    }
}

fn ids(name: &str, value: &Value) -> Result<Vec<u32>, String> {
    let rule = format!("a list of token ids, whole numbers from 0 to {}", u32::MAX);
    let Value::Array(items) = value else { return Err(wrong(name, &rule, value)) };
    let id = |item: &Value| item.as_u64().and_then(|id| u32::try_from(id).ok());
    items.iter().map(|item| id(item).ok_or_else(|| wrong(name, &rule, item))).collect()
}

fn wrong(field: &str, rule: &str, value: &Value) -> String {
    format!("{field} must be {rule}, got {}", cut(&value.to_string(), MAX_SHOWN_CHARS))
}

/// Most characters shown of a name or value.
const MAX_SHOWN_CHARS: usize = 60;

/// A field's name, quoted and cut to a length a message can hold.
fn shown(name: &str) -> String {
    cut(&format!("{name:?}"), MAX_SHOWN_CHARS)
}

#[cfg(test)]
#[path = "request_line_tests.rs"]
mod tests;
