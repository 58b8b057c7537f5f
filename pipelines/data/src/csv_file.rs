//! Records of a CSV file: a line with the columns' names, then a record of texts each.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use anyroll_config::NamedColumns;
use csv::{ErrorKind, ReaderBuilder, StringRecord};
use serde_json::{Map, Number, Value};

use super::Error;
use super::row::{Row, Visit};

/// Follows the file's last line. It is a record of its own, unless a quote is still open, which the `csv` crate does not
/// report.
const END: &str = "\n\u{1}end of file\u{1}";

/// Columns of CSV whose cells have another type than a text. A cell that is no value of the type stays a text, for the
/// error of its reader.
#[derive(Clone, Debug, Default)]
pub struct CellTypes<'a> {
    /// Columns of true and false, also as 1 and 0.
    pub flags: Vec<&'a str>,
    /// Columns of numbers.
    pub numbers: Vec<&'a str>,
    /// Columns of lists, as JSON.
    pub lists: Vec<&'a str>,
}

impl<'a> CellTypes<'a> {
    /// The types of a config's columns.
    pub fn of(columns: &'a NamedColumns) -> Self {
        let named =
            |columns: [&'a Option<String>; 2]| columns.into_iter().flatten().map(String::as_str).collect();
        Self {
            flags: named([&columns.label, &None]),
            numbers: named([&columns.reward, &None]),
            lists: named([&columns.steps, &columns.step_labels]),
        }
    }

    /// Converts the cells of a record.
    fn apply(&self, record: &mut Map<String, Value>) {
        type Read = fn(&str) -> Option<Value>;
        for (columns, read) in [(&self.flags, flag as Read), (&self.numbers, number), (&self.lists, list)] {
            for column in columns {
                if let Some(cell) = record.get_mut(*column)
                    && let Some(value) = cell.as_str().and_then(|text| read(text.trim()))
                {
                    *cell = value;
                }
            }
        }
    }

    /// Returns true if an empty cell of the column has no value.
    pub fn is_typed(&self, column: &str) -> bool {
        [&self.flags, &self.numbers, &self.lists].into_iter().any(|columns| columns.contains(&column))
    }
}

/// True or false as JSON, Python and spreadsheets write them.
fn flag(text: &str) -> Option<Value> {
    match text {
        "true" | "True" | "TRUE" | "1" | "1.0" => Some(Value::Bool(true)),
        "false" | "False" | "FALSE" | "0" | "0.0" => Some(Value::Bool(false)),
        _ => None,
    }
}

fn number(text: &str) -> Option<Value> {
    let exact: Option<Number> = serde_json::from_str(text).ok();
    exact.or_else(|| Number::from_f64(text.parse().ok()?)).map(Value::Number)
}

fn list(text: &str) -> Option<Value> {
    serde_json::from_str(text).ok().map(Value::Array)
}

/// Calls `visit` for every record of `file`, whose byte order mark has been read.
pub(super) fn each_record(
    path: &Path,
    file: BufReader<File>,
    cells: &CellTypes,
    visit: &mut Visit,
) -> Result<(), Error> {
    let text = Lines::of(file.chain(END.as_bytes()));
    // Records are compared with the header here, which names the line.
    let mut reader = ReaderBuilder::new().has_headers(false).flexible(true).from_reader(text);
    let mut record = StringRecord::new();
    let mut columns: Option<Vec<String>> = None;
    loop {
        let start = reader.position().byte();
        let read = reader.read_record(&mut record);
        let line = reader.get_mut().line_from(start);
        let row = Row { path, kind: "line", number: line, line };
        if !read.map_err(|error| unreadable(row, error))? || (record.len() == 1 && record[0] == END[1..]) {
            return Ok(());
        }
        if record.iter().next_back().is_some_and(|last| last.ends_with(END)) {
            return Err(row.error("a quote of the record that begins here is not closed".to_owned()));
        }
        let Some(columns) = &columns else {
            columns = Some(header(row, &record)?);
            continue;
        };
        if record.len() != columns.len() {
            let (found, expected) = (record.len(), columns.len());
            let problem = format!(
                "the record has {found} fields, and the header has {expected}: put a field with a \
                                   comma, a quote or a new line in it into quotes"
            );
            return Err(row.error(problem));
        }
        let texts = record.iter().map(|text| Value::String(text.to_owned()));
        let mut object: Map<String, Value> = columns.iter().cloned().zip(texts).collect();
        cells.apply(&mut object);
        visit(row, object)?;
    }
}

/// Names of the columns.
fn header(row: Row, record: &StringRecord) -> Result<Vec<String>, Error> {
    let names: Vec<String> = record.iter().map(str::to_owned).collect();
    match names.iter().enumerate().find(|(index, name)| names[..*index].contains(name)) {
        Some((_, name)) => Err(row.error(format!("the header has the column `{name}` twice"))),
        None => Ok(names),
    }
}

fn unreadable(row: Row, error: csv::Error) -> Error {
    let problem = match error.kind() {
        ErrorKind::Utf8 { err, .. } => format!("field {} is not UTF-8", err.field() + 1),
        _ => error.to_string(),
    };
    match error.into_kind() {
        ErrorKind::Io(source) => Error::Read { path: row.path.to_owned(), source },
        _ => row.error(problem),
    }
}

/// A text that knows the lines of its bytes. The `csv` crate counts lines, but is late by one after `\r\n`, and does
/// not tell blank lines from the record after them.
struct Lines<R> {
    text: R,
    /// Bytes read.
    bytes: u64,
    line: usize,
    /// True before the first byte of a line that is not blank.
    is_start: bool,
    /// First bytes of lines that are not blank, with the lines' numbers.
    starts: VecDeque<(u64, usize)>,
}

impl<R> Lines<R> {
    fn of(text: R) -> Self {
        Self { text, bytes: 0, line: 1, is_start: true, starts: VecDeque::new() }
    }

    /// The first line at or after a byte that is not blank. Earlier lines are forgotten.
    fn line_from(&mut self, byte: u64) -> usize {
        while self.starts.front().is_some_and(|(start, _)| *start < byte) {
            self.starts.pop_front();
        }
        self.starts.front().map_or(self.line, |(_, line)| *line)
    }
}

impl<R: Read> Read for Lines<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.text.read(buffer)?;
        for (at, byte) in (self.bytes..).zip(&buffer[..count]) {
            match byte {
                b'\n' => {
                    self.line += 1;
                    self.is_start = true;
                }
                b'\r' => {}
                _ if self.is_start => {
                    self.starts.push_back((at, self.line));
                    self.is_start = false;
                }
                _ => {}
            }
        }
        self.bytes += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;
    use crate::table::tests::rows;
    use anyroll_config::error_chain::one_line;

    fn read(text: impl AsRef<[u8]>) -> Result<Vec<(String, Value)>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        fs::write(&path, text).unwrap();
        rows(&path).map_err(|error| one_line(&error).rsplit_once("a.csv").unwrap().1.to_owned())
    }

    /// The texts are those that Python's `csv.writer` writes for these records, with either line end.
    #[test]
    fn records_are_named_by_the_line_in_which_they_begin() {
        let text = "prompt,answer,note\n\
                    1+1,2,\n\
                    \"a, \"\"b\"\"\nc\",007,NaN\n\
                    \n\
                    é,\" x \",5\" pipe\n";
        let expected = |break_: &str| {
            [
                ("line 2".to_owned(), json!({"prompt": "1+1", "answer": "2", "note": ""})),
                (
                    "line 3".to_owned(),
                    json!({"prompt": format!("a, \"b\"{break_}c"), "answer": "007", "note": "NaN"}),
                ),
                ("line 6".to_owned(), json!({"prompt": "é", "answer": " x ", "note": "5\" pipe"})),
            ]
        };
        assert_eq!(read(text).unwrap(), expected("\n"));
        assert_eq!(read(text.trim_end()).unwrap(), expected("\n"), "the last line has no end");
        assert_eq!(read(format!("\u{feff}{text}\n\n")).unwrap(), expected("\n"), "a mark, and blank lines");
        assert_eq!(read(text.replace('\n', "\r\n")).unwrap(), expected("\r\n"));
    }

    #[test]
    fn a_long_file_keeps_its_lines() {
        let line = |number: usize| format!("\"{number}\n{}\",2\r\n", "x".repeat(number % 97));
        let text: String = (0..5000).map(line).collect();
        let found = read(format!("prompt,answer\r\n{text}")).unwrap();
        assert_eq!(found.len(), 5000);
        for (index, (name, record)) in found.iter().enumerate() {
            assert_eq!(*name, format!("line {}", 2 + 2 * index));
            assert_eq!(record["prompt"], format!("{index}\n{}", "x".repeat(index % 97)));
        }
    }

    #[test]
    fn a_file_that_is_no_csv_is_told_with_its_line() {
        for (text, expected) in [
            (&b"a,b\n1,2\n3,\"x\n4,5\n"[..], ":3: a quote of the record that begins here is not closed"),
            (b"a,b\r\n\r\n3,\"x\"\"\"\r\n3,\"x\"\"", ":4: a quote of the record"),
            (b"\"a,b", ":1: a quote of the record"),
            (b"a,b\n1,2\n\n1,2,3\n", ":4: the record has 3 fields, and the header has 2: put a field"),
            (b"a,b\n1\n", ":2: the record has 1 fields, and the header has 2"),
            (b"a,b,a\n1,2,3\n", ":1: the header has the column `a` twice"),
            (b"a,b\n1,\xff\n", ":2: field 2 is not UTF-8"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.starts_with(expected), "{error}, not {expected}");
        }
        for empty in ["", "\n\n", "a,b\n", "\u{feff}"] {
            assert!(read(empty).unwrap().is_empty(), "{empty:?}");
        }
    }

    #[test]
    fn cells_are_texts_but_for_fields_of_another_type() {
        let columns = NamedColumns {
            label: Some("label".into()),
            reward: Some("score".into()),
            steps: Some("steps".into()),
            step_labels: Some("right".into()),
            ..NamedColumns::default()
        };
        let read = |label: &str, score: &str, steps: &str| {
            let mut record = Map::from_iter(
                [("label", label), ("score", score), ("steps", steps), ("answer", "1")]
                    .map(|(name, text)| (name.to_owned(), json!(text))),
            );
            CellTypes::of(&columns).apply(&mut record);
            Value::Object(record)
        };
        assert_eq!(
            read("True", " -0.5", r#"["a", "b"]"#),
            json!({"label": true, "score": -0.5, "steps": ["a", "b"], "answer": "1"})
        );
        assert_eq!(read("0", "3", "[]"), json!({"label": false, "score": 3, "steps": [], "answer": "1"}));
        let none = json!({"label": "yes", "score": "nan", "steps": "['a']", "answer": "1"});
        assert_eq!(read("yes", "nan", "['a']"), none, "the error of the column names it");
    }
}
