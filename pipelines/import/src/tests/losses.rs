//! Settings that once had no effect in silence, or were refused although they set nothing.

use super::openrlhf_trl::imported_from;
use super::*;

#[track_caller]
fn check_line(import: &Import, line: &str) {
    assert!(import.yaml().contains(line), "no\n{line}in\n{}", import.yaml());
}

fn verl_with(overrides: &str) -> Import {
    let usual = "data.train_files=a.parquet actor_rollout_ref.model.path=m trainer.total_training_steps=10";
    imported_from(&format!("python3 -m verl.trainer.main_ppo {usual} {overrides}"), Origin::Verl)
}

#[test]
fn verls_sandbox_is_refused_under_every_name() {
    for key in ["reward_model.sandbox_fusion.url", "reward.sandbox_fusion.url"] {
        check_refused(
            &verl_with(&format!("{key}=http://a reward_model.sandbox_fusion.max_concurrent=8")),
            &["reward.sandbox_fusion.url"],
        );
    }
    check_refused(&verl_with("reward_model.my_own=1 reward_model.enable=False"), &["reward_model.my_own"]);
}

#[test]
fn verls_images_are_refused() {
    for key in ["data.image_key=images", "data.video_key=clips"] {
        check_refused(&verl_with(key), &[key.split_once('=').unwrap().0]);
    }
    check_refused(&verl_with("data.image_key=images data.video_key=videos"), &[]);
}

#[test]
fn another_critic_is_refused() {
    let gae = "algorithm.adv_estimator=gae critic.model.path";
    check_refused(&verl_with(&format!("{gae}=m")), &[]);
    check_refused(&verl_with(&format!("{gae}=other/model-1b")), &["critic.model.path"]);
    check_refused(&verl_with("algorithm.adv_estimator=rloo critic.model.path=other"), &[]);
    let ppo = "python -m openrlhf.cli.train_ppo_ray --pretrain m --reward_pretrain rm --prompt_data a.jsonl";
    check_refused(&imported_from(&format!("{ppo} --critic_pretrain m"), Origin::Openrlhf), &[]);
    check_refused(
        &imported_from(&format!("{ppo} --critic_pretrain rm"), Origin::Openrlhf),
        &["critic.model_name_or_path"],
    );
    // OpenRLHF's default is the reward model.
    let told = imported_from(ppo, Origin::Openrlhf);
    check_rows(&told, &[("critic.model_name_or_path", "changed   critic.model_name_or_path: rm by default")]);
    let roll = |name: &str| {
        let text =
            format!("rollout_batch_size: 8\npretrain: m\nadv_estimator: gae\nreward_pretrain: {name}\n");
        imported_from(&text, Origin::Roll)
    };
    check_refused(&roll("m"), &[]);
    check_refused(&roll("rm"), &["reward_pretrain"]);
}

#[test]
fn deepspeeds_loss_scale_is_ours() {
    let import = |fields: &str| {
        let text = format!(r#"{{"zero_optimization": {{"stage": 1}}, "fp16": {{{fields}}}}}"#);
        imported("ds.json", &text, Origin::Deepspeed)
    };
    let scaled = import(r#""enabled": true, "initial_scale_power": 8, "loss_scale_window": 100"#);
    check_refused(&scaled, &[]);
    check_line(&scaled, "  precision:\n    fp16:\n      initial_scale: 256\n      growth_interval: 100\n");
    let start = import(r#""enabled": true, "initial_scale_power": 10"#);
    check_line(&start, "      initial_scale: 1024\n      growth_interval: 1000\n");
    check_line(&import(r#""enabled": true, "hysteresis": 2"#), "  precision: fp16\n");
    let off = import(r#""enabled": false, "initial_scale_power": 8"#);
    check_rows(&off, &[("fp16.initial_scale_power", "no effect")]);
    check_refused(&import(r#""enabled": true, "initial_scale_power": 40"#), &["fp16.initial_scale_power"]);
    check_refused(&import(r#""enabled": true, "loss_scale": 128"#), &["fp16.loss_scale"]);
}

#[test]
fn a_key_has_one_outcome_in_both_of_its_files() {
    let json = r#"{"zero_optimization": {"stage": 1}, "seq_parallel_communication_data_type": "fp32"}"#;
    let yaml = "deepspeed_config: {zero_stage: 1, seq_parallel_communication_data_type: fp32}\n";
    let json = imported("ds.json", json, Origin::Deepspeed);
    let yaml = imported("accelerate.yaml", yaml, Origin::Accelerate);
    check_rows(&json, &[("seq_parallel_communication_data_type", "no effect")]);
    check_rows(&yaml, &[("deepspeed_config.seq_parallel_communication_data_type", "no effect")]);
}

#[test]
fn what_sets_nothing_is_not_refused() {
    let accelerate = "\
distributed_type: MULTI_GPU
megatron_lm_config: {}
command_file: null
gpu_ids: null
mpirun_hostfile: hosts
deepspeed_config: {}
fsdp_config: {fsdp_ignored_modules: null}
my_own: null
num_processes: 2
";
    let import = imported("a.yaml", accelerate, Origin::Accelerate);
    check_refused(&import, &[]);
    check_line(&import, "devices: 2\n");
    let json = r#"{"zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": true},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "bias_correction": true}}}"#;
    check_refused(&imported("ds.json", json, Origin::Deepspeed), &[]);
    let roll = "\
rollout_batch_size: 8
pretrain: m
adv_estimator: grpo
global_template: qwen3
lora_target: q_proj,v_proj
lora_rank: 32
positive_loss_coef: x_1
use_topr_neg_loss_coef: x_2
reward_norm: batch
actor_train:
  model_args: {lora_target: '${lora_target}', lora_rank: '${lora_rank}'}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {moe_grouped_gemm: true, moe_permute_fusion: true, moe_token_dispatcher_type: alltoall}
rewards: {math: {worker_cls: a.MathRuleRewardWorker}}
";
    let import = imported("roll.yaml", roll, Origin::Roll);
    check_refused(&import, &[]);
    check_line(&import, "    rank: 32\n    targets:\n    - q_proj\n    - v_proj\n");
    check_rows(&import, &[("lora_rank", "no effect"), ("global_template", "changed")]);
    let unused = roll.replace("'${lora_rank}'", "16");
    check_refused(&imported("roll.yaml", &unused, Origin::Roll), &["lora_rank"]);
    let eval = "python -m openrlhf.cli.train_ppo_ray --pretrain m --eval_dataset b.jsonl --eval_temperature 1.0 \
                --eval_n_samples_per_prompt 4 --eval_steps 5";
    let import = imported_from(eval, Origin::Openrlhf);
    check_refused(&import, &[]);
    check_line(&import, "        held_out: b.jsonl\n");
}

/// Devices that a program sees are a variable of its shell, which other systems also set in their files.
#[test]
fn devices_that_a_file_makes_visible_are_the_shells() {
    let accelerate = "distributed_type: MULTI_GPU\nnum_processes: 2\nCUDA_VISIBLE_DEVICES: '0,1'\n";
    let trl = "model_name_or_path: m\nreward_funcs: [accuracy_reward]\nnum_generations: 8\n\
               cuda_visible_devices: 0,1\nenv: {cuda_visible_devices: '1'}\n";
    for (text, origin, key) in [
        (accelerate, Origin::Accelerate, "CUDA_VISIBLE_DEVICES"),
        (trl, Origin::Trl, "cuda_visible_devices"),
        (trl, Origin::Trl, "env.cuda_visible_devices"),
    ] {
        let import = imported("a.yaml", text, origin);
        check_refused(&import, &[]);
        check_rows(&import, &[(key, "no effect")]);
        let row = import.rows.iter().find(|row| row.key == key).unwrap().to_string();
        assert!(row.contains("set it in the shell, or set `devices`"), "{row}");
    }
}

#[test]
fn device_lists_of_every_spelling() {
    for (text, devices) in [
        ("list([1, 3])", "devices:\n- 1\n- 3\n"),
        ("'[1, 3]'", "devices:\n- 1\n- 3\n"),
        ("list(range(0,4))", "devices: 4\n"),
        ("list(range(4))", "devices: 4\n"),
        ("list(range(0,2)) + list(range(4,6))", "devices:\n- 0\n- 1\n- 4\n- 5\n"),
        ("list(range(16,24))", "devices: 8\n"),
    ] {
        let text = format!(
            "rollout_batch_size: 8\nadv_estimator: reinforce\nactor_train: {{device_mapping: {}}}\n",
            if text.starts_with('\'') { text.to_owned() } else { format!("'{text}'") }
        );
        check_line(&imported("roll.yaml", &text, Origin::Roll), devices);
    }
    let all = imported("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: gpu\n", Origin::Accelerate);
    check_rows(&all, &[("num_processes", "refused   num_processes: gpu (must be a number")]);
}

#[test]
fn a_file_of_unknown_keys_gets_advice() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file.yaml");
    for (text, expected) in [
        (
            "# try `trl sft --config file.yaml`\nmodel_name_or_path: m\nlearning_rate: 0.0001\n",
            "--from trl-sft",
        ),
        ("model_name_or_path: m\ndataset_text_field: text\n", "`dataset_text_field` is a key of TRL"),
        ("dataset_name: d\nlmbda: 0.5\n", "--from trl-gkd"),
        ("per_device_train_batch_size: 8\n", "all of TRL's trainers"),
        ("trainer: {devices: 1}\nexp_manager: {name: a}\na: ${multiply:1,2}\n", "a config of NeMo"),
        ("tune_config: {mode: max}\n", "a sweep of trlx"),
        ("zz: 1\n", "pass --from roll"),
    ] {
        fs::write(&path, text).unwrap();
        let error = import(&path, None).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let other = imported("sft.yaml", "sft_train: {model_args: {dtype: bf16}}\n", Origin::Roll);
    check_refused(&other, &["sft_train.model_args.dtype"]);
}

#[test]
fn trls_command_line_configs() {
    let text = "model_name_or_path:\n  small/model\ndataset_name:\n  some/records\nreport_to:\n  none\n\
                learning_rate:\n  0.0001\nlr_scheduler_type:\n  cosine\n";
    let import = imported_from(text, Origin::TrlSft);
    check_refused(&import, &[]);
    check_loads_as("offline", &import);
    let row = import.rows.iter().find(|row| row.key == "dataset_name").unwrap().to_string();
    assert!(row.contains("`messages`") && row.contains("columns: {text: text}"), "{row}");
}

/// `~` is the user's folder in other systems; an included file may be empty.
#[test]
fn files_and_folders_as_other_systems_find_them() {
    let home = std::env::var("HOME").unwrap();
    let text = "actor_rollout_ref: {model: {path: ~/models/policy}}\ndata: {train_files: [~/a.parquet]}\n\
                algorithm: {adv_estimator: grpo}\n";
    let import = imported("verl.yaml", text, Origin::Verl);
    check_line(&import, &format!("  path: {home}/models/policy\n"));
    check_line(&import, &format!("        path: {home}/a.parquet\n"));
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("envs.yaml"), "# nothing\n").unwrap();
    let path = folder.path().join("roll.yaml");
    fs::write(&path, "defaults: [envs@_here_]\nrollout_batch_size: 8\nadv_estimator: reinforce\n").unwrap();
    check_refused(&super::import(&path, None).unwrap(), &[]);
}
