//! Mistakes of first-time users: each message has its place, its cause and its fix, and comes before a device is opened.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Mutex;
use std::thread;

use serde::Deserialize;
use serde_json::json;

use super::{anyroll, finish, published_model};

const CONFIG: &str = include_str!("mistakes/run.yaml");
const TABLE: &str = include_str!("mistakes/mistakes.yaml");
const REWARD: &str = "def number(completions, answer):\n    return [1.0]\n";
/// Commands that run at a time.
const WORKERS: usize = 2;

/// One row of the table, whose head explains the fields.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Mistake {
    mistake: String,
    from: Option<String>,
    to: Option<String>,
    #[serde(default)]
    files: BTreeMap<String, String>,
    /// Lines of data.jsonl, by their number from 1.
    #[serde(default)]
    lines: BTreeMap<usize, String>,
    args: Option<Vec<String>>,
    code: Option<i32>,
    place: String,
    cause: String,
    fix: String,
}

impl Mistake {
    /// Writes what a run needs into `folder`, with this mistake.
    fn write(&self, folder: &Path) {
        symlink(fs::canonicalize(published_model::model()).unwrap(), folder.join("model")).unwrap();
        let line = |number: u32| json!({"question": format!("What is {number} + 1?"), "answer": (number + 1).to_string()});
        let mut lines: Vec<String> = (0..200).map(|number| line(number).to_string()).collect();
        for (number, text) in &self.lines {
            lines[number - 1].clone_from(text);
        }
        let from = self.from.as_deref().unwrap_or_default();
        assert!(CONFIG.contains(from), "{}: run.yaml has no {from:?}", self.mistake);
        let config = match &self.to {
            Some(to) => CONFIG.replace(from, to),
            None => CONFIG.to_owned(),
        };
        let usual =
            [("data.jsonl", lines.join("\n") + "\n"), ("reward.py", REWARD.into()), ("run.yaml", config)];
        let usual = usual.map(|(name, text)| (name.to_owned(), text));
        for (name, text) in usual.into_iter().chain(self.files.clone()) {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    /// Makes the mistake, and returns the shortcomings of its message.
    fn shortcomings(&self) -> Option<String> {
        let folder = tempfile::tempdir().unwrap();
        self.write(folder.path());
        let usual = || ["check", "run.yaml"].map(str::to_owned).to_vec();
        let mut command = anyroll(self.args.clone().unwrap_or_else(usual));
        command.current_dir(folder.path()).env("HF_HUB_CACHE", folder.path().join("cache"));
        let ended = finish(command);
        let parts = [("place", &self.place), ("cause", &self.cause), ("fix", &self.fix)];
        let missing: Vec<_> = parts
            .into_iter()
            .filter(|(_, words)| words.is_empty() || !ended.stderr.contains(words.as_str()))
            .collect();
        let is_right = missing.is_empty() && ended.code == Some(self.code.unwrap_or(1));
        (!is_right).then(|| format!("{}: no {missing:?} in {ended:#?}", self.mistake))
    }
}

#[test]
fn every_message_has_its_place_its_cause_and_its_fix() {
    let table: Vec<Mistake> = serde_saphyr::from_str(TABLE).unwrap();
    assert!(table.len() >= 55, "{} mistakes", table.len());
    let rows = Mutex::new(table.iter());
    let found = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                loop {
                    let Some(row) = rows.lock().unwrap().next() else { break };
                    found.lock().unwrap().extend(row.shortcomings());
                }
            });
        }
    });
    let found = found.into_inner().unwrap();
    assert!(found.is_empty(), "{} of {}:\n{}", found.len(), table.len(), found.join("\n"));
}

/// The usual folder has no mistake, so that each row's error is its own.
#[test]
fn the_folder_of_the_table_has_no_mistake() {
    let table: Vec<Mistake> = serde_saphyr::from_str(TABLE).unwrap();
    let row = table.iter().find(|row| row.args.is_some() && row.files.is_empty()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    row.write(folder.path());
    let mut command = anyroll(["check", "run.yaml"]);
    command.current_dir(folder.path());
    super::succeed(command);
}
