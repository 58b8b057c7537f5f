//! Reads types from the [`Node`] tree, for serde, and tracks the path to every value. An error of any cause therefore
//! names its field and its position.
//!
//! serde stops at the first error. The tree is therefore read again, with a stand-in for each wrong or missing value:
//! the field's default, or else a value of the right form. Reading ends when a pass finds no further error.

use std::fmt;

use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Expected, IntoDeserializer, MapAccess,
    SeqAccess, Unexpected, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;

use super::error::{Origin, list, nearest, suggestion};
use super::problem::{Problem, join};
use super::stand_ins::{Form, Kind, Read, StandIns};
use super::tree::{Entry, Node, Value};

/// Result of reading a tree as a type.
pub struct Reading<T> {
    /// The value; `None` if no stand-in was found for a wrong value.
    pub value: Option<T>,
    /// All problems that were found.
    pub problems: Vec<Problem>,
    /// The fields whose values are stand-ins.
    pub stand_ins: Vec<String>,
}

/// Reads the tree as a `T`.
pub fn from_node<T: DeserializeOwned>(root: &Node) -> Reading<T> {
    let mut stand_ins = StandIns::default();
    let mut problems = Vec::new();
    loop {
        let at = At { read: Read::Node(root), path: String::new(), stand_ins: &stand_ins };
        let error = match T::deserialize(&at) {
            Ok(value) => return Reading { value: Some(value), problems, stand_ins: stand_ins.into_fields() },
            Err(error) => at.locate(error),
        };
        if stand_ins.is_news(error.field(), error.kind) {
            problems.push(error.clone().into_problem());
        }
        if !stand_ins.add(error.field(), error.kind) {
            return Reading { value: None, problems, stand_ins: stand_ins.into_fields() };
        }
    }
}

/// A value that is read, and the path to it.
struct At<'a> {
    read: Read<'a>,
    path: String,
    stand_ins: &'a StandIns,
}

/// An error that propagates outwards: the innermost value that it passes sets its field and its position.
#[derive(Clone, Debug)]
struct Error {
    place: Option<(String, Origin)>,
    kind: Kind,
    message: String,
    help: String,
}

impl At<'_> {
    fn locate(&self, mut error: Error) -> Error {
        if error.place.is_none() {
            let path = match error.kind {
                Kind::Missing(field) => join(&self.path, field),
                Kind::Wrong | Kind::Unknown { .. } => self.path.clone(),
            };
            error.place = Some((path, self.origin()));
        }
        error
    }

    fn unexpected(&self, expected: &dyn Expected) -> Error {
        let expected = plain(&expected.to_string());
        let found = match self.read {
            Read::Node(node) => node.kind(),
            Read::StandIn(_) => "a stand-in".to_owned(),
        };
        let message = format!("expected {expected}, found {found}");
        self.locate(Error::new(message, format!("write {expected}")))
    }

    /// Returns the error of several variants. The last variant is to blame, since a `--set` follows the fields of the
    /// file.
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

    fn origin(&self) -> Origin {
        match self.read {
            Read::Node(node) => node.origin,
            // Problems of a stand-in are not reported.
            Read::StandIn(_) => Origin::File { line: 1, column: 1 },
        }
    }

    fn child<'b>(&'b self, field: &Field<'b>) -> At<'b> {
        At { read: field.read, path: join(&self.path, field.key), stand_ins: self.stand_ins }
    }

    /// Returns the fields of a mapping, then the missing fields that have a stand-in.
    fn fields<'b>(&'b self, entries: &'b [Entry]) -> Vec<Field<'b>> {
        let of_entry = |entry: &'b Entry| {
            let path = join(&self.path, &entry.key);
            let read =
                self.stand_ins.read(&path, &entry.node).filter(|_| !self.stand_ins.is_unknown(&path))?;
            Some(Field { key: &entry.key, origin: entry.key_origin, read })
        };
        // A field that is read as a stand-in has an entry already.
        let missing =
            self.stand_ins.below(&self.path).filter(|name| entries.iter().all(|it| it.key != *name));
        let added = missing.map(|name| self.part(name));
        entries.iter().filter_map(of_entry).chain(added).collect()
    }

    /// Returns a field of a stand-in.
    fn part<'b>(&'b self, name: &'b str) -> Field<'b> {
        let read = self.stand_ins.part(&join(&self.path, name));
        Field { key: name, origin: self.origin(), read }
    }
}

impl Error {
    fn new(message: String, help: String) -> Self {
        Self { place: None, kind: Kind::Wrong, message, help }
    }

    fn at(mut self, path: String, origin: Origin) -> Self {
        self.place.get_or_insert((path, origin));
        self
    }

    fn field(&self) -> &str {
        self.place.as_ref().map_or("", |(field, _)| field)
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
        // A text that reads as a number was in quotes.
        let is_quoted = matches!(found, Unexpected::Str(text) if text.parse::<f64>().is_ok());
        let quotes = if is_quoted && expected.contains("number") { ", without quotes" } else { "" };
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
        Self::new(format!("expected {expected}, found {found}"), format!("write {expected}{quotes}"))
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
        let error = Self::new("there is no such field".to_owned(), suggestion(field, expected));
        Self { kind: Kind::Unknown { nearest: nearest(field, expected) }, ..error }
    }

    fn missing_field(field: &'static str) -> Self {
        let help = format!("add `{field}:` here; it has no default");
        Self { kind: Kind::Missing(field), ..Self::new("it is missing".to_owned(), help) }
    }
}

/// Methods for types that name their scalar: the stand-in has a value of that type.
macro_rules! scalars {
    ($($method:ident: $visit:ident($value:expr),)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            match self.read {
                Read::Node(_) => self.deserialize_any(visitor),
                Read::StandIn(_) => visitor.$visit($value),
            }
        })*
    };
}

impl<'de> Deserializer<'de> for &At<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let node = match self.read {
            Read::Node(node) => node,
            Read::StandIn(Form::Text) => return visitor.visit_str("x").map_err(|error| self.locate(error)),
            Read::StandIn(Form::List) => return self.deserialize_seq(visitor),
            Read::StandIn(Form::Map) => return self.deserialize_map(visitor),
            Read::StandIn(_) => return visitor.visit_u64(1).map_err(|error| self.locate(error)),
        };
        match &node.value {
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
        match self.read {
            Read::Node(Node { value: Value::Null, .. }) => visitor.visit_none(),
            Read::Node(_) | Read::StandIn(Form::Some) => visitor.visit_some(self),
            Read::StandIn(_) => visitor.visit_none(),
        }
        .map_err(|error| self.locate(error))
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let items = match self.read {
            Read::Node(Node { value: Value::List(items), .. }) => items.as_slice(),
            Read::Node(_) => return Err(self.unexpected(&visitor)),
            Read::StandIn(_) => &[],
        };
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

    fn deserialize_tuple<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, Error> {
        match self.read {
            Read::Node(_) => self.deserialize_seq(visitor),
            Read::StandIn(_) => visitor.visit_seq(Parts { at: self, rest: 0..length }),
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let entries = match self.read {
            Read::Node(Node { value: Value::Map(entries), .. }) => entries.as_slice(),
            Read::Node(_) => return Err(self.unexpected(&visitor)),
            Read::StandIn(_) => &[],
        };
        let access = Fields { at: self, rest: self.fields(entries).into_iter(), current: None };
        visitor.visit_map(access).map_err(|error| self.locate(error))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let parts: Vec<Field> = match self.read {
            Read::Node(Node { value: Value::Map(_), .. }) => return self.deserialize_map(visitor),
            Read::Node(_) => return Err(self.unexpected(&"a mapping with fields")),
            Read::StandIn(Form::First) => {
                vec![Field { read: Read::StandIn(Form::Some), ..self.part(fields[0]) }]
            }
            Read::StandIn(_) => fields.iter().map(|name| self.part(name)).collect(),
        };
        let access = Fields { at: self, rest: parts.into_iter(), current: None };
        visitor.visit_map(access).map_err(|error| self.locate(error))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let (variant, content) = match self.read {
            Read::StandIn(_) => (variants[0], Some(self.part(variants[0]))),
            Read::Node(node) => match &node.value {
                Value::Text(variant) => (variant.as_str(), None),
                Value::Map(entries) if entries.len() == 1 => {
                    let Entry { key, key_origin, node } = &entries[0];
                    // An absent variant is no variant.
                    let read = self.stand_ins.read(&join(&self.path, key), node);
                    let read = read.unwrap_or(Read::StandIn(Form::Number));
                    (key.as_str(), Some(Field { key, origin: *key_origin, read }))
                }
                Value::Map(entries) if entries.len() > 1 => return Err(self.ambiguous(variants, entries)),
                _ => return Err(self.unexpected(&format!("one of {}", list(variants)).as_str())),
            },
        };
        visitor.visit_enum(Variant { at: self, variant, content }).map_err(|error| self.locate(error))
    }

    scalars! {
        deserialize_bool: visit_bool(false),
        deserialize_i64: visit_i64(1),
        deserialize_u8: visit_u8(1),
        deserialize_u16: visit_u16(1),
        deserialize_u32: visit_u32(1),
        deserialize_u64: visit_u64(1),
        deserialize_f64: visit_f64(1.0),
        deserialize_str: visit_str("x"),
        deserialize_string: visit_str("x"),
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i128 u128 f32 char bytes byte_buf unit unit_struct newtype_struct tuple_struct identifier ignored_any
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
        loop {
            let index = self.length - self.rest.len();
            let Some(node) = self.rest.next() else { return Ok(None) };
            let path = join(&self.at.path, &format!("[{index}]"));
            if let Some(read) = self.at.stand_ins.read(&path, node) {
                return seed.deserialize(&At { read, path, stand_ins: self.at.stand_ins }).map(Some);
            }
        }
    }
}

/// The items of a stand-in for a list of fixed length.
struct Parts<'a> {
    at: &'a At<'a>,
    rest: std::ops::Range<usize>,
}

impl<'de> SeqAccess<'de> for Parts<'_> {
    type Error = Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Error> {
        let Some(index) = self.rest.next() else { return Ok(None) };
        let path = join(&self.at.path, &format!("[{index}]"));
        let read = self.at.stand_ins.part(&path);
        seed.deserialize(&At { read, path, stand_ins: self.at.stand_ins }).map(Some)
    }
}

/// A key of a mapping and the value below it.
struct Field<'a> {
    key: &'a str,
    origin: Origin,
    read: Read<'a>,
}

struct Fields<'a> {
    at: &'a At<'a>,
    rest: std::vec::IntoIter<Field<'a>>,
    current: Option<Field<'a>>,
}

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Error> {
        self.current = self.rest.next();
        let Some(field) = &self.current else { return Ok(None) };
        seed.deserialize(field.key.into_deserializer())
            .map(Some)
            .map_err(|error: Error| error.at(join(&self.at.path, field.key), field.origin))
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Error> {
        let field = self.current.as_ref().expect("serde asks for a value after its key");
        let child = self.at.child(field);
        // An error of a type about its fields as a whole has no position yet.
        seed.deserialize(&child).map_err(|error| child.locate(error))
    }
}

/// An enum's variant: a word, or the only key of a mapping with the variant's fields below.
struct Variant<'a> {
    at: &'a At<'a>,
    variant: &'a str,
    content: Option<Field<'a>>,
}

impl<'de, 'a> EnumAccess<'de> for Variant<'a> {
    type Error = Error;
    type Variant = Self;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self), Error> {
        let variant = seed.deserialize(self.variant.into_deserializer()).map_err(|error: Error| {
            let origin = self.content.as_ref().map_or(self.at.origin(), |field| field.origin);
            error.at(self.at.path.clone(), origin)
        })?;
        Ok((variant, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'_> {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        match (&self.content, self.at.read) {
            (None, _) | (_, Read::StandIn(_)) => Ok(()),
            (Some(_), Read::Node(_)) => {
                let message = format!("`{}` has no fields", self.variant);
                Err(self.at.locate(Error::new(message, format!("write `{}` after the colon", self.variant))))
            }
        }
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, Error> {
        match self.content {
            Some(field) => seed.deserialize(&self.at.child(&field)),
            // The word alone leaves every field to its default; an error names a field that has none.
            None => {
                let node = Node { value: Value::Map(Vec::new()), origin: self.at.origin() };
                let path = join(&self.at.path, self.variant);
                let read = self.at.stand_ins.read(&path, &node).unwrap_or(Read::StandIn(Form::Number));
                seed.deserialize(&At { read, path, stand_ins: self.at.stand_ins })
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

/// Rewrites serde's description of an expected type in plain English.
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
