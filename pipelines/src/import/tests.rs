use std::collections::HashSet;
use std::path::PathBuf;

use serde_json::json;

use super::*;

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/imports").join(name)
}

fn read(name: &str) -> Import {
    import(&file(name), None).unwrap()
}

/// Asserts settings by their paths, and that the keys of these notes were refused and no others.
#[track_caller]
fn check(import: &Import, settings: &[(&str, Value)], refused: &[&str]) {
    for (field, value) in settings {
        assert_eq!(import.settings.get(*field), Some(value), "{field}\n{}", import.report());
    }
    let found: Vec<&str> = import
        .notes
        .iter()
        .filter(|note| matches!(note.became, Became::Refused(_)))
        .map(|note| note.key.as_str())
        .collect();
    assert_eq!(found, refused, "{}", import.report());
}

#[test]
fn every_key_is_accounted_for_once() {
    for name in [
        "accelerate_zero3.yaml",
        "accelerate_fsdp.yaml",
        "accelerate_deepspeed_file.yaml",
        "config/ds_old.json",
        "config/ds_nvme.json",
        "trl_grpo.yaml",
        "openrlhf_flat.sh",
        "openrlhf_dotted.sh",
        "roll_rlvr.yaml",
        "trlx_ppo.yaml",
    ] {
        let text = std::fs::read_to_string(file(name)).unwrap();
        let system = read::system_of(&text).unwrap_or_else(|| panic!("{name} looks like nothing"));
        let tree = read::tree(system, &file(name), &text).unwrap();
        let import = take_over(system, &tree);
        let keys: Vec<String> = leaves(&tree).into_keys().collect();
        let noted: Vec<&String> = import.notes.iter().map(|note| &note.key).collect();
        assert_eq!(noted.iter().collect::<HashSet<_>>().len(), noted.len(), "{name}: {noted:?}");
        let missing: Vec<&String> = keys.iter().filter(|key| !noted.contains(key)).collect();
        assert!(missing.is_empty() && noted.len() == keys.len(), "{name}: {missing:?}\n{}", import.report());
        // What comes out is YAML with the same settings.
        let yaml: Value = serde_saphyr::from_str(&import.to_yaml()).unwrap();
        assert!(yaml.is_object(), "{name}: {yaml}");
        assert_eq!(import.sets().len(), import.settings.len());
    }
}

#[test]
fn accelerate_says_ranks_stage_and_precision() {
    let zero3 = read("accelerate_zero3.yaml");
    let settings = [
        ("strategy.zero_stage", json!(3)),
        ("strategy.offload.optimizer", json!("none")),
        ("strategy.precision", json!("bf16")),
        ("devices", json!(8)),
    ];
    check(&zero3, &settings, &[]);
    let fsdp = read("accelerate_fsdp.yaml");
    let settings = [
        ("strategy.zero_stage", json!(2)),
        ("strategy.precision", json!("fp32")),
        ("strategy.recompute", json!("full")),
        ("devices", json!(4)),
    ];
    check(&fsdp, &settings, &[]);
    // The JSON lies beside the file, wherever one stands.
    let file = read("accelerate_deepspeed_file.yaml");
    let settings = [
        ("strategy.zero_stage", json!(2)),
        ("strategy.micro_batch_size", json!(4)),
        ("pipeline.rlvr.optimizer.schedule.linear.warmup_steps", json!(50)),
        ("devices", json!(4)),
    ];
    check(&file, &settings, &[]);
}

#[test]
fn deepspeed_is_read_in_its_old_and_its_new_form() {
    let old = read("config/ds_old.json");
    let settings = [
        ("strategy.zero_stage", json!(2)),
        ("strategy.precision", json!("bf16")),
        ("strategy.offload.optimizer", json!("between_steps")),
        ("pipeline.rlvr.optimizer.adamw.betas", json!([0.9, 0.95])),
        ("pipeline.rlvr.optimizer.max_grad_norm", json!(1.0)),
    ];
    check(&old, &settings, &[]);
    let nvme = read("config/ds_nvme.json");
    let refused = [
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
        "sparse_attention.mode",
        "a_key_of_tomorrow",
    ];
    check(&nvme, &[("strategy.zero_stage", json!(3))], &refused);
    assert!(
        !nvme.settings.contains_key("pipeline.rlvr.optimizer.max_grad_norm"),
        "auto is decided elsewhere"
    );
}

#[test]
fn trl_counts_completions_a_device() {
    let settings = [
        // 8 a device x 4 devices x 4 accumulated are 128 completions, of 16 prompts.
        ("pipeline.rlvr.prompts_per_step", json!(16)),
        ("pipeline.rlvr.mini_batches", json!(1)),
        ("strategy.micro_batch_size", json!(8)),
        ("pipeline.rlvr.algorithm.aggregation", json!({"seq_mean_token_sum_norm": {"length": 1024}})),
        ("pipeline.rlvr.algorithm.loss.clipped", json!({"clip_low": 0.2, "clip_high": 0.28})),
        ("pipeline.rlvr.algorithm.advantage.grpo.scale", json!("none")),
        ("pipeline.rlvr.selection.leave_out_cut", json!(true)),
        ("pipeline.rlvr.optimizer.schedule.cosine.warmup_steps", json!(50)),
        ("name", json!("Qwen2.5_1.5B_GRPO")),
        ("strategy.recompute", json!("full")),
    ];
    let import = read("trl_grpo.yaml");
    check(&import, &settings, &["model_name_or_path", "dataset_name"]);
    assert_eq!(import.settings["pipeline.rlvr.reward"][1]["weight"], json!(0.2));
}

#[test]
fn openrlhf_is_read_with_either_kind_of_flags() {
    let settings = [
        ("devices", json!(8)),
        ("strategy.zero_stage", json!(3)),
        ("strategy.precision", json!("bf16")),
        ("strategy.offload.optimizer", json!("between_steps")),
        // 128 prompts with 8 completions are 8 updates of 128.
        ("pipeline.rlvr.mini_batches", json!(8)),
        ("pipeline.rlvr.algorithm.advantage", json!({"grpo": {"scale": "group_std", "eps": 1e-9}})),
        ("pipeline.rlvr.algorithm.loss.clipped", json!({"clip_low": 0.2, "clip_high": 0.27})),
        ("pipeline.rlvr.algorithm.kl_in.loss.estimator", json!("k3")),
    ];
    let refused = ["pretrain", "remote_rm_url", "prompt_max_len", "prompt_data", "input_key"];
    check(&read("openrlhf_flat.sh"), &settings, &refused);
    let settings = [
        ("devices", json!(4)),
        ("strategy.zero_stage", json!(2)),
        ("pipeline.rlvr.mini_batches", json!(4)),
        ("pipeline.rlvr.algorithm.advantage", json!("rloo")),
        ("pipeline.rlvr.algorithm.loss.gspo", json!({"clip_low": 3e-4, "clip_high": 4e-4})),
        (
            "pipeline.rlvr.algorithm.rollout_correction.mask",
            json!({"level": "token", "min": 0.5, "max": 5.0}),
        ),
        ("pipeline.rlvr.algorithm.kl_in.reward.adaptive", json!({"target": 0.1, "horizon": 10000.0})),
        ("pipeline.rlvr.selection.mixed_groups", json!({})),
        ("pipeline.rlvr.optimizer.adamw.betas", json!([0.9, 0.98])),
        ("name", json!("qwen3_gspo")),
    ];
    check(&read("openrlhf_dotted.sh"), &settings, &["actor.model_name_or_path"]);
}

#[test]
fn roll_brings_its_defaults_and_references() {
    let import = read("roll_rlvr.yaml");
    let settings = [
        ("strategy.zero_stage", json!(3)),
        ("strategy.offload.optimizer", json!("between_steps")),
        ("devices", json!(8)),
        ("pipeline.rlvr.rollout.max_new_tokens", json!(4096)),
        ("pipeline.rlvr.group_size", json!(8)),
        // 64 prompts with 8 completions are one update of 1 x 64 x 8.
        ("pipeline.rlvr.mini_batches", json!(1)),
        ("pipeline.rlvr.algorithm.advantage", json!({"reinforce": {"gamma": 1.0}})),
        ("pipeline.rlvr.algorithm.whiten_advantages", json!(true)),
        ("pipeline.rlvr.algorithm.loss.clipped.dual_clip", json!(1.4)),
        ("pipeline.rlvr.algorithm.aggregation", json!("seq_mean_token_mean")),
        ("pipeline.rlvr.selection.difficulty", json!({"min": 0.1, "max": 0.95})),
        ("pipeline.rlvr.selection.leave_out_cut", json!(true)),
        ("roles.reference.strategy.micro_batch_size", json!(8)),
    ];
    let refused = [
        "prompt_length",
        "difficulty_loss_weight",
        "pretrain",
        "reward_pretrain",
        "validation.data_args.template",
        "validation.data_args.file_name",
        "actor_train.data_args.template",
        "actor_train.data_args.file_name",
        "actor_train.data_args.domain_interleave_probs.math_rule",
        "actor_train.data_args.domain_interleave_probs.code_sandbox",
        "rewards.llm_judge.worker_cls",
    ];
    check(&import, &settings, &refused);
    let rewards = &import.settings["pipeline.rlvr.reward"];
    assert_eq!(rewards[0], json!({"math": {"only_boxed": true}, "domains": ["deepmath_103k", "aime"]}));
    assert_eq!(rewards[1], json!({"code": {}, "domains": ["KodCode"]}));
    let lost = "exp_name: a\nactor_train: {strategy_args: {strategy_config: '${deepspeed_zero3}'}}\n";
    assert!(read::tree(System::Roll, &file("x.yaml"), lost).unwrap_err().contains("leads nowhere"));
}

#[test]
fn what_looks_like_nothing_or_cannot_be_read_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.yaml");
    std::fs::write(&path, "a: 1\n").unwrap();
    assert!(import(&path, None).unwrap_err().to_string().contains("--from"));
    assert_eq!(import(&path, Some(System::Trl)).unwrap().refused(), 1);
    std::fs::write(&path, "a: [1\n").unwrap();
    assert!(import(&path, Some(System::Trl)).is_err());
    assert!(import(&folder.path().join("none"), None).is_err());
}
