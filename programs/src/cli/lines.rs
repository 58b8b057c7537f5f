//! Reader of files of records given by a user: JSON lines, or a table.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, ErrorKind},
    path::Path,
};

use anyroll_config::error_chain::within_line;
use anyroll_data::{CellTypes, is_table, rows, without_mark};
use anyroll_pipelines::{Error, Result, output_error::OutputError};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Values of all records, with their numbers as in [`records`].
///
/// # Errors
/// A file that cannot be read, or a record that is not a valid `T`.
pub(super) fn parsed<T: DeserializeOwned>(file: &Path, cells: &CellTypes) -> Result<Vec<(usize, T)>> {
    let parsed = records(file, cells)?.map(|line| {
        let (line, text) = line?;
        let value = of_line(&text);
        value.map(|value| (line, value)).map_err(|problem| refused(file, line, problem))
    });
    parsed.collect()
}

/// All records as JSON, with their numbers from 1. A file whose name ends with `.json`, `.csv`, `.parquet` or `.arrow`
/// is read as data of a config, with the types of CSV's `cells`; any other file has JSON lines. `-` is standard input.
///
/// # Errors
/// A file that cannot be read, or a line that is not UTF-8.
pub(super) fn records(file: &Path, cells: &CellTypes) -> Result<Box<dyn Iterator<Item = Numbered>>> {
    if !is_table(file) {
        return Ok(Box::new(lines(file)?));
    }
    let rows = rows(file, cells)?.into_iter();
    Ok(Box::new(rows.map(|(number, row)| Ok((number, Value::Object(row).to_string())))))
}

/// A record's number and its JSON.
type Numbered = Result<(usize, String)>;

/// Text of all lines that are not blank, with line numbers from 1; `-` is standard input.
fn lines(file: &Path) -> Result<impl Iterator<Item = Numbered> + use<>> {
    let file = file.to_owned();
    let unreadable = |file: &Path, source| Error::from(OutputError::io("read", file, source));
    let numbered = (1..).zip(open(&file).map_err(|source| unreadable(&file, source))?);
    let texts = numbered.map(move |(line, text): (usize, io::Result<String>)| {
        let text = text.map_err(|source| match source.kind() {
            ErrorKind::InvalidData => refused(&file, line, "the line is not UTF-8".to_owned()),
            _ => unreadable(&file, source),
        })?;
        Ok((line, if line == 1 { without_mark(&text).to_owned() } else { text }))
    });
    Ok(texts.filter(|line: &Numbered| !line.as_ref().is_ok_and(|(_, text)| text.trim().is_empty())))
}

/// Parses a line; the error names the field, or the character if the line is not JSON.
pub(super) fn of_line<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    // serde would accept a list for a struct.
    if !text.trim_start().starts_with('{') {
        return Err("it is not a JSON object".to_owned());
    }
    let mut json = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let problem = within_line(error.inner());
        // An error in the JSON itself has no field to name.
        match error.inner().is_data() && error.path().iter().next().is_some() {
            true => format!("`{}`: {problem}", error.path()),
            false => problem,
        }
    })?;
    json.end().map_err(|error| within_line(&error))?;
    Ok(value)
}

fn refused(file: &Path, line: usize, problem: String) -> Error {
    Error::InputLine { path: file.to_owned(), line, problem }
}

fn open(file: &Path) -> io::Result<Box<dyn Iterator<Item = io::Result<String>>>> {
    if file == Path::new("-") {
        return Ok(Box::new(io::stdin().lock().lines()));
    }
    Ok(Box::new(BufReader::new(File::open(file)?).lines()))
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs};

    use super::*;

    type Numbers = BTreeMap<String, f64>;

    #[test]
    fn what_is_wrong_with_a_line_is_told_with_its_number_and_field() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines.jsonl");
        let read = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            parsed::<Numbers>(&path, &CellTypes::default()).map_err(|error| error.to_string())
        };
        let found = read(b"\xef\xbb\xbf{\"a\": 1}\n\n \r\n{\"a\": 2}\r\n").unwrap();
        assert_eq!(found, [(1, [("a".to_owned(), 1.0)].into()), (4, [("a".to_owned(), 2.0)].into())]);
        for (bytes, expected) in [
            (
                &b"{}\n{\"a\": 1, \"b\": \"x\"}\n"[..],
                ":2: `b`: invalid type: string \"x\", expected a number",
            ),
            (b"\n[1]\n", ":2: it is not a JSON object"),
            (b"{\"a\": 1,}\n", ":1: trailing comma at character 9"),
            (b"{\"a\": 1} 2\n", ":1: trailing characters at character 10"),
            (b"{}\n{\"a\": \"\xff\"}\n", ":2: the line is not UTF-8"),
        ] {
            let error = read(bytes).unwrap_err();
            assert!(error.ends_with(&format!("lines.jsonl{expected}")), "{error}");
        }
    }
    #[test]
    fn a_table_has_the_records_of_json_lines() {
        let folder = tempfile::tempdir().unwrap();
        let cells = CellTypes { numbers: vec!["a", "b"], ..CellTypes::default() };
        let read = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            parsed::<Numbers>(&path, &cells).map_err(|error| error.to_string())
        };
        let expected = |numbers: [usize; 2]| {
            let [first, second] = [("a", 1.5), ("b", 2.0)].map(|(name, value)| (name.to_owned(), value));
            Ok(vec![(numbers[0], [first.clone(), second].into()), (numbers[1], [first].into())])
        };
        let json = r#"{"a": 1.5, "b": 2}, {"a": 1.5}"#;
        assert_eq!(read("a.jsonl", &json.replace("}, ", "}\n")), expected([1, 2]));
        assert_eq!(read("a.json", &format!("[{json}]")), expected([1, 2]));
        // An empty cell is no value of a typed column.
        assert_eq!(read("a.csv", "a,b\n1.5,2\n1.5,\n"), expected([2, 3]));
        let error = read("b.csv", "a,b\n1.5,2\n1.5,x\n").unwrap_err();
        assert!(error.ends_with("b.csv:3: `b`: invalid type: string \"x\", expected a number"), "{error}");
        let error = read("b.json", "{}").unwrap_err();
        assert!(error.contains("b.json:1: the file is a JSON object, not an array"), "{error}");
    }
}
