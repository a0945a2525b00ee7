//! Metadata keys and their typed values.

use std::{collections::BTreeMap, ops::RangeInclusive, path::Path, path::PathBuf};

use super::reader::Reader;
use crate::error::{LoadError, check_limit};

/// Most array elements in all of a file's metadata: several times the largest vocabulary and its
/// merges.
const MAX_ARRAY_ELEMENTS: u64 = 1 << 25;

/// A metadata value; numbers are widened to their kind's largest type.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any of the unsigned integers.
    Unsigned(u64),
    /// Any of the signed integers.
    Signed(i64),
    /// Either of the floats.
    Float(f64),
    /// A flag.
    Bool(bool),
    /// Text.
    String(String),
    /// A list.
    Array(Array),
}

/// A list of values of one kind.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    /// Unsigned integers.
    Unsigned(Vec<u64>),
    /// Signed integers.
    Signed(Vec<i64>),
    /// Floats.
    Float(Vec<f64>),
    /// Flags.
    Bool(Vec<bool>),
    /// Texts.
    String(Vec<String>),
}

impl Array {
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Unsigned(list) => list.is_empty(),
            Self::Signed(list) => list.is_empty(),
            Self::Float(list) => list.is_empty(),
            Self::Bool(list) => list.is_empty(),
            Self::String(list) => list.is_empty(),
        }
    }
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Self::Unsigned(_) => "an unsigned integer",
            Self::Signed(_) => "a signed integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a flag",
            Self::String(_) => "a string",
            Self::Array(_) => "a list",
        }
    }

    fn as_unsigned(&self) -> Option<u64> {
        match *self {
            Self::Unsigned(n) => Some(n),
            Self::Signed(n) => u64::try_from(n).ok(),
            _ => None,
        }
    }
}

/// The metadata of one file: unique keys, typed access, errors that name file and key.
#[derive(Debug, Clone, PartialEq)]
pub struct Metadata {
    path: PathBuf,
    values: BTreeMap<String, Value>,
}

impl Metadata {
    pub(super) fn parse(reader: &mut Reader<'_>, num_keys: usize) -> Result<Self, LoadError> {
        let mut values = BTreeMap::new();
        let mut elements_left = MAX_ARRAY_ELEMENTS;
        for _ in 0..num_keys {
            let key = reader.string("a key")?;
            if values.contains_key(key) {
                return Err(LoadError::key(reader.path(), key, "is there twice"));
            }
            let kind = reader.u32("a value's type")?;
            values.insert(key.to_owned(), read_value(reader, kind, &mut elements_left)?);
        }
        Ok(Self { path: reader.path().to_owned(), values })
    }

    /// The file the metadata comes from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A value of any kind.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// Every key with its value, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    pub(super) fn error(&self, key: &str, problem: impl Into<String>) -> LoadError {
        LoadError::key(&self.path, key, problem)
    }

    fn wrong_kind(&self, key: &str, value: &Value, wanted: &str) -> LoadError {
        self.error(key, format!("is {}; it must be {wanted}", value.kind()))
    }

    pub(super) fn missing(&self, key: &str) -> LoadError {
        self.error(key, "is missing")
    }

    pub(super) fn string(&self, key: &str) -> Result<Option<&str>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.wrong_kind(key, value, "a string")),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(value) => Err(self.wrong_kind(key, value, "a flag")),
        }
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f64>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(number)) => Ok(Some(*number)),
            Some(value) => Err(self.wrong_kind(key, value, "a float")),
        }
    }

    /// A whole number within `range`.
    pub(super) fn count(
        &self,
        key: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let (low, high) = (range.start(), range.end());
        match value.as_unsigned() {
            Some(n) => match usize::try_from(n).ok().filter(|n| range.contains(n)) {
                Some(n) => Ok(Some(n)),
                None => Err(self.error(key, format!("is {n}; it must be {low} to {high}"))),
            },
            None => Err(self.wrong_kind(key, value, &format!("a whole number, {low} to {high}"))),
        }
    }

    /// [`Metadata::count`] of a key that must be there, from 1.
    pub(super) fn required_count(&self, key: &str, limit: usize) -> Result<usize, LoadError> {
        self.count(key, 1..=limit)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn token_id(&self, key: &str) -> Result<Option<u32>, LoadError> {
        // The range makes the conversion lossless.
        self.count(key, 0..=u32::MAX as usize).map(|id| id.map(|id| id as u32))
    }

    pub(super) fn strings(&self, key: &str) -> Result<Option<&[String]>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::String(strings))) => Ok(Some(strings)),
            Some(value) => Err(self.wrong_kind(key, value, "a list of strings")),
        }
    }

    pub(super) fn floats(&self, key: &str) -> Result<Option<&[f64]>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::Float(floats))) => Ok(Some(floats)),
            Some(value) => Err(self.wrong_kind(key, value, "a list of floats")),
        }
    }

    /// A list of integers of either kind.
    pub(super) fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::Signed(numbers))) => Ok(Some(numbers.clone())),
            Some(Value::Array(Array::Unsigned(numbers))) => {
                let numbers = numbers.iter().map(|&n| i64::try_from(n));
                numbers
                    .collect::<Result<_, _>>()
                    .map(Some)
                    .map_err(|_| self.error(key, format!("holds a number over {}", i64::MAX)))
            }
            Some(value) => Err(self.wrong_kind(key, value, "a list of integers")),
        }
    }
}

fn read_value(
    reader: &mut Reader<'_>,
    kind: u32,
    elements_left: &mut u64,
) -> Result<Value, LoadError> {
    const WHAT: &str = "a value";
    Ok(match kind {
        0 => Value::Unsigned(u8::from_le_bytes(reader.array(WHAT)?).into()),
        1 => Value::Signed(i8::from_le_bytes(reader.array(WHAT)?).into()),
        2 => Value::Unsigned(u16::from_le_bytes(reader.array(WHAT)?).into()),
        3 => Value::Signed(i16::from_le_bytes(reader.array(WHAT)?).into()),
        4 => Value::Unsigned(reader.u32(WHAT)?.into()),
        5 => Value::Signed(i32::from_le_bytes(reader.array(WHAT)?).into()),
        6 => Value::Float(f32::from_le_bytes(reader.array(WHAT)?).into()),
        7 => Value::Bool(read_bool(reader)?),
        8 => Value::String(reader.string(WHAT)?.to_owned()),
        9 => Value::Array(read_array(reader, elements_left)?),
        10 => Value::Unsigned(reader.u64(WHAT)?),
        11 => Value::Signed(i64::from_le_bytes(reader.array(WHAT)?)),
        12 => Value::Float(f64::from_le_bytes(reader.array(WHAT)?)),
        other => return Err(reader.error(format!("value type {other} is unknown"))),
    })
}

fn read_bool(reader: &mut Reader<'_>) -> Result<bool, LoadError> {
    match reader.array("a flag")? {
        [0] => Ok(false),
        [1] => Ok(true),
        [other] => Err(reader.error(format!("a flag is {other}; it must be 0 or 1"))),
    }
}

fn read_array(reader: &mut Reader<'_>, elements_left: &mut u64) -> Result<Array, LoadError> {
    let kind = reader.u32("an array's type")?;
    let element_bytes = match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        8 | 10..=12 => 8,
        9 => return Err(LoadError::unsupported(reader.path(), "metadata", "array of arrays")),
        other => return Err(reader.error(format!("array type {other} is unknown"))),
    };
    let count = reader.count(element_bytes, "an array's length")?;
    check_limit(reader.path(), "array elements in the metadata", count as u64, *elements_left)?;
    *elements_left -= count as u64;
    let what = "an array";
    Ok(match kind {
        0 => Array::Unsigned(list(count, || Ok(u8::from_le_bytes(reader.array(what)?).into()))?),
        1 => Array::Signed(list(count, || Ok(i8::from_le_bytes(reader.array(what)?).into()))?),
        2 => Array::Unsigned(list(count, || Ok(u16::from_le_bytes(reader.array(what)?).into()))?),
        3 => Array::Signed(list(count, || Ok(i16::from_le_bytes(reader.array(what)?).into()))?),
        4 => Array::Unsigned(list(count, || Ok(reader.u32(what)?.into()))?),
        5 => Array::Signed(list(count, || Ok(i32::from_le_bytes(reader.array(what)?).into()))?),
        6 => Array::Float(list(count, || Ok(f32::from_le_bytes(reader.array(what)?).into()))?),
        7 => Array::Bool(list(count, || read_bool(reader))?),
        8 => Array::String(list(count, || Ok(reader.string(what)?.to_owned()))?),
        10 => Array::Unsigned(list(count, || reader.u64(what))?),
        11 => Array::Signed(list(count, || Ok(i64::from_le_bytes(reader.array(what)?)))?),
        12 => Array::Float(list(count, || Ok(f64::from_le_bytes(reader.array(what)?)))?),
        other => unreachable!("array type {other} was checked above"),
    })
}

/// `count` values; the caller has checked that the file can hold them.
fn list<T>(
    count: usize,
    mut next: impl FnMut() -> Result<T, LoadError>,
) -> Result<Vec<T>, LoadError> {
    (0..count).map(|_| next()).collect()
}
