//! The letter before an option: `\textbf{(A)}\ 5`.

use std::sync::LazyLock;

use regex::Regex;

use super::parse::MOST_BYTES;

/// The letter and the value of an option; `None` if `text` is none.
pub(super) fn option_of(text: &str) -> Option<(&str, &str)> {
    static OPTION: LazyLock<Regex> = LazyLock::new(|| {
        let text = r"\\(?:text|textbf|textrm|mathrm|mathbf|bf)\s*\{\s*";
        let space = r"(?:\\[,;: ]|~|\\q?quad\b|\s)";
        let label = r"(?:\(([A-E])\)|([A-E])[.)])";
        Regex::new(&format!(r"^(?:{text})?{label}[.:]?\s*(\}})?{space}+(\S.*)$"))
            .expect("a pattern of this file")
    });
    if text.len() > MOST_BYTES {
        return None;
    }
    let found = OPTION.captures(text)?;
    let letter = found.get(1).or(found.get(2))?.as_str();
    let value = found.get(4)?.as_str();
    // `\textbf{(A) 5}`
    let is_open = text.starts_with('\\') && found.get(3).is_none();
    Some((letter, if is_open { value.strip_suffix('}')? } else { value }))
}

/// The letter in `Option C`, `\text{C)}` or `C.`.
pub(super) fn letter_of(text: &str) -> Option<&str> {
    static LETTER: LazyLock<Regex> = LazyLock::new(|| {
        let open = r"(?:\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{\s*)?";
        let name = r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s*:?\s*\(?([A-E])\)?|\(?([A-E])[).:])";
        Regex::new(&format!(r"^{open}{name}\.?\s*\}}?$")).expect("a pattern of this file")
    });
    if text.len() > MOST_BYTES {
        return None;
    }
    let found = LETTER.captures(text)?;
    Some(found.get(1).or(found.get(2))?.as_str())
}
