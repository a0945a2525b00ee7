//! One line of a JSONL input: a request in strict JSON.
//!
//! Every field has one type; what is unknown, doubled, or not supported is an error that names
//! it, since a misspelt parameter that is silently ignored gives wrong results. Ranges are checked
//! by the engine.

use quire_engine::engine::Prompt;
use quire_engine::sampling::NumLogprobs;
use quire_engine::{Request, SamplingParams};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::Value;
use std::fmt;

/// Sampling parameters that a line may set.
const SAMPLING_FIELDS: &str = "n, max_tokens, min_tokens, temperature, top_k, top_p, min_p, \
    presence_penalty, frequency_penalty, repetition_penalty, bad_words, allowed_token_ids, \
    logit_bias, seed, stop, stop_token_ids, include_stop_str_in_output, ignore_eos, logprobs, \
    prompt_logprobs, skip_special_tokens, spaces_between_special_tokens, detokenize";

/// Fields that other engines know.
const NOT_SUPPORTED: &[&str] = &[
    "best_of",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "response_format",
    "tools",
    "tool_choice",
    "messages",
    "stream",
    "echo",
    "suffix",
    "priority",
    "cache_salt",
    "use_beam_search",
    "beam_width",
    "length_penalty",
    "early_stopping",
];

/// A line as far as it could be read.
#[derive(Debug, PartialEq)]
pub struct RequestLine {
    /// Null where the line has none, or none that could be read.
    pub id: Value,
    /// The request, or what is wrong with it.
    pub request: Result<Request, String>,
}

/// Reads a line; `defaults` holds what it does not say.
pub fn parse_line(text: &str, defaults: &SamplingParams) -> RequestLine {
    let fields = match serde_json::from_str::<Fields>(text) {
        Ok(fields) => fields.0,
        Err(e) => return RequestLine { id: Value::Null, request: Err(syntax_error(&e, text)) },
    };
    let id = fields.iter().find(|(name, _)| name == "id").map_or(&Value::Null, |(_, id)| id);
    let result = check_id(id).and_then(|()| request(&fields, defaults));
    let id = if check_id(id).is_ok() { id.clone() } else { Value::Null };
    RequestLine { id, request: result }
}

/// Fields in the order of the line.
struct Fields(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;
        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields: Vec<(String, Value)> = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if fields.iter().any(|(other, _)| *other == name) {
                        return Err(A::Error::custom(format!("field {name:?} is there twice")));
                    }
                    // Numbers out of range and NaN end here; the message names their field.
                    let value = map
                        .next_value()
                        .map_err(|e| A::Error::custom(format!("field {}: {e}", shown(&name))))?;
                    fields.push((name, value));
                    // Quadratic above; no request has so many fields.
                    if fields.len() > 64 {
                        return Err(A::Error::custom("more than 64 fields"));
                    }
                }
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(FieldsVisitor)
    }
}

/// What the parser says, with the column and the text there instead of "line 1".
fn syntax_error(error: &serde_json::Error, text: &str) -> String {
    let message = error.to_string();
    let message = message.split(" at line ").next().unwrap_or_default();
    let column = error.column();
    let delimiter = |b: &u8| b" \t,:[]{}".contains(b);
    let bytes = text.as_bytes();
    let at = column.saturating_sub(1).min(bytes.len());
    let start = bytes[..at].iter().rposition(delimiter).map_or(0, |i| i + 1);
    let end = bytes[at..].iter().position(delimiter).map_or(bytes.len(), |i| at + i);
    let token = String::from_utf8_lossy(&bytes[start..end.max(start)]);
    format!("not a valid request: {message} at column {column}, near {}", cut(&token))
}

fn check_id(id: &Value) -> Result<(), String> {
    // Beyond 2^53 a number would come back as another one.
    let exact = |n: &serde_json::Number| !n.is_f64() || n.as_f64().is_some_and(|x| x.abs() < 9e15);
    match id {
        Value::Null | Value::String(_) => Ok(()),
        Value::Number(n) if exact(n) => Ok(()),
        other => Err(wrong("id", "a string or a number below 9e15", other)),
    }
}

fn request(fields: &[(String, Value)], defaults: &SamplingParams) -> Result<Request, String> {
    let mut params = defaults.clone();
    let mut prompt = None;
    for (name, value) in fields {
        let given = match name.as_str() {
            "id" => continue,
            "prompt" => match value {
                Value::String(text) => Prompt::Text(text.clone()),
                other => return Err(wrong("prompt", "a string", other)),
            },
            "prompt_token_ids" => Prompt::Tokens(ids("prompt_token_ids", value)?),
            _ => {
                set(&mut params, name, value)?;
                continue;
            }
        };
        if prompt.replace(given).is_some() {
            return Err("both \"prompt\" and \"prompt_token_ids\" are given".to_owned());
        }
    }
    let prompt = prompt.ok_or("neither \"prompt\" nor \"prompt_token_ids\" is given")?;
    Ok(Request::new(prompt, params))
}

/// Sets one sampling parameter.
fn set(params: &mut SamplingParams, name: &str, value: &Value) -> Result<(), String> {
    match name {
        "n" => params.n = whole(name, value)?,
        "presence_penalty" => params.presence_penalty = float(name, value)?,
        "frequency_penalty" => params.frequency_penalty = float(name, value)?,
        "repetition_penalty" => params.repetition_penalty = float(name, value)?,
        "bad_words" => params.bad_words = optional(name, value, strings)?.unwrap_or_default(),
        "allowed_token_ids" => params.allowed_token_ids = optional(name, value, ids)?,
        "logit_bias" => params.logit_bias = optional(name, value, bias)?.unwrap_or_default(),
        "prompt_logprobs" => params.prompt_logprobs = optional(name, value, num_logprobs)?,
        // Decoding never puts spaces between special tokens of its own accord.
        "spaces_between_special_tokens" => drop(boolean(name, value)?),
        "max_tokens" => params.max_tokens = optional(name, value, whole)?,
        "min_tokens" => params.min_tokens = whole(name, value)?,
        "temperature" => params.temperature = float(name, value)?,
        "top_k" => params.top_k = top_k(name, value)?,
        "top_p" => params.top_p = float(name, value)?,
        "min_p" => params.min_p = float(name, value)?,
        "seed" => params.seed = optional(name, value, whole)?,
        "stop" => params.stop = optional(name, value, strings)?.unwrap_or_default(),
        "stop_token_ids" => {
            params.stop_token_ids = optional(name, value, ids)?.unwrap_or_default();
        }
        "include_stop_str_in_output" => params.include_stop_str_in_output = boolean(name, value)?,
        "ignore_eos" => params.ignore_eos = boolean(name, value)?,
        "logprobs" => params.logprobs = optional(name, value, num_logprobs)?,
        "skip_special_tokens" => params.skip_special_tokens = boolean(name, value)?,
        "detokenize" => params.detokenize = boolean(name, value)?,
        _ if NOT_SUPPORTED.contains(&name) => {
            return Err(format!("field {name:?} is not supported"));
        }
        _ => {
            let name = shown(name);
            return Err(format!(
                "unknown field {name}; a line has id, prompt or prompt_token_ids, and of the \
                 sampling parameters {SAMPLING_FIELDS}"
            ));
        }
    }
    Ok(())
}

/// Null stands for "not set".
fn optional<T>(
    name: &str,
    value: &Value,
    read: fn(&str, &Value) -> Result<T, String>,
) -> Result<Option<T>, String> {
    if value.is_null() { Ok(None) } else { read(name, value).map(Some) }
}

fn whole<T: TryFrom<u64>>(name: &str, value: &Value) -> Result<T, String> {
    let number = value.as_u64().and_then(|n| T::try_from(n).ok());
    let most = u64::MAX >> (64 - 8 * size_of::<T>());
    number.ok_or_else(|| wrong(name, &format!("a whole number from 0 to {most}"), value))
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
    format!("{field} must be {rule}, got {}", cut(&value.to_string()))
}

/// A field's name, quoted and cut to a length a message can hold.
fn shown(name: &str) -> String {
    cut(&format!("{name:?}"))
}

fn cut(text: &str) -> String {
    const MAX_CHARS: usize = 60;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
#[path = "request_line_tests.rs"]
mod tests;
