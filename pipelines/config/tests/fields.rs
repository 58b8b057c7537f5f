//! `docs/reference/fields.md`, the page of all fields, from the doc comments of the sections.
//!
//! `ANYROLL_WRITE_DOCS=1 cargo test --release -p anyroll-config --test fields` writes it.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::Path;

use syn::{Attribute, Expr, Fields, Item, ItemStruct, Lit, Meta, Type};

const HEAD: &str = "\
# Fields

Every field of a config, by its section. A section's title is the name of its type in the code; the fields that have it as
their value link to it. A field without a default must be given. `anyroll check CONFIG` prints a config with all defaults
filled in.

This page is generated from the doc comments in `pipelines/config/src/fields` and `pipelines/algorithm/src`.
";

/// A type of the config: a section with fields, or a choice.
struct Section {
    doc: String,
    is_choice: bool,
    rows: Vec<Row>,
}

#[derive(Clone)]
struct Row {
    name: String,
    /// Type as Rust writes it, without paths; empty for a choice without a value.
    kind: String,
    doc: String,
}

/// Returns the text of doc comments, with paragraphs joined by spaces and code blocks left out.
fn doc_of(attrs: &[Attribute]) -> String {
    let lines = attrs.iter().filter_map(|attr| match &attr.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
            Expr::Lit(lit) => match &lit.lit {
                Lit::Str(text) => Some(text.value().trim().to_owned()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    });
    joined(lines)
}

fn joined(lines: impl Iterator<Item = String>) -> String {
    let mut is_code = false;
    let kept = lines.filter(|line| {
        let is_fence = line.starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence && !line.is_empty()
    });
    let text = kept.collect::<Vec<_>>().join(" ");
    // Links of rustdoc are plain code on the page.
    let text = text.replace("[`", "`").replace("`]", "`");
    text.replace('|', "\\|")
}

/// Returns the value of `rename` in a field's `serde` attribute.
fn renamed(attrs: &[Attribute]) -> Option<String> {
    let mut name = None;
    for attr in attrs.iter().filter(|attr| attr.path().is_ident("serde")) {
        let _ = attr.parse_nested_meta(|meta| {
            if meta.path.is_ident("rename") {
                name = Some(meta.value()?.parse::<syn::LitStr>()?.value());
            } else if meta.input.peek(syn::Token![=]) {
                meta.value()?.parse::<Expr>()?;
            }
            Ok(())
        });
    }
    name
}

/// Returns the type without paths, references and boxes.
fn kind_of(kind: &Type) -> String {
    let Type::Path(path) = kind else { return "tuple".to_owned() };
    let last = path.path.segments.last().expect("a path has a segment");
    let inner: Vec<String> = match &last.arguments {
        syn::PathArguments::AngleBracketed(all) => all
            .args
            .iter()
            .filter_map(|arg| match arg {
                syn::GenericArgument::Type(kind) => Some(kind_of(kind)),
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    };
    match (last.ident.to_string().as_str(), &inner[..]) {
        ("Box", [inner]) => inner.clone(),
        (name, []) => name.to_owned(),
        (name, inner) => format!("{name}<{}>", inner.join(", ")),
    }
}

fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for (index, c) in name.chars().enumerate() {
        if c.is_uppercase() && index > 0 {
            snake.push('_');
        }
        snake.extend(c.to_lowercase());
    }
    snake
}

fn rows_of(item: &ItemStruct) -> Vec<Row> {
    let row = |field: &syn::Field| {
        let own = field.ident.as_ref().map(ToString::to_string);
        let name = renamed(&field.attrs).or(own).expect("a named field");
        Row { name, kind: kind_of(&field.ty), doc: doc_of(&field.attrs) }
    };
    let Fields::Named(fields) = &item.fields else { return Vec::new() };
    fields.named.iter().map(row).collect()
}

fn read_file(path: &Path, all: &mut BTreeMap<String, Section>) {
    let text = fs::read_to_string(path).unwrap();
    for item in syn::parse_file(&text).unwrap().items {
        match item {
            Item::Struct(item) if matches!(item.fields, Fields::Named(_)) => {
                let rows = rows_of(&item);
                let doc = doc_of(&item.attrs);
                all.insert(item.ident.to_string(), Section { doc, is_choice: false, rows });
            }
            // A section of a service, in front of which the fields that all services have are read.
            Item::Macro(item) if item.mac.path.is_ident("service") => {
                let item: ItemStruct = item.mac.parse_body().unwrap();
                let of_all = &all["EndpointConfig"].rows;
                let own = rows_of(&item);
                let is_own = |row: &Row| own.iter().any(|it| it.name == row.name);
                let others: Vec<Row> = of_all.iter().filter(|row| !is_own(row)).cloned().collect();
                let (doc, rows) = (doc_of(&item.attrs), own.into_iter().chain(others).collect());
                all.insert(item.ident.to_string(), Section { doc, is_choice: false, rows });
            }
            Item::Enum(item) => {
                let row = |variant: &syn::Variant| {
                    let kind = variant.fields.iter().next().map(|field| kind_of(&field.ty));
                    let name =
                        renamed(&variant.attrs).unwrap_or_else(|| snake_case(&variant.ident.to_string()));
                    Row { name, kind: kind.unwrap_or_default(), doc: doc_of(&variant.attrs) }
                };
                let rows = item.variants.iter().map(row).collect();
                let doc = doc_of(&item.attrs);
                all.insert(item.ident.to_string(), Section { doc, is_choice: true, rows });
            }
            _ => {}
        }
    }
    read_choices(&text, all);
}

/// Reads `choices! { ... enum Name: dyn Formula { file => Variant(Section), ... } }`, which is no Rust.
fn read_choices(text: &str, all: &mut BTreeMap<String, Section>) {
    let Some((_, list)) = text.split_once("\nchoices! {\n") else { return };
    let (mut docs, mut name, mut doc, mut rows) = (Vec::new(), String::new(), String::new(), Vec::new());
    for line in list.lines().map(str::trim).take_while(|line| *line != "}") {
        if let Some(text) = line.strip_prefix("///") {
            docs.push(text.trim().to_owned());
        } else if let Some(rest) = line.strip_prefix("enum ") {
            name = rest.split(':').next().unwrap_or_default().to_owned();
            doc = joined(docs.drain(..));
        } else if let Some((file, variant)) = line.split_once(" => ") {
            let kind = variant.split_once('(').map(|(_, kind)| kind.trim_end_matches([')', ',']).to_owned());
            let doc = joined(docs.drain(..));
            rows.push(Row { name: file.to_owned(), kind: kind.unwrap_or_default(), doc });
        }
    }
    all.insert(name, Section { doc, is_choice: true, rows });
}

/// Returns the type in words, with links to sections; nothing for a choice without a value.
fn in_words(kind: &str, all: &BTreeMap<String, Section>) -> String {
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
        "u8" | "u32" | "u64" | "usize" | "i64" => "whole number".into(),
        "f64" => "number".into(),
        "bool" => "true or false".into(),
        "String" | "SocketAddr" => "text".into(),
        "PathBuf" => "path".into(),
        "tuple" => "list".into(),
        name if all.contains_key(name) => format!("[{name}](#{})", name.to_lowercase()),
        name => format!("`{name}`"),
    }
}

/// Types that a field's type has in it.
fn parts(kind: &str) -> impl Iterator<Item = &str> {
    kind.split(|c: char| !c.is_alphanumeric()).filter(|part| !part.is_empty())
}

fn page() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = BTreeMap::new();
    for folder in ["src/fields", "../algorithm/src", "../algorithm/src/advantages", "../algorithm/src/losses"]
    {
        let mut paths: Vec<_> =
            fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.iter().filter(|path| path.extension().is_some_and(|it| it == "rs")).for_each(|path| {
            read_file(path, &mut all);
        });
    }
    let (mut page, mut seen, mut next) = (HEAD.to_owned(), BTreeSet::new(), VecDeque::from(["Config"]));
    while let Some(name) = next.pop_front() {
        let Some(section) = all.get(name).filter(|_| seen.insert(name)) else { continue };
        let first = if section.is_choice { "choice" } else { "field" };
        page += &format!("\n## {name}\n\n{}\n\n| {first} | value | meaning |\n|---|---|---|\n", section.doc);
        for Row { name, kind, doc } in &section.rows {
            page += &format!("| `{name}` | {} | {doc} |\n", in_words(kind, &all));
            next.extend(parts(kind));
        }
    }
    page
}

#[test]
fn the_page_of_fields_is_what_the_sections_say() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/fields.md");
    let page = page();
    for name in ["learning_rate", "group_size", "grpo", "clip_high", "zero_stage", "max_error_rate"] {
        assert!(page.contains(&format!("| `{name}` |")), "`{name}` is not on the page");
    }
    let undocumented: Vec<&str> =
        page.lines().filter(|line| line.starts_with("| `") && line.ends_with("|  |")).collect();
    assert!(undocumented.is_empty(), "fields without a sentence: {undocumented:#?}");
    if std::env::var_os("ANYROLL_WRITE_DOCS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(written == page, "docs/reference/fields.md is stale: run this test with ANYROLL_WRITE_DOCS=1");
}
