//! Values in other systems' notation: numbers as words, YAML 1.1's booleans, and `auto`.

use serde_json::{Map, Value};

/// A number, possibly written as text: YAML 1.1 reads `5e8` as a word.
pub(super) fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => {
            text.trim().replace('_', "").parse().ok().filter(|number: &f64| number.is_finite())
        }
        _ => None,
    }
}

/// A non-negative integer, possibly written as `5e8`.
pub(super) fn whole(value: &Value) -> Option<u64> {
    let number = number(value)?;
    (number >= 0.0 && number.fract() == 0.0 && number < 2f64.powi(53)).then_some(number as u64)
}

/// A boolean in the words of YAML 1.1, JSON, Python or the shell.
pub(super) fn truth(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(truth) => Some(*truth),
        Value::String(text) => match text.to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" | "1" => Some(true),
            "false" | "no" | "off" | "0" => Some(false),
            _ => None,
        },
        Value::Number(number) => match number.as_f64()? {
            0.0 => Some(false),
            1.0 => Some(true),
            _ => None,
        },
        _ => None,
    }
}

/// The value as shown in a row.
pub(super) fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Returns true if a value means unset.
pub(super) fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => {
            matches!(text.to_ascii_lowercase().as_str(), "auto" | "none" | "null" | "~" | "")
        }
        _ => false,
    }
}

/// Returns true for null, and for a text, list or mapping without content.
pub(super) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// Returns true if a value turns a feature off, or leaves it off.
pub(super) fn is_off(value: &Value) -> bool {
    is_empty(value) || is_unset(value) || truth(value) == Some(false)
}

/// A number in JSON, as an integer if possible.
pub(super) fn json(number: f64) -> Value {
    match number.fract() == 0.0 && number.abs() < 2f64.powi(53) {
        true => Value::from(number as i64),
        false => Value::from(number),
    }
}

/// Sets `a.b.c` in a tree of mappings. Values on the path that are not mappings are replaced.
pub(super) fn insert(root: &mut Map<String, Value>, path: &str, value: Value) {
    let mut map = root;
    let (above, name) = path.rsplit_once('.').unwrap_or(("", path));
    for part in above.split('.').filter(|part| !part.is_empty()) {
        let below = map.entry(part).or_insert(Value::Null);
        if !below.is_object() {
            *below = Value::Object(Map::new());
        }
        map = below.as_object_mut().expect("just made one");
    }
    map.insert(name.to_owned(), value);
}
