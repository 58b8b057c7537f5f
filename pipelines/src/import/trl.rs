//! TRL's GRPO and RLOO configs.

use serde_json::{Value, json};

use super::{Became, Import, Keys, Rule, Source, value};
use Rule::{Ignored, Refused, Same, Together, Unless, With};

pub(super) const SOURCE: Source = Source { rules: RULES, whole };

const ENGINE: &str = "sampling is part of the trainer, on the same weights";
const LOGGING: &str = "everything lands in the run folder";
const HUB: &str = "nothing is uploaded";
const MODEL: &str = "give the model in `model:`";
const ADAPTERS: &str = "give adapters in `model:`";
const DATA: &str = "give the file in `data:`";

const RULES: &[(&str, Rule)] = &[
    ("model_name_or_path", Refused(MODEL)),
    ("model_revision", Refused(MODEL)),
    ("dtype", With(dtype)),
    ("torch_dtype", With(dtype)),
    ("bf16", With(bf16)),
    ("fp16", With(fp16)),
    ("tf32", Ignored("matrices of fp32 are multiplied in fp32")),
    ("attn_implementation", Ignored("the attention is the backend's fastest")),
    ("trust_remote_code", Ignored("no code comes with a model")),
    ("use_peft", Unless(&["false"], ADAPTERS)),
    ("lora_r", Refused(ADAPTERS)),
    ("lora_alpha", Refused(ADAPTERS)),
    ("lora_dropout", Refused(ADAPTERS)),
    ("lora_target_modules", Refused(ADAPTERS)),
    ("load_in_4bit", Unless(&["false"], "weights are not quantized")),
    ("load_in_8bit", Unless(&["false"], "weights are not quantized")),
    ("dataset_name", Refused(DATA)),
    ("dataset_config", Refused(DATA)),
    ("dataset_train_split", Refused(DATA)),
    ("dataset_test_split", Refused(DATA)),
    ("dataset_num_proc", Ignored("data is read once")),
    ("datasets", Refused(DATA)),
    ("reward_funcs", Together),
    ("reward_weights", Together),
    ("reward_model_name_or_path", Refused("give the reward in `reward:`")),
    ("run_name", With(name)),
    ("output_dir", Ignored("`anyroll run --output` names the run folder")),
    ("overwrite_output_dir", Ignored("a run folder is never overwritten")),
    ("seed", Same("seed")),
    ("data_seed", Ignored("one seed is for all")),
    ("max_steps", Same("pipeline.rlvr.steps")),
    ("num_train_epochs", Together),
    ("per_device_train_batch_size", Together),
    ("per_device_eval_batch_size", Ignored("sequences are sampled `rollout.batch_size` at a time")),
    ("gradient_accumulation_steps", Together),
    ("steps_per_generation", Together),
    ("generation_batch_size", Together),
    ("num_generations", Same("pipeline.rlvr.group_size")),
    ("num_generations_eval", Same("pipeline.rlvr.evaluation.samples")),
    ("num_iterations", Same("pipeline.rlvr.epochs")),
    ("max_completion_length", Same("pipeline.rlvr.rollout.max_new_tokens")),
    ("max_prompt_length", Refused("give the longest prompt in `data:`")),
    ("temperature", Same("pipeline.rlvr.rollout.temperature")),
    ("top_p", Same("pipeline.rlvr.rollout.top_p")),
    ("top_k", Same("pipeline.rlvr.rollout.top_k")),
    ("min_p", Same("pipeline.rlvr.rollout.min_p")),
    ("repetition_penalty", Same("pipeline.rlvr.rollout.repetition_penalty")),
    ("cache_implementation", Ignored(ENGINE)),
    ("generation_kwargs", Refused("give the fields of `rollout:`")),
    ("use_vllm", Ignored(ENGINE)),
    ("vllm_mode", Ignored(ENGINE)),
    ("vllm_gpu_memory_utilization", Ignored(ENGINE)),
    ("vllm_tensor_parallel_size", Ignored(ENGINE)),
    ("vllm_server_base_url", Ignored(ENGINE)),
    ("vllm_server_host", Ignored(ENGINE)),
    ("vllm_server_port", Ignored(ENGINE)),
    ("vllm_server_timeout", Ignored(ENGINE)),
    ("vllm_model_impl", Ignored(ENGINE)),
    ("vllm_max_model_length", Ignored(ENGINE)),
    ("vllm_enable_sleep_mode", Ignored(ENGINE)),
    ("vllm_structured_outputs_regex", Ignored(ENGINE)),
    ("vllm_importance_sampling_correction", Together),
    ("vllm_importance_sampling_mode", Together),
    ("vllm_importance_sampling_cap", Together),
    ("vllm_importance_sampling_clip_max", Together),
    ("beta", Same("pipeline.rlvr.algorithm.kl_coef")),
    ("use_bias_correction_kl", Unless(&["false"], "the KL divergence in the loss has no importance weights")),
    ("epsilon", Together),
    ("epsilon_high", Together),
    ("delta", Together),
    ("loss_type", Together),
    ("importance_sampling_level", Together),
    ("scale_rewards", With(scale_rewards)),
    ("multi_objective_aggregation", Unless(&["\"sum_then_normalize\""], "rewards are summed first")),
    ("mask_truncated_completions", Same("pipeline.rlvr.selection.leave_out_cut")),
    ("top_entropy_quantile", Unless(&["1", "1.0"], "all tokens are trained on")),
    ("off_policy_mask_threshold", Refused("see `rollout_correction` for what there is")),
    ("entropy_coef", Same("pipeline.rlvr.algorithm.entropy_coef")),
    ("disable_dropout", Ignored("there is no dropout")),
    ("shuffle_dataset", Unless(&["true"], "prompts are shuffled")),
    ("sync_ref_model", Unless(&["false"], "the reference stays as it was")),
    ("ref_model_mixup_alpha", Ignored("the reference stays as it was")),
    ("ref_model_sync_steps", Ignored("the reference stays as it was")),
    ("use_liger_kernel", Ignored("blocks have kernels of their own")),
    ("use_liger_loss", Ignored("logits are never kept")),
    ("ds3_gather_for_generation", Ignored("weights are gathered once for sampling")),
    ("remove_unused_columns", Ignored("rewards see every column")),
    ("learning_rate", Same("pipeline.rlvr.optimizer.adamw.learning_rate")),
    ("adam_beta1", Together),
    ("adam_beta2", Together),
    ("adam_epsilon", Same("pipeline.rlvr.optimizer.adamw.eps")),
    ("weight_decay", Same("pipeline.rlvr.optimizer.adamw.weight_decay")),
    ("max_grad_norm", Same("pipeline.rlvr.optimizer.max_grad_norm")),
    (
        "optim",
        Unless(&["\"adamw_torch\"", "\"adamw_torch_fused\"", "\"adamw_hf\""], "the optimizer is AdamW"),
    ),
    ("lr_scheduler_type", Together),
    ("lr_scheduler_kwargs.min_lr_rate", Together),
    ("warmup_steps", Together),
    ("warmup_ratio", Together),
    ("gradient_checkpointing", With(recompute)),
    ("gradient_checkpointing_kwargs.*", Ignored("there is one way to run a block again")),
    ("eval_strategy", Ignored("`evaluation.every` says when")),
    ("do_eval", Ignored("`evaluation.every` says when")),
    ("eval_steps", Same("pipeline.rlvr.evaluation.every")),
    ("save_strategy", Ignored("`checkpoint.every` says when")),
    ("save_steps", Same("pipeline.rlvr.checkpoint.every")),
    ("save_total_limit", Same("pipeline.rlvr.checkpoint.keep_last")),
    ("save_only_model", Unless(&["false"], "a checkpoint can be resumed")),
    ("resume_from_checkpoint", Ignored("`anyroll run --resume` goes on")),
    ("logging_steps", Ignored(LOGGING)),
    ("logging_first_step", Ignored(LOGGING)),
    ("logging_strategy", Ignored(LOGGING)),
    ("logging_dir", Ignored(LOGGING)),
    ("log_level", Ignored(LOGGING)),
    ("log_completions", Ignored(LOGGING)),
    ("num_completions_to_print", Ignored(LOGGING)),
    ("report_to", Ignored(LOGGING)),
    ("push_to_hub", Ignored(HUB)),
    ("hub_model_id", Ignored(HUB)),
    ("hub_strategy", Ignored(HUB)),
    ("ddp_timeout", Same("strategy.collective_timeout_s")),
    ("accelerate_config", Refused("give the file by `--accelerate-config`")),
    ("deepspeed", Refused("give the file by `--deepspeed-config`")),
    ("num_processes", Together),
    ("env.*", Ignored("set variables where you start the run")),
];

fn dtype(value: &Value, import: &mut Import) -> Became {
    let ours = match value.as_str() {
        Some("bfloat16") => "bf16",
        Some("float16") => "fp16",
        Some("float32") => "fp32",
        _ => return Became::Refused("write float32 or bfloat16".into()),
    };
    import.set("strategy.precision", ours);
    Became::Changed(
        "strategy.precision".into(),
        "weights and activations; master weights are fp32 in any case".into(),
    )
}

fn bf16(value: &Value, import: &mut Import) -> Became {
    switch(value, "bf16", import)
}

fn fp16(value: &Value, import: &mut Import) -> Became {
    switch(value, "fp16", import)
}

fn switch(value: &Value, precision: &str, import: &mut Import) -> Became {
    if value::boolean(value) != Some(true) {
        return Became::NoEffect("it is off".into());
    }
    import.set("strategy.precision", precision);
    Became::Mapped("strategy.precision".into())
}

/// A run's name here starts its folder's.
pub(super) fn name(value: &Value, import: &mut Import) -> Became {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let plain: String =
        text.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect();
    let plain = plain.trim_start_matches(['-', '_', '.']).to_owned();
    if plain.is_empty() {
        return Became::Refused("it has no letter that a folder's name can start with".into());
    }
    let same = plain == text;
    import.set("name", plain);
    match same {
        true => Became::Mapped("name".into()),
        false => Became::Changed("name".into(), "it starts a folder's name".into()),
    }
}

pub(super) fn recompute(value: &Value, import: &mut Import) -> Became {
    let on = value::boolean(value) == Some(true);
    import.set("strategy.recompute", if on { "full" } else { "none" });
    Became::Mapped("strategy.recompute".into())
}

fn scale_rewards(value: &Value, import: &mut Import) -> Became {
    let scale = match value.as_str() {
        Some("group") => "group_std",
        Some("batch") => "batch_std",
        Some("none") => "none",
        _ => match value::boolean(value) {
            Some(true) => "group_std",
            Some(false) => "none",
            None => return Became::Refused("write group, batch or none".into()),
        },
    };
    let field = "pipeline.rlvr.algorithm.advantage.grpo";
    import.set(&format!("{field}.scale"), scale);
    import.set(&format!("{field}.eps"), 1e-4);
    Became::Mapped(field.into())
}

fn whole(keys: &Keys, import: &mut Import) {
    batches(keys, import);
    loss(keys, import);
    rewards(keys, import);
    correction(keys, import);
    optimizer(keys, import);
}

/// TRL counts completions a device; here a step has prompts over all ranks.
fn batches(keys: &Keys, import: &mut Import) {
    let per_device = keys.number("per_device_train_batch_size").unwrap_or(8.0);
    let accumulated = keys.number("gradient_accumulation_steps").unwrap_or(1.0);
    let ranks = keys.number("num_processes").unwrap_or(1.0);
    let group = keys.number("num_generations").unwrap_or(8.0);
    let generation = keys.number("generation_batch_size");
    let steps = keys.number("steps_per_generation").unwrap_or(accumulated);
    let completions = generation.unwrap_or(per_device * ranks * steps);
    let update = per_device * ranks * accumulated;
    import.set("strategy.micro_batch_size", value::whole(per_device));
    import.set("pipeline.rlvr.prompts_per_step", value::whole((completions / group).max(1.0)));
    import.set("pipeline.rlvr.mini_batches", value::whole((completions / update).max(1.0)));
    import.set("pipeline.rlvr.rollout.batch_size", value::whole(completions / ranks));
    import.note(keys, "per_device_train_batch_size", Became::Mapped("strategy.micro_batch_size".into()));
    let field = "pipeline.rlvr.prompts_per_step";
    let why =
        format!("{completions} completions of a step over {ranks} ranks are {} prompts", completions / group);
    for key in ["gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"] {
        import.note(keys, key, Became::Changed(field.into(), why.clone()));
    }
    if keys.number("num_processes").is_some() {
        import.set("devices", value::whole(ranks));
    }
    import.note(keys, "num_processes", Became::Mapped("devices".into()));
    let became = match keys.get("max_steps") {
        Some(_) => Became::NoEffect("`max_steps` counts".into()),
        None => Became::Refused("give the number of steps in `steps`".into()),
    };
    import.note(keys, "num_train_epochs", became);
}

fn loss(keys: &Keys, import: &mut Import) {
    let algorithm = "pipeline.rlvr.algorithm";
    let kind = keys.get("loss_type").and_then(Value::as_str).unwrap_or("dapo");
    let sequence = keys.get("importance_sampling_level").and_then(Value::as_str) == Some("sequence");
    let low = keys.number("epsilon").unwrap_or(0.2);
    let high = keys.number("epsilon_high").unwrap_or(low);
    let longest = keys.number("max_completion_length").unwrap_or(512.0);
    let (loss, aggregation) = match kind {
        "grpo" => ("clipped", json!("seq_mean_token_mean")),
        "dapo" | "bnpo" => ("clipped", json!("token_mean")),
        "dr_grpo" => ("clipped", json!({"seq_mean_token_sum_norm": {"length": value::whole(longest)}})),
        "cispo" => ("cispo", json!("token_mean")),
        "sapo" => ("sapo", json!("token_mean")),
        other => {
            import.note(keys, "loss_type", Became::Refused(format!("there is no `{other}`")));
            return;
        }
    };
    import.set(&format!("{algorithm}.aggregation"), aggregation);
    let loss = if sequence { "gspo" } else { loss };
    let fields = match loss {
        "cispo" => json!({"min_ratio": 0.0, "max_ratio": high}),
        "sapo" => json!({}),
        _ => json!({"clip_low": low, "clip_high": high}),
    };
    let field = format!("{algorithm}.loss.{loss}");
    import.set(&field, fields);
    let became = match kind {
        "bnpo" => {
            Became::Changed(field.clone(), "counts are those of the mini-batch, not of a micro-batch".into())
        }
        _ => Became::Mapped(field.clone()),
    };
    import.note(keys, "loss_type", became);
    for key in ["importance_sampling_level", "epsilon", "epsilon_high"] {
        import.note(keys, key, Became::Mapped(field.clone()));
    }
    if let Some(delta) = keys.number("delta") {
        let became = match loss == "clipped" && delta > 1.0 + high {
            true => {
                import.set(&format!("{field}.dual_clip"), delta);
                Became::Changed(
                    format!("{field}.dual_clip"),
                    "the same bound, where the advantage is negative".into(),
                )
            }
            false => {
                Became::Refused("a bound at or below 1 + epsilon_high changes positive advantages too".into())
            }
        };
        import.note(keys, "delta", became);
    }
}

fn rewards(keys: &Keys, import: &mut Import) {
    let names: Vec<&str> = match keys.get("reward_funcs") {
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).collect(),
        Some(Value::String(name)) => vec![name],
        _ => return,
    };
    let weights = keys.get("reward_weights").and_then(Value::as_array);
    let weight =
        |index: usize| weights.and_then(|list| list.get(index)).and_then(value::number).unwrap_or(1.0);
    let mut terms = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let mut term = match *name {
            "accuracy_reward" => json!({"math": {}}),
            "think_format_reward" => json!({"regex": {"pattern": "<think>.*</think>.*"}}),
            other => {
                let why = format!("`{other}`: name its file in a `python` reward");
                import.note(keys, "reward_funcs", Became::Refused(why));
                return;
            }
        };
        term["weight"] = json!(weight(index));
        terms.push(term);
    }
    import.set("pipeline.rlvr.reward", terms);
    import.note(keys, "reward_funcs", Became::Mapped("pipeline.rlvr.reward".into()));
    import.note(keys, "reward_weights", Became::Mapped("pipeline.rlvr.reward".into()));
}

fn correction(keys: &Keys, import: &mut Import) {
    let algorithm = "pipeline.rlvr.algorithm";
    let mode = keys.get("vllm_importance_sampling_mode").and_then(Value::as_str).unwrap_or("sequence_mask");
    let bound =
        keys.number("vllm_importance_sampling_clip_max").or(keys.number("vllm_importance_sampling_cap"));
    let bound = bound.unwrap_or(3.0);
    let field = format!("{algorithm}.rollout_correction");
    let became = match keys.is_on("vllm_importance_sampling_correction") {
        false => Became::NoEffect("one engine samples and trains".into()),
        true => {
            let level = if mode.starts_with("token") { "token" } else { "sequence" };
            let kind = if mode.ends_with("truncate") { "truncate" } else { "mask" };
            import.set(&format!("{field}.{kind}"), json!({"level": level, "max": bound}));
            import.set(&format!("{algorithm}.old_logprobs"), "recompute");
            Became::Mapped(field)
        }
    };
    for key in [
        "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_cap",
        "vllm_importance_sampling_clip_max",
    ] {
        import.note(keys, key, became.clone());
    }
}

fn optimizer(keys: &Keys, import: &mut Import) {
    let field = "pipeline.rlvr.optimizer";
    let betas = [keys.number("adam_beta1"), keys.number("adam_beta2")];
    if betas.iter().any(Option::is_some) {
        import.set(&format!("{field}.adamw.betas"), vec![betas[0].unwrap_or(0.9), betas[1].unwrap_or(0.999)]);
    }
    for key in ["adam_beta1", "adam_beta2"] {
        import.note(keys, key, Became::Mapped(format!("{field}.adamw.betas")));
    }
    let kind = match keys.get("lr_scheduler_type").and_then(Value::as_str).unwrap_or("linear") {
        "linear" => "linear",
        "constant" | "constant_with_warmup" => "constant",
        "cosine" | "cosine_with_min_lr" => "cosine",
        other => {
            let why = format!("there is no `{other}`; the nearest are constant, linear and cosine");
            import.note(keys, "lr_scheduler_type", Became::Refused(why));
            return;
        }
    };
    let field = format!("{field}.schedule.{kind}");
    let steps = keys.number("max_steps").unwrap_or(0.0);
    let ratio = keys.number("warmup_ratio").unwrap_or(0.0);
    let warmup = keys.number("warmup_steps").unwrap_or((ratio * steps).ceil());
    import.set(&field, json!({}));
    import.set(&format!("{field}.warmup_steps"), value::whole(warmup));
    import.note(keys, "lr_scheduler_type", Became::Mapped(field.clone()));
    let became = Became::Mapped(format!("{field}.warmup_steps"));
    import.note(keys, "warmup_steps", became);
    let became = match keys.number("max_steps") {
        Some(_) => Became::Changed(format!("{field}.warmup_steps"), format!("{warmup} steps")),
        None => Became::Refused("without `max_steps` it is no number of steps".into()),
    };
    import.note(keys, "warmup_ratio", became);
    if let (Some(ratio), "cosine") = (keys.number("lr_scheduler_kwargs.min_lr_rate"), kind) {
        import.set(&format!("{field}.final_ratio"), ratio);
    }
    import.note(keys, "lr_scheduler_kwargs.min_lr_rate", Became::Mapped(format!("{field}.final_ratio")));
}
