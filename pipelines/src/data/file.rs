//! Records from a file: which of a row's columns is what.

use serde_json::{Map, Value};

use super::{Error, Record, table};
use crate::config::{FileConfig, NamedColumns};

/// All records of the file, in its order.
pub(super) fn read(config: &FileConfig) -> Result<Vec<Record>, Error> {
    let columns = config.columns.named();
    let (mut records, mut left_out) = (Vec::new(), 0);
    table::each_row(&config.path, &mut |row, object| {
        let record = record(&columns, row, object)?;
        let fits = config.max_prompt_chars.is_none_or(|most| record.prompt.chars().count() <= most);
        match fits {
            true => records.push(record),
            false => left_out += 1,
        }
        Ok(())
    })?;
    if left_out > 0 {
        let (path, of) = (config.path.display(), records.len() + left_out);
        tracing::warn!(left_out, of, "{path}: prompts longer than `max_prompt_chars`");
    }
    Ok(records)
}

/// The record of a row: `line 12`.
fn record(columns: &NamedColumns, row: String, object: Map<String, Value>) -> Result<Record, String> {
    let column = |name: &str| {
        find(&object, name).ok_or_else(|| {
            let names = object.keys().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
            format!("there is no `{name}`, but {names}: name its column in the config's `columns`")
        })
    };
    let (prompt, messages) =
        prompt(column(&columns.prompt)?).map_err(|problem| format!("`{}` {problem}", columns.prompt))?;
    let answer = match column(&columns.answer)? {
        Value::String(answer) => answer.clone(),
        Value::Number(number) => number.to_string(),
        // Tests of a program, say: the reward that needs them reads them.
        value @ (Value::Object(_) | Value::Array(_)) => value.to_string(),
        _ => return Err(format!("`{}` is neither a text, a number, a list nor an object", columns.answer)),
    };
    let domain = match &columns.domain {
        None => String::new(),
        Some(name) => match column(name)? {
            Value::String(domain) => domain.clone(),
            _ => return Err(format!("`{name}` is no text")),
        },
    };
    let mut columns_left = object;
    columns_left.shift_remove(&columns.prompt);
    Ok(Record { id: row, prompt, messages, answer, domain, columns: columns_left })
}

/// The prompt's text, and its messages if it has any. The text of one message is its content; of several, each starts
/// with its role.
fn prompt(value: &Value) -> Result<(String, Vec<Value>), String> {
    let text = match value {
        Value::Array(messages) => return of_messages(messages),
        Value::String(text) => text,
        _ => return Err("is neither a text nor messages".into()),
    };
    // A file without nested columns has its messages as JSON.
    if text.starts_with('[')
        && let Ok(messages) = serde_json::from_str::<Vec<Value>>(text)
        && let Ok(found) = of_messages(&messages)
    {
        return Ok(found);
    }
    match text.is_empty() {
        true => Err("is empty".into()),
        false => Ok((text.clone(), Vec::new())),
    }
}

fn of_messages(messages: &[Value]) -> Result<(String, Vec<Value>), String> {
    let parts: Option<Vec<(&str, &str)>> =
        messages.iter().map(|it| Some((it.get("role")?.as_str()?, it.get("content")?.as_str()?))).collect();
    let text = match parts.as_deref() {
        None => return Err("is a list, but not of messages with `role` and `content`".into()),
        Some([]) => return Err("is empty".into()),
        Some([(_, content)]) => (*content).to_owned(),
        Some(parts) => {
            let lines: Vec<String> =
                parts.iter().map(|(role, content)| format!("{role}: {content}")).collect();
            lines.join("\n")
        }
    };
    Ok((text, messages.to_vec()))
}

/// The value of a column; of a path such as `reward_model.ground_truth`, if there is no column of that name.
fn find<'a>(object: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    object.get(name).or_else(|| {
        let (first, rest) = name.split_once('.')?;
        find(object.get(first)?.as_object()?, rest)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ColumnsConfig;

    fn parse(columns: &ColumnsConfig, line: &str) -> Result<Record, String> {
        record(&columns.named(), "line 7".into(), serde_json::from_str(line).unwrap())
    }

    #[test]
    fn columns_may_be_paths_and_name_a_domain() {
        let columns = ColumnsConfig::Named(NamedColumns {
            prompt: "question".into(),
            answer: "reward_model.ground_truth".into(),
            domain: Some("data_source".into()),
        });
        let line =
            r#"{"question": "1+1", "reward_model": {"ground_truth": 2}, "data_source": "sums", "level": 3}"#;
        let record = parse(&columns, line).unwrap();
        assert_eq!(
            (record.id.as_str(), record.prompt.as_str(), record.answer.as_str()),
            ("line 7", "1+1", "2")
        );
        assert_eq!((record.domain.as_str(), &record.columns["level"]), ("sums", &Value::from(3)));
        assert!(!record.columns.contains_key("question"));
        let error = parse(&columns, r#"{"question": "1+1", "reward_model": {}}"#).unwrap_err();
        assert!(error.contains("no `reward_model.ground_truth`"), "{error}");
    }

    /// A row as each system's own documentation has it.
    #[test]
    fn each_systems_own_files_are_read() {
        let check = |columns, line: &str, expected: (&str, usize, &str, &str)| {
            let record = parse(&columns, line).unwrap();
            let Record { prompt, messages, answer, domain, .. } = &record;
            assert_eq!((prompt.as_str(), messages.len(), answer.as_str(), domain.as_str()), expected);
        };
        check(
            ColumnsConfig::Verl,
            r#"{"data_source": "openai/gsm8k", "prompt": [{"content": "1+1?", "role": "user"}], "ability": "math",
                "reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {"index": 0, "split": "train"}}"#,
            ("1+1?", 1, "2", "openai/gsm8k"),
        );
        check(
            ColumnsConfig::Roll,
            r#"{"id": "0", "source": "deepmath", "difficulty": 5, "prompt": "1+1?", "ground_truth": "2", "tag": "deepmath",
                "messages": "[{\"role\": \"system\", \"content\": \"Reason.\"}, {\"role\": \"user\", \"content\": \"1+1?\"}]"}"#,
            ("system: Reason.\nuser: 1+1?", 2, "2", "deepmath"),
        );
        check(ColumnsConfig::Trl, r#"{"prompt": "1+1?", "solution": "$2$"}"#, ("1+1?", 0, "$2$", ""));
        check(
            ColumnsConfig::Trl,
            r#"{"prompt": [{"role": "user", "content": "1+1?"}], "solution": "$2$"}"#,
            ("1+1?", 1, "$2$", ""),
        );
        check(ColumnsConfig::Openrlhf, r#"{"input": "1+1?", "label": 2}"#, ("1+1?", 0, "2", ""));
    }

    #[test]
    fn what_is_no_prompt_is_told() {
        let check = |prompt: &str, words: &str| {
            let line = format!("{{\"prompt\": {prompt}, \"answer\": 1}}");
            let error = parse(&ColumnsConfig::default(), &line).unwrap_err();
            assert!(error.contains(words), "{error}");
        };
        check("3", "`prompt` is neither a text nor messages");
        check("\"\"", "`prompt` is empty");
        check("[]", "`prompt` is empty");
        check("[1, 2]", "not of messages");
        // A text that only looks like a list is a text.
        let line = r#"{"prompt": "[1, 2] sorted is", "answer": 1}"#;
        assert_eq!(parse(&ColumnsConfig::default(), line).unwrap().prompt, "[1, 2] sorted is");
    }
}
