//! Multiple choice.

use std::sync::LazyLock;

use regex::Regex;

use super::{Completion, Error, Reward};
use crate::data::Record;

/// 1 if the completion chooses the record's letter, else 0.
///
/// The letter is that of the last `\boxed{...}`, or else of the last "answer is ..." or "answer: ...", after the last
/// `</think>`: an upper-case letter alone, in parentheses, or before its option's text as in `B. 12`. In a completion
/// that was cut only a box counts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Choice;

impl Choice {
    fn find(completion: &Completion) -> Option<char> {
        static BOXED: LazyLock<Regex> = LazyLock::new(|| {
            Regex::new(r"\\(?:boxed|fbox)\s*\{\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{)?\s*\(?([A-Z])(?:[^A-Za-z0-9]|$)")
                .expect("a pattern of this file")
        });
        // `A` and `I` before another word are words themselves.
        static SAID: LazyLock<Regex> = LazyLock::new(|| {
            Regex::new(
                r"(?i:answer\s*(?:is\b|:))(?:\s|[:*$(\[])*(?:\\(?:text|textbf|mathrm|mathbf)\{\(?)?(?:([A-Z])(?:[^A-Za-z0-9\s]|\s*$|\s*\n)|([B-HJ-Z])\s)",
            )
            .expect("a pattern of this file")
        });
        let text = completion.text.rsplit("</think>").next().unwrap_or(completion.text);
        let last = |pattern: &Regex| {
            let found = pattern.captures_iter(text).last()?;
            found.get(1).or_else(|| found.get(2))?.as_str().chars().next()
        };
        // A box that holds no letter is an answer all the same, and a wrong one.
        if text.contains(r"\boxed") || text.contains(r"\fbox") || !completion.finished {
            let start = text.rfind(r"\boxed").max(text.rfind(r"\fbox"))?;
            let found = BOXED
                .captures_at(text, start)
                .filter(|found| found.get(0).is_some_and(|m| m.start() == start))?;
            return found[1].chars().next();
        }
        last(&SAID)
    }
}

impl Reward for Choice {
    fn name(&self) -> &'static str {
        "choice"
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        let gold = record.answer.trim().trim_matches(['(', ')']);
        let mut letters = gold.chars();
        match (letters.next(), letters.next()) {
            (Some(letter), None) if letter.is_ascii_uppercase() => {
                Ok(if Self::find(completion) == Some(letter) { 1.0 } else { 0.0 })
            }
            _ => {
                Err(Error::new(self.name(), record, format!("its answer `{gold}` is no letter from A to Z")))
            }
        }
    }

    fn extracted(&self, completion: &Completion) -> Option<String> {
        Self::find(completion).map(String::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(answer: &str) -> Record {
        Record { id: "1".to_owned(), answer: answer.to_owned(), ..Record::default() }
    }

    #[test]
    fn finds_the_letter_that_was_chosen() {
        let check = |text: &str, expected: Option<char>| {
            let completion = Completion { text, tokens: None, finished: true };
            assert_eq!(Choice::find(&completion), expected, "{text}");
        };
        check(r"So \boxed{B}.", Some('B'));
        check(r"\boxed{A}, no, \boxed{C}", Some('C'));
        check(r"\boxed{\text{(D)}}", Some('D'));
        check(r"\boxed{(A) 12}", Some('A'));
        check(r"\boxed{B. yes}", Some('B'));
        check(r"\boxed{12} and the answer is B", None);
        check(r"\boxed{B} or else \boxed{12}", None);
        check(r"\boxed{Blue}", None);
        check(r"\boxed{b}", None);
        check("The answer is C.", Some('C'));
        check("The answer is (C)", Some('C'));
        check("**Answer:** D", Some('D'));
        check("The answer is B because it fits", Some('B'));
        check("The answer is A good question", None);
        check("Answer: A\nThat is all", Some('A'));
        check("The answer is Blue", None);
        check("answer: B, then I saw that the answer is C.", Some('C'));
        check("The answer is B</think> I do not know", None);
        check("B", None);
        check("", None);
    }

    #[test]
    fn scores_and_refuses() {
        let cut = Completion { text: "The answer is B", tokens: None, finished: false };
        let whole = Completion { finished: true, ..cut };
        assert_eq!(Choice.score(&record("B"), &whole).unwrap(), 1.0);
        assert_eq!(Choice.score(&record("(B)"), &whole).unwrap(), 1.0);
        assert_eq!(Choice.score(&record("C"), &whole).unwrap(), 0.0);
        assert_eq!(Choice.score(&record("B"), &cut).unwrap(), 0.0);
        for answer in ["", "b", "12", "AB"] {
            assert!(Choice.score(&record(answer), &whole).is_err(), "{answer}");
        }
    }
}
