//! Rules for the two lists of pages: the book's contents, and the index of `docs`.

use super::source::Source;

const SUMMARY: &str = "docs/SUMMARY.md";
const INDEX: &str = "docs/README.md";

/// Every page of `docs` stands once in the book's contents. The index links to it once, and to parts of it as often
/// as it serves.
pub fn check(source: &Source, tree: &[Source], add: &mut dyn FnMut(usize, String)) {
    if !source.path.starts_with("docs/") || !source.path.ends_with(".md") || source.path == SUMMARY {
        return;
    }
    let Some(summary) = tree.iter().find(|it| it.path == SUMMARY) else { return };
    let times = count(summary, &source.path);
    if times != 1 {
        add(1, format!("{SUMMARY} lists every page once, this one {times} times"));
    }
    let Some(index) = tree.iter().find(|it| it.path == INDEX && source.path != INDEX) else { return };
    let times = count(index, &source.path);
    if times != 1 {
        add(1, format!("{INDEX} links to every page once, to this one {times} times"));
    }
}

/// Number of links of a list to a whole page.
fn count(list: &Source, page: &str) -> usize {
    let target = format!("]({})", page.trim_start_matches("docs/"));
    list.text.matches(&target).count()
}

#[cfg(test)]
mod tests {
    use super::super::expect_tree;

    #[test]
    fn pages_are_listed_once() {
        let page = ("docs/a/b.md", "# B\n");
        let check = |summary: &str, index: &str, rules: &[(usize, &str)]| {
            expect_tree(&[page, ("docs/SUMMARY.md", summary), ("docs/README.md", index)], rules);
        };
        let lists = |index: &str| format!("[index](README.md)\n- [b](a/b.md)\n{index}");
        check(&lists(""), "[b](a/b.md) [part](a/b.md#b)\n", &[]);
        check("[index](README.md)\n", "[b](a/b.md)\n", &[(1, "lists every page once, this one 0 times")]);
        check(&lists("- [b](a/b.md)\n"), "[b](a/b.md)\n", &[(1, "this one 2 times")]);
        check(&lists(""), "[part](a/b.md#b)\n", &[(1, "links to every page once, to this one 0 times")]);
        check("- [b](a/b.md)\n", "[b](a/b.md)\n", &[(1, "this one 0 times")]);
    }
}
