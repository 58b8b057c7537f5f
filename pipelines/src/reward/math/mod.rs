//! The `math` reward: equality of mathematical expressions, whatever their form.
//!
//! `extract` finds the answer in a completion and `context` rejects one that the surrounding text changes.
//! `lex` and `parse` convert it to an `expr`, and `compare` tests whether two are equal: inequalities as sets
//! (`region`), other algebra by values at random points (`evaluate`, `ball_arithmetic`). Length, depth, size
//! and work are bounded, so that hostile text is wrong, never slow.

mod ball_arithmetic;
mod compare;
mod context;
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

/// 1 if the completion's answer equals the record's mathematically, else 0.
///
/// In a truncated completion only a boxed answer counts, since its last words are arbitrary.
#[derive(Clone, Debug, Default)]
pub struct Math {
    config: MathConfig,
}

impl Math {
    /// Creates the reward of `config`.
    pub fn new(config: MathConfig) -> Self {
        Self { config }
    }

    /// Returns true if `predicted` equals `gold`. Both are bare answers; `asks_percent` means that the
    /// question asks for percent.
    fn is_right(&self, gold: &str, predicted: &str, asks_percent: bool) -> bool {
        match (parse::parse(gold), parse::parse(predicted)) {
            (Some(gold), Some(predicted)) => {
                compare::is_right(&gold, &predicted, self.config.tolerance, asks_percent)
            }
            // Text that is not mathematics must be equal as text.
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

/// Returns true if two texts are equal except for spaces and typesetting commands.
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
    // `1011_{2}` equals `1011_2`.
    for digit in '0'..='9' {
        kept = kept.replace(&format!("{{{digit}}}"), &digit.to_string());
    }
    kept
}
