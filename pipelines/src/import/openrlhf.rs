//! OpenRLHF's command line of `train_ppo_ray`: its dotted flags, and the flat ones of before 0.10.

use serde_json::{Value, json};

use super::{Became, Import, Keys, Note, Rule, Source, trl, value};
use Rule::{Ignored, Refused, Same, Together, Unless, With};

pub(super) const SOURCE: Source = Source { rules: RULES, whole };

const PLACES: &str = "every rank holds its part of every role; `devices` says how many there are";
const ENGINE: &str = "sampling is part of the trainer, on the same weights";
const LOGGING: &str = "everything lands in the run folder";
const DATA: &str = "give the file in `data:`";
const MODEL: &str = "give the model in `model:`";
const ADAPTERS: &str = "give adapters in `model:`";
const CRITIC: &str = "give the critic's fields in `algorithm.advantage.gae`";
const BLOCKS: &str = "blocks have kernels of their own, and their transfers run beside the computation";

const RULES: &[(&str, Rule)] = &[
    ("actor.model_name_or_path", Refused(MODEL)),
    ("pretrain", Refused(MODEL)),
    ("ref.*", Ignored(PLACES)),
    ("ref.offload", With(offload_reference)),
    ("ref_reward_offload", With(offload_reference)),
    ("actor.num_nodes", Ignored(PLACES)),
    ("actor.num_gpus_per_node", Same("devices")),
    ("actor_num_nodes", Ignored(PLACES)),
    ("actor_num_gpus_per_node", Same("devices")),
    ("critic.num_nodes", Ignored(PLACES)),
    ("critic.num_gpus_per_node", Ignored(PLACES)),
    ("critic_num_nodes", Ignored(PLACES)),
    ("critic_num_gpus_per_node", Ignored(PLACES)),
    ("ref_num_nodes", Ignored(PLACES)),
    ("ref_num_gpus_per_node", Ignored(PLACES)),
    ("reward_num_nodes", Ignored(PLACES)),
    ("reward_num_gpus_per_node", Ignored(PLACES)),
    ("train.colocate_all", Ignored(PLACES)),
    ("train.colocate_actor_ref", Ignored(PLACES)),
    ("train.colocate_critic_reward", Ignored(PLACES)),
    ("colocate_all_models", Ignored(PLACES)),
    ("colocate_actor_ref", Ignored(PLACES)),
    ("colocate_critic_reward", Ignored(PLACES)),
    ("reward.model_name_or_path", Refused("give the reward in `reward:`")),
    ("reward_pretrain", Refused("give the reward in `reward:`")),
    ("reward.remote_url", Together),
    ("remote_rm_url", Together),
    ("reward.normalize_enable", Refused("give `whiten_advantages`, or a weight to the reward")),
    ("normalize_reward", Refused("give `whiten_advantages`, or a weight to the reward")),
    ("reward.clip_range", With(reward_clip)),
    ("reward_clip_range", With(reward_clip)),
    ("reward.overlong_buffer_len", Refused("give a `length` reward")),
    ("reward.overlong_penalty_factor", Refused("give a `length` reward, whose weight it is")),
    ("vllm.*", Ignored(ENGINE)),
    ("vllm_num_engines", Ignored(ENGINE)),
    ("vllm_tensor_parallel_size", Ignored(ENGINE)),
    ("vllm_sync_backend", Ignored(ENGINE)),
    ("vllm_gpu_memory_utilization", Ignored(ENGINE)),
    ("vllm_enable_sleep", Ignored(ENGINE)),
    ("vllm_sync_with_ray", Ignored(ENGINE)),
    ("enable_prefix_caching", Ignored(ENGINE)),
    ("enforce_eager", Ignored(ENGINE)),
    ("ds.zero_stage", Same("strategy.zero_stage")),
    ("zero_stage", Same("strategy.zero_stage")),
    ("ds.param_dtype", With(dtype)),
    ("param_dtype", With(dtype)),
    ("bf16", With(bf16)),
    ("ds.adam_offload", With(adam_offload)),
    ("adam_offload", With(adam_offload)),
    ("ds.enable_sleep", With(sleep)),
    ("deepspeed_enable_sleep", With(sleep)),
    ("ds.zpg", Unless(&["1"], "there is no second partition of the weights")),
    ("zpg", Unless(&["1"], "there is no second partition of the weights")),
    ("ds.tensor_parallel_size", Unless(&["1"], "layers are not split")),
    ("ds_tensor_parallel_size", Unless(&["1"], "layers are not split")),
    ("ds.ring_attn_size", Unless(&["1"], "sequences are not split")),
    ("ring_attn_size", Unless(&["1"], "sequences are not split")),
    ("ds.load_in_4bit", Unless(&["false"], "weights are not quantized")),
    ("load_in_4bit", Unless(&["false"], "weights are not quantized")),
    ("ds.lora.*", Refused(ADAPTERS)),
    ("lora_rank", Unless(&["0"], ADAPTERS)),
    ("lora_alpha", Refused(ADAPTERS)),
    ("target_modules", Refused(ADAPTERS)),
    ("ds.packing_samples", Ignored("sequences are always packed")),
    ("packing_samples", Ignored("sequences are always packed")),
    ("ds.attn_implementation", Ignored(BLOCKS)),
    ("attn_implementation", Ignored(BLOCKS)),
    ("flash_attn", Ignored(BLOCKS)),
    ("ds.*", Ignored(BLOCKS)),
    ("overlap_comm", Ignored(BLOCKS)),
    ("use_liger_kernel", Ignored(BLOCKS)),
    ("grad_accum_dtype", Ignored("gradients are summed in fp32")),
    ("actor.gradient_checkpointing_enable", With(trl::recompute)),
    ("gradient_checkpointing", With(trl::recompute)),
    ("train.enable_ema", Unless(&["false"], "there is no average of weights")),
    ("enable_ema", Unless(&["false"], "there is no average of weights")),
    ("train.num_episodes", Ignored("`steps` counts")),
    ("num_episodes", Ignored("`steps` counts")),
    ("train.max_epochs", Same("pipeline.rlvr.epochs")),
    ("max_epochs", Same("pipeline.rlvr.epochs")),
    ("train.batch_size", Together),
    ("train_batch_size", Together),
    ("train.micro_batch_size", Same("strategy.micro_batch_size")),
    ("micro_train_batch_size", Same("strategy.micro_batch_size")),
    ("train.dynamic_batch_enable", Unless(&["false"], "a micro-batch has `micro_batch_size` sequences")),
    ("train.max_tokens_per_gpu", Ignored("a micro-batch has `micro_batch_size` sequences")),
    ("rollout.max_tokens_per_gpu", Ignored("a micro-batch has `micro_batch_size` sequences")),
    ("train.seed", Same("seed")),
    ("seed", Same("seed")),
    ("train.full_determinism_enable", Ignored("a run is a function of its config and seed")),
    ("full_determinism", Ignored("a run is a function of its config and seed")),
    ("train.async_enable", Unless(&["false"], "a step samples, then trains")),
    ("async_train", Unless(&["false"], "a step samples, then trains")),
    ("train.partial_rollout_enable", Unless(&["false"], "a completion ends in the step that began it")),
    ("train.agent_func_path", Refused("a completion is one turn")),
    ("agent_func_path", Refused("a completion is one turn")),
    ("rollout.batch_size", Same("pipeline.rlvr.prompts_per_step")),
    ("rollout_batch_size", Same("pipeline.rlvr.prompts_per_step")),
    ("rollout.micro_batch_size", Same("pipeline.rlvr.rollout.batch_size")),
    ("micro_rollout_batch_size", Same("pipeline.rlvr.rollout.batch_size")),
    ("rollout.vllm_generate_batch_size", Ignored(ENGINE)),
    ("rollout.n_samples_per_prompt", Same("pipeline.rlvr.group_size")),
    ("n_samples_per_prompt", Same("pipeline.rlvr.group_size")),
    ("rollout.max_new_tokens", Same("pipeline.rlvr.rollout.max_new_tokens")),
    ("generate_max_len", Same("pipeline.rlvr.rollout.max_new_tokens")),
    ("rollout.temperature", Same("pipeline.rlvr.rollout.temperature")),
    ("temperature", Same("pipeline.rlvr.rollout.temperature")),
    ("rollout.top_p", Same("pipeline.rlvr.rollout.top_p")),
    ("top_p", Same("pipeline.rlvr.rollout.top_p")),
    ("data.*", Refused(DATA)),
    ("prompt_data", Refused(DATA)),
    ("input_key", Refused(DATA)),
    ("label_key", Refused(DATA)),
    ("apply_chat_template", Refused(DATA)),
    ("prompt_max_len", Refused(DATA)),
    ("max_samples", Refused(DATA)),
    ("actor.eps_clip", Together),
    ("eps_clip", Together),
    ("actor.eps_clip_low_high", Together),
    ("eps_clip_low_high", Together),
    ("actor.dual_clip", Together),
    ("dual_clip", Together),
    ("actor.policy_loss_type", Together),
    ("policy_loss_type", Together),
    ("actor.entropy_coef", Same("pipeline.rlvr.algorithm.entropy_coef")),
    ("entropy_loss_coef", Same("pipeline.rlvr.algorithm.entropy_coef")),
    ("actor.aux_loss_coef", Unless(&["0", "0.0"], "there are no experts")),
    ("algo.advantage.estimator", Together),
    ("advantage_estimator", Together),
    ("algo.advantage.lambd", Together),
    ("lambd", Together),
    ("algo.advantage.gamma", Together),
    ("gamma", Together),
    ("algo.advantage.no_std_norm", Ignored("`whiten_advantages` and `scale` say what is normalised")),
    ("algo.advantage.is_correction_enable", Together),
    ("enable_vllm_is_correction", Together),
    ("algo.advantage.is_correction_threshold", Together),
    ("algo.advantage.is_correction_type", Together),
    ("algo.kl.init_coef", Same("pipeline.rlvr.algorithm.kl_coef")),
    ("init_kl_coef", Same("pipeline.rlvr.algorithm.kl_coef")),
    ("algo.kl.use_loss", Together),
    ("use_kl_loss", Together),
    ("algo.kl.estimator", Together),
    ("kl_estimator", Together),
    ("algo.kl.target", Together),
    ("kl_target", Together),
    ("algo.kl.horizon", Together),
    ("kl_horizon", Together),
    ("algo.dynamic_filtering_enable", Together),
    ("dynamic_filtering", Together),
    ("algo.dynamic_filtering_range", Ignored("groups that are all right or all wrong are replaced")),
    ("dynamic_filtering_reward_range", Ignored("groups that are all right or all wrong are replaced")),
    ("actor.optim", Unless(&["\"adam\""], "the optimizer is AdamW")),
    ("actor.adam.lr", Same("pipeline.rlvr.optimizer.adamw.learning_rate")),
    ("actor_learning_rate", Same("pipeline.rlvr.optimizer.adamw.learning_rate")),
    ("actor.adam.betas", Same("pipeline.rlvr.optimizer.adamw.betas")),
    ("adam_betas", Same("pipeline.rlvr.optimizer.adamw.betas")),
    ("actor.adam.eps", Same("pipeline.rlvr.optimizer.adamw.eps")),
    ("actor.adam.weight_decay", Same("pipeline.rlvr.optimizer.adamw.weight_decay")),
    ("l2", Same("pipeline.rlvr.optimizer.adamw.weight_decay")),
    ("actor.max_norm", Same("pipeline.rlvr.optimizer.max_grad_norm")),
    ("max_norm", Same("pipeline.rlvr.optimizer.max_grad_norm")),
    ("actor.lr_scheduler", With(schedule)),
    ("lr_scheduler", With(schedule)),
    ("actor.lr_warmup_ratio", Refused("give `warmup_steps` in the schedule")),
    ("lr_warmup_ratio", Refused("give `warmup_steps` in the schedule")),
    ("actor.min_lr_ratio", Refused("give `final_ratio` in the schedule")),
    ("critic.*", Refused(CRITIC)),
    ("critic_pretrain", Refused(CRITIC)),
    ("critic_learning_rate", Refused(CRITIC)),
    ("value_clip", Refused(CRITIC)),
    ("freezing_actor_steps", Refused(CRITIC)),
    ("eval.steps", With(every_evaluation)),
    ("eval_steps", With(every_evaluation)),
    ("eval.*", Ignored("`evaluation:` says what is measured")),
    ("ckpt.save_steps", With(every_checkpoint)),
    ("save_steps", With(every_checkpoint)),
    ("ckpt.max_num", Same("pipeline.rlvr.checkpoint.keep_last")),
    ("max_ckpt_num", Same("pipeline.rlvr.checkpoint.keep_last")),
    ("ckpt.*", Ignored(LOGGING)),
    ("ckpt_path", Ignored(LOGGING)),
    ("save_path", Ignored(LOGGING)),
    ("save_hf_ckpt", Ignored(LOGGING)),
    ("disable_ds_ckpt", Ignored(LOGGING)),
    ("load_checkpoint", Ignored("`anyroll run --resume` goes on")),
    ("logger.wandb.run_name", With(trl::name)),
    ("wandb_run_name", With(trl::name)),
    ("logger.*", Ignored(LOGGING)),
    ("use_wandb", Ignored(LOGGING)),
    ("wandb_project", Ignored(LOGGING)),
    ("use_tensorboard", Ignored(LOGGING)),
    ("logging_steps", Ignored(LOGGING)),
];

fn offload_reference(value: &Value, import: &mut Import) -> Became {
    let field = "roles.reference.strategy.offload.params";
    let on = value::boolean(value) == Some(true);
    import.set(field, if on { "between_steps" } else { "none" });
    Became::Mapped(field.into())
}

fn reward_clip(value: &Value, import: &mut Import) -> Became {
    let bounds = value.as_array().map(|list| list.iter().filter_map(value::number).collect::<Vec<f64>>());
    match bounds.as_deref() {
        Some([low, high]) if *low == -*high && *high > 0.0 => {
            import.set("pipeline.rlvr.algorithm.reward_clip", *high);
            Became::Mapped("pipeline.rlvr.algorithm.reward_clip".into())
        }
        _ => Became::Refused("rewards are clamped to minus and plus the same number".into()),
    }
}

fn dtype(value: &Value, import: &mut Import) -> Became {
    let precision = value.as_str().filter(|it| ["bf16", "fp16", "fp32"].contains(it));
    match precision {
        Some(precision) => {
            import.set("strategy.precision", precision);
            Became::Mapped("strategy.precision".into())
        }
        None => Became::Refused("there is only fp32, bf16 and fp16".into()),
    }
}

fn bf16(value: &Value, import: &mut Import) -> Became {
    dtype(&if value::boolean(value) == Some(true) { "bf16" } else { "fp32" }.into(), import)
}

fn adam_offload(value: &Value, import: &mut Import) -> Became {
    if value::boolean(value) != Some(true) {
        return Became::NoEffect("it is off".into());
    }
    import.set("strategy.offload.optimizer", "between_steps");
    let why = "states are in host memory between steps; the step itself is on the device";
    Became::Changed("strategy.offload.optimizer".into(), why.into())
}

fn sleep(value: &Value, import: &mut Import) -> Became {
    let on = value::boolean(value) == Some(true);
    import.set("strategy.offload.optimizer", if on { "between_steps" } else { "none" });
    Became::Mapped("strategy.offload.optimizer".into())
}

fn schedule(value: &Value, import: &mut Import) -> Became {
    let kind = match value.as_str() {
        Some("constant" | "constant_with_warmup") => "constant",
        Some("linear") => "linear",
        Some("cosine" | "cosine_with_min_lr") => "cosine",
        _ => return Became::Refused("the schedules are constant, linear and cosine".into()),
    };
    let field = format!("pipeline.rlvr.optimizer.schedule.{kind}");
    import.set(&field, json!({}));
    Became::Mapped(field)
}

fn every_evaluation(value: &Value, import: &mut Import) -> Became {
    every(value, "pipeline.rlvr.evaluation.every", import)
}

fn every_checkpoint(value: &Value, import: &mut Import) -> Became {
    every(value, "pipeline.rlvr.checkpoint.every", import)
}

/// -1 is never, which is not there: before and after the run there is always one.
fn every(value: &Value, field: &str, import: &mut Import) -> Became {
    match value::number(value) {
        Some(steps) if steps >= 1.0 => {
            import.set(field, value::whole(steps));
            Became::Mapped(field.into())
        }
        _ => Became::Changed(field.into(), "the default; the last step always has one".into()),
    }
}

/// The value of a flag in its dotted or its flat form, and which of them it is.
fn either<'a>(keys: &'a Keys, names: [&'a str; 2]) -> Option<(&'a str, &'a Value)> {
    names.into_iter().find_map(|name| Some((name, keys.get(name)?)))
}

fn whole(keys: &Keys, import: &mut Import) {
    batches(keys, import);
    advantage(keys, import);
    loss(keys, import);
    divergence(keys, import);
    if let Some((key, _)) = either(keys, ["algo.dynamic_filtering_enable", "dynamic_filtering"]) {
        let field = "pipeline.rlvr.selection.mixed_groups";
        if keys.is_on(key) {
            import.set(field, json!({}));
        }
        import.note(keys, key, Became::Mapped(field.into()));
    }
    for names in [["reward.remote_url", "remote_rm_url"]] {
        let Some((key, value)) = either(keys, names) else { continue };
        let became = match value.as_str().filter(|path| path.ends_with(".py")) {
            Some(_) => Became::Refused(
                "its function takes queries; wrap it for a `python` reward, TRL's signature".into(),
            ),
            None => Became::Refused("give a `judge` or a `python` reward".into()),
        };
        import.note(keys, key, became);
    }
}

fn batches(keys: &Keys, import: &mut Import) {
    let number = |names| either(keys, names).and_then(|(_, value)| value::number(value));
    let Some((key, train)) = either(keys, ["train.batch_size", "train_batch_size"]) else { return };
    let prompts = number(["rollout.batch_size", "rollout_batch_size"]);
    let group = number(["rollout.n_samples_per_prompt", "n_samples_per_prompt"]).unwrap_or(1.0);
    let field = "pipeline.rlvr.mini_batches";
    let became = match (prompts, value::number(train)) {
        (Some(prompts), Some(train)) if train > 0.0 => {
            let updates = (prompts * group / train).max(1.0).round();
            import.set(field, value::whole(updates));
            let why = format!("{prompts} prompts with {group} completions are {updates} updates of {train}");
            Became::Changed(field.into(), why)
        }
        _ => Became::Refused("without the rollout's batch size it is no number of updates".into()),
    };
    import.note(keys, key, became);
}

fn advantage(keys: &Keys, import: &mut Import) {
    let algorithm = "pipeline.rlvr.algorithm";
    let field = format!("{algorithm}.advantage");
    let named = either(keys, ["algo.advantage.estimator", "advantage_estimator"]);
    let number =
        |names, default| either(keys, names).and_then(|(_, it)| value::number(it)).unwrap_or(default);
    let gamma = number(["algo.advantage.gamma", "gamma"], 1.0);
    let lambda = number(["algo.advantage.lambd", "lambd"], 1.0);
    let (advantage, whiten) = match named.and_then(|(_, value)| value.as_str()).unwrap_or("gae") {
        "gae" => (json!({"gae": {"gamma": gamma, "lambda": lambda}}), true),
        "reinforce" => (json!({"reinforce": {"gamma": gamma}}), true),
        "reinforce_baseline" => (json!({"grpo": {"scale": "none"}}), true),
        "rloo" => (json!("rloo"), false),
        "group_norm" => (json!({"grpo": {"scale": "group_std", "eps": 1e-9}}), false),
        "dr_grpo" => (json!({"grpo": {"scale": "none"}}), false),
        other => {
            let key = named.map_or("advantage_estimator", |(key, _)| key);
            import.note(keys, key, Became::Refused(format!("there is no `{other}`")));
            return;
        }
    };
    import.set(&field, advantage);
    import.set(&format!("{algorithm}.whiten_advantages"), whiten);
    for key in [
        "algo.advantage.estimator",
        "advantage_estimator",
        "algo.advantage.gamma",
        "gamma",
        "algo.advantage.lambd",
        "lambd",
    ] {
        import.note(keys, key, Became::Mapped(field.clone()));
    }
}

fn loss(keys: &Keys, import: &mut Import) {
    let algorithm = "pipeline.rlvr.algorithm";
    let kind = either(keys, ["actor.policy_loss_type", "policy_loss_type"]).and_then(|(_, it)| it.as_str());
    let clip =
        either(keys, ["actor.eps_clip", "eps_clip"]).and_then(|(_, it)| value::number(it)).unwrap_or(0.2);
    let bounds =
        either(keys, ["actor.eps_clip_low_high", "eps_clip_low_high"]).and_then(|(_, it)| it.as_array());
    let bounds: Option<Vec<f64>> = bounds.map(|list| list.iter().filter_map(value::number).collect());
    let (low, high) = match bounds.as_deref() {
        Some([low, high]) => (*low, *high),
        _ => (clip, clip),
    };
    let name = if kind == Some("gspo") { "gspo" } else { "clipped" };
    let field = format!("{algorithm}.loss.{name}");
    import.set(&field, json!({"clip_low": low, "clip_high": high}));
    if name == "gspo" {
        import.set(&format!("{algorithm}.aggregation"), "seq_mean_token_mean");
    }
    for key in [
        "actor.policy_loss_type",
        "policy_loss_type",
        "actor.eps_clip",
        "eps_clip",
        "actor.eps_clip_low_high",
        "eps_clip_low_high",
    ] {
        import.note(keys, key, Became::Mapped(field.clone()));
    }
    if let Some((key, bound)) = either(keys, ["actor.dual_clip", "dual_clip"]) {
        import.set(&format!("{field}.dual_clip"), bound.clone());
        import.note(keys, key, Became::Mapped(format!("{field}.dual_clip")));
    }
    correction(keys, import);
}

fn correction(keys: &Keys, import: &mut Import) {
    let algorithm = "pipeline.rlvr.algorithm";
    let field = format!("{algorithm}.rollout_correction");
    let switch = either(keys, ["algo.advantage.is_correction_enable", "enable_vllm_is_correction"]);
    let on = switch.is_some_and(|(key, _)| keys.is_on(key));
    let bounds = keys.get("algo.advantage.is_correction_threshold").and_then(Value::as_array);
    let bounds: Vec<f64> =
        bounds.map_or(vec![0.5, 5.0], |list| list.iter().filter_map(value::number).collect());
    let (min, max) = (bounds.first().copied().unwrap_or(0.5), bounds.last().copied().unwrap_or(5.0));
    let kind = keys.get("algo.advantage.is_correction_type").and_then(Value::as_str).unwrap_or("tis");
    let became = match (on, kind) {
        (false, _) => Became::NoEffect("it is off".into()),
        (true, "tis") => {
            import.set(&format!("{field}.truncate"), json!({"level": "token", "max": max}));
            Became::Changed(field.clone(), "weights have an upper bound only".into())
        }
        (true, "icepop") => {
            import.set(&format!("{field}.mask"), json!({"level": "token", "min": min, "max": max}));
            Became::Mapped(field.clone())
        }
        (true, "seq-mask-tis") => {
            import.set(&format!("{field}.mask"), json!({"level": "geometric", "min": min, "max": max}));
            Became::Changed(
                field.clone(),
                "sequences out of bounds weigh 0, and the others' tokens too have their weight".into(),
            )
        }
        (true, other) => Became::Refused(format!("there is no `{other}`")),
    };
    if on && !matches!(became, Became::Refused(_)) {
        import.set(&format!("{algorithm}.old_logprobs"), "recompute");
    }
    for key in [
        "algo.advantage.is_correction_enable",
        "enable_vllm_is_correction",
        "algo.advantage.is_correction_threshold",
        "algo.advantage.is_correction_type",
    ] {
        import.note(keys, key, became.clone());
    }
}

fn divergence(keys: &Keys, import: &mut Import) {
    let algorithm = "pipeline.rlvr.algorithm";
    let in_loss = either(keys, ["algo.kl.use_loss", "use_kl_loss"]).is_some_and(|(key, _)| keys.is_on(key));
    let coef = either(keys, ["algo.kl.init_coef", "init_kl_coef"]).and_then(|(_, it)| value::number(it));
    let mut push = |key: &str, became: Became| {
        if let Some(value) = keys.0.get(key) {
            import.notes.push(Note { key: key.to_owned(), value: value.clone(), became });
        }
    };
    let field = format!("{algorithm}.kl_in");
    for key in ["algo.kl.use_loss", "use_kl_loss"] {
        push(key, Became::Mapped(field.clone()));
    }
    for key in ["algo.kl.estimator", "kl_estimator"] {
        push(
            key,
            match in_loss {
                true => Became::Mapped(format!("{field}.loss.estimator")),
                false => Became::Changed(field.clone(), "off the reward it is k1".into()),
            },
        );
    }
    for key in ["algo.kl.target", "kl_target", "algo.kl.horizon", "kl_horizon"] {
        push(key, Became::Mapped(format!("{field}.reward.adaptive")));
    }
    if in_loss {
        let estimator = either(keys, ["algo.kl.estimator", "kl_estimator"]).and_then(|(_, it)| it.as_str());
        import.set(&format!("{field}.loss.estimator"), estimator.unwrap_or("k1"));
    } else if coef.unwrap_or(0.01) > 0.0 {
        import.set(&format!("{field}.reward"), json!({}));
        if let Some((_, target)) = either(keys, ["algo.kl.target", "kl_target"]) {
            let horizon =
                either(keys, ["algo.kl.horizon", "kl_horizon"]).and_then(|(_, it)| value::number(it));
            let adaptive = json!({"target": target, "horizon": horizon.unwrap_or(10_000.0)});
            import.set(&format!("{field}.reward.adaptive"), adaptive);
        }
    }
}
