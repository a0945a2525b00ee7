//! Python's operators, bounded.
//!
//! The engine's own operators work on values of any size for a constant price, and differ from
//! Python's in places. The compiler replaces their instructions by calls of the functions
//! here. Their names are no identifiers, so a template cannot call them.

use minijinja::value::{Kwargs, Rest, Tuple};
use minijinja::{Environment, Error, State, Value};

use super::value::{Meter, Shape, error, nest, to_str, weigh};

/// What a slot of a list costs, in bytes.
const SLOT_BYTES: usize = 64;

/// Makes the operators known under the names that the compiler uses.
pub fn install(env: &mut Environment<'_>) {
    env.add_filter("+", add);
    env.add_filter("*", multiply);
    env.add_filter("%", remainder);
    env.add_filter("~", concat);
    env.add_filter("==", |s: &State, a: &Value, b: &Value| equal(s, a, b));
    env.add_filter("!=", |s: &State, a: &Value, b: &Value| equal(s, a, b).map(|same| !same));
    env.add_filter("<", |s: &State, a: &Value, b: &Value| order(s, a, b).map(|o| o.is_lt()));
    env.add_filter("<=", |s: &State, a: &Value, b: &Value| order(s, a, b).map(|o| o.is_le()));
    env.add_filter(">", |s: &State, a: &Value, b: &Value| order(s, a, b).map(|o| o.is_gt()));
    env.add_filter(">=", |s: &State, a: &Value, b: &Value| order(s, a, b).map(|o| o.is_ge()));
    env.add_filter("in", |s: &State, item: &Value, all: &Value| contains(s, all, item));
    env.add_filter("[]", get_item);
    env.add_filter("[:]", slice);
    env.add_filter("list[]", |s: &State, items: Rest<Value>| nested(s, &items).map(Value::from));
    env.add_filter("tuple()", |s: &State, items: Rest<Value>| {
        nested(s, &items).map(|items| Value::from(Tuple::from(items)))
    });
    env.add_filter("dict{}", |s: &State, items: Rest<Value>| dict(s, &items));
    env.add_filter("checked", |s: &State, value: Value| weigh(s, &value).map(|()| value));
    env.add_filter("ns.", |s: &State, value: &Value| nest(s, value));

    for name in ["==", "eq", "equalto"] {
        env.add_test(name, |s: &State, a: &Value, b: &Value| equal(s, a, b));
    }
    for name in ["!=", "ne"] {
        env.add_test(name, |s: &State, a: &Value, b: &Value| equal(s, a, b).map(|same| !same));
    }
    for name in ["<", "lt", "lessthan"] {
        env.add_test(name, |s: &State, a: &Value, b: &Value| order(s, a, b).map(|o| o.is_lt()));
    }
    for name in ["<=", "le"] {
        env.add_test(name, |s: &State, a: &Value, b: &Value| order(s, a, b).map(|o| o.is_le()));
    }
    for name in [">", "gt", "greaterthan"] {
        env.add_test(name, |s: &State, a: &Value, b: &Value| order(s, a, b).map(|o| o.is_gt()));
    }
    for name in [">=", "ge"] {
        env.add_test(name, |s: &State, a: &Value, b: &Value| order(s, a, b).map(|o| o.is_ge()));
    }
    env.add_test("in", |s: &State, item: &Value, all: &Value| contains(s, all, item));
}

/// `namespace(…)`, whose values may be anything but another namespace.
pub fn namespace(state: &State, mapping: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let values = match &mapping {
        Some(mapping) => vec![mapping.clone()],
        None => kwargs.args().map(|key| kwargs.peek::<Value>(key)).collect::<Result<_, _>>()?,
    };
    for value in &values {
        nest(state, value)?;
    }
    minijinja::functions::namespace(Some(mapping.unwrap_or_else(|| kwargs.into()).into()))
}

/// `dict(…)`.
pub fn dict_function(
    state: &State,
    mapping: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let mut pairs = Vec::new();
    if let Some(mapping) = &mapping {
        let Shape::Dict(entries) = Shape::of(mapping) else {
            return Err(error(format!("dict() of {}", Shape::of(mapping).name())));
        };
        pairs.extend(entries.try_iter_pairs().into_iter().flatten().flat_map(|(k, v)| [k, v]));
    }
    for key in kwargs.args() {
        pairs.extend([Value::from(key), kwargs.get::<Value>(key)?]);
    }
    dict(state, &pairs)
}

fn nested(state: &State, items: &[Value]) -> Result<Vec<Value>, Error> {
    items.iter().map(|item| nest(state, item)).collect()
}

/// A mapping of keys and values in turn.
fn dict(state: &State, items: &[Value]) -> Result<Value, Error> {
    let mut pairs = Vec::with_capacity(items.len() / 2);
    for pair in items.chunks_exact(2) {
        if matches!(Shape::of(&pair[0]), Shape::List(_) | Shape::Dict(_) | Shape::Other) {
            return Err(error(format!("{} cannot be a key", Shape::of(&pair[0]).name())));
        }
        pairs.push((nest(state, &pair[0])?, nest(state, &pair[1])?));
    }
    Ok(Value::from_pairs(pairs))
}

fn unsupported(op: &str, a: &Value, b: &Value) -> Error {
    error(format!("{} {op} {} is not defined", Shape::of(a).name(), Shape::of(b).name()))
}

enum Numbers {
    Ints(i128, i128),
    Floats(f64, f64),
}

/// Both operands as numbers of one kind; none if one is no number.
fn numbers(a: &Value, b: &Value) -> Option<Numbers> {
    let int = |value: &Value| match Shape::of(value) {
        Shape::Int(n) => Some(n),
        Shape::Bool(n) => Some(i128::from(n)),
        _ => None,
    };
    let float = |value: &Value| match Shape::of(value) {
        Shape::Float(x) => Some(x),
        _ => int(value).map(|n| n as f64),
    };
    match (int(a), int(b)) {
        (Some(a), Some(b)) => Some(Numbers::Ints(a, b)),
        _ => Some(Numbers::Floats(float(a)?, float(b)?)),
    }
}

/// An integer of at most 64 bits, which is what templates count with.
fn int(op: &str, value: Option<i128>) -> Result<Value, Error> {
    value
        .and_then(|n| i64::try_from(n).ok())
        .map(Value::from)
        .ok_or_else(|| error(format!("the result of {op} needs more than 64 bits")))
}

/// `a + b`.
pub fn add(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    match (Shape::of(a), Shape::of(b)) {
        (Shape::Str(a), Shape::Str(b)) => join_two(state, a, b),
        (Shape::List(_), Shape::List(_)) => Ok(Value::from(chain(state, a, b)?)),
        (Shape::Tuple(_), Shape::Tuple(_)) => Ok(Value::from(Tuple::from(chain(state, a, b)?))),
        _ => match numbers(a, b) {
            Some(Numbers::Ints(a, b)) => int("+", a.checked_add(b)),
            Some(Numbers::Floats(a, b)) => Ok(Value::from(a + b)),
            None => Err(unsupported("+", a, b)),
        },
    }
}

fn concat(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    join_two(state, &to_str(state, a)?, &to_str(state, b)?)
}

fn join_two(state: &State, a: &str, b: &str) -> Result<Value, Error> {
    Meter::new(state).pay(a.len() + b.len())?;
    Ok(Value::from([a, b].concat()))
}

fn chain(state: &State, a: &Value, b: &Value) -> Result<Vec<Value>, Error> {
    let mut items = collect(state, a)?;
    items.extend(collect(state, b)?);
    Ok(items)
}

/// The items of a list or tuple.
pub fn collect(state: &State, value: &Value) -> Result<Vec<Value>, Error> {
    let mut meter = Meter::new(state);
    let mut items = Vec::new();
    for item in value.try_iter()?.checked() {
        meter.pay(SLOT_BYTES)?;
        items.push(item?);
    }
    Ok(items)
}

fn multiply(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    let (repeated, times) = match (Shape::of(a), Shape::of(b)) {
        (Shape::Str(_) | Shape::List(_) | Shape::Tuple(_), Shape::Int(times)) => (a, times),
        (Shape::Int(times), Shape::Str(_) | Shape::List(_) | Shape::Tuple(_)) => (b, times),
        _ => {
            return match numbers(a, b) {
                Some(Numbers::Ints(a, b)) => int("*", a.checked_mul(b)),
                Some(Numbers::Floats(a, b)) => Ok(Value::from(a * b)),
                None => Err(unsupported("*", a, b)),
            };
        }
    };
    let times = usize::try_from(times.max(0)).unwrap_or(usize::MAX);
    if let Shape::Str(text) = Shape::of(repeated) {
        Meter::new(state).pay(text.len().saturating_mul(times))?;
        return Ok(Value::from(text.repeat(times)));
    }
    let items = collect(state, repeated)?;
    Meter::new(state).pay(items.len().saturating_mul(SLOT_BYTES).saturating_mul(times))?;
    let count = items.len() * times;
    let all: Vec<Value> = items.into_iter().cycle().take(count).collect();
    Ok(if repeated.is_tuple() { Value::from(Tuple::from(all)) } else { Value::from(all) })
}

fn remainder(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    if let Shape::Str(format) = Shape::of(a) {
        return percent_format(state, format, b);
    }
    match numbers(a, b) {
        Some(Numbers::Ints(_, 0)) => Err(error("modulo by zero")),
        // As in Python, the remainder has the sign of the divisor.
        Some(Numbers::Ints(a, b)) => {
            int("%", a.checked_rem(b).map(|r| if r != 0 && (r < 0) != (b < 0) { r + b } else { r }))
        }
        Some(Numbers::Floats(_, 0.0)) => Err(error("modulo by zero")),
        Some(Numbers::Floats(a, b)) => {
            let r = a % b;
            Ok(Value::from(if r != 0.0 && (r < 0.0) != (b < 0.0) { r + b } else { r }))
        }
        None => Err(unsupported("%", a, b)),
    }
}

/// `format % values` with `%s`, `%d` and `%%`.
fn percent_format(state: &State, format: &str, values: &Value) -> Result<Value, Error> {
    let values = match Shape::of(values) {
        Shape::Tuple(_) => collect(state, values)?,
        _ => vec![values.clone()],
    };
    let mut values = values.iter();
    let mut meter = Meter::new(state);
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        meter.pay(at)?;
        out.push_str(&rest[..at]);
        let directive = rest[at + 1..].chars().next();
        let text = match directive {
            Some('%') => "%".into(),
            Some('s') => to_str(state, values.next().ok_or_else(too_few_values)?)?,
            Some('d') => {
                let value = values.next().ok_or_else(too_few_values)?;
                let Shape::Int(n) = Shape::of(value) else {
                    return Err(error(format!("%d of {}", Shape::of(value).name())));
                };
                n.to_string().into()
            }
            _ => return Err(error("in a format string, only %s, %d and %% are supported")),
        };
        meter.pay(text.len())?;
        out.push_str(&text);
        // Every directive that gets here is one byte long.
        rest = &rest[at + 2..];
    }
    if values.next().is_some() {
        return Err(error("a format string has fewer directives than values"));
    }
    out.push_str(rest);
    Ok(Value::from(out))
}

fn too_few_values() -> Error {
    error("a format string has more directives than values")
}

/// `a == b`.
pub fn equal(state: &State, a: &Value, b: &Value) -> Result<bool, Error> {
    match (Shape::of(a), Shape::of(b)) {
        // Functions and namespaces are themselves only.
        (Shape::Other, _) | (_, Shape::Other) => Ok(minijinja::tests::is_sameas(a, b)),
        _ => {
            // A comparison goes no further than the smaller of the two.
            weigh(state, b)?;
            Ok(a == b)
        }
    }
}

fn order(state: &State, a: &Value, b: &Value) -> Result<std::cmp::Ordering, Error> {
    weigh(state, b)?;
    match (Shape::of(a), Shape::of(b)) {
        (Shape::Str(a), Shape::Str(b)) => Ok(a.cmp(b)),
        (Shape::List(_), Shape::List(_)) | (Shape::Tuple(_), Shape::Tuple(_)) => Ok(a.cmp(b)),
        _ => match numbers(a, b) {
            Some(Numbers::Ints(a, b)) => Ok(a.cmp(&b)),
            Some(Numbers::Floats(a, b)) => {
                a.partial_cmp(&b).ok_or_else(|| error("a comparison with NaN"))
            }
            None => Err(unsupported("<", a, b)),
        },
    }
}

fn contains(state: &State, all: &Value, item: &Value) -> Result<bool, Error> {
    weigh(state, item)?;
    match (Shape::of(all), Shape::of(item)) {
        (Shape::Str(all), Shape::Str(item)) => {
            Meter::new(state).pay(all.len())?;
            Ok(all.contains(item))
        }
        (Shape::List(items) | Shape::Tuple(items), _) => {
            for other in items.try_iter().into_iter().flatten() {
                if equal(state, item, &other)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        (Shape::Dict(_), Shape::List(_) | Shape::Dict(_) | Shape::Other) => Ok(false),
        (Shape::Dict(dict), _) => Ok(dict.get_value(item).is_some()),
        (Shape::Undefined, _) => Ok(false),
        _ => Err(error(format!(
            "{} in {} is not defined",
            Shape::of(item).name(),
            Shape::of(all).name()
        ))),
    }
}

/// `of[key]`.
pub fn get_item(state: &State, of: &Value, key: &Value) -> Result<Value, Error> {
    weigh(state, key)?;
    match (Shape::of(of), Shape::of(key)) {
        (Shape::Str(text), Shape::Int(index)) => {
            Meter::new(state).pay(text.len())?;
            let count = text.chars().count() as i128;
            let index = if index < 0 { index + count } else { index };
            let found = usize::try_from(index).ok().and_then(|index| text.chars().nth(index));
            Ok(found.map_or(Value::UNDEFINED, |c| Value::from(c.to_string())))
        }
        // Of lists and functions, dictionaries know nothing.
        (_, Shape::List(_) | Shape::Dict(_) | Shape::Other) => Ok(Value::UNDEFINED),
        _ => of.get_item(key),
    }
}

fn slice(
    state: &State,
    of: &Value,
    start: &Value,
    stop: &Value,
    step: &Value,
) -> Result<Value, Error> {
    let bounds =
        Bounds { start: bound(start)?, stop: bound(stop)?, step: bound(step)?.unwrap_or(1) };
    if bounds.step == 0 {
        return Err(error("a slice cannot have step 0"));
    }
    match Shape::of(of) {
        Shape::Str(text) => {
            Meter::new(state).pay(text.len().saturating_mul(4))?;
            let chars: Vec<char> = text.chars().collect();
            Ok(Value::from(bounds.select(&chars).collect::<String>()))
        }
        Shape::List(_) => {
            let items = collect(state, of)?;
            Ok(Value::from(bounds.select(&items).collect::<Vec<_>>()))
        }
        Shape::Tuple(_) => {
            let items = collect(state, of)?;
            Ok(Value::from(Tuple::from(bounds.select(&items).collect::<Vec<_>>())))
        }
        shape => Err(error(format!("{} cannot be sliced", shape.name()))),
    }
}

fn bound(value: &Value) -> Result<Option<i128>, Error> {
    match Shape::of(value) {
        Shape::None => Ok(None),
        Shape::Int(n) => Ok(Some(n)),
        Shape::Bool(n) => Ok(Some(i128::from(n))),
        shape => Err(error(format!("{} cannot bound a slice", shape.name()))),
    }
}

struct Bounds {
    start: Option<i128>,
    stop: Option<i128>,
    step: i128,
}

impl Bounds {
    /// The items of `all` from start to stop (exclusive), as Python counts.
    fn select<'a, T: Clone>(&self, all: &'a [T]) -> impl Iterator<Item = T> + use<'a, T> {
        let len = all.len() as i128;
        let (low, high) = if self.step > 0 { (0, len) } else { (-1, len - 1) };
        let clamp = |at: i128| if at < 0 { (at + len).max(low) } else { at.min(high) };
        let (first, last) = if self.step > 0 { (low, high) } else { (high, low) };
        let mut at = self.start.map_or(first, clamp);
        let stop = self.stop.map_or(last, clamp);
        let step = self.step;
        std::iter::from_fn(move || {
            let inside = if step > 0 { at < stop } else { at > stop };
            let item = inside.then(|| all[at as usize].clone())?;
            at = at.saturating_add(step);
            Some(item)
        })
    }
}
