//! Logs with one JSON object per line, ordered by step; used for metrics and samples.
//!
//! A killed process can leave a last line without its newline. Such a line was never acknowledged: readers
//! skip it, and resuming removes it. Any other line that does not parse is an error.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::atomic_file::write_atomic;
use crate::output_error::{OutputError, Result};

/// Step of a log's last whole line; `None` without one.
///
/// # Errors
/// If the file exists and cannot be read, or a line has no step.
pub fn last_step(path: &Path) -> Result<Option<u64>> {
    let mut last = None;
    if path.exists() {
        each(path, |line: Stamp| last = Some(line.step))?;
    }
    Ok(last)
}

/// The step that every line has.
#[derive(Deserialize)]
struct Stamp {
    step: u64,
}

/// An open log. Every append is one write of a whole line, so that appended lines survive the process.
#[derive(Debug)]
pub struct JsonLines {
    path: PathBuf,
    file: File,
}

impl JsonLines {
    /// Starts an empty log; the file must not exist.
    pub fn create(path: &Path) -> Result<JsonLines> {
        let file = OpenOptions::new().append(true).create_new(true).open(path);
        let file = file.map_err(|source| OutputError::io("create", path, source))?;
        Ok(JsonLines { path: path.to_owned(), file })
    }

    /// Continues a log with `next_step`. Lines of that step and later ones are removed, since they will be
    /// written again.
    pub fn resume(path: &Path, next_step: u64) -> Result<JsonLines> {
        // A run that ended before its first step may have no log.
        let text = if next_step == 0 && !path.exists() { String::new() } else { read_text(path)? };
        let mut kept = String::with_capacity(text.len());
        for (number, line) in complete_lines(&text).enumerate() {
            let stamp: Stamp = parse(path, number, line.as_bytes())?;
            if stamp.step < next_step {
                kept.push_str(line);
            }
        }
        write_atomic(path, kept.as_bytes())?;
        let file = OpenOptions::new().append(true).open(path);
        let file = file.map_err(|source| OutputError::io("open", path, source))?;
        Ok(JsonLines { path: path.to_owned(), file })
    }

    /// Appends `record` as a line.
    pub fn append(&mut self, record: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(record).expect("records have string keys and plain values");
        line.push(b'\n');
        self.file.write_all(&line).map_err(|source| OutputError::io("append to", &self.path, source))
    }

    /// Flushes all lines to disk, so that they survive a crash of the machine.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|source| OutputError::io("flush", &self.path, source))
    }
}

/// All records of a log, in order. The log may still be growing.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let mut records = Vec::new();
    each(path, |record| records.push(record))?;
    Ok(records)
}

/// Visits the records of a log, in order, one in memory at a time. The log may still be growing.
pub fn each<T: DeserializeOwned>(path: &Path, mut visit: impl FnMut(T)) -> Result<()> {
    let file = File::open(path).map_err(|source| OutputError::io("read", path, source))?;
    let mut file = BufReader::new(file);
    let mut line = Vec::new();
    for number in 0.. {
        line.clear();
        file.read_until(b'\n', &mut line).map_err(|source| OutputError::io("read", path, source))?;
        if !line.ends_with(b"\n") {
            break;
        }
        visit(parse(path, number, &line)?);
    }
    Ok(())
}

fn read_text(path: &Path) -> Result<String> {
    let mut bytes = fs::read(path).map_err(|source| OutputError::io("read", path, source))?;
    // An incomplete last line may end inside a character.
    bytes.truncate(bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1));
    let invalid =
        |source| OutputError::io("read", path, std::io::Error::new(std::io::ErrorKind::InvalidData, source));
    String::from_utf8(bytes).map_err(invalid)
}

/// The complete lines, with their newlines.
fn complete_lines(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive('\n')
}

fn parse<'a, T: Deserialize<'a>>(path: &Path, number: usize, line: &'a [u8]) -> Result<T> {
    let malformed = |source| OutputError::Malformed { path: path.to_owned(), line: number + 1, source };
    serde_json::from_slice(line).map_err(malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(path: &Path) -> Vec<u64> {
        read::<serde_json::Value>(path).unwrap().iter().map(|line| line["step"].as_u64().unwrap()).collect()
    }

    #[test]
    fn resuming_drops_later_steps_and_a_torn_line() {
        let folder = tempfile::tempdir().unwrap();
        let check = |text: &[u8], next_step: u64, kept: &[u64]| {
            let path = folder.path().join("log.jsonl");
            fs::write(&path, text).unwrap();
            let mut log = JsonLines::resume(&path, next_step).unwrap();
            assert_eq!(steps(&path), kept);
            log.append(&serde_json::json!({"step": 9})).unwrap();
            assert_eq!(steps(&path), [kept, &[9]].concat());
        };
        let lines = b"{\"step\":0}\n{\"step\":1}\n{\"step\":2}\n";
        check(lines, 3, &[0, 1, 2]);
        check(lines, 2, &[0, 1]);
        check(lines, 0, &[]);
        check(lines, 8, &[0, 1, 2]);
        check(b"", 3, &[]);
        check(b"{\"step\":0}\n{\"ste", 3, &[0]);
        // Torn within a character, and torn just before the newline.
        check(b"{\"step\":0}\n{\"step\":1,\"text\":\"\xe2\x82", 3, &[0]);
        check(b"{\"step\":0}\n{\"step\":1}", 3, &[0]);
    }

    #[test]
    fn reading_skips_only_a_torn_last_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        fs::write(&path, "{\"step\":0}\n{\"st").unwrap();
        assert_eq!(steps(&path), [0]);
        fs::write(&path, "{\"step\":0}\n{\"st\n{\"step\":2}\n").unwrap();
        let error = read::<serde_json::Value>(&path).unwrap_err();
        assert!(matches!(&error, OutputError::Malformed { line: 2, .. }), "{error}");
    }

    #[test]
    fn a_new_log_never_overwrites() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        JsonLines::create(&path).unwrap();
        assert!(JsonLines::create(&path).is_err());
    }
}
