//! ROLL's RLVR YAML.

use serde_json::{Value, json};

use super::{Became, Import, Keys, Rule, Source, deepspeed, trl, value};
use Rule::{Ignored, Refused, Same, Together, Unless, With};

pub(super) const SOURCE: Source = Source { rules: RULES, whole };

const ENGINE: &str = "sampling is part of the trainer, on the same weights";
const LOGGING: &str = "everything lands in the run folder";
const PLACES: &str = "every rank holds its part of every role";
const MODEL: &str = "give the model in `model:`";
const DATA: &str = "give the file in `data:`";
const CRITIC: &str = "give the critic in `critic:`";
const DEAD: &str = "ROLL does not read it";
const BLOCKS: &str = "blocks have kernels of their own";
const EVALUATION: &str = "evaluation is greedy, and sampled at temperature 1";

const RULES: &[(&str, Rule)] = &[
    ("hydra.*", Ignored("there is no hydra")),
    ("exp_name", With(trl::name)),
    ("seed", Same("seed")),
    ("logging_dir", Ignored(LOGGING)),
    ("output_dir", Ignored(LOGGING)),
    ("base_dir", Ignored(LOGGING)),
    ("track_with", Ignored(LOGGING)),
    ("tracker_kwargs.*", Ignored(LOGGING)),
    ("rollout_dump_dir", Ignored(LOGGING)),
    ("profiler_timeline", Ignored(LOGGING)),
    ("profiler_memory", Ignored(LOGGING)),
    ("profiler_output_dir", Ignored(LOGGING)),
    ("logging_steps", Ignored(LOGGING)),
    ("checkpoint_config.*", Ignored(LOGGING)),
    ("resume_from_checkpoint", Ignored("`anyroll run --resume` goes on")),
    ("system_envs.*", Ignored("set variables where you start the run")),
    ("model_download_type", Ignored("nothing is downloaded")),
    ("num_nodes", Ignored(PLACES)),
    ("num_gpus_per_node", Same("devices")),
    ("rpc_timeout", Same("strategy.collective_timeout_s")),
    ("max_steps", Same("pipeline.rlvr.steps")),
    ("save_steps", Same("pipeline.rlvr.checkpoint.every")),
    ("max_ckpt_to_keep", With(keep)),
    ("eval_steps", Same("pipeline.rlvr.evaluation.every")),
    ("rollout_batch_size", Same("pipeline.rlvr.prompts_per_step")),
    ("val_batch_size", Ignored("sequences are sampled `rollout.batch_size` at a time")),
    ("num_return_sequences_in_group", Same("pipeline.rlvr.group_size")),
    ("prompt_length", Refused("give the longest prompt in `data:`")),
    ("val_prompt_length", Ignored(EVALUATION)),
    ("val_sequence_length", Ignored(EVALUATION)),
    ("response_length", Same("pipeline.rlvr.rollout.max_new_tokens")),
    ("sequence_length", Together),
    ("is_num_return_sequences_expand", Ignored(ENGINE)),
    ("generate_opt_level", Ignored(ENGINE)),
    ("max_running_requests", Ignored(ENGINE)),
    ("is_use_additional_prompts", Unless(&["false"], "give `selection: {mixed_groups: {}}`")),
    ("use_additional_prompts", Ignored(DEAD)),
    ("max_additional_running_prompts", Ignored("`selection.mixed_groups.max_batches` bounds it")),
    ("model_update_buffer_size_mb", Ignored(ENGINE)),
    ("async_generation_ratio", Unless(&["0", "0.0"], "a step samples, then trains")),
    ("is_offload_states", Ignored("see `strategy.offload`")),
    (
        "is_offload_optimizer_states_in_train_step",
        Ignored("optimizer states are offloaded between steps by default"),
    ),
    ("pretrain", Refused(MODEL)),
    ("reward_pretrain", Refused(MODEL)),
    ("ppo_epochs", Same("pipeline.rlvr.epochs")),
    ("max_grad_norm", Same("pipeline.rlvr.optimizer.max_grad_norm")),
    ("l2", Ignored(DEAD)),
    ("use_reward_scaling", Ignored(DEAD)),
    ("use_reward_norm", Ignored(DEAD)),
    ("add_len_reward", Ignored(DEAD)),
    ("reward_norm", Ignored(DEAD)),
    ("reward_shift", Ignored(DEAD)),
    ("reward_scale", Ignored(DEAD)),
    ("positive_loss_coef", Ignored(DEAD)),
    ("adv_estimator", Together),
    ("lambd", Together),
    ("gamma", Together),
    ("norm_mean_type", Together),
    ("norm_std_type", Together),
    ("whiten_rewards", Unless(&["false"], "rewards are normalised within groups")),
    ("whiten_advantages", Same("pipeline.rlvr.algorithm.whiten_advantages")),
    ("advantage_clip", Same("pipeline.rlvr.algorithm.advantage_clip")),
    ("reward_clip", Same("pipeline.rlvr.algorithm.reward_clip")),
    ("pg_variant", Together),
    ("pg_clip", Together),
    ("use_pg_clip_range", Together),
    ("pg_clip_low", Together),
    ("pg_clip_high", Together),
    ("dual_clip_loss", Together),
    ("value_clip", Refused(CRITIC)),
    ("critic_warmup", Refused(CRITIC)),
    ("loss_agg_mode", Together),
    ("importance_sampling", Together),
    ("entropy_loss_coef", Same("pipeline.rlvr.algorithm.entropy_coef")),
    ("enable_reference", Ignored("there is a reference where the KL divergence weighs something")),
    ("add_token_level_kl", Together),
    ("use_kl_loss", Together),
    ("kl_loss_coef", Together),
    ("init_kl_coef", Together),
    ("kl_penalty", Together),
    ("target_kl", Together),
    ("kl_horizon", Together),
    ("enable_old_logprobs_recompute", With(recompute_logprobs)),
    ("force_disable_old_logprobs_recompute", Ignored("`old_logprobs: rollout` is the default")),
    ("max_len_mask", Same("pipeline.rlvr.selection.leave_out_cut")),
    ("difficulty_mask", Together),
    ("difficulty_low_threshold", Together),
    ("difficulty_high_threshold", Together),
    ("query_filter_config.type", Together),
    ("query_filter_config.*", Ignored("groups that are all right or all wrong are replaced")),
    ("error_max_len_clip", Unless(&["false"], "give a `length` reward")),
    ("error_max_len_threshold", Ignored("give a `length` reward")),
    ("train_infer_correction.*", Refused("give `rollout_correction`")),
    ("rewards.*", Together),
    ("validation.data_args.*", Refused("held-out prompts are a part of `data:`, by hash")),
    ("validation.*", Ignored(EVALUATION)),
    ("actor_train.model_args.dtype", Together),
    ("actor_train.model_args.disable_gradient_checkpointing", With(no_checkpointing)),
    ("actor_train.model_args.lora_rank", Refused("give adapters in `model:`")),
    ("actor_train.model_args.lora_target", Refused("give adapters in `model:`")),
    ("actor_train.model_args.lora_alpha", Refused("give adapters in `model:`")),
    ("actor_train.model_args.attn_implementation", Ignored(BLOCKS)),
    ("actor_train.model_args.flash_attn", Ignored(BLOCKS)),
    ("actor_train.model_args.model_type", Ignored(BLOCKS)),
    ("actor_train.model_args.ulysses_size", Unless(&["1"], "sequences are not split")),
    ("actor_train.model_args.*", Refused(MODEL)),
    ("actor_train.training_args.learning_rate", Same("pipeline.rlvr.optimizer.adamw.learning_rate")),
    ("actor_train.training_args.weight_decay", Same("pipeline.rlvr.optimizer.adamw.weight_decay")),
    ("actor_train.training_args.per_device_train_batch_size", Same("strategy.micro_batch_size")),
    ("actor_train.training_args.gradient_accumulation_steps", Together),
    ("actor_train.training_args.warmup_steps", Together),
    ("actor_train.training_args.lr_scheduler_type", Together),
    ("actor_train.training_args.num_train_epochs", Ignored("`steps` counts")),
    ("actor_train.training_args.*", Refused("see `optimizer:`")),
    ("actor_train.data_args.template", Refused(DATA)),
    ("actor_train.data_args.file_name", Refused(DATA)),
    ("actor_train.data_args.domain_interleave_probs.*", Refused(DATA)),
    ("actor_train.data_args.dataset_dir", Ignored(DEAD)),
    ("actor_train.data_args.interleave_probs", Ignored(DEAD)),
    ("actor_train.data_args.messages", Refused(DATA)),
    ("actor_train.data_args.preprocessing_num_workers", Ignored("data is read once")),
    ("actor_train.data_args.*", Refused(DATA)),
    ("actor_train.strategy_args.strategy_name", With(strategy)),
    ("actor_train.strategy_args.strategy_config.*", Together),
    ("actor_train.strategy_args.strategy_config", Ignored("it is empty")),
    ("actor_train.device_mapping", Together),
    ("actor_train.infer_batch_size", Ignored("`strategy.micro_batch_size` is for every pass")),
    ("actor_train.use_remove_padding", Ignored(DEAD)),
    ("actor_train.name", Ignored(LOGGING)),
    ("actor_infer.generating_args.max_new_tokens", Same("pipeline.rlvr.rollout.max_new_tokens")),
    ("actor_infer.generating_args.temperature", Same("pipeline.rlvr.rollout.temperature")),
    ("actor_infer.generating_args.top_p", Same("pipeline.rlvr.rollout.top_p")),
    ("actor_infer.generating_args.top_k", Same("pipeline.rlvr.rollout.top_k")),
    ("actor_infer.generating_args.num_return_sequences", Same("pipeline.rlvr.group_size")),
    ("actor_infer.generating_args.num_beams", Unless(&["1"], "completions are sampled")),
    ("actor_infer.generating_args.*", Refused("see `rollout:`")),
    ("actor_infer.*", Ignored(ENGINE)),
    ("reference.infer_batch_size", Same("roles.reference.strategy.micro_batch_size")),
    ("reference.*", Ignored("the reference is the policy's frozen copy, beside it")),
    ("critic.*", Refused(CRITIC)),
];

fn keep(value: &Value, import: &mut Import) -> Became {
    match value::number(value) {
        Some(count) if count >= 1.0 => {
            import.set("pipeline.rlvr.checkpoint.keep_last", value::whole(count));
            Became::Mapped("pipeline.rlvr.checkpoint.keep_last".into())
        }
        _ => Became::Refused("a number of checkpoints is kept, not all".into()),
    }
}

fn recompute_logprobs(value: &Value, import: &mut Import) -> Became {
    let on = value::boolean(value) == Some(true);
    import.set("pipeline.rlvr.algorithm.old_logprobs", if on { "recompute" } else { "rollout" });
    Became::Mapped("pipeline.rlvr.algorithm.old_logprobs".into())
}

fn no_checkpointing(value: &Value, import: &mut Import) -> Became {
    let off = value::boolean(value) == Some(true);
    trl::recompute(&Value::Bool(!off), import)
}

fn strategy(value: &Value, _: &mut Import) -> Became {
    match value.as_str() {
        Some("deepspeed_train") => Became::Mapped("strategy.zero_stage".into()),
        Some(name) => Became::Refused(format!("`{name}`: say ZeRO's stage in `strategy.zero_stage`")),
        None => Became::Refused("say ZeRO's stage in `strategy.zero_stage`".into()),
    }
}

fn whole(keys: &Keys, import: &mut Import) {
    let prefix = "actor_train.strategy_args.strategy_config";
    deepspeed::SOURCE.take_over_below(prefix, keys, import);
    lengths(keys, import);
    training(keys, import);
    advantage(keys, import);
    loss(keys, import);
    divergence(keys, import);
    selection(keys, import);
    rewards(keys, import);
}

fn lengths(keys: &Keys, import: &mut Import) {
    if let (Some(whole), Some(prompt)) = (keys.number("sequence_length"), keys.number("prompt_length")) {
        import.set("pipeline.rlvr.rollout.max_new_tokens", value::whole(whole - prompt));
    }
    let why = "less the prompt's length";
    let became = Became::Changed("pipeline.rlvr.rollout.max_new_tokens".into(), why.into());
    import.note(keys, "sequence_length", became);
}

fn training(keys: &Keys, import: &mut Import) {
    let arg = |name: &str| format!("actor_train.training_args.{name}");
    let ranks = match keys.get("actor_train.device_mapping") {
        Some(Value::String(text)) => range_length(text),
        Some(Value::Array(list)) => Some(list.len() as f64),
        _ => None,
    };
    let became = match ranks {
        Some(ranks) => {
            import.set("devices", value::whole(ranks));
            Became::Mapped("devices".into())
        }
        None => Became::Refused("it is no list of devices".into()),
    };
    import.note(keys, "actor_train.device_mapping", became);
    if let Some(dtype) = keys.get("actor_train.model_args.dtype").and_then(Value::as_str) {
        let precision = dtype.replace("float16", "f16").replace("bff16", "bf16");
        let precision = match precision.as_str() {
            "bf16" => Some("bf16"),
            "f16" | "fp16" => Some("fp16"),
            "fp32" | "float32" => Some("fp32"),
            _ => None,
        };
        let became = match precision {
            Some(precision) => {
                import.set("strategy.precision", precision);
                Became::Mapped("strategy.precision".into())
            }
            None => Became::Refused("there is only fp32, bf16 and fp16".into()),
        };
        import.note(keys, "actor_train.model_args.dtype", became);
    }
    let number = |key: &str, default| keys.number(key).unwrap_or(default);
    let accumulated = number(&arg("gradient_accumulation_steps"), 1.0);
    let update = number(&arg("per_device_train_batch_size"), 1.0) * accumulated * ranks.unwrap_or(1.0);
    let group = number("num_return_sequences_in_group", 1.0);
    let completions = number("rollout_batch_size", 128.0) * group;
    let updates = (completions / update).max(1.0).round();
    import.set("pipeline.rlvr.mini_batches", value::whole(updates));
    import.set("pipeline.rlvr.rollout.batch_size", value::whole((completions / ranks.unwrap_or(1.0)).ceil()));
    let why = format!("{completions} completions are {updates} updates of {update}");
    let became = Became::Changed("pipeline.rlvr.mini_batches".into(), why);
    import.note(keys, &arg("gradient_accumulation_steps"), became);
    let kind = match keys.get(&arg("lr_scheduler_type")).and_then(Value::as_str).unwrap_or("cosine") {
        "linear" => "linear",
        "cosine" => "cosine",
        _ => "constant",
    };
    let field = format!("pipeline.rlvr.optimizer.schedule.{kind}");
    import.set(&field, json!({}));
    if let Some(steps) = keys.number(&arg("warmup_steps")) {
        import.set(&format!("{field}.warmup_steps"), value::whole(steps));
    }
    import.note(keys, &arg("lr_scheduler_type"), Became::Mapped(field.clone()));
    import.note(keys, &arg("warmup_steps"), Became::Mapped(format!("{field}.warmup_steps")));
}

/// The length of `list(range(0,8))`.
fn range_length(text: &str) -> Option<f64> {
    let inside = text.trim().strip_prefix("list(range(")?.strip_suffix("))")?;
    let bounds: Option<Vec<f64>> = inside.split(',').map(|it| it.trim().parse().ok()).collect();
    match bounds?.as_slice() {
        [end] => Some(*end),
        [start, end] => Some(end - start),
        _ => None,
    }
}

fn advantage(keys: &Keys, import: &mut Import) {
    let text = |key| keys.get(key).and_then(Value::as_str);
    let gamma = keys.number("gamma").unwrap_or(1.0);
    let estimator = text("adv_estimator").unwrap_or("gae");
    let norms = (text("norm_mean_type"), text("norm_std_type"));
    let advantage = match (estimator, norms) {
        ("grpo", _) | ("reinforce", (Some("group"), Some("group"))) => {
            Ok(json!({"grpo": {"scale": "group_std"}}))
        }
        ("reinforce", (Some("group"), Some("batch"))) => Ok(json!({"grpo": {"scale": "batch_std"}})),
        ("reinforce", (Some("group"), None)) => Ok(json!({"grpo": {"scale": "none"}})),
        ("reinforce", (None, None)) => Ok(json!({"reinforce": {"gamma": gamma}})),
        ("reinforce", _) => Err("rewards are normalised within groups".to_owned()),
        ("gae", _) => Err(format!("`gae`: {CRITIC}")),
        (other, _) => Err(format!("there is no `{other}`")),
    };
    let field = "pipeline.rlvr.algorithm.advantage";
    let became = match advantage {
        Ok(advantage) => {
            import.set(field, advantage);
            Became::Mapped(field.into())
        }
        Err(why) => Became::Refused(why),
    };
    for key in ["adv_estimator", "norm_mean_type", "norm_std_type", "gamma"] {
        import.note(keys, key, became.clone());
    }
    let became = match estimator {
        "gae" => Became::Refused(CRITIC.into()),
        _ => Became::NoEffect("only `gae` has it".into()),
    };
    import.note(keys, "lambd", became);
}

fn loss(keys: &Keys, import: &mut Import) {
    let algorithm = "pipeline.rlvr.algorithm";
    let text = |key| keys.get(key).and_then(Value::as_str);
    let clip = keys.number("pg_clip").unwrap_or(0.2);
    let (low, high) = match keys.is_on("use_pg_clip_range") {
        true => (keys.number("pg_clip_low").unwrap_or(0.2), keys.number("pg_clip_high").unwrap_or(0.2)),
        false => (clip, clip),
    };
    let sequence = text("importance_sampling") == Some("seq");
    let name = match text("pg_variant").unwrap_or("vanilla") {
        "ppo" | "vanilla" if sequence => "gspo",
        "ppo" | "vanilla" => "clipped",
        "cispo" => "cispo",
        "tis" => "tis",
        "topr" => "topr",
        other => {
            import.note(keys, "pg_variant", Became::Refused(format!("there is no `{other}`")));
            return;
        }
    };
    let (ours, fields) = match name {
        "tis" => ("cispo", json!({"min_ratio": 0.0, "max_ratio": 1.0})),
        "cispo" => ("cispo", json!({"min_ratio": 1.0 - low, "max_ratio": 1.0 + high})),
        "topr" => ("topr", json!({})),
        other => (other, json!({"clip_low": low, "clip_high": high})),
    };
    let field = format!("{algorithm}.loss.{ours}");
    import.set(&field, fields);
    for key in
        ["pg_variant", "pg_clip", "use_pg_clip_range", "pg_clip_low", "pg_clip_high", "importance_sampling"]
    {
        import.note(keys, key, Became::Mapped(field.clone()));
    }
    let became = match (keys.is_on("dual_clip_loss"), ours) {
        (false, _) => Became::NoEffect("it is off".into()),
        (true, "clipped") => {
            // ROLL's constant, which is above 1 + high where the bounds are close.
            let bound = (1.0 + 2.0 * clip).max(1.0 + high + 1e-3);
            import.set(&format!("{field}.dual_clip"), bound);
            Became::Changed(
                format!("{field}.dual_clip"),
                format!("1 + 2 pg_clip, and above the ratio's bound: {bound}"),
            )
        }
        (true, _) => Became::Refused("only `clipped` has it".into()),
    };
    import.note(keys, "dual_clip_loss", became);
    aggregation(keys, import);
}

fn aggregation(keys: &Keys, import: &mut Import) {
    let mode = keys.get("loss_agg_mode").and_then(Value::as_str).unwrap_or("seq-mean-token-mean");
    let field = "pipeline.rlvr.algorithm.aggregation";
    let longest = import.settings.get("pipeline.rlvr.rollout.max_new_tokens").cloned().unwrap_or(json!(1024));
    let (value, became) = match mode {
        "token-mean" => (json!("token_mean"), Became::Mapped(field.into())),
        "seq-mean-token-mean" => (json!("seq_mean_token_mean"), Became::Mapped(field.into())),
        "seq-mean-token-sum" => (json!("seq_mean_token_sum"), Became::Mapped(field.into())),
        "seq-mean-token-sum-norm" => {
            let why = "over the longest length instead of a padded width, and over the number of sequences";
            let value = json!({"seq_mean_token_sum_norm": {"length": longest}});
            (value, Became::Changed(field.into(), why.into()))
        }
        other => {
            import.note(keys, "loss_agg_mode", Became::Refused(format!("there is no `{other}`")));
            return;
        }
    };
    import.set(field, value);
    import.note(keys, "loss_agg_mode", became);
}

/// ROLL has two coefficients: one in the loss, and one off the reward.
fn divergence(keys: &Keys, import: &mut Import) {
    let algorithm = "pipeline.rlvr.algorithm";
    let in_loss = keys.is_on("use_kl_loss") && keys.number("kl_loss_coef").unwrap_or(0.0) > 0.0;
    let in_reward = keys.is_on("add_token_level_kl") && keys.number("init_kl_coef").unwrap_or(0.2) > 0.0;
    let loss = ["use_kl_loss", "kl_loss_coef"];
    let reward = ["add_token_level_kl", "init_kl_coef", "kl_penalty", "target_kl", "kl_horizon"];
    let mut note =
        |names: &[&str], became: Became| names.iter().for_each(|key| import.note(keys, key, became.clone()));
    match (in_loss, in_reward) {
        (true, true) => note(
            &[&loss[..], &reward[..]].concat(),
            Became::Refused("it goes to one place, the loss or the reward".into()),
        ),
        (false, false) => {
            note(&[&loss[..], &reward[..]].concat(), Became::NoEffect("it weighs nothing".into()))
        }
        (true, false) => {
            note(&loss, Became::Mapped(format!("{algorithm}.kl_coef")));
            note(&reward, Became::NoEffect("it weighs nothing".into()));
            import.set(&format!("{algorithm}.kl_coef"), keys.number("kl_loss_coef").unwrap_or(0.0));
            import.set(&format!("{algorithm}.kl_in.loss.estimator"), "k3");
        }
        (false, true) => {
            note(&loss, Became::NoEffect("it weighs nothing".into()));
            note(&reward, Became::Mapped(format!("{algorithm}.kl_in.reward")));
            import.set(&format!("{algorithm}.kl_coef"), keys.number("init_kl_coef").unwrap_or(0.2));
            import.set(&format!("{algorithm}.kl_in.reward"), json!({}));
            if let Some(target) = keys.number("target_kl") {
                let horizon = keys.number("kl_horizon").unwrap_or(10_000.0);
                let adaptive = json!({"target": target, "horizon": horizon});
                import.set(&format!("{algorithm}.kl_in.reward.adaptive"), adaptive);
            }
        }
    }
}

fn selection(keys: &Keys, import: &mut Import) {
    let field = "pipeline.rlvr.selection";
    let on = keys.is_on("difficulty_mask");
    if on {
        let number = |key, default| keys.number(key).unwrap_or(default);
        let range = json!({
            "min": number("difficulty_low_threshold", 0.1),
            "max": number("difficulty_high_threshold", 0.95),
        });
        import.set(&format!("{field}.difficulty"), range);
    }
    for key in ["difficulty_mask", "difficulty_low_threshold", "difficulty_high_threshold"] {
        let became = match on {
            true => Became::Mapped(format!("{field}.difficulty")),
            false => Became::NoEffect("it is off".into()),
        };
        import.note(keys, key, became);
    }
    let filter = keys.get("query_filter_config.type").and_then(Value::as_str);
    let became = match filter {
        None | Some("no_filter") => Became::NoEffect("it is off".into()),
        Some("mean_filter" | "std_filter") => {
            import.set(&format!("{field}.mixed_groups"), json!({}));
            Became::Changed(
                format!("{field}.mixed_groups"),
                "groups that are all right or all wrong are replaced".into(),
            )
        }
        Some(other) => Became::Refused(format!("there is no `{other}`")),
    };
    import.note(keys, "query_filter_config.type", became);
}

/// A reward worker of ROLL's is a term here, and its tags are its domains.
fn rewards(keys: &Keys, import: &mut Import) {
    let mut terms = Vec::new();
    let named =
        keys.0.keys().filter_map(|key| key.strip_prefix("rewards.")?.split('.').next().map(str::to_owned));
    let mut names: Vec<String> = named.collect();
    names.dedup();
    for name in &names {
        let class = format!("rewards.{name}.worker_cls");
        let worker = keys.get(&class).and_then(Value::as_str).unwrap_or_default();
        let kind = match worker.rsplit('.').next().unwrap_or_default() {
            "MathRuleRewardWorker" => json!({"math": {"only_boxed": true}}),
            "CodeSandboxRewardWorker" => json!({"code": {}}),
            "MultipleChoiceBoxedRuleRewardWorker" => json!({"choice": {}}),
            "GeneralRuleRewardWorker" | "GeneralValRuleRewardWorker" | "IFEvalRewardWorker" => {
                json!({"ifeval": {}})
            }
            other => {
                let why = format!("`{other}` is no reward here; see `judge` and `python`");
                import.note(keys, &class, Became::Refused(why));
                Value::Null
            }
        };
        if let Value::Object(mut term) = kind {
            import.note(keys, &class, Became::Mapped("pipeline.rlvr.reward".into()));
            if let Some(tags) = keys.get(&format!("rewards.{name}.tag_included")) {
                term.insert("domains".into(), tags.clone());
            }
            terms.push(Value::Object(term));
        }
    }
    if !terms.is_empty() {
        import.set("pipeline.rlvr.reward", terms);
    }
    let all: Vec<String> = keys.0.keys().filter(|key| key.starts_with("rewards.")).cloned().collect();
    for key in all {
        let became = match key.rsplit('.').next().unwrap_or_default() {
            "worker_cls" => continue,
            "tag_included" => Became::Mapped("pipeline.rlvr.reward".into()),
            _ if key.contains(".query_filter_config.") => {
                Became::Refused("filters are of the whole run: see `selection:`".into())
            }
            _ => Became::NoEffect("a rank's `scoring.workers` score beside generation".into()),
        };
        import.note(keys, &key, became);
    }
}
