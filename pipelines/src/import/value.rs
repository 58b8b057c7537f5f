//! Values as other systems write them.

use indexmap::IndexMap;
use serde_json::{Map, Value};

/// Every value that is no mapping, by its dotted path.
pub(super) fn leaves(tree: &Map<String, Value>) -> IndexMap<String, Value> {
    fn walk(path: &str, value: &Value, found: &mut IndexMap<String, Value>) {
        match value {
            Value::Object(map) if !map.is_empty() => {
                for (key, value) in map {
                    let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                    walk(&path, value, found);
                }
            }
            _ => drop(found.insert(path.to_owned(), value.clone())),
        }
    }
    let mut found = IndexMap::new();
    for (key, value) in tree {
        walk(key, value, &mut found);
    }
    found
}

/// A number, also one that YAML 1.1 reads as text, as `1e-6`.
pub(super) fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    }
}

/// `true`, and the words that stand for it.
pub(super) fn boolean(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(value) => Some(*value),
        Value::String(text) => match text.to_lowercase().as_str() {
            "true" | "yes" | "on" => Some(true),
            "false" | "no" | "off" => Some(false),
            _ => None,
        },
        Value::Number(number) => number.as_u64().map(|number| number != 0),
        _ => None,
    }
}

/// A whole number as one, so that YAML has no `8.0` where a count belongs.
pub(super) fn whole(number: f64) -> Value {
    if number.fract() == 0.0 && number.abs() < 9e15 {
        Value::from(number as i64)
    } else {
        Value::from(number)
    }
}
