//! Paths of a config: made absolute, or found in the hub's cache.
//!
//! A relative path starts at the config's folder, else at the shell's; in a `--set`, at the shell's folder, else at the
//! config's. A path that is there twice, as two files, is refused.

use std::path::{Path, PathBuf};

use anyroll_config::{Config, PathKind, Section};
use anyroll_data::{FORMATS, is_data, is_table};

use crate::hub::{Hub, Name};

/// Help for a model that is not there.
const GIVE_MODEL: &str = "give the folder of a model as Hugging Face publishes it and `anyroll export` writes it, or its \
                          name there, such as `Qwen/Qwen2.5-0.5B-Instruct`; docs/guides/models.md has the families";

/// Help for data that are not there.
pub(super) fn give_data() -> String {
    format!("give the path of a {FORMATS} file; a relative one starts at the config's folder")
}

/// Makes all paths of `config` absolute, whose file is in `folder`. Reports those that are not there.
pub(super) fn locate(config: &mut Config, folder: &Path, hub: &Hub, at: &Section) {
    let shell = absolute(Path::new(""));
    let folder = absolute(folder);
    // The files of data with a problem are not looked for.
    let data_is_sound = ["rlvr", "offline"].iter().all(|name| at.is_sound(&format!("pipeline.{name}.data")));
    config.each_path(&mut |field, kind, path| {
        let is_name = kind == PathKind::Program && path.components().count() < 2;
        // Items after one that could not be read have other indices.
        let list = field.split('[').next().unwrap_or_default();
        let is_placed = list == field || at.below(list).has_all_items();
        let is_moot = kind == PathKind::Data && !data_is_sound;
        if is_name || path.as_os_str().is_empty() || !at.is_read(field) || !is_placed || is_moot {
            return;
        }
        let places = match at.is_of_set(field) {
            true => [&*shell, &*folder],
            false => [&*folder, &*shell],
        };
        if let Some(found) = find(path, kind, places, field, hub, at) {
            *path = found;
        }
    });
}

/// Returns the absolute path; `None` after reporting a problem of `field`.
fn find(
    path: &Path,
    kind: PathKind,
    places: [&Path; 2],
    field: &str,
    hub: &Hub,
    at: &Section,
) -> Option<PathBuf> {
    let is_there = |path: &Path| if kind == PathKind::Data { is_data(path) } else { path.exists() };
    let [first, second] = places.map(|place| absolute(&place.join(path)));
    match (is_there(&first), is_there(&second)) {
        (true, true) if !at.is_of_set(field) && !are_same(&first, &second) => {
            let message = format!(
                "`{}` is both {}, in the config's folder, and {}, in the shell's",
                path.display(),
                first.display(),
                second.display()
            );
            at.refuse(field, message, "write the whole path, or start in the config's folder");
            return None;
        }
        (true, _) => return Some(first),
        (false, true) => return Some(second),
        (false, false) => {}
    }
    let looked = match first == second {
        true => first.display().to_string(),
        false => format!("{} and {}", first.display(), second.display()),
    };
    let missing = |what: &str| match path.is_absolute() {
        true => format!("there is no {what} {}", path.display()),
        false => format!("there is no {what} {}; looked for {looked}", path.display()),
    };
    match kind {
        PathKind::Model => of_hub(Name::of_model(path), &missing("folder"), GIVE_MODEL, field, hub, at),
        PathKind::Data => {
            let help = give_data();
            let found = of_hub(Name::of_data(path), &missing("file"), &help, field, hub, at)?;
            data_of_snapshot(found, field, at)
        }
        PathKind::Adapter => {
            at.refuse(field, missing("adapter"), "give the folder of an adapter");
            None
        }
        PathKind::File => {
            at.refuse(field, missing("file"), "give its path; a relative one starts at the config's folder");
            None
        }
        PathKind::Program => {
            at.refuse(field, missing("program"), "give its path, or a name that is in PATH");
            None
        }
    }
}

/// Returns the path of `name` in the hub's cache; `None` after reporting that there is neither a file, which `missing`
/// says, nor this.
fn of_hub(
    name: Option<Name>,
    missing: &str,
    help: &str,
    field: &str,
    hub: &Hub,
    at: &Section,
) -> Option<PathBuf> {
    let Some(name) = name else {
        at.refuse(field, missing, help);
        return None;
    };
    let help =
        format!("fetch it with `{}`, or run this command with `--download`; else {help}", name.command());
    at.take(hub.find(&name), field, |problem| format!("{missing}, and {problem}"), help)
}

/// Returns the file or pattern of files in a data set's snapshot; the only data file if the snapshot itself is named.
/// JSON files count only where there are no others, since data sets have facts on themselves in such files.
fn data_of_snapshot(found: PathBuf, field: &str, at: &Section) -> Option<PathBuf> {
    if !found.is_dir() && is_data(&found) {
        return Some(found);
    }
    let (json, mut all): (Vec<_>, Vec<_>) =
        data_files(&found).into_iter().partition(|path| path.extension().is_some_and(|it| it == "json"));
    if all.is_empty() {
        all = json;
    }
    if let ([only], true) = (&all[..], found.is_dir()) {
        return Some(only.clone());
    }
    let within = |path: &PathBuf| path.strip_prefix(&found).unwrap_or(path).display().to_string();
    let names: Vec<String> = all.iter().take(8).map(within).collect();
    let message = match names.is_empty() {
        true => format!("there is no {FORMATS} file at {}", found.display()),
        false => format!("the data set has several files: {}", names.join(", ")),
    };
    at.refuse(field, message, "name the files after the data set's name: `ORG/NAME/train-*.parquet`");
    None
}

/// Data files below `folder`, sorted.
fn data_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    let has_records =
        |path: &Path| is_table(path) || path.extension().is_some_and(|ending| ending == "jsonl");
    let below = |path: PathBuf| match path.is_dir() {
        true => data_files(&path),
        false => {
            if has_records(&path) {
                vec![path]
            } else {
                Vec::new()
            }
        }
    };
    paths.into_iter().flat_map(below).collect()
}

/// Returns true if both are one file or folder; of patterns, if both are in one folder.
fn are_same(first: &Path, second: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().or_else(|_| path.parent().unwrap_or(path).canonicalize());
    matches!((real(first), real(second)), (Ok(first), Ok(second)) if first == second)
}

fn absolute(path: &Path) -> PathBuf {
    let current = || std::env::current_dir().unwrap_or_default();
    let path = if path.is_absolute() { path.to_owned() } else { current().join(path) };
    // Without `.` parts; `..` stays, since a part before it may be a link.
    path.components().collect()
}
