//! Other systems' defaults for missing keys, values that turn nothing on, and alternative notations.

use super::*;

#[test]
fn a_scheduler_without_parameters_has_deepspeeds() {
    let text = r#"{"zero_optimization": {"stage": 1}, "scheduler": {"type": "WarmupLR", "params": {}}}"#;
    let import = imported("ds.json", text, Origin::Deepspeed);
    check_refused(&import, &[]);
    for line in ["learning_rate: 0.001\n", "constant:\n          warmup_steps: 1000\n"] {
        assert!(import.yaml().contains(line), "no\n{line}in\n{}", import.yaml());
    }
    let changes = import.changes("ds.json".as_ref()).unwrap();
    let told: Vec<String> = changes.told.iter().map(|row| format!("{}: {}", row.key, row.value)).collect();
    let expected = [
        "scheduler.params.warmup_max_lr: 0.001",
        "scheduler.params.warmup_num_steps: 1000",
        "scheduler.params.warmup_type: log",
    ];
    assert_eq!(told, expected, "a run has to be told of them");
}

#[test]
fn a_warm_up_that_deepspeed_leaves_to_the_trainer_is_told() {
    let text = r#"{"zero_optimization": {"stage": 1},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": 1e-4, "warmup_type": "linear"}}}"#;
    let import = imported("ds.json", text, Origin::Deepspeed);
    check_refused(&import, &[]);
    let changed =
        "changed   scheduler.type: WarmupDecayLR -> pipeline.rlvr.optimizer.schedule.linear.warmup_steps: 0";
    check_rows(&import, &[("scheduler.type", changed)]);
}

#[test]
fn what_is_off_in_deepspeed_is_not_refused() {
    let text = r#"// as a trainer writes it
{
    /* ZeRO++ and MiCS: off,
       "by their sizes" */
    "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1, "mics_shard_size": -1, "leaf_module": null},
    "autotuning": {"enabled": false, "fast": true}, // "unused"
    "compression_training": {}, "checkpoint": {"tag_validation": "Warn//*"}, "sparse_gradients": false
}"#;
    let import = imported("ds.json", text, Origin::Deepspeed);
    check_refused(&import, &[]);
    check_rows(&import, &[("checkpoint.tag_validation", "no effect checkpoint.tag_validation: Warn//*")]);
    let on = text.replace("size\": 1", "size\": 8").replace("\"enabled\": false", "\"enabled\": true");
    let on = imported("ds.json", &on, Origin::Deepspeed);
    let refused = ["zero_optimization.zero_hpz_partition_size", "autotuning.enabled", "autotuning.fast"];
    check_refused(&on, &refused);
}

#[test]
fn a_key_that_is_given_twice_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds.json");
    fs::write(&path, "{\n\"train_batch_size\": 8, // a\n\"train_batch_size\": 9}").unwrap();
    let error = import(&path, None).unwrap_err().to_string();
    assert!(error.ends_with("ds.json: line 3: `train_batch_size` is given twice: keep one"), "{error}");
}

#[test]
fn accelerates_sections_shard_where_they_do_not_say_how() {
    for (kind, section, stage) in [
        ("FSDP", "fsdp_config: {fsdp_version: 2}", 3),
        ("FSDP", "fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}", 2),
        ("DEEPSPEED", "deepspeed_config: {gradient_clipping: 1.0}", 2),
    ] {
        let text = format!("distributed_type: {kind}\n{section}\ngradient_accumulation_steps: 4\n");
        let import = imported("accelerate.yaml", &text, Origin::Accelerate);
        check_refused(&import, &[]);
        assert!(import.yaml().contains(&format!("  zero_stage: {stage}\n")), "{text}{}", import.yaml());
    }
}

#[test]
fn hybrid_sharding_becomes_shard_groups() {
    for (text, origin, group) in [
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n",
            Origin::Accelerate,
            "host",
        ),
        (
            "distributed_type: FSDP\nparallelism_config: {parallelism_config_dp_replicate_size: 2, \
             parallelism_config_dp_shard_size: 4}\n",
            Origin::Accelerate,
            "4",
        ),
        ("zero_optimization: {stage: 3, mics_shard_size: 8}\n", Origin::Deepspeed, "8"),
    ] {
        let import = imported("a.yaml", text, origin);
        check_refused(&import, &[]);
        let lines = ["  zero_stage: 3\n", &format!("  shard_group: {group}\n")];
        assert!(lines.iter().all(|line| import.yaml().contains(line)), "{text}{}", import.yaml());
    }
}

#[test]
fn layers_are_split_as_there() {
    for (text, origin) in [
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n\
             parallelism_config: {parallelism_config_tp_size: 4}\n",
            Origin::Accelerate,
        ),
        ("zero_optimization: {stage: 1}\ntensor_parallel: {autotp_size: 4}\n", Origin::Deepspeed),
    ] {
        let import = imported("a.yaml", text, origin);
        check_refused(&import, &[]);
        assert!(import.yaml().contains("  tensor_parallel: 4\n"), "{text}{}", import.yaml());
    }
}

#[test]
fn accelerate_splits_sequences_in_either_way() {
    let text = |cp: u32, sp: u32| {
        let of = |name: &str, size: u32| format!("parallelism_config_{name}_size: {size}");
        let sizes = [of("cp", cp), of("sp", sp), of("tp", 1)].join(", ");
        format!(
            "distributed_type: MULTI_GPU\nparallelism_config: {{{sizes}, \
             parallelism_config_cp_comm_strategy: allgather, parallelism_config_sp_backend: deepspeed}}\n"
        )
    };
    for (cp, sp) in [(1, 1), (4, 1), (1, 4)] {
        let import = imported("a.yaml", &text(cp, sp), Origin::Accelerate);
        check_refused(&import, &[]);
        let is_split = import.yaml().contains("  sequence_parallel: 4\n");
        assert_eq!(is_split, cp * sp > 1, "{}", import.yaml());
    }
    let both = imported("a.yaml", &text(2, 2), Origin::Accelerate);
    check_refused(&both, &["parallelism_config.parallelism_config_sp_size"]);
}

#[test]
fn deepspeed_spreads_experts() {
    let text = |enabled: bool| {
        format!(
            "zero_optimization: {{stage: 2}}\n\
             expert_parallel: {{enabled: {enabled}, autoep_size: 4, preset_model: mixtral}}\n"
        )
    };
    for enabled in [true, false] {
        let import = imported("a.yaml", &text(enabled), Origin::Deepspeed);
        check_refused(&import, &[]);
        assert_eq!(import.yaml().contains("  expert_parallel: 4\n"), enabled, "{}", import.yaml());
    }
}

#[test]
fn trls_rewards_and_shares_of_a_warm_up() {
    let text = "num_generations: 8\nmax_steps: 200\nwarmup_steps: 0.05\nuse_dora: false\nlora_task_type: CAUSAL_LM\n\
        reward_funcs: [trl.rewards.accuracy_reward, get_soft_overlong_punishment]\nreward_weights: [1.0, 0.5]\n";
    let import = imported("grpo.yaml", text, Origin::Trl);
    check_refused(&import, &[]);
    let length = "    - length:\n        max_tokens: 1280\n        buffer_tokens: 256\n      weight: 0.5\n";
    for line in ["          warmup_steps:\n            share: 0.05\n", "    - math: {}\n", length] {
        assert!(import.yaml().contains(line), "no\n{line}in\n{}", import.yaml());
    }
    for other in ["my_reward", "get_cosine_scaled_reward", "get_repetition_penalty_reward"] {
        let own = imported("grpo.yaml", &text.replace("trl.rewards.accuracy_reward", other), Origin::Trl);
        check_refused(&own, &["reward_funcs"]);
    }
    let length = "num_generations: 8\nreward_funcs: [get_soft_overlong_punishment]\n";
    let row = |text: &str, key: &str| {
        let import = imported("grpo.yaml", text, Origin::Trl);
        import.rows.iter().find(|row| row.key == key).unwrap().to_string()
    };
    assert!(row(length, "reward_funcs").starts_with("mapped"));
    let told = row(text, "reward_funcs");
    assert!(told.starts_with("changed") && told.contains("outside of LaTeX counts"), "{told}");
}

/// TRL's pattern is `^<think>(?!.*<think>)(.*?)</think>.*$` with dots that match line breaks: one `<think>`, at the start,
/// with a `</think>` behind it.
#[test]
fn trls_format_of_thoughts_is_matched_without_look_around() {
    let text = "num_generations: 8\nreward_funcs: [think_format_reward]\n";
    let yaml = imported("grpo.yaml", text, Origin::Trl).yaml();
    let config: Value = serde_saphyr::from_str(&yaml).unwrap();
    let pattern = config["pipeline"]["rlvr"]["reward"][0]["regex"]["pattern"].as_str().unwrap().to_owned();
    let ours =
        regex::RegexBuilder::new(&format!(r"\A(?:{pattern})\z")).dot_matches_new_line(true).build().unwrap();
    let theirs = |text: &str| {
        let rest = text.strip_prefix("<think>");
        rest.is_some_and(|rest| !rest.contains("<think>") && rest.contains("</think>"))
    };
    let parts = ["<think>", "</think>", "<", "<t", "<thin", "k>", "think>", "a\n", ">"];
    let (mut right, mut wrong) = (0, 0);
    for number in 0..9usize.pow(6) {
        let part = |place: u32| parts[number / 9usize.pow(place) % 9];
        let text: String = (0..6).map(part).collect();
        let verdict = theirs(&text);
        assert_eq!(ours.is_match(&text), verdict, "{text}");
        *(if verdict { &mut right } else { &mut wrong }) += 1;
    }
    assert!(right > 1000 && wrong > 1000, "{right} {wrong}");
}

#[test]
fn trls_entropy_bonus() {
    let common = "num_generations: 8\nreward_funcs: [get_soft_overlong_punishment]\n";
    for (more, outcome, is_set) in [
        ("entropy_coef: 0.01\n", "mapped", true),
        ("entropy_coef: 0.01\nloss_type: grpo\n", "changed", true),
        ("entropy_coef: 0.0\nloss_type: grpo\n", "mapped", false),
        ("entropy_coef: -0.1\n", "refused", false),
    ] {
        let import = imported("grpo.yaml", &format!("{common}{more}"), Origin::Trl);
        let row = import.rows.iter().find(|row| row.key == "entropy_coef").unwrap().to_string();
        assert!(row.starts_with(outcome), "{row}");
        assert_eq!(import.yaml().contains("      entropy_coef: 0.01\n"), is_set, "{}", import.yaml());
    }
    let adaptive = "use_adaptive_entropy: true\nentropy_target: 0.2\nentropy_coef: 0.1\n";
    let import = imported("grpo.yaml", &format!("{common}{adaptive}"), Origin::Trl);
    check_refused(&import, &["use_adaptive_entropy"]);
}

#[test]
fn rolls_critic_and_its_records_to_evaluate_on() {
    let text = "rollout_batch_size: 64\nadv_estimator: gae\nmax_grad_norm: 0.5\nmax_steps: 100\n\
        validation: {data_args: {file_name: [held.jsonl]}}\n\
        critic: {training_args: {learning_rate: 1.0e-5, weight_decay: 0.1, warmup_steps: 7, lr_scheduler_type: cosine}}\n";
    let import = imported("roll.yaml", text, Origin::Roll);
    let critic = "    critic:\n      optimizer:\n        adamw:\n          learning_rate: 0.00001\n          weight_decay: 0.1\n        \
        schedule:\n          cosine:\n            warmup_steps: 7\n        max_grad_norm: 0.5\n";
    for line in [critic, "        held_out:\n        - held.jsonl\n"] {
        assert!(import.yaml().contains(line), "no\n{line}in\n{}", import.yaml());
    }
}
