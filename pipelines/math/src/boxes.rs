//! Answers between marks: `\boxed{...}` and `<answer>...</answer>`.

use std::sync::LazyLock;

use regex::Regex;

/// A piece of text between marks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Marked<'a> {
    pub(super) content: &'a str,
    /// Start of the opening mark, and end of the closing one.
    pub(super) start: usize,
    pub(super) end: usize,
}

/// The boxes of a text.
pub(super) struct Boxes<'a> {
    /// Closed boxes that are in no other one, ordered.
    pub(super) closed: Vec<Marked<'a>>,
    /// True if a box is opened behind the last closed one, and never closed.
    pub(super) is_cut: bool,
}

/// Finds all boxes in one pass. Without braces, a box has the number or the letter that follows.
pub(super) fn boxes(text: &str) -> Boxes<'_> {
    let bytes = text.as_bytes();
    let mut open: Vec<Option<(usize, usize)>> = Vec::new();
    let mut closed: Vec<Marked> = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' if text[at..].starts_with(r"\boxed") || text[at..].starts_with(r"\fbox") => {
                let start = at;
                at += if bytes[at + 1] == b'b' { r"\boxed".len() } else { r"\fbox".len() };
                let inner = at + text[at..].len() - text[at..].trim_start().len();
                if bytes.get(inner) == Some(&b'{') {
                    at = inner + 1;
                    open.push(Some((start, at)));
                } else if inner == bytes.len() {
                    open.push(Some((start, inner)));
                } else if let Some(length) = bare_content(&text[inner..]) {
                    at = inner + length;
                    add(&mut closed, Marked { content: &text[inner..at], start, end: at });
                }
                continue;
            }
            b'\\' => at += 1,
            b'{' => open.push(None),
            b'}' => {
                if let Some(Some((start, inner))) = open.pop() {
                    add(&mut closed, Marked { content: &text[inner..at], start, end: at + 1 });
                }
            }
            _ => {}
        }
        at += 1;
    }
    let last = closed.last().map_or(0, |last| last.start);
    let is_cut = open.iter().flatten().any(|(start, _)| *start >= last);
    Boxes { closed, is_cut }
}

/// Adds a box, which replaces those in it.
fn add<'a>(closed: &mut Vec<Marked<'a>>, found: Marked<'a>) {
    while closed.last().is_some_and(|last| last.start > found.start) {
        closed.pop();
    }
    closed.push(found);
}

/// Length of the number or the letter that a box without braces has.
fn bare_content(text: &str) -> Option<usize> {
    static BARE: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"^(?:-?[0-9]+(?:[.,/][0-9]+)*[A-Za-z]?|[A-Z])(?:[^\p{L}\p{N}{\\]|$)")
            .expect("a pattern of this file")
    });
    let found = BARE.find(text)?.as_str();
    Some(found.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()).len())
}

/// All closed `<answer>`s; if they are nested, the inner ones.
pub(super) fn tagged(text: &str) -> Vec<Marked<'_>> {
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

/// All formulas between dollars, `\(...\)` or `\[...\]`, ordered.
pub(super) fn formulas(text: &str) -> impl Iterator<Item = Marked<'_>> {
    const MARKS: [(&str, &str); 4] = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")];
    let mut rest = text;
    std::iter::from_fn(move || {
        loop {
            let found = rest.find(['$', '\\'])?;
            let at = &rest[found..];
            let Some((open, close)) = MARKS.iter().find(|(open, _)| at.starts_with(open)) else {
                // A backslash and the character that it escapes, which may be a dollar.
                let next = at.chars().nth(1).map_or(0, char::len_utf8);
                rest = &at[1 + next..];
                continue;
            };
            let inner = &at[open.len()..];
            let end = inner.find(close)?;
            let start = text.len() - at.len();
            rest = &inner[end + close.len()..];
            return Some(Marked { content: &inner[..end], start, end: text.len() - rest.len() });
        }
    })
}
