//! Files of an evaluation: its numbers, and its completions.

use std::path::Path;

use anyroll_pipelines::{
    Result,
    atomic_file::write_atomic,
    evaluation::{Completion, Prompt, Summary},
};
use serde_json::{Map, Value, json};

/// Writes the numbers of an evaluation, with the `facts` of its sampling.
pub(super) fn write_numbers(path: &Path, facts: &Value, summary: &Summary) -> Result<()> {
    let mut numbers = facts.clone();
    let summary = serde_json::to_value(summary).expect("plain data");
    if let (Value::Object(numbers), Value::Object(summary)) = (&mut numbers, summary) {
        numbers.extend(summary);
    }
    let text = serde_json::to_string_pretty(&numbers).expect("plain data") + "\n";
    Ok(write_atomic(path, text.as_bytes())?)
}

/// Writes a line for each completion: `prompt`, `completion`, `answer`, `finished`, `tokens` and the record's further
/// columns, as `anyroll reward --file` reads them, and all that the evaluation found under `evaluation`. `terms` are the
/// names of the reward's terms.
pub(super) fn write_completions(path: &Path, prompts: &[Prompt], terms: &[String]) -> Result<()> {
    let mut text = String::new();
    for prompt in prompts {
        for (index, completion) in prompt.completions().enumerate() {
            let sample = if index == 0 { json!("greedy") } else { json!(index - 1) };
            text += &line(prompt, completion, &sample, terms).to_string();
            text.push('\n');
        }
    }
    Ok(write_atomic(path, text.as_bytes())?)
}

fn line(prompt: &Prompt, completion: &Completion, sample: &Value, terms: &[String]) -> Value {
    let record = &prompt.record;
    let messages = &record.messages;
    let mut line = record.columns.clone();
    line.extend(Map::from_iter([
        ("prompt".to_owned(), if messages.is_empty() { json!(record.prompt) } else { json!(messages) }),
        ("completion".to_owned(), json!(completion.text)),
        ("answer".to_owned(), json!(record.answer)),
        ("finished".to_owned(), json!(completion.finished)),
        ("tokens".to_owned(), json!(completion.tokens)),
        ("evaluation".to_owned(), found(prompt, completion, sample, terms)),
    ]));
    Value::Object(line)
}

fn found(prompt: &Prompt, completion: &Completion, sample: &Value, terms: &[String]) -> Value {
    let mut found = json!({ "record": prompt.record.id, "sample": sample });
    if !prompt.record.domain.is_empty() {
        found["domain"] = json!(prompt.record.domain);
    }
    match &completion.score {
        Ok(score) => {
            let parts = terms.iter().cloned().zip(score.parts.iter().map(|part| json!(part)));
            found["right"] = json!(completion.is_right());
            found["reward"] = json!(score.total);
            found["terms"] = Value::Object(parts.collect());
            for (term, logged) in terms.iter().zip(&score.logged) {
                if !logged.metrics.is_empty() {
                    found["metrics"][term] = json!(logged.means());
                }
                if !logged.columns.is_empty() {
                    found["columns"][term] = json!(logged.columns);
                }
            }
        }
        Err(error) => found["error"] = json!(error),
    }
    if let Some(extracted) = &completion.extracted {
        found["extracted"] = json!(extracted);
    }
    found
}
