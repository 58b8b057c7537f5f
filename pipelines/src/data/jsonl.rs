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
    if let Some(most) = config.max_prompt_chars {
        let before = records.len();
        records.retain(|record| record.prompt.chars().count() <= most);
        let left_out = before - records.len();
        if left_out > 0 {
            let path = config.path.display();
            tracing::warn!(left_out, of = before, "{path}: prompts longer than `max_prompt_chars`");
        }
    }
    Ok(records)
}

fn parse(config: &JsonlConfig, line: usize, text: &str) -> Result<Record, String> {
    let object: Map<String, Value> =
        serde_json::from_str(text).map_err(|error| format!("the line is no JSON object: {error}"))?;
    let field = |key: &str| {
        find(&object, key).ok_or_else(|| {
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
    let domain = match &config.domain {
        None => String::new(),
        Some(key) => match field(key)? {
            Value::String(domain) => domain.clone(),
            _ => return Err(format!("`{key}` is no text")),
        },
    };
    let mut columns = object;
    columns.shift_remove(&config.prompt);
    Ok(Record { id: format!("line {line}"), prompt, answer, domain, columns })
}

/// The value of a key; of a path such as `reward_model.ground_truth`, if there is no key of that name.
fn find<'a>(object: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    object.get(key).or_else(|| {
        let (first, rest) = key.split_once('.')?;
        find(object.get(first)?.as_object()?, rest)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_may_be_paths_and_name_a_domain() {
        let config = JsonlConfig {
            path: "x.jsonl".into(),
            prompt: "question".into(),
            answer: "reward_model.ground_truth".into(),
            domain: Some("data_source".into()),
            max_prompt_chars: None,
            held_out_percent: 10,
        };
        let line =
            r#"{"question": "1+1", "reward_model": {"ground_truth": 2}, "data_source": "sums", "level": 3}"#;
        let record = parse(&config, 7, line).unwrap();
        assert_eq!(
            (record.id.as_str(), record.prompt.as_str(), record.answer.as_str()),
            ("line 7", "1+1", "2")
        );
        assert_eq!((record.domain.as_str(), &record.columns["level"]), ("sums", &Value::from(3)));
        assert!(!record.columns.contains_key("question"));
        let error = parse(&config, 1, r#"{"question": "1+1", "reward_model": {}}"#).unwrap_err();
        assert!(error.contains("no `reward_model.ground_truth`"), "{error}");
    }
}
