//! Equality of mathematical answers, whatever their form: the verifier of the `math` reward.
//!
//! `extract` finds the answer in a completion and `context` rejects one that the surrounding text changes.
//! `lex` and `parse` convert it to an `expr`, and `compare` tests whether two are equal: inequalities as sets
//! (`region`), other algebra by values at random points (`evaluate`, `ball_arithmetic`). Length, depth, size
//! and work are bounded, so that hostile text is wrong, never slow.

#![forbid(unsafe_code)]

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

/// Policies of comparison on which verifiers differ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// If the gold answer is a decimal number, largest relative error of a number; never more than half of its last
    /// digit.
    pub tolerance: f64,
    /// True if the question asks for percent: `5\%` then equals `5`.
    pub asks_percent: bool,
}

/// Finds the answer in a completion: the last one in a box, or else the one that its last words announce.
/// `only_boxed` excludes the latter, for completions that were cut, whose last words are arbitrary.
pub fn answer(completion: &str, only_boxed: bool) -> Option<Cow<'_, str>> {
    extract::extract(completion, only_boxed)
}

/// Returns the answer in a record's gold text, which may be a whole solution; empty if there is none.
pub fn gold_answer(text: &str) -> &str {
    extract::gold(text)
}

/// Returns true if `predicted` equals `gold` mathematically. Both are bare answers, as [`answer`] and [`gold_answer`]
/// return them. Text that is not mathematics must be equal as text.
pub fn is_equal(gold: &str, predicted: &str, options: Options) -> bool {
    match (parse::parse(gold), parse::parse(predicted)) {
        (Some(gold), Some(predicted)) => {
            compare::is_right(&gold, &predicted, options.tolerance, options.asks_percent)
        }
        (None, None) => same_text(gold, predicted),
        _ => false,
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
