//! Importer of TRL's GRPO and RLOO: `GRPOConfig`, the model's and the script's arguments in one YAML.
//! Defaults are TRL's.

use serde_json::{Value, json};

use super::shared::{ALL_WEIGHTS, DOWNLOAD, IN_FOUR_BITS, ONE_ENGINE, R, REPORTS, ROLLOUT_BATCH_SIZE};
use super::{ledger::Ledger, rules, schedule::Schedule, speculation, values};

fn defaults() -> [(&'static str, Value); 18] {
    [
        ("num_generations", json!(8)),
        ("max_completion_length", json!(512)),
        ("per_device_train_batch_size", json!(8)),
        ("gradient_accumulation_steps", json!(1)),
        ("num_iterations", json!(1)),
        ("learning_rate", json!(1e-6)),
        ("lr_scheduler_type", json!("linear")),
        ("adam_beta1", json!(0.9)),
        ("adam_beta2", json!(0.999)),
        ("weight_decay", json!(0.0)),
        ("max_grad_norm", json!(1.0)),
        ("temperature", json!(1.0)),
        ("top_p", json!(1.0)),
        ("beta", json!(0.0)),
        ("epsilon", json!(0.2)),
        ("loss_type", json!("dapo")),
        ("scale_rewards", json!("group")),
        ("seed", json!(42)),
    ]
}

pub(super) const IDLE: [(&str, &str); 35] = [
    ("use_vllm", ONE_ENGINE),
    ("vllm_tensor_parallel_size", ALL_WEIGHTS),
    ("vllm_*", ONE_ENGINE),
    ("ds3_gather_for_generation", ONE_ENGINE),
    ("use_transformers_paged", ONE_ENGINE),
    ("cache_implementation", ONE_ENGINE),
    ("attn_implementation", "the attention kernel is chosen by device"),
    ("use_liger_kernel", "fused kernels are always used"),
    ("use_liger_loss", "fused kernels are always used"),
    ("logging_*", REPORTS),
    ("log_*", REPORTS),
    ("report_to", REPORTS),
    ("run_name", REPORTS),
    ("num_completions_to_print", REPORTS),
    ("wandb_*", REPORTS),
    ("disable_tqdm", REPORTS),
    ("output_dir", "set by --output"),
    ("overwrite_output_dir", "a run folder is never overwritten"),
    ("remove_unused_columns", "only named columns are read"),
    ("dataloader_*", "every rank reads the data itself, without workers"),
    ("dataset_num_proc", "every rank reads the data itself, without workers"),
    ("gradient_checkpointing_kwargs.*", "blocks are recomputed as a whole"),
    ("eval_strategy", "set by `evaluation.every`"),
    ("save_strategy", "set by `checkpoint.every`"),
    ("do_*", "a run trains and evaluates"),
    ("ddp_*", "one layout serves every stage"),
    ("trust_remote_code", "no code is run from a model's folder"),
    ("dataset_test_split", "prompts are held out by hash"),
    ("bf16_full_eval", "evaluation uses the policy's precision"),
    ("main_process_port", "`anyroll run` starts the ranks"),
    ("per_device_eval_batch_size", "evaluation uses the batch sizes of training"),
    ("disable_dropout", "only adapters have dropout"),
    ("lora_task_type", "adapters are always for a decoder"),
    ("bnb_4bit_*", "`load_in_4bit` is off"),
    ("use_bnb_nested_quant", "`load_in_4bit` is off"),
];

pub(super) const REFUSED: [(&str, &str); 15] = [
    ("push_to_hub", "nothing is uploaded; `anyroll export` writes a folder to upload"),
    ("hub_*", "nothing is uploaded; `anyroll export` writes a folder to upload"),
    ("load_in_4bit", IN_FOUR_BITS),
    ("load_in_8bit", "frozen weights are in 4 bits or in `strategy.precision`"),
    ("torch_compile", "blocks are hand-written; nothing is compiled"),
    ("sync_ref_model", "the reference never changes"),
    ("ref_model_mixup_alpha", "the reference never changes"),
    ("ref_model_sync_steps", "the reference never changes"),
    (
        "environment_factory",
        "set the class in `rollout.environment`: its `step` gets the text, docs/guides/environments.md",
    ),
    (
        "tools",
        "write a class that reads calls from the text and set it in `rollout.environment`, docs/guides/environments.md",
    ),
    ("chat_template_kwargs*", "prompts are rendered by the model's chat template without options"),
    ("normalize_advantages", "it belongs to RLOO, but this is a config of GRPO: set `advantage: rloo`"),
    (
        "reward_clip_range",
        "it belongs to RLOO, but this is a config of GRPO: set `advantage: rloo` \
         and `reward_clip`",
    ),
    ("deepspeed", "import that JSON with --from deepspeed"),
    ("accelerate_config", "import that file with --from accelerate"),
];

pub(super) fn apply(ledger: &mut Ledger) {
    ledger.assume(&defaults());
    ledger.fill("name", "imported_from_trl");
    ledger.fill("backend", "auto");
    model(ledger);
    let updates_per_step = batches(ledger);
    optimizer(ledger, R, updates_per_step);
    sampling(ledger);
    algorithm(ledger);
    rewards(ledger);
    data(ledger);
    run(ledger, R, updates_per_step);
    sources(ledger);
    ledger.idle_all(&IDLE);
    ledger.refuse_all(&REFUSED);
}

/// The model's path, precision, adapters and recomputation.
pub(super) fn model(ledger: &mut Ledger) {
    if let Some(name) = ledger.text("model_name_or_path") {
        ledger.change("model_name_or_path", "model.path", name, DOWNLOAD);
    }
    precision(ledger);
    ledger.assume(&[("gradient_checkpointing", json!(true))]);
    ledger.either("gradient_checkpointing", "strategy.recompute", "full", "none");
    lora(ledger);
}

/// Compute precision, set by `bf16` (on by default unless `fp16` is) and `fp16`. `dtype` is that of the
/// weights, whose master is fp32 here.
fn precision(ledger: &mut Ledger) {
    let field = "strategy.precision";
    let [bf16, fp16] = ["bf16", "fp16"].map(|key| ledger.truth(key));
    if bf16.is_none() && fp16 != Some(true) {
        ledger.assume_if_unset("bf16", json!(true));
    }
    for key in ["bf16", "fp16"] {
        ledger.switch(key, field, key);
    }
    rules::leave_unset(ledger, &["dtype", "torch_dtype"]);
    for key in ["dtype", "torch_dtype"] {
        match (ledger.text(key).as_deref(), ledger.draft(field).is_some()) {
            (None, _) => {}
            (Some("bfloat16"), false) => ledger.map(key, field, "bf16"),
            (Some("float16"), false) => ledger.map(key, field, "fp16"),
            (Some("float32"), false) => ledger.map(key, field, "fp32"),
            (Some("bfloat16" | "float16" | "float32" | "auto"), _) => {
                ledger.idle(key, "the master weights are fp32; `bf16` and `fp16` set the compute precision");
            }
            (Some(_), _) => ledger.refuse(key, "weights are bfloat16, float16 or float32"),
        }
    }
    ledger.fill(field, "fp32");
}

fn lora(ledger: &mut Ledger) {
    let key = "use_peft";
    rules::leave_unset(ledger, &[key]);
    match (ledger.peek(key).is_some(), ledger.truth(key)) {
        (false, _) => {}
        (true, Some(true)) => {
            ledger.fold(key, "by `model.lora`");
            return adapters(ledger);
        }
        (true, Some(false)) => ledger.idle(key, "off"),
        (true, None) => ledger.refuse(key, "neither true nor false"),
    }
    let off = "use_peft is off";
    ledger.idle_all(&[("lora_*", off), ("use_rslora", off), ("use_dora", off)]);
}

fn adapters(ledger: &mut Ledger) {
    let defaults = [("lora_r", json!(16)), ("lora_alpha", json!(32)), ("lora_dropout", json!(0.05))];
    ledger.assume(&defaults);
    ledger.copy_number("lora_r", "model.lora.rank");
    ledger.copy_number("lora_alpha", "model.lora.alpha");
    ledger.copy_number("lora_dropout", "model.lora.dropout");
    rules::peft_targets(ledger, "lora_target_modules");
    ledger.switch("use_rslora", "model.lora.rslora", true);
    ledger.switch("use_dora", "model.lora.dora", true);
    if ledger.frozen_weights("load_in_4bit") {
        const KEPT: &str = "each block of 64 values has an fp32 scale: 4.5 bits a value";
        let kind = "bnb_4bit_quant_type";
        match ledger.text(kind).as_deref() {
            None | Some("nf4") => ledger.idle_all(&[(kind, "the codes are those of NF4")]),
            Some(_) => ledger.refuse(kind, "the codes are those of `nf4`"),
        }
        let computes = "blocks compute in `strategy.precision`";
        ledger.idle_all(&[
            ("bnb_4bit_use_double_quant", KEPT),
            ("use_bnb_nested_quant", KEPT),
            ("bnb_4bit_compute_dtype", computes),
            ("bnb_4bit_quant_storage", "codes are bytes, which every ZeRO stage shards"),
        ]);
    }
}

/// TRL counts batches in completions per device, ours are prompts per step over all ranks. Returns the number
/// of its optimizer steps in a step of ours.
fn batches(ledger: &mut Ledger) -> u64 {
    rules::leave_unset(ledger, &["num_processes", "steps_per_generation", "generation_batch_size"]);
    let world = rules::map_count(ledger, "num_processes", "devices", 1);
    let micro_batch = "strategy.micro_batch_size";
    let per_device = rules::map_count(ledger, "per_device_train_batch_size", micro_batch, 8);
    let epochs = rules::map_count(ledger, "num_iterations", &format!("{R}.epochs"), 1);
    let accumulation = rules::count(ledger, "gradient_accumulation_steps", 1);
    let per_generation = rules::count(ledger, "steps_per_generation", accumulation);
    let ranks = per_device.saturating_mul(world);
    let completions = ranks.saturating_mul(per_generation);
    let completions = rules::count(ledger, "generation_batch_size", completions);
    let update = ranks.saturating_mul(accumulation);
    let updates = (completions / update).max(1);

    let prompts = groups(ledger, completions, world);
    let field = format!("{R}.mini_batches");
    for key in ["steps_per_generation", "generation_batch_size"] {
        match prompts {
            _ if ledger.peek(key).is_none() => {}
            _ if !completions.is_multiple_of(update) => {
                let why =
                    format!("{completions} completions per step cannot be divided into updates of {update}");
                ledger.refuse(key, why);
            }
            Some(prompts) if !prompts.is_multiple_of(updates) => {
                let why = format!("{prompts} groups per step cannot be divided into {updates} updates");
                ledger.refuse(key, why);
            }
            _ => ledger.change(key, &field, updates, format!("{updates} updates per step")),
        }
    }
    if prompts.is_some_and(|prompts| prompts.is_multiple_of(updates)) {
        ledger.fill(&field, updates);
    }
    let updates_per_step = updates.saturating_mul(epochs);
    steps(ledger, R, updates_per_step);
    updates_per_step
}

/// Number of prompts in a step, if its completions form whole groups.
fn groups(ledger: &mut Ledger, completions: u64, world: u64) -> Option<u64> {
    let (key, accumulation) = ("num_generations", "gradient_accumulation_steps");
    let group = rules::count(ledger, key, 8);
    let is_whole = completions.is_multiple_of(group);
    if ledger.peek(key).is_some() {
        match is_whole {
            true => ledger.map(key, &format!("{R}.group_size"), group),
            false => ledger
                .refuse(key, format!("{completions} completions per step do not form groups of {group}")),
        }
    }
    if ledger.peek(accumulation).is_some() {
        let why = format!("{completions} completions in groups of {group}, on {world} devices");
        match is_whole {
            true => ledger.change(accumulation, &format!("{R}.prompts_per_step"), completions / group, why),
            false => ledger.fold(accumulation, format!("{completions} completions per step")),
        }
    }
    is_whole.then_some(completions / group)
}

/// Length of the run: `max_steps` if positive, else `num_train_epochs`.
pub(super) fn steps(ledger: &mut Ledger, pipeline: &str, updates_per_step: u64) {
    let field = format!("{pipeline}.steps");
    match ledger.number("max_steps") {
        Some(steps) if steps <= 0.0 && steps.fract() == 0.0 => ledger.idle("max_steps", "no limit"),
        _ => rules::updates_to_steps(ledger, "max_steps", &field, updates_per_step),
    }
    if ledger.draft(&field).is_none() {
        ledger.assume(&[("num_train_epochs", json!(3))]);
    }
    rules::data_epochs(ledger, "num_train_epochs", &field, "max_steps");
}

/// AdamW and its schedule.
pub(super) fn optimizer(ledger: &mut Ledger, pipeline: &str, updates_per_step: u64) {
    let adamw = format!("{pipeline}.optimizer.adamw");
    ledger.copy_number("learning_rate", &format!("{adamw}.learning_rate"));
    ledger.copy_number("weight_decay", &format!("{adamw}.weight_decay"));
    ledger.copy_number("adam_epsilon", &format!("{adamw}.eps"));
    match ledger.text("optim").as_deref() {
        None => {}
        Some("adamw_torch" | "adamw_torch_fused" | "adamw_hf" | "adamw_apex_fused") => {
            ledger.idle("optim", "AdamW is the optimizer");
        }
        Some("adamw_8bit" | "adamw_bnb_8bit" | "paged_adamw_8bit" | "adamw_torch_8bit") => {
            ledger.moments_in_eight_bits("optim");
        }
        Some("paged_adamw" | "paged_adamw_32bit") => {
            ledger.idle("optim", "`strategy.offload.optimizer` says where the states are");
        }
        Some(_) => ledger.refuse("optim", "the optimizer is AdamW"),
    }
    rules::max_grad_norm(ledger, "max_grad_norm", &format!("{pipeline}.optimizer.max_grad_norm"));
    rules::beta_keys(ledger, ["adam_beta1", "adam_beta2"], &format!("{adamw}.betas"));
    let schedule = Schedule {
        pipeline,
        name: "lr_scheduler_type",
        warmup: ["warmup_steps", "warmup_ratio"],
        final_ratio: "lr_scheduler_kwargs.min_lr_rate",
        updates_per_step,
    };
    schedule.apply(ledger);
}

fn sampling(ledger: &mut Ledger) {
    let rollout = format!("{R}.rollout");
    ledger.copy_number("max_completion_length", &format!("{rollout}.max_new_tokens"));
    ledger.copy_number("temperature", &format!("{rollout}.temperature"));
    ledger.copy_number("top_p", &format!("{rollout}.top_p"));
    ledger.copy_number("top_k", &format!("{rollout}.top_k"));
    ledger.copy_number("min_p", &format!("{rollout}.min_p"));
    match ledger.number("repetition_penalty") {
        Some(1.0) => ledger.idle("repetition_penalty", "none"),
        Some(_) => ledger.copy_number("repetition_penalty", &format!("{rollout}.repetition_penalty")),
        None => {}
    }
    ledger.fill(&format!("{rollout}.batch_size"), ROLLOUT_BATCH_SIZE);
    speculation::of_transformers(ledger, "generation_kwargs");
    if ledger.peek("generation_kwargs").is_some() {
        ledger.refuse_all(&[("generation_kwargs", "set them in `rollout`")]);
    }
}

fn algorithm(ledger: &mut Ledger) {
    let a = format!("{R}.algorithm");
    ledger.copy_number("beta", &format!("{a}.kl_coef"));
    ledger.copy_number("router_aux_loss_coef", &format!("{a}.router_aux_loss_coef"));
    aggregation_of_terms(ledger);
    match ledger.peek("scale_rewards").map(|value| (values::truth(value), values::text(value))) {
        Some((Some(true), _)) => grpo_scale(ledger, "group_std"),
        Some((_, word)) if word == "group" => grpo_scale(ledger, "group_std"),
        Some((_, word)) if word == "batch" => grpo_scale(ledger, "batch_std"),
        Some((Some(false), _)) => grpo_scale(ledger, "none"),
        Some((_, word)) if word == "none" => grpo_scale(ledger, "none"),
        Some(_) => ledger.refuse("scale_rewards", "must be group, batch or none"),
        None => {}
    }
    masks(ledger, &a);
    loss(ledger, &a);
    entropy(ledger, &a);
    ledger.flag("mask_truncated_completions", &format!("{R}.selection.leave_out_cut"));
    match ledger.truth("vllm_importance_sampling_correction") {
        Some(true) => ledger.idle("vllm_importance_sampling_correction", ONE_ENGINE),
        Some(false) => ledger.idle("vllm_importance_sampling_correction", "off"),
        None => {}
    }
}

/// The entropy bonus, after the aggregation: TRL's is a mean over tokens whatever the loss is.
fn entropy(ledger: &mut Ledger, a: &str) {
    let (key, adaptive) = ("entropy_coef", "use_adaptive_entropy");
    match ledger.truth(adaptive) {
        Some(true) => ledger.refuse(adaptive, "the coefficient is constant: set `algorithm.entropy_coef`"),
        Some(false) => ledger.idle(adaptive, "off"),
        None => {}
    }
    let of_adaptive = "only with `use_adaptive_entropy`";
    for name in ["entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"] {
        ledger.idle_all(&[(name, of_adaptive)]);
    }
    let field = format!("{a}.entropy_coef");
    let by_tokens = ledger.draft(&format!("{a}.aggregation")).is_none_or(|it| it == "token_mean");
    match ledger.number(key) {
        Some(coef) if coef < 0.0 => ledger.refuse(key, "entropy is only raised: 0 or above"),
        Some(coef) if coef > 0.0 && !by_tokens => {
            let why = "weighted as `aggregation` weights tokens; TRL's is the mean over tokens";
            ledger.change(key, &field, values::json(coef), why);
        }
        _ => ledger.copy_number(key, &field),
    }
}

/// Order of summing and normalizing terms.
fn aggregation_of_terms(ledger: &mut Ledger) {
    let key = "multi_objective_aggregation";
    match ledger.text(key).as_deref() {
        None => {}
        Some("sum_then_normalize") => ledger.idle(key, "by `scale_rewards`"),
        Some("normalize_then_sum") => {
            ledger.map(key, &format!("{R}.algorithm.advantage"), json!({"gdpo": {"eps": 1e-4}}));
            ledger.idle_all(&[("scale_rewards", "each term has its own deviation")]);
        }
        Some(_) => ledger.refuse(key, "must be sum_then_normalize or normalize_then_sum"),
    }
}

fn grpo_scale(ledger: &mut Ledger, scale: &str) {
    let grpo = format!("{R}.algorithm.advantage.grpo");
    ledger.map("scale_rewards", &format!("{grpo}.scale"), scale);
    ledger.fill(&format!("{grpo}.eps"), 1e-4);
}

fn loss(ledger: &mut Ledger, a: &str) {
    let level = "importance_sampling_level";
    rules::leave_unset(ledger, &[level]);
    let by_sequence = ledger.text(level).as_deref() == Some("sequence");
    if ledger.text(level).is_some_and(|level| !["token", "sequence"].contains(&level.as_str())) {
        ledger.refuse(level, "levels are token and sequence");
    }
    let kind = ledger.text("loss_type").unwrap_or_default();
    let (aggregation, loss) = match kind.as_str() {
        "grpo" => (json!("seq_mean_token_mean"), "clipped"),
        "dapo" | "bnpo" => (json!("token_mean"), "clipped"),
        "dr_grpo" => {
            let length = ledger.draft(&format!("{R}.rollout.max_new_tokens")).cloned().unwrap_or(json!(256));
            (json!({"seq_mean_token_sum_norm": {"length": length}}), "clipped")
        }
        "cispo" => (json!("token_mean"), "cispo"),
        "sapo" => (json!("seq_mean_token_mean"), "sapo"),
        "vespo" => (json!("token_mean"), "vespo"),
        "luspo" if by_sequence => (json!("seq_mean_token_sum"), "clipped"),
        _ => {
            let why = "losses are grpo, dapo, bnpo, dr_grpo, cispo, sapo, vespo, and luspo by sequence";
            ledger.refuse("loss_type", why);
            return ledger.idle_all(&[("epsilon*", "part of the loss")]);
        }
    };
    let loss = if by_sequence && loss == "clipped" { "gspo" } else { loss };
    let field = format!("{a}.aggregation");
    match kind.as_str() {
        "bnpo" => ledger.change("loss_type", &field, aggregation, "the mean is over the tokens of all ranks"),
        _ => ledger.map("loss_type", &field, aggregation),
    }
    if ledger.peek("importance_sampling_level").is_some() {
        ledger.map("importance_sampling_level", &format!("{a}.loss"), loss_fields(loss));
        clips(ledger, &format!("{a}.loss.{loss}"), loss);
    } else {
        clips(ledger, &format!("{a}.loss.{loss}"), loss);
    }
}

/// Masks of tokens, and weights of their divergence.
fn masks(ledger: &mut Ledger, a: &str) {
    rules::leave_unset(ledger, &["off_policy_mask_threshold"]);
    ledger.copy_number("off_policy_mask_threshold", &format!("{a}.off_policy_mask"));
    match ledger.number("top_entropy_quantile") {
        Some(1.0) => ledger.idle("top_entropy_quantile", "every token of a completion counts"),
        Some(share) => {
            let why = "entropies are taken over a step before its first update, not over each update";
            ledger.change("top_entropy_quantile", &format!("{a}.top_entropy"), values::json(share), why);
            ledger.fill(&format!("{a}.old_logprobs"), "recompute");
        }
        None => {}
    }
    let (key, by_sequence) = ("use_bias_correction_kl", "importance_sampling_level");
    match ledger.truth(key) {
        Some(true) if ledger.text(by_sequence).as_deref() == Some("sequence") => {
            ledger.refuse(key, "a divergence is weighted by the ratio of its token");
        }
        Some(true) => ledger.map(key, &format!("{a}.kl_in.loss.weighted"), true),
        Some(false) => ledger.idle(key, "off"),
        None => {}
    }
}

/// A loss whose constants are mapped separately.
fn loss_fields(loss: &str) -> Value {
    json!({loss: {}})
}

fn clips(ledger: &mut Ledger, field: &str, loss: &str) {
    let (low, high) = (ledger.number("epsilon"), ledger.number("epsilon_high"));
    match loss {
        "clipped" | "gspo" => {
            ledger.copy_number("epsilon", &format!("{field}.clip_low"));
            ledger.copy_number("epsilon_high", &format!("{field}.clip_high"));
            if let (Some(low), None) = (low, high) {
                ledger.fill(&format!("{field}.clip_high"), values::json(low));
            }
        }
        "cispo" if high.is_some() => {
            ledger.copy_number("epsilon_high", &format!("{field}.max_ratio"));
            ledger.idle("epsilon", "CISPO has only an upper bound");
        }
        "cispo" => {
            rules::leave_unset(ledger, &["epsilon_high"]);
            let why = "without `epsilon_high` it is TRL's bound of the ratio itself; 5 is usual";
            let most = low.map_or(Value::Null, values::json);
            ledger.change("epsilon", &format!("{field}.max_ratio"), most, why);
        }
        "vespo" => {
            for (key, name) in [
                ("vespo_k_pos", "k_positive"),
                ("vespo_lambda_pos", "lambda_positive"),
                ("vespo_k_neg", "k_negative"),
                ("vespo_lambda_neg", "lambda_negative"),
            ] {
                ledger.copy_number(key, &format!("{field}.{name}"));
            }
            ledger.idle("epsilon", "VESPO does not clip its weights");
        }
        _ => {
            ledger.copy_number("sapo_temperature_pos", &format!("{field}.tau_positive"));
            ledger.copy_number("sapo_temperature_neg", &format!("{field}.tau_negative"));
            ledger.idle("epsilon", "SAPO has gates instead of clipping");
        }
    }
    if loss == "clipped" {
        ledger.copy_number("delta", &format!("{field}.dual_clip"));
    }
}

fn rewards(ledger: &mut Ledger) {
    let key = "reward_funcs";
    let Some(names) = ledger.peek(key).cloned() else { return };
    let names = match names {
        Value::Array(names) => names,
        one => vec![one],
    };
    let weights = match ledger.peek("reward_weights").cloned() {
        Some(Value::Array(weights)) => weights,
        _ => Vec::new(),
    };
    let (mut terms, mut differences) = (Vec::new(), Vec::new());
    for (index, name) in names.iter().enumerate() {
        let name = values::text(name);
        let shipped = name.strip_prefix("trl.rewards.").unwrap_or(&name);
        let mut term = match shipped_reward(shipped) {
            Ok((term, difference)) => {
                differences.extend((!difference.is_empty()).then(|| format!("`{shipped}`: {difference}")));
                term
            }
            Err(why) => {
                ledger.refuse(key, format!("`{shipped}`: {why}"));
                return ledger.idle_all(&[("reward_weights", "with `reward_funcs`")]);
            }
        };
        if let Some(weight) = weights.get(index) {
            term["weight"] = weight.clone();
        }
        terms.push(term);
    }
    let field = format!("{R}.reward");
    match differences.is_empty() {
        true => ledger.map(key, &field, terms),
        false => ledger.change(key, &field, terms, differences.join("; ")),
    }
    if ledger.peek("reward_weights").is_some() {
        ledger.fold("reward_weights", "in the rewards' terms");
    }
}

/// Text without `<think>`. The engine has no look-around, so each `<` is followed by anything but `think>`.
const NO_SECOND_THINK: &str = "[^<]*(?:<(?:[^<t][^<]*|t(?:[^<h][^<]*|h(?:[^<i][^<]*|i(?:[^<n][^<]*|n(?:[^<k][^<]*|\
                               k(?:[^<>][^<]*)?)?)?)?)?)?)*";

/// Our term for a reward that TRL ships, with the difference between the two, empty if there is none; or the reason why
/// there is none.
fn shipped_reward(name: &str) -> Result<(Value, &'static str), &'static str> {
    let think = || format!("<think>{NO_SECOND_THINK}</think>{NO_SECOND_THINK}");
    Ok(match name {
        "accuracy_reward" => (
            json!({"math": {}}),
            "an answer outside of LaTeX counts; a solution that cannot be read is refused",
        ),
        "reasoning_accuracy_reward" => (
            json!({"math": {}}),
            "an answer before `</think>`, or without it, counts; a solution that cannot be read is refused",
        ),
        // `trl grpo` uses these numbers, whatever the longest completion is.
        "get_soft_overlong_punishment" => (json!({"length": {"max_tokens": 1280, "buffer_tokens": 256}}), ""),
        "think_format_reward" => {
            (json!({"regex": {"pattern": think()}}), "a completion that is cut at the length limit scores 0")
        }
        "get_repetition_penalty_reward" => {
            return Err(
                "it is called with options in Python; `repetition` counts n-grams of words, not of tokens",
            );
        }
        "get_cosine_scaled_reward" => {
            return Err(
                "its scale by length is not here: put the function in a file and use the `python` reward",
            );
        }
        _ => return Err("put the function in a file and use the `python` reward"),
    })
}

fn data(ledger: &mut Ledger) {
    let file = format!("{R}.data.file");
    if ledger.peek("dataset_name").is_some() {
        let why = "a JSONL, Parquet or Arrow file with prompt and solution: write the dataset to it first";
        rules::data_file(ledger, "dataset_name", &format!("{file}.path"), why);
        ledger.fill(&format!("{file}.columns"), "trl");
    }
    rules::longest_prompt(ledger, "max_prompt_length", &format!("{file}.max_prompt_tokens"));
    // Arguments that scripts with TRL's config add.
    ledger.copy_text("system_prompt", "model.system_prompt");
}

/// Parts of a model's and a dataset's address, and the order of records.
pub(super) fn sources(ledger: &mut Ledger) {
    let shuffled = "shuffle_dataset";
    match ledger.truth(shuffled) {
        Some(true) => ledger.idle(shuffled, "records are always shuffled, by the seed"),
        _ => {
            if ledger.peek(shuffled).is_some() {
                ledger.fold(shuffled, "records are always shuffled, by the seed");
            }
        }
    }
    ledger.fold_all(&[
        ("model_revision", "download this revision of the model"),
        ("dataset_config", "write this part of the dataset to the file"),
        ("dataset_train_split", "write this part of the dataset to the file"),
    ]);
}

/// Intervals of checkpoints and evaluations.
pub(super) fn run(ledger: &mut Ledger, pipeline: &str, updates_per_step: u64) {
    ledger.copy_number("seed", "seed");
    ledger.copy_number("save_total_limit", &format!("{pipeline}.checkpoint.keep_last"));
    for (key, name) in [("save_steps", "checkpoint"), ("eval_steps", "evaluation")] {
        rules::updates_to_steps(ledger, key, &format!("{pipeline}.{name}.every"), updates_per_step);
    }
}
