//! Equality of mathematical answers, whatever their form: the verifier of the `math` reward.
//!
//! `normalize` gives characters one spelling. `extract` finds the answer in a completion: in `boxes`, which a `chain`
//! joins, or in `prose`. `withdrawal` and `context` reject one that the surrounding text takes back or changes, in
//! English and in `foreign` languages. `lex` and `parse` convert it to an `expr` without its `name`, `unit` and
//! modulus (`congruence`). `compare` tests whether two are equal: inequalities as sets (`region`), other algebra by
//! values at random points (`evaluate`, `field`, `ball_arithmetic`). Length, depth, size and work are bounded, so that
//! hostile text is wrong, never slow.

#![forbid(unsafe_code)]

mod ball_arithmetic;
mod boxes;
mod chain;
mod choice;
mod compare;
mod congruence;
mod context;
mod evaluate;
mod expr;
mod extract;
mod field;
mod foreign;
mod lex;
mod literal;
mod matrix;
mod name;
mod named;
mod normalize;
mod parse;
mod primary;
mod prose;
mod region;
mod rewrite;
mod series;
mod symbols;
mod token;
mod trim;
mod unit;
mod withdrawal;

#[cfg(test)]
mod kinds;
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
    /// True if a comma between digits is the decimal mark: `3,5` is then 3.5, and `1.234,5` is 1234.5.
    pub decimal_comma: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { tolerance: 1e-4, asks_percent: false, decimal_comma: false }
    }
}

/// Finds the answer in a completion: the last one in a box, or else the one that its last words announce. Several
/// that are joined are one list. `only_boxed` excludes the latter, for completions that were cut, whose last words
/// are arbitrary.
pub fn answer(completion: &str, only_boxed: bool) -> Option<Cow<'_, str>> {
    match normalize::normalize(completion) {
        Cow::Borrowed(text) => extract::extract(text, only_boxed),
        Cow::Owned(text) => extract::extract(&text, only_boxed).map(|found| found.into_owned().into()),
    }
}

/// Returns the answer in a record's gold text, which may be a whole solution; empty if there is none.
pub fn gold_answer(text: &str) -> Cow<'_, str> {
    match normalize::normalize(text) {
        Cow::Borrowed(text) => extract::gold(text),
        Cow::Owned(text) => extract::gold(&text).into_owned().into(),
    }
}

/// Returns true if `predicted` equals `gold` mathematically. Both are bare answers, as [`answer`] and [`gold_answer`]
/// return them. Text that is not mathematics must be equal as text.
pub fn is_equal(gold: &str, predicted: &str, options: Options) -> bool {
    let (gold, predicted) = (normalize::normalize(gold), normalize::normalize(predicted));
    let is_equal = |gold: &str, predicted: &str| is_same(gold, predicted, options);
    let is_letter = matches!(&*gold, "A" | "B" | "C" | "D" | "E");
    match (choice::option_of(&gold), choice::option_of(&predicted)) {
        (Some((letter, value)), Some((other, its))) => letter == other && is_equal(value, its),
        (Some((letter, value)), None) => is_equal(letter, &predicted) || is_equal(value, &predicted),
        (None, Some((letter, value))) => is_equal(&gold, if is_letter { letter } else { value }),
        (None, None) => {
            let named = choice::letter_of(&predicted).filter(|_| is_letter);
            is_equal(&gold, named.unwrap_or(&predicted))
        }
    }
}

fn is_same(gold: &str, predicted: &str, options: Options) -> bool {
    let (golds, answers) = (readings(gold, options), readings(predicted, options));
    if golds.is_empty() && answers.is_empty() {
        return same_text(gold, predicted) || same_series(gold, predicted, options);
    }
    golds.iter().any(|gold| answers.iter().any(|answer| compare::is_right(gold, answer, options)))
}

/// The answers that `text` may be: `24 m^2` is a formula, or a number with a unit.
fn readings(text: &str, options: Options) -> Vec<parse::Answer> {
    let with_unit = unit::with_upright_unit(text);
    let texts = std::iter::once(text).chain(with_unit.as_deref());
    texts.filter_map(|text| parse::parse_with(text, options.decimal_comma)).collect()
}

/// Returns true if two series have the same text, except that their terms are equal formulas.
fn same_series(gold: &str, predicted: &str, options: Options) -> bool {
    let Some((gold, predicted)) = series::series(gold).zip(series::series(predicted)) else { return false };
    let answer = |term| parse::parse_with(term, options.decimal_comma);
    let Some((term, other)) = answer(gold.term).zip(answer(predicted.term)) else { return false };
    same_text(gold.before, predicted.before)
        && same_text(gold.head, predicted.head)
        && compare::is_right(&term, &other, options)
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
    // `1011_{2}` equals `1011_2`.
    for sign in ('0'..='9').chain('a'..='z') {
        text = text.replace(&format!("{{{sign}}}"), &sign.to_string());
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
    kept
}
