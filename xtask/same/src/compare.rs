//! Comparison of two run folders.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::Result;

/// Prefixes of metrics that differ between any two runs.
const FREE: [&str; 2] = ["time/", "perf/"];

/// Result of comparing two runs' checkpoints.
pub enum Checkpoints {
    /// All files are equal.
    Equal,
    /// The first difference, in words.
    Differ(String),
}

/// Returns the differences between the resolved configs, the metrics and the samples; the first one of each
/// file.
pub fn folders(old: &Path, new: &Path) -> Result<Vec<String>> {
    let mut all: Vec<String> =
        files(&old.join("resolved.yaml"), &new.join("resolved.yaml"))?.into_iter().collect();
    let records = |folder: &Path| records(&folder.join("metrics.jsonl"));
    all.extend(metrics(&records(old)?, &records(new)?));
    if old.join("samples.jsonl").exists() || new.join("samples.jsonl").exists() {
        all.extend(files(&old.join("samples.jsonl"), &new.join("samples.jsonl"))?);
    }
    Ok(all)
}

/// Returns the first line in which two files differ, or the first byte if a file is not text.
pub fn files(old: &Path, new: &Path) -> Result<Option<String>> {
    let (before, after) = (read(old)?, read(new)?);
    if before == after {
        return Ok(None);
    }
    let name = new.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Some(match (str::from_utf8(&before), str::from_utf8(&after)) {
        (Ok(before), Ok(after)) => format!("{name} {}", lines(before, after)),
        _ => format!("{name} byte {}", before.iter().zip(&after).take_while(|(a, b)| a == b).count()),
    }))
}

fn lines(before: &str, after: &str) -> String {
    let (mut old, mut new) = (before.lines(), after.lines());
    for number in 1.. {
        match (old.next(), new.next()) {
            (old, new) if old != new => {
                let shown =
                    |line: Option<&str>| line.map_or("its end".to_owned(), |it| format!("`{}`", it.trim()));
                return format!("line {number}: {} became {}", shown(old), shown(new));
            }
            (None, None) => break,
            _ => {}
        }
    }
    "differs only in its line ends".to_owned()
}

/// Returns the records of a metrics file, one per line.
fn records(path: &Path) -> Result<Vec<Map<String, Value>>> {
    let text = String::from_utf8_lossy(&read(path)?).into_owned();
    let record =
        |line: &str| serde_json::from_str(line).map_err(|error| format!("{}: {error}", path.display()));
    text.lines().map(record).collect()
}

/// Returns the first difference of metrics that must be equal.
fn metrics(old: &[Map<String, Value>], new: &[Map<String, Value>]) -> Option<String> {
    if old.len() != new.len() {
        return Some(format!("metrics.jsonl has {} records, it had {}", new.len(), old.len()));
    }
    old.iter().zip(new).find_map(|(old, new)| {
        let is_promised = |name: &&String| !FREE.iter().any(|free| name.starts_with(free));
        let names: BTreeSet<&String> = old.keys().chain(new.keys()).filter(is_promised).collect();
        let name = names.into_iter().find(|name| old.get(*name) != new.get(*name))?;
        let shown = |value: Option<&Value>| value.map_or("nothing".to_owned(), Value::to_string);
        let step = shown(old.get("step"));
        Some(format!("step {step}, {name}: {} became {}", shown(old.get(name)), shown(new.get(name))))
    })
}

/// Compares all files of all checkpoints.
pub fn checkpoints(old: &Path, new: &Path) -> Result<Checkpoints> {
    let (before, after) = (below(&old.join("checkpoints"))?, below(&new.join("checkpoints"))?);
    if let Some(file) = before.symmetric_difference(&after).next() {
        return Ok(Checkpoints::Differ(format!("only one has checkpoints/{}", file.display())));
    }
    for file in before {
        let path = |side: &Path| side.join("checkpoints").join(&file);
        if read(&path(old))? != read(&path(new))? {
            return Ok(Checkpoints::Differ(format!("checkpoints/{} differs", file.display())));
        }
    }
    Ok(Checkpoints::Equal)
}

/// Returns all files below `folder`, as relative paths.
fn below(folder: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut open = vec![PathBuf::new()];
    let mut files = BTreeSet::new();
    while let Some(at) = open.pop() {
        let path = folder.join(&at);
        let entries =
            fs::read_dir(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        for entry in entries {
            let entry = entry.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
            let to = at.join(entry.file_name());
            match entry.path().is_dir() {
                true => open.push(to),
                false => drop(files.insert(to)),
            }
        }
    }
    Ok(files)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(metrics: &str, shard: &[u8]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let step = folder.path().join("checkpoints/step_000001");
        fs::create_dir_all(&step).unwrap();
        fs::write(step.join("rank_0000.bin"), shard).unwrap();
        fs::write(folder.path().join("resolved.yaml"), "seed: 0\n").unwrap();
        fs::write(folder.path().join("metrics.jsonl"), metrics).unwrap();
        folder
    }

    fn differences(old: &str, new: &str) -> Vec<String> {
        folders(folder(old, b"").path(), folder(new, b"").path()).unwrap()
    }

    #[test]
    fn times_may_differ_and_losses_may_not() {
        let old = r#"{"step":0,"loss":0.1,"time/step_s":1.0}"#;
        assert!(differences(old, r#"{"step":0,"loss":0.1,"time/step_s":2.0}"#).is_empty());
        // One bit.
        let bit = r#"{"step":0,"loss":0.10000000000000002,"time/step_s":1.0}"#;
        assert_eq!(differences(old, bit), ["step 0, loss: 0.1 became 0.10000000000000002"]);
        assert_eq!(differences(old, r#"{"step":0,"time/step_s":1}"#), ["step 0, loss: 0.1 became nothing"]);
        assert_eq!(differences(old, ""), ["metrics.jsonl has 0 records, it had 1"]);
    }

    #[test]
    fn a_line_of_a_config_is_shown() {
        let (old, new) = (folder("", b""), folder("", b""));
        fs::write(new.path().join("resolved.yaml"), "seed: 1\n").unwrap();
        let found = folders(old.path(), new.path()).unwrap();
        assert_eq!(found, ["resolved.yaml line 1: `seed: 0` became `seed: 1`"]);
    }

    #[test]
    fn a_bit_of_a_shard_and_a_missing_one_are_found() {
        let (old, new) = (folder("", &[1, 2]), folder("", &[1, 3]));
        let found = |new: &Path| match checkpoints(old.path(), new).unwrap() {
            Checkpoints::Equal => String::new(),
            Checkpoints::Differ(reason) => reason,
        };
        assert_eq!(found(old.path()), "");
        assert_eq!(found(new.path()), "checkpoints/step_000001/rank_0000.bin differs");
        fs::remove_file(new.path().join("checkpoints/step_000001/rank_0000.bin")).unwrap();
        assert_eq!(found(new.path()), "only one has checkpoints/step_000001/rank_0000.bin");
    }
}
