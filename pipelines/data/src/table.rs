//! Rows of a file as JSON objects, read in batches.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use anyroll_config::error_chain::within_line;
use anyroll_models::hf::is_lfs_pointer;
use arrow_array::{Array, RecordBatch, make_array};
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_json::{WriterBuilder, writer::LineDelimited};
use arrow_schema::{ArrowError, DataType, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use parquet::basic::Compression;
use serde_json::{Map, Value};

use super::arrow_lengths::Lengths;
use super::csv_file::{self, CellTypes};
use super::panics::caught;
use super::row::{Object, PYTHON_VALUES, Row, Visit};
use super::{Error, json_array};

/// Magic bytes at the start of an Arrow file; a stream lacks them.
const ARROW_FILE: &[u8] = b"ARROW1";
/// End of an Arrow stream. The format makes it optional, but a stream truncated between two batches would
/// then be read as a shorter one. pyarrow and `datasets` write it.
const STREAM_END: &[u8] = &[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// Most rows that are converted at a time.
const ROWS: usize = 1024;

/// Returns true if a file's name is that of one table or array, whose rows are not JSON lines.
pub fn is_table(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|extension| ["json", "csv", "parquet", "arrow"].contains(&extension))
}

/// Rows by column, each with its number in the file.
pub type NumberedRows = Vec<(usize, Map<String, Value>)>;

/// The rows of a file, with their numbers from 1: of records in an array, lines of CSV, or rows of a table. An empty
/// cell of CSV has no value if its column has a type.
///
/// # Errors
/// A file that cannot be read.
pub fn rows(path: &Path, cells: &CellTypes) -> Result<NumberedRows, Error> {
    let mut rows = Vec::new();
    each_row(path, &BTreeSet::new(), cells, &mut |row, mut object| {
        object.retain(|column, value| *value != "" || !cells.is_typed(column));
        rows.push((row.number, object));
        Ok(())
    })?;
    Ok(rows)
}

/// Calls `visit` for every row of a file, in order. Columns of a table that cannot be read are left out, but for
/// those that `names` has. `cells` has the types of CSV's cells.
pub(super) fn each_row(
    path: &Path,
    names: &BTreeSet<&str>,
    cells: &CellTypes,
    visit: &mut Visit,
) -> Result<(), Error> {
    let unreadable = |source| Error::Read { path: path.to_owned(), source };
    let format = path.extension().unwrap_or_default();
    let mut file = BufReader::new(File::open(path).map_err(unreadable)?);
    let mut rows = Rows { path, number: 0, names, left_out: BTreeSet::new(), visit };
    let broken = |source: ArrowError| Error::Table { path: path.to_owned(), source };
    if begins_with(&mut file, is_lfs_pointer).map_err(unreadable)? {
        return Err(Error::Pointer { path: path.to_owned() });
    }
    match format.to_str() {
        Some("jsonl") => rows.lines(file),
        Some("json") => json_array::each_object(path, after_mark(file).map_err(unreadable)?, rows.visit),
        Some("csv") => csv_file::each_record(path, after_mark(file).map_err(unreadable)?, cells, rows.visit),
        Some("parquet") => {
            let reader = reading(|| parquet_reader(file.into_inner(), &mut rows));
            rows.batches(reader.map_err(broken)?)
        }
        Some("arrow") => {
            let damaged = |problem: String| broken(ArrowError::IpcError(problem));
            if begins_with(&mut file, |start| start.starts_with(ARROW_FILE)).map_err(unreadable)? {
                Lengths::of(file.get_ref()).and_then(|lengths| lengths.check_file()).map_err(damaged)?;
                file.rewind().map_err(unreadable)?;
                rows.batches(reading(|| FileReader::try_new(file, None)).map_err(broken)?)
            } else if ends_with(&mut file, STREAM_END).map_err(unreadable)? {
                Lengths::of(file.get_ref()).and_then(|lengths| lengths.check_stream()).map_err(damaged)?;
                file.rewind().map_err(unreadable)?;
                rows.batches(reading(|| StreamReader::try_new(file, None)).map_err(broken)?)
            } else {
                Err(damaged("it has no end marker: it was truncated, or is not an Arrow stream".into()))
            }
        }
        _ => Err(Error::Format { path: path.to_owned() }),
    }
}

/// Result of a reader, whose panics are errors.
fn reading<T>(read: impl FnOnce() -> Result<T, ArrowError>) -> Result<T, ArrowError> {
    caught(read).unwrap_or_else(|panic| Err(ArrowError::ParseError(format!("the file is damaged: {panic}"))))
}

/// A reader of the columns whose compression is supported.
fn parquet_reader(file: File, rows: &mut Rows) -> Result<ParquetRecordBatchReader, ArrowError> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(file)?;
    let metadata = builder.metadata();
    let is_known = |codec| {
        use Compression::{GZIP, SNAPPY, UNCOMPRESSED, ZSTD};
        matches!(codec, UNCOMPRESSED | SNAPPY | GZIP(_) | ZSTD(_))
    };
    let schema = builder.parquet_schema();
    let chunks = metadata.row_groups().iter().flat_map(|group| group.columns().iter().enumerate());
    let unknown = chunks.filter(|(_, chunk)| !is_known(chunk.compression()));
    let unknown: BTreeSet<usize> = unknown.map(|(leaf, _)| schema.get_column_root_idx(leaf)).collect();
    let fields = schema.root_schema().get_fields();
    let unknown = unknown.into_iter().filter(|root| rows.leave_out(fields[*root].name(), "its compression"));
    let unknown: Vec<usize> = unknown.collect();
    let roots = (0..fields.len()).filter(|root| !unknown.contains(root));
    let mask = ProjectionMask::roots(schema, roots);
    Ok(builder.with_projection(mask).build()?)
}

/// The file after its byte order mark.
fn after_mark(mut file: BufReader<File>) -> io::Result<BufReader<File>> {
    const MARK: &[u8] = "\u{feff}".as_bytes();
    if file.fill_buf()?.starts_with(MARK) {
        file.consume(MARK.len());
    }
    Ok(file)
}

/// A file's first line without a byte order mark.
pub fn without_mark(line: &str) -> &str {
    line.strip_prefix('\u{feff}').unwrap_or(line)
}

/// A reader of a file's rows.
struct Rows<'a> {
    path: &'a Path,
    /// Rows read so far, including empty lines.
    number: usize,
    /// Columns that must be read.
    names: &'a BTreeSet<&'a str>,
    /// Columns that cannot be read, and that nobody names.
    left_out: BTreeSet<String>,
    visit: &'a mut Visit<'a>,
}

impl<'a> Rows<'a> {
    fn lines(&mut self, file: BufReader<File>) -> Result<(), Error> {
        for text in file.lines() {
            self.number += 1;
            let text = text.map_err(|source| match source.kind() {
                io::ErrorKind::InvalidData => self.row("line").error("the line is not UTF-8".to_owned()),
                _ => Error::Read { path: self.path.to_owned(), source },
            })?;
            let text = if self.number == 1 { without_mark(&text) } else { &text };
            if !text.trim().is_empty() {
                let row = self.row("line");
                let Object(object) = serde_json::from_str(text).map_err(|error| {
                    let problem = python_value(text).unwrap_or_else(|| within_line(&error));
                    row.error(format!("the line is not a JSON object: {problem}"))
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
        let mut batches = batches;
        loop {
            let broken = |source| Error::Table { path: self.path.to_owned(), source };
            let batch = reading(|| batches.next().transpose()).map_err(broken)?;
            let Some(batch) = batch else { return Ok(()) };
            for start in (0..batch.num_rows()).step_by(ROWS) {
                let part = batch.slice(start, ROWS.min(batch.num_rows() - start));
                let objects = self.objects(&part);
                let objects =
                    objects.map_err(|source| Error::Table { path: self.path.to_owned(), source })?;
                for object in objects {
                    self.number += 1;
                    let row = self.row("row");
                    (self.visit)(row, object)?;
                }
            }
        }
    }

    /// Rows of a batch, without columns that cannot be converted and that nobody names.
    fn objects(&mut self, batch: &RecordBatch) -> Result<Vec<Map<String, Value>>, ArrowError> {
        let kept = |rows: &Self| -> Result<RecordBatch, ArrowError> {
            let fields = batch.schema_ref().fields().iter().enumerate();
            let kept = fields.filter(|(_, field)| !rows.left_out.contains(field.name()));
            batch.project(&kept.map(|(index, _)| index).collect::<Vec<_>>())
        };
        let error = match reading(|| objects(&kept(&*self)?)) {
            Ok(objects) => return Ok(objects),
            Err(error) => error,
        };
        for (index, field) in batch.schema_ref().fields().iter().enumerate() {
            let column = reading(|| objects(&batch.project(&[index])?));
            if column.is_err_and(|error| !self.leave_out(field.name(), &error.to_string())) {
                return Err(error);
            }
        }
        reading(|| objects(&kept(&*self)?))
    }

    /// Leaves out a column that cannot be read; returns false if somebody names it.
    fn leave_out(&mut self, column: &str, problem: &str) -> bool {
        if self.names.contains(column) {
            return false;
        }
        if self.left_out.insert(column.to_owned()) {
            let path = self.path.display();
            tracing::warn!(column, problem, "{path}: a column cannot be read and is left out");
        }
        true
    }

    /// The current row.
    fn row(&self, kind: &'static str) -> Row<'a> {
        Row { path: self.path, kind, number: self.number, line: self.number }
    }
}

/// Rows of a batch, converted by Arrow's JSON writer since columns may be nested.
fn objects(batch: &RecordBatch) -> Result<Vec<Map<String, Value>>, ArrowError> {
    if batch.num_columns() == 0 {
        return Ok(vec![Map::new(); batch.num_rows()]);
    }
    let batch = &in_utc(batch)?;
    let mut writer = WriterBuilder::new().with_explicit_nulls(true).build::<_, LineDelimited>(Vec::new());
    writer.write(batch)?;
    writer.finish()?;
    let text = writer.into_inner();
    let lines = serde_json::Deserializer::from_slice(&text).into_iter();
    lines.collect::<Result<_, serde_json::Error>>().map_err(|error| ArrowError::JsonError(error.to_string()))
}

/// The batch with times of all zones as the same times in UTC, which needs no list of zones.
fn in_utc(batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    let mut fields = Vec::new();
    let mut columns = Vec::new();
    for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
        let DataType::Timestamp(unit, Some(_)) = field.data_type() else {
            fields.push(field.as_ref().clone());
            columns.push(column.clone());
            continue;
        };
        let utc = DataType::Timestamp(*unit, Some("+00:00".into()));
        fields.push(field.as_ref().clone().with_data_type(utc.clone()));
        columns.push(make_array(column.to_data().into_builder().data_type(utc).build()?));
    }
    RecordBatch::try_new(Schema::new(fields).into(), columns)
}

/// A value of Python's that JSON does not have, with its place in the line.
fn python_value(line: &str) -> Option<String> {
    let (mut is_text, mut is_escaped) = (false, false);
    for (number, (at, char)) in line.char_indices().enumerate() {
        match char {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = is_text,
            '"' => is_text = !is_text,
            _ if is_text => {}
            _ => {
                let value = PYTHON_VALUES.into_iter().find(|value| line[at..].starts_with(value));
                if let Some(value) = value {
                    let place = number + 1;
                    return Some(format!("`{value}` at character {place} is a value of Python, not of JSON"));
                }
            }
        }
    }
    None
}

/// Returns true if `is` holds for the file's first bytes, and rewinds it.
fn begins_with(file: &mut BufReader<File>, is: impl Fn(&[u8]) -> bool) -> io::Result<bool> {
    let mut start = Vec::new();
    file.take(64).read_to_end(&mut start)?;
    file.rewind()?;
    Ok(is(&start))
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
pub(super) mod tests {
    use std::fs;
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;
    use anyroll_config::error_chain::one_line;

    /// A file written by tests/python/make_table_golden.py.
    fn golden(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tables").join(name)
    }

    pub fn rows(path: &Path) -> Result<Vec<(String, Value)>, Error> {
        let mut rows = Vec::new();
        each_row(path, &BTreeSet::from(["prompt"]), &CellTypes::default(), &mut |row, object| {
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
            (r#"{"a": "NaN \" NaN", "b": NaN}"#, "`NaN` at character 26 is a value of Python, not of JSON"),
            (r#"{"b": [1, -Infinity]}"#, "`Infinity` at character 12 is a value of Python, not of JSON"),
            (r#"{"b": None}"#, "`None` at character 7 is a value of Python, not of JSON"),
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
        let other = folder.path().join("verl.tsv");
        fs::write(&other, "a,b").unwrap();
        assert!(matches!(rows(&other), Err(Error::Format { .. })));
    }

    #[test]
    fn a_pointer_of_git_lfs_is_told_as_one() {
        let folder = tempfile::tempdir().unwrap();
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n";
        for name in ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow"] {
            let path = folder.path().join(name);
            fs::write(&path, pointer).unwrap();
            let error = one_line(&rows(&path).unwrap_err());
            assert!(error.contains(name) && error.contains("git lfs pull"), "{error}");
        }
    }

    /// A column of moments in a zone, beside the prompt's.
    fn timed(zone: &str, moments: Vec<i64>) -> RecordBatch {
        let prompts = arrow_array::StringArray::from(vec!["a"; moments.len()]);
        let moments = arrow_array::TimestampMicrosecondArray::from(moments).with_timezone(zone);
        let columns: [(_, arrow_array::ArrayRef); 2] =
            [("prompt", std::sync::Arc::new(prompts)), ("time", std::sync::Arc::new(moments))];
        RecordBatch::try_from_iter(columns).unwrap()
    }

    fn write_arrow(path: &Path, batch: &RecordBatch) {
        let file = File::create(path).unwrap();
        let mut writer = arrow_ipc::writer::FileWriter::try_new(file, batch.schema_ref()).unwrap();
        writer.write(batch).unwrap();
        writer.finish().unwrap();
    }

    #[test]
    fn times_in_zones_by_name_are_the_same_times_in_utc() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.arrow");
        for zone in ["UTC", "Europe/Berlin", "+00:00"] {
            write_arrow(&path, &timed(zone, vec![0]));
            let expected = json!({"prompt": "a", "time": "1970-01-01T00:00:00Z"});
            assert_eq!(rows(&path).unwrap(), [("row 1".to_owned(), expected)], "{zone}");
        }
    }

    #[test]
    fn a_column_that_nobody_names_cannot_refuse_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.arrow");
        // The second moment lies beyond the calendar.
        write_arrow(&path, &timed("UTC", vec![0, i64::MAX]));
        let found = rows(&path).unwrap();
        assert_eq!(found[1], ("row 2".to_owned(), json!({"prompt": "a"})));
        let names = BTreeSet::from(["prompt", "time"]);
        let read = each_row(&path, &names, &CellTypes::default(), &mut |_, _| Ok(()));
        assert!(matches!(read, Err(Error::Table { .. })), "{read:?}");
    }

    /// From a report: a byte of a file's lengths.
    #[test]
    fn lengths_beyond_the_file_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["zstd.arrow", "verl.arrow", "stream.arrow"] {
            let whole = fs::read(golden(name)).unwrap();
            let path = folder.path().join(name);
            for at in (0..whole.len()).step_by(7) {
                let mut damaged = whole.clone();
                damaged[at..(at + 8).min(whole.len())].fill(0x7f);
                fs::write(&path, &damaged).unwrap();
                if let Err(error) = rows(&path) {
                    assert!(one_line(&error).contains(name), "{error}");
                }
            }
        }
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(256))]

        #[test]
        fn a_damaged_table_never_panics(
            file in 0_usize..6,
            damage in proptest::collection::vec((0_usize..1 << 20, proptest::prelude::any::<u8>()), 1..6),
        ) {
            let names = ["verl.parquet", "zstd.parquet", "gzip.parquet", "verl.arrow", "zstd.arrow", "stream.arrow"];
            let folder = tempfile::tempdir().unwrap();
            let mut content = fs::read(golden(names[file])).unwrap();
            for (at, byte) in damage {
                let at = at % content.len();
                content[at] = byte;
            }
            let path = folder.path().join(names[file]);
            fs::write(&path, content).unwrap();
            let _ = rows(&path);
        }
    }
}
