//! The `choice` reward: multiple choice.

use std::sync::LazyLock;

use anyroll_data::Record;
use regex::Regex;

use super::{Completion, Error, Reward};

/// 1 if the completion chooses the record's letter, else 0.
///
/// The letter comes from the last `\boxed{...}`, or else from the last "answer is ..." or "answer: ...",
/// after the last `</think>`. It is an upper-case letter alone, in parentheses, after "option", or before its
/// option's text as in `B. 12`. Several letters, as in `A or B`, choose none. In a truncated completion only
/// a box counts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Choice;

impl Choice {
    fn gold(&self, record: &Record) -> Result<char, Error> {
        let gold = record.answer.trim().trim_matches(['(', ')']);
        let mut letters = gold.chars();
        match (letters.next(), letters.next()) {
            (Some(letter), None) if letter.is_ascii_uppercase() => Ok(letter),
            _ => {
                let why = format!("its answer `{gold}` is not a letter from A to Z");
                Err(Error::new(self.name(), record, why))
            }
        }
    }

    fn find(completion: &Completion) -> Option<char> {
        let text = completion.text.rsplit("</think>").next().unwrap_or(completion.text);
        // A box without a letter is a wrong answer.
        let is_boxed = text.contains(r"\boxed") || text.contains(r"\fbox");
        let found = if is_boxed || !completion.finished { boxed(text) } else { said(text) };
        found.filter(|(_, rest)| !lists_another(rest)).map(|(letter, _)| letter)
    }
}

/// The letter in the last box, and the rest of the box.
fn boxed(text: &str) -> Option<(char, &str)> {
    static BOXED: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"^\\(?:boxed|fbox)\s*\{\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{)?\s*(?:(?i:option|choice)\s+)?\(?([A-Z])(?:[^A-Za-z0-9]|$)")
            .expect("a pattern of this file")
    });
    let text = &text[text.rfind(r"\boxed").max(text.rfind(r"\fbox"))?..];
    let letter = BOXED.captures(text)?.get(1)?;
    let mut depth = 0;
    let end = text.find(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == '}' && depth == 0
    });
    let inner = &text[..end.unwrap_or(text.len())];
    Some((letter.as_str().chars().next()?, &inner[letter.end()..]))
}

/// The letter last said to be the answer, and the rest of its line.
fn said(text: &str) -> Option<(char, &str)> {
    static SAID: LazyLock<Regex> = LazyLock::new(|| {
        let opening = r"(?:\s|[:*$(\[])";
        let upright = r"(?:\\(?:text|textbf|mathrm|mathbf)\{\(?)?";
        let option = format!(r"(?i:(?:the\s+)?(?:option|choice|letter)){opening}+([A-Z])(?:[^A-Za-z0-9]|$)");
        // Before another word, `A` and `I` are words themselves, except after `option`.
        let letter = r"([A-Z])(?:[^A-Za-z0-9\s]|\s*$|\s*\n)|([B-HJ-Z])\s";
        Regex::new(&format!(r"(?i:answer\s*(?:is\b|:)){opening}*{upright}(?:{option}|{letter})"))
            .expect("a pattern of this file")
    });
    let found = SAID.captures_iter(text).last()?;
    let letter = found.iter().skip(1).flatten().next()?;
    let rest = text[letter.end()..].lines().next().unwrap_or_default();
    Some((letter.as_str().chars().next()?, rest))
}

/// Returns true if the text after a letter starts with another one: ` or B`, `, B`, `/B`, `)(B)`.
fn lists_another(rest: &str) -> bool {
    static LISTED: LazyLock<Regex> = LazyLock::new(|| {
        let around = r"(?:[\s(){}\[\]*$~]|\\(?:text(?:bf)?|math(?:rm|bf)|q?quad|[,; ])|(?i:option|choice|the|even|maybe|perhaps|possibly)\s)*";
        let between = r"(?:[,;/&+|:=>→⇒−–-]|\\(?:to|implies|[rR]ightarrow)\b|\\[&|\\]|\\(?:l(?:or|and)|vee|wedge|cup)\b|and\b|or\b)";
        // Before another word, `A` and `I` are words themselves: `B, I think`.
        let letter = r"(?:[B-HJ-Z](?:[^A-Za-z0-9]|$)|[AI](?:[^A-Za-z0-9\s]|\s*$|\s+(?:and|or)\b))";
        let space = r"(?:\s|~|\\(?:q?quad\b|[,; ]))+";
        // A single letter after a full stop is another answer; `B. C is wrong` is an explanation.
        let alone = r"\.[\s(*$]*[A-Z][\s.)*$}\]]*$";
        Regex::new(&format!(r"^(?:(?:{around}(?:{between}{around})+|{space}|\)\s*\(){letter}|{alone})"))
            .expect("a pattern of this file")
    });
    LISTED.is_match(rest)
}

impl Reward for Choice {
    fn name(&self) -> &'static str {
        "choice"
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        let gold = self.gold(record)?;
        Ok(f64::from(u8::from(Self::find(completion) == Some(gold))))
    }

    fn check(&self, record: &Record) -> Result<(), Error> {
        self.gold(record).map(drop)
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
        check("The answer is option B", Some('B'));
        check("The correct answer is **Option A** because it fits", Some('A'));
        check("The answer is the choice (C).", Some('C'));
        check("The answer is optional", None);
        check(r"\boxed{\text{Option D}}", Some('D'));
        check("B", None);
        check("", None);
    }

    #[test]
    fn several_letters_choose_none() {
        let check = |text: &str, expected: Option<char>| {
            let completion = Completion { text, tokens: None, finished: true };
            assert_eq!(Choice::find(&completion), expected, "{text}");
        };
        for text in [
            r"\boxed{A or B}",
            r"\boxed{A, B, C}",
            r"\boxed{A and B}",
            r"\boxed{A,B}",
            r"\boxed{A/B}",
            r"\boxed{A \& B}",
            r"\boxed{A B}",
            r"\boxed{(A)(B)}",
            r"\boxed{\text{A or B}}",
            r"\boxed{\text{A}, \text{B}}",
            r"\boxed{A \text{ and } B}",
            r"\boxed{A, or option B}",
            "Answer: A, B",
            "Answer: (A) or (B).",
            "The answer is **A** and **B**.",
            "The answer is B or C because both fit",
            "The answer is option A or B",
            "The answer is B, A or C",
            "The answer is B or maybe C",
            "The answer is B or even the option C",
            "Answer: B - C",
            "Answer: B~C",
            r"\boxed{B\ C}",
            r"\boxed{B\\C}",
            r"\boxed{B \vee C}",
            r"\boxed{B: C}",
            r"\boxed{B \text{ or perhaps } C}",
            r"\boxed{B. C}",
            r"\boxed{B -> C}",
            r"\boxed{B \to C}",
            "The answer is B. C",
            "The answer is B -> C",
            "The answer is B → C.",
        ] {
            check(text, None);
        }
        check(r"\boxed{B, 12}", Some('B'));
        check(r"\boxed{A} or B", Some('A'));
        check("The answer is B, I think.", Some('B'));
        check("The answer is B; A is too small.", Some('B'));
        check("The answer is B. C is wrong.", Some('B'));
        check("The answer is B, not C.", Some('B'));
        check("The answer is (B) and it fits", Some('B'));
        check("Answer: A\nB and C are wrong", Some('A'));
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
