//! Paths of a config that is run from other folders, and models and data by their names on the hub.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{anyroll, assert_same, fail, finish, interrupt, published_model, resume, succeed};

/// A config beside its data and its reward, named by relative paths.
fn with_data(folder: &Path) {
    let line =
        |number: u32| json!({"prompt": format!("{number:03}>"), "answer": number % 10}).to_string() + "\n";
    fs::write(folder.join("sums.jsonl"), (0..200).map(line).collect::<String>()).unwrap();
    let reward = "def share(completions, answer):\n    return [len(completions[0]) / 4 + (completions[0][:1] == answer[0])]\n";
    fs::write(folder.join("reward.py"), reward).unwrap();
    let config = "\
name: beside
backend: cpu
model: {decoder: {hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32, max_length: 16}}
strategy: {micro_batch_size: 8}
pipeline:
  rlvr:
    data: {file: {path: sums.jsonl, held_out_percent: 20}}
    reward: {python: {path: reward.py, function: share}}
    steps: 60
    prompts_per_step: 8
    group_size: 4
    rollout: {max_new_tokens: 4, batch_size: 32}
    evaluation: {every: 20, prompts: 8}
    checkpoint: {every: 10}
    optimizer: {adamw: {learning_rate: 1.0e-3}}
";
    fs::write(folder.join("run.yaml"), config).unwrap();
}

/// Paths are of the config's folder, and a resumed run finds them from a third folder, with the same bits.
#[test]
fn a_config_runs_and_resumes_from_any_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (own, other) = (folder.path().join("own"), folder.path().join("other"));
    [&own, &other].iter().for_each(|folder| fs::create_dir(folder).unwrap());
    with_data(&own);
    let run = |from: &Path, config: &str, run: &Path| {
        let mut command = anyroll(["run", config, "--output", run.to_str().unwrap()]);
        command.current_dir(from);
        command
    };
    let whole = folder.path().join("whole");
    succeed(run(&own, "run.yaml", &whole));
    let part = folder.path().join("part");
    interrupt(run(&other, "../own/run.yaml", &part), &part, 15);
    succeed(resume(&part));
    assert_same(&whole, &part);

    // A file of this name in the shell's folder makes the path ambiguous.
    fs::copy(own.join("sums.jsonl"), other.join("sums.jsonl")).unwrap();
    let error = fail(run(&other, "../own/run.yaml", &folder.path().join("none")));
    assert!(error.contains("`sums.jsonl` is both ") && error.contains("other/sums.jsonl"), "{error}");
}

/// Puts the tiny model into the cache as `org/tiny`, without weights if `shape_only`.
fn fill(cache: &Path, shape_only: bool) -> PathBuf {
    let folder = cache.join("models--org--tiny");
    let snapshot = folder.join("snapshots/0a1b2c");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(folder.join("refs")).unwrap();
    fs::write(folder.join("refs/main"), "0a1b2c").unwrap();
    for entry in fs::read_dir(published_model::model()).unwrap() {
        let entry = entry.unwrap();
        if !shape_only || entry.path().extension().is_none_or(|ending| ending != "safetensors") {
            fs::copy(entry.path(), snapshot.join(entry.file_name())).unwrap();
        }
    }
    snapshot
}

fn in_cache<'a>(cache: &Path, args: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = anyroll(args);
    command.env("HF_HUB_CACHE", cache);
    command
}

const PROMPT: [&str; 4] = ["--prompt", "12 + 34", "--temperature", "0"];

#[test]
fn a_model_is_found_by_its_name() {
    let cache = tempfile::tempdir().unwrap();
    let generate = |model: &str| in_cache(cache.path(), ["generate", model].into_iter().chain(PROMPT));
    let error = fail(generate("org/tiny"));
    assert!(error.contains("the model org/tiny is not in the hub's cache"), "{error}");
    assert!(error.contains("`hf download org/tiny`"), "{error}");
    let error = fail(generate("models/tiny"));
    assert!(error.ends_with("models/tiny") && error.contains("there is no folder /"), "{error}");
    fill(cache.path(), false);
    let expected = succeed(generate(published_model::model().to_str().unwrap())).stdout;
    assert_eq!(succeed(generate("org/tiny")).stdout, expected);
    // `HF_HOME` has the cache below it.
    let home = tempfile::tempdir().unwrap();
    fs::create_dir(home.path().join("hub")).unwrap();
    fill(&home.path().join("hub"), false);
    let mut command = anyroll(["generate", "org/tiny"].into_iter().chain(PROMPT));
    command.env("HF_HOME", home.path()).env_remove("HF_HUB_CACHE").env_remove("HUGGINGFACE_HUB_CACHE");
    assert_eq!(succeed(command).stdout, expected);
    let gguf = cache.path().join("model.gguf");
    fs::write(&gguf, "GGUF").unwrap();
    assert!(fail(generate(gguf.to_str().unwrap())).contains("model.gguf is broken"));
}

/// A program `hf` in a folder of its own, with this body.
fn program(body: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hf");
    fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

#[test]
fn a_model_is_downloaded_on_request_only() {
    let (cache, source) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fill(source.path(), false);
    let generate = |hf: Option<&TempDir>| {
        let args = ["generate", "org/tiny", "--download"].into_iter().chain(PROMPT);
        let mut command = in_cache(cache.path(), args);
        let rest = std::env::var("PATH").unwrap();
        let path = hf.map_or(String::new(), |hf| format!("{}:", hf.path().display()));
        command.env("PATH", path + &rest);
        command
    };
    let failing = program("echo no such model >&2; exit 3");
    let ended = finish(generate(Some(&failing)));
    assert!(
        ended.error().contains("`hf` could not download the model org/tiny: exit status: 3"),
        "{ended:#?}"
    );
    assert!(ended.stderr.contains("no such model"), "{ended:#?}");
    let idle = program("exit 0");
    assert!(fail(generate(Some(&idle))).contains("is not in the hub's cache"));
    let copies = program(&format!(
        "[ \"$*\" = 'download org/tiny' ] && cp -r {}/. \"$HF_HUB_CACHE\"",
        source.path().display()
    ));
    let found = succeed(generate(Some(&copies))).stdout;
    let own = anyroll(["generate", published_model::model().to_str().unwrap()].into_iter().chain(PROMPT));
    assert_eq!(found, succeed(own).stdout);
}

/// A plan needs the shape, the tokenizer and the data, and no weights.
#[test]
fn a_plan_needs_no_weights() {
    let (cache, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fill(cache.path(), true);
    let data = folder.path().join("data.jsonl");
    let line = |number: u32| json!({"question": format!("2 x {number}?"), "answer": "1"}).to_string() + "\n";
    fs::write(&data, (0..100).map(line).collect::<String>()).unwrap();
    let data = format!("pipeline.rlvr.data.file.path={}", data.display());
    let plan = |model: &str| {
        let path = format!("model.path={model}");
        let sets =
            [&path, &data, "pipeline.rlvr.rollout.max_new_tokens=12", "pipeline.rlvr.evaluation.prompts=1"];
        let config = "configs/rlvr_math_qwen2.5_0.5b_cuda.yaml";
        let sets = sets.iter().flat_map(|set| ["--set", *set]).collect::<Vec<_>>();
        let memory = ["plan", config, "--memory", "80GiB", "--json"];
        in_cache(cache.path(), memory.into_iter().chain(sets))
    };
    let read = |command: Command| -> Value { serde_json::from_str(&succeed(command).stdout).unwrap() };
    assert_eq!(read(plan("org/tiny")), read(plan(published_model::model().to_str().unwrap())));
    let mut check = in_cache(cache.path(), ["check", "configs/rlvr_math_qwen2.5_0.5b_cuda.yaml"]);
    let sets =
        ["model.path=org/tiny", &data, "backend=cpu", "devices=1", "pipeline.rlvr.evaluation.prompts=1"];
    check.args(sets.iter().flat_map(|set| ["--set", *set]));
    assert!(fail(check).contains("model.safetensors"));
}
