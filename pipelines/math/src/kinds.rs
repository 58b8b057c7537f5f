//! Tables of cases by kind. A line has `right` or `wrong`, the gold answer and a completion, or `equal` or `differ`, the
//! gold answer and an answer, which is tried in a box.

use super::tests::score;

const TABLES: [(&str, &str); 7] = [
    ("sets", include_str!("kinds/sets.tsv")),
    ("withdrawn", include_str!("kinds/withdrawn.tsv")),
    ("names", include_str!("kinds/names.tsv")),
    ("prose", include_str!("kinds/prose.tsv")),
    ("numbers", include_str!("kinds/numbers.tsv")),
    ("notation", include_str!("kinds/notation.tsv")),
    ("languages", include_str!("kinds/languages.tsv")),
];

/// Lines of a table: the kind of case, the gold answer and the completion.
pub(super) fn lines() -> impl Iterator<Item = (&'static str, [&'static str; 3])> {
    TABLES.into_iter().flat_map(|(table, text)| {
        text.lines().filter(|line| !line.starts_with('#')).map(move |line| {
            let mut fields = line.split('\t');
            let mut field = || fields.next().unwrap_or_else(|| panic!("three fields: {line}"));
            (table, [field(), field(), field()])
        })
    })
}

#[test]
fn every_kind() {
    let mut failures = Vec::new();
    for (table, [kind, gold, text]) in lines() {
        let completion = match kind {
            "equal" | "differ" => format!(r"So it is \boxed{{{text}}}."),
            _ => text.replace('⏎', "\n"),
        };
        let is_right = score(gold, &completion, true) == 1.0;
        if is_right != matches!(kind, "equal" | "right") {
            failures.push(format!("{table}: {kind}: {gold}  |  {text}"));
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}
