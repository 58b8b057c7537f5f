//! Records from a file with one JSON object a line.

use std::fs::File;
use std::io::{BufRead, BufReader};

use serde_json::{Map, Value};

use super::{Error, Record};
use crate::config::JsonlConfig;

/// All records of the file, in its order; empty lines are passed over.
pub(super) fn read(config: &JsonlConfig) -> Result<Vec<Record>, Error> {
    let unreadable = |source| Error::Read { path: config.path.clone(), source };
    let file = File::open(&config.path).map_err(unreadable)?;
    let mut records = Vec::new();
    for (index, text) in BufReader::new(file).lines().enumerate() {
        let text = text.map_err(unreadable)?;
        if text.trim().is_empty() {
            continue;
        }
        let line = index + 1;
        let record = parse(config, line, &text).map_err(|message| Error::Line {
            path: config.path.clone(),
            line,
            message,
        })?;
        records.push(record);
    }
    Ok(records)
}

fn parse(config: &JsonlConfig, line: usize, text: &str) -> Result<Record, String> {
    let object: Map<String, Value> =
        serde_json::from_str(text).map_err(|error| format!("the line is no JSON object: {error}"))?;
    let field = |key: &str| {
        object.get(key).ok_or_else(|| {
            let keys = object.keys().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
            format!("there is no `{key}`; the line has {keys}: name its key in the config's `jsonl`")
        })
    };
    let prompt = match field(&config.prompt)? {
        Value::String(prompt) if prompt.is_empty() => return Err(format!("`{}` is empty", config.prompt)),
        Value::String(prompt) => prompt.clone(),
        _ => return Err(format!("`{}` is no text", config.prompt)),
    };
    let answer = match field(&config.answer)? {
        Value::String(answer) => answer.clone(),
        Value::Number(number) => number.to_string(),
        // Tests of a program, say: the reward that needs them reads them.
        value @ (Value::Object(_) | Value::Array(_)) => value.to_string(),
        _ => return Err(format!("`{}` is neither a text, a number, a list nor an object", config.answer)),
    };
    let mut columns = object;
    columns.shift_remove(&config.prompt);
    Ok(Record { id: format!("line {line}"), prompt, answer, columns, ..Record::default() })
}
