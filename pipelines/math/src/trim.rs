//! Parts of a text that extraction looks at: its end, and an answer without the marks around it.

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
