//! Files of JSON lines that a user gives.

use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    path::Path,
};

use serde::de::DeserializeOwned;

use crate::{Error, Result, output_error::OutputError};

/// Every line that is not blank, with its number from 1; `-` is standard input.
///
/// # Errors
/// The file that cannot be read, or the line that is not what it should be.
pub(super) fn json_lines<T: DeserializeOwned>(file: &Path) -> Result<Vec<(usize, T)>> {
    let mut parsed = Vec::new();
    let lines = open(file).map_err(|source| unreadable(file, source))?;
    for (index, text) in lines.enumerate() {
        let text = text.map_err(|source| unreadable(file, source))?;
        if text.trim().is_empty() {
            continue;
        }
        let value = of_line(&text).map_err(|problem| Error::InputLine {
            path: file.to_owned(),
            line: index + 1,
            problem,
        })?;
        parsed.push((index + 1, value));
    }
    Ok(parsed)
}

fn of_line<T: DeserializeOwned>(text: &str) -> std::result::Result<T, String> {
    // A list would do for a struct.
    if !text.trim_start().starts_with('{') {
        return Err("it is no JSON object".to_owned());
    }
    serde_json::from_str(text).map_err(|error| error.to_string())
}

fn open(file: &Path) -> io::Result<Box<dyn Iterator<Item = io::Result<String>>>> {
    if file == Path::new("-") {
        return Ok(Box::new(io::stdin().lock().lines()));
    }
    Ok(Box::new(BufReader::new(File::open(file)?).lines()))
}

fn unreadable(file: &Path, source: io::Error) -> Error {
    OutputError::io("read", file, source).into()
}
