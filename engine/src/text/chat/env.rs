//! The engine's environment: the globals, filters and tests that Hugging Face's templates have,
//! with Python's results and a price for everything that grows.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

use minijinja::value::{Kwargs, Rest};
use minijinja::{Environment, Error, State, Value, filters, functions};

use super::clock::DateTime;
use super::value::{JsonStyle, Meter, Shape, error, to_json, to_str};
use super::{lists, methods, ops};

/// The most that a line, or one level of JSON, is indented by.
const MAX_INDENT: usize = 1000;

/// Where `raise_exception` leaves its message.
pub type Raised = Arc<OnceLock<String>>;

/// An environment for one rendering that may use `fuel`, at the time `now`.
pub fn environment<'source>(fuel: u64, now: DateTime, raised: &Raised) -> Environment<'source> {
    // Not the engine's defaults: some of their filters walk values without a price.
    let mut env = Environment::empty();
    env.set_fuel(Some(fuel));
    env.set_unknown_method_callback(methods::call);
    env.set_formatter(|out, state, value| {
        let text = to_str(state, value)?;
        out.write_str(&text).map_err(Error::from)
    });
    ops::install(&mut env);
    add_text_filters(&mut env);
    lists::install(&mut env);
    env.add_function("range", functions::range);
    env.add_function("namespace", ops::namespace);
    env.add_function("dict", ops::dict_function);
    env.add_function("strftime_now", move |format: &str| now.format(format).map_err(error));
    let raised = Arc::clone(raised);
    env.add_function("raise_exception", move |state: &State, message: &Value| {
        let message = to_str(state, message)?.into_owned();
        // A template ends with its first exception, so the place is still free.
        Err::<Value, _>(error(raised.get_or_init(|| message).clone()))
    });
    env
}

fn add_text_filters(env: &mut Environment<'_>) {
    env.add_filter("string", text_filter(|text| text.into_owned()));
    env.add_filter("safe", text_filter(|text| text.into_owned()));
    env.add_filter("upper", text_filter(|text| text.to_uppercase()));
    env.add_filter("lower", text_filter(|text| text.to_lowercase()));
    env.add_filter("title", text_filter(filters::title));
    env.add_filter("capitalize", text_filter(|text| methods::capitalize(&text)));
    for name in ["escape", "e", "forceescape"] {
        env.add_filter(name, text_filter(|text| escape(&text)));
    }
    env.add_filter("trim", trim);
    env.add_filter("replace", replace);
    env.add_filter("join", join);
    env.add_filter("indent", indent);
    env.add_filter("tojson", tojson);
    env.add_filter("int", int);
    env.add_filter("float", float);
}

/// A filter of one text.
fn text_filter(
    filter: impl Fn(Cow<'_, str>) -> String + Send + Sync + 'static,
) -> impl Fn(&State, &Value) -> Result<String, Error> + Send + Sync + 'static {
    move |state, value| {
        let text = to_str(state, value)?;
        // The engine pays for the result only; that of `escape` is up to six times as long.
        Meter::new(state).pay(text.len())?;
        Ok(filter(text))
    }
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

fn trim(state: &State, value: &Value, chars: Option<&str>) -> Result<String, Error> {
    Ok(methods::trim(&to_str(state, value)?, chars, true, true).to_owned())
}

fn replace(
    state: &State,
    value: &Value,
    from: &Value,
    to: &Value,
    count: Option<i64>,
) -> Result<String, Error> {
    let (from, to) = (to_str(state, from)?, to_str(state, to)?);
    methods::replace(state, &to_str(state, value)?, (&from, &to), count.unwrap_or(-1))
}

fn join(state: &State, items: &Value, by: Option<&Value>, kwargs: Kwargs) -> Result<String, Error> {
    let by = match by {
        Some(by) => to_str(state, by)?.into_owned(),
        None => kwargs.get::<Option<String>>("d")?.unwrap_or_default(),
    };
    let attribute = kwargs.get::<Option<Value>>("attribute")?;
    kwargs.assert_all_used()?;
    let mut meter = Meter::new(state);
    let mut out = String::new();
    for (i, item) in items.try_iter()?.checked().enumerate() {
        let item = match &attribute {
            Some(attribute) => item?.get_item(attribute)?,
            None => item?,
        };
        let text = to_str(state, &item)?;
        meter.pay(by.len().saturating_add(text.len()).saturating_add(1))?;
        if i > 0 {
            out.push_str(&by);
        }
        out.push_str(&text);
    }
    Ok(out)
}

/// An argument by position or by name; `None` counts as not given.
fn argument(
    args: &[Value],
    kwargs: &Kwargs,
    position: usize,
    name: &str,
) -> Result<Option<Value>, Error> {
    let by_name = kwargs.get::<Option<Value>>(name)?;
    Ok(args.get(position).cloned().or(by_name).filter(|value| !value.is_none()))
}

/// `indent(width=4, first=False, blank=False)`.
fn indent(
    state: &State,
    value: &Value,
    args: Rest<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let text = to_str(state, value)?;
    let width = argument(&args, &kwargs, 0, "width")?.unwrap_or(Value::from(4));
    let first = argument(&args, &kwargs, 1, "first")?.is_some_and(|first| first.is_true());
    let blank = argument(&args, &kwargs, 2, "blank")?.is_some_and(|blank| blank.is_true());
    kwargs.assert_all_used()?;
    let indent = indentation(&width)?;
    let mut meter = Meter::new(state);
    let mut out = String::new();
    for (i, line) in methods::lines(&text).into_iter().enumerate() {
        meter.pay(indent.len() + line.len() + 1)?;
        if i > 0 {
            out.push('\n');
        }
        if if i == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&indent);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, as transformers
/// defines it; nothing is escaped for HTML.
fn tojson(
    state: &State,
    value: &Value,
    args: Rest<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let argument = |position, name| argument(&args, &kwargs, position, name);
    let ensure_ascii = argument(0, "ensure_ascii")?.is_some_and(|ensure| ensure.is_true());
    let indent = argument(1, "indent")?.map(|indent| indentation(&indent)).transpose()?;
    let separators = argument(2, "separators")?;
    let sort_keys = argument(3, "sort_keys")?.is_some_and(|sort| sort.is_true());
    kwargs.assert_all_used()?;
    let [item_separator, key_separator] = match separators {
        Some(separators) => json_separators(&separators)?,
        // Python leaves the blank out where a new line follows.
        None => [if indent.is_some() { "," } else { ", " }, ": "].map(str::to_owned),
    };
    let style = JsonStyle { ensure_ascii, indent, item_separator, key_separator, sort_keys };
    to_json(state, value, &style)
}

fn indentation(indent: &Value) -> Result<String, Error> {
    let indent = match Shape::of(indent) {
        Shape::Str(indent) if indent.len() <= MAX_INDENT => indent.to_owned(),
        Shape::Int(width) if width <= MAX_INDENT as i128 => " ".repeat(width.max(0) as usize),
        Shape::Str(_) | Shape::Int(_) => {
            return Err(error(format!("an indentation is more than {MAX_INDENT}")));
        }
        shape => return Err(error(format!("an indentation is {}", shape.name()))),
    };
    Ok(indent)
}

fn json_separators(separators: &Value) -> Result<[String; 2], Error> {
    let items: Vec<Value> = separators.try_iter()?.collect();
    let texts: Vec<&str> = items.iter().filter_map(Value::as_str).collect();
    match texts[..] {
        [item, key] if items.len() == 2 => Ok([item.to_owned(), key.to_owned()]),
        _ => Err(error("tojson: separators is not a pair of strings")),
    }
}

/// `int(default=0, base=10)`: what is no number gives the default.
fn int(
    state: &State,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let default = default.or(kwargs.get::<Option<Value>>("default")?).unwrap_or(Value::from(0));
    let trimmed = value.as_str().map(|text| Value::from(text.trim()));
    let value = trimmed.as_ref().unwrap_or(value);
    match Shape::of(value) {
        Shape::List(_) | Shape::Tuple(_) | Shape::Dict(_) | Shape::Other => Ok(default),
        _ => filters::int(state, value, Some(default), base, kwargs),
    }
}

/// `float(default=0.0)`: what is no number gives the default.
fn float(
    state: &State,
    value: &Value,
    default: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let default = default.or(kwargs.get::<Option<Value>>("default")?).unwrap_or(Value::from(0.0));
    match Shape::of(value) {
        Shape::List(_) | Shape::Tuple(_) | Shape::Dict(_) | Shape::Other => Ok(default),
        _ => filters::float(state, value, Some(default), kwargs),
    }
}
