//! The sections of a config, read from their source: fields, choices, types and doc comments.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use syn::{Attribute, Expr, Fields, Item, ItemStruct, Lit, Meta, Type};

/// Sections and choices by the names of their types.
pub type Sections = BTreeMap<String, Section>;

/// A type of the config: a section with fields, or a choice.
pub struct Section {
    pub doc: String,
    pub is_choice: bool,
    pub rows: Vec<Row>,
}

/// A field, or one of a choice.
#[derive(Clone)]
pub struct Row {
    pub name: String,
    /// Type as Rust writes it, without paths; empty for a choice without a value.
    pub kind: String,
    pub doc: String,
    /// True if the field may be absent.
    pub is_optional: bool,
    /// True if a choice is written without its name.
    pub is_untagged: bool,
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

/// Contents of the `serde` attributes of a field, a choice or a section.
#[derive(Default)]
struct Serde {
    rename: Option<String>,
    has_default: bool,
    is_untagged: bool,
}

fn serde_of(attrs: &[Attribute]) -> Serde {
    let mut found = Serde::default();
    for attr in attrs.iter().filter(|attr| attr.path().is_ident("serde")) {
        let _ = attr.parse_nested_meta(|meta| {
            found.has_default |= meta.path.is_ident("default");
            found.is_untagged |= meta.path.is_ident("untagged");
            if meta.path.is_ident("rename") {
                found.rename = Some(meta.value()?.parse::<syn::LitStr>()?.value());
            } else if meta.input.peek(syn::Token![=]) {
                meta.value()?.parse::<Expr>()?;
            }
            Ok(())
        });
    }
    found
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
    let all_have_defaults = serde_of(&item.attrs).has_default;
    let row = |field: &syn::Field| {
        let own = field.ident.as_ref().map(ToString::to_string);
        let serde = serde_of(&field.attrs);
        let (name, kind) = (serde.rename.or(own).expect("a named field"), kind_of(&field.ty));
        let doc = doc_of(&field.attrs);
        // A section that is read by hand has defaults in its doc comments alone.
        let is_told = doc.contains("Default ") || doc.contains("Default:");
        let is_optional = all_have_defaults || serde.has_default || is_told || kind.starts_with("Option<");
        Row { name, kind, doc, is_optional, is_untagged: false }
    };
    let Fields::Named(fields) = &item.fields else { return Vec::new() };
    fields.named.iter().map(row).collect()
}

fn choice(name: &str, kind: Option<String>, doc: String) -> Row {
    Row { name: name.to_owned(), kind: kind.unwrap_or_default(), doc, is_optional: false, is_untagged: false }
}

fn read_file(path: &Path, all: &mut Sections) {
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
                    let serde = serde_of(&variant.attrs);
                    let name = serde.rename.unwrap_or_else(|| snake_case(&variant.ident.to_string()));
                    Row { is_untagged: serde.is_untagged, ..choice(&name, kind, doc_of(&variant.attrs)) }
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
fn read_choices(text: &str, all: &mut Sections) {
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
            rows.push(choice(file, kind, doc));
        }
    }
    all.insert(name, Section { doc, is_choice: true, rows });
}

/// Returns the types that a field's type has in it.
pub fn parts(kind: &str) -> impl Iterator<Item = &str> {
    kind.split(|c: char| !c.is_alphanumeric()).filter(|part| !part.is_empty())
}

/// Reads the sections of all files.
pub fn read() -> Sections {
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
    read_file(&root.join("../../strategy/src/settings.rs"), &mut all);
    all
}
