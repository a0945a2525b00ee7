//! A request as the variables of a template.

use std::collections::BTreeMap;

use minijinja::Value;
use serde_json::Value as Json;

use super::marks::{Marks, PrivateUse};
use super::{ChatError, ChatMessage, Content, MAX_INPUT_BYTES, RenderOptions};

/// The deepest nesting of a request, as of a JSON text.
const MAX_DEPTH: usize = 128;

/// What a node of JSON counts for, besides its text, in bytes.
const NODE_BYTES: usize = 8;

/// Variables that a request cannot set itself.
const RESERVED: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

/// All that a template is rendered with.
pub struct Input<'a> {
    pub messages: &'a [ChatMessage],
    pub options: &'a RenderOptions<'a>,
    pub special_tokens: &'a BTreeMap<String, String>,
}

impl Input<'_> {
    /// The size of the input in bytes, and the private-use characters in it.
    pub fn measure(&self) -> Result<(usize, PrivateUse), ChatError> {
        let mut measure = Measure::default();
        for message in self.messages {
            measure.message(message)?;
        }
        let options = self.options;
        for json in options.tools.into_iter().chain(options.documents).flatten() {
            measure.json(json, 0)?;
        }
        for (key, value) in &options.template_kwargs {
            if RESERVED.contains(&key.as_str()) || self.special_tokens.contains_key(key) {
                return Err(ChatError::ReservedArgument(key.clone()));
            }
            measure.text(key)?;
            measure.json(value, 0)?;
        }
        self.special_tokens.values().for_each(|token| measure.used.add(token));
        Ok((measure.bytes, measure.used))
    }

    /// The variables, with everything from the request marked.
    pub fn context(&self, marks: &Marks<'_>) -> Value {
        let options = self.options;
        let list = |list: &[Json]| list.iter().map(|json| value(json, marks)).collect::<Vec<_>>();
        let optional = |items: Option<&[Json]>| items.map_or(Value::from(()), |l| list(l).into());
        let messages: Vec<_> = self.messages.iter().map(|m| message_value(m, marks)).collect();
        let tokens =
            self.special_tokens.iter().map(|(key, token)| (key.clone(), Value::from(token)));
        let kwargs =
            options.template_kwargs.iter().map(|(key, json)| (key.clone(), value(json, marks)));
        let own = [
            ("messages", Value::from(messages)),
            ("tools", optional(options.tools)),
            ("documents", optional(options.documents)),
            ("add_generation_prompt", Value::from(options.add_generation_prompt)),
        ];
        let own = own.map(|(key, value)| (key.to_owned(), value));
        Value::from_pairs(tokens.chain(kwargs).chain(own))
    }
}

#[derive(Default)]
struct Measure {
    bytes: usize,
    used: PrivateUse,
}

impl Measure {
    fn message(&mut self, message: &ChatMessage) -> Result<(), ChatError> {
        self.text(&message.role)?;
        if let Content::Text(text) = &message.content {
            self.text(text)?;
        }
        let texts = [&message.name, &message.tool_call_id, &message.reasoning_content];
        for text in texts.into_iter().flatten() {
            self.text(text)?;
        }
        for call in &message.tool_calls {
            self.json(call, 0)?;
        }
        for (key, value) in &message.extra {
            self.text(key)?;
            self.json(value, 0)?;
        }
        Ok(())
    }

    fn json(&mut self, json: &Json, depth: usize) -> Result<(), ChatError> {
        if depth > MAX_DEPTH {
            return Err(ChatError::InputTooDeep { limit: MAX_DEPTH });
        }
        self.count(0)?;
        match json {
            Json::String(text) => self.text(text),
            Json::Array(items) => items.iter().try_for_each(|item| self.json(item, depth + 1)),
            Json::Object(fields) => fields.iter().try_for_each(|(key, value)| {
                self.text(key)?;
                self.json(value, depth + 1)
            }),
            Json::Null | Json::Bool(_) | Json::Number(_) => Ok(()),
        }
    }

    fn text(&mut self, text: &str) -> Result<(), ChatError> {
        self.used.add(text);
        self.count(text.len())
    }

    fn count(&mut self, bytes: usize) -> Result<(), ChatError> {
        self.bytes += NODE_BYTES + bytes;
        if self.bytes > MAX_INPUT_BYTES {
            return Err(ChatError::InputTooLarge { bytes: self.bytes });
        }
        Ok(())
    }
}

/// A message with the fields that it has; absent ones are undefined in the template.
fn message_value(message: &ChatMessage, marks: &Marks<'_>) -> Value {
    let text = |text: &String| Value::from(marks.mark(text));
    let content = match &message.content {
        Content::Null => Value::from(()),
        Content::Text(content) => text(content),
    };
    let mut fields = vec![("role", text(&message.role)), ("content", content)];
    fields.extend(message.name.as_ref().map(|name| ("name", text(name))));
    if !message.tool_calls.is_empty() {
        let calls: Vec<_> = message.tool_calls.iter().map(|call| value(call, marks)).collect();
        fields.push(("tool_calls", Value::from(calls)));
    }
    fields.extend(message.tool_call_id.as_ref().map(|id| ("tool_call_id", text(id))));
    let reasoning = message.reasoning_content.as_ref();
    fields.extend(reasoning.map(|reasoning| ("reasoning_content", text(reasoning))));
    let fields = fields.into_iter().map(|(key, value)| (key.to_owned(), value));
    let extra = message.extra.iter().map(|(key, json)| (marks.mark(key), value(json, marks)));
    Value::from_pairs(fields.chain(extra))
}

fn value(json: &Json, marks: &Marks<'_>) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Value::from(number),
            (None, Some(number)) => Value::from(number),
            // Every other number of `serde_json` is a float.
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(marks.mark(text)),
        Json::Array(items) => items.iter().map(|item| value(item, marks)).collect(),
        Json::Object(fields) => Value::from_pairs(
            fields.iter().map(|(key, json)| (marks.mark(key), value(json, marks))),
        ),
    }
}
