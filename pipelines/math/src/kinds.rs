//! Tables of cases by kind. A line has `right` or `wrong`, the gold answer and a completion, or `equal` or `differ`, the
//! gold answer and an answer, which is tried in a box.

use super::{Options, answer, gold_answer, is_equal};

const TABLES: [(&str, &str); 10] = [
    ("sets", include_str!("kinds/sets.tsv")),
    ("withdrawn", include_str!("kinds/withdrawn.tsv")),
    ("names", include_str!("kinds/names.tsv")),
    ("prose", include_str!("kinds/prose.tsv")),
    ("numbers", include_str!("kinds/numbers.tsv")),
    ("notation", include_str!("kinds/notation.tsv")),
    ("languages", include_str!("kinds/languages.tsv")),
    ("forms", include_str!("kinds/forms.tsv")),
    ("everyday", include_str!("kinds/everyday.tsv")),
    ("near_misses", include_str!("kinds/near_misses.tsv")),
];

/// A line of a table.
struct Case {
    kind: &'static str,
    gold: &'static str,
    text: &'static str,
}

impl Case {
    fn of(line: &'static str) -> Self {
        let mut fields = line.split('\t');
        let mut field = || fields.next().unwrap_or_else(|| panic!("three fields: {line}"));
        Self { kind: field(), gold: field(), text: field() }
    }

    /// Returns true if it is scored as its table says. `-cut` marks a truncated completion.
    fn holds(&self, options: Options) -> bool {
        let completion = match self.kind {
            "equal" | "differ" => format!(r"So it is \boxed{{{}}}.", self.text),
            _ => self.text.replace('⏎', "\n"),
        };
        let gold = gold_answer(self.gold);
        let found = answer(&completion, self.kind.ends_with("-cut"));
        let is_right = found.is_some_and(|predicted| is_equal(&gold, &predicted, options));
        is_right == matches!(self.kind, "equal" | "right" | "right-cut")
    }
}

fn cases(table: &'static str) -> impl Iterator<Item = Case> {
    table.lines().filter(|line| !line.starts_with('#')).map(Case::of)
}

fn check(tables: &[(&str, &'static str)], options: Options) {
    let mut failures = Vec::new();
    for (name, table) in tables {
        let failed = cases(table).filter(|case| !case.holds(options));
        failures.extend(failed.map(|case| format!("{name}: {}: {}  |  {}", case.kind, case.gold, case.text)));
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_kind() {
    check(&TABLES, Options::default());
}

#[test]
fn a_decimal_comma_is_a_policy() {
    let table = [("decimal_comma", include_str!("kinds/decimal_comma.tsv"))];
    check(&table, Options { decimal_comma: true, ..Options::default() });
}

#[test]
fn every_gold_answer_of_a_kind_equals_itself() {
    for case in TABLES.iter().flat_map(|(_, table)| cases(table)) {
        let gold = gold_answer(case.gold);
        assert!(is_equal(&gold, &gold, Options::default()), "{}", case.gold);
    }
}
