//! `log.jsonl`: the lines that a run prints, and how each start of it ended.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::output_error::{OutputError, Result};

/// A line of `log.jsonl`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// Time in UTC, to the second.
    pub time: String,
    /// Meaning for the state of the run.
    pub kind: LogKind,
    /// Text as printed, without colours.
    pub text: String,
}

/// Meaning of a line for the state of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogKind {
    /// A process began or resumed the run; the text describes the run.
    Start,
    /// A line for people.
    Line,
    /// All steps are done.
    Finished,
    /// A signal ended the run, which may be resumed.
    Interrupted,
    /// An error ended the run.
    Failed,
}

/// The log of a run, open for appending.
#[derive(Debug)]
pub struct RunLog {
    file: File,
}

impl RunLog {
    /// Opens the log, which a resumed run continues.
    ///
    /// # Errors
    /// If the file cannot be opened or written.
    pub fn open(path: &Path) -> Result<RunLog> {
        let open = || {
            let mut file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
            // A killed process may have left a part of a line.
            if file.metadata()?.len() > 0 {
                let mut last = [0];
                file.seek(SeekFrom::End(-1))?;
                file.read_exact(&mut last)?;
                if last != *b"\n" {
                    file.write_all(b"\n")?;
                }
            }
            Ok(RunLog { file })
        };
        open().map_err(|source| OutputError::io("open", path, source))
    }

    /// Appends `text` with the present time.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn append(&mut self, kind: LogKind, text: &str) -> io::Result<()> {
        let now =
            Timestamp::from_second(Timestamp::now().as_second()).expect("the present second is in range");
        let text = without_colours(text).trim_end().to_owned();
        let line = LogLine { time: now.to_string(), kind, text };
        let mut bytes = serde_json::to_vec(&line).expect("a line is plain text");
        bytes.push(b'\n');
        self.file.write_all(&bytes)
    }
}

/// Removes a terminal's escape sequences, which end with a letter.
fn without_colours(text: &str) -> String {
    let mut parts = text.split("\u{1b}[");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |plain, part| {
        let end = part.find(|it: char| it.is_ascii_alphabetic()).map_or(part.len(), |at| at + 1);
        plain + &part[end..]
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn lines_have_a_time_and_no_colours_and_a_torn_line_spoils_one_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        RunLog::open(&path).unwrap().append(LogKind::Start, "GRPO").unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"time\":\"20").unwrap();
        let mut log = RunLog::open(&path).unwrap();
        log.append(LogKind::Line, "\u{1b}[33m WARN\u{1b}[0m two\nlines\n").unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<Option<LogLine>> = text.lines().map(|line| serde_json::from_str(line).ok()).collect();
        let [Some(first), None, Some(last)] = &lines[..] else { panic!("{text}") };
        assert_eq!((first.kind, first.text.as_str()), (LogKind::Start, "GRPO"));
        assert_eq!((last.kind, last.text.as_str()), (LogKind::Line, " WARN two\nlines"));
        assert!(last.time.parse::<Timestamp>().is_ok() && last.time.ends_with('Z'), "{}", last.time);
    }
}
