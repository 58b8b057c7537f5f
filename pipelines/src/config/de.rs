//! Reads types from the [`Node`] tree, for serde, and keeps the path to every value: an error names its
//! field and its position whatever its cause.

use std::fmt;

use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Expected, IntoDeserializer, MapAccess,
    SeqAccess, Unexpected, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;

use super::error::{Origin, Problem, list, suggestion};
use super::tree::{Entry, Node, Value};

/// The tree as a `T`.
pub(crate) fn from_node<T: DeserializeOwned>(root: &Node) -> Result<T, Problem> {
    let at = At { node: root, path: String::new() };
    T::deserialize(&at).map_err(|error| at.locate(error).into_problem())
}

/// A node and the path that leads to it.
struct At<'a> {
    node: &'a Node,
    path: String,
}

/// An error on its way up: the innermost node that it passes gives it its field and its position.
#[derive(Debug)]
struct Error {
    place: Option<(String, Origin)>,
    /// A field that is missing below the node that the error passes first.
    missing: Option<&'static str>,
    message: String,
    help: String,
}

impl At<'_> {
    fn locate(&self, mut error: Error) -> Error {
        if error.place.is_none() {
            let path = match error.missing {
                Some(field) => join(&self.path, field),
                None => self.path.clone(),
            };
            error.place = Some((path, self.node.origin));
        }
        error
    }

    fn unexpected(&self, expected: &dyn Expected) -> Error {
        let expected = plain(&expected.to_string());
        self.locate(Error::new(
            format!("expected {expected}, found {}", self.node.kind()),
            format!("write {expected}"),
        ))
    }

    /// The last of several variants is to blame: a `--set` comes after what the file says.
    fn ambiguous(&self, variants: &[&str], entries: &[Entry]) -> Error {
        let keys: Vec<&str> = entries.iter().map(|entry| entry.key.as_str()).collect();
        let message = format!("expected one of {}, found {}", list(variants), list(&keys));
        let (last, origin) = (keys[keys.len() - 1], entries[keys.len() - 1].key_origin);
        let help = match origin {
            Origin::File { .. } => "keep one of them".to_owned(),
            Origin::Set(_) => format!("replace the whole value: --set '{}={{{last}: ...}}'", self.path),
        };
        Error::new(message, help).at(self.path.clone(), origin)
    }

    fn child<'a>(&self, entry: &'a Entry) -> At<'a> {
        At { node: &entry.node, path: join(&self.path, &entry.key) }
    }
}

impl Error {
    fn new(message: String, help: String) -> Self {
        Self { place: None, missing: None, message, help }
    }

    fn at(mut self, path: String, origin: Origin) -> Self {
        self.place.get_or_insert((path, origin));
        self
    }

    fn into_problem(self) -> Problem {
        let (field, origin) = self.place.unwrap_or((String::new(), Origin::File { line: 1, column: 1 }));
        Problem { field, origin, message: self.message, help: self.help }
    }
}

impl std::error::Error for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl de::Error for Error {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(message.to_string(), "change this value".to_owned())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_value(found, expected)
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let expected = plain(&expected.to_string());
        let found = match found {
            Unexpected::Bool(value) => format!("`{value}`"),
            Unexpected::Unsigned(value) => format!("the number {value}"),
            Unexpected::Signed(value) => format!("the number {value}"),
            Unexpected::Float(value) => format!("the number {value:?}"),
            Unexpected::Str(text) => format!("the text `{text}`"),
            Unexpected::Unit | Unexpected::Option => "nothing".to_owned(),
            Unexpected::Seq => "a list".to_owned(),
            Unexpected::Map => "a mapping".to_owned(),
            other => other.to_string(),
        };
        Self::new(format!("expected {expected}, found {found}"), format!("write {expected}"))
    }

    fn invalid_length(length: usize, expected: &dyn Expected) -> Self {
        let expected = match expected.to_string().strip_prefix("an array of length ") {
            Some(wanted) => format!("a list of {wanted} values"),
            None => expected.to_string(),
        };
        Self::new(format!("expected {expected}, found {length}"), format!("write {expected}"))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self::new(format!("there is no `{variant}` here"), suggestion(variant, expected))
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        Self::new("there is no such field".to_owned(), suggestion(field, expected))
    }

    fn missing_field(field: &'static str) -> Self {
        let mut error =
            Self::new("it is missing".to_owned(), format!("add `{field}:` here; it has no default"));
        error.missing = Some(field);
        error
    }
}

impl<'de> Deserializer<'de> for &At<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match &self.node.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Unsigned(value) => visitor.visit_u64(*value),
            Value::Negative(value) => visitor.visit_i64(*value),
            Value::Float(value) => visitor.visit_f64(*value),
            Value::Text(text) => visitor.visit_str(text),
            Value::List(_) => return self.deserialize_seq(visitor),
            Value::Map(_) => return self.deserialize_map(visitor),
        }
        .map_err(|error| self.locate(error))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.node.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
        .map_err(|error| self.locate(error))
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let Value::List(items) = &self.node.value else { return Err(self.unexpected(&visitor)) };
        let mut access = Items { at: self, rest: items.iter(), length: items.len() };
        let value = visitor.visit_seq(&mut access).map_err(|error| self.locate(error))?;
        if access.rest.len() > 0 {
            let wanted = items.len() - access.rest.len();
            let expected = format!("a list of {wanted} values");
            return Err(de::Error::invalid_length(items.len(), &expected.as_str()))
                .map_err(|e| self.locate(e));
        }
        Ok(value)
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _length: usize, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_seq(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let Value::Map(entries) = &self.node.value else { return Err(self.unexpected(&visitor)) };
        let access = Fields { at: self, rest: entries.iter(), current: None };
        visitor.visit_map(access).map_err(|error| self.locate(error))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.node.value {
            Value::Map(_) => self.deserialize_map(visitor),
            _ => Err(self.unexpected(&"a mapping with fields")),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let (variant, content) = match &self.node.value {
            Value::Text(variant) => (variant.as_str(), None),
            Value::Map(entries) if entries.len() == 1 => (entries[0].key.as_str(), Some(&entries[0])),
            Value::Map(entries) if entries.len() > 1 => return Err(self.ambiguous(variants, entries)),
            _ => return Err(self.unexpected(&format!("one of {}", list(variants)).as_str())),
        };
        visitor.visit_enum(Variant { at: self, variant, content }).map_err(|error| self.locate(error))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct tuple_struct identifier ignored_any
    }
}

struct Items<'a> {
    at: &'a At<'a>,
    rest: std::slice::Iter<'a, Node>,
    length: usize,
}

impl<'de> SeqAccess<'de> for &mut Items<'_> {
    type Error = Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Error> {
        let index = self.length - self.rest.len();
        let Some(node) = self.rest.next() else { return Ok(None) };
        let at = At { node, path: format!("{}[{index}]", self.at.path) };
        seed.deserialize(&at).map(Some)
    }
}

struct Fields<'a> {
    at: &'a At<'a>,
    rest: std::slice::Iter<'a, Entry>,
    current: Option<&'a Entry>,
}

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Error> {
        self.current = self.rest.next();
        let Some(entry) = self.current else { return Ok(None) };
        seed.deserialize(entry.key.as_str().into_deserializer())
            .map(Some)
            .map_err(|error: Error| error.at(join(&self.at.path, &entry.key), entry.key_origin))
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Error> {
        let entry = self.current.expect("serde asks for a value after its key");
        let child = self.at.child(entry);
        // What a type says of its fields as a whole has no place yet.
        seed.deserialize(&child).map_err(|error| child.locate(error))
    }
}

/// An enum's variant: a word, or the only key of a mapping with the variant's fields below.
struct Variant<'a> {
    at: &'a At<'a>,
    variant: &'a str,
    content: Option<&'a Entry>,
}

impl<'de, 'a> EnumAccess<'de> for Variant<'a> {
    type Error = Error;
    type Variant = Self;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self), Error> {
        let variant = seed.deserialize(self.variant.into_deserializer()).map_err(|error: Error| {
            let origin = self.content.map_or(self.at.node.origin, |entry| entry.key_origin);
            error.at(self.at.path.clone(), origin)
        })?;
        Ok((variant, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'_> {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        match self.content {
            None => Ok(()),
            Some(_) => {
                let message = format!("`{}` has no fields", self.variant);
                Err(self.at.locate(Error::new(message, format!("write `{}` after the colon", self.variant))))
            }
        }
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, Error> {
        match self.content {
            Some(entry) => seed.deserialize(&self.at.child(entry)),
            // The word alone leaves every field to its default, and an error names the one without.
            None => {
                let node = Node { value: Value::Map(Vec::new()), origin: self.at.node.origin };
                let at = At { node: &node, path: join(&self.at.path, self.variant) };
                seed.deserialize(&at)
            }
        }
    }

    fn tuple_variant<V: Visitor<'de>>(self, _length: usize, visitor: V) -> Result<V::Value, Error> {
        Err(self.at.unexpected(&visitor))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        Err(self.at.unexpected(&visitor))
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// serde's words for what a type takes, in plain English.
fn plain(expected: &str) -> String {
    match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number, 0 or above".to_owned(),
        "f32" | "f64" => "a number".to_owned(),
        "a boolean" => "`true` or `false`".to_owned(),
        "a string" | "path string" => "a text".to_owned(),
        other => match other.strip_prefix("an array of length ") {
            Some(length) => format!("a list of {length} values"),
            None => other.to_owned(),
        },
    }
}
