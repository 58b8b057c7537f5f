//! Extraction of the answer from a completion, and from a record's solution.

use std::borrow::Cow;

use super::Options;
use super::boxes::{boxes, formulas, tagged};
use super::chain::Chain;
use super::compare::is_right;
use super::context::{is_followed_by_words, is_negated, is_neutral, is_struck, without_modulus};
use super::expr::{Brackets, Expr};
use super::parse::{Answer, parse};
use super::prose::{
    PHRASE, after_phrase, joined_formulas, last_formula, last_latex, last_number, said_after, said_formula,
    unmarked,
};
use super::trim::{clean, last_bytes, without_closing};
use super::withdrawal::{denies, last_withdrawal};

/// The answer in a completion. In a truncated completion, or with `only_boxed`, only a box counts.
///
/// Text inside `<think>`, and text that later words take back, is ignored. The first of these forms that occurs
/// counts, and its last occurrence: `\boxed{...}` or `\fbox{...}`; `<answer>...</answer>`, or one of the following
/// forms in it; `#### ...`; `... answer is ...` or `answer: ...`; a number after a formula that only names it; a
/// formula between dollars or in `\(...\)` or `\[...\]`; LaTeX without marks; a number. Boxes and formulas that are
/// joined are one answer. An answer that the text around it changes, as in `-\boxed{5}` and `not 5`, is rejected,
/// and so is one before a box that never closes.
pub(super) fn extract(completion: &str, only_boxed: bool) -> Option<Cow<'_, str>> {
    let text = completion.rsplit("</think>").next().unwrap_or(completion);
    match last_withdrawal(text) {
        Some(end) => {
            let is_announced = announced(&text[..end], only_boxed).is_some();
            let later = announced(&text[end..], only_boxed);
            if is_announced || later.is_some() {
                later.flatten()
            } else {
                unannounced(&text[end..], only_boxed)
            }
        }
        None => announced(text, only_boxed).unwrap_or_else(|| unannounced(text, only_boxed)),
    }
}

/// The answer in a box, in tags, after hashes or after a phrase: `Some(None)` if one of these is there and counts
/// as no answer.
fn announced(text: &str, only_boxed: bool) -> Option<Option<Cow<'_, str>>> {
    let boxes = boxes(text);
    if boxes.is_cut {
        return Some(None);
    }
    if let Some(chain) = Chain::last(text, &boxes.closed) {
        let later = last_bytes(&text[chain.end..]);
        let Some(found) = boxed(text, &chain).filter(|found| !denies(later, found)) else {
            return Some(None);
        };
        return Some(match later_answer(&found, later) {
            Some(other) => Some(other).filter(|_| !only_boxed),
            None => Some(found),
        });
    }
    if only_boxed {
        return None;
    }
    if let Some(chain) = Chain::last(text, &tagged(text)) {
        return Some(in_tag(text, &chain));
    }
    let text = without_closing(last_bytes(text));
    let found = after_hashes(text).map(Cow::Borrowed).or_else(|| after_phrase(text));
    found.map(cleaned)
}

/// The answer in the last sentences.
fn unannounced(text: &str, only_boxed: bool) -> Option<Cow<'_, str>> {
    if only_boxed {
        return None;
    }
    let text = without_closing(last_bytes(text));
    if let Some(found) = said_after(text).or_else(|| last_formula(text)) {
        return Some(found).filter(|found| !found.is_empty());
    }
    let found = if formulas(text).next().is_none() { last_latex(text) } else { None };
    cleaned(found.map(Cow::Borrowed).or_else(|| last_number(text))?)
}

/// An answer without the marks around it; `None` if nothing is left.
fn cleaned(found: Cow<'_, str>) -> Option<Cow<'_, str>> {
    match found {
        Cow::Borrowed(text) => Some(unmarked(clean(text))).filter(|text| !text.is_empty()),
        owned => Some(owned),
    }
}

/// The answer of joined boxes, if nothing around them changes it.
fn boxed<'a>(text: &'a str, chain: &Chain<'a>) -> Option<Cow<'a, str>> {
    // Text outside a tag is not part of a formula inside it.
    let before = text[..chain.start].rsplit("<answer>").next().unwrap_or_default();
    let after = text[chain.end..].split("</answer>").next().unwrap_or_default();
    let items = items_of(chain);
    let before = match without_between(before) {
        Some(shorter) if !chain.is_several() && is_pair(&items) => shorter,
        _ => before,
    };
    let is_whole = !chain.is_formula()
        && is_neutral(before, without_modulus(after), true)
        && !is_followed_by_words(after)
        && !is_struck(before)
        && !chain.is_continued(text);
    is_whole.then_some(items)
}

/// Returns true for `12 and 13`.
fn is_pair(items: &str) -> bool {
    let is_list =
        |answer: &Answer| matches!(&answer.expr, Expr::Sequence(Brackets::Bare, parts) if parts.len() == 2);
    parse(items).is_some_and(|answer| is_list(&answer))
}

/// `before` without the preposition of a pair in one box.
fn without_between(before: &str) -> Option<&str> {
    before.trim_end_matches([' ', '$', '\n']).strip_suffix("between")
}

/// Another answer than the box's that the text behind it announces.
fn later_answer<'a>(found: &str, later: &'a str) -> Option<Cow<'a, str>> {
    /// Longer answers are not compared here.
    const MOST_BYTES: usize = 60;
    let other = cleaned(after_phrase(without_closing(later))?)?;
    // A letter of a choice has a value too.
    let has_digit = |text: &str| text.contains(|c: char| c.is_ascii_digit());
    let is_short = found.len().max(other.len()) <= MOST_BYTES && has_digit(found) && has_digit(&other);
    let (box_answer, other_answer) = parse(found).zip(parse(&other)).filter(|_| is_short)?;
    (!is_right(&box_answer, &other_answer, Options::default())).then_some(other)
}

fn items_of<'a>(chain: &Chain<'a>) -> Cow<'a, str> {
    if chain.is_several() { chain.joined(clean).into() } else { without_marks(clean(chain.content())) }
}

/// The answer of joined tags. Text before a tag can negate its content, but not change it otherwise.
fn in_tag<'a>(text: &'a str, chain: &Chain<'a>) -> Option<Cow<'a, str>> {
    if is_negated(&text[..chain.start]) || !is_neutral("", &text[chain.end..], true) {
        return None;
    }
    if chain.is_several() {
        return Some(chain.joined(clean).into()).filter(|joined: &Cow<str>| !PHRASE.is_match(joined));
    }
    let whole = without_marks(clean(chain.content()));
    if parse(&whole).is_some() && !PHRASE.is_match(&whole) {
        return Some(whole);
    }
    announced(chain.content(), false).unwrap_or_else(|| unannounced(chain.content(), false))
}

/// The gold answer: the boxed text or the text after `####` in a solution, else the whole text.
pub(super) fn gold(text: &str) -> Cow<'_, str> {
    match Chain::last(text, &boxes(text).closed) {
        Some(chain) => items_of(&chain),
        None => {
            let whole = unmarked(clean(after_hashes(text).unwrap_or(text)));
            if parse(&whole).is_some() {
                return whole;
            }
            said_formula(text).or_else(|| concluded(text)).unwrap_or(whole)
        }
    }
}

/// The answer that a solution of several sentences announces.
fn concluded(text: &str) -> Option<Cow<'_, str>> {
    let text = without_closing(last_bytes(text)).trim();
    let has_sentences = text.trim_end_matches('.').contains(". ") || text.contains('\n');
    let found = after_phrase(text).filter(|_| has_sentences)?;
    cleaned(found).filter(|found| parse(found).is_some())
}

/// `1 and 2` from `$1$ and $2$`.
fn without_marks(text: &str) -> Cow<'_, str> {
    joined_formulas(text).map_or(text.into(), Cow::Owned)
}

/// The text after GSM8K's mark. Markdown headings look the same, so it must be in the last line or before a
/// bare value.
fn after_hashes(text: &str) -> Option<&str> {
    let rest = text.rsplit_once("####")?.1.trim_start();
    let line = rest.lines().next()?;
    // `#### The answer is 5` is handled by the phrase.
    if PHRASE.is_match(line) {
        return None;
    }
    let is_last = rest[line.len()..].trim().is_empty();
    (is_last || is_bare_value(clean(line))).then_some(line)
}

/// Returns true if `text` is mathematics without words, unlike `2. Add the two`.
fn is_bare_value(text: &str) -> bool {
    parse(text).is_some_and(|answer| {
        let is_money = text.contains(['$', '€', '£']);
        (answer.unit.is_none() || is_money) && !answer.expr.any(&|part| matches!(part, Expr::Words(_)))
    })
}
