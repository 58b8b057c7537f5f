//! The modulus of a congruence: `x \equiv 3 \pmod 7`.

use std::sync::LazyLock;

use regex::Regex;

/// The text before a modulus at the end, and the modulus.
pub(super) fn split_modulus(text: &str) -> (&str, Option<&str>) {
    static MODULUS: LazyLock<Regex> = LazyLock::new(|| {
        let space = r"(?:\s|\\[,;:! ]|\\q?quad\b)*";
        let name = r"(?:\\[bp]?mod|\\mathrm\s*\{mod\}|\\text\s*\{\s*mod\s*\}|\\operatorname\s*\{mod\}|mod)";
        let command = r"\\pmod\s*(?:\{([^{}]+)\}|([0-9]+|[a-z]))";
        let bracketed = format!(r"(?:\\left)?\({space}{name}\s*{space}\{{?([^(){{}}]+)\}}?(?:\\right)?\)");
        Regex::new(&format!(r"{space}(?:{command}|{bracketed}){space}$")).expect("a pattern of this file")
    });
    if !text.contains("mod") {
        return (text, None);
    }
    match MODULUS.captures(text) {
        Some(found) => {
            let modulus = (1..=3).find_map(|at| found.get(at)).map(|modulus| modulus.as_str());
            (&text[..found.get(0).map_or(text.len(), |all| all.start())], modulus)
        }
        None => (text, None),
    }
}
