//! The schema against our own reader: what it refuses and what it says of defaults.
//!
//! `python/tests/validator` has the repository's configs and the malformed ones validated by a library that is not ours.

use std::fs;
use std::path::{Path, PathBuf};

use anyroll_config::{Config, Node, Problems, Reading, from_node, include_strategies};
use serde_json::{Value, json};

use super::{schema, sections};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> Value {
    serde_saphyr::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Every config of the repository.
fn all() -> Vec<(PathBuf, Value)> {
    let mut paths = Vec::new();
    for folder in ["configs", "bench/rlvr_gpu", "bench/offline_gpu"] {
        let entries = fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        paths.extend(entries.filter(|path| path.extension().is_some_and(|it| it == "yaml")));
    }
    paths.into_iter().map(|path| (path.clone(), read(&path))).collect()
}

/// Reads a config as `anyroll check` does, without its files. Returns nothing if it is malformed.
fn read_by_us(config: &Value) -> Option<Config> {
    let mut tree = Node::parse(&config.to_string()).ok()?;
    let mut problems = include_strategies(&mut tree);
    let Reading { value: config, problems: found, stand_ins } = from_node::<Config>(&tree);
    problems.extend(found);
    let problems = Problems::new(&tree, problems, stand_ins);
    let config = config?;
    config.validate(&problems.root());
    problems.is_empty().then_some(config)
}

fn set(config: &mut Value, path: &str, value: Value) {
    let field = path.split('.').fold(config, |at, name| match at {
        Value::Array(items) => &mut items[name.parse::<usize>().unwrap()],
        _ => &mut at[name],
    });
    *field = value;
}

/// The configs that the schema has to refuse are refused by us as well. Without a value the field is taken out.
#[test]
fn malformed_configs_are_malformed() {
    let cases = include_str!("malformed.jsonl");
    assert!(cases.lines().count() > 40);
    for line in cases.lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let mut config = read(&root().join(case["config"].as_str().unwrap()));
        assert!(read_by_us(&config).is_some(), "{line}");
        let field = case["field"].as_str().unwrap();
        match case.get("value") {
            Some(value) => set(&mut config, field, value.clone()),
            None => drop(config.as_object_mut().unwrap().remove(field)),
        }
        assert!(read_by_us(&config).is_none(), "our reader accepts {line}");
    }
}

/// A field of a config with its schema.
struct Leaf {
    path: String,
    schema: Value,
}

/// Finds the fields of `value` by the schema.
fn leaves(schema: &Value, at: &Value, value: &Value, path: &str, found: &mut Vec<Leaf>) {
    let at = match at["$ref"].as_str() {
        Some(name) => &schema["$defs"][name.trim_start_matches("#/$defs/")],
        None => at,
    };
    for branch in at["anyOf"].as_array().into_iter().flatten() {
        let has = |name: &String| branch["properties"].get(name).is_some();
        let is_taken =
            value.as_object().is_none_or(|fields| branch["$ref"].is_string() || fields.keys().all(has));
        if is_taken {
            leaves(schema, branch, value, path, found);
        }
    }
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                if let Some(property) = at["properties"].get(name) {
                    let path = format!("{path}{name}");
                    found.push(Leaf { path: path.clone(), schema: property.clone() });
                    leaves(schema, property, value, &format!("{path}."), found);
                }
            }
        }
        Value::Array(items) => {
            for (index, value) in items.iter().enumerate() {
                leaves(schema, &at["items"], value, &format!("{path}{index}."), found);
            }
        }
        _ => {}
    }
}

/// Values just outside of a field's range.
fn outside(schema: &Value) -> Vec<Value> {
    let next = |bound: &Value, by: i64| match bound.as_i64() {
        Some(bound) => json!(bound + by),
        None => json!(bound.as_f64().unwrap() * (1.0 + 0.1 * by as f64)),
    };
    let bound = |name: &str| schema.get(name);
    let below = bound("minimum").map(|it| next(it, -1)).or(bound("exclusiveMinimum").cloned());
    let above = bound("maximum").map(|it| next(it, 1)).or(bound("exclusiveMaximum").cloned());
    below.into_iter().chain(above).collect()
}

/// The ranges come from sentences, which may be wrong.
#[test]
fn a_value_outside_of_a_range_is_refused_by_us_too() {
    let schema = schema::schema(&sections::read());
    let mut tried = 0;
    for (file, config) in all() {
        let mut found = Vec::new();
        leaves(&schema, &schema, &config, "", &mut found);
        for Leaf { path, schema } in found {
            for value in outside(&schema) {
                let mut changed = config.clone();
                set(&mut changed, &path, value.clone());
                tried += 1;
                assert!(read_by_us(&changed).is_none(), "{}: we accept {path}: {value}", file.display());
            }
        }
    }
    assert!(tried > 300, "{tried}");
}

/// The defaults come from sentences as well.
#[test]
fn a_default_of_the_schema_is_the_default_of_an_absent_field() {
    let schema = schema::schema(&sections::read());
    let mut compared = 0;
    for (file, config) in all() {
        let resolved = read_by_us(&config).unwrap();
        let resolved: Value = serde_saphyr::from_str(&resolved.to_yaml()).unwrap();
        let mut found = Vec::new();
        leaves(&schema, &schema, &resolved, "", &mut found);
        for Leaf { path, schema } in found {
            let pointer = format!("/{}", path.replace('.', "/"));
            let (Some(default), None) = (schema.get("default"), config.pointer(&pointer)) else { continue };
            // Parts of an included strategy have other values.
            if path.starts_with("strategy.") && config.pointer("/strategy/include").is_some() {
                continue;
            }
            let value = resolved.pointer(&pointer).unwrap();
            let is_equal = value == default
                || value.as_f64().is_some_and(|value| default.as_f64() == Some(value))
                || value.get(default.as_str().unwrap_or_default()).is_some();
            assert!(is_equal, "{}: {path} is {value}, and its sentence says {default}", file.display());
            compared += 1;
        }
    }
    assert!(compared > 300, "{compared}");
}
