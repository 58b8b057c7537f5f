//! The `regex` reward: the form of a completion.

use anyroll_data::Record;
use regex::{Regex, RegexBuilder};

use super::{Completion, Error, Reward};

/// 1 if the pattern matches the whole of a finished completion, else 0.
///
/// A dot also matches a line break. The engine does not backtrack, so a match takes linear time.
#[derive(Clone, Debug)]
pub struct Pattern(Regex);

impl Pattern {
    /// Compiles `pattern`; the error is the problem with it.
    pub fn new(pattern: &str) -> Result<Self, String> {
        // Compiled alone first, so that a stray parenthesis cannot close the added group.
        compile(pattern)?;
        let whole = format!(r"\A(?:{pattern})\z");
        RegexBuilder::new(&whole)
            .dot_matches_new_line(true)
            .build()
            .map(Self)
            .map_err(|error| no_pattern(&error))
    }
}

/// Compiles `pattern` unchanged; the error is the problem with it.
pub(super) fn compile(pattern: &str) -> Result<Regex, String> {
    Regex::new(pattern).map_err(|error| no_pattern(&error))
}

fn no_pattern(error: &regex::Error) -> String {
    let error = error.to_string();
    let why = error.lines().last().unwrap_or(&error).trim_start_matches("error: ");
    format!("it is not a valid pattern: {why}")
}

impl Reward for Pattern {
    fn name(&self) -> &'static str {
        "regex"
    }

    fn score(&self, _record: &Record, completion: &Completion) -> Result<f64, Error> {
        Ok(if completion.finished && self.0.is_match(completion.text) { 1.0 } else { 0.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_whole_completions() {
        let record = Record { id: "1".to_owned(), answer: String::new(), ..Record::default() };
        let check = |pattern: &str, text: &str, finished: bool, expected: f64| {
            let completion = Completion { text, tokens: None, finished };
            let score = Pattern::new(pattern).unwrap().score(&record, &completion).unwrap();
            assert_eq!(score, expected, "{pattern} on {text}");
        };
        let tags = "<think>.*</think>\\s*<answer>.*</answer>";
        check(tags, "<think>1\n2</think>\n<answer>3</answer>", true, 1.0);
        check(tags, "<think>1\n2</think>\n<answer>3</answer>", false, 0.0);
        check(tags, "<think>1</think><answer>3</answer> and more", true, 0.0);
        check(tags, "so <think>1</think><answer>3</answer>", true, 0.0);
        check("^a|b$", "b", true, 1.0);
        check("a|b", "ab", true, 0.0);
        check("", "", true, 1.0);
        for wrong in ["(", ")", "a)(b", "[", r"(a)\1"] {
            assert!(Pattern::new(wrong).is_err(), "{wrong}");
        }
    }
}
