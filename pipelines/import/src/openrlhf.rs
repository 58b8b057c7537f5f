//! Importer of OpenRLHF's `train_ppo_ray` commands, with flat flags (up to 0.9) or dotted ones (since 0.10).

use serde_json::{Value, json};

use super::shared::{
    ALL_WEIGHTS, DOWNLOAD, IN_FOUR_BITS, NO_EPOCHS, ONE_ENGINE, ONE_PLACE, R, REPORTS, ROLLOUT_BATCH_SIZE,
};
use super::{
    ledger::Ledger,
    openrlhf_rewards::{REWARD_MODEL, reward_clip, rewards},
    rules,
    schedule::Schedule,
    values,
};

const PACKED: &str = "sequences are always packed";

/// Flat flags with their dotted replacements; all other rules use the dotted ones.
pub(super) const FLAT_TO_DOTTED: [(&str, &str); 85] = [
    ("eval_dataset", "eval.dataset"),
    ("eval_split", "eval.split"),
    ("eval_temperature", "eval.temperature"),
    ("eval_n_samples_per_prompt", "eval.n_samples_per_prompt"),
    ("ref_reward_offload", "ref.offload"),
    ("critic_learning_rate", "critic.adam.lr"),
    ("pretrain", "actor.model_name_or_path"),
    ("reward_pretrain", "reward.model_name_or_path"),
    ("remote_rm_url", "reward.remote_url"),
    ("critic_pretrain", "critic.model_name_or_path"),
    ("zero_stage", "ds.zero_stage"),
    ("param_dtype", "ds.param_dtype"),
    ("adam_offload", "ds.adam_offload"),
    ("zpg", "ds.zpg"),
    ("grad_accum_dtype", "ds.grad_accum_dtype"),
    ("overlap_comm", "ds.overlap_comm"),
    ("attn_implementation", "ds.attn_implementation"),
    ("flash_attn", "ds.attn_implementation"),
    ("packing_samples", "ds.packing_samples"),
    ("load_in_4bit", "ds.load_in_4bit"),
    ("lora_rank", "ds.lora.rank"),
    ("lora_alpha", "ds.lora.alpha"),
    ("lora_dropout", "ds.lora.dropout"),
    ("target_modules", "ds.lora.target_modules"),
    ("ring_attn_size", "ds.ring_attn_size"),
    ("ring_head_stride", "ds.ring_attn_head_stride"),
    ("ds_tensor_parallel_size", "ds.tensor_parallel_size"),
    ("deepspeed_enable_sleep", "ds.enable_sleep"),
    ("gradient_checkpointing", "actor.gradient_checkpointing_enable"),
    ("actor_num_nodes", "actor.num_nodes"),
    ("actor_num_gpus_per_node", "actor.num_gpus_per_node"),
    ("actor_learning_rate", "actor.adam.lr"),
    ("adam_betas", "actor.adam.betas"),
    ("l2", "actor.adam.weight_decay"),
    ("lr_scheduler", "actor.lr_scheduler"),
    ("lr_warmup_ratio", "actor.lr_warmup_ratio"),
    ("max_norm", "actor.max_norm"),
    ("eps_clip", "actor.eps_clip"),
    ("eps_clip_low_high", "actor.eps_clip_low_high"),
    ("dual_clip", "actor.dual_clip"),
    ("policy_loss_type", "actor.policy_loss_type"),
    ("entropy_loss_coef", "actor.entropy_coef"),
    ("aux_loss_coef", "actor.aux_loss_coef"),
    ("advantage_estimator", "algo.advantage.estimator"),
    ("gamma", "algo.advantage.gamma"),
    ("lambd", "algo.advantage.lambd"),
    ("no_advantage_std_norm", "algo.advantage.no_std_norm"),
    ("enable_vllm_is_correction", "algo.advantage.is_correction_enable"),
    ("vllm_enable_is_correction", "algo.advantage.is_correction_enable"),
    ("init_kl_coef", "algo.kl.init_coef"),
    ("kl_estimator", "algo.kl.estimator"),
    ("use_kl_loss", "algo.kl.use_loss"),
    ("kl_target", "algo.kl.target"),
    ("kl_horizon", "algo.kl.horizon"),
    ("dynamic_filtering", "algo.dynamic_filtering_enable"),
    ("dynamic_filtering_reward_range", "algo.dynamic_filtering_range"),
    ("normalize_reward", "reward.normalize_enable"),
    ("rollout_batch_size", "rollout.batch_size"),
    ("n_samples_per_prompt", "rollout.n_samples_per_prompt"),
    ("generate_max_len", "rollout.max_new_tokens"),
    ("temperature", "rollout.temperature"),
    ("top_p", "rollout.top_p"),
    ("train_batch_size", "train.batch_size"),
    ("micro_train_batch_size", "train.micro_batch_size"),
    ("max_epochs", "train.max_epochs"),
    ("seed", "train.seed"),
    ("prompt_data", "data.prompt_dataset"),
    ("vllm_is_truncated_threshold", "algo.advantage.is_correction_threshold"),
    ("vllm_is_correction_type", "algo.advantage.is_correction_type"),
    ("stop_properly_penalty_coef", "reward.stop_properly_penalty_coef"),
    ("reward_clip_range", "reward.clip_range"),
    ("overlong_buffer_len", "reward.overlong_buffer_len"),
    ("overlong_penalty_factor", "reward.overlong_penalty_factor"),
    ("value_clip", "critic.value_clip"),
    ("freezing_actor_steps", "critic.freezing_steps"),
    ("input_key", "data.input_key"),
    ("label_key", "data.label_key"),
    ("apply_chat_template", "data.apply_chat_template"),
    ("input_template", "data.input_template"),
    ("save_steps", "ckpt.save_steps"),
    ("max_ckpt_num", "ckpt.max_num"),
    ("eval_steps", "eval.steps"),
    ("async_train", "train.async_enable"),
    ("agent_func_path", "train.agent_func_path"),
    ("num_episodes", "train.num_episodes"),
];

fn defaults() -> [(&'static str, Value); 16] {
    [
        ("train.batch_size", json!(128)),
        ("train.micro_batch_size", json!(1)),
        ("train.max_epochs", json!(1)),
        ("train.seed", json!(42)),
        ("rollout.batch_size", json!(1024)),
        ("rollout.n_samples_per_prompt", json!(1)),
        ("rollout.temperature", json!(1.0)),
        ("rollout.top_p", json!(1.0)),
        ("actor.adam.lr", json!(1e-6)),
        ("actor.adam.betas", json!(["0.9", "0.95"])),
        ("actor.max_norm", json!(1.0)),
        ("actor.eps_clip", json!(0.2)),
        ("algo.advantage.estimator", json!("gae")),
        ("algo.kl.init_coef", json!(0.01)),
        ("ds.zero_stage", json!(2)),
        ("data.input_key", json!("input")),
    ]
}

pub(super) const IDLE: [(&str, &str); 37] = [
    ("vllm.tensor_parallel_size", ALL_WEIGHTS),
    ("vllm*", ONE_ENGINE),
    ("enforce_eager", ONE_ENGINE),
    ("enable_prefix_caching", ONE_ENGINE),
    ("ds.enable_sleep", "optimizer states are offloaded between steps unless `strategy.offload` is set"),
    ("train.colocate_*", ONE_PLACE),
    ("colocate_*", ONE_PLACE),
    ("ref_num_*", ONE_PLACE),
    ("ref.num_*", ONE_PLACE),
    ("reward_num_*", ONE_PLACE),
    ("reward.num_*", ONE_PLACE),
    ("critic_num_*", ONE_PLACE),
    ("critic.num_*", ONE_PLACE),
    ("actor.num_nodes", "torchrun, Slurm or Kubernetes start the ranks of several hosts"),
    ("ds.overlap_comm", "reduction always overlaps with compute"),
    ("ds.attn_implementation", "the attention kernel is chosen by device"),
    ("ds.packing_samples", PACKED),
    ("ds.grad_accum_dtype", "gradients accumulate in fp32"),
    ("ds.use_liger_kernel", "fused kernels are always used"),
    ("ds.use_universal_ckpt", "checkpoints load at any number of ranks"),
    ("use_dynamic_batch", PACKED),
    ("train.dynamic_batch_enable", PACKED),
    ("train_max_tokens_per_gpu", PACKED),
    ("train.max_tokens_per_gpu", PACKED),
    ("rollout_max_tokens_per_gpu", PACKED),
    ("rollout.max_tokens_per_gpu", PACKED),
    ("micro_rollout_batch_size", "scoring uses `strategy.micro_batch_size`"),
    ("rollout.micro_batch_size", "scoring uses `strategy.micro_batch_size`"),
    ("save_*", "the run folder is set by --output"),
    ("ckpt*", "the run folder is set by --output"),
    ("load_checkpoint", "`anyroll run --resume DIR`"),
    ("use_wandb", REPORTS),
    ("wandb*", REPORTS),
    ("use_tensorboard", REPORTS),
    ("logg*", REPORTS),
    ("reward.offload", "a reward model runs on the host unless its `backend` is set"),
    ("actor.gradient_checkpointing_reentrant", "blocks are recomputed as a whole"),
];

pub(super) const REFUSED: [(&str, &str); 16] = [
    ("data.image_key", "prompts are texts: for records without images leave it out"),
    ("ds.zpg", "ZeRO++ is not supported"),
    ("ds.load_in_4bit", IN_FOUR_BITS),
    ("ds.deepcompile", "nothing is compiled"),
    ("train.async_enable", "set `rollout.async.ahead`"),
    (
        "train.partial_rollout_enable",
        "set `rollout.async.ahead`: unfinished completions continue in the next step",
    ),
    (
        "train.agent_func_path",
        "write the environment as a class and set it in `rollout.environment`, docs/guides/environments.md",
    ),
    ("train.enable_ema", "averaging of weights is not supported"),
    ("enable_ema", "averaging of weights is not supported"),
    ("critic*", "set `pipeline.rlvr.critic` and the advantage `gae`"),
    ("data.input_template", "prompts are rendered by the model's chat template"),
    ("prompt_data_probs", "write the files in a `mix` with their weights"),
    ("data.prompt_probs", "write the files in a `mix` with their weights"),
    (
        "reward.stop_properly_penalty_coef",
        "set `selection.leave_out_cut`, or shape lengths with the `length` reward",
    ),
    ("data.max_images_per_prompt", "prompts are texts"),
    ("actor.freeze_visual_encoder", "models are text models"),
];

pub(super) fn apply(ledger: &mut Ledger) {
    ledger.rename(&FLAT_TO_DOTTED);
    ledger.assume(&defaults());
    ledger.fill("name", "imported_from_openrlhf");
    ledger.fill("backend", "auto");
    model(ledger, "actor.");
    strategy(ledger, "actor.");
    ledger.copy_number("train.micro_batch_size", "strategy.micro_batch_size");
    batches(ledger);
    optimizer(ledger, R, "actor.");
    algorithm(ledger);
    data(ledger);
    rewards(ledger);
    ledger.idle_all(&IDLE);
    ledger.refuse_all(&REFUSED);
}

/// Path of the model whose flags start with `section`, and its adapters.
pub(super) fn model(ledger: &mut Ledger, section: &str) {
    let key = &format!("{section}model_name_or_path");
    if let Some(name) = ledger.text(key) {
        ledger.change(key, "model.path", name, DOWNLOAD);
    }
    match ledger.whole("ds.lora.rank") {
        Some(0) => {
            ledger.idle("ds.lora.rank", "off");
            ledger.idle_all(&[("ds.lora.*", "the rank is 0")]);
        }
        Some(rank) => {
            ledger.map("ds.lora.rank", "model.lora.rank", rank);
            ledger.copy_number("ds.lora.alpha", "model.lora.alpha");
            ledger.copy_number("ds.lora.dropout", "model.lora.dropout");
            ledger.lora_targets("ds.lora.target_modules");
            ledger.frozen_weights("ds.load_in_4bit");
        }
        None => {}
    }
}

/// Strategy of the model whose flags start with `section`.
pub(super) fn strategy(ledger: &mut Ledger, section: &str) {
    ledger.copy_number("ds.zero_stage", "strategy.zero_stage");
    ledger.copy_number(&format!("{section}num_gpus_per_node"), "devices");
    ledger.copy_text("ds.param_dtype", "strategy.precision");
    if ledger.peek("bf16").is_some() {
        ledger.map("bf16", "strategy.precision", "bf16");
    }
    rules::ranks_of_a_sequence(ledger, "ds.ring_attn_size");
    rules::ranks_of_a_layer(ledger, "ds.tensor_parallel_size");
    ledger.idle_all(&[("ds.ring_attn_head_stride", "ranks exchange heads, and no ring of keys")]);
    ledger.switch("ds.adam_offload", "strategy.offload.optimizer", "cpu_step");
    let recompute = format!("{section}gradient_checkpointing_enable");
    ledger.switch(&recompute, "strategy.recompute", "full");
    let reference = "roles.reference.strategy.offload.params";
    ledger.switch("ref.offload", reference, "between_steps");
}

/// OpenRLHF counts the rollout batch in prompts, the training batch in completions.
fn batches(ledger: &mut Ledger) {
    let field = |name: &str| format!("{R}.{name}");
    let prompts = rules::map_count(ledger, "rollout.batch_size", &field("prompts_per_step"), 1024);
    let group = rules::map_count(ledger, "rollout.n_samples_per_prompt", &field("group_size"), 1);
    let key = "train.batch_size";
    let update = rules::count(ledger, key, 128);
    let completions = prompts.saturating_mul(group);
    let mini_batches = completions.div_ceil(update);
    let why = format!("{completions} completions per step in updates of {update}");
    match (ledger.peek(key).is_some(), prompts % mini_batches) {
        (false, _) => {}
        (true, 0) => ledger.change(key, &field("mini_batches"), mini_batches, why),
        (true, _) => {
            ledger.refuse(
                key,
                format!("{why}: {prompts} groups cannot be divided into {mini_batches} updates"),
            );
        }
    }
    ledger.copy_number("train.max_epochs", &format!("{R}.epochs"));
    ledger.copy_number("train.seed", "seed");
    lengths(ledger);
    ledger.copy_number("rollout.temperature", &format!("{R}.rollout.temperature"));
    ledger.copy_number("rollout.top_p", &format!("{R}.rollout.top_p"));
    ledger.fill(&format!("{R}.rollout.batch_size"), ROLLOUT_BATCH_SIZE);
    if ledger.truth("train.async_enable") == Some(true) {
        let field = format!("{R}.rollout.async.ahead");
        ledger.change("train.async_enable", &field, 1, "a step ahead, on the policy's own devices");
        if ledger.truth("train.partial_rollout_enable") == Some(true) {
            ledger.fold("train.partial_rollout_enable", "unfinished completions continue in the next step");
        }
    }
    run(ledger, R, prompts, ("train.num_episodes", 1));
}

/// Length of a run of `pipeline` with `records` per step and a key for epochs with its default; intervals of
/// checkpoints and evaluations.
pub(super) fn run(ledger: &mut Ledger, pipeline: &str, records: u64, (key, usual): (&str, u64)) {
    for (key, field) in [("ckpt.save_steps", "checkpoint.every"), ("eval.steps", "evaluation.every")] {
        match ledger.number(key) {
            Some(steps) if steps > 0.0 => ledger.copy_number(key, &format!("{pipeline}.{field}")),
            Some(_) => ledger.idle(key, "only at the end"),
            None => {}
        }
    }
    ledger.copy_number("ckpt.max_num", &format!("{pipeline}.checkpoint.keep_last"));
    let samples = ledger.whole("max_samples").or_else(|| ledger.whole("data.max_samples"));
    for key in ["max_samples", "data.max_samples"] {
        rules::map_count(ledger, key, &format!("{pipeline}.data.file.max_records"), 1);
    }
    let field = format!("{pipeline}.steps");
    match (ledger.truth("algo.dynamic_filtering_enable"), samples) {
        (Some(true), Some(samples)) => {
            ledger.assume(&[(key, json!(usual))]);
            let epochs = rules::count(ledger, key, usual);
            let steps = samples.saturating_mul(epochs).div_ceil(records.max(1));
            let why = format!("{records} of `max_samples` per step; filtered records are replaced");
            if ledger.peek(key).is_some() {
                ledger.change(key, &field, steps, why);
            }
        }
        (Some(true), None) => ledger.refuse_all(&[(key, NO_EPOCHS)]),
        _ => {
            ledger.assume(&[(key, json!(usual))]);
            rules::data_epochs(ledger, key, &field, "the number of steps");
        }
    }
}

/// Optimizer of `pipeline`, from flags that start with `section`.
pub(super) fn optimizer(ledger: &mut Ledger, pipeline: &str, section: &str) {
    let key = |name: &str| format!("{section}{name}");
    let adamw = format!("{pipeline}.optimizer.adamw");
    ledger.copy_number(&key("adam.lr"), &format!("{adamw}.learning_rate"));
    ledger.copy_number(&key("adam.eps"), &format!("{adamw}.eps"));
    ledger.copy_number(&key("adam.weight_decay"), &format!("{adamw}.weight_decay"));
    rules::max_grad_norm(ledger, &key("max_norm"), &format!("{pipeline}.optimizer.max_grad_norm"));
    rules::betas(ledger, &key("adam.betas"), &format!("{adamw}.betas"));
    let [name, steps, ratio, least] =
        ["lr_scheduler", "lr_warmup_steps", "lr_warmup_ratio", "min_lr_ratio"].map(key);
    let schedule = Schedule {
        pipeline,
        name: &name,
        warmup: [&steps, &ratio],
        final_ratio: &least,
        updates_per_step: 1,
    };
    ledger.assume(&[(&name, json!("cosine_with_min_lr")), (&least, json!(0.1))]);
    if ledger.peek(schedule.warmup[0]).is_none() {
        ledger.assume(&[(schedule.warmup[1], json!(0.03))]);
    }
    schedule.apply(ledger);
}

fn algorithm(ledger: &mut Ledger) {
    let a = format!("{R}.algorithm");
    estimator(ledger, &a);
    dynamic_filtering(ledger);
    loss(ledger, &format!("{a}.loss"));
    if ledger.number("algo.kl.init_coef") == Some(0.0) && ledger.peek("algo.kl.target").is_none() {
        ledger.map("algo.kl.init_coef", &format!("{a}.kl_coef"), 0);
        let off = "the coefficient is 0";
        ledger.idle_all(&[("algo.kl.use_loss", off), ("algo.kl.estimator", off), ("algo.kl.horizon", off)]);
    } else {
        divergence(ledger, &a);
    }
    ledger.copy_number("actor.entropy_coef", &format!("{a}.entropy_coef"));
    ledger.copy_number("actor.aux_loss_coef", &format!("{a}.router_aux_loss_coef"));
    correction(ledger, &a);
}

/// The KL term, in the loss or in the reward.
fn divergence(ledger: &mut Ledger, a: &str) {
    ledger.copy_number("algo.kl.init_coef", &format!("{a}.kl_coef"));
    let in_loss = ledger.truth("algo.kl.use_loss") == Some(true);
    match (ledger.peek("algo.kl.use_loss").is_some(), in_loss) {
        (true, true) => {
            let estimator = ledger.text("algo.kl.estimator").unwrap_or_else(|| "k1".to_owned());
            ledger.map("algo.kl.use_loss", &format!("{a}.kl_in"), json!({"loss": {"estimator": estimator}}));
        }
        (true, false) => {
            ledger.fill(&format!("{a}.kl_in"), json!({"reward": {}}));
            ledger.idle("algo.kl.use_loss", "off");
        }
        (false, _) => ledger.fill(&format!("{a}.kl_in"), json!({"reward": {}})),
    }
    match (ledger.text("algo.kl.estimator").as_deref(), in_loss) {
        (None, _) => {}
        (Some("k1" | "k2" | "k3"), true) => ledger.fold("algo.kl.estimator", "in `kl_in`"),
        (Some("k1"), false) => ledger.idle("algo.kl.estimator", "in rewards the KL penalty is k1"),
        _ => {
            ledger.refuse("algo.kl.estimator", "in rewards the KL penalty is k1; k2 and k3 go into the loss")
        }
    }
    if let Some(target) = ledger.number("algo.kl.target") {
        let horizon = ledger.number("algo.kl.horizon").unwrap_or(10_000.0);
        let adaptive = json!({"reward": {"adaptive": {"target": target, "horizon": horizon}}});
        match in_loss {
            true => ledger.refuse("algo.kl.target", "only the coefficient of a KL penalty in rewards adapts"),
            false => {
                rules::fold_number(ledger, "algo.kl.horizon", "in `kl_in`");
                ledger.replace("algo.kl.target", &format!("{a}.kl_in"), adaptive);
            }
        }
    }
    ledger.idle_all(&[("algo.kl.horizon", "used with the target only")]);
}

/// Correction of log-probs that differ from vLLM's; only tokens have weights here.
fn correction(ledger: &mut Ledger, a: &str) {
    let [on, kind, bounds] =
        ["enable", "type", "threshold"].map(|name| format!("algo.advantage.is_correction_{name}"));
    let (low, high) = match ledger.peek(&bounds) {
        Some(Value::Array(ends)) if ends.len() == 2 => (values::number(&ends[0]), values::number(&ends[1])),
        Some(most) => (Some(0.5), values::number(most)),
        None => (Some(0.5), Some(5.0)),
    };
    let field = format!("{a}.rollout_correction");
    match (ledger.truth(&on), low, high, ledger.text(&kind).as_deref().unwrap_or("tis")) {
        (Some(true), Some(low), Some(max), "tis") => {
            let why = format!("weights below {low} stay unchanged, where OpenRLHF raises them");
            ledger.change(&on, &field, json!({"truncate": {"level": "token", "max": max}}), why);
        }
        (Some(true), Some(min), Some(max), "icepop") => {
            ledger.map(&on, &field, json!({"mask": {"level": "token", "min": min, "max": max}}));
        }
        (Some(true), ..) => {
            ledger.refuse(&on, "corrections are tis and icepop, see `algorithm.rollout_correction`")
        }
        _ => {}
    }
    if ledger.draft(&field).is_some() {
        ledger.fill(&format!("{a}.old_logprobs"), "recompute");
        ledger.fold_all(&[(&kind, "in `rollout_correction`"), (&bounds, "in `rollout_correction`")]);
    }
    let why = "the correction is off";
    ledger.idle_all(&[(&on, "off"), (&kind, why), (&bounds, why)]);
}

/// OpenRLHF keeps groups whose mean reward is strictly within a range, and samples others without a limit.
fn dynamic_filtering(ledger: &mut Ledger) {
    let key = "algo.dynamic_filtering_enable";
    match ledger.truth(key) {
        Some(true) => {
            let why = "up to this many batches per step";
            ledger.change(key, &format!("{R}.selection.mixed_groups"), json!({"max_batches": 10}), why);
        }
        Some(false) => ledger.idle(key, "off"),
        None => {}
    }
    let range = "algo.dynamic_filtering_range";
    match ledger.peek(range).cloned() {
        Some(Value::Array(ends)) if ends.iter().filter_map(values::number).eq([0.0, 1.0]) => {
            ledger.idle(range, "groups that are all wrong or all right are replaced");
        }
        Some(_) => ledger.refuse(range, "set `selection.difficulty`"),
        None => {}
    }
}

fn estimator(ledger: &mut Ledger, a: &str) {
    let key = "algo.advantage.estimator";
    let freezing = "critic.freezing_steps";
    if ledger.number(freezing).is_some_and(|steps| steps <= 0.0) {
        ledger.idle(freezing, "the policy is trained from the first step on");
    }
    reward_clip(ledger, a);
    let advantage = format!("{a}.advantage");
    let whiten = format!("{a}.whiten_advantages");
    let gamma = ledger.number("algo.advantage.gamma").unwrap_or(1.0);
    match ledger.text(key).as_deref() {
        Some("group_norm") => {
            ledger.map(key, &advantage, json!({"grpo": {"scale": "group_std", "eps": 1e-9}}))
        }
        Some("dr_grpo") => ledger.map(key, &advantage, json!({"grpo": {"scale": "none"}})),
        Some("rloo") => ledger.map(key, &advantage, "rloo"),
        Some("reinforce") => {
            ledger.fill(&whiten, true);
            ledger.map(key, &advantage, json!({"reinforce": {"gamma": gamma}}));
            rules::fold_number(ledger, "algo.advantage.gamma", "part of the advantage");
        }
        Some("reinforce_baseline") => {
            ledger.fill(&whiten, true);
            ledger.map(key, &advantage, json!({"grpo": {"scale": "none"}}));
        }
        Some("gae") => {
            let lambda = ledger.number("algo.advantage.lambd").unwrap_or(1.0);
            ledger.fill(&whiten, true);
            ledger.map(key, &advantage, json!({"gae": {"gamma": gamma, "lambda": lambda}}));
            rules::fold_number(ledger, "algo.advantage.gamma", "part of the advantage");
            rules::fold_number(ledger, "algo.advantage.lambd", "part of the advantage");
            critic(ledger);
        }
        Some(_) => ledger.refuse(key, "advantages here are gae, grpo, rloo and reinforce"),
        None => {}
    }
    let unused = "the advantage needs no critic";
    let std = "algo.advantage.no_std_norm";
    match (ledger.peek(std).is_some(), ledger.truth(std)) {
        (false, _) => {}
        (true, Some(false)) => ledger.idle(std, "off"),
        (true, _) if ledger.draft(&whiten).is_none() => ledger.idle(std, "the advantage is not whitened"),
        (true, _) => ledger.refuse(std, "`whiten_advantages` centers and scales; use another advantage"),
    }
    for key in [
        "critic.adam.lr",
        "critic.adam.betas",
        "critic.adam.eps",
        "critic.adam.weight_decay",
        "critic.lr_*",
        "critic.max_norm",
        "critic.value_clip",
    ] {
        ledger.idle_all(&[(key, unused)]);
    }
    ledger.idle_all(&[
        ("algo.advantage.gamma", "the advantage does not read it"),
        ("algo.advantage.lambd", "only `gae` reads it"),
    ]);
}

/// The critic, with OpenRLHF's defaults. Its optimizer is the policy's except for the rate.
fn critic(ledger: &mut Ledger) {
    let critic = format!("{R}.critic");
    let learning_rate = format!("{critic}.optimizer.adamw.learning_rate");
    ledger.copy_number("critic.adam.lr", &learning_rate);
    let own = format!("{critic}.optimizer");
    for name in ["eps", "weight_decay"] {
        ledger.copy_number(&format!("critic.adam.{name}"), &format!("{own}.adamw.{name}"));
    }
    rules::betas(ledger, "critic.adam.betas", &format!("{own}.adamw.betas"));
    rules::max_grad_norm(ledger, "critic.max_norm", &format!("{own}.max_grad_norm"));
    ledger.refuse_all(&[("critic.lr_*", "set `pipeline.rlvr.critic.optimizer.schedule`")]);
    ledger.copy_number("critic.value_clip", &format!("{critic}.value_clip"));
    let freezing = "critic.freezing_steps";
    if ledger.whole(freezing).is_some() {
        ledger.copy_number(freezing, &format!("{critic}.warmup_steps"));
    }
    ledger.fill(&learning_rate, 9e-6);
    ledger.fill_as(&format!("{critic}.optimizer"), &format!("{R}.optimizer"));
    ledger.fill(&format!("{critic}.value_clip"), 0.5);
    critic_model(ledger);
}

/// The model that the critic starts from; OpenRLHF's default is the reward model.
fn critic_model(ledger: &mut Ledger) {
    let (key, why) = ("critic.model_name_or_path", "the critic starts from the policy's weights");
    let policy = ledger.draft("model.path").cloned();
    match (ledger.peek(key).cloned(), ledger.peek(REWARD_MODEL).cloned()) {
        (Some(own), _) if Some(&own) == policy.as_ref() => ledger.idle(key, why),
        (Some(_), _) => ledger.refuse(key, format!("{why}: leave it out, or name the same model")),
        (None, Some(scorer))
            if ledger.peek("reward.remote_url").is_none() && Some(&scorer) != policy.as_ref() =>
        {
            ledger.assume(&[(key, scorer)]);
            ledger.fold(key, why);
        }
        (None, _) => {}
    }
}

fn loss(ledger: &mut Ledger, field: &str) {
    let kind = match ledger.text("actor.policy_loss_type").as_deref() {
        Some("gspo") => "gspo",
        None | Some("ppo") => "clipped",
        Some(_) => return ledger.refuse("actor.policy_loss_type", "losses are ppo and gspo"),
    };
    if ledger.peek("actor.policy_loss_type").is_some() {
        ledger.map("actor.policy_loss_type", field, json!({kind: {}}));
    }
    if kind == "gspo" {
        ledger.fill(&format!("{R}.algorithm.aggregation"), "seq_mean_token_mean");
    }
    let field = format!("{field}.{kind}");
    let clip = ledger.number("actor.eps_clip").unwrap_or(0.2);
    match ledger.peek("actor.eps_clip_low_high").cloned() {
        Some(Value::Array(clips)) if clips.len() == 2 => {
            let [low, high] = [0, 1].map(|index| values::number(&clips[index]).unwrap_or(clip));
            ledger.fill(&format!("{field}.clip_high"), high);
            ledger.map("actor.eps_clip_low_high", &format!("{field}.clip_low"), low);
            ledger.idle("actor.eps_clip", "the low and the high clip are set");
        }
        _ => {
            ledger.fill(&format!("{field}.clip_high"), clip);
            ledger.copy_number("actor.eps_clip", &format!("{field}.clip_low"));
        }
    }
    ledger.copy_number("actor.dual_clip", &format!("{field}.dual_clip"));
}

fn data(ledger: &mut Ledger) {
    let file = format!("{R}.data.file");
    let why = "a JSONL, Parquet or Arrow file with prompt and answer: write the dataset to it first";
    rules::data_file(ledger, "data.prompt_dataset", &format!("{file}.path"), why);
    ledger.copy_text("data.input_key", &format!("{file}.columns.prompt"));
    ledger.copy_text("data.label_key", &format!("{file}.columns.answer"));
    rules::longest_prompt(ledger, "prompt_max_len", &format!("{file}.max_prompt_tokens"));
    evaluation(ledger, &file, why);
    ledger.idle_all(&[
        ("data.prompt_split", "datasets are files"),
        ("data.dataloader_num_workers", "every rank reads the data itself, without workers"),
        ("data.disable_fast_tokenizer", "the model's folder has its tokenizer"),
    ]);
}

/// OpenRLHF's default temperature is 0.6.
fn evaluation(ledger: &mut Ledger, file: &str, why: &str) {
    let (dataset, samples, temperature) = ("eval.dataset", "eval.n_samples_per_prompt", "eval.temperature");
    if ledger.peek(dataset).is_some_and(|name| !values::is_unset(name)) {
        rules::data_file(ledger, dataset, &format!("{file}.held_out"), why);
        rules::map_count(ledger, samples, &format!("{R}.evaluation.samples"), 4);
        match ledger.number(temperature) {
            Some(1.0) => ledger.idle(temperature, "the same as here"),
            _ if ledger.peek(temperature).is_some() => {
                ledger.fold(temperature, "evaluation is greedy and at temperature 1");
            }
            _ => {}
        }
    }
    let off = "evaluation is off";
    ledger.idle_all(&[
        (dataset, off),
        (samples, off),
        (temperature, off),
        ("eval.split", "datasets are files"),
    ]);
}

/// Since 0.10 a prompt and its completion share `max_len` tokens. Without another limit a completion may use
/// all of them.
fn lengths(ledger: &mut Ledger) {
    ledger.rollout_weights("vllm.quantization");
    let (all, field) = ("data.max_len", format!("{R}.rollout.max_new_tokens"));
    if ledger.peek("rollout.max_new_tokens").is_some() || ledger.peek("prompt_max_len").is_some() {
        ledger.assume(&[("rollout.max_new_tokens", json!(1024))]);
        ledger.copy_number("rollout.max_new_tokens", &field);
        let completion = ledger.draft(&field).and_then(Value::as_u64).unwrap_or(0);
        if let Some(room) =
            ledger.whole(all).map(|all| all.saturating_sub(completion)).filter(|room| *room > 0)
        {
            let why = "the rest after the completion; longer prompts are left out, not truncated";
            ledger.change(all, &format!("{R}.data.file.max_prompt_tokens"), room, why);
        }
        return ledger
            .idle_all(&[(all, "a prompt that does not fit the model is an error before training starts")]);
    }
    ledger.assume(&[(all, json!(2048))]);
    let most = rules::count(ledger, all, 2048);
    if ledger.peek(all).is_some() {
        ledger.change(all, &field, most, "limits the completion only, where OpenRLHF counts its prompt too");
    }
}
