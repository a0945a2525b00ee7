//! The messages of a conversation, checked.

use serde_json::{Map, Value};

use super::ChatError;

/// What a message says.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Nothing: null, or not there at all, as beside `tool_calls`.
    Null,
    /// Text. Text given in parts is joined by line breaks, as templates for text models expect.
    Text(String),
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatMessage {
    /// Who speaks: `system`, `user`, `assistant`, `tool`, or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: Content,
    /// The speaker's name, or the tool's.
    pub name: Option<String>,
    /// The calls of an assistant; `arguments` that are a string of JSON have become an object.
    pub tool_calls: Vec<Value>,
    /// The call that a tool answers.
    pub tool_call_id: Option<String>,
    /// What a reasoning model thought before it spoke.
    pub reasoning_content: Option<String>,
    /// All other fields, for the template as they are.
    pub extra: Map<String, Value>,
}

impl ChatMessage {
    /// A message of text alone.
    pub fn new(role: impl Into<String>, text: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: Content::Text(text.into()),
            name: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            reasoning_content: None,
            extra: Map::new(),
        }
    }

    /// The message with empty text where it has no content.
    pub(super) fn with_text(&self) -> Self {
        let content = match &self.content {
            Content::Null => Content::Text(String::new()),
            text => text.clone(),
        };
        Self { content, ..self.clone() }
    }

    /// Reads message number `index` of a request.
    ///
    /// # Errors
    /// A field that is missing or of the wrong type, or content that is no text; the error names
    /// message and field.
    pub fn from_json(index: usize, json: &Value) -> Result<Self, ChatError> {
        let reader = Reader { index };
        let Value::Object(fields) = json else {
            return Err(reader.error("", format!("is {}, not an object", kind(json))));
        };
        let mut fields = fields.clone();
        let mut take = |name: &str| fields.remove(name).unwrap_or(Value::Null);
        let role = reader.text("role", take("role"))?;
        let role = role.ok_or_else(|| reader.error("role", "is missing".to_owned()))?;
        Ok(Self {
            role,
            content: reader.content(take("content"))?,
            name: reader.text("name", take("name"))?,
            tool_calls: reader.tool_calls(take("tool_calls"))?,
            tool_call_id: reader.text("tool_call_id", take("tool_call_id"))?,
            reasoning_content: reader.text("reasoning_content", take("reasoning_content"))?,
            extra: fields,
        })
    }

    /// Reads the `messages` of a request.
    ///
    /// # Errors
    /// It is no list, or a message is wrong, as [`ChatMessage::from_json`] says.
    pub fn list_from_json(json: &Value) -> Result<Vec<Self>, ChatError> {
        let Value::Array(messages) = json else {
            return Err(ChatError::Messages { kind: kind(json) });
        };
        messages.iter().enumerate().map(|(i, message)| Self::from_json(i, message)).collect()
    }
}

/// Reads the fields of one message.
struct Reader {
    index: usize,
}

impl Reader {
    fn error(&self, field: impl Into<String>, reason: String) -> ChatError {
        let field = field.into();
        let separator = if field.is_empty() { "" } else { "." };
        ChatError::Message { place: format!("messages[{}]{separator}{field}", self.index), reason }
    }

    fn text(&self, field: &str, value: Value) -> Result<Option<String>, ChatError> {
        match value {
            Value::Null => Ok(None),
            Value::String(text) => Ok(Some(text)),
            other => Err(self.error(field, format!("is {}, not a string", kind(&other)))),
        }
    }

    fn content(&self, value: Value) -> Result<Content, ChatError> {
        match value {
            Value::Null => Ok(Content::Null),
            Value::String(text) => Ok(Content::Text(text)),
            Value::Array(parts) => {
                let texts: Result<Vec<_>, _> =
                    parts.into_iter().enumerate().map(|(i, part)| self.part(i, part)).collect();
                Ok(Content::Text(texts?.join("\n")))
            }
            other => {
                let reason = format!("is {}, not a string, null or a list of parts", kind(&other));
                Err(self.error("content", reason))
            }
        }
    }

    fn part(&self, index: usize, part: Value) -> Result<String, ChatError> {
        let place = format!("content[{index}]");
        let mut part = match part {
            Value::String(text) => return Ok(text),
            Value::Object(part) => part,
            other => return Err(self.error(place, format!("is {}, not a part", kind(&other)))),
        };
        let part_type = part.remove("type").unwrap_or(Value::Null);
        let field = match part_type.as_str() {
            Some("text" | "input_text" | "output_text") => "text",
            Some("refusal") => "refusal",
            Some(other) => {
                let reason = format!("has type {other:?}; this model reads text only");
                return Err(self.error(place, reason));
            }
            None => {
                let reason = format!("is {}, not a string", kind(&part_type));
                return Err(self.error(format!("{place}.type"), reason));
            }
        };
        let place = format!("{place}.{field}");
        let text = self.text(&place, part.remove(field).unwrap_or(Value::Null))?;
        text.ok_or_else(|| self.error(place, "is missing".to_owned()))
    }

    fn tool_calls(&self, value: Value) -> Result<Vec<Value>, ChatError> {
        match value {
            Value::Null => Ok(Vec::new()),
            Value::Array(calls) => {
                calls.into_iter().enumerate().map(|(i, call)| self.tool_call(i, call)).collect()
            }
            other => Err(self.error("tool_calls", format!("is {}, not a list", kind(&other)))),
        }
    }

    fn tool_call(&self, index: usize, mut call: Value) -> Result<Value, ChatError> {
        let place = format!("tool_calls[{index}]");
        if !call.is_object() {
            return Err(self.error(place, format!("is {}, not an object", kind(&call))));
        }
        let function = call.get_mut("function").and_then(Value::as_object_mut);
        let Some(function) = function else {
            return Err(self.error(format!("{place}.function"), "is not an object".to_owned()));
        };
        if !function.get("name").is_some_and(Value::is_string) {
            let place = format!("{place}.function.name");
            return Err(self.error(place, "is not a string".to_owned()));
        }
        match function.get_mut("arguments") {
            None => {}
            Some(Value::Object(_)) => {}
            Some(arguments @ Value::Null) => *arguments = Value::Object(Map::new()),
            Some(arguments @ Value::String(_)) => {
                if let Some(parsed) = arguments.as_str().and_then(parse_arguments) {
                    *arguments = parsed;
                }
            }
            Some(other) => {
                let reason = format!("is {}, not an object or a string", kind(other));
                return Err(self.error(format!("{place}.function.arguments"), reason));
            }
        }
        Ok(call)
    }
}

/// Arguments as an object; none if the string is no JSON object, and stays what it is.
fn parse_arguments(text: &str) -> Option<Value> {
    if text.trim().is_empty() {
        return Some(Value::Object(Map::new()));
    }
    serde_json::from_str(text).ok().filter(Value::is_object)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a bool",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn content(content: Value) -> Result<Content, String> {
        ChatMessage::from_json(3, &json!({"role": "tool", "content": content}))
            .map(|message| message.content)
            .map_err(|e| e.to_string())
    }

    #[test]
    fn content_is_text_null_or_parts() {
        assert_eq!(content(json!("a")).unwrap(), Content::Text("a".into()));
        assert_eq!(content(json!(null)).unwrap(), Content::Null);
        let parts = json!([{"type": "text", "text": "42"}, "43"]);
        assert_eq!(content(parts).unwrap(), Content::Text("42\n43".into()));
        assert_eq!(content(json!([])).unwrap(), Content::Text(String::new()));
        let absent = ChatMessage::from_json(0, &json!({"role": "assistant"})).unwrap();
        assert_eq!(absent.content, Content::Null);
    }

    #[test]
    fn wrong_content_is_named() {
        let wrong = |value| content(value).unwrap_err();
        assert_eq!(
            wrong(json!(7)),
            "messages[3].content is a number, not a string, null or a list of parts"
        );
        assert_eq!(
            wrong(json!([{"type": "image_url", "image_url": {"url": "http://x"}}])),
            "messages[3].content[0] has type \"image_url\"; this model reads text only"
        );
        assert_eq!(
            wrong(json!([{"type": "text", "text": "a"}, {"type": "text"}])),
            "messages[3].content[1].text is missing"
        );
        assert_eq!(
            wrong(json!([{"text": "a"}])),
            "messages[3].content[0].type is null, not a string"
        );
    }

    #[test]
    fn wrong_fields_are_named() {
        let wrong = |message| ChatMessage::from_json(1, &message).unwrap_err().to_string();
        assert_eq!(wrong(json!("hi")), "messages[1] is a string, not an object");
        assert_eq!(wrong(json!({"content": "a"})), "messages[1].role is missing");
        assert_eq!(wrong(json!({"role": 1})), "messages[1].role is a number, not a string");
        assert_eq!(
            wrong(json!({"role": "a", "tool_calls": [{"function": {"name": 1}}]})),
            "messages[1].tool_calls[0].function.name is not a string"
        );
        assert_eq!(
            wrong(
                json!({"role": "a", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]})
            ),
            "messages[1].tool_calls[0].function.arguments is a number, not an object or a string"
        );
        let none = ChatMessage::list_from_json(&json!({})).unwrap_err().to_string();
        assert_eq!(none, "messages is an object, not a list");
    }

    #[test]
    fn arguments_become_objects_where_they_can() {
        let arguments = |arguments: Value| {
            let call = json!({"id": "1", "function": {"name": "f", "arguments": arguments}});
            let message = json!({"role": "assistant", "content": null, "tool_calls": [call]});
            let message = ChatMessage::from_json(0, &message).unwrap();
            message.tool_calls[0]["function"]["arguments"].clone()
        };
        assert_eq!(arguments(json!("{\"b\": 1, \"a\": [2]}")).to_string(), r#"{"b":1,"a":[2]}"#);
        assert_eq!(arguments(json!("")), json!({}));
        assert_eq!(arguments(json!(null)), json!({}));
        assert_eq!(arguments(json!("[1]")), json!("[1]"));
        assert_eq!(arguments(json!("{oops")), json!("{oops"));
        assert_eq!(arguments(json!({"a": 1})), json!({"a": 1}));
    }
}
