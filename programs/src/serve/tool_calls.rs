//! Parser of tool calls in streamed text: between Qwen's tags, or as Llama 3's JSON.
//!
//! ```text
//! <tool_call>{"name": "f", "arguments": {...}}</tool_call>     any number, after any text
//! {"name": "f", "parameters": {...}}                           alone, for a known tool
//! ```
//!
//! Text that only resembles a call, or is truncated within one, remains text.

use std::sync::Arc;

use serde_json::{Map, Value};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
/// Prefix of Llama 3's calls, if the tokenizer shows it.
const TAG: &str = "<|python_tag|>";

/// A parsed call.
#[derive(Debug, PartialEq)]
pub(super) struct Call {
    pub name: String,
    /// A JSON object.
    pub arguments: String,
}

/// Incremental parser of calls.
#[derive(Debug)]
pub(super) struct Calls {
    /// Names of the tools.
    names: Arc<[String]>,
    /// Text held back, since it may be a call or precede one.
    held: String,
    has_said: bool,
}

impl Calls {
    pub fn new(names: Arc<[String]>) -> Self {
        Self { names, held: String::new(), has_said: false }
    }

    /// Adds text. Returns the text known not to belong to a call; at the `end` also the calls.
    pub fn push(&mut self, text: &str, end: bool) -> (String, Vec<Call>) {
        self.held.push_str(text);
        if end {
            let held = std::mem::take(&mut self.held);
            return self.read(&held).unwrap_or((held, Vec::new()));
        }
        let sure = self.sure();
        self.has_said |= sure > 0;
        (self.held.drain(..sure).collect(), Vec::new())
    }

    /// Bytes of the held text that belong to no call.
    fn sure(&self) -> usize {
        let begun = self.held.trim_start();
        if !self.has_said && (begun.starts_with('{') || TAG.starts_with(begun) || begun.starts_with(TAG)) {
            return 0;
        }
        let partly = || (0..OPEN.len()).rev().find(|&len| self.held.ends_with(&OPEN[..len])).unwrap_or(0);
        let first = self.held.find(OPEN).unwrap_or_else(|| self.held.len() - partly());
        self.held[..first].trim_end().len()
    }

    /// The text before calls, and the calls, if the rest consists of them.
    fn read(&self, text: &str) -> Option<(String, Vec<Call>)> {
        if let Some(first) = text.find(OPEN) {
            return Some((text[..first].trim_end().to_owned(), tagged(&text[first..])?));
        }
        let alone = text.trim();
        let call = call(alone.strip_prefix(TAG).unwrap_or(alone))?;
        (!self.has_said && self.names.contains(&call.name)).then(|| (String::new(), vec![call]))
    }
}

/// Calls between tags, without other text.
fn tagged(mut rest: &str) -> Option<Vec<Call>> {
    let mut calls = Vec::new();
    while !rest.trim_start().is_empty() {
        let (written, behind) = rest.trim_start().strip_prefix(OPEN)?.split_once(CLOSE)?;
        calls.push(call(written)?);
        rest = behind;
    }
    Some(calls)
}

fn call(written: &str) -> Option<Call> {
    let fields: Map<String, Value> = serde_json::from_str(written).ok()?;
    let name = fields.get("name")?.as_str()?.to_owned();
    let arguments = fields.get("arguments").or_else(|| fields.get("parameters"))?;
    arguments.is_object().then(|| Call { name, arguments: arguments.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses a text in pieces of every size, which must give the same. `early` is the text returned before
    /// the end at size 1.
    fn check(text: &str, content: &str, calls: &[(&str, &str)], early: &str) {
        let calls: Vec<Call> = calls
            .iter()
            .map(|&(name, arguments)| Call { name: name.to_owned(), arguments: arguments.to_owned() })
            .collect();
        let characters: Vec<char> = text.chars().collect();
        for size in 1..=characters.len() {
            let mut reader = Calls::new(["f".to_owned(), "g".to_owned()].into());
            let mut said = String::new();
            for piece in characters.chunks(size) {
                let (text, calls) = reader.push(&piece.iter().collect::<String>(), false);
                assert_eq!(calls, []);
                said += &text;
            }
            if size == 1 {
                assert_eq!(said, early, "{text}");
            }
            let (rest, found) = reader.push("", true);
            assert_eq!((said + &rest, &found), (content.to_owned(), &calls), "{text} by {size}");
        }
        let mut reader = Calls::new(["f".to_owned(), "g".to_owned()].into());
        assert_eq!(reader.push(text, true), (content.to_owned(), calls), "{text}");
    }

    #[test]
    fn calls_between_tags_are_taken_out_of_the_text() {
        let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": \"{\"}}\n</tool_call>";
        let arguments = r#"{"b":1,"a":"{"}"#;
        check(one, "", &[("f", arguments)], "");
        check(&format!("I look.\n\n{one}"), "I look.", &[("f", arguments)], "I look.");
        let other = "<tool_call>{\"name\": \"unknown\", \"arguments\": {}}</tool_call>\n";
        check(&format!("{one}\n{other}"), "", &[("f", arguments), ("unknown", "{}")], "");
    }

    #[test]
    fn json_alone_is_a_call_of_a_tool_that_there_is() {
        check(r#"{"name": "g", "parameters": {"x": [1]}}"#, "", &[("g", r#"{"x":[1]}"#)], "");
        check(r#" {"type": "function", "name": "g", "parameters": {}} "#, "", &[("g", "{}")], "");
        check(r#"<|python_tag|>{"name": "g", "parameters": {}}"#, "", &[("g", "{}")], "");
        for text in [r#"{"name": "h", "parameters": {}}"#, r#"{"answer": 4}"#, r#"{"name": "g""#, "{"] {
            check(text, text, &[], "");
        }
        let behind = r#"So: {"name": "g", "parameters": {}}"#;
        check(behind, behind, &[], behind);
    }

    #[test]
    fn what_is_no_call_stays_a_text() {
        check("a < b, <tool> \u{e9}.", "a < b, <tool> \u{e9}.", &[], "a < b, <tool> \u{e9}.");
        check("ends with <tool_", "ends with <tool_", &[], "ends with");
        for broken in [
            "x <tool_call>{\"name\": \"f\", \"arguments\": {}}",
            "x <tool_call>{\"name\": \"f\"}</tool_call>",
            "x <tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
            "x <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call> and more",
        ] {
            check(broken, broken, &[], "x");
        }
    }
}
