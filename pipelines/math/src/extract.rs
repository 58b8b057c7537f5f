//! Extraction of the answer from a completion.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::Regex;

use super::context::{hedges, is_negated, is_neutral, words_of_number};
use super::expr::Expr;
use super::parse::parse;

static PHRASE: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(?i)answer\s*(?:is\b|:)(?:\s|:|\*)*").expect("a pattern of this file"));

/// The answer in a completion. In a truncated completion, or with `only_boxed`, only a box counts.
///
/// Text inside `<think>` is ignored. The first of these forms that occurs counts, and its last occurrence:
/// `\boxed{...}` or `\fbox{...}`; `<answer>...</answer>`, or one of the following forms in it; `#### ...`;
/// `... answer is ...` or `answer: ...`; a formula between dollars or in `\(...\)` or `\[...\]`; a number. An
/// answer that the text around it changes, as in `-\boxed{5}`, `$5$ or $6$` and `not 5`, is rejected.
pub(super) fn extract(completion: &str, only_boxed: bool) -> Option<Cow<'_, str>> {
    let text = completion.rsplit("</think>").next().unwrap_or(completion);
    let boxes = boxes(text);
    if let Some(last) = boxes.last() {
        return last.is_whole(text, &boxes).then(|| clean(last.content).into());
    }
    if only_boxed {
        return None;
    }
    let tags = tagged(text);
    let tagged = tags.last();
    if tagged.is_some_and(|last| !last.is_said(text, &tags)) {
        return None;
    }
    let tagged = tagged.map(|last| last.content);
    if let Some(whole) = tagged.map(clean).filter(|inner| parse(inner).is_some()) {
        return Some(whole.into());
    }
    let text = tagged.unwrap_or(text);
    let found = after_hashes(text).or_else(|| after_phrase(text)).or_else(|| last_formula(text));
    let found = found.or_else(|| last_number(text)).map(clean).filter(|answer| !answer.is_empty());
    found.map(unmarked)
}

/// The gold answer: the boxed text or the text after `####` in a solution, else the whole text.
pub(super) fn gold(text: &str) -> &str {
    clean(last_boxed(text).or_else(|| after_hashes(text)).unwrap_or(text))
}

/// A box with balanced braces, or a closed `<answer>`.
struct Marked<'a> {
    content: &'a str,
    /// Start of `\boxed` or `<answer>`, and end of its closing part.
    start: usize,
    end: usize,
}

impl Marked<'_> {
    /// Returns true if nothing around a box, such as another box, changes the answer.
    fn is_whole(&self, text: &str, boxes: &[Marked]) -> bool {
        // Text outside a tag is not part of a formula inside it.
        let before = text[..self.start].rsplit("<answer>").next().unwrap_or_default();
        let after = text[self.end..].split("</answer>").next().unwrap_or_default();
        !self.is_joined(text, boxes) && is_neutral(before, after, true)
    }

    /// Returns true if the text around a tag does not negate it. Text before a tag cannot change its content
    /// otherwise.
    fn is_said(&self, text: &str, tags: &[Marked]) -> bool {
        let (before, after) = (&text[..self.start], &text[self.end..]);
        !(self.is_joined(text, tags) || is_negated(before)) && is_neutral("", after, true)
    }

    /// Returns true if another one of `all` precedes it directly, as in a list.
    fn is_joined(&self, text: &str, all: &[Marked]) -> bool {
        static JOINS: LazyLock<Regex> = LazyLock::new(|| {
            Regex::new(r"^[\s$]*(?:[,;]|\\\\|and|or|\\text\s*\{\s*(?:and|or)\s*\})?[\s$]*$")
                .expect("a pattern of this file")
        });
        let before = all.iter().rev().find(|it| it.end <= self.start && it.content != self.content);
        before.is_some_and(|it| JOINS.is_match(&text[it.end..self.start]))
    }
}

/// All boxes, ordered by their ends, found in one pass.
fn boxes(text: &str) -> Vec<Marked<'_>> {
    let bytes = text.as_bytes();
    let mut open: Vec<Option<(usize, usize)>> = Vec::new();
    let mut found = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' if text[at..].starts_with(r"\boxed") || text[at..].starts_with(r"\fbox") => {
                let start = at;
                at += if bytes[at + 1] == b'b' { r"\boxed".len() } else { r"\fbox".len() };
                at += text[at..].len() - text[at..].trim_start().len();
                if bytes.get(at) == Some(&b'{') {
                    at += 1;
                    open.push(Some((start, at)));
                }
                continue;
            }
            b'\\' => at += 1,
            b'{' => open.push(None),
            b'}' => {
                if let Some(Some((start, inner))) = open.pop() {
                    found.push(Marked { content: &text[inner..at], start, end: at + 1 });
                }
            }
            _ => {}
        }
        at += 1;
    }
    found
}

fn last_boxed(text: &str) -> Option<&str> {
    boxes(text).last().map(|last| last.content)
}

/// All closed `<answer>`s; if they are nested, the inner ones.
fn tagged(text: &str) -> Vec<Marked<'_>> {
    const OPEN: &str = "<answer>";
    static TAG: LazyLock<Regex> = LazyLock::new(|| Regex::new("</?answer>").expect("a pattern of this file"));
    let mut open = None;
    let mut found = Vec::new();
    for tag in TAG.find_iter(text) {
        if tag.as_str() == OPEN {
            open = Some(tag.start());
        } else if let Some(start) = open.take() {
            found.push(Marked { content: &text[start + OPEN.len()..tag.start()], start, end: tag.end() });
        }
    }
    found
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

/// Text that is said to be the answer, up to the end of the sentence or an explanation.
fn after_phrase(text: &str) -> Option<&str> {
    static REASON: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r",\s+(?:as|hence|so|which)\b|,?\s+(?:because|since)\b").expect("a pattern of this file")
    });
    let phrase = PHRASE.find_iter(text).last()?;
    if is_negated(&text[..phrase.start()]) {
        return None;
    }
    let line = text[phrase.end()..].lines().next()?;
    let line = bold(phrase.as_str(), line).unwrap_or(line);
    let line = REASON.split(line).next().unwrap_or(line);
    let neutral = formulas(line)
        .next()
        .filter(|(before, formula, after)| !hedges(before) && is_neutral(before, after, is_rounded(formula)));
    neutral.map(|(_, formula, _)| formula).or_else(|| line.split(". ").next())
}

/// Returns true for a decimal, which "about" may precede.
fn is_rounded(answer: &str) -> bool {
    answer.contains('.')
}

/// Bold text in `line`, if `phrase` before it ends with the opening stars.
fn bold<'a>(phrase: &str, line: &'a str) -> Option<&'a str> {
    let (inner, after) = line.split_once("**").filter(|_| phrase.ends_with("**"))?;
    // `2**10` is a power, and `**3** million` another number.
    let is_power = after.starts_with(|c: char| c.is_alphanumeric() || c == '(');
    (!is_power && is_neutral("", after, true)).then_some(inner)
}

fn last_formula(text: &str) -> Option<&str> {
    let neutral = formulas(text)
        .last()
        .filter(|(before, formula, after)| is_neutral(before, after, is_rounded(formula)));
    neutral.map(|(_, formula, _)| formula)
}

/// All formulas between marks in order, each with the text before and after it.
fn formulas(text: &str) -> impl Iterator<Item = (&str, &str, &str)> {
    const MARKS: [(&str, &str); 4] = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")];
    let mut rest = text;
    std::iter::from_fn(move || {
        loop {
            let start = rest.find(['$', '\\'])?;
            let at = &rest[start..];
            let Some((open, close)) = MARKS.iter().find(|(open, _)| at.starts_with(open)) else {
                // A backslash and the character that it escapes, which may be a dollar.
                let next = at.chars().nth(1).map_or(0, char::len_utf8);
                rest = &at[1 + next..];
                continue;
            };
            let inner = &at[open.len()..];
            let end = inner.find(close)?;
            let before = &text[..text.len() - at.len()];
            rest = &inner[end + close.len()..];
            return Some((before, &inner[..end], rest));
        }
    })
}

/// The last number in prose with its sign, and words after it that change it. `None` if it is part of
/// something larger, as the 42 in `2^42` and `\sqrt{42}`.
fn last_number(text: &str) -> Option<&str> {
    const MINUS: [char; 3] = ['-', '−', '–'];
    static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
        let whole = r"[0-9]+ [0-9]+/[0-9]+|(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)";
        Regex::new(&format!(r"[-−–]?(?:\\?[$€£])?(?:{whole}(?:[eE][-+]?[0-9]+|/[0-9]+)?)%?"))
            .expect("a pattern of this file")
    });
    let number = NUMBER.find_iter(text).last()?;
    let (before, after) = (&text[..number.start()], &text[number.end()..]);
    let words = words_of_number(after);
    let unsigned = number.as_str().trim_start_matches(MINUS);
    // `US$5` is not a product.
    let is_money = unsigned.starts_with(['$', '€', '£', '\\']);
    let before = if is_money { before.trim_end_matches(char::is_alphabetic) } else { before };
    // In `x-5` the minus is an operator, in `2024-05` a hyphen, and `x5` is a name.
    let is_joined = before.ends_with(|c: char| c.is_alphanumeric() || c == ')');
    let is_whole = !is_joined && is_neutral(before, &after[words..], is_rounded(unsigned));
    is_whole.then(|| &text[number.start()..number.end() + words])
}

/// `text` without the marks around an answer in prose: spaces, dollars, stars, the end of the sentence.
fn clean(text: &str) -> &str {
    /// Deeper nesting is hostile.
    const MOST_LAYERS: usize = 8;
    let mut text = text.trim();
    for _ in 0..MOST_LAYERS {
        let before = text;
        for (open, close) in
            [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`")]
        {
            let inner = text.strip_prefix(open).and_then(|text| text.strip_suffix(close));
            text = inner.filter(|inner| !inner.contains(open)).unwrap_or(text);
        }
        text = text.strip_suffix("**").unwrap_or(text);
        // An ellipsis is not the end of a sentence.
        text = text.strip_suffix('.').filter(|text| !text.ends_with('.')).unwrap_or(text).trim();
        if let Some(boxed) = last_boxed(text) {
            text = boxed;
        }
        if text == before {
            break;
        }
    }
    text
}

/// Removes marks: `3 million` from `$3$ million` and `**3** million`, and `-5` from `-$5$`.
fn unmarked(text: &str) -> Cow<'_, str> {
    static MARKED: LazyLock<Regex> = LazyLock::new(|| {
        let (open, close) = (r"(?:\*\*|\$|\\\()?", r"(?:\*\*|\$|\\\))");
        Regex::new(&format!(
            r"^(?:([-−–])\s*{open}([0-9.,/]+){close}|{open}([^$*\\]+|\\[^$*()]+){close})\s*(\\?%|[A-Za-z ]*)$"
        ))
        .expect("a pattern of this file")
    });
    match MARKED.captures(text) {
        Some(parts) => {
            let part = |at| parts.get(at).map_or("", |part| part.as_str());
            format!("{}{}{} {}", part(1), part(2), part(3), part(4)).trim().to_owned().into()
        }
        None => text.into(),
    }
}
