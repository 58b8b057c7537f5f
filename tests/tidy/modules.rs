//! The rule of modules: those at the top of a crate use each other in one direction.
//!
//! A path that starts with `crate` or leaves its file's module by `super` is an edge. A name that the crate's root re-exports
//! counts as the module that defines it. Test code may use whatever it tests with.

use std::collections::{BTreeMap, BTreeSet};

use super::Violation;
use super::source::Source;

/// A module at the top of a crate and what it uses: each other module, with the places that do.
type Graph<'a> = BTreeMap<&'a str, BTreeMap<&'a str, Vec<Place<'a>>>>;

#[derive(Clone, Copy)]
struct Place<'a> {
    path: &'a str,
    /// From 1.
    line: usize,
}

pub fn check(tree: &[Source]) -> Vec<Violation> {
    let mut crates: BTreeMap<&str, Vec<&Source>> = BTreeMap::new();
    for source in tree.iter().filter(|it| it.is_rust()) {
        if let Some((name, _)) = source.path.split_once("/src/") {
            crates.entry(name).or_default().push(source);
        }
    }
    let checked = crates.iter().flat_map(|(name, sources)| check_crate(name, sources));
    checked.collect()
}

fn check_crate(name: &str, sources: &[&Source]) -> Vec<Violation> {
    let code: Vec<(&str, String)> =
        sources.iter().map(|it| (it.path.as_str(), without_tests(&it.code))).collect();
    let graph = graph_of(name, &code);
    let mut found = Vec::new();
    for ring in rings(&graph) {
        for from in &ring {
            for (to, places) in graph[from].iter().filter(|(to, _)| ring.contains(*to)) {
                let members: Vec<&str> = ring.iter().copied().collect();
                let rule = format!("`{from}` uses `{to}` in a ring of modules: {}", members.join(", "));
                let at = |place: &Place| Violation {
                    path: place.path.into(),
                    line: place.line,
                    rule: rule.clone(),
                };
                found.extend(places.iter().map(at));
            }
        }
    }
    found
}

/// The modules of a file from the crate's root down; `None` for a root, a program and a file of tests.
fn modules_of(path: &str) -> Option<Vec<&str>> {
    let (_, inner) = path.split_once("/src/")?;
    let mut parts: Vec<&str> = inner.strip_suffix(".rs")?.split('/').collect();
    if matches!(parts[..], ["lib"] | ["main"] | ["bin", ..]) || parts.contains(&"tests") {
        return None;
    }
    if parts.last() == Some(&"mod") {
        parts.pop();
    }
    Some(parts)
}

fn graph_of<'a>(name: &str, code: &'a [(&'a str, String)]) -> Graph<'a> {
    let mut graph: Graph = BTreeMap::new();
    for (path, _) in code {
        if let Some(modules) = modules_of(path) {
            graph.entry(modules[0]).or_default();
        }
    }
    let root = code.iter().find(|(path, _)| *path == format!("{name}/src/lib.rs"));
    let exported = root.map_or_else(BTreeMap::new, |(_, code)| exports_of(code));
    for (path, code) in code {
        let Some(modules) = modules_of(path) else { continue };
        for (line, used) in uses_of(code, modules.len()) {
            let used = if graph.contains_key(used) { Some(used) } else { exported.get(used).copied() };
            let Some(used) = used.filter(|used| graph.contains_key(used) && *used != modules[0]) else {
                continue;
            };
            let places = graph.entry(modules[0]).or_default().entry(used).or_default();
            places.push(Place { path, line });
        }
    }
    graph
}

/// The names that the crate's root re-exports, each with its module.
fn exports_of(root: &str) -> BTreeMap<&str, &str> {
    let mut exports = BTreeMap::new();
    for statement in root.split(';') {
        let Some((_, path)) = statement.split_once("use ").filter(|(before, _)| before.contains("pub"))
        else {
            continue;
        };
        let Some((module, names)) = path.trim().split_once("::") else { continue };
        for name in names.trim_matches(['{', '}', ' ', '\n']).split(',') {
            let name = name.rsplit(" as ").next().unwrap_or(name).trim();
            exports.insert(name, module);
        }
    }
    exports
}

/// Modules that a file uses from its crate's root on, each with its line. The file's module is `depth` below the root.
fn uses_of(code: &str, depth: usize) -> Vec<(usize, &str)> {
    let mut used = Vec::new();
    let mut line = 1;
    let mut before = ' ';
    for (at, it) in code.char_indices() {
        let starts_word = !is_word(before) && is_word(it);
        before = it;
        if it == '\n' {
            line += 1;
        }
        if let Some(tail) = starts_word.then(|| from_root(&code[at..], depth)).flatten() {
            used.extend(firsts(tail).into_iter().map(|name| (line, name)));
        }
    }
    used
}

/// Rest of a path behind `crate::`, or behind enough `super::` to reach the root.
fn from_root(code: &str, depth: usize) -> Option<&str> {
    if let Some(tail) = code.strip_prefix("crate::") {
        return Some(tail);
    }
    let mut tail = code;
    for _ in 0..depth {
        tail = tail.strip_prefix("super::")?;
    }
    (!tail.starts_with("super::") && depth > 0).then_some(tail)
}

/// The first names of a path or of a `{tree, of, paths}`.
fn firsts(code: &str) -> Vec<&str> {
    let Some(tree) = code.strip_prefix('{') else { return word(code).into_iter().collect() };
    let (mut nested, mut start, mut names) = (0, 0, Vec::new());
    for (at, it) in tree.char_indices() {
        match it {
            '{' => nested += 1,
            '}' if nested > 0 => nested -= 1,
            ',' | '}' if nested == 0 => {
                names.extend(word(tree[start..at].trim_start()));
                start = at + 1;
            }
            _ => {}
        }
        if it == '}' && nested == 0 && start == at + 1 {
            break;
        }
    }
    names
}

fn word(code: &str) -> Option<&str> {
    let end = code.find(|it| !is_word(it)).unwrap_or(code.len());
    (end > 0).then(|| &code[..end])
}

fn is_word(it: char) -> bool {
    it.is_alphanumeric() || it == '_'
}

/// The code with blanks for items behind `#[cfg(test)]`.
fn without_tests(code: &str) -> String {
    const MARK: &str = "#[cfg(test)]";
    let mut kept = String::with_capacity(code.len());
    let mut rest = code;
    while let Some(at) = rest.find(MARK) {
        let (before, item) = rest.split_at(at);
        kept.push_str(before);
        let end = item_len(item);
        kept.extend(item[..end].chars().map(|it| if it == '\n' { '\n' } else { ' ' }));
        rest = &item[end..];
    }
    kept + rest
}

/// To the end of the first block, or of the first statement without one.
fn item_len(item: &str) -> usize {
    let mut nested = 0;
    for (at, it) in item.char_indices() {
        match it {
            ';' if nested == 0 => return at + 1,
            '{' => nested += 1,
            '}' if nested == 1 => return at + 1,
            '}' => nested -= 1,
            _ => {}
        }
    }
    item.len()
}

/// Modules that reach each other, ring by ring.
fn rings<'a>(graph: &Graph<'a>) -> Vec<BTreeSet<&'a str>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        graph.keys().map(|&from| (from, reached_from(graph, from))).collect();
    let mut rings: Vec<BTreeSet<&str>> = Vec::new();
    for &module in graph.keys().filter(|&&it| reached[it].contains(it)) {
        if !rings.iter().any(|ring| ring.contains(module)) {
            let members = reached[module].iter().copied();
            rings.push(members.filter(|other| reached[other].contains(module)).collect());
        }
    }
    rings
}

fn reached_from<'a>(graph: &Graph<'a>, from: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open: Vec<&str> = graph[from].keys().copied().collect();
    while let Some(module) = open.pop() {
        if reached.insert(module) {
            open.extend(graph[module].keys());
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::super::expect_tree;

    const LIB: (&str, &str) = ("sandbox/src/lib.rs", "#![forbid(unsafe_code)]\npub use b::{B, Low as C};\n");

    #[test]
    fn modules_form_no_ring() {
        let ring: &[(usize, &str)] = &[(1, "`a` uses `b` in a ring of modules: a, b"), (2, "`b` uses `a`")];
        for (a, b) in [
            ("use crate::b::x;\n", "\nuse crate::a::y;\n"),
            ("use crate::{\n    b::{x, y},\n    c,\n};\n", "\nfn f() -> crate::a::A {}\n"),
            ("use super::b;\n", "\nuse crate::{c, a};\n"),
            // What the root re-exports is the module's.
            ("use crate::B;\n", "\nuse super::{a::y};\n"),
            ("use crate::C;\n", "\nuse crate::a;\n"),
        ] {
            let files = [LIB, ("sandbox/src/a.rs", a), ("sandbox/src/b.rs", b), ("sandbox/src/c.rs", "")];
            expect_tree(&files, ring);
        }
    }

    #[test]
    fn one_direction_is_no_ring() {
        for b in [
            "fn f() {}\n",
            "use super::c;\n",
            "// use crate::a;\nlet text = \"crate::a\";\n",
            "#[cfg(test)]\nmod tests {\n    use crate::a;\n    fn f() {}\n}\n",
            "#[cfg(test)]\nuse crate::a;\n",
            "use other_crate::a;\nuse self::a;\n",
        ] {
            let files = [LIB, ("sandbox/src/a/mod.rs", "use crate::b;\n"), ("sandbox/src/b.rs", b)];
            expect_tree(&files, &[]);
        }
    }

    #[test]
    fn files_of_a_module_are_the_module() {
        let a = ("sandbox/src/a/deep.rs", "use super::other;\nuse super::super::b;\n");
        let b = ("sandbox/src/b/mod.rs", "mod inner;\n");
        let inner = ("sandbox/src/b/inner.rs", "use super::x;\nuse crate::a;\n");
        let rules = [(2, "`a` uses `b`"), (2, "`b` uses `a`")];
        expect_tree(&[LIB, a, b, inner], &rules);
        let tests = ("sandbox/src/b/tests/inner.rs", "use crate::a;\n");
        expect_tree(&[LIB, a, b, tests], &[]);
    }
}
