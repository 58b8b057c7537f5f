//! Variables of a script.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
};

use super::{Reader, arithmetic, folders};

/// Result of an expansion.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// One text.
    Text(String),
    /// Words, as from `"${name[@]}"`.
    List(Vec<String>),
}

impl Value {
    fn length(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::List(items) => items.iter().map(|item| item.len() + 1).sum(),
        }
    }
}

/// Limit of all expansions of a script together; one needs some kilobytes. Variables of variables double.
const MOST_EXPANDED: usize = 1 << 22;

/// Variables assigned so far. A variable assigned in a branch is unknown. In a list of `key=value`, only the
/// keys changed there are unknown.
#[derive(Clone, Debug, Default)]
pub struct Variables {
    assigned: HashMap<String, Option<Value>>,
    /// Bytes of all expansions so far.
    expanded: usize,
}

impl Variables {
    /// Creates the variables of a new shell that runs `script`: its path, `HOME` and `PWD`.
    pub fn of_shell(script: &Path) -> Self {
        let here = std::env::current_dir().ok();
        let script = here.as_ref().map_or_else(|| script.to_owned(), |here| here.join(script));
        let text = |path: PathBuf| Value::Text(path.display().to_string());
        let home = std::env::var("HOME").ok().map(Value::Text);
        let values = [
            ("HOME", home),
            ("PWD", here.map(text)),
            ("0", Some(text(script.clone()))),
            ("BASH_SOURCE", Some(text(script))),
        ];
        Self { assigned: values.map(|(name, value)| (name.to_owned(), value)).into(), expanded: 0 }
    }

    /// The folder that the script runs in.
    pub(super) fn folder(&self) -> Option<PathBuf> {
        match self.assigned.get("PWD")?.as_ref()? {
            Value::Text(folder) => Some(folder.into()),
            Value::List(_) => None,
        }
    }

    /// Counts an expansion of `name`.
    fn spend(&mut self, name: &str, bytes: usize) -> Result<(), String> {
        self.expanded = self.expanded.saturating_add(bytes);
        match self.expanded > MOST_EXPANDED {
            true => Err(format!(
                "the variable `{name}` grows too long: write out the values that the command needs"
            )),
            false => Ok(()),
        }
    }

    pub(super) fn assign(
        &mut self,
        name: &str,
        appends: bool,
        value: Value,
        is_conditional: bool,
    ) -> Result<(), String> {
        if appends || is_conditional {
            let before = self.assigned.get(name).and_then(Option::as_ref).map_or(0, Value::length);
            self.spend(name, before.saturating_add(value.length()))?;
        }
        let value = match (appends, self.assigned.get(name)) {
            (false, _) | (true, None) => Some(value),
            (true, Some(None)) => None,
            (true, Some(Some(before))) => joined(before.clone(), value),
        };
        let value = match (is_conditional, self.assigned.get(name)) {
            (true, Some(Some(Value::List(before)))) => match value {
                Some(Value::List(after)) => either(name, before, &after).map(Value::List),
                _ => None,
            },
            (true, before) => value.filter(|value| before == Some(&Some(value.clone()))),
            (false, _) => value,
        };
        self.assigned.insert(name.to_owned(), value);
        Ok(())
    }

    /// Expands `$name`, or returns it unchanged.
    pub(super) fn plain(&mut self, text: &str) -> Result<Value, String> {
        let name = &text[1..];
        let length = self.assigned.get(name).and_then(Option::as_ref).map_or(0, Value::length);
        self.spend(name, length)?;
        Ok(match self.assigned.get(name) {
            Some(Some(Value::List(items))) => Value::Text(items.first().cloned().unwrap_or_default()),
            Some(Some(value)) => value.clone(),
            _ => Value::Text(text.to_owned()),
        })
    }

    /// Expands `${name}`, `${name:-default}`, `${name[@]}`, `${name[0]}`, `$((1 + 2))` or `$(pwd)`, or
    /// returns it unchanged.
    pub(super) fn bracketed(&mut self, text: &str) -> Result<Value, String> {
        let itself = || Value::Text(text.to_owned());
        if let Some(sum) = text.strip_prefix("$((").and_then(|sum| sum.strip_suffix("))")) {
            let sum = self.text_of(sum)?;
            let value = arithmetic::value(&sum, &|name| self.number(name));
            return Ok(value.map_or_else(itself, |value| Value::Text(value.to_string())));
        }
        if let Some(inner) = text.strip_prefix("$(").and_then(|inner| inner.strip_suffix(')')) {
            return Ok(folders::named(inner, self).map_or_else(itself, Value::Text));
        }
        let Some(inner) = text.strip_prefix("${").and_then(|inner| inner.strip_suffix('}')) else {
            return Ok(itself());
        };
        if inner.starts_with(['@', '*']) {
            return Ok(Value::List(Vec::new()));
        }
        let end = inner.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(inner.len());
        let (name, rest) = inner.split_at(end);
        let length = self.assigned.get(name).and_then(Option::as_ref).map_or(0, Value::length);
        self.spend(name, length)?;
        let found = self.assigned.get(name);
        match (rest, found) {
            ("[@]" | "[*]", Some(Some(Value::Text(text)))) => Ok(Value::List(vec![text.clone()])),
            ("[@]" | "[*]", Some(Some(list))) => Ok(list.clone()),
            ("", Some(Some(_))) => self.plain(&format!("${name}")),
            (index, Some(Some(value))) if index.starts_with('[') => {
                let item = item(value, index).map(str::to_owned);
                Ok(item.map_or_else(itself, Value::Text))
            }
            _ => match (default(rest), found) {
                (Some(_), Some(Some(value))) if *value != Value::Text(String::new()) => Ok(value.clone()),
                (Some(default), None | Some(Some(_))) => self.text_of(default).map(Value::Text),
                _ => Ok(itself()),
            },
        }
    }

    /// `raw` with quotes removed and variables expanded.
    fn text_of(&mut self, raw: &str) -> Result<String, String> {
        let mut reader = Reader::new(raw, self);
        reader.word = Some(String::new());
        while let Some(next) = reader.next() {
            match next {
                '\\' | '\'' | '"' | '$' => reader.take(next)?,
                plain => reader.push(plain),
            }
        }
        let mut words = std::mem::take(&mut reader.command);
        words.extend(reader.word.take());
        Ok(words.join(" "))
    }

    /// A here document with its variables expanded.
    pub(super) fn heredoc(&mut self, raw: &str) -> Result<String, String> {
        let mut reader = Reader::new(raw, self);
        let mut text = String::new();
        while let Some(next) = reader.next() {
            match next {
                '\\' => match reader.next() {
                    Some('\n') | None => {}
                    Some(escaped @ ('$' | '`' | '\\')) => text.push(escaped),
                    Some(other) => text.extend(['\\', other]),
                },
                '$' | '`' => match reader.expansion(next)? {
                    Value::Text(value) => text.push_str(&value),
                    Value::List(items) => text.push_str(&items.join(" ")),
                },
                plain => text.push(plain),
            }
        }
        Ok(text)
    }

    fn number(&self, name: &str) -> Option<i64> {
        match self.assigned.get(name)?.as_ref()? {
            Value::Text(text) => text.parse().ok(),
            Value::List(_) => None,
        }
    }
}

/// A list that is one of two. Items in both are kept. Other items become `key=${name[@]}`, with an unknown
/// value.
fn either(name: &str, before: &[String], after: &[String]) -> Option<Vec<String>> {
    let [all_before, all_after] = [before, after].map(|items| items.iter().collect::<HashSet<_>>());
    let (mut items, mut seen) = (Vec::new(), HashSet::new());
    for item in before.iter().chain(after) {
        let item = match all_before.contains(item) && all_after.contains(item) {
            true => item.clone(),
            false => format!("{}=${{{name}[@]}}", item.split_once('=')?.0),
        };
        if seen.insert(item.clone()) {
            items.push(item);
        }
    }
    Some(items)
}

/// Item of a list at an index such as `[0]`.
fn item<'a>(value: &'a Value, index: &str) -> Option<&'a str> {
    let index: usize = index.strip_prefix('[')?.strip_suffix(']')?.parse().ok()?;
    match value {
        Value::Text(text) => (index == 0).then_some(text),
        Value::List(items) => items.get(index).map(String::as_str),
    }
}

fn joined(before: Value, more: Value) -> Option<Value> {
    match (before, more) {
        (Value::Text(before), Value::Text(more)) => Some(Value::Text(before + &more)),
        (Value::List(before), Value::List(more)) => Some(Value::List([before, more].concat())),
        _ => None,
    }
}

/// The text after `:-`, `-` or `:=`.
fn default(rest: &str) -> Option<&str> {
    [":-", ":=", "-", "="].iter().find_map(|mark| rest.strip_prefix(mark))
}

/// Splits `name=value` or `name+=value` into the name, whether it appends, and the value.
pub(in crate::shell) fn assignment(word: &str) -> Option<(&str, bool, &str)> {
    let (name, value) = word.split_once('=')?;
    let (name, appends) = name.strip_suffix('+').map_or((name, false), |name| (name, true));
    let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    is_name.then_some((name, appends, value))
}
