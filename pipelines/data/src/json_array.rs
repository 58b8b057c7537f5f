//! Records of a JSON file: one array of objects, read an object at a time.

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use anyroll_config::error_chain::within_line;
use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::Error;
use super::row::{Object, PYTHON_VALUES, Row, Visit};

/// Calls `visit` for every object of the array that `file` is, whose byte order mark has been read.
pub(super) fn each_object(path: &Path, file: BufReader<File>, visit: &mut Visit) -> Result<(), Error> {
    let unreadable = |source| Error::Read { path: path.to_owned(), source };
    let refuse = |line, message: String| Error::Line { path: path.to_owned(), line, message };
    let place = Place { line: Cell::new(1), start: Cell::new(1), number: Cell::new(0) };
    let mut text = Text { file, line: &place.line, last: [0; 2] };
    let first = text.first().map_err(unreadable)?;
    if first != Some(b'[') {
        return Err(refuse(place.line.get(), not_an_array(first)));
    }
    let mut refused = None;
    let mut json = serde_json::Deserializer::from_reader(&mut text);
    let read = json.deserialize_seq(Items { path, place: &place, visit, refused: &mut refused });
    let is_whole = read.is_ok();
    let Err(error) = read.and_then(|()| json.end()) else { return Ok(()) };
    if let Some(refused) = refused {
        return Err(refused);
    }
    if error.is_io() {
        return Err(unreadable(error.into()));
    }
    let number = place.number.get();
    if error.is_eof() {
        let message = format!("the file ends within its array, in record {number}: it was truncated");
        return Err(refuse(place.line.get(), message));
    }
    let line = if error.is_data() { place.start.get() } else { place.line.get() };
    let problem = text.python_value(&error).unwrap_or_else(|| within_line(&error));
    let what = match is_whole {
        true => "there is more after the array".to_owned(),
        false => format!("record {number} is not a JSON object"),
    };
    Err(refuse(line, format!("{what}: {problem}")))
}

/// The problem of a file that begins with another byte than an array's.
fn not_an_array(first: Option<u8>) -> String {
    match first {
        Some(b'{') => {
            "the file is a JSON object, not an array of objects: write [ and ] around its records, with a \
                       comma between two, or name it .jsonl if each line is a record"
                .to_owned()
        }
        None => "the file is empty, not an array of objects".to_owned(),
        Some(_) => "the file is not an array of objects: it does not begin with [".to_owned(),
    }
}

/// Position in the file.
struct Place {
    /// Line of the last byte that was read.
    line: Cell<usize>,
    /// Line in which the current record begins.
    start: Cell<usize>,
    /// Number of the current record, from 1.
    number: Cell<usize>,
}

/// A file's text, read a byte at a time, so that `line` is that of the byte that the parser has come to.
struct Text<'a> {
    file: BufReader<File>,
    line: &'a Cell<usize>,
    /// The last two bytes.
    last: [u8; 2],
}

impl Text<'_> {
    /// The first byte that is no white space, which is not taken.
    fn first(&mut self) -> io::Result<Option<u8>> {
        loop {
            let Some(&byte) = self.file.fill_buf()?.first() else { return Ok(None) };
            if !byte.is_ascii_whitespace() {
                return Ok(Some(byte));
            }
            self.read_exact(&mut [0])?;
        }
    }

    /// The problem if the parser has stopped at a value of Python's that JSON does not have.
    fn python_value(&mut self, error: &serde_json::Error) -> Option<String> {
        let mut rest = self.last.to_vec();
        (&mut self.file).take(8).read_to_end(&mut rest).ok()?;
        // After an error in a list or an object the parser looks one byte further.
        let is_here =
            |value: &&str| rest[1..].starts_with(value.as_bytes()) || rest.starts_with(value.as_bytes());
        let value = PYTHON_VALUES.into_iter().find(is_here)?;
        let column = error.column();
        error
            .is_syntax()
            .then(|| format!("`{value}` at character {column} is a value of Python, not of JSON"))
    }
}

impl Read for Text<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (Some(into), Some(&byte)) = (buffer.first_mut(), self.file.fill_buf()?.first()) else {
            return Ok(0);
        };
        self.file.consume(1);
        self.line.set(self.line.get() + usize::from(byte == b'\n'));
        (*into, self.last) = (byte, [self.last[1], byte]);
        Ok(1)
    }
}

/// Passes the objects of an array on.
struct Items<'a, 'v> {
    path: &'a Path,
    place: &'a Place,
    visit: &'a mut Visit<'v>,
    /// The error of `visit`.
    refused: &'a mut Option<Error>,
}

impl<'de> Visitor<'de> for Items<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let Place { start, number, .. } = self.place;
        loop {
            number.set(number.get() + 1);
            let Some(object) = items.next_element_seed(Item(self.place))? else { return Ok(()) };
            let row = Row { path: self.path, kind: "record", number: number.get(), line: start.get() };
            if let Err(error) = (self.visit)(row, object) {
                *self.refused = Some(error);
                return Err(A::Error::custom("the record is refused"));
            }
        }
    }
}

/// An object of the array, which sets the line in which it begins.
struct Item<'a>(&'a Place);

impl<'de> DeserializeSeed<'de> for Item<'_> {
    type Value = Map<String, Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        self.0.start.set(self.0.line.get());
        Object::deserialize(deserializer).map(|Object(object)| object)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;
    use crate::table::tests::rows;
    use anyroll_config::error_chain::one_line;

    #[test]
    fn objects_of_an_array_are_numbered() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let expected: Vec<(String, Value)> = vec![
            ("record 1".into(), json!({"prompt": "a\n]", "answer": [1, {"b": null}]})),
            ("record 2".into(), json!({"prompt": "é", "answer": 0.1})),
        ];
        let objects: Vec<&Value> = expected.iter().map(|(_, object)| object).collect();
        let short = serde_json::to_string(&objects).unwrap();
        let long = serde_json::to_string_pretty(&objects).unwrap();
        for text in
            [short.clone(), long.clone(), format!("\u{feff} \n{long}\n\n"), short.replace(",{", " ,\r\n {")]
        {
            fs::write(&path, &text).unwrap();
            assert_eq!(rows(&path).unwrap(), expected, "{text}");
        }
        for nothing in ["[]", " [ \n ] \n"] {
            fs::write(&path, nothing).unwrap();
            assert!(rows(&path).unwrap().is_empty());
        }
    }

    #[test]
    fn a_file_that_is_no_array_of_objects_is_told_with_line_and_record() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        for (text, expected) in [
            ("", ":1: the file is empty"),
            (
                "\n\n{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\n",
                ":3: the file is a JSON object, not an array of objects",
            ),
            ("3", ":1: the file is not an array of objects: it does not begin with ["),
            (
                "[{\"a\": 1},\n {\"a\": 1, \"a\": 2}]",
                ":2: record 2 is not a JSON object: duplicate field `a`",
            ),
            (
                "[{\"a\": 1},\n\n[1]]",
                ":3: record 2 is not a JSON object: invalid type: sequence, expected an object",
            ),
            (
                "[\n{\"a\": 1},\n{\"a\": 2},\n",
                ":4: the file ends within its array, in record 3: it was truncated",
            ),
            ("[{\"a\": \"b", ":1: the file ends within its array, in record 1: it was truncated"),
            (
                "[{\"a\": 1},\n{\"b\": NaN}]",
                ":2: record 2 is not a JSON object: `NaN` at character 7 is a value of Python",
            ),
            (
                "[{\"a\": [-Infinity]}]",
                ":1: record 1 is not a JSON object: `Infinity` at character 10 is a value of Python",
            ),
            ("[{\"a\": None}]", "`None` at character 8 is a value of Python, not of JSON"),
            ("[{\"a\": 1} {\"a\": 2}]", "record 2 is not a JSON object: expected `,` or `]` at character 11"),
            ("[{\"a\": 1},]", "record 2 is not a JSON object: trailing comma at character 11"),
            ("[{\"a\": 1}]\n[{}]", ":2: there is more after the array: trailing characters at character 1"),
        ] {
            fs::write(&path, text).unwrap();
            let error = one_line(&rows(&path).unwrap_err());
            assert!(
                error.contains(&format!("a.json{expected}")) || error.contains(expected),
                "{error}, not {expected}"
            );
        }
        fs::write(&path, b"[{\"a\": \"\xff\"}]").unwrap();
        let error = one_line(&rows(&path).unwrap_err());
        assert!(error.contains("a.json:1: record 1 is not a JSON object: invalid unicode"), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn an_array_cut_anywhere_is_an_error(cut in 0_usize..61) {
            let whole = r#"[{"prompt": "a", "answer": [1, "b"]},{"prompt": "c", "d": {}}]"#;
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a.json");
            fs::write(&path, &whole[..cut]).unwrap();
            let error = rows(&path).unwrap_err();
            assert!(matches!(error, Error::Line { line: 1, .. }), "{error}");
        }
    }
}
