//! Rules for doc comments: `CONTRIBUTING.md` has the reasons and the glossary.

use super::source::Source;

/// First words of sentences without a noun or a verb. A doc comment begins with the thing ("Index of ..."),
/// or with a verb in the third person ("Returns ...").
const REFUSED: [&str; 9] = ["What", "Whether", "How", "Where", "Of", "As", "Those", "That", "So"];

pub fn check(source: &Source, add: &mut dyn FnMut(usize, String)) {
    for (line, text) in openings(&source.text) {
        let first = text.trim_start().split(|it: char| !it.is_alphanumeric()).next().unwrap_or_default();
        if REFUSED.contains(&first) {
            add(
                line,
                format!("a doc comment begins with a noun or a verb (\"Returns ...\"), not with `{first}`"),
            );
        }
    }
}

/// Returns the first line of each doc comment, with its number from 1 and without its marker.
fn openings(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut before = None;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let line = line.trim_start();
        let marker = ["///", "//!"].into_iter().find(|it| line.starts_with(it) && !line.starts_with("////"));
        let is_first = marker != before;
        before = marker;
        marker.filter(|_| is_first).map(|it| (index + 1, &line[it.len()..]))
    })
}

#[cfg(test)]
mod tests {
    use super::super::expect;

    #[test]
    fn doc_comments_begin_with_a_noun_or_a_verb() {
        let check = |text: &str, rules: &[(usize, &str)]| expect("models/src/a.rs", text, rules);
        check("//! Of a model.\n", &[(1, "not with `Of`")]);
        check("struct A {\n    /// What it holds.\n    a: u8,\n}\n", &[(2, "not with `What`")]);
        check("//! Text.\n\n/// Whether\n/// it holds.\nfn f() {}\n", &[(3, "not with `Whether`")]);
        check("//! Text.\n/// As [`f`].\nfn g() {}\n", &[(2, "not with `As`")]);
    }

    #[test]
    fn other_lines_are_free() {
        for text in [
            "/// Index of the row.\n/// Of no other.\nfn f() {}\n",
            "// What follows is long.\n",
            "//// Of old.\n",
            "/// Assigns ids.\nfn f() {}\n",
            "/// Whatever it is.\nfn f() {}\n",
        ] {
            expect("models/src/a.rs", text, &[]);
        }
        expect("docs/a.md", "/// What it is.\n", &[]);
    }
}
