//! Filters of Jinja2 on texts, where those of minijinja differ or have no bound.

use std::collections::BTreeMap;

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind};
use minijinja::{Environment, Error, State, Value};

use super::bounds::{Text, checked, error, text};
use super::methods::{is_space, lines, replaced, with_case};
use super::operators::filled;

/// Adds the filters and tests to an environment.
pub(super) fn add(environment: &mut Environment) {
    for name in ["upper", "lower", "capitalize"] {
        environment.add_filter(name, move |value: Value| -> Result<Value, Error> {
            checked(Value::from(with_case(&text(&value)?, name).unwrap_or_default()))
        });
    }
    environment.add_filter("title", title);
    environment.add_filter("tojson", super::json::to_json);
    environment.add_filter("string", |value: Value| text(&value));
    environment.add_filter("trim", trim);
    environment.add_filter("replace", replace);
    environment.add_filter("join", join);
    environment.add_filter("indent", indent);
    environment.add_filter("format", format);
    environment.add_filter("center", center);
    environment.add_filter("wordcount", |value: Value| -> Result<usize, Error> {
        let is_part = |it: char| it.is_alphanumeric() || it == '_';
        Ok(text(&value)?.split(|it| !is_part(it)).filter(|word| !word.is_empty()).count())
    });
    environment.add_filter("list", |value: Value| -> Result<Value, Error> {
        let mut items = Vec::new();
        if !value.is_undefined() {
            for item in value.try_iter()? {
                items.push(item);
                if items.len() > super::bounds::MAX_ITEMS {
                    break;
                }
            }
        }
        checked(Value::from(items))
    });
    environment.add_filter("batch", |state: &State, value: Value, count: usize, fill: Option<Value>| {
        few(count).and_then(|count| minijinja::filters::batch(state, value, count, fill))
    });
    environment.add_filter("slice", |state: &State, value: Value, count: usize, fill: Option<Value>| {
        few(count).and_then(|count| minijinja::filters::slice(state, value, count, fill))
    });
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("int", int);
    environment.add_filter("float", |value: Value, other: Option<f64>| match value.as_str() {
        Some(text) => text.trim().replace('_', "").parse().unwrap_or(other.unwrap_or(0.0)),
        None => f64::try_from(value).unwrap_or(other.unwrap_or(0.0)),
    });
    // In Python, texts and mappings are sequences too.
    environment.add_test("sequence", |value: Value| match value.kind() {
        ValueKind::String | ValueKind::Seq | ValueKind::Map => true,
        ValueKind::Iterable => value.len().is_some(),
        _ => false,
    });
    environment
        .add_test("callable", |value: Value| value.kind() == ValueKind::Plain && value.as_object().is_some());
}

/// A number of parts, if it is not too large.
fn few(count: usize) -> Result<usize, Error> {
    (count <= 1 << 16).then_some(count).ok_or_else(|| error("it asks for more than 65536 parts of a list"))
}

fn default(
    value: Value,
    other: Option<Value>,
    of_false: Option<bool>,
    named: Kwargs,
) -> Result<Value, Error> {
    let other = other.or(named.get("default_value")?).unwrap_or_else(|| Value::from(""));
    let of_false = of_false.or(named.get("boolean")?).unwrap_or(false);
    named.assert_all_used()?;
    Ok(if value.is_undefined() || (of_false && !value.is_true()) { other } else { value })
}

fn int(value: Value, other: Option<Value>, base: Option<u32>, named: Kwargs) -> Result<Value, Error> {
    let other = other.or(named.get("default")?).unwrap_or_else(|| Value::from(0));
    let base = base.or(named.get("base")?).unwrap_or(10);
    named.assert_all_used()?;
    let Some(text) = value.as_str() else {
        let truncated = |number: f64| number.is_finite().then(|| Value::from(number.trunc() as i128));
        return Ok(match value.kind() {
            ValueKind::Number if value.is_integer() => value,
            ValueKind::Bool => Value::from(u8::from(value.is_true())),
            _ => f64::try_from(value).ok().and_then(truncated).unwrap_or(other),
        });
    };
    let text = text.trim().replace('_', "");
    let digits = match (base, text.get(..2)) {
        (16, Some("0x" | "0X")) | (8, Some("0o" | "0O")) | (2, Some("0b" | "0B")) => &text[2..],
        _ => &text,
    };
    if let Ok(number) = i128::from_str_radix(digits, base.clamp(2, 36)) {
        return Ok(Value::from(number));
    }
    let number = text.parse::<f64>().ok().filter(|number| base == 10 && number.is_finite());
    Ok(number.map_or(other, |number| Value::from(number.trunc() as i128)))
}

fn trim(value: Value, chars: Option<String>) -> Result<String, Error> {
    let value = text(&value)?;
    Ok(match chars {
        Some(chars) => value.trim_matches(|it| chars.contains(it)).to_owned(),
        None => value.trim_matches(is_space).to_owned(),
    })
}

/// The text with an upper-case letter after spaces, hyphens and opening brackets.
fn title(value: Value) -> Result<String, Error> {
    let mut titled = String::new();
    let mut is_in_word = false;
    for char in text(&value)?.chars() {
        match is_in_word {
            true => titled.extend(char.to_lowercase()),
            false => titled.extend(char.to_uppercase()),
        }
        is_in_word = !char.is_whitespace() && !matches!(char, '-' | '(' | '{' | '[' | '<');
    }
    Ok(titled)
}

fn replace(value: Value, old: Value, new: Value, count: Option<i64>) -> Result<String, Error> {
    let count = usize::try_from(count.unwrap_or(-1)).unwrap_or(usize::MAX);
    replaced(&text(&value)?, &text(&old)?, &text(&new)?, count)
}

fn join(
    value: Value,
    between: Option<Value>,
    attribute: Option<String>,
    named: Kwargs,
) -> Result<String, Error> {
    let between = between.or(named.get("d")?).unwrap_or_else(|| Value::from(""));
    let attribute = attribute.or(named.get("attribute")?);
    named.assert_all_used()?;
    let between = text(&between)?;
    let mut all = Text::default();
    if value.is_undefined() {
        return Ok(String::new());
    }
    for (index, item) in value.try_iter()?.enumerate() {
        all.push(if index == 0 { "" } else { &between })?;
        match &attribute {
            None => all.value(&item)?,
            Some(path) => {
                let mut part = item;
                for name in path.split('.') {
                    part = match name.parse::<usize>() {
                        Ok(index) => part.get_item_by_index(index)?,
                        Err(_) => part.get_attr(name)?,
                    };
                }
                all.value(&part)?;
            }
        }
    }
    all.finish()
}

fn indent(value: Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let option = |place: usize, name: &str| -> Result<Option<Value>, Error> {
        Ok(named.get::<Option<Value>>(name)?.or_else(|| positional.get(place).cloned()))
    };
    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let width = option(0, "width")?.unwrap_or_else(|| Value::from(4));
    let (first, blank) = (is_true(option(1, "first")?), is_true(option(2, "blank")?));
    named.assert_all_used()?;
    let indent = match (width.as_str(), width.as_usize()) {
        (Some(text), _) => text.to_owned(),
        (None, Some(width)) if width <= 1000 => " ".repeat(width),
        _ => return Err(error("the width of `indent` is neither a text nor a number up to 1000")),
    };
    let value = text(&value)?;
    let mut all = Text::default();
    all.push(if first { &indent } else { "" })?;
    // As in Jinja2, a line end is added and the last one dropped.
    for (index, line) in lines(&format!("{value}\n"), false).iter().enumerate() {
        if index > 0 {
            all.push("\n")?;
            all.push(if blank || !line.is_empty() { &indent } else { "" })?;
        }
        all.push(line)?;
    }
    all.finish()
}

fn format(value: Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let names: Vec<&str> = named.args().collect();
    let values = match names.is_empty() {
        true => Value::from(Tuple::from(positional.to_vec())),
        false => {
            let pairs = names.iter().map(|name| Ok(((*name).to_owned(), named.get::<Value>(name)?)));
            Value::from(pairs.collect::<Result<BTreeMap<String, Value>, Error>>()?)
        }
    };
    filled(&text(&value)?, &values)
}

fn center(value: Value, width: Option<usize>) -> Result<String, Error> {
    let width = width.unwrap_or(80);
    let value = text(&value)?;
    let missing = width.saturating_sub(value.chars().count());
    let before = missing / 2 + (missing & width & 1);
    let mut all = Text::default();
    all.fill(' ', before)?;
    all.push(&value)?;
    all.fill(' ', missing - before)?;
    all.finish()
}
