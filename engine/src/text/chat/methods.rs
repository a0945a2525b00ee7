//! The methods of Python's strings, dictionaries and lists that templates call.

use minijinja::value::{Kwargs, Tuple, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::ops::collect;
use super::value::{Meter, Shape, error, to_str};

/// The widest that `center`, `ljust`, `rjust` and `zfill` pad to.
const MAX_WIDTH: usize = 10_000;

/// What a method call does that the engine does not know itself.
pub fn call(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match Shape::of(value) {
        Shape::Str(text) => string(state, text, method, args),
        Shape::Dict(_) => dict(state, value, method, args),
        Shape::List(_) | Shape::Tuple(_) => list(state, value, method, args),
        _ => Err(ErrorKind::UnknownMethod.into()),
    }
}

/// What Python takes for white space: also the four separators of ASCII.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1C}'..='\u{1F}').contains(&c)
}

fn string(state: &State, text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    Ok(match method {
        "strip" => strip(text, args, true, true)?,
        "lstrip" => strip(text, args, true, false)?,
        "rstrip" => strip(text, args, false, true)?,
        "split" => split(state, text, args, false)?,
        "rsplit" => split(state, text, args, true)?,
        "splitlines" => split_lines(state, text, args)?,
        "partition" | "rpartition" => partition(text, args, method == "rpartition")?,
        "startswith" => Value::from(any_affix(args, |affix| text.starts_with(affix))?),
        "endswith" => Value::from(any_affix(args, |affix| text.ends_with(affix))?),
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "replace" => {
            let (from, to, count): (&str, &str, Option<i64>) = from_args(args)?;
            Value::from(replace(state, text, (from, to), count.unwrap_or(-1))?)
        }
        "join" => {
            let (items,): (&Value,) = from_args(args)?;
            Value::from(join(state, text, items)?)
        }
        "count" | "find" | "rfind" | "index" => search(text, method, args)?,
        "center" | "ljust" | "rjust" | "zfill" => pad(text, method, args)?,
        _ => {
            if !args.is_empty() {
                return Err(ErrorKind::UnknownMethod.into());
            }
            return transform(text, method);
        }
    })
}

/// The methods without arguments.
fn transform(text: &str, method: &str) -> Result<Value, Error> {
    let all = |is: fn(char) -> bool| Value::from(!text.is_empty() && text.chars().all(is));
    let any = |is: fn(char) -> bool| text.chars().any(is);
    Ok(match method {
        "upper" => Value::from(text.to_uppercase()),
        "lower" | "casefold" => Value::from(text.to_lowercase()),
        "title" => Value::from(title(text)),
        "capitalize" => Value::from(capitalize(text)),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isdigit" | "isdecimal" | "isnumeric" => all(char::is_numeric),
        "isspace" => all(is_space),
        "isascii" => Value::from(text.is_ascii()),
        "isupper" => Value::from(any(char::is_uppercase) && !any(char::is_lowercase)),
        "islower" => Value::from(any(char::is_lowercase) && !any(char::is_uppercase)),
        _ => return Err(ErrorKind::UnknownMethod.into()),
    })
}

/// `str.title`: a capital at the start of each run of letters.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        if in_word {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        in_word = c.is_alphabetic();
    }
    out
}

/// Most characters that `strip` takes into account.
const MAX_STRIP_CHARS: usize = 64;

pub fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().into_iter().flat_map(char::to_uppercase);
    first.collect::<String>() + &chars.as_str().to_lowercase()
}

fn strip(text: &str, args: &[Value], start: bool, end: bool) -> Result<Value, Error> {
    let (chars,): (Option<&Value>,) = from_args(args)?;
    let chars = match chars.map(Shape::of) {
        None | Some(Shape::None) => None,
        Some(Shape::Str(chars)) => Some(chars),
        Some(shape) => return Err(error(format!("strip() of {}", shape.name()))),
    };
    Ok(Value::from(trim(text, chars, start, end)))
}

/// `text` without the given characters, or white space, at its start or end. Of the characters,
/// the first [`MAX_STRIP_CHARS`] count: no template names more, and the cost is their product.
pub fn trim<'a>(text: &'a str, chars: Option<&str>, start: bool, end: bool) -> &'a str {
    let chars = chars.map(|chars| {
        let end = chars.char_indices().nth(MAX_STRIP_CHARS).map_or(chars.len(), |(at, _)| at);
        &chars[..end]
    });
    let goes = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if start { text.trim_start_matches(goes) } else { text };
    if end { text.trim_end_matches(goes) } else { text }
}

fn split(state: &State, text: &str, args: &[Value], from_end: bool) -> Result<Value, Error> {
    let (separator, limit, kwargs): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = match separator {
        Some(separator) => Some(separator),
        None => kwargs.get::<Option<Value>>("sep")?,
    };
    let limit = match limit {
        Some(limit) => Some(limit),
        None => kwargs.get::<Option<i64>>("maxsplit")?,
    };
    kwargs.assert_all_used()?;
    // A negative limit is none.
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX - 1);
    let pieces = match separator.as_ref().map(Shape::of) {
        None | Some(Shape::None) => split_space(text, limit, from_end),
        Some(Shape::Str("")) => return Err(error("split() with an empty separator")),
        Some(Shape::Str(by)) if from_end => {
            let mut pieces: Vec<_> = text.rsplitn(limit + 1, by).collect();
            pieces.reverse();
            pieces
        }
        Some(Shape::Str(by)) => text.splitn(limit + 1, by).collect(),
        Some(shape) => return Err(error(format!("split() by {}", shape.name()))),
    };
    strings(state, &pieces)
}

/// `text` cut at runs of white space, at most `limit` times; what is left then keeps its far end.
fn split_space(text: &str, limit: usize, from_end: bool) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = trim(text, None, !from_end, from_end);
    while !rest.is_empty() && pieces.len() < limit {
        let cut = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(cut) = cut else { break };
        if from_end {
            let space = rest[cut..].chars().next().map_or(0, char::len_utf8);
            pieces.push(&rest[cut + space..]);
            rest = trim(&rest[..cut], None, false, true);
        } else {
            pieces.push(&rest[..cut]);
            rest = trim(&rest[cut..], None, true, false);
        }
    }
    if !rest.is_empty() {
        pieces.push(rest);
    }
    if from_end {
        pieces.reverse();
    }
    pieces
}

fn strings(state: &State, pieces: &[&str]) -> Result<Value, Error> {
    let bytes: usize = pieces.iter().map(|piece| piece.len() + size_of::<Value>()).sum();
    Meter::new(state).pay(bytes)?;
    Ok(Value::from(pieces.iter().map(|&piece| Value::from(piece)).collect::<Vec<_>>()))
}

fn split_lines(state: &State, text: &str, args: &[Value]) -> Result<Value, Error> {
    let (keep_ends, kwargs): (Option<bool>, Kwargs) = from_args(args)?;
    let keep_ends = keep_ends.or(kwargs.get("keepends")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    let lines = split_at_line_ends(text);
    let pieces: Vec<_> =
        lines.into_iter().map(|(line, whole)| if keep_ends { whole } else { line }).collect();
    strings(state, &pieces)
}

/// The lines of a text, one at least, without their ends.
pub fn lines(text: &str) -> Vec<&str> {
    let mut lines: Vec<_> = split_at_line_ends(text).into_iter().map(|(line, _)| line).collect();
    if lines.is_empty() {
        lines.push("");
    }
    lines
}

/// The lines of a text without and with their ends.
fn split_at_line_ends(text: &str) -> Vec<(&str, &str)> {
    let is_end = |c: char| {
        let is_ascii_end = matches!(c, '\n'..='\r' | '\u{1C}'..='\u{1E}');
        is_ascii_end || matches!(c, '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(is_end) {
        let end = &rest[at..];
        let is_pair = end.starts_with("\r\n");
        let length = if is_pair { 2 } else { end.chars().next().map_or(0, char::len_utf8) };
        lines.push((&rest[..at], &rest[..at + length]));
        rest = &rest[at + length..];
    }
    if !rest.is_empty() {
        lines.push((rest, rest));
    }
    lines
}

fn partition(text: &str, args: &[Value], from_end: bool) -> Result<Value, Error> {
    let (by,): (&str,) = from_args(args)?;
    if by.is_empty() {
        return Err(error("partition() with an empty separator"));
    }
    let parts = match if from_end { text.rsplit_once(by) } else { text.split_once(by) } {
        Some((before, after)) => [before, by, after],
        None if from_end => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

/// Whether one of the affixes fits: a string, or a tuple of them.
fn any_affix(args: &[Value], fits: impl Fn(&str) -> bool) -> Result<bool, Error> {
    let (affix,): (&Value,) = from_args(args)?;
    let wrong =
        |value: &Value| error(format!("{} is no prefix or suffix", Shape::of(value).name()));
    match Shape::of(affix) {
        Shape::Str(affix) => Ok(fits(affix)),
        Shape::Tuple(affixes) => {
            for affix in affixes.try_iter().into_iter().flatten() {
                if fits(affix.as_str().ok_or_else(|| wrong(&affix))?) {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        _ => Err(wrong(affix)),
    }
}

/// `text` with the first `count` occurrences of `from` replaced; a negative count is all.
pub fn replace(
    state: &State,
    text: &str,
    (from, to): (&str, &str),
    count: i64,
) -> Result<String, Error> {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let most = (text.len() / from.len().max(1)).saturating_add(1).min(count);
    let found = if to.len() > from.len() { text.matches(from).take(most).count() } else { 0 };
    Meter::new(state).pay(found.saturating_mul(to.len()).saturating_add(text.len()))?;
    Ok(text.replacen(from, to, count))
}

fn join(state: &State, by: &str, items: &Value) -> Result<String, Error> {
    let mut meter = Meter::new(state);
    let mut out = String::new();
    for (i, item) in items.try_iter()?.checked().enumerate() {
        let item = item?;
        let Shape::Str(text) = Shape::of(&item) else {
            return Err(error(format!("join() of {}", Shape::of(&item).name())));
        };
        meter.pay(by.len().saturating_add(text.len()).saturating_add(1))?;
        if i > 0 {
            out.push_str(by);
        }
        out.push_str(text);
    }
    Ok(out)
}

fn search(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (what,): (&str,) = from_args(args)?;
    let at = match method {
        "count" => return Ok(Value::from(text.matches(what).count())),
        "rfind" => text.rfind(what),
        _ => text.find(what),
    };
    match at {
        Some(at) => Ok(Value::from(text[..at].chars().count())),
        None if method == "index" => Err(error("index(): the substring does not occur")),
        None => Ok(Value::from(-1)),
    }
}

fn pad(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (usize, Option<char>) = from_args(args)?;
    if width > MAX_WIDTH {
        return Err(error(format!("{method}() to a width of {width}; the limit is {MAX_WIDTH}")));
    }
    let missing = width.saturating_sub(text.chars().count());
    let fill = if method == "zfill" { '0' } else { fill.unwrap_or(' ') };
    let left = match method {
        "ljust" => 0,
        // The odd one goes left if the width is odd, as in Python.
        "center" => missing / 2 + (missing & width & 1),
        _ => missing,
    };
    let fills = |count: usize| fill.to_string().repeat(count);
    let (sign, digits) = match text.strip_prefix(['-', '+']) {
        Some(digits) if method == "zfill" => text.split_at(text.len() - digits.len()),
        _ => ("", text),
    };
    Ok(Value::from([sign, &fills(left), digits, &fills(missing - left)].concat()))
}

fn dict(state: &State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(dict) = value.as_object() else {
        return Err(ErrorKind::UnknownMethod.into());
    };
    if method == "get" {
        let (key, default): (&Value, Option<Value>) = from_args(args)?;
        let key = match Shape::of(key) {
            Shape::List(_) | Shape::Dict(_) | Shape::Tuple(_) | Shape::Other => {
                return Err(error(format!("get() of {}", Shape::of(key).name())));
            }
            _ => key,
        };
        return Ok(dict.get_value(key).unwrap_or_else(|| default.unwrap_or(Value::from(()))));
    }
    let () = from_args(args)?;
    let mut meter = Meter::new(state);
    let mut items = Vec::new();
    for (key, value) in dict.try_iter_pairs().into_iter().flatten() {
        meter.pay(4 * size_of::<Value>())?;
        items.push(match method {
            "items" => Value::from(Tuple::from([key, value])),
            "keys" => key,
            "values" => value,
            _ => return Err(ErrorKind::UnknownMethod.into()),
        });
    }
    match method {
        "items" | "keys" | "values" => Ok(Value::from(items)),
        "copy" => Ok(value.clone()),
        _ => Err(ErrorKind::UnknownMethod.into()),
    }
}

fn list(state: &State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (what,): (&Value,) = match method {
        "count" | "index" => from_args(args)?,
        _ => return Err(ErrorKind::UnknownMethod.into()),
    };
    let items = collect(state, value)?;
    let mut count = 0;
    for (i, item) in items.iter().enumerate() {
        if super::ops::equal(state, item, what)? {
            if method == "index" {
                return Ok(Value::from(i));
            }
            count += 1;
        }
    }
    if method == "index" {
        let text = to_str(state, what)?;
        return Err(error(format!("index(): {text} does not occur")));
    }
    Ok(Value::from(count))
}
