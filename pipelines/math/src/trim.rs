//! Parts of a text that extraction looks at: its end, and an answer without the marks around it.

use std::sync::LazyLock;

use regex::Regex;

use super::boxes::{Marked, boxes};

/// Returns the end of a text, in which an answer in prose must be.
pub(super) fn last_bytes(text: &str) -> &str {
    const MOST_BYTES: usize = 8_000;
    let mut from = text.len().saturating_sub(MOST_BYTES);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    &text[from..]
}

/// Returns `text` without words behind an answer that say nothing of it: `I hope it is correct.`, `<|im_end|>`.
pub(super) fn without_closing(text: &str) -> &str {
    static CLOSING: LazyLock<Regex> = LazyLock::new(|| {
        let mark = r"<\|[a-z_]{1,20}\|>(?:user|assistant)?";
        let it = r"(?:it|this|that|the\s+answer|the\s+solution|my\s+answer)(?:\s+is|['’]s)";
        let hope = format!(
            r"(?i:I\s+hope\s+(?:{it}\s+(?:correct|right|clear)|(?:this|that|it)\s+helps?(?:\s+you)?)|hope\s+this\s+helps)"
        );
        Regex::new(&format!(r"(?:\s*(?:{mark}|(?-u:\b){hope}\s*[.!]))+\s*$")).expect("a pattern of this file")
    });
    /// Limit of the characters that closing words have.
    const MOST_CHARS: usize = 300;
    let start = text.char_indices().rev().take(MOST_CHARS).last().map_or(0, |(start, _)| start);
    CLOSING.find(&text[start..]).map_or(text, |found| &text[..start + found.start()])
}

/// Returns `text` without the marks around an answer in prose: spaces, dollars, stars, the end of the sentence.
pub(super) fn clean(text: &str) -> &str {
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
        let ends_sentence = |text: &&str| !text.ends_with('.') && !text.ends_with(r"\right");
        text = text.strip_suffix('.').filter(ends_sentence).unwrap_or(text).trim();
        text = text.strip_suffix(r"\\").unwrap_or(text);
        if let Some(Marked { content, .. }) = boxes(text).closed.last() {
            text = content;
        }
        if text == before {
            break;
        }
    }
    text
}
