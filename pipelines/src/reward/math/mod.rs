//! Mathematics: whether a completion's answer is the gold answer, in whatever form it is written.
//!
//! `extract` finds the answer in the text, if what stands around it leaves it as it is (`alone`), `lex` and `parse` read it
//! into an `expr`, and `compare` tells whether two are equal: inequalities as sets (`region`), and where it takes algebra by
//! values at random points (`evaluate`, `ball`). Length, depth, size and work are bounded: hostile text is wrong, never
//! slow.

mod alone;
mod ball;
mod compare;
mod evaluate;
mod expr;
mod extract;
mod lex;
mod parse;
mod region;
mod unit;

#[cfg(test)]
mod tests;

use std::borrow::Cow;

use super::{Completion, Error, Reward};
use crate::config::MathConfig;
use crate::data::Record;

/// 1 if the completion's answer equals the record's as a piece of mathematics, else 0.
///
/// In a completion that was cut only a boxed answer counts: what stands last in it is where it was cut.
#[derive(Clone, Debug, Default)]
pub struct Math {
    config: MathConfig,
}

impl Math {
    /// As `config` says.
    pub fn new(config: MathConfig) -> Self {
        Self { config }
    }

    /// Whether `predicted` equals `gold`, both bare answers to a question that may ask for percent.
    fn is_right(&self, gold: &str, predicted: &str, asks_percent: bool) -> bool {
        match (parse::parse(gold), parse::parse(predicted)) {
            (Some(gold), Some(predicted)) => {
                compare::is_right(&gold, &predicted, self.config.tolerance, asks_percent)
            }
            // What is not read as mathematics is right as the same text.
            (None, None) => same_text(gold, predicted),
            _ => false,
        }
    }

    fn find<'a>(&self, completion: &Completion<'a>) -> Option<Cow<'a, str>> {
        extract::extract(completion.text, self.config.only_boxed || !completion.finished)
    }
}

impl Reward for Math {
    fn name(&self) -> &'static str {
        "math"
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        let gold = extract::gold(&record.answer);
        if gold.is_empty() {
            return Err(Error::new(self.name(), record, "its answer is empty"));
        }
        let asks_percent = ["%", "percent"].iter().any(|word| record.prompt.contains(word));
        let found = self.find(completion);
        let right = found.is_some_and(|predicted| self.is_right(gold, &predicted, asks_percent));
        Ok(f64::from(u8::from(right)))
    }

    fn extracted(&self, completion: &Completion) -> Option<String> {
        self.find(completion).map(Cow::into_owned)
    }
}

/// Whether two texts are the same but for spaces and commands that only set type.
fn same_text(gold: &str, predicted: &str) -> bool {
    let short = |text: &str| text.len() <= parse::MOST_BYTES;
    gold == predicted || (short(gold) && short(predicted) && normal(gold) == normal(predicted))
}

fn normal(text: &str) -> String {
    let mut text = text.to_owned();
    for (from, to) in [
        (r"\left", ""),
        (r"\right", ""),
        (r"\displaystyle", ""),
        (r"\,", " "),
        (r"\;", " "),
        (r"\!", ""),
        ("dfrac", "frac"),
        ("tfrac", "frac"),
    ] {
        text = text.replace(from, to);
    }
    let chars: Vec<char> = text.chars().collect();
    let mut kept = String::with_capacity(text.len());
    for (at, &c) in chars.iter().enumerate() {
        if !c.is_whitespace() {
            kept.push(c);
            continue;
        }
        // A space between two words or numbers is kept, once.
        let next = chars[at..].iter().find(|c| !c.is_whitespace());
        let joins = kept.ends_with(char::is_alphanumeric) && next.is_some_and(|c| c.is_alphanumeric());
        if joins {
            kept.push(' ');
        }
    }
    // `1011_{2}` is `1011_2`.
    for digit in '0'..='9' {
        kept = kept.replace(&format!("{{{digit}}}"), &digit.to_string());
    }
    kept
}
