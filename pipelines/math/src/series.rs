//! Sums and products over an index, whose terms are formulas: `\sum_{k=0}^{n} a_k b_k`.

use std::sync::LazyLock;

use regex::Regex;

use super::parse::MOST_BYTES;

/// A text around the first `\sum` or `\prod` in it.
pub(super) struct Series<'a> {
    pub(super) before: &'a str,
    /// The command with its bounds.
    pub(super) head: &'a str,
    /// One product, so that its end is known.
    pub(super) term: &'a str,
}

/// The parts of `text`; `None` if it is no series, or has several terms.
pub(super) fn series(text: &str) -> Option<Series<'_>> {
    static HEAD: LazyLock<Regex> = LazyLock::new(|| {
        let bound = r"\s*(?:\{[^{}]*\}|[A-Za-z0-9])";
        Regex::new(&format!(r"\\(?:sum|prod)\s*(?:\\limits\s*)?_{bound}\s*(?:\^{bound})?"))
            .expect("a pattern of this file")
    });
    if text.len() > MOST_BYTES {
        return None;
    }
    let head = HEAD.find(text)?;
    let term = &text[head.end()..];
    let mut depth = 0_i32;
    let is_one_product = term.chars().all(|c| {
        depth += i32::from("{([".contains(c)) - i32::from("})]".contains(c));
        depth > 0 || !"+-=<>,;".contains(c)
    });
    is_one_product.then(|| Series { before: &text[..head.start()], head: head.as_str(), term })
}
