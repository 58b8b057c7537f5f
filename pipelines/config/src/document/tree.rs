//! A config as a tree with the position of every key and value.
//!
//! `--set` changes this tree before it is read into types, and the semantic checks look up a field's position in it. An
//! error of any kind therefore points at the line, or names the `--set`, that caused it.

use std::fmt;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::error::Origin;
use super::problem::Problem;

/// A value and its position; for a mapping or a list, the position of its key.
#[derive(Clone, Debug)]
pub struct Node {
    /// The value.
    pub value: Value,
    /// Position of the value.
    pub origin: Origin,
}

#[derive(Clone, Debug)]
pub enum Value {
    Null,
    Bool(bool),
    Unsigned(u64),
    Negative(i64),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

#[derive(Clone, Debug)]
pub struct Entry {
    pub key: String,
    pub key_origin: Origin,
    pub node: Node,
}

impl Node {
    /// Parses a YAML document.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        let document: Spanned<Raw> =
            serde_saphyr::from_str_with_options(text, options()).map_err(|error| syntax_problem(&error))?;
        Ok(Self::from_raw(document, None, None))
    }

    /// Applies `argument`, the `a.b=c` of the `index`th `--set`. The value is YAML. Missing mappings on the path are
    /// created, since the file may leave out mappings with defaults.
    pub fn set(&mut self, index: usize, argument: &str) -> Result<(), Problem> {
        let origin = Origin::Set(index);
        let problem = |field: &str, message: String, help: &str| Problem {
            field: field.to_owned(),
            origin,
            message,
            help: help.to_owned(),
        };
        const HELP: &str = "write --set path.to.field=value, such as --set pipeline.rlvr.steps=10";
        let (path, value) = argument
            .split_once('=')
            .ok_or_else(|| problem(argument, "there is no `=` in it".to_owned(), HELP))?;
        let path = path.trim();
        if path.split('.').any(str::is_empty) {
            return Err(problem(path, "a name in the path is empty".to_owned(), HELP));
        }
        let document: Spanned<Raw> =
            serde_saphyr::from_str_with_options(value, options()).map_err(|error| {
                let Problem { message, help, .. } = syntax_problem(&error);
                problem(path, format!("the value is no YAML: {message}"), &help)
            })?;

        let mut node = self;
        for key in path.split('.') {
            node = node.entry(key, origin).map_err(|kind| {
                let message = format!("there is no `{key}` below {kind}");
                problem(path, message, "give a path that ends at this value, or replace it whole")
            })?;
        }
        *node = Self::from_raw(document, Some(origin), None);
        Ok(())
    }

    /// Returns the value at `path` (`a.b.c`); `None` if the path is not in the file.
    pub fn get_mut(&mut self, path: &str) -> Option<&mut Self> {
        path.split('.').try_fold(self, |node, key| {
            let Value::Map(entries) = &mut node.value else { return None };
            entries.iter_mut().find(|entry| entry.key == key).map(|entry| &mut entry.node)
        })
    }

    /// Adds the fields of `other` that this mapping does not have, recursively in mappings that both have. A field that
    /// both have keeps its value, unless `other` is of a later `--set`.
    pub fn fill_from(&mut self, other: Self) {
        match (&mut self.value, other.value) {
            (Value::Map(own), Value::Map(others)) => {
                for entry in others {
                    match own.iter_mut().find(|own| own.key == entry.key) {
                        Some(own) => own.node.fill_from(entry.node),
                        None => own.push(entry),
                    }
                }
            }
            (_, value) if other.origin.is_set_after(self.origin) => {
                *self = Self { value, origin: other.origin };
            }
            _ => {}
        }
    }

    /// Returns the position of the field `path` (`a.b.c`); for a field left to its default, the position of the nearest
    /// mapping around it.
    pub fn origin_of(&self, path: &str) -> Origin {
        let mut node = self;
        for key in path.split('.') {
            let (key, index) = match key.split_once('[') {
                Some((key, index)) => (key, index.trim_end_matches(']').parse::<usize>().ok()),
                None => (key, None),
            };
            let Value::Map(entries) = &node.value else { break };
            let Some(entry) = entries.iter().find(|entry| entry.key == key) else { break };
            node = &entry.node;
            if let (Some(index), Value::List(items)) = (index, &node.value) {
                let Some(item) = items.get(index) else { break };
                node = item;
            }
        }
        node.origin
    }

    /// Returns true for an empty value, such as a document of comments alone.
    pub fn is_nothing(&self) -> bool {
        matches!(self.value, Value::Null)
    }

    /// Returns the kind of this value, for an error message.
    pub fn kind(&self) -> String {
        match &self.value {
            Value::Null => "nothing".to_owned(),
            Value::Bool(value) => format!("`{value}`"),
            Value::Unsigned(value) => format!("the number {value}"),
            Value::Negative(value) => format!("the number {value}"),
            Value::Float(value) => format!("the number {value:?}"),
            Value::Text(text) => format!("the text `{text}`"),
            Value::List(_) => "a list".to_owned(),
            Value::Map(_) => "a mapping".to_owned(),
        }
    }

    /// Returns the value below `key`, which is created if absent. The error is the kind of a node that cannot have
    /// keys.
    fn entry(&mut self, key: &str, origin: Origin) -> Result<&mut Self, String> {
        let kind = self.kind();
        if matches!(self.value, Value::Null) {
            *self = Self { value: Value::Map(Vec::new()), origin };
        }
        let Value::Map(entries) = &mut self.value else { return Err(kind) };
        let position = entries.iter().position(|entry| entry.key == key).unwrap_or_else(|| {
            let node = Self { value: Value::Null, origin };
            entries.push(Entry { key: key.to_owned(), key_origin: origin, node });
            entries.len() - 1
        });
        Ok(&mut entries[position].node)
    }

    /// Converts a parsed value. `set` is the origin of everything in a `--set`; otherwise positions are the document's
    /// own.
    fn from_raw(raw: Spanned<Raw>, set: Option<Origin>, key_origin: Option<Origin>) -> Self {
        let own = set.unwrap_or_else(|| origin(&raw));
        let container = key_origin.unwrap_or(own);
        match raw.value {
            Raw::Scalar(value) => Self { value, origin: own },
            Raw::List(items) => {
                let items = items.into_iter().map(|item| Self::from_raw(item, set, None)).collect();
                Self { value: Value::List(items), origin: container }
            }
            Raw::Map(entries) => {
                let entries = entries.into_iter().map(|(key, value)| {
                    let key_origin = set.unwrap_or_else(|| origin(&key));
                    let node = Self::from_raw(value, set, Some(key_origin));
                    Entry { key: key.value, key_origin, node }
                });
                Self { value: Value::Map(entries.collect()), origin: container }
            }
        }
    }
}

/// A value of any type as the YAML parser returns it.
enum Raw {
    Scalar(Value),
    List(Vec<Spanned<Raw>>),
    Map(Vec<(Spanned<String>, Spanned<Raw>)>),
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct RawVisitor;

        impl<'de> Visitor<'de> for RawVisitor {
            type Value = Raw;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_unit<E: de::Error>(self) -> Result<Raw, E> {
                Ok(Raw::Scalar(Value::Null))
            }

            fn visit_bool<E: de::Error>(self, value: bool) -> Result<Raw, E> {
                Ok(Raw::Scalar(Value::Bool(value)))
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Raw, E> {
                Ok(Raw::Scalar(Value::Unsigned(value)))
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Raw, E> {
                Ok(Raw::Scalar(u64::try_from(value).map_or(Value::Negative(value), Value::Unsigned)))
            }

            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Raw, E> {
                Ok(Raw::Scalar(Value::Float(value)))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Raw, E> {
                Ok(Raw::Scalar(Value::Text(text.to_owned())))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Raw, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(items)).map(Raw::List)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Raw, A::Error> {
                let mut map = Vec::new();
                while let Some(entry) = entries.next_entry()? {
                    map.push(entry);
                }
                Ok(Raw::Map(map))
            }
        }

        deserializer.deserialize_any(RawVisitor)
    }
}

fn options() -> serde_saphyr::Options {
    // Only `true` and `false` are booleans: most people do not expect `no` and `off` to be. NaN and infinity are left
    // to the field, so that the error names the field.
    serde_saphyr::options! {
        with_snippet: false,
        strict_booleans: true,
        non_finite_float_policy: serde_saphyr::NonFiniteFloatPolicy::PassThrough,
    }
}

/// Returns the position of an anchored value's text, not of an alias that repeats it: the text is the one to change.
fn origin<T>(spanned: &Spanned<T>) -> Origin {
    location(Some(spanned.defined))
}

fn location(location: Option<serde_saphyr::Location>) -> Origin {
    let (line, column) = location.map_or((1, 1), |at| (at.line().max(1), at.column().max(1)));
    Origin::File { line: line as usize, column: column as usize }
}

fn syntax_problem(error: &serde_saphyr::Error) -> Problem {
    use serde_saphyr::Error as Yaml;

    let (message, help) = match error.without_snippet() {
        Yaml::DuplicateMappingKey { key: Some(key), .. } => {
            (format!("`{key}` is given twice"), format!("keep one `{key}`"))
        }
        Yaml::MultipleDocuments { .. } => {
            ("the file holds more than one document".to_owned(), "remove what follows `---`".to_owned())
        }
        other => {
            let text = other.to_string();
            // The position is already shown before the message.
            let message = text.split(" at line ").next().unwrap_or(&text).to_owned();
            (
                message,
                "mend the YAML here; indent with spaces, and quote text with `: ` or `#` in it".to_owned(),
            )
        }
    };
    Problem { field: String::new(), origin: location(error.location()), message, help }
}
