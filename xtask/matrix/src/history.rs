//! Results of cells on this checkout: `runs/matrix/history.jsonl`, one line per run of a cell.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::Path;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::Result;

/// Folder in the checkout for the runs and results of cells.
pub const FOLDER: &str = "runs/matrix";
const FILE: &str = "history.jsonl";

/// Result of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It passed.
    Passed,
    /// It failed.
    Failed,
    /// Its hardware is missing.
    NotRun,
}

/// One run of a cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Name of the cell.
    pub cell: String,
    /// Result.
    pub status: Status,
    /// Reason why it failed or was not run; empty if it passed.
    pub reason: String,
    /// Start time: `2026-01-31T12:00:00Z`.
    pub at: String,
    /// Duration in seconds.
    pub elapsed_s: f64,
    /// Largest distance from the golden curves, as a fraction of the tolerance.
    pub of_tolerance: Option<f64>,
    /// Name of the device.
    pub device: Option<String>,
    /// True if the device was a shim, so that the result says nothing about hardware.
    pub shims: bool,
    /// The checked-out commit, with a `+` if files were changed.
    pub commit: String,
}

impl Entry {
    /// Creates the entry before a cell starts.
    pub fn new(cell: &str, device: Option<&str>, shims: bool, commit: &str) -> Self {
        Self {
            cell: cell.to_owned(),
            status: Status::NotRun,
            reason: String::new(),
            at: Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            elapsed_s: 0.0,
            of_tolerance: None,
            device: device.map(str::to_owned),
            shims,
            commit: commit.to_owned(),
        }
    }

    /// Returns the start time, to the minute.
    pub fn when(&self) -> String {
        self.at.chars().take("2026-01-31T12:00".len()).map(|it| if it == 'T' { ' ' } else { it }).collect()
    }

    /// Returns the result as a line.
    pub fn line(&self) -> String {
        match self.status {
            Status::NotRun => format!("not run: {}", one_line(&self.reason)),
            Status::Failed => format!("FAILED after {:.1} s: {}", self.elapsed_s, one_line(&self.reason)),
            Status::Passed => {
                let distance = self.of_tolerance.map(|part| format!(", {part:.4} of its tolerance"));
                let place = if self.shims { ", on shims" } else { "" };
                format!("passed in {:.1} s{}{place}", self.elapsed_s, distance.unwrap_or_default())
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn sample(cell: &str, status: Status) -> Self {
        Self { status, reason: "because".into(), ..Self::new(cell, Some("a GPU"), false, "0123456789") }
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Appends a line at once, so that cells may run in parallel.
pub fn append(root: &Path, entry: &Entry) -> Result<()> {
    let folder = root.join(FOLDER);
    let line = serde_json::to_string(entry).expect("plain data") + "\n";
    fs::create_dir_all(&folder)
        .and_then(|()| OpenOptions::new().create(true).append(true).open(folder.join(FILE)))
        .and_then(|mut file| file.write_all(line.as_bytes()))
        .map_err(|error| format!("cannot write {}: {error}", folder.join(FILE).display()))
}

/// Reads the history of this checkout; empty if there is none.
pub fn read_own(root: &Path) -> Result<Vec<Entry>> {
    let path = root.join(FOLDER).join(FILE);
    match fs::metadata(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        _ => read(&path),
    }
}

/// Reads the lines of a history.
pub fn read(path: &Path) -> Result<Vec<Entry>> {
    let text =
        fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let numbered = text.lines().enumerate();
    numbered
        .map(|(index, line)| {
            serde_json::from_str(line)
                .map_err(|error| format!("{}:{}: not a result of a cell: {error}", path.display(), index + 1))
        })
        .collect()
}

/// Sorts entries by time and removes duplicates, since histories of several machines may overlap.
pub fn sort(entries: &mut Vec<Entry>) {
    entries.sort_by(|a, b| (&a.at, &a.cell).cmp(&(&b.at, &b.cell)));
    entries.dedup();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_appended_is_read_back_in_order_and_once() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read_own(folder.path()), Ok(Vec::new()));
        let (mut first, second) = (Entry::sample("a", Status::Failed), Entry::sample("b", Status::NotRun));
        first.of_tolerance = Some(1.5);
        for entry in [&second, &first, &second] {
            append(folder.path(), entry).unwrap();
        }
        let mut entries = read_own(folder.path()).unwrap();
        sort(&mut entries);
        assert_eq!(entries, [first, second]);
        let path = folder.path().join("other");
        fs::write(&path, "{}\n").unwrap();
        assert!(read(&path).unwrap_err().contains("other:1: not a result of a cell"));
    }

    #[test]
    fn a_pass_on_shims_says_so() {
        let entry = Entry { of_tolerance: Some(0.25), ..Entry::sample("a", Status::Passed) };
        assert_eq!(entry.line(), "passed in 0.0 s, 0.2500 of its tolerance");
        assert!(Entry { shims: true, ..entry }.line().ends_with(", on shims"));
        assert_eq!(Entry::sample("a", Status::NotRun).line(), "not run: because");
    }
}
