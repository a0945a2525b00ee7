//! Typed access to one JSON file; every error names the file, the key and the value.

use std::{
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};

use crate::error::{LoadError, quoted};

/// Most token ids that a key such as `eos_token_id` may list.
const MAX_TOKEN_IDS: usize = 256;

/// A JSON object from a file, or one nested in it. A key that is null counts as absent.
#[derive(Debug, Clone)]
pub(super) struct JsonFile {
    path: PathBuf,
    /// Names of the objects this one is in, dot after each.
    prefix: String,
    object: Map<String, Value>,
}

impl JsonFile {
    /// Parses a file's text. serde_json bounds the nesting, so depth cannot overflow the stack.
    pub(super) fn parse(path: &Path, text: &str) -> Result<Self, LoadError> {
        match serde_json::from_str(text) {
            Ok(Value::Object(object)) => {
                Ok(Self { path: path.to_owned(), prefix: String::new(), object })
            }
            Ok(other) => {
                Err(LoadError::malformed(path, format!("is {}, not an object", kind(&other))))
            }
            Err(e) => Err(LoadError::malformed(path, format!("is not JSON: {e}"))),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is there at all, null or not.
    pub(super) fn has(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.object.is_empty()
    }

    pub(super) fn error(&self, key: &str, problem: impl Into<String>) -> LoadError {
        LoadError::key(&self.path, &format!("{}{key}", self.prefix), problem)
    }

    fn wrong_type(&self, key: &str, value: &Value, wanted: &str) -> LoadError {
        self.error(key, format!("is {}; it must be {wanted}", kind(value)))
    }

    pub(super) fn missing(&self, key: &str) -> LoadError {
        self.error(key, "is missing")
    }

    /// A whole number within `range`.
    pub(super) fn count(
        &self,
        key: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let (low, high) = (range.start(), range.end());
        let Value::Number(number) = value else {
            return Err(self.wrong_type(key, value, &format!("a whole number, {low} to {high}")));
        };
        match number.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| range.contains(n)) {
            Some(n) => Ok(Some(n)),
            None => {
                Err(self
                    .error(key, format!("is {number}; it must be a whole number, {low} to {high}")))
            }
        }
    }

    /// [`JsonFile::count`] of a key that must be there.
    pub(super) fn required_count(&self, key: &str, limit: usize) -> Result<usize, LoadError> {
        self.count(key, 1..=limit)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f64>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Number(number)) => match number.as_f64().filter(|n| n.is_finite()) {
                Some(n) => Ok(Some(n)),
                None => Err(self.error(key, format!("is {number}, which is out of range"))),
            },
            Some(value) => Err(self.wrong_type(key, value, "a number")),
        }
    }

    pub(super) fn required_float(&self, key: &str) -> Result<f64, LoadError> {
        self.float(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(value) => Err(self.wrong_type(key, value, "true or false")),
        }
    }

    pub(super) fn string(&self, key: &str) -> Result<Option<&str>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.wrong_type(key, value, "a string")),
        }
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Self>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Self {
                path: self.path.clone(),
                prefix: format!("{}{key}.", self.prefix),
                object: object.clone(),
            })),
            Some(value) => Err(self.wrong_type(key, value, "an object")),
        }
    }

    pub(super) fn strings(&self, key: &str) -> Result<Option<Vec<&str>>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let strings = value.as_array().map(|a| a.iter().map(Value::as_str).collect());
        match strings {
            Some(Some(strings)) => Ok(Some(strings)),
            _ => Err(self.wrong_type(key, value, "a list of strings")),
        }
    }

    pub(super) fn floats(&self, key: &str) -> Result<Option<Vec<f64>>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let floats = value.as_array().map(|a| a.iter().map(Value::as_f64).collect());
        match floats {
            Some(Some(floats)) => Ok(Some(floats)),
            _ => Err(self.wrong_type(key, value, "a list of numbers")),
        }
    }

    /// The first key whose value is an object.
    pub(super) fn first_object(&self) -> Option<&str> {
        self.object.iter().find(|(_, value)| value.is_object()).map(|(key, _)| key.as_str())
    }

    /// One token id, or a list of them; empty if absent.
    pub(super) fn token_ids(&self, key: &str) -> Result<Vec<u32>, LoadError> {
        let values = match self.get(key) {
            None => return Ok(Vec::new()),
            Some(Value::Array(values)) => &values[..],
            Some(value) => std::slice::from_ref(value),
        };
        if values.len() > MAX_TOKEN_IDS {
            let problem = format!("lists {} token ids; the limit is {MAX_TOKEN_IDS}", values.len());
            return Err(self.error(key, problem));
        }
        let ids = values.iter().map(|value| match value {
            Value::Number(n) => n.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(|| {
                self.error(key, format!("holds {n}; token ids are 0 to {}", u32::MAX))
            }),
            other => Err(self.wrong_type(key, other, "a token id or a list of them")),
        });
        ids.collect()
    }

    /// The architecture's name.
    pub(super) fn architecture(&self) -> Result<&str, LoadError> {
        let names = self.strings("architectures")?.ok_or_else(|| self.missing("architectures"))?;
        match names[..] {
            [name] => Ok(name),
            _ => Err(self.error("architectures", format!("names {}; it must name 1", names.len()))),
        }
    }
}

/// What a value is, for messages: the value itself where it is short.
fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("the string {}", quoted(text)),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
    }
}
