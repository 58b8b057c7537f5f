//! `docs/reference/fields.md`, the page of all fields, and `docs/reference/config.schema.json`, from the doc comments of
//! the sections.
//!
//! `ANYROLL_WRITE_DOCS=1 cargo test --release -p anyroll-config --test fields` writes both.

#![forbid(unsafe_code)]

mod configs;
mod schema;
mod sections;

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::path::Path;

use sections::{Row, Sections, parts};

const HEAD: &str = "\
# Fields

Every field of a config, by its section. A section's title is the name of its type in the code; the fields that have it as
their value link to it. A field without a default must be given. `anyroll check CONFIG` prints a config with all defaults
filled in.

This page is generated from the doc comments in `pipelines/config/src/fields` and `pipelines/algorithm/src`.
";

/// Returns the type in words, with links to sections; nothing for a choice without a value.
fn in_words(kind: &str, all: &Sections) -> String {
    let inner = |prefix: &str| kind.strip_prefix(prefix).and_then(|rest| rest.strip_suffix('>'));
    if let Some(kind) = inner("Option<") {
        return in_words(kind, all);
    }
    if let Some(kind) = inner("Vec<") {
        return format!("list of {}", in_words(kind, all));
    }
    if let Some(kind) = inner("Steps<") {
        return format!("whole number, or {}", in_words(kind, all));
    }
    if let Some(kinds) = inner("BTreeMap<").or(inner("IndexMap<")) {
        return format!("map to {}", in_words(kinds.split(", ").last().unwrap_or_default(), all));
    }
    match kind {
        "" => String::new(),
        "u8" | "u16" | "u32" | "u64" | "usize" | "i64" => "whole number".into(),
        "f64" => "number".into(),
        "bool" => "true or false".into(),
        "String" | "SocketAddr" => "text".into(),
        "PathBuf" => "path".into(),
        "tuple" => "list".into(),
        name if all.contains_key(name) => format!("[{name}](#{})", name.to_lowercase()),
        name => format!("`{name}`"),
    }
}

fn page(all: &Sections) -> String {
    let (mut page, mut seen, mut next) = (HEAD.to_owned(), BTreeSet::new(), VecDeque::from(["Config"]));
    while let Some(name) = next.pop_front() {
        let Some(section) = all.get(name).filter(|_| seen.insert(name)) else { continue };
        let first = if section.is_choice { "choice" } else { "field" };
        page += &format!("\n## {name}\n\n{}\n\n| {first} | value | meaning |\n|---|---|---|\n", section.doc);
        for Row { name, kind, doc, .. } in &section.rows {
            page += &format!("| `{name}` | {} | {doc} |\n", in_words(kind, all));
            next.extend(parts(kind));
        }
    }
    page
}

/// Compares a file of `docs/reference` with the text it should have, or writes it.
#[track_caller]
fn assert_current(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference").join(name);
    if std::env::var_os("ANYROLL_WRITE_DOCS").is_some() {
        fs::write(&path, text).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(written == text, "docs/reference/{name} is stale: run this test with ANYROLL_WRITE_DOCS=1");
}

#[test]
fn the_page_of_fields_is_what_the_sections_say() {
    let page = page(&sections::read());
    for name in ["learning_rate", "group_size", "grpo", "clip_high", "zero_stage", "max_error_rate"] {
        assert!(page.contains(&format!("| `{name}` |")), "`{name}` is not on the page");
    }
    let undocumented: Vec<&str> =
        page.lines().filter(|line| line.starts_with("| `") && line.ends_with("|  |")).collect();
    assert!(undocumented.is_empty(), "fields without a sentence: {undocumented:#?}");
    assert_current("fields.md", &page);
}

#[test]
fn the_schema_is_what_the_sections_say() {
    let schema = schema::schema(&sections::read());
    assert_current("config.schema.json", &(serde_json::to_string_pretty(&schema).unwrap() + "\n"));
}
