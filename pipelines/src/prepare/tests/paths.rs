//! Relative paths, and names on the hub.

use std::fs;

use tempfile::{NamedTempFile, TempDir, tempdir};

use super::*;
use crate::hub::Hub;

/// Resolves `SMALL` in a file of `folder`, with `data` as its data file.
fn in_folder(folder: &Path, data: &str, sets: &[&str], hub: Hub) -> Result<Run, Error> {
    let file = format!("file: {{path: '{data}', held_out_percent: 50}}");
    let text = SMALL.replace("sort: {digits: 6}", &file);
    let path = folder.join("run.yaml");
    fs::write(&path, text).unwrap();
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    Ok(Draft::read(&path, &sets)?.with_hub(hub).prepare(&machine(), Purpose::Run)?.run)
}

fn data_of(run: &Run) -> &Path {
    let PipelineConfig::Rlvr(rlvr) = &run.config.pipeline else { panic!("another pipeline") };
    let DataConfig::File(file) = &rlvr.data else { panic!("{:?}", rlvr.data) };
    &file.path.0[0]
}

/// A file of the shell's folder, with records.
fn in_shell(records: &str) -> (NamedTempFile, String) {
    let file = tempfile::Builder::new().suffix(".jsonl").tempfile_in(".").unwrap();
    fs::write(file.path(), records).unwrap();
    let name = file.path().file_name().unwrap().to_str().unwrap().to_owned();
    (file, name)
}

fn records(count: usize) -> String {
    (0..count).map(|n| format!("{{\"prompt\": \"p{n}\", \"answer\": {n}}}\n")).collect()
}

#[test]
fn a_relative_path_starts_at_the_configs_folder_else_at_the_shells() {
    let folder = tempdir().unwrap();
    let none = Hub::default;
    let (file, name) = in_shell(&records(40));
    let shell = std::env::current_dir().unwrap();
    assert_eq!(data_of(&in_folder(folder.path(), &name, &[], none()).unwrap()), shell.join(&name));
    fs::write(folder.path().join("own.jsonl"), records(40)).unwrap();
    for path in ["own.jsonl", "./own.jsonl", "o?n.jsonl"] {
        let run = in_folder(folder.path(), path, &[], none()).unwrap();
        assert_eq!(data_of(&run), folder.path().join("own.jsonl"), "{path}");
    }
    // In both folders: refused, unless it is one file, or a `--set`, which is of the shell.
    let copy = folder.path().join(&name);
    fs::write(&copy, records(40)).unwrap();
    let both = only_problem(in_folder(folder.path(), &name, &[], none()).unwrap_err());
    assert_eq!(both.field, "pipeline.rlvr.data.file.path");
    for place in [copy.display().to_string(), shell.join(&name).display().to_string()] {
        assert!(both.message.contains(&place), "{both}");
    }
    let set = format!("pipeline.rlvr.data.file.path={name}");
    assert_eq!(data_of(&in_folder(folder.path(), "own.jsonl", &[&set], none()).unwrap()), shell.join(&name));
    fs::remove_file(&copy).unwrap();
    std::os::unix::fs::symlink(file.path().canonicalize().unwrap(), &copy).unwrap();
    assert_eq!(data_of(&in_folder(folder.path(), &name, &[], none()).unwrap()), copy);
    let set = "pipeline.rlvr.data.file.path=own.jsonl";
    assert_eq!(
        data_of(&in_folder(folder.path(), &name, &[set], none()).unwrap()),
        folder.path().join("own.jsonl")
    );
}

#[test]
fn a_missing_path_says_where_it_was_looked_for() {
    let folder = tempdir().unwrap();
    let shell = std::env::current_dir().unwrap();
    let reward = "pipeline.rlvr.reward=[{python: {path: none.py, function: f}}]";
    for (data, sets, field, name) in [
        ("none.jsonl", &[][..], "pipeline.rlvr.data.file.path", "none.jsonl"),
        ("no-*.jsonl", &[], "pipeline.rlvr.data.file.path", "no-*.jsonl"),
        ("own.jsonl", &["model={path: models/none}"], "model.path", "models/none"),
        ("own.jsonl", &[reward], "pipeline.rlvr.reward[0].python.path", "none.py"),
    ] {
        fs::write(folder.path().join("own.jsonl"), records(40)).unwrap();
        let problem = only_problem(in_folder(folder.path(), data, sets, Hub::default()).unwrap_err());
        assert_eq!(problem.field, field);
        for place in [folder.path(), &shell] {
            let place = place.join(name).display().to_string();
            assert!(problem.message.contains(&place), "{place} is not in {problem}");
        }
    }
    let absolute =
        only_problem(in_folder(folder.path(), "/none/none.jsonl", &[], Hub::default()).unwrap_err());
    assert!(absolute.message.ends_with("there is no file /none/none.jsonl"), "{absolute}");
    let gguf = folder.path().join("model.GGUF");
    fs::write(&gguf, "GGUF").unwrap();
    let set = format!("model={{path: {}}}", gguf.display());
    let problem = only_problem(in_folder(folder.path(), "own.jsonl", &[&set], Hub::default()).unwrap_err());
    assert!(problem.message.contains("model.GGUF is broken"), "{problem}");
}

/// A cache with a model, whose tokenizer and weights are those of the tests, and a data set.
fn cache(files: &[&str]) -> TempDir {
    let cache = tempdir().unwrap();
    for (folder, commit) in [("models--org--tiny", "0a1b"), ("datasets--org--sums", "2c3d")] {
        let folder = cache.path().join(folder);
        fs::create_dir_all(folder.join("refs")).unwrap();
        fs::create_dir_all(folder.join("snapshots").join(commit).join("main")).unwrap();
        fs::write(folder.join("refs/main"), commit).unwrap();
    }
    for entry in fs::read_dir("../tests/golden/tiny_model").unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), cache.path().join("models--org--tiny/snapshots/0a1b").join(entry.file_name()))
            .unwrap();
    }
    for file in files {
        fs::write(cache.path().join("datasets--org--sums/snapshots/2c3d").join(file), records(40)).unwrap();
    }
    cache
}

#[test]
fn models_and_data_are_found_by_name() {
    let folder = tempdir().unwrap();
    let cache = cache(&["main/train.jsonl"]);
    let hub = || Hub { cache: Some(cache.path().to_owned()), downloads: false };
    let model = "model={path: org/tiny, chat: false}";
    let longest = "pipeline.rlvr.rollout.max_new_tokens=16";
    for data in
        ["org/sums", "org/sums/main/train.jsonl", "org/sums/main/t*.jsonl", "org/sums@2c3d/main/train.jsonl"]
    {
        let run = in_folder(folder.path(), data, &[model, longest], hub()).unwrap();
        let ModelConfig::Folder(found) = &run.config.model else { panic!("another model") };
        assert_eq!(found.path, cache.path().join("models--org--tiny/snapshots/0a1b"));
        let file = cache.path().join("datasets--org--sums/snapshots/2c3d/main/train.jsonl");
        assert_eq!(data_of(&run), file, "{data}");
    }
    let refused =
        |data: &str, sets: &[&str]| only_problem(in_folder(folder.path(), data, sets, hub()).unwrap_err());
    let problem = refused("org/sums", &["model={path: org/other@v2}"]);
    assert!(problem.message.contains("the model org/other at v2 is not in the hub's cache"), "{problem}");
    assert!(problem.help.contains("`hf download org/other --revision v2`"), "{problem}");
    let problem = refused("org/none/a.jsonl", &[model]);
    assert!(problem.help.contains("`hf download org/none --repo-type dataset`"), "{problem}");
    let problem = refused("org/sums/other.jsonl", &[model]);
    assert!(
        problem.message.contains("there is no .jsonl, .json, .csv, .parquet or .arrow file at "),
        "{problem}"
    );
    fs::write(cache.path().join("datasets--org--sums/snapshots/2c3d/test.jsonl"), records(1)).unwrap();
    let problem = refused("org/sums", &[model]);
    assert!(problem.message.contains("several files: main/train.jsonl, test.jsonl"), "{problem}");
    // A folder of this name comes first.
    fs::create_dir_all(folder.path().join("org/tiny")).unwrap();
    let problem = refused("org/sums/main/train.jsonl", &[model]);
    assert!(!problem.message.contains("hub"), "{problem}");
}
