//! Command lines as trees: `--actor.adam.lr 1e-6 --bf16` in a shell script.

use serde_json::{Map, Value};

/// The flags behind the training program's name, or all of them; a flag without a value is `true`, one with several has
/// a list.
pub(super) fn tree(text: &str) -> Result<Map<String, Value>, String> {
    let words = words(text);
    let program = words.iter().position(|word| word.contains("openrlhf") || word.contains("train_ppo"));
    let mut flags: Vec<(String, Vec<String>)> = Vec::new();
    for word in &words[program.map_or(0, |at| at + 1)..] {
        match word.strip_prefix("--") {
            Some(flag) if !flag.is_empty() => match flag.split_once('=') {
                Some((name, value)) => flags.push((name.to_owned(), vec![value.to_owned()])),
                None => flags.push((flag.to_owned(), Vec::new())),
            },
            _ => {
                if let Some((_, values)) = flags.last_mut() {
                    values.push(word.clone());
                }
            }
        }
    }
    if flags.is_empty() {
        return Err("it has no flags".into());
    }
    Ok(flags.into_iter().map(|(name, values)| (name, value(&values))).collect())
}

fn value(values: &[String]) -> Value {
    let one = |text: &String| match text.as_str() {
        "true" | "True" => Value::Bool(true),
        "false" | "False" => Value::Bool(false),
        "None" | "null" => Value::Null,
        _ => serde_json::from_str::<serde_json::Number>(text)
            .map_or_else(|_| text.as_str().into(), Value::Number),
    };
    match values {
        [] => Value::Bool(true),
        [value] => one(value),
        several => several.iter().map(one).collect(),
    }
}

/// The words of a shell script, without its comments.
fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(c),
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '\\') => match chars.next() {
                Some('\n') | None => {}
                Some(next) => word.get_or_insert_default().push(next),
            },
            (None, '#') if word.is_none() => while chars.next_if(|&c| c != '\n').is_some() {},
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}
