//! Values as Python writes and measures them.
//!
//! Lists in a template are shared, so a few dozen steps of `x = [x, x]` make a value that is
//! small in memory and endless when it is walked. Everything here that walks a value therefore
//! pays for each node *before* it goes on, and refuses values deeper than [`MAX_DEPTH`]; what the
//! engine walks on its own (comparison, hashing, dropping) is measured here first.

use std::borrow::Cow;
use std::fmt::Write;

use minijinja::value::{DynObject, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// The deepest nesting of lists and mappings. JSON from outside has at most 128 levels.
const MAX_DEPTH: usize = 160;

/// One unit of fuel pays for this many bytes, as in the engine itself.
const BYTES_PER_FUEL: usize = 64;

/// What a node of a value costs, in bytes.
const NODE_BYTES: usize = 64;

pub fn error(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Pays for work in bytes, in small instalments.
pub struct Meter<'a, 'template, 'env> {
    state: &'a State<'template, 'env>,
    unpaid: usize,
}

impl<'a, 'template, 'env> Meter<'a, 'template, 'env> {
    pub fn new(state: &'a State<'template, 'env>) -> Self {
        Self { state, unpaid: 0 }
    }

    /// Pays for `bytes` that are about to be read or written.
    pub fn pay(&mut self, bytes: usize) -> Result<(), Error> {
        self.unpaid = self.unpaid.saturating_add(bytes);
        let fuel = self.unpaid / BYTES_PER_FUEL;
        self.unpaid %= BYTES_PER_FUEL;
        if fuel == 0 { Ok(()) } else { self.state.consume_fuel(fuel as u64) }
    }
}

/// What a value is to a Python programmer.
pub enum Shape<'a> {
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(&'a str),
    /// A list, or something that iterates like one.
    List(&'a DynObject),
    Tuple(&'a DynObject),
    Dict(&'a DynObject),
    /// A function, a macro, a namespace, `loop`.
    Other,
}

impl<'a> Shape<'a> {
    pub fn of(value: &'a Value) -> Self {
        match value.kind() {
            ValueKind::Undefined => Self::Undefined,
            ValueKind::None => Self::None,
            ValueKind::Bool => Self::Bool(value.is_true()),
            ValueKind::Number => number(value),
            ValueKind::String => value.as_str().map_or(Self::Other, Self::Str),
            ValueKind::Seq | ValueKind::Iterable => match value.as_object() {
                Some(object) if value.is_tuple() => Self::Tuple(object),
                Some(object) => Self::List(object),
                None => Self::Other,
            },
            ValueKind::Map => match value.as_object() {
                Some(object) if is_data(object) => Self::Dict(object),
                _ => Self::Other,
            },
            _ => Self::Other,
        }
    }

    /// The name of the type, for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Undefined => "an undefined value",
            Self::None => "None",
            Self::Bool(_) => "a bool",
            Self::Int(_) => "an int",
            Self::Float(_) => "a float",
            Self::Str(_) => "a string",
            Self::List(_) => "a list",
            Self::Tuple(_) => "a tuple",
            Self::Dict(_) => "a dict",
            Self::Other => "an object",
        }
    }
}

fn number<'a>(value: &Value) -> Shape<'a> {
    if value.is_integer() {
        i128::try_from(value.clone()).map_or(Shape::Other, Shape::Int)
    } else {
        f64::try_from(value.clone()).map_or(Shape::Other, Shape::Float)
    }
}

/// Whether a mapping is plain data. A namespace can change after it was put somewhere, so that a
/// value that holds one could come to hold itself; `loop` is no data either.
fn is_data(object: &DynObject) -> bool {
    let name = object.type_name();
    !name.ends_with("::Namespace") && !name.ends_with("::Loop")
}

/// Pays for walking all of `value`, and checks its depth.
pub fn weigh(state: &State, value: &Value) -> Result<(), Error> {
    walk(&mut Meter::new(state), value, 0)
}

/// `value` as a part of another one, or of a namespace: plain data of limited depth. What is
/// computed while it is iterated becomes a list, so that such steps do not pile up.
pub fn nest(state: &State, value: &Value) -> Result<Value, Error> {
    walk(&mut Meter::new(state), value, 1)?;
    match value.kind() {
        ValueKind::Iterable => Ok(Value::from(value.try_iter()?.collect::<Vec<_>>())),
        _ => Ok(value.clone()),
    }
}

fn walk(meter: &mut Meter, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(too_deep());
    }
    match Shape::of(value) {
        Shape::Str(text) => meter.pay(NODE_BYTES.saturating_add(text.len())),
        Shape::List(items) | Shape::Tuple(items) => {
            meter.pay(NODE_BYTES)?;
            for item in items.try_iter().into_iter().flatten() {
                walk(meter, &item, depth + 1)?;
            }
            Ok(())
        }
        Shape::Dict(dict) => {
            meter.pay(NODE_BYTES)?;
            for (key, value) in dict.try_iter_pairs().into_iter().flatten() {
                walk(meter, &key, depth + 1)?;
                walk(meter, &value, depth + 1)?;
            }
            Ok(())
        }
        Shape::Other if depth > 0 && value.as_object().is_some_and(is_mapping) => {
            Err(error("a namespace or a loop cannot be put into another value"))
        }
        _ => meter.pay(NODE_BYTES),
    }
}

fn is_mapping(object: &DynObject) -> bool {
    object.repr() == minijinja::value::ObjectRepr::Map
}

fn too_deep() -> Error {
    error(format!("a value is nested more than {MAX_DEPTH} levels deep"))
}

/// `str(value)`.
pub fn to_str<'a>(state: &State, value: &'a Value) -> Result<Cow<'a, str>, Error> {
    match Shape::of(value) {
        Shape::Str(text) => Ok(Cow::Borrowed(text)),
        Shape::Undefined => Ok(Cow::Borrowed("")),
        _ => {
            let mut writer = Writer::new(state);
            writer.repr(value, 0)?;
            Ok(Cow::Owned(writer.out))
        }
    }
}

struct Writer<'a, 'template, 'env> {
    meter: Meter<'a, 'template, 'env>,
    out: String,
}

impl<'a, 'template, 'env> Writer<'a, 'template, 'env> {
    fn new(state: &'a State<'template, 'env>) -> Self {
        Self { meter: Meter::new(state), out: String::new() }
    }

    /// `repr(value)`.
    fn repr(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        self.meter.pay(NODE_BYTES)?;
        match Shape::of(value) {
            Shape::Undefined => self.out.push_str("Undefined"),
            Shape::None => self.out.push_str("None"),
            Shape::Bool(value) => self.out.push_str(if value { "True" } else { "False" }),
            Shape::Int(value) => push_int(&mut self.out, value),
            Shape::Float(value) => self.out.push_str(&float_repr(value)),
            Shape::Str(text) => self.str_repr(text)?,
            Shape::List(items) => self.items(items, ('[', ']'), depth)?,
            Shape::Tuple(items) => self.items(items, ('(', ')'), depth)?,
            Shape::Dict(dict) => self.dict(dict, depth)?,
            Shape::Other => return Err(error("a function, loop or namespace has no text")),
        }
        Ok(())
    }

    fn items(
        &mut self,
        items: &DynObject,
        (open, close): (char, char),
        depth: usize,
    ) -> Result<(), Error> {
        self.out.push(open);
        let mut count = 0;
        for item in items.try_iter().into_iter().flatten() {
            if count > 0 {
                self.out.push_str(", ");
            }
            self.repr(&item, depth + 1)?;
            count += 1;
        }
        if count == 1 && close == ')' {
            self.out.push(',');
        }
        self.out.push(close);
        Ok(())
    }

    fn dict(&mut self, dict: &DynObject, depth: usize) -> Result<(), Error> {
        self.out.push('{');
        for (i, (key, value)) in dict.try_iter_pairs().into_iter().flatten().enumerate() {
            if i > 0 {
                self.out.push_str(", ");
            }
            self.repr(&key, depth + 1)?;
            self.out.push_str(": ");
            self.repr(&value, depth + 1)?;
        }
        self.out.push('}');
        Ok(())
    }

    fn str_repr(&mut self, text: &str) -> Result<(), Error> {
        self.meter.pay(text.len())?;
        let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
        self.out.push(quote);
        for c in text.chars() {
            match c {
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                c if c == quote => self.out.extend(['\\', c]),
                c if is_printable(c) => self.out.push(c),
                c => push_python_escape(&mut self.out, c),
            }
        }
        self.out.push(quote);
        Ok(())
    }
}

/// `str.isprintable` for the characters that occur in prompts. Private-use characters count as
/// printable, because marked characters are of that kind.
fn is_printable(c: char) -> bool {
    let is_format = matches!(
        u32::from(c),
        0xAD | 0x61C | 0x180E | 0x200B..=0x200F | 0x202A..=0x202E | 0x2060..=0x206F | 0xFEFF
            | 0xFFF0..=0xFFFB | 0xE0000..=0xE007F
    );
    !(c.is_control() || is_format || (c.is_whitespace() && c != ' '))
}

fn push_python_escape(out: &mut String, c: char) {
    let code = u32::from(c);
    let written = match code {
        0..=0xFF => write!(out, "\\x{code:02x}"),
        0x100..=0xFFFF => write!(out, "\\u{code:04x}"),
        _ => write!(out, "\\U{code:08x}"),
    };
    written.expect("writing to a string does not fail");
}

pub fn push_int(out: &mut String, value: i128) {
    write!(out, "{value}").expect("writing to a string does not fail");
}

/// `repr` of a float: the shortest digits that read back, with an exponent below 1e-4 and from
/// 1e16 on.
pub fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let magnitude = value.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let scientific = format!("{value:e}");
        let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
        let (sign, digits) = match exponent.strip_prefix('-') {
            Some(digits) => ('-', digits),
            None => ('+', exponent),
        };
        return format!("{mantissa}e{sign}{digits:0>2}");
    }
    let plain = value.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

/// The arguments of `tojson`, with the defaults of Hugging Face's filter.
pub struct JsonStyle {
    pub ensure_ascii: bool,
    /// What one level is indented by; none writes all on one line.
    pub indent: Option<String>,
    pub item_separator: String,
    pub key_separator: String,
    pub sort_keys: bool,
}

/// `json.dumps(value)`.
pub fn to_json(state: &State, value: &Value, style: &JsonStyle) -> Result<String, Error> {
    let mut json = Json { writer: Writer::new(state), style };
    json.value(value, 0)?;
    Ok(json.writer.out)
}

struct Json<'a, 'template, 'env> {
    writer: Writer<'a, 'template, 'env>,
    style: &'a JsonStyle,
}

impl Json<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        self.writer.meter.pay(NODE_BYTES)?;
        match Shape::of(value) {
            Shape::Str(text) => self.string(text),
            Shape::List(items) | Shape::Tuple(items) => self.array(items, depth),
            Shape::Dict(dict) => self.object(dict, depth),
            shape => {
                let text =
                    scalar(&shape).ok_or_else(|| error(format!("{} has no JSON", shape.name())))?;
                self.push(&text)
            }
        }
    }

    fn push(&mut self, text: &str) -> Result<(), Error> {
        self.writer.meter.pay(text.len())?;
        self.writer.out.push_str(text);
        Ok(())
    }

    fn array(&mut self, items: &DynObject, depth: usize) -> Result<(), Error> {
        self.push("[")?;
        let mut empty = true;
        for item in items.try_iter().into_iter().flatten() {
            self.begin_item(empty, depth + 1)?;
            empty = false;
            self.value(&item, depth + 1)?;
        }
        self.end(empty, depth, "]")
    }

    fn object(&mut self, dict: &DynObject, depth: usize) -> Result<(), Error> {
        let mut pairs = Vec::new();
        for (key, value) in dict.try_iter_pairs().into_iter().flatten() {
            self.writer.meter.pay(NODE_BYTES)?;
            pairs.push((json_key(&key)?, value));
        }
        if self.style.sort_keys {
            pairs.sort_by(|a, b| a.0.cmp(&b.0));
        }
        self.push("{")?;
        for (i, (key, value)) in pairs.iter().enumerate() {
            self.begin_item(i == 0, depth + 1)?;
            self.string(key)?;
            let style = self.style;
            self.push(&style.key_separator)?;
            self.value(value, depth + 1)?;
        }
        self.end(pairs.is_empty(), depth, "}")
    }

    fn begin_item(&mut self, first: bool, depth: usize) -> Result<(), Error> {
        let style = self.style;
        if !first {
            self.push(&style.item_separator)?;
        }
        self.new_line(depth)
    }

    fn end(&mut self, empty: bool, depth: usize, close: &str) -> Result<(), Error> {
        if !empty {
            self.new_line(depth)?;
        }
        self.push(close)
    }

    fn new_line(&mut self, depth: usize) -> Result<(), Error> {
        let Some(indent) = &self.style.indent else {
            return Ok(());
        };
        self.push("\n")?;
        for _ in 0..depth {
            self.push(indent)?;
        }
        Ok(())
    }

    fn string(&mut self, text: &str) -> Result<(), Error> {
        // An escape is at most twelve bytes, for a character of four.
        self.writer.meter.pay(text.len())?;
        let out = &mut self.writer.out;
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{C}' => out.push_str("\\f"),
                '\0'..='\u{1F}' => push_json_escape(out, c),
                c if c.is_ascii() && c != '\u{7F}' => out.push(c),
                '\u{7F}' => out.push(c),
                c if self.style.ensure_ascii && !super::marks::may_be_mark(c) => {
                    push_json_escape(out, c);
                }
                c => out.push(c),
            }
        }
        out.push('"');
        Ok(())
    }
}

fn push_json_escape(out: &mut String, c: char) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        write!(out, "\\u{unit:04x}").expect("writing to a string does not fail");
    }
}

/// The JSON of what is neither text nor a container.
fn scalar(shape: &Shape) -> Option<String> {
    Some(match *shape {
        Shape::None => "null".to_owned(),
        Shape::Bool(value) => value.to_string(),
        Shape::Int(value) => value.to_string(),
        Shape::Float(value) if value.is_nan() => "NaN".to_owned(),
        Shape::Float(value) if value.is_infinite() => {
            if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
        }
        Shape::Float(value) => float_repr(value),
        _ => return None,
    })
}

fn json_key(key: &Value) -> Result<String, Error> {
    let shape = Shape::of(key);
    match shape {
        Shape::Str(text) => Ok(text.to_owned()),
        _ => scalar(&shape).ok_or_else(|| error(format!("{} is no JSON key", shape.name()))),
    }
}
