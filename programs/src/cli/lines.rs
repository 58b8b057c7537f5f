//! Reader of JSON lines files given by a user.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, ErrorKind},
    path::Path,
};

use anyroll_config::error_chain::within_line;
use anyroll_data::without_mark;
use anyroll_pipelines::{Error, Result, output_error::OutputError};
use serde::de::DeserializeOwned;

/// Values of all lines that are not blank, with line numbers from 1; `-` is standard input.
///
/// # Errors
/// A file that cannot be read, or a line that is not a valid `T`.
pub(super) fn json_lines<T: DeserializeOwned>(file: &Path) -> Result<Vec<(usize, T)>> {
    let parsed = lines(file)?.map(|line| {
        let (line, text) = line?;
        let value = of_line(&text);
        value.map(|value| (line, value)).map_err(|problem| refused(file, line, problem))
    });
    parsed.collect()
}

/// Text of all lines that are not blank, with line numbers from 1; `-` is standard input.
///
/// # Errors
/// A file that cannot be read, or a line that is not UTF-8.
pub(super) fn lines(file: &Path) -> Result<impl Iterator<Item = Result<(usize, String)>>> {
    let unreadable = |source: io::Error| Error::from(OutputError::io("read", file, source));
    let numbered = (1..).zip(open(file).map_err(unreadable)?);
    let texts = numbered.map(move |(line, text)| {
        let text = text.map_err(|source| match source.kind() {
            ErrorKind::InvalidData => refused(file, line, "the line is not UTF-8".to_owned()),
            _ => unreadable(source),
        })?;
        Ok((line, if line == 1 { without_mark(&text).to_owned() } else { text }))
    });
    Ok(texts.filter(|line| !line.as_ref().is_ok_and(|(_, text)| text.trim().is_empty())))
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
            json_lines::<Numbers>(&path).map_err(|error| error.to_string())
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
}
