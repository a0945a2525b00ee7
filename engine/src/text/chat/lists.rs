//! Filters of lists and dictionaries, and tests.

use minijinja::value::Kwargs;
use minijinja::{Environment, Error, State, Value, filters, tests};

use super::value::{Meter, Shape, error, weigh};
use super::{methods, ops};

/// Adds them to an environment.
pub fn install(env: &mut Environment<'_>) {
    add_filters(env);
    add_ordering_filters(env);
    add_tests(env);
}

fn add_filters(env: &mut Environment<'_>) {
    for name in ["length", "count"] {
        env.add_filter(name, length);
    }
    for name in ["default", "d"] {
        env.add_filter(name, default);
    }
    env.add_filter("first", |state: &State, value: &Value| end(state, value, 0));
    env.add_filter("last", |state: &State, value: &Value| end(state, value, -1));
    env.add_filter("attr", ops::get_item);
    env.add_filter("items", items);
    env.add_filter("reverse", reverse);
    env.add_filter("sum", sum);
    // The engine's own, which pay for each item and go no deeper.
    env.add_filter("list", filters::list);
    env.add_filter("map", filters::map);
    env.add_filter("select", filters::select);
    env.add_filter("reject", filters::reject);
    env.add_filter("selectattr", filters::selectattr);
    env.add_filter("rejectattr", filters::rejectattr);
    env.add_filter("batch", filters::batch);
    env.add_filter("slice", filters::slice);
    env.add_filter("abs", filters::abs);
    env.add_filter("round", filters::round);
}

/// The engine's own filters that compare; values are measured before.
fn add_ordering_filters(env: &mut Environment<'_>) {
    env.add_filter("sort", |state: &State, value: Value, kwargs: Kwargs| {
        weigh(state, &value)?;
        filters::sort(state, value, kwargs)
    });
    env.add_filter("unique", |state: &State, value: Value, kwargs: Kwargs| {
        weigh(state, &value)?;
        filters::unique(state, value, kwargs)
    });
    env.add_filter("min", |state: &State, value: Value, kwargs: Kwargs| {
        weigh(state, &value)?;
        filters::min(state, value, kwargs)
    });
    env.add_filter("max", |state: &State, value: Value, kwargs: Kwargs| {
        weigh(state, &value)?;
        filters::max(state, value, kwargs)
    });
    env.add_filter("dictsort", |state: &State, value: &Value, kwargs: Kwargs| {
        weigh(state, value)?;
        filters::dictsort(value, kwargs)
    });
    env.add_filter(
        "groupby",
        |state: &State, value: Value, attribute: Option<&str>, kwargs: Kwargs| {
            weigh(state, &value)?;
            filters::groupby(value, attribute, kwargs)
        },
    );
}

/// `default(default_value='', boolean=False)`.
fn default(
    value: &Value,
    default: Option<Value>,
    boolean: Option<bool>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let default = default.or(kwargs.get::<Option<Value>>("default_value")?);
    let boolean = boolean.or(kwargs.get::<Option<bool>>("boolean")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    if value.is_undefined() || (boolean && !value.is_true()) {
        return Ok(default.unwrap_or_else(|| Value::from("")));
    }
    Ok(value.clone())
}

fn length(state: &State, value: &Value) -> Result<usize, Error> {
    match Shape::of(value) {
        Shape::Str(text) => {
            Meter::new(state).pay(text.len())?;
            Ok(text.chars().count())
        }
        Shape::Undefined => Ok(0),
        shape => value.len().ok_or_else(|| error(format!("{} has no length", shape.name()))),
    }
}

/// The first or last item or character; undefined if there is none.
fn end(state: &State, value: &Value, index: i64) -> Result<Value, Error> {
    match Shape::of(value) {
        Shape::Undefined => Ok(Value::UNDEFINED),
        Shape::Str(_) | Shape::List(_) | Shape::Tuple(_) => {
            ops::get_item(state, value, &Value::from(index))
        }
        Shape::Dict(_) => {
            let keys = ops::collect(state, value)?;
            let key = if index == 0 { keys.first() } else { keys.last() };
            Ok(key.cloned().unwrap_or(Value::UNDEFINED))
        }
        shape => Err(error(format!("{} has no items", shape.name()))),
    }
}

fn items(state: &mut State, value: &Value) -> Result<Value, Error> {
    match Shape::of(value) {
        Shape::Undefined => Ok(Value::from(Vec::<Value>::new())),
        Shape::Dict(_) => methods::call(state, value, "items", &[]),
        shape => Err(error(format!("items of {}", shape.name()))),
    }
}

fn reverse(state: &State, value: &Value) -> Result<Value, Error> {
    if let Shape::Str(text) = Shape::of(value) {
        Meter::new(state).pay(text.len())?;
        return Ok(Value::from(text.chars().rev().collect::<String>()));
    }
    let mut items = ops::collect(state, value)?;
    items.reverse();
    Ok(Value::from(items))
}

/// `sum(attribute=None, start=0)`.
fn sum(
    state: &State,
    values: &Value,
    attribute: Option<Value>,
    start: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let attribute = attribute.or(kwargs.get::<Option<Value>>("attribute")?);
    let start = start.or(kwargs.get::<Option<Value>>("start")?);
    kwargs.assert_all_used()?;
    let mut total = start.unwrap_or_else(|| Value::from(0));
    for value in ops::collect(state, values)? {
        let value = match &attribute {
            Some(attribute) => ops::get_item(state, &value, attribute)?,
            None => value,
        };
        total = ops::add(state, &total, &value)?;
    }
    Ok(total)
}

fn add_tests(env: &mut Environment<'_>) {
    env.add_test("defined", tests::is_defined);
    env.add_test("undefined", tests::is_undefined);
    env.add_test("none", tests::is_none);
    env.add_test("boolean", tests::is_boolean);
    env.add_test("true", tests::is_true);
    env.add_test("false", tests::is_false);
    env.add_test("number", tests::is_number);
    env.add_test("integer", tests::is_integer);
    env.add_test("float", tests::is_float);
    env.add_test("odd", tests::is_odd);
    env.add_test("even", tests::is_even);
    env.add_test("divisibleby", tests::is_divisibleby);
    env.add_test("string", tests::is_string);
    env.add_test("sameas", tests::is_sameas);
    env.add_test("filter", tests::is_filter);
    env.add_test("test", tests::is_test);
    env.add_test("lower", |text: &str| case(text, char::is_lowercase, char::is_uppercase));
    env.add_test("upper", |text: &str| case(text, char::is_uppercase, char::is_lowercase));
    env.add_test("callable", |value: &Value| matches!(Shape::of(value), Shape::Other));
    env.add_test("mapping", |value: &Value| matches!(Shape::of(value), Shape::Dict(_)));
    env.add_test("sequence", is_iterable);
    env.add_test("iterable", is_iterable);
}

/// What Python iterates. All of it has a length and items too, which makes a sequence to Jinja2.
fn is_iterable(value: &Value) -> bool {
    matches!(
        Shape::of(value),
        Shape::Str(_) | Shape::List(_) | Shape::Tuple(_) | Shape::Dict(_) | Shape::Undefined
    )
}

fn case(text: &str, is: fn(char) -> bool, is_not: fn(char) -> bool) -> bool {
    text.chars().any(is) && !text.chars().any(is_not)
}
