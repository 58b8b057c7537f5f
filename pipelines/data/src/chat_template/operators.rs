//! Python's operators on the values of a template, where those of minijinja differ or have no bound.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, Value};

use super::bounds::{MAX_ITEMS, MAX_TEXT, Text, error};

/// `left ~ right`: the texts of both.
pub(super) fn joined(left: &Value, right: &Value) -> Result<String, Error> {
    let mut text = Text::default();
    text.value(left)?;
    text.value(right)?;
    text.finish()
}

/// `left % right`: the remainder, or a text's fields filled.
pub(super) fn modulo(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(form) = left.as_str() {
        return filled(form, right).map(Value::from);
    }
    let is_number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    if !is_number(left) || !is_number(right) {
        let kinds = format!("{} and {}", left.kind(), right.kind());
        return Err(error(format!("`%` is no operator on values of the types {kinds}")));
    }
    if let (Ok(left), Ok(right)) = (integer(left), integer(right)) {
        let remainder = left.checked_rem(right).ok_or_else(|| error("a division by zero"))?;
        let is_other_side = remainder != 0 && (remainder < 0) != (right < 0);
        return Ok(Value::from(if is_other_side { remainder + right } else { remainder }));
    }
    let (left, right) = (f64::try_from(left.clone())?, f64::try_from(right.clone())?);
    if right == 0.0 {
        return Err(error("a division by zero"));
    }
    let remainder = left % right;
    Ok(Value::from(if remainder != 0.0 && (remainder < 0.0) != (right < 0.0) {
        remainder + right
    } else {
        remainder
    }))
}

fn integer(value: &Value) -> Result<i64, Error> {
    match value.kind() {
        ValueKind::Bool => Ok(i64::from(value.is_true())),
        _ if value.is_integer() => Ok(i64::try_from(value.clone())?),
        _ => Err(error("the number is no integer")),
    }
}

/// A field of a text in printf's style.
struct Field<'a> {
    key: Option<&'a str>,
    flags: &'a str,
    width: Option<usize>,
    precision: Option<usize>,
    kind: char,
}

/// Fills the fields of `form`, such as `%s` and `%(name)d`, as Python's `%`.
pub(super) fn filled(form: &str, values: &Value) -> Result<String, Error> {
    let tuple = values.downcast_object_ref::<Tuple>();
    let mut left = tuple.map_or(vec![values.clone()], |values| values.to_vec()).into_iter();
    let too_few = || error("`%` has not enough values for its text");
    let mut text = Text::default();
    let mut rest = form;
    while let Some((before, after)) = rest.split_once('%') {
        text.push(before)?;
        let (field, after) = field(after, &mut left)?;
        rest = after;
        if field.kind == '%' {
            text.push("%")?;
            continue;
        }
        let value = match field.key {
            Some(key) => {
                let value = values.get_attr(key)?;
                if value.is_undefined() {
                    return Err(error(format!("`%` has no value for `{key}`")));
                }
                value
            }
            None => left.next().ok_or_else(too_few)?,
        };
        write_field(&mut text, &field, &value)?;
    }
    text.push(rest)?;
    if left.next().is_some() && values.kind() != ValueKind::Map {
        return Err(error("`%` has more values than fields in its text"));
    }
    text.finish()
}

/// Reads a field after its `%`, and returns the text after it.
fn field<'a>(text: &'a str, values: &mut impl Iterator<Item = Value>) -> Result<(Field<'a>, &'a str), Error> {
    let incomplete = || error("`%` has an incomplete field in its text");
    let (key, rest) = match text.strip_prefix('(') {
        None => (None, text),
        Some(key) => {
            let (key, rest) = key.split_once(')').ok_or_else(incomplete)?;
            (Some(key), rest)
        }
    };
    let after = rest.trim_start_matches(['#', '0', '-', ' ', '+']);
    let flags = &rest[..rest.len() - after.len()];
    let mut size = |text: &'a str| -> Result<(Option<usize>, &'a str), Error> {
        if let Some(after) = text.strip_prefix('*') {
            let size = values.next().and_then(|value| value.as_usize()).ok_or_else(incomplete)?;
            return Ok((Some(size), after));
        }
        let after = text.trim_start_matches(|it: char| it.is_ascii_digit());
        let digits = &text[..text.len() - after.len()];
        let size = if digits.is_empty() { None } else { Some(digits.parse().unwrap_or(usize::MAX)) };
        Ok((size, after))
    };
    let (width, rest) = size(after)?;
    let (precision, rest) = match rest.strip_prefix('.') {
        None => (None, rest),
        Some(rest) => size(rest).map(|(precision, rest)| (Some(precision.unwrap_or(0)), rest))?,
    };
    let rest = rest.strip_prefix(['h', 'l', 'L']).unwrap_or(rest);
    let mut chars = rest.chars();
    let kind = chars.next().ok_or_else(incomplete)?;
    Ok((Field { key, flags, width, precision, kind }, chars.as_str()))
}

fn write_field(text: &mut Text, field: &Field, value: &Value) -> Result<(), Error> {
    let mut part = Text::default();
    match field.kind {
        's' => part.value(value)?,
        'r' | 'a' => part.repr(value, 0)?,
        'd' | 'i' | 'u' | 'o' | 'x' | 'X' | 'e' | 'E' | 'f' | 'F' | 'g' | 'G' | 'c' => {
            const MAX_DIGITS: usize = 1000;
            if field.precision.is_some_and(|precision| precision > MAX_DIGITS) {
                return Err(error(format!("`%` has a field with more than {MAX_DIGITS} digits")));
            }
            if !matches!(value.kind(), ValueKind::Number | ValueKind::Bool) && field.kind != 'c' {
                let kind = value.kind();
                return Err(error(format!("`%{}` has a value of the type {kind}, not a number", field.kind)));
            }
            let kind = if field.kind == 'u' { 'd' } else { field.kind };
            // Integers are written without the fraction.
            let number = f64::try_from(value.clone())
                .ok()
                .filter(|_| matches!(kind, 'd' | 'i') && !value.is_integer());
            let number = number.filter(|number| number.is_finite());
            let value = &number.map_or(value.clone(), |number| Value::from(number.trunc() as i128));
            let precision = field.precision.map(|it| format!(".{it}")).unwrap_or_default();
            // Zeros fill the width within the number; spaces do around it.
            let zeros = field.width.filter(|_| field.flags.contains('0') && !field.flags.contains('-'));
            let zeros = zeros.map(|width| width.min(MAX_DIGITS).to_string()).unwrap_or_default();
            let flags = field.flags.replace(['-', '0'], "");
            let zero = if zeros.is_empty() { "" } else { "0" };
            let form = format!("%{flags}{zero}{zeros}{precision}{kind}");
            part.push(&format(FormatStyle::Printf, &form, std::slice::from_ref(value))?)?;
        }
        other => return Err(error(format!("`%` has an unknown field `%{other}` in its text"))),
    }
    let part = part.finish()?;
    let is_text = matches!(field.kind, 's' | 'r' | 'a');
    let most = field.precision.filter(|_| is_text).unwrap_or(usize::MAX);
    let part: String = part.chars().take(most).collect();
    let padding = field.width.unwrap_or(0).saturating_sub(part.chars().count());
    if field.flags.contains('-') {
        text.push(&part)?;
        text.fill(' ', padding)
    } else {
        text.fill(' ', padding)?;
        text.push(&part)
    }
}

/// Fills the fields of `form`, such as `{}` and `{name}`, as Python's `str.format`.
pub(super) fn formatted(form: &str, values: &[Value]) -> Result<String, Error> {
    let digits = form.split(|it: char| !it.is_ascii_digit()).map(str::len).max().unwrap_or(0);
    if form.contains('{') && digits > 4 && form.split('{').skip(1).any(has_large_width) {
        return Err(error("a field of `format` has a width of more than 9999"));
    }
    let mut longest = 0;
    for value in values {
        let mut text = Text::default();
        text.value(value)?;
        longest = longest.max(text.finish()?.len());
    }
    if form.matches('{').count().saturating_mul(longest) > MAX_TEXT {
        return Err(super::bounds::too_long());
    }
    format(FormatStyle::StrFormat, form, values)
}

/// Returns true if a field that starts `text` has a number of more than four digits.
fn has_large_width(text: &str) -> bool {
    let field = text.split('}').next().unwrap_or_default();
    field.split(|it: char| !it.is_ascii_digit()).any(|digits| digits.len() > 4)
}

/// `value[start:stop:step]`.
pub(super) fn slice(value: &Value, start: Value, stop: Value, step: Value) -> Result<Value, Error> {
    let number = |value: Value| -> Result<Option<i64>, Error> {
        if value.is_none() {
            return Ok(None);
        }
        value.as_i64().map(Some).ok_or_else(|| error("the indices of a slice are not integers"))
    };
    let (start, stop, step) = (number(start)?, number(stop)?, number(step)?.unwrap_or(1));
    if step == 0 {
        return Err(error("the step of a slice is 0"));
    }
    match value.kind() {
        ValueKind::Undefined => Err(error("an undefined value has no slices")),
        ValueKind::String => {
            let chars: Vec<char> = value.as_str().unwrap_or_default().chars().collect();
            let picked: String = indices(chars.len(), start, stop, step).map(|index| chars[index]).collect();
            super::bounds::checked(Value::from(picked))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.take(MAX_ITEMS + 1).collect();
            let picked: Vec<Value> =
                indices(items.len(), start, stop, step).map(|index| items[index].clone()).collect();
            let is_tuple = value.downcast_object_ref::<Tuple>().is_some();
            super::bounds::checked(if is_tuple {
                Value::from(Tuple::from(picked))
            } else {
                Value::from(picked)
            })
        }
        // Jinja2 takes other values to lack the item.
        _ => Ok(Value::UNDEFINED),
    }
}

/// Indices of a slice, as Python's `slice.indices`.
fn indices(length: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> impl Iterator<Item = usize> {
    let length = length as i64;
    let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let placed =
        |index: i64| (if index < 0 { index.saturating_add(length) } else { index }).clamp(lowest, highest);
    let start = start.map_or(if step > 0 { lowest } else { highest }, placed);
    let stop = stop.map_or(if step > 0 { highest } else { lowest }, placed);
    let mut next = Some(start);
    std::iter::from_fn(move || {
        let at = next.filter(|at| if step > 0 { *at < stop } else { *at > stop })?;
        next = at.checked_add(step);
        Some(at as usize)
    })
}
