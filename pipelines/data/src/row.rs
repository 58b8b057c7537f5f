//! Rows of data files: their positions, and objects of JSON.

use std::fmt;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::Error;

/// Callback for a row and its columns.
pub(super) type Visit<'a> = dyn FnMut(Row, Map<String, Value>) -> Result<(), Error> + 'a;

/// Position of a row.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub path: &'a Path,
    /// `line`, `row` or `record`.
    pub kind: &'static str,
    /// Number from 1; empty lines are counted.
    pub number: usize,
    /// Line in which it begins; the number of a row.
    pub line: usize,
}

impl Row<'_> {
    /// Name within the file, such as `line 12`.
    pub(super) fn name(self) -> String {
        format!("{} {}", self.kind, self.number)
    }

    /// An error at this row; `message` is the problem.
    pub(super) fn error(self, message: String) -> Error {
        let message = if self.kind == "record" { format!("{}: {message}", self.name()) } else { message };
        Error::Line { path: self.path.to_owned(), line: self.line, message }
    }
}

/// Values of Python that JSON does not have.
pub(super) const PYTHON_VALUES: [&str; 5] = ["NaN", "Infinity", "None", "True", "False"];

/// A JSON object without duplicate fields, of which one would be ignored.
pub(super) struct Object(pub Map<String, Value>);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor;

        impl<'de> Visitor<'de> for ObjectVisitor {
            type Value = Object;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Object, A::Error> {
                let mut object = Map::new();
                while let Some((name, value)) = entries.next_entry::<String, Value>()? {
                    if object.insert(name.clone(), value).is_some() {
                        return Err(A::Error::custom(format_args!("duplicate field `{name}`")));
                    }
                }
                Ok(Object(object))
            }
        }

        deserializer.deserialize_map(ObjectVisitor)
    }
}
