//! `rollout.merge_adapters`: sampling and evaluation with merged adapters, training with separate ones.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use super::published_model::{self, run};
use super::{
    anyroll, assert_same, assert_same_steps, fail, lasting_metrics, resume, series, succeed, whole_lines,
};

const MERGE: &str = "pipeline.rlvr.rollout.merge_adapters=true";
pub const LORA: &str = "model.lora={rank: 4, targets: [v_proj, down_proj]}";
/// Bytes of the matrices with such adapters, fused as they are: in two layers q, k and v together, and down.
const MATRICES: f64 = (2 * 4 * (16 * 32 + 24 * 16)) as f64;
/// Bytes of the adapters in their padded units.
const ADAPTERS: f64 = (2 * 4 * 384) as f64;

/// Returns the greedy completions of a run's evaluation at `step`: prompts and texts.
pub fn completions(run: &Path, step: u64) -> Vec<(String, String)> {
    let samples = whole_lines(&run.join("samples.jsonl"));
    let samples = samples.iter().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let of_step = samples.filter(|sample| sample["step"] == step && sample["phase"] != "train");
    let text = |sample: &Value, field: &str| sample[field].as_str().unwrap().to_owned();
    of_step.map(|sample| (text(&sample, "prompt"), text(&sample, "completion"))).collect()
}

#[track_caller]
pub fn trained(folder: &TempDir, name: &str, sets: &[&str]) -> std::path::PathBuf {
    let (run, command) = run(folder, name, sets);
    succeed(command);
    assert!(series(&run, "grad_norm").iter().any(|&norm| norm > 0.0), "nothing was learned");
    run
}

/// The merged model of an export writes the same tokens as the run's last evaluation.
#[test]
fn what_is_sampled_is_what_the_exported_model_writes() {
    let folder = tempfile::tempdir().unwrap();
    let magnitudes = "model.lora={rank: 4, dora: true, layers: [1]}";
    for (name, sets) in [
        ("stage 0", &["strategy.zero_stage=0", LORA][..]),
        ("stage 3", &["strategy.zero_stage=3", LORA]),
        ("on two ranks", &["strategy.zero_stage=0", "devices=2", magnitudes]),
        ("sharded", &["strategy.zero_stage=3", "devices=2", LORA]),
        ("from the host", &["strategy.offload={params: cpu}", LORA]),
    ] {
        let run = trained(&folder, name, &[sets, &[MERGE]].concat());
        let differences = series(&run, "rollout/logprob_diff_max");
        assert!(differences.iter().all(|&difference| difference < 1e-3), "{name}: {differences:?}");
        let merged = folder.path().join(format!("{name} merged"));
        let to = ["--to", merged.to_str().unwrap(), "--dtype", "fp32"];
        succeed(anyroll([&["export", run.to_str().unwrap()], &to[..]].concat()));
        let path = format!("model.path={}", merged.display());
        let (again, command) =
            self::run(&folder, &format!("{name} again"), &[&path, "pipeline.rlvr.steps=1"]);
        succeed(command);
        let (last, first) = (completions(&run, 6), completions(&again, 0));
        // With several ranks, only the first one's are compared.
        assert!(!last.is_empty() && first.starts_with(&last), "{name}: {last:?} is not {first:?}");
        assert_ne!(last, completions(&run, 0), "{name}: it writes the same as before training");
    }
}

/// An adapter's folder names its model.
#[test]
fn an_exported_adapter_writes_what_its_run_does() {
    let folder = tempfile::tempdir().unwrap();
    let lora = "model.lora={rank: 4, targets: ['layers.0.mlp.*', layers.1.self_attn.q_proj]}";
    let run = trained(&folder, "run", &[lora]);
    let (run, adapter) = (run.to_str().unwrap(), folder.path().join("adapter"));
    let adapter = adapter.to_str().unwrap();
    succeed(anyroll(["export", run, "--to", adapter, "--adapter", "--dtype", "fp32"]));
    let written = |model: &str| {
        let asked = ["--prompt", "2 x 2?", "--prompt", "2 x 71?", "--chat", "--system", "Count."];
        let how = ["--temperature", "0", "--max-new-tokens", "12"];
        succeed(anyroll([&["generate", model][..], &asked, &how].concat())).stdout
    };
    let of_adapter = written(adapter);
    assert_eq!(of_adapter, written(run));
    assert_ne!(of_adapter, written(published_model::model().to_str().unwrap()), "nothing was learned");
    for file in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"] {
        let [copied, own] =
            [Path::new(adapter), &published_model::model()].map(|it| fs::read(it.join(file)).unwrap());
        assert_eq!(copied, own, "{file}");
    }
    let file = Path::new(adapter).join("adapter_config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    std::os::unix::fs::symlink(published_model::model(), folder.path().join("base")).unwrap();
    config["base_model_name_or_path"] = "../base".into();
    let absolute = fs::read_to_string(&file).unwrap();
    fs::write(&file, config.to_string()).unwrap();
    assert_eq!(of_adapter, written(adapter), "a path that starts at the adapter's folder");
    fs::write(&file, absolute).unwrap();
    let elsewhere = fs::read_to_string(&file).unwrap().replace("tiny_model", "no_model");
    fs::write(&file, elsewhere).unwrap();
    let error = fail(anyroll(["generate", adapter, "--prompt", "2"]));
    assert!(error.contains("`base_model_name_or_path` names no model here: there is no folder"), "{error}");
}

/// The base is named as the config names it, or by its name on the hub.
#[test]
fn an_exported_adapter_names_its_base_as_it_was_given() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache/models--org--tiny");
    for part in ["refs", "snapshots/0a1b", "snapshots/2c3d"] {
        fs::create_dir_all(cache.join(part)).unwrap();
    }
    fs::write(cache.join("refs/main"), "0a1b").unwrap();
    fs::create_dir(folder.path().join("base")).unwrap();
    let copies = [folder.path().join("base"), cache.join("snapshots/0a1b"), cache.join("snapshots/2c3d")];
    for (entry, to) in fs::read_dir(published_model::model()).unwrap().flat_map(|entry| {
        let entry = entry.unwrap().path();
        copies.iter().map(move |to| (entry.clone(), to))
    }) {
        fs::copy(&entry, to.join(entry.file_name().unwrap())).unwrap();
    }
    let data = folder.path().join("data.jsonl");
    let line = |number: u32| format!("{{\"prompt\": \"2 x {number}?\", \"answer\": \"1\"}}\n");
    fs::write(&data, (0..40).map(line).collect::<String>()).unwrap();
    for (given, named, revision) in [
        ("base", "base", Value::Null),
        ("./base", "./base", Value::Null),
        ("org/tiny", "org/tiny", Value::Null),
        ("org/tiny@2c3d", "org/tiny", "2c3d".into()),
    ] {
        let config = format!(
            "name: named\nbackend: cpu\nmodel: {{path: {given}, lora: {{rank: 2}}}}\nstrategy: {{micro_batch_size: 8}}\n\
             pipeline:\n  offline:\n    data: {{file: {{path: data.jsonl}}}}\n    objective: sft\n    steps: 1\n    \
             batch_size: 8\n    evaluation: {{prompts: 0}}\n    optimizer: {{adamw: {{learning_rate: 1.0e-3}}}}\n"
        );
        let path = folder.path().join("run.yaml");
        fs::write(&path, config).unwrap();
        let name = given.replace('/', "_");
        let (run, to) = (folder.path().join(format!("run {name}")), folder.path().join(format!("to {name}")));
        let mut command = anyroll(["run", path.to_str().unwrap(), "--output", run.to_str().unwrap()]);
        command.env("HF_HUB_CACHE", folder.path().join("cache"));
        succeed(command);
        succeed(anyroll(["export", run.to_str().unwrap(), "--to", to.to_str().unwrap(), "--adapter"]));
        let file: Value = serde_json::from_slice(&fs::read(to.join("adapter_config.json")).unwrap()).unwrap();
        assert_eq!(
            (&file["base_model_name_or_path"], &file["revision"]),
            (&named.into(), &revision),
            "{given}"
        );
        let mut command =
            anyroll(["generate", to.to_str().unwrap(), "--prompt", "2", "--max-new-tokens", "2"]);
        command.current_dir(&folder).env("HF_HUB_CACHE", folder.path().join("cache"));
        succeed(command);
    }
}

/// The plan includes the additional memory while adapters are merged; afterwards they are not held whole.
#[test]
fn copies_are_there_while_it_samples_and_no_longer() {
    let folder = tempfile::tempdir().unwrap();
    // The least of some steps: in others the watchdog still has the memory of an exchange that is done.
    let held = |run: &Path| {
        let least = |name| series(run, name)[1..].iter().copied().fold(f64::INFINITY, f64::min);
        ["perf/generate_allocated_bytes", "perf/allocated_bytes"].map(least)
    };
    for (stage, copied) in [("strategy.zero_stage=1", MATRICES), ("strategy.zero_stage=3", -ADAPTERS)] {
        let separate = held(&trained(&folder, &format!("{stage} separate"), &[LORA, stage]));
        let run = trained(&folder, &format!("{stage} merged"), &[LORA, stage, MERGE]);
        let merged = held(&run);
        assert_eq!(merged[0] - separate[0], copied, "{stage}: while it samples");
        assert_eq!(merged[1], separate[1], "{stage}: while it trains");
        let most = merged[0] + if copied < 0.0 { ADAPTERS } else { 0.0 };
        let planned = planned(&run);
        // The ranks' parts of a norm count as training memory.
        assert!((most - planned).abs() <= 8.0, "{stage}: {most} held, {planned} planned");
    }
}

/// Returns the planned memory of sampling in addition to activations and the cache.
pub fn planned(run: &Path) -> f64 {
    let args = ["plan", run.join("resolved.yaml").to_str().unwrap(), "--json"].map(str::to_owned);
    let report: Value = serde_json::from_str(&succeed(anyroll(args)).stdout).unwrap();
    let generate = &report["configured"]["plan"]["generate"];
    ["weights", "gradients", "optimizer", "buffers"].iter().map(|kind| generate[kind].as_f64().unwrap()).sum()
}

#[test]
fn merged_runs_resume_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [
        LORA,
        MERGE,
        "devices=2",
        "pipeline.rlvr.rollout.async.ahead=1",
        "pipeline.rlvr.rollout.batch_size=6",
    ];
    let whole = trained(&folder, "whole", &sets);
    let part = trained(&folder, "part", &sets);
    fs::remove_dir_all(part.join("checkpoints/step_000006")).unwrap();
    succeed(resume(&part));
    assert_same(&whole, &part);
}

/// These devices receive weights and adapters, and merge them into their own copy.
#[test]
fn devices_that_only_sample_merge_as_the_policys_do() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [LORA, MERGE, "strategy.zero_stage=3"];
    let together = trained(&folder, "together", &sets);
    let own = "roles.rollout.devices=1";
    let apart = trained(&folder, "apart", &[&sets[..], &[own]].concat());
    assert_same_steps(&lasting_metrics(&together), &lasting_metrics(&apart));
    let ahead =
        trained(&folder, "ahead", &[&sets[..], &[own, "pipeline.rlvr.rollout.async.ahead=1"]].concat());
    assert_eq!(series(&ahead, "staleness/mean")[1..], [1.0; 5]);
}

/// In bf16 sampling and training differ by rounding, which the metric shows.
#[test]
fn rounding_shows_in_the_difference_of_log_probs() {
    let folder = tempfile::tempdir().unwrap();
    let bf16 = [LORA, "strategy.precision=bf16"];
    let differences = |name: &str, sets: &[&str]| {
        series(&trained(&folder, name, &[&bf16[..], sets].concat()), "rollout/logprob_diff_mean")
    };
    let (separate, merged) = (differences("separate", &[]), differences("merged", &[MERGE]));
    assert!(merged.iter().all(|&difference| difference < 0.03), "{merged:?}, and separate {separate:?}");
}
