//! Rows of a file as JSON objects, read in batches.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use anyroll_config::error_chain::within_line;
use arrow_array::RecordBatch;
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_json::{WriterBuilder, writer::LineDelimited};
use arrow_schema::ArrowError;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::Error;

/// Callback for a row and its columns.
type Visit<'a> = dyn FnMut(Row, Map<String, Value>) -> Result<(), Error> + 'a;

/// Position of a row.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    path: &'a Path,
    /// `line` or `row`.
    kind: &'static str,
    /// Number from 1; empty lines are counted.
    number: usize,
}

impl Row<'_> {
    /// Name within the file, such as `line 12`.
    pub(super) fn name(self) -> String {
        format!("{} {}", self.kind, self.number)
    }

    /// An error at this row; `message` is the problem.
    pub(super) fn error(self, message: String) -> Error {
        Error::Line { path: self.path.to_owned(), line: self.number, message }
    }
}

/// Magic bytes at the start of an Arrow file; a stream lacks them.
const ARROW_FILE: &[u8] = b"ARROW1";
/// End of an Arrow stream. The format makes it optional, but a stream truncated between two batches would
/// then be read as a shorter one. pyarrow and `datasets` write it.
const STREAM_END: &[u8] = &[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// Calls `visit` for every row of a file, in order.
pub(super) fn each_row(path: &Path, visit: &mut Visit) -> Result<(), Error> {
    let unreadable = |source| Error::Read { path: path.to_owned(), source };
    let format = path.extension().unwrap_or_default();
    let file = File::open(path).map_err(unreadable)?;
    let mut rows = Rows { path, number: 0, visit };
    let broken = |source: ArrowError| Error::Table { path: path.to_owned(), source };
    match format.to_str() {
        Some("jsonl") => rows.lines(file),
        Some("parquet") => {
            let batches = ParquetRecordBatchReaderBuilder::try_new(file).and_then(|builder| builder.build());
            rows.batches(batches.map_err(|error| broken(error.into()))?)
        }
        Some("arrow") => {
            let mut file = BufReader::new(file);
            if begins_with(&mut file, ARROW_FILE).map_err(unreadable)? {
                rows.batches(FileReader::try_new(file, None).map_err(broken)?)
            } else if ends_with(&mut file, STREAM_END).map_err(unreadable)? {
                rows.batches(StreamReader::try_new(file, None).map_err(broken)?)
            } else {
                Err(broken(ArrowError::IpcError(
                    "it has no end marker: it was truncated, or is not an Arrow stream".into(),
                )))
            }
        }
        _ => Err(Error::Format { path: path.to_owned() }),
    }
}

/// A file's first line without a byte order mark.
pub fn without_mark(line: &str) -> &str {
    line.strip_prefix('\u{feff}').unwrap_or(line)
}

/// A JSON object without duplicate fields, of which one would be ignored.
struct Object(Map<String, Value>);

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

/// A reader of a file's rows.
struct Rows<'a> {
    path: &'a Path,
    /// Rows read so far, including empty lines.
    number: usize,
    visit: &'a mut Visit<'a>,
}

impl<'a> Rows<'a> {
    fn lines(&mut self, file: File) -> Result<(), Error> {
        for text in BufReader::new(file).lines() {
            self.number += 1;
            let text = text.map_err(|source| match source.kind() {
                io::ErrorKind::InvalidData => self.row("line").error("the line is not UTF-8".to_owned()),
                _ => Error::Read { path: self.path.to_owned(), source },
            })?;
            let text = if self.number == 1 { without_mark(&text) } else { &text };
            if !text.trim().is_empty() {
                let row = self.row("line");
                let Object(object) = serde_json::from_str(text).map_err(|error| {
                    row.error(format!("the line is not a JSON object: {}", within_line(&error)))
                })?;
                (self.visit)(row, object)?;
            }
        }
        Ok(())
    }

    fn batches(
        &mut self,
        batches: impl Iterator<Item = Result<RecordBatch, ArrowError>>,
    ) -> Result<(), Error> {
        for batch in batches {
            let objects = batch.and_then(|batch| objects(&batch));
            let objects = objects.map_err(|source| Error::Table { path: self.path.to_owned(), source })?;
            for object in objects {
                self.number += 1;
                let row = self.row("row");
                (self.visit)(row, object)?;
            }
        }
        Ok(())
    }

    /// The current row.
    fn row(&self, kind: &'static str) -> Row<'a> {
        Row { path: self.path, kind, number: self.number }
    }
}

/// Rows of a batch, converted by Arrow's JSON writer since columns may be nested.
fn objects(batch: &RecordBatch) -> Result<Vec<Map<String, Value>>, ArrowError> {
    let mut writer = WriterBuilder::new().with_explicit_nulls(true).build::<_, LineDelimited>(Vec::new());
    writer.write(batch)?;
    writer.finish()?;
    let text = writer.into_inner();
    let lines = serde_json::Deserializer::from_slice(&text).into_iter();
    lines.collect::<Result<_, serde_json::Error>>().map_err(|error| ArrowError::JsonError(error.to_string()))
}

/// Returns true if the file starts with these bytes, and rewinds it.
fn begins_with(file: &mut BufReader<File>, bytes: &[u8]) -> io::Result<bool> {
    let mut start = Vec::new();
    file.take(bytes.len() as u64).read_to_end(&mut start)?;
    file.rewind()?;
    Ok(start == bytes)
}

/// Returns true if the file ends with these bytes, and rewinds it.
fn ends_with(file: &mut BufReader<File>, bytes: &[u8]) -> io::Result<bool> {
    let length = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(length.saturating_sub(bytes.len() as u64)))?;
    let mut end = Vec::new();
    file.read_to_end(&mut end)?;
    file.rewind()?;
    Ok(end == bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;
    use anyroll_config::error_chain::one_line;

    /// A file written by tests/python/make_table_golden.py.
    fn golden(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tables").join(name)
    }

    fn rows(path: &Path) -> Result<Vec<(String, Value)>, Error> {
        let mut rows = Vec::new();
        each_row(path, &mut |row, object| {
            rows.push((row.name(), Value::Object(object)));
            Ok(())
        })?;
        Ok(rows)
    }

    #[test]
    fn tables_that_pyarrow_wrote_have_their_rows() {
        let wanted = |number: usize| {
            json!({
                "data_source": if number % 2 == 1 { "sums/é" } else { "sums" },
                "prompt": [
                    {"role": "system", "content": "Add."},
                    {"role": "user", "content": format!("{number}+{number}=")},
                ],
                "ability": null,
                "reward_model": {"style": "rule", "ground_truth": (2 * number).to_string()},
                "extra_info": {"index": number, "split": "train", "levels": [number as f64, 0.5]},
            })
        };
        let wanted: Vec<_> = (0..40).map(|number| (format!("row {}", number + 1), wanted(number))).collect();
        for name in
            ["verl.parquet", "zstd.parquet", "gzip.parquet", "verl.arrow", "zstd.arrow", "stream.arrow"]
        {
            assert_eq!(rows(&golden(name)).unwrap(), wanted, "{name}");
        }
    }

    #[test]
    fn a_line_that_is_no_text_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.jsonl");
        fs::write(&path, b"{}\n\n{\"prompt\": \"\xff\"}\n").unwrap();
        let error = one_line(&rows(&path).unwrap_err());
        assert!(error.ends_with("train.jsonl:3: the line is not UTF-8"), "{error}");
    }

    #[test]
    fn a_line_that_is_no_object_is_told_with_what_is_wrong() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.jsonl");
        for (line, expected) in [
            (r#"{"answer": 1, "prompt": "a", "answer": 2}"#, "duplicate field `answer`"),
            ("[1]", "invalid type: sequence, expected an object"),
            (r#"{"answer": 1"#, "EOF while parsing an object at character 12"),
        ] {
            fs::write(&path, format!("{{}}\n{line}\n")).unwrap();
            let error = one_line(&rows(&path).unwrap_err());
            let expected = format!("train.jsonl:2: the line is not a JSON object: {expected}");
            assert!(error.ends_with(&expected), "{error}");
        }
    }

    #[test]
    fn what_is_no_table_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        for name in
            ["verl.parquet", "zstd.parquet", "gzip.parquet", "verl.arrow", "zstd.arrow", "stream.arrow"]
        {
            let whole = fs::read(golden(name)).unwrap();
            let path = folder.path().join(name);
            for length in 0..whole.len() {
                fs::write(&path, &whole[..length]).unwrap();
                let read = rows(&path);
                assert!(matches!(read, Err(Error::Table { .. })), "{name}, {length}: {read:?}");
            }
            let error = one_line(&rows(&path).unwrap_err());
            assert!(error.contains(name), "{error}");
        }
        let other = folder.path().join("verl.csv");
        fs::write(&other, "a,b").unwrap();
        assert!(matches!(rows(&other), Err(Error::Format { .. })));
    }
}
