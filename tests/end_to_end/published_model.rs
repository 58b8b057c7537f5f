//! RLVR on a published model's folder: a tiny random model with its tokenizer and chat template.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyroll_models::hf::{ExportDtype, FolderContents, FolderKind, ModelFolder, config_file, write_folder};
use anyroll_models::{Decoder, DecoderConfig, Model, RopeScaling, init::Seed};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{anyroll, assert_same, fail, finish, resume, series, succeed, whole_lines};

const CONFIG: &str = "configs/rlvr_math_qwen2.5_0.5b_cuda.yaml";
const ASYNC: &str = "configs/rlvr_async_cuda.yaml";

pub(super) fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_model")
}

/// Creates a random Phi-3 of the same size and tokenizer, which reads longer texts with other factors.
fn phi(folder: &TempDir) -> PathBuf {
    let (tiny, to) = (ModelFolder::open(&model()).unwrap(), folder.path().join("phi"));
    let shape = tiny.decoder_config().clone();
    let rope_scaling = RopeScaling::LongRope {
        short_factor: vec![1.0, 1.5],
        long_factor: vec![2.0, 9.0],
        original_max_position_embeddings: shape.max_position_embeddings as f64,
        max_position_embeddings: 8192.0,
        attention_factor: None,
    };
    let config = DecoderConfig { fused_projections: true, qkv_bias: false, rope_scaling, ..shape };
    write_random(&to, config);
    to
}

/// Writes a random model of this shape, with the tokenizer of the tiny one.
pub(super) fn write_random(to: &Path, config: DecoderConfig) {
    let files = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];
    let decoder = Decoder::new(config, tch::Device::Cpu).unwrap();
    let contents = FolderContents {
        kind: FolderKind::Model,
        config: config_file(decoder.config(), &[321]).unwrap(),
        copied: &files.map(|name| model().join(name)),
        made: &[],
        units: decoder.units(),
        weights: &Seed(3),
        dtype: ExportDtype::Fp32,
    };
    write_folder(to, &contents).unwrap();
}

/// Makes the published config small: on the CPU, with a reward for completions that end by themselves.
pub(super) fn run(folder: &TempDir, name: &str, sets: &[&str]) -> (PathBuf, Command) {
    run_config(folder, name, CONFIG, sets)
}

fn run_config(folder: &TempDir, name: &str, config: &str, sets: &[&str]) -> (PathBuf, Command) {
    let data = folder.path().join("data.jsonl");
    let mut lines = String::new();
    for number in 0..400 {
        // Has the field names of both configs.
        let prompt = format!("2 x {number}?");
        let record =
            json!({"prompt": prompt, "question": prompt, "answer": format!("so #### {}", 2 * number)});
        writeln!(lines, "{record}").unwrap();
    }
    fs::write(&data, lines).unwrap();
    let run = folder.path().join(name);
    let mut command = anyroll(["run", config, "--output", run.to_str().unwrap()]);
    let paths = [
        format!("model.path={}", model().display()),
        format!("pipeline.rlvr.data.file.path={}", data.display()),
    ];
    for set in paths.iter().map(String::as_str).chain(TINY).chain(sets.iter().copied()) {
        command.args(["--set", set]);
    }
    (run, command)
}

const TINY: [&str; 16] = [
    "backend=cpu",
    "devices=1",
    "threads=1",
    "strategy.precision=fp32",
    "strategy.collective_timeout_s=60",
    "pipeline.rlvr.reward=[{regex: {pattern: '.*'}}]",
    "pipeline.rlvr.steps=6",
    "pipeline.rlvr.prompts_per_step=8",
    "pipeline.rlvr.group_size=4",
    "pipeline.rlvr.rollout.max_new_tokens=12",
    "pipeline.rlvr.optimizer.adamw.learning_rate=1.0e-2",
    "pipeline.rlvr.optimizer.schedule={constant: {warmup_steps: 0}}",
    "pipeline.rlvr.evaluation.every=3",
    "pipeline.rlvr.evaluation.prompts=8",
    "pipeline.rlvr.evaluation.samples=2",
    "pipeline.rlvr.checkpoint.every=3",
];

#[test]
fn tables_of_another_system_are_data_however_they_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let tables = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tables");
    let runs = ["verl.parquet", "verl.arrow", "stream.arrow"].map(|name| {
        let file = tables.join(name).display().to_string();
        let data =
            format!("pipeline.rlvr.data={{file: {{path: \"{file}\", columns: verl, held_out_percent: 40}}}}");
        // Prompts this short are learned within two steps at the others' rate.
        let sets = [data.as_str(), "pipeline.rlvr.optimizer.adamw.learning_rate=1.0e-3"];
        let (run, command) = run(&folder, name, &sets);
        succeed(command);
        run
    });
    for other in &runs[1..] {
        assert_same(&runs[0], other);
    }
    // Half of the sums have each domain, and a prompt is a system and a user message.
    assert!(!series(&runs[0], "eval/sums/greedy").is_empty());
    let samples = whole_lines(&runs[0].join("samples.jsonl"));
    assert!(samples[0].contains("system: Add.\\nuser: "), "{}", samples[0]);
}

#[test]
fn a_folder_trains_and_resumes_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, command) = run(&folder, "whole", &[]);
    succeed(command);
    assert_eq!(series(&whole, "reward/mean").len(), 6);
    assert!(series(&whole, "grad_norm").iter().any(|&norm| norm > 0.0), "nothing was learned");
    assert!(series(&whole, "rollout/logprob_diff_max").iter().all(|&difference| difference < 1e-3));
    for line in whole_lines(&whole.join("samples.jsonl")) {
        let sample: Value = serde_json::from_str(&line).unwrap();
        assert!(!sample["completion"].as_str().unwrap().contains("<|im_end|>"), "{sample}");
    }

    let (part, command) = run(&folder, "part", &[]);
    succeed(command);
    fs::remove_dir_all(part.join("checkpoints/step_000006")).unwrap();
    succeed(resume(&part));
    assert_same(&whole, &part);
}

/// Code of the folder's own is never run, and its user is told.
#[test]
fn code_that_a_folder_brings_is_named_and_not_run() {
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join("own");
    fs::create_dir(&own).unwrap();
    for entry in fs::read_dir(model()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), own.join(entry.file_name())).unwrap();
    }
    let generate = |path: &Path| {
        let args = ["--prompt", "a", "--chat", "--temperature", "0", "--max-new-tokens", "2"];
        let ended = finish(anyroll(["generate", path.to_str().unwrap()].into_iter().chain(args)));
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        ended
    };
    let plain = generate(&own);
    let mark = folder.path().join("was_run");
    fs::write(own.join("modeling_own.py"), format!("open({mark:?}, 'w')\n")).unwrap();
    let file = own.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    config["auto_map"] = json!({"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"});
    fs::write(&file, config.to_string()).unwrap();
    let told = generate(&own);
    assert!(!plain.stderr.contains("auto_map"), "{}", plain.stderr);
    assert!(
        told.stderr.contains("config.json names code of its own (`auto_map`), which is not run"),
        "{told:#?}"
    );
    assert!(!mark.exists() && told.stdout == plain.stdout, "{told:#?}");
}

#[test]
fn a_folder_trains_while_completions_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let (run, command) =
        run_config(&folder, "run", ASYNC, &["devices=2", "pipeline.rlvr.rollout.batch_size=6"]);
    succeed(command);
    assert!(series(&run, "grad_norm").iter().any(|&norm| norm > 0.0), "nothing was learned");
    for name in ["carried/tokens", "staleness/mean", "staleness/continued", "rollout/weight_mean"] {
        assert!(series(&run, name).iter().any(|&value| value > 0.0), "{name}");
    }
    let shares = series(&run, "rollout/effective_share");
    assert!(shares[0] > 0.999 && shares.iter().any(|&share| share < 0.9999), "{shares:?}");
}

/// Each rank reads its own shard of the folder, so the losses show if it was the right one.
#[test]
fn two_ranks_at_stage_3_start_from_the_same_weights() {
    let folder = tempfile::tempdir().unwrap();
    let first = |name: &str, sets: &[&str]| {
        let (run, command) = run(&folder, name, sets);
        succeed(command);
        (series(&run, "eval/pass@1")[0], series(&run, "reward/mean")[0], series(&run, "grad_norm")[0])
    };
    let one = first("one", &["pipeline.rlvr.steps=1"]);
    let two = first("two", &["pipeline.rlvr.steps=1", "devices=2", "strategy.zero_stage=3"]);
    assert_eq!((one.0, one.1), (two.0, two.1), "sampled completions");
    assert!((one.2 - two.2).abs() < 1e-4 * one.2, "{} is not {}", one.2, two.2);
}

#[test]
fn a_folder_that_does_not_fit_is_refused_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let check = |sets: &[&str], expected: &[&str]| {
        let (run, command) = run(&folder, "run", sets);
        let error = fail(command);
        assert!(expected.iter().all(|words| error.contains(words)), "{error} has not {expected:?}");
        assert!(!run.exists());
    };
    let none = format!("model.path={}", folder.path().join("none").display());
    check(&[&none], &["model.path", "there is no folder", "/none"]);
    let long = "pipeline.rlvr.rollout.max_new_tokens=2040";
    let place = "--set pipeline.rlvr.rollout.max_new_tokens=2040";
    check(&[long], &[place, "the longest prompt is", "it exceeds 2048"]);
    check(&["model.decoder={hidden_size: 8}"], &["model.decoder"]);
    check(&["model.lora={rank: 4, targets: [w_proj]}"], &["model.lora", "`w_proj` names no matrix"]);
    let reference = "roles.reference.strategy.zero_stage=1";
    check(&["model.lora={rank: 4}", reference], &["roles.reference", "the reference is the policy"]);
    check(&["model.lora={rank: 4, dropout: 1}"], &["model.lora.dropout", "1.0 is out of range"]);
    let beside = "model.lora={rank: 4, targets: [v_proj], rank_pattern: {q_proj: 2}}";
    check(&[beside], &["model.lora.rank_pattern", "`q_proj` matches no matrix that has an adapter"]);
    check(&["model.lora={rank: 4, rank_pattern: {q_proj: 0}}"], &["model.lora.rank_pattern", "it is 0"]);
    check(&["model.lora={rank: 4, alpha_pattern: {'(': 2.0}}"], &["model.lora.alpha_pattern", "`(` names"]);
    check(&["model.lora={rank: 4, layers: [1, 2]}"], &["model.lora.layers", "there is no layer 2"]);
    check(&["model.lora={rank: 4, layers: []}"], &["model.lora.layers", "the list is empty"]);
    let elsewhere = "model.lora={rank: 4, layers: [1], targets: [layers.0.mlp.up_proj]}";
    check(&[elsewhere], &["model.lora.targets", "`layers.0.mlp.up_proj` names no matrix"]);
    let elsewhere = "model.lora={rank: 4, layers: [1], rank_pattern: {layers.0.mlp.up_proj: 2}}";
    check(&[elsewhere], &["model.lora.rank_pattern", "matches no matrix that has an adapter"]);
    let fused = format!("model.path={}", phi(&folder).display());
    let parts = [fused.as_str(), "model.lora={rank: 4, targets: [o_proj, q_proj]}"];
    check(&parts, &["model.lora.targets", "`q_proj` names no matrix"]);
    check(&[&fused, long], &["it exceeds 2048, its `original_max_position_embeddings`: longer texts rotate"]);
    check(&["model.lora={rank: 4, targets: [qkv_proj]}"], &["`qkv_proj` names no matrix"]);
    let strict = ["model.lora={rank: 4, dropout: 0.1}", "pipeline.rlvr.rollout.strict=true"];
    check(&strict, &["model.lora.dropout", "`rollout.strict` wants them equal"]);
}

/// Returns the greedy completion of each prompt by the model in a folder, with an adapter if there is one,
/// computed by `transformers`. `None`, with a printed message, without that package.
fn in_transformers(prompts: &[&str], model: &Path, adapter: Option<&Path>) -> Option<Vec<String>> {
    let python = super::python_with("transformers, peft", "exported folders were not opened by others")?;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/python/greedy_of_folder.py");
    let mut command = Command::new(&python);
    command.args([script, &serde_json::to_string(prompts).unwrap()]).arg(model).args(adapter);
    Some(serde_json::from_str(&succeed(command).stdout).unwrap())
}

#[test]
fn an_exported_run_is_a_model_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let (run, command) = run(&folder, "run", &["devices=2", "strategy.zero_stage=3"]);
    succeed(command);
    let export = |from: &Path, to: &str, options: &[&str]| {
        let to = folder.path().join(to);
        let mut command = anyroll(["export", from.to_str().unwrap(), "--to", to.to_str().unwrap()]);
        command.args(options);
        (to, command)
    };
    let (exported, command) = export(&run, "exported", &["--dtype", "fp32"]);
    let said = succeed(command).stdout;
    assert!(said.contains("step_000006 is in"), "{said}");
    // Trains again from the export: its first evaluation equals the last one of the exported run.
    let path = format!("model.path={}", exported.display());
    let (again, command) = self::run(&folder, "again", &[&path]);
    succeed(command);
    assert_eq!(series(&again, "eval/pass@1").first(), series(&run, "eval/pass@1").last());

    let first = run.join("checkpoints/step_000003");
    let said = succeed(export(&first, "first", &[]).1).stdout;
    assert!(said.contains("step_000003 is in"), "{said}");
    assert!(fail(export(&run, "exported", &[]).1).contains("cannot write"), "what is there stays");
    assert!(fail(export(&run, "adapter", &["--adapter"]).1).contains("no adapter"));
    let samples = whole_lines(&run.join("samples.jsonl"));
    let last = samples.iter().rev().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let last: Vec<Value> = last.take_while(|sample| sample["step"] == 6).collect();
    let text = |field: &'static str| last.iter().map(move |sample| sample[field].as_str().unwrap());
    let prompts: Vec<&str> = text("prompt").collect();
    assert_eq!(prompts.len(), 4, "the first rank has four");
    if let Some(found) = in_transformers(&prompts, &exported, None) {
        assert_eq!(found, text("completion").collect::<Vec<_>>());
    }
}

#[test]
fn adapters_drop_the_same_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let norms = |name: &str, sets: &[&str]| {
        let (run, command) = run(&folder, name, &[sets, &["pipeline.rlvr.steps=2"]].concat());
        succeed(command);
        series(&run, "grad_norm")
    };
    for dora in [false, true] {
        let lora = format!("model.lora={{rank: 4, dropout: 0.4, dora: {dora}}}");
        let name = |name: &str| format!("{name}_{dora}");
        let one = norms(&name("one"), &[&lora, "strategy.micro_batch_size=8"]);
        let on_two = [lora.as_str(), "devices=2", "strategy.zero_stage=3", "strategy.recompute=full"];
        let two = norms(&name("two"), &on_two);
        let none = norms(&name("none"), &[&format!("model.lora={{rank: 4, dora: {dora}}}")]);
        for (one, two) in one.iter().zip(&two) {
            assert!((one / two - 1.0).abs() < 1e-3, "{one} on one rank, {two} on two");
        }
        assert!((one[0] / none[0] - 1.0).abs() > 1e-3, "nothing was dropped: {one:?}, {none:?}");
    }
}

#[test]
fn adapters_train_beside_frozen_weights() {
    let lora = "rank: 4, targets: [(q|v)_proj, 'mlp[.].*'], rslora: true, \
                rank_pattern: {layers.0.self_attn.q_proj: 3, q_proj: 6, up_proj: 1}, alpha_pattern: {'mlp.*': 5.0}";
    check_adapters(lora, 0.0);
}

#[test]
fn layers_with_adapters_beside_other_matrices_train() {
    check_adapters(
        "rank: 4, targets: ['layers.0.self_attn.(q|v)_proj|layers.1.mlp.*', layers.1.self_attn.o_proj]",
        0.0,
    );
}

/// Norms are computed on the host at first and then on a device: equal up to rounding.
#[test]
fn magnitudes_of_some_layers_train_beside_frozen_weights() {
    check_adapters("rank: 4, dora: true, layers: [1]", 1e-9);
}

/// All of its matrices, with and without magnitudes.
#[test]
fn adapters_of_a_phi_train_beside_frozen_weights() {
    let folder = tempfile::tempdir().unwrap();
    let phi = phi(&folder);
    check_adapters_of(&phi, "rank: 4, rank_pattern: {1.self_attn.qkv_proj: 6}", 0.0);
    check_adapters_of(&phi, "rank: 4, dora: true, targets: [qkv_proj, gate_up_proj]", 1e-9);
}

#[track_caller]
fn check_adapters(fields: &str, first_kl: f64) {
    check_adapters_of(&model(), fields, first_kl);
}

#[track_caller]
fn check_adapters_of(model: &Path, fields: &str, first_kl: f64) {
    let folder = tempfile::tempdir().unwrap();
    let (lora, base) = (format!("model.lora={{{fields}}}"), format!("model.path={}", model.display()));
    let lora = [lora.as_str(), &base, "strategy.recompute=full"];
    let kl_coef = "pipeline.rlvr.algorithm.kl_coef=0.1";
    let with_kl = [kl_coef, "pipeline.rlvr.mini_batches=1", "devices=2", "strategy.zero_stage=3"];
    let (lora_run, command) = run(&folder, "lora", &[&lora[..], &with_kl].concat());
    succeed(command);
    assert!(series(&lora_run, "grad_norm").iter().any(|&norm| norm > 0.0), "nothing was learned");
    let kl = series(&lora_run, "loss/kl");
    assert!(
        kl[0] <= first_kl && kl[kl.len() - 1] > first_kl,
        "the policy starts at its reference and leaves it: {kl:?}"
    );
    assert!(!lora_run.join("reference").exists(), "the reference is no copy");

    let export = |to: &str, options: &[&str]| {
        let to = folder.path().join(to);
        let mut command = anyroll(["export", lora_run.to_str().unwrap(), "--to", to.to_str().unwrap()]);
        command.args(["--dtype", "fp32"]).args(options);
        succeed(command);
        to
    };
    let (merged, adapter) = (export("merged", &[]), export("adapter", &["--adapter"]));
    let last = *series(&lora_run, "eval/pass@1").last().unwrap();
    let first = |name: &str, sets: &[&str]| {
        let (run, command) = run(&folder, name, sets);
        succeed(command);
        series(&run, "eval/pass@1")[0]
    };
    let one_step = "pipeline.rlvr.steps=1";
    assert_eq!(first("from_merged", &[&format!("model.path={}", merged.display()), one_step]), last);
    let path = format!("model.lora.path={}", adapter.display());
    assert_eq!(first("from_adapter", &[lora[0], &base, &path, one_step]), last);

    let prompts = ["2 x 2?", "2 x 71?", "2 x 333?"];
    if let Some(of_merged) = in_transformers(&prompts, &merged, None) {
        let of_adapter = in_transformers(&prompts, model, Some(&adapter)).unwrap();
        assert_eq!(of_merged, of_adapter, "merged here and added by PEFT");
    }
}
