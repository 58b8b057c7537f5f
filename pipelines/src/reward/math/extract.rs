//! Where in a completion the answer stands.

use std::sync::LazyLock;

use regex::Regex;

/// The text that is taken for the answer. In a completion that was cut, or if `only_boxed`, nothing but a box counts.
///
/// What is inside of `<think>` is not read. Then the first of these that is there counts, and of several the last:
/// `\boxed{...}` or `\fbox{...}`; `#### ...`; `... answer is ...` or `answer: ...`; a formula between dollars or in
/// `\(...\)` or `\[...\]`; a number.
pub(super) fn extract(completion: &str, only_boxed: bool) -> Option<&str> {
    let text = completion.rsplit("</think>").next().unwrap_or(completion);
    if let Some(boxed) = last_boxed(text) {
        return Some(clean(boxed));
    }
    if only_boxed {
        return None;
    }
    let found = after_hashes(text).or_else(|| after_phrase(text)).or_else(|| last_formula(text));
    found.or_else(|| last_number(text)).map(clean).filter(|answer| !answer.is_empty())
}

/// The gold answer: what is boxed or behind `####` in a solution, else the whole text.
pub(super) fn gold(text: &str) -> &str {
    clean(last_boxed(text).or_else(|| after_hashes(text)).unwrap_or(text))
}

/// The content of the last box whose braces are balanced, in one pass.
fn last_boxed(text: &str) -> Option<&str> {
    let bytes = text.as_bytes();
    let mut open: Vec<Option<usize>> = Vec::new();
    let mut last = None;
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' if text[at..].starts_with(r"\boxed") || text[at..].starts_with(r"\fbox") => {
                at += if bytes[at + 1] == b'b' { r"\boxed".len() } else { r"\fbox".len() };
                at += text[at..].len() - text[at..].trim_start().len();
                if bytes.get(at) == Some(&b'{') {
                    at += 1;
                    open.push(Some(at));
                }
                continue;
            }
            b'\\' => at += 1,
            b'{' => open.push(None),
            b'}' => {
                if let Some(Some(start)) = open.pop() {
                    last = Some(&text[start..at]);
                }
            }
            _ => {}
        }
        at += 1;
    }
    last
}

/// GSM8K's mark.
fn after_hashes(text: &str) -> Option<&str> {
    text.rsplit_once("####")?.1.trim_start().lines().next()
}

/// What is said to be the answer, up to the end of the sentence.
fn after_phrase(text: &str) -> Option<&str> {
    static PHRASE: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"(?i)answer\s*(?:is\b|:)(?:\s|:|\*)*").expect("a pattern of this file"));
    let rest = &text[PHRASE.find_iter(text).last()?.end()..];
    let line = rest.lines().next()?;
    if let Some(formula) = line.find(['$', '\\']).and_then(|_| first_formula(line)) {
        return Some(formula);
    }
    Some(line.split(". ").next().unwrap_or(line))
}

fn first_formula(line: &str) -> Option<&str> {
    formulas(line).next()
}

fn last_formula(text: &str) -> Option<&str> {
    formulas(text).last()
}

/// All formulas between marks, in their order.
fn formulas(text: &str) -> impl Iterator<Item = &str> {
    const MARKS: [(&str, &str); 4] = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")];
    let mut rest = text;
    std::iter::from_fn(move || {
        loop {
            let start = rest.find(['$', '\\'])?;
            let at = &rest[start..];
            let Some((open, close)) = MARKS.iter().find(|(open, _)| at.starts_with(open)) else {
                // A backslash and what it escapes, which may be a dollar.
                let next = at.chars().nth(1).map_or(0, char::len_utf8);
                rest = &at[1 + next..];
                continue;
            };
            let inner = &at[open.len()..];
            let end = inner.find(close)?;
            rest = &inner[end + close.len()..];
            return Some(&inner[..end]);
        }
    })
}

fn last_number(text: &str) -> Option<&str> {
    static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"-?(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?%?")
            .expect("a pattern of this file")
    });
    let found = NUMBER.find_iter(text).last()?;
    let before = text[..found.start()].chars().next_back();
    // In `x-5` the minus is an operator, and in `2024-05` a hyphen.
    let is_operator =
        found.as_str().starts_with('-') && before.is_some_and(|c| c.is_alphanumeric() || c == ')');
    Some(&found.as_str()[usize::from(is_operator)..])
}

/// `text` without what stands around an answer in prose: spaces, dollars, stars, the end of the sentence.
fn clean(text: &str) -> &str {
    /// Deeper wrapping is hostile.
    const MOST_LAYERS: usize = 8;
    let mut text = text.trim();
    for _ in 0..MOST_LAYERS {
        let before = text;
        for (open, close) in [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**")] {
            let inner = text.strip_prefix(open).and_then(|text| text.strip_suffix(close));
            text = inner.filter(|inner| !inner.contains(open)).unwrap_or(text);
        }
        text = text.strip_suffix("**").unwrap_or(text).strip_suffix('.').unwrap_or(text).trim();
        if let Some(boxed) = last_boxed(text) {
            text = boxed;
        }
        if text == before {
            break;
        }
    }
    text
}
