//! Importer of ROLL's RLVR YAML, both as of v0.2.1, which trained with DeepSpeed, and later versions with
//! FSDP2; `pairs.rs` is that of its DPO pipeline.

mod agents;
mod data;
mod loss;
mod pairs;
mod rewards;
mod strategy;
mod teacher;

use serde_json::{Value, json};

use self::{
    data::{Domains, PROMPT_LENGTH, data},
    rewards::{rewards, workers},
    strategy::ROLLOUT_DEVICES,
};
use crate::shared::{DOWNLOAD, ONE_ENGINE, ONE_PLACE, R, REPORTS, ROLLOUT_BATCH_SIZE};
use crate::{ledger::Ledger, rules, schedule::Schedule, speculation, values};

const REFERENCE: &str = "the reference uses the policy's strategy, or `roles.reference.strategy`";
const DEAD: &str = "ROLL never reads it";

fn defaults() -> [(&'static str, Value); 21] {
    [
        ("exp_name", json!("imported_from_roll")),
        ("seed", json!(42)),
        ("max_steps", json!(500)),
        ("save_steps", json!(50)),
        ("eval_steps", json!(10)),
        ("rollout_batch_size", json!(128)),
        ("num_return_sequences_in_group", json!(1)),
        ("ppo_epochs", json!(1)),
        ("max_grad_norm", json!(1.0)),
        ("pg_clip", json!(0.2)),
        ("init_kl_coef", json!(0.2)),
        ("adv_estimator", json!("gae")),
        ("loss_agg_mode", json!("seq-mean-token-mean")),
        ("actor_train.training_args.learning_rate", json!(5e-5)),
        ("actor_train.training_args.lr_scheduler_type", json!("linear")),
        ("actor_train.training_args.per_device_train_batch_size", json!(8)),
        ("actor_train.training_args.gradient_accumulation_steps", json!(1)),
        ("actor_infer.generating_args.temperature", json!(0.95)),
        ("actor_infer.generating_args.top_p", json!(0.7)),
        ("actor_infer.generating_args.top_k", json!(50)),
        ("actor_train.model_args.dtype", json!("bf16")),
    ]
}

const IDLE: [(&str, &str); 90] = [
    ("hydra*", "a config is a single file"),
    ("logging_*", REPORTS),
    ("track_with", REPORTS),
    ("tracker_kwargs*", REPORTS),
    ("report_length_and_rewards", REPORTS),
    ("output_dir", "set by --output"),
    ("base_dir", "set by --output"),
    ("rollout_dump_dir", "samples are in samples.jsonl of the run folder"),
    ("save_logging_board_dir", REPORTS),
    ("system_envs*", "set environment variables in the shell"),
    ("checkpoint_config*", "checkpoints are in the run folder"),
    ("resume_from_checkpoint", "`anyroll run --resume DIR`"),
    ("num_gpus_per_node", "ROLL overwrites it as well"),
    ("num_nodes", "torchrun, Slurm or Kubernetes start the ranks of several hosts"),
    ("generate_opt_level", ONE_ENGINE),
    ("is_num_return_sequences_expand", ONE_ENGINE),
    ("max_running_requests", ONE_ENGINE),
    ("model_update_buffer_size_mb", ONE_ENGINE),
    ("rpc_timeout", "`strategy.collective_timeout_s` bounds every wait"),
    ("profiler_*", REPORTS),
    ("actor_train.worker_cls", "the loss is named in `algorithm`"),
    ("actor_train.infer_batch_size", "scoring uses `strategy.micro_batch_size`"),
    ("actor_train.model_args.flash_attn", "the attention kernel is chosen by device"),
    ("actor_train.model_args.attn_implementation", "the attention kernel is chosen by device"),
    ("actor_train.model_args.model_type", "the policy is a decoder"),
    ("actor_train.data_args.dataset_dir", DEAD),
    ("actor_train.data_args.interleave_probs", DEAD),
    ("actor_train.data_args.preprocessing_num_workers", "every rank reads the data itself, without workers"),
    ("actor_train.training_args.num_train_epochs", "`max_steps` is the run's length"),
    ("actor_train.use_sequence_packing", "sequences are always packed"),
    ("actor_train.use_dynamic_batching_in_*", "sequences are always packed"),
    ("is_offload_*", "set `strategy.offload`"),
    ("offload_nccl", ONE_ENGINE),
    ("actor_train.offload_nccl", ONE_ENGINE),
    ("actor_infer.offload_nccl", ONE_ENGINE),
    ("reference.model_args.*", REFERENCE),
    ("reference.strategy_args*", REFERENCE),
    ("reference.data_args*", REFERENCE),
    ("reference.training_args*", REFERENCE),
    ("reference.device_mapping", ONE_PLACE),
    ("reference.infer_batch_size", "scoring uses `strategy.micro_batch_size`"),
    ("reference.world_size", ONE_PLACE),
    ("reference.worker_cls", ONE_PLACE),
    ("reference.offload_nccl", ONE_ENGINE),
    ("actor_train.max_tokens_per_microbatch*", "sequences are always packed"),
    ("actor_train.sequence_length_round*", "sequences are always packed"),
    ("reference.max_tokens_per_microbatch*", "sequences are always packed"),
    ("reference.use_*", "sequences are always packed"),
    ("reference.sequence_*", "sequences are always packed"),
    ("reference.system_envs*", "set environment variables in the shell"),
    ("reference.logits_in_fp32", "log-probs are computed in fp32"),
    ("actor_train.logits_in_fp32", "log-probs are computed in fp32"),
    ("actor_train.world_size", "`devices` decides it"),
    ("postive_loss_coef", DEAD),
    ("positive_loss_coef", DEAD),
    ("use_topr_loss", DEAD),
    ("use_topr_neg_loss_coef", DEAD),
    ("model_download_type", "nothing is downloaded"),
    ("rollout_mock*", "samples are determined by the seed"),
    ("router_args*", ONE_ENGINE),
    ("transfer_backend*", ONE_ENGINE),
    ("user_defined_rollout_loop_cls", ONE_ENGINE),
    ("length_profiler_dir", REPORTS),
    ("otlp_output_dir", REPORTS),
    ("render_save_dir", REPORTS),
    ("balance_length", "every rank has an equal share of each mini-batch"),
    ("batch_adjust_mode", "a step has a fixed number of completions"),
    ("local_rank", "`anyroll run` starts the ranks"),
    ("actor_train.use_remove_padding", "sequences are always packed"),
    ("actor_train.sequence_packing_args*", "sequences are always packed"),
    ("actor_infer.strategy_args*", ONE_ENGINE),
    ("actor_infer.model_args.*", ONE_ENGINE),
    ("actor_infer.data_args*", ONE_ENGINE),
    ("actor_infer.training_args*", ONE_ENGINE),
    ("actor_infer.device_mapping", ONE_PLACE),
    ("actor_infer.infer_batch_size", "set by `rollout.batch_size`"),
    ("actor_infer.num_gpus_per_worker", ONE_ENGINE),
    ("actor_infer.world_size", ONE_PLACE),
    ("actor_infer.worker_cls", ONE_ENGINE),
    ("actor_infer.max_concurrency", ONE_ENGINE),
    ("actor_infer.system_envs*", "set environment variables in the shell"),
    ("actor_infer.backend_timeout", "`strategy.collective_timeout_s` bounds every wait"),
    ("actor_infer.use_*", "sequences are always packed"),
    ("actor_infer.logits_in_fp32", "log-probs are computed in fp32"),
    ("actor_train.system_envs*", "set environment variables in the shell"),
    ("actor_train.max_concurrency", ONE_ENGINE),
    ("actor_train.backend_timeout", "`strategy.collective_timeout_s` bounds every wait"),
    ("validation.*", "evaluation is on held-out prompts, greedy and at temperature 1"),
    ("value_clip", "only for a critic"),
    ("reward_pretrain", "no reward model and no critic is loaded"),
];

const QUANTIZED: &str = "`rollout.weights` is `policy` or `fp8`";

const REFUSED: [(&str, &str); 23] = [
    ("actor_infer.strategy_args.strategy_config.quantization*", QUANTIZED),
    ("actor_infer.strategy_args.strategy_config.hf_overrides.quantization_config*", QUANTIZED),
    (
        "actor_infer.strategy_args.strategy_config.kv_cache_dtype",
        "keys and values have the policy's precision",
    ),
    ("critic*", "set `pipeline.rlvr.critic` and the advantage `gae`"),
    ("async_generation_ratio", "set `rollout.async.ahead`"),
    ("use_additional_prompts", "the number of sampled prompts is fixed"),
    ("is_use_additional_prompts", "the number of sampled prompts is fixed"),
    ("max_additional_running_prompts", "the number of sampled prompts is fixed"),
    ("error_max_len_clip", "shape lengths with the `length` reward"),
    ("error_max_len_threshold", "shape lengths with the `length` reward"),
    ("difficulty_loss_weight", "all samples have the same weight"),
    ("length_loss_weight", "all samples have the same weight"),
    ("add_token_level_kl", "set `algorithm.kl_in`"),
    ("use_kl_loss", "set `algorithm.kl_in`"),
    ("whiten_rewards", "advantages are whitened, by `whiten_advantages`"),
    ("reward_model*", "set a verifiable reward in `pipeline.rlvr.reward`"),
    ("actor_train.model_args.freeze_module_prefix", "train all layers, or set `model.lora`"),
    ("use_reward_scaling", "set `algorithm.reward_norm`"),
    ("use_reward_norm", "set `algorithm.reward_norm`"),
    ("reward_shift", "set `algorithm.reward_norm`"),
    ("reward_scale", "set `algorithm.reward_norm`"),
    ("add_len_reward", "shape lengths with the `length` reward"),
    ("dataset_filter*", "remove records from the file"),
];

pub(super) fn apply(ledger: &mut Ledger) {
    if agents::is_another(ledger) {
        return;
    }
    if pairs::is_of_pairs(ledger) {
        return pairs::apply(ledger);
    }
    let teacher_alone = teacher::is_alone(ledger);
    ledger.assume(&defaults());
    agents::apply(ledger);
    ledger.copy_text("exp_name", "name");
    ledger.fill("backend", "auto");
    model(ledger, &["actor_train", "actor_infer"]);
    let ranks_per_replica = strategy::strategy(ledger, R);
    batches(ledger, ranks_per_replica);
    optimizer(ledger);
    sampling(ledger);
    algorithm(ledger, teacher_alone);
    let domains = Domains::of(ledger);
    rewards(ledger, &domains);
    data(ledger, &domains);
    single(ledger);
    template(ledger);
    refuse_before_idle(ledger);
}

/// Closes the rest of the keys; of the rollout's options, which have no effect, some are refused.
fn refuse_before_idle(ledger: &mut Ledger) {
    ledger.refuse_all(&REFUSED);
    ledger.idle_all(&IDLE);
}

fn template(ledger: &mut Ledger) {
    let template = "prompts are rendered by the template in the model's folder";
    ledger.fold_all(&[
        ("actor_train.data_args.template", template),
        ("global_template", template),
        ("tag_to_template*", template),
    ]);
}

/// Factors that are supported at one value only.
fn single(ledger: &mut Ledger) {
    for (key, usual, why) in [
        ("rl_loss_coef", 1.0, "the policy's loss has the weight 1"),
        ("minibatch_data_iter_num", 1.0, "set `epochs`"),
        ("l2", 0.0, "set `optimizer.adamw.weight_decay`"),
    ] {
        match ledger.number(key) {
            Some(value) if value == usual => ledger.idle(key, "the same as here"),
            _ => ledger.refuse_all(&[(key, why)]),
        }
    }
}

/// The policy, which `roles` compute, and the reference.
fn model(ledger: &mut Ledger, roles: &[&str]) {
    if let Some(name) = ledger.text("pretrain") {
        ledger.change("pretrain", "model.path", name, DOWNLOAD);
    }
    // ROLL reads these names only if all of them are given.
    let name = |role: &str| format!("{role}.model_args.model_name_or_path");
    let (names, reference) = (roles.iter().map(|role| name(role)).collect::<Vec<_>>(), &name("reference"));
    let is_given = |key: &String| ledger.peek(key).is_some_and(|name| !values::is_unset(name));
    let all_given = names.iter().chain([reference]).all(is_given);
    for key in &names {
        match all_given {
            true => same_model(ledger, key, "the policy is the model of `pretrain`"),
            false => ledger.idle_all(&[(key, "set by `pretrain`")]),
        }
    }
    if all_given && is_other(ledger, reference) {
        let name = ledger.text(reference).unwrap_or_default();
        ledger.change(reference, "roles.reference.path", name, DOWNLOAD);
    }
    let dtype = "actor_train.model_args.dtype";
    match ledger.text(dtype).as_deref() {
        Some(precision @ ("fp32" | "bf16" | "fp16")) => ledger.map(dtype, "strategy.precision", precision),
        Some(_) => ledger.refuse(dtype, "precisions are fp32, bf16 and fp16"),
        None => {}
    }
    for (name, field) in [("lora_rank", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout")] {
        ledger.copy_number(&format!("actor_train.model_args.{name}"), &format!("model.lora.{field}"));
    }
    ledger.lora_targets("actor_train.model_args.lora_target");
}

/// ROLL counts the rollout batch in prompts. An update has the records that its devices accumulate, where
/// devices that share a model have the same records.
fn batches(ledger: &mut Ledger, ranks_per_replica: u64) {
    let args = "actor_train.training_args";
    let ours = |name: &str| ledger.draft(&format!("{R}.{name}")).and_then(Value::as_u64);
    let is_agentic = ours("group_size").is_some();
    let prompts = ours("prompts_per_step").or(ledger.whole("rollout_batch_size")).unwrap_or(128);
    let group = ours("group_size").or(ledger.whole("num_return_sequences_in_group")).unwrap_or(1);
    let per_device = ledger.whole(&format!("{args}.per_device_train_batch_size")).unwrap_or(8);
    let accumulation = ledger.whole(&format!("{args}.gradient_accumulation_steps")).unwrap_or(1);
    let replicas = (strategy::world(ledger) / ranks_per_replica).max(1);
    let update = per_device.saturating_mul(accumulation).saturating_mul(replicas).max(1);
    if ledger.peek("rollout_batch_size").is_some() {
        ledger.map("rollout_batch_size", &format!("{R}.prompts_per_step"), prompts);
    }
    match is_agentic {
        true => {
            ledger.idle_all(&[("num_return_sequences_in_group", "the group size is set by the environments")])
        }
        false => ledger.map("num_return_sequences_in_group", &format!("{R}.group_size"), group),
    }
    ledger.map(&format!("{args}.per_device_train_batch_size"), "strategy.micro_batch_size", per_device);
    let why = format!("{} completions per step in updates of {update}", prompts * group);
    let mini_batches = (prompts * group).div_ceil(update);
    ledger.change(
        &format!("{args}.gradient_accumulation_steps"),
        &format!("{R}.mini_batches"),
        mini_batches,
        why,
    );
    for (key, field) in [
        ("seed", "seed".to_owned()),
        ("max_steps", format!("{R}.steps")),
        ("save_steps", format!("{R}.checkpoint.every")),
        ("eval_steps", format!("{R}.evaluation.every")),
        ("val_batch_size", format!("{R}.evaluation.prompts")),
        ("ppo_epochs", format!("{R}.epochs")),
        ("max_grad_norm", format!("{R}.optimizer.max_grad_norm")),
    ] {
        ledger.copy_number(key, &field);
    }
    let ratio = "async_generation_ratio";
    if let Some(steps) = ledger.number(ratio).filter(|steps| *steps > 0.0) {
        let why = match ledger.draft(ROLLOUT_DEVICES).is_some() {
            true => "on separate devices",
            false => "on the policy's own devices",
        };
        ledger.change(ratio, &format!("{R}.rollout.async.ahead"), steps.ceil() as u64, why);
    }
    match ledger.whole("max_ckpt_to_keep") {
        Some(0) => ledger.refuse("max_ckpt_to_keep", "set the number in `checkpoint.keep_last`"),
        Some(_) => ledger.copy_number("max_ckpt_to_keep", &format!("{R}.checkpoint.keep_last")),
        None => {}
    }
}

fn optimizer(ledger: &mut Ledger) {
    adamw(ledger, "actor_train.training_args", R);
    ledger.idle_all(&[
        ("actor_train.training_args.bf16", "set by `model_args.dtype`"),
        ("actor_train.training_args.fp16", "set by `model_args.dtype`"),
        (
            "actor_train.training_args.dataloader_num_workers",
            "every rank reads the data itself, without workers",
        ),
        ("actor_train.training_args.max_steps", "ROLL computes it"),
    ]);
}

/// AdamW and its schedule from `section`, for the model of `owner`.
fn adamw(ledger: &mut Ledger, section: &str, owner: &str) {
    let args = |name: &str| format!("{section}.{name}");
    let adamw = format!("{owner}.optimizer.adamw");
    ledger.copy_number(&args("learning_rate"), &format!("{adamw}.learning_rate"));
    ledger.copy_number(&args("weight_decay"), &format!("{adamw}.weight_decay"));
    let betas = [args("adam_beta1"), args("adam_beta2")];
    rules::beta_keys(ledger, [&betas[0], &betas[1]], &format!("{adamw}.betas"));
    let schedule = Schedule {
        pipeline: owner,
        name: &args("lr_scheduler_type"),
        warmup: [&args("warmup_steps"), &args("warmup_ratio")],
        final_ratio: &args("min_lr_ratio"),
        updates_per_step: 1,
    };
    schedule.apply(ledger);
}

fn sampling(ledger: &mut Ledger) {
    let args = |name: &str| format!("actor_infer.generating_args.{name}");
    let rollout = format!("{R}.rollout");
    for name in ["temperature", "top_p", "top_k"] {
        ledger.copy_number(&args(name), &format!("{rollout}.{name}"));
    }
    ledger.rollout_weights("actor_infer.strategy_args.strategy_config.quantization");
    speculation::of_vllm(ledger, "actor_infer.strategy_args.strategy_config.speculative_config");
    let length = format!("{rollout}.max_new_tokens");
    let prompt = ledger.whole("prompt_length").unwrap_or(PROMPT_LENGTH);
    match (ledger.whole("response_length"), ledger.whole("sequence_length")) {
        (Some(_), _) => ledger.copy_number("response_length", &length),
        (None, Some(all)) => {
            let why = format!("minus a prompt of {prompt}");
            ledger.change("sequence_length", &length, all.saturating_sub(prompt), why);
        }
        (None, None) => {}
    }
    ledger.idle_all(&[
        ("sequence_length", "`response_length` is set"),
        (&args("max_new_tokens"), "ROLL overwrites it with the lengths"),
        (&args("num_beams"), "completions are sampled"),
        (&args("do_sample"), "completions are sampled"),
        (&args("num_return_sequences"), "it is the group's size"),
        ("val_*", "evaluation is on held-out prompts, as long as in training"),
    ]);
    let stop = args("stop_strings");
    if let Some(texts @ Value::Array(_)) = ledger.peek(&stop).cloned() {
        ledger.map(&stop, &format!("{rollout}.stop"), texts);
    }
    // vLLM removes a stop text by default.
    match ledger.truth(&args("include_stop_str_in_output")) {
        Some(true) => ledger.idle(&args("include_stop_str_in_output"), "completions keep the stop text"),
        _ => ledger.refuse_all(&[(&args("include_stop_str_in_output"), "completions keep the stop text")]),
    }
    ledger.refuse_all(&[(&args("*"), "set it in `rollout`")]);
    ledger.fill(&format!("{rollout}.batch_size"), ROLLOUT_BATCH_SIZE);
}

fn algorithm(ledger: &mut Ledger, teacher_alone: bool) {
    let a = format!("{R}.algorithm");
    let has_teacher = teacher::has_teacher(ledger, teacher_alone);
    if has_teacher {
        teacher::apply(ledger, &a, teacher_alone);
    }
    let advantage = format!("{a}.advantage");
    match ledger.text("adv_estimator").as_deref() {
        Some("grpo") if ledger.draft(&format!("{a}.reward_norm")).is_none() => {
            ledger.map("adv_estimator", &advantage, json!({"grpo": {"scale": "group_std"}}));
        }
        // Used by the agentic pipeline, which sets the normalization of rewards separately.
        Some("grpo" | "reinforce" | "agentic_reinforce") => {
            let gamma = ledger.number("gamma").unwrap_or(1.0);
            ledger.map("adv_estimator", &advantage, json!({"reinforce": {"gamma": gamma}}));
            rules::fold_number(ledger, "gamma", "part of the advantage");
        }
        Some("gae") => {
            let [gamma, lambda] =
                [("gamma", 1.0), ("lambd", 0.95)].map(|(key, usual)| ledger.number(key).unwrap_or(usual));
            ledger.map("adv_estimator", &advantage, json!({"gae": {"gamma": gamma, "lambda": lambda}}));
            for key in ["gamma", "lambd"] {
                rules::fold_number(ledger, key, "part of the advantage");
            }
            critic(ledger);
        }
        Some(_) => ledger.refuse("adv_estimator", "advantages here are gae, grpo and reinforce"),
        None => {}
    }
    ledger.idle_all(&[("gamma", "the advantage does not read it"), ("lambd", "only `gae` reads it")]);
    reward_norm(ledger, &a);
    for name in ["reward_clip", "advantage_clip"] {
        ledger.copy_number(name, &format!("{a}.{name}"));
    }
    if let Some(whiten) = ledger.truth("whiten_advantages") {
        ledger.map("whiten_advantages", &format!("{a}.whiten_advantages"), whiten);
    }
    ledger.copy_number("entropy_loss_coef", &format!("{a}.entropy_coef"));
    if !has_teacher {
        kl(ledger, &a);
    }
    loss::loss(ledger, &a);
    aggregation(ledger, &a);
    selection(ledger);
}

/// Returns true if a key names a model other than `pretrain`.
fn is_other(ledger: &Ledger, key: &str) -> bool {
    let name = ledger.peek(key).filter(|name| !values::is_unset(name));
    name.is_some_and(|name| ledger.draft("model.path") != Some(name))
}

/// Closes the name of a model that must be `pretrain`.
fn same_model(ledger: &mut Ledger, key: &str, why: &str) {
    match ledger.peek(key).is_some() && is_other(ledger, key) {
        true => ledger.refuse(key, why),
        false => ledger.idle_all(&[(key, "the model of `pretrain`")]),
    }
}

fn critic(ledger: &mut Ledger) {
    let begins = "the critic starts from the policy's weights: name the model of `pretrain`";
    for key in ["critic.model_args.model_name_or_path", "reward_pretrain"] {
        same_model(ledger, key, begins);
    }
    let critic = format!("{R}.critic");
    ledger.assume(&[
        ("critic.training_args.learning_rate", json!(5e-5)),
        ("critic.training_args.lr_scheduler_type", json!("linear")),
    ]);
    adamw(ledger, "critic.training_args", &critic);
    let clip = "optimizer.max_grad_norm";
    if let Some(norm) = ledger.draft(&format!("{R}.{clip}")).cloned() {
        ledger.fill(&format!("{critic}.{clip}"), norm);
    }
    ledger.copy_number("value_clip", &format!("{critic}.value_clip"));
    ledger.copy_number("critic_warmup", &format!("{critic}.warmup_steps"));
    let as_policy = "the critic uses the policy's model, mini-batches and strategy, or `roles.critic`";
    ledger.fold_all(&[
        ("critic.training_args.per_device_train_batch_size", as_policy),
        ("critic.training_args.gradient_accumulation_steps", as_policy),
        ("critic.model_args.*", as_policy),
        ("critic.strategy_args*", as_policy),
    ]);
    ledger.idle_all(&[
        ("critic.data_args*", "the critic reads what the policy wrote"),
        ("critic.device_mapping", ONE_PLACE),
        ("critic.infer_batch_size", "scoring uses `strategy.micro_batch_size`"),
        ("critic.training_args.dataloader_num_workers", "the critic reads no data"),
        ("critic.training_args.bf16", "set by `model_args.dtype`"),
        ("critic.offload_nccl", ONE_ENGINE),
        ("critic.worker_cls", "the loss is that of PPO"),
        ("critic.use_*", "sequences are always packed"),
        ("critic.system_envs*", "set environment variables in the shell"),
    ]);
}

fn selection(ledger: &mut Ledger) {
    let field = format!("{R}.selection");
    ledger.flag("max_len_mask", &format!("{field}.leave_out_cut"));
    let thresholds = [("difficulty_low_threshold", 0.0, "min"), ("difficulty_high_threshold", 1.0, "max")];
    match ledger.truth("difficulty_mask") {
        Some(true) => {
            for (key, usual, end) in thresholds {
                let threshold = ledger.number(key).unwrap_or(usual);
                ledger.fill(&format!("{field}.difficulty.{end}"), threshold);
                ledger.copy_number(key, &format!("{field}.difficulty.{end}"));
            }
            ledger.fold("difficulty_mask", "part of the thresholds");
        }
        Some(false) => ledger.idle("difficulty_mask", "off"),
        None => {}
    }
    ledger.idle_all(&thresholds.map(|(key, ..)| (key, "difficulty_mask is off")));
}

/// One key of older versions for both statistics.
fn whole_norm(ledger: &mut Ledger, is_grpo: bool, field: &str) {
    let key = "reward_norm";
    rules::leave_unset(ledger, &[key]);
    let has_newer = ["norm_mean_type", "norm_std_type"].iter().any(|key| ledger.peek(key).is_some());
    match ledger.text(key).as_deref() {
        None => {}
        Some(_) if is_grpo => ledger.idle(key, "ROLL's grpo overwrites it"),
        Some(_) if has_newer => ledger.idle(key, "`norm_mean_type` and `norm_std_type` decide"),
        Some(over @ ("group" | "batch" | "running")) => {
            let why = "since v0.2.1 ROLL reads `norm_mean_type` and `norm_std_type` instead";
            for statistic in ["mean", "std"] {
                ledger.fill(&format!("{field}.{statistic}"), over);
            }
            ledger.fold(key, format!("`{field}` by {over}: {why}"));
        }
        Some(_) => ledger.refuse(key, "must be group, batch or running"),
    }
}

/// ROLL normalizes the rewards of each domain separately.
fn reward_norm(ledger: &mut Ledger, a: &str) {
    let is_grpo =
        ledger.draft(&format!("{a}.advantage")).is_some_and(|advantage| advantage.get("grpo").is_some());
    let has_groups = ledger.draft(&format!("{R}.group_size")).and_then(Value::as_u64) > Some(1);
    let has_domains = workers(ledger).len() > 1;
    whole_norm(ledger, is_grpo, &format!("{a}.reward_norm"));
    for (key, statistic) in [("norm_mean_type", "mean"), ("norm_std_type", "std")] {
        let field = format!("{a}.reward_norm.{statistic}");
        match ledger.text(key).as_deref() {
            None => {}
            Some(_) if is_grpo => ledger.idle(key, "ROLL's grpo overwrites it"),
            Some(_) if ledger.peek(key).is_some_and(values::is_unset) => ledger.idle(key, "off"),
            Some("group") if !has_groups => ledger.refuse(key, "a group of one sample has no statistics"),
            Some(over @ ("batch" | "running")) if has_domains => {
                ledger.change(
                    key,
                    &field,
                    over,
                    "statistics over all domains, where ROLL has them per domain",
                );
            }
            Some(over @ ("group" | "batch" | "running")) => ledger.map(key, &field, over),
            Some(_) => ledger.refuse(key, "must be group, batch or running"),
        }
    }
}

fn kl(ledger: &mut Ledger, a: &str) {
    let field = format!("{a}.kl_coef");
    match ledger.truth("use_kl_loss") {
        Some(true) => {
            ledger.map("use_kl_loss", &format!("{a}.kl_in"), json!({"loss": {"estimator": "k3"}}));
            ledger.copy_number("kl_loss_coef", &field);
            ledger.idle("init_kl_coef", "the KL term is in the loss");
        }
        _ => {
            if ledger.truth("add_token_level_kl") == Some(true) {
                kl_in_reward(ledger, &format!("{a}.kl_in"));
                ledger.copy_number("init_kl_coef", &field);
            } else {
                ledger.idle("init_kl_coef", "no KL term uses it");
            }
            ledger.idle_all(&[("kl_loss_coef", "use_kl_loss is off")]);
        }
    }
    match (ledger.text("kl_penalty").as_deref(), ledger.draft(&format!("{a}.kl_in")).is_some()) {
        (None, _) => {}
        (Some("kl"), true) => ledger.idle("kl_penalty", "in rewards the KL penalty is k1"),
        (Some(_), true) if ledger.draft(&format!("{a}.kl_in.loss")).is_none() => {
            ledger.refuse("kl_penalty", "in rewards the KL penalty is k1");
        }
        (Some(_), _) => ledger.idle("kl_penalty", "rewards have no KL penalty"),
    }
    ledger.idle_all(&[
        ("enable_reference", "a reference is loaded if a KL term needs it"),
        ("target_kl", "no coefficient is adaptive"),
        ("kl_horizon", "no coefficient is adaptive"),
    ]);
}

/// With a target the coefficient adapts after each step.
fn kl_in_reward(ledger: &mut Ledger, field: &str) {
    let mut kl_in = json!({"reward": {}});
    if let Some(target) = ledger.number("target_kl") {
        let horizon = ledger.number("kl_horizon").unwrap_or(10_000.0);
        kl_in = json!({"reward": {"adaptive": {"target": target, "horizon": horizon}}});
        ledger.map("target_kl", field, kl_in.clone());
        if ledger.peek("kl_horizon").is_some() {
            ledger.map("kl_horizon", field, kl_in.clone());
        }
    }
    ledger.map("add_token_level_kl", field, kl_in);
}

fn aggregation(ledger: &mut Ledger, a: &str) {
    let field = format!("{a}.aggregation");
    let key = "loss_agg_mode";
    match ledger.text(key).as_deref() {
        Some("seq-mean-token-sum-norm") => {
            let length = ledger.draft(&format!("{R}.rollout.max_new_tokens")).cloned().unwrap_or(json!(8192));
            ledger.map(key, &field, json!({"seq_mean_token_sum_norm": {"length": length}}));
        }
        Some(mode @ ("token-mean" | "seq-mean-token-sum" | "seq-mean-token-mean")) => {
            ledger.map(key, &field, mode.replace('-', "_"));
        }
        Some(_) => ledger.refuse(key, "see `algorithm.aggregation`"),
        None => {}
    }
}
