//! Rules for pages: their links, and the pages that code, configs and messages name.

use super::source::Source;

/// Every link of a page leads to a file of the tree, and to a heading of it if it names one.
pub fn check(source: &Source, tree: &[Source], add: &mut dyn FnMut(usize, String)) {
    if source.path.ends_with(".md") {
        check_links(source, tree, add);
    }
    // The tests of these rules name pages that do not exist.
    if !source.path.starts_with("tests/tidy") {
        check_names(source, tree, add);
    }
}

fn check_links(source: &Source, tree: &[Source], add: &mut dyn FnMut(usize, String)) {
    for (index, line) in prose(&source.text) {
        for target in targets(&line) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, heading) = target.split_once('#').unwrap_or((target, ""));
            let path = if path.is_empty() { source.path.clone() } else { resolve(&source.path, path) };
            let Some(page) = tree.iter().find(|it| it.path == path) else {
                if !tree.iter().any(|it| it.path.starts_with(&format!("{path}/"))) {
                    add(index, format!("a link leads to a file: {target}"));
                }
                continue;
            };
            if !heading.is_empty() && !headings(&page.text).any(|it| it == heading) {
                add(index, format!("a link leads to a heading: {target}"));
            }
        }
    }
}

/// `docs/....md` in any file names a page.
fn check_names(source: &Source, tree: &[Source], add: &mut dyn FnMut(usize, String)) {
    for (index, line) in source.text.lines().enumerate() {
        for (at, _) in line.match_indices("docs/") {
            let is_part = line[..at].ends_with(|it: char| it.is_alphanumeric() || "./_-".contains(it));
            let end = line[at..].find(|it: char| !(it.is_ascii_alphanumeric() || "./_".contains(it)));
            let name = &line[at..end.map_or(line.len(), |end| at + end)];
            let Some(page) = name.find(".md").map(|end| &name[..end + 3]) else { continue };
            if !is_part && !tree.iter().any(|it| it.path == page) {
                add(index + 1, format!("a page that is named exists: {page}"));
            }
        }
    }
}

/// Lines outside of fenced code, numbered from 1, without their code spans.
fn prose(text: &str) -> impl Iterator<Item = (usize, String)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let is_fence = line.trim_start().starts_with("```");
        fenced ^= is_fence;
        let without_code = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        (!fenced && !is_fence).then_some((index + 1, without_code))
    })
}

/// The targets of inline links.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|it| it.0)
}

/// A path relative to the folder of `page`, from the root of the tree.
fn resolve(page: &str, path: &str) -> String {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

/// The anchors of a page's headings: lower case, hyphens for blanks, without punctuation.
fn headings(text: &str) -> impl Iterator<Item = String> {
    let mut fenced = false;
    text.lines().filter_map(move |line| {
        fenced ^= line.trim_start().starts_with("```");
        let is_heading = !fenced && line.starts_with('#');
        is_heading.then(|| anchor(line.trim_start_matches('#').trim()))
    })
}

fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase();
    let kept = kept.chars().filter(|it| it.is_alphanumeric() || " -_".contains(*it));
    kept.map(|it| if it == ' ' { '-' } else { it }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{expect, expect_tree};

    #[test]
    fn links_lead_somewhere() {
        let page = ("docs/a.md", "# A page\n\n## `zero_stage: auto`\n");
        let check = |text: &str, rules: &[(usize, &str)]| expect_tree(&[("docs/b/c.md", text), page], rules);
        check("[a](../a.md) and [b](c.md), [docs](..)\n", &[]);
        check("one\n[a](a.md) [b](../../docs/a.md)\n", &[(2, "leads to a file: a.md")]);
        check("[a](../a.md#zero_stage-auto)\n[a](../a.md#b)\n", &[(2, "leads to a heading: ../a.md#b")]);
        check("# One\n[here](#one) [there](#two)\n", &[(2, "leads to a heading: #two")]);
        check("[web](https://a.b/c) `[no](link)`\n```\n[no](link)\n```\n", &[]);
        check("![a picture](x.png)\n", &[(1, "leads to a file: x.png")]);
    }

    #[test]
    fn pages_that_are_named_exist() {
        let named: &[(usize, &str)] = &[(1, "a page that is named exists: docs/no.md")];
        expect("models/src/a.rs", "// See docs/no.md.\n", named);
        expect("configs/README.md", "a `docs/no.md`\n", named);
        expect_tree(&[("models/src/a.rs", "// docs/a.md.\n"), ("docs/a.md", "")], &[]);
        expect("models/src/a.rs", "// x-docs/no.md, docs/curves.py\n", &[]);
    }
}
