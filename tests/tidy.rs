//! Checks the architecture's invariants by reading the source tree.

mod links;
mod manifests;
mod modules;
mod params;
mod prose;
mod rust;
mod source;
mod summary;
mod text;

use std::fmt;
use std::fs;
use std::path::Path;

use source::Source;

/// A line that breaks a rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Violation {
    path: String,
    /// Counted from 1.
    line: usize,
    rule: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.rule)
    }
}

#[test]
fn the_tree_is_tidy() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let tree = read_tree(root);
    assert!(tree.iter().any(|it| it.path == "tests/tidy.rs"), "{} is not the root", root.display());
    let found = violations(&tree);
    let list: Vec<String> = found.iter().map(Violation::to_string).collect();
    assert!(found.is_empty(), "{} violations:\n{}", found.len(), list.join("\n"));
}

fn violations(tree: &[Source]) -> Vec<Violation> {
    let mut found = Vec::new();
    for source in tree {
        let mut add = |line, rule: String| found.push(Violation { path: source.path.clone(), line, rule });
        text::check(source, &mut add);
        manifests::check(source, &mut add);
        if source.is_rust() {
            rust::check(source, &mut add);
            prose::check(source, &mut add);
            params::check(source, &mut add);
        }
        text::check_configs(source, tree, &mut add);
        links::check(source, tree, &mut add);
        summary::check(source, tree, &mut add);
    }
    found.extend(modules::check(tree));
    found.sort();
    found
}

/// Reads every text file that git does not ignore. The ignore file lists folders of the root, and patterns of
/// files that Python leaves.
fn read_tree(root: &Path) -> Vec<Source> {
    let ignored = fs::read_to_string(root.join(".gitignore")).unwrap();
    let ignored: Vec<&str> = ignored.lines().filter_map(|it| it.strip_prefix('/')).chain([".git"]).collect();
    let mut tree = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_string();
            if ignored.contains(&&*name) || path.ends_with("__pycache__") || path.is_symlink() {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else {
                // A picture has no text, and may be linked.
                tree.push(Source::new(&name, fs::read_to_string(&path).unwrap_or_default()));
            }
        }
    }
    tree
}

/// Asserts the lines of a file that break a rule, by words of the rule's name.
#[track_caller]
fn expect(path: &str, text: &str, rules: &[(usize, &str)]) {
    expect_tree(&[(path, text)], rules);
}

/// Like [`expect`], for a rule that reads several files.
#[track_caller]
fn expect_tree(files: &[(&str, &str)], rules: &[(usize, &str)]) {
    let tree: Vec<Source> = files.iter().map(|(path, text)| Source::new(path, text.to_string())).collect();
    let found = violations(&tree);
    let matches = found.len() == rules.len()
        && found.iter().zip(rules).all(|(it, (line, words))| it.line == *line && it.rule.contains(words));
    assert!(matches, "expected {rules:?}, found {found:#?}");
}
