//! Importer of verl's `main_ppo`: a command's overrides, or its YAML. Defaults are those of its
//! `ppo_trainer.yaml`.

mod algorithm;
mod distillation;
mod reward;
pub(super) mod sft;
mod sft_engine;
mod tables;

use serde_json::{Value, json};

use tables::{ENGINE, IDLE, REFUSED};

use super::shared::{ALL_EXPERTS, ALL_WEIGHTS, DOWNLOAD, NO_EPOCHS, ONE_ENGINE, R, ROLLOUT_BATCH_SIZE};
use super::{ledger::Ledger, megatron, rules, schedule::Schedule, speculation};

const ACTOR: &str = "actor_rollout_ref.actor";
const ROLLOUT: &str = "actor_rollout_ref.rollout";
const REFERENCE: &str = "actor_rollout_ref.ref";
const MODEL: &str = "actor_rollout_ref.model";

fn defaults() -> [(&'static str, Value); 20] {
    [
        ("data.train_batch_size", json!(1024)),
        ("data.max_prompt_length", json!(512)),
        ("data.max_response_length", json!(512)),
        ("data.truncation", json!("error")),
        ("actor_rollout_ref.rollout.n", json!(1)),
        ("actor_rollout_ref.rollout.temperature", json!(1.0)),
        ("actor_rollout_ref.rollout.top_p", json!(1)),
        ("actor_rollout_ref.model.enable_gradient_checkpointing", json!(true)),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", json!(256)),
        ("actor_rollout_ref.actor.ppo_epochs", json!(1)),
        ("actor_rollout_ref.actor.grad_clip", json!(1.0)),
        ("actor_rollout_ref.actor.optim.lr", json!(1e-6)),
        ("actor_rollout_ref.actor.optim.weight_decay", json!(0.01)),
        ("actor_rollout_ref.actor.clip_ratio", json!(0.2)),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", json!("vanilla")),
        ("actor_rollout_ref.actor.loss_agg_mode", json!("token-mean")),
        ("algorithm.adv_estimator", json!("gae")),
        ("trainer.n_gpus_per_node", json!(8)),
        ("trainer.save_freq", json!(-1)),
        ("trainer.test_freq", json!(-1)),
    ]
}

pub(super) fn apply(ledger: &mut Ledger) {
    ledger.idle_ending("._target_", "configs do not name classes");
    ledger.assume(&defaults());
    name(ledger);
    ledger.fill("backend", "auto");
    model(ledger);
    router_replay(ledger);
    strategy(ledger);
    batches(ledger);
    run(ledger);
    optimizer(ledger, &format!("{ACTOR}.optim"), R);
    sampling(ledger);
    algorithm::apply(ledger);
    data(ledger);
    reward::apply(ledger);
    let name = ledger.text("config-name").unwrap_or_default();
    if matches!(name.trim_end_matches(".yaml"), "ppo_trainer" | "ppo_megatron_trainer") {
        ledger.idle_all(&[("config-name", "its defaults are known"), ("config-path", "verl's own")]);
    }
    if matches!(ledger.text("config-path").as_deref(), Some("config" | "./config")) {
        ledger.idle("config-path", "verl's own");
    }
    ledger.idle_all(&IDLE);
    ledger.refuse_all(&REFUSED);
    ledger.idle_all(&[(&format!("{ROLLOUT}.tensor_model_parallel_size"), ALL_WEIGHTS)]);
    ledger.idle_all(&[(&format!("{ROLLOUT}.expert_parallel_size"), ALL_EXPERTS)]);
    for name in ENGINE {
        ledger.idle_all(&[(&format!("{ROLLOUT}.{name}"), ONE_ENGINE)]);
    }
}

/// The experiment's name, reduced to characters allowed in a folder's name.
fn name(ledger: &mut Ledger) {
    let key = "trainer.experiment_name";
    let Some(experiment) = ledger.text(key) else { return ledger.fill("name", "imported_from_verl") };
    // A name often ends in the date, which a command substitutes.
    if let Some((known, _)) = experiment.split_once('$') {
        let name = known.trim_matches(['-', '_', '.']).to_owned();
        if !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
            ledger.fill("name", name);
        }
        ledger.idle(key, "the name of a run folder contains its time");
        return ledger.fill("name", "imported_from_verl");
    }
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let name: String = experiment.chars().map(|c| if fits(c) { c } else { '_' }).collect();
    let name = name.trim_start_matches(['-', '_', '.']).to_owned();
    match name == experiment {
        true => ledger.map(key, "name", name),
        false if name.is_empty() => ledger.refuse(key, "set `name`, in letters and digits"),
        false => ledger.change(key, "name", name, "the run folder's name starts with it"),
    }
    ledger.fill("name", "imported_from_verl");
}

fn model(ledger: &mut Ledger) {
    let key = format!("{MODEL}.path");
    if let Some(path) = ledger.text(&key) {
        ledger.change(&key, "model.path", path, DOWNLOAD);
    }
    ledger.either(&format!("{MODEL}.enable_gradient_checkpointing"), "strategy.recompute", "full", "none");
    megatron_adapters(ledger);
    let [rank, alpha, targets] =
        ["lora_rank", "lora_alpha", "target_modules"].map(|name| format!("{MODEL}.{name}"));
    match ledger.number(&rank).is_some_and(|rank| rank > 0.0) {
        true => {
            ledger.assume(&[(&alpha, json!(16))]);
            ledger.copy_number(&rank, "model.lora.rank");
            ledger.copy_number(&alpha, "model.lora.alpha");
            ledger.lora_targets(&targets);
            ledger.switch(&format!("{MODEL}.lora.merge"), "pipeline.rlvr.rollout.merge_adapters", true);
        }
        false => {
            let off = if ledger.number(&rank) == Some(0.0) { "off" } else { "the rank is not set" };
            ledger.idle_all(&[(&alpha, off), (&targets, off)]);
            if off == "off" {
                ledger.idle(&rank, off);
            }
        }
    }
    if ledger.number(&format!("{MODEL}.lora.rank")).is_none_or(|rank| rank == 0.0) {
        ledger.idle_all(&[(&format!("{MODEL}.lora.*"), "off")]);
    }
}

/// Replay of experts: R3 that of sampling, R2 that of training's own pass before the step.
fn router_replay(ledger: &mut Ledger) {
    let recorded = format!("{ROLLOUT}.enable_rollout_routing_replay");
    ledger.idle_all(&[(&recorded, "sampling records experts if training replays them")]);
    for section in [ACTOR.to_owned(), format!("{ACTOR}.megatron"), format!("{ACTOR}.fsdp_config")] {
        let key = format!("{section}.router_replay.mode");
        match ledger.text(&key).as_deref() {
            None => {}
            Some("disabled" | "None" | "null") => ledger.idle(&key, "off"),
            Some("R3") => ledger.map(&key, &format!("{R}.rollout.replay_routing"), true),
            Some(_) => {
                let why = "experts of training's own pass are not replayed; those of sampling are, by R3";
                ledger.refuse(&key, why);
            }
        }
    }
}

/// Adapters of Megatron's models, by default of all matrices, have a section of their own.
fn megatron_adapters(ledger: &mut Ledger) {
    let key = |name: &str| format!("{MODEL}.lora.{name}");
    if !ledger.number(&key("rank")).is_some_and(|rank| rank > 0.0) {
        return;
    }
    if ledger.text(&key("lora_A_init_method")).as_deref() == Some("kaiming") {
        ledger.idle(&key("lora_A_init_method"), "the same as here");
    }
    if ledger.text(&key("type")).as_deref() == Some("lora") {
        ledger.idle(&key("type"), "the same as here");
    }
    ledger.copy_number(&key("dropout"), "model.lora.dropout");
    for (old, new) in [("rank", "lora_rank"), ("alpha", "lora_alpha")] {
        ledger.rename(&[(&*key(old), &*format!("{MODEL}.{new}"))]);
    }
}

fn strategy(ledger: &mut Ledger) {
    let kind = format!("{ACTOR}.strategy");
    let [engine, config] = ["model_engine", "config-name"].map(|key| ledger.text(key));
    let by_megatron = engine.is_some_and(|engine| engine == "megatron")
        || config.is_some_and(|name| name.trim_end_matches(".yaml") == "ppo_megatron_trainer");
    ledger.assume(&[(&kind, json!(if by_megatron { "megatron" } else { "fsdp" }))]);
    ledger.idle_all(&[
        ("model_engine", "part of the strategy"),
        ("actor_rollout_ref.actor.model_engine", "part of the strategy"),
    ]);
    match ledger.text(&kind).as_deref() {
        Some("fsdp" | "fsdp2") => fsdp(ledger, &kind, &format!("{ACTOR}.fsdp_config")),
        Some("megatron") => megatron(ledger, &kind),
        _ => ledger.refuse(&kind, "set `strategy.zero_stage`"),
    }
    for key in ["ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"] {
        rules::ranks_of_a_sequence(ledger, &format!("{ACTOR}.{key}"));
    }
    ledger.idle_all(&[(&format!("{REFERENCE}.ulysses_sequence_parallel_size"), "the same as the policy's")]);
    ledger.copy_number("actor_rollout_ref.nccl_timeout", "strategy.collective_timeout_s");
}

/// Megatron's layers, and its offload to the host. Megatron does not decay biases and norms.
fn megatron(ledger: &mut Ledger, kind: &str) {
    let section = format!("{ACTOR}.megatron.");
    let layers = format!("{section}override_transformer_config.");
    let dtype = format!("{section}dtype");
    ledger.assume(&[(&dtype, json!("bfloat16"))]);
    precision(ledger, &dtype);
    megatron::apply(ledger, kind, &section, &layers);
    let key = |name: &str| format!("{section}{name}");
    offload(ledger, &key);
    ledger.fill(&format!("{R}.optimizer.adamw.decays"), "matrices");
    let states = format!("{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload");
    if ledger.truth(&states) == Some(true) {
        ledger.replace(&states, "strategy.offload.optimizer", json!("cpu_step"));
        for name in
            ["optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer"]
        {
            let key = format!("{ACTOR}.optim.override_optimizer_config.{name}");
            ledger.idle_all(&[(&key, "all states are stepped on the host, in fp32")]);
        }
    }
    for name in ["grad_offload", "seed", "entropy_*"] {
        ledger.idle_all(&[(&key(name), ONE_ENGINE)]);
    }
    for name in [
        "use_mbridge",
        "vanilla_mbridge",
        "use_dist_checkpointing",
        "dist_*",
        "load_weight",
        "use_remove_padding",
    ] {
        ledger.idle_all(&[(&key(name), "a model folder is read and written unchanged")]);
    }
    ledger.idle_all(&[(
        &format!("{REFERENCE}.megatron.*"),
        "the reference uses the policy's strategy, or `roles.reference.strategy`",
    )]);
}

fn precision(ledger: &mut Ledger, dtype: &str) {
    match ledger.text(dtype).as_deref() {
        Some("bfloat16" | "bf16") => ledger.map(dtype, "strategy.precision", "bf16"),
        Some("float16" | "fp16") => ledger.map(dtype, "strategy.precision", "fp16"),
        Some("float32" | "fp32") => ledger.map(dtype, "strategy.precision", "fp32"),
        _ => ledger.refuse(dtype, "precisions are fp32, bf16 and fp16"),
    }
}

/// FSDP's keys below `section`; `kind` is the key that chooses it.
fn fsdp(ledger: &mut Ledger, kind: &str, section: &str) {
    ledger.idle(kind, "the stage is set by `reshard_after_forward`");
    let fsdp = |name: &str| format!("{section}.{name}");
    let (reshard, stage) = (fsdp("reshard_after_forward"), "strategy.zero_stage");
    ledger.assume(&[(&reshard, json!(true)), (&fsdp("dtype"), json!("bfloat16"))]);
    match ledger.truth(&reshard) {
        Some(truth) => ledger.map(&reshard, stage, if truth { 3 } else { 2 }),
        None => ledger.refuse(&reshard, "neither true nor false"),
    }
    precision(ledger, &fsdp("dtype"));
    rules::shard_group(ledger, &fsdp("fsdp_size"));
    offload(ledger, &fsdp);
}

/// States that verl offloads to the host between its phases.
fn offload(ledger: &mut Ledger, fsdp: &dyn Fn(&str) -> String) {
    let [states, weights, policy] = ["optimizer_offload", "param_offload", "offload_policy"].map(fsdp);
    if ledger.truth(&policy) == Some(true) {
        ledger.fill("strategy.offload.params", "cpu");
        ledger.map(&policy, "strategy.offload.optimizer", "cpu_step");
        ledger.idle_all(&[(&states, "with `offload_policy`"), (&weights, "with `offload_policy`")]);
    }
    ledger.refuse_all(&[(&policy, "neither true nor false")]);
    ledger.switch(&states, "strategy.offload.optimizer", "between_steps");
    match ledger.truth(&weights) {
        Some(true) => ledger.fold(&weights, "the policy's weights stay for sampling between updates"),
        Some(false) => ledger.idle(&weights, "off"),
        None => ledger.refuse_all(&[(&weights, "neither true nor false")]),
    }
    let reference = "roles.reference.strategy.offload.params";
    ledger.switch(&format!("{REFERENCE}.fsdp_config.param_offload"), reference, "between_steps");
}

/// verl counts the training batch and the mini-batch in prompts, the micro-batch in completions per device.
fn batches(ledger: &mut Ledger) {
    ledger.switch("trainer.balance_batch", "pipeline.rlvr.balance_ranks", true);
    let world = rules::map_count(ledger, "trainer.n_gpus_per_node", "devices", 8);
    let hosts = ledger.whole("trainer.nnodes").unwrap_or(1).max(1);
    let prompts = rules::map_count(ledger, "data.train_batch_size", &format!("{R}.prompts_per_step"), 1024);
    rules::map_count(ledger, &format!("{ROLLOUT}.n"), &format!("{R}.group_size"), 1);
    let key = format!("{ACTOR}.ppo_mini_batch_size");
    let update = rules::count(ledger, &key, 256);
    let why = format!("{prompts} prompts per step in updates of {update}");
    let mini_batches = prompts.div_ceil(update);
    if ledger.peek(&key).is_some() {
        match prompts.is_multiple_of(update) {
            true => ledger.change(&key, &format!("{R}.mini_batches"), mini_batches, why),
            false if prompts < update => {
                ledger.refuse(&key, format!("{why}: an update cannot be larger than the step"))
            }
            false => ledger.refuse(&key, format!("{why}: these have unequal sizes")),
        }
    }
    rules::map_count(ledger, &format!("{ACTOR}.ppo_epochs"), &format!("{R}.epochs"), 1);
    micro_batch(ledger, world.saturating_mul(hosts));
}

fn micro_batch(ledger: &mut Ledger, world: u64) {
    let field = "strategy.micro_batch_size";
    let [per_device, all, tokens, dynamic] = [
        "ppo_micro_batch_size_per_gpu",
        "ppo_micro_batch_size",
        "ppo_max_token_len_per_gpu",
        "use_dynamic_bsz",
    ]
    .map(|name| format!("{ACTOR}.{name}"));
    rules::leave_unset(ledger, &[&per_device, &all]);
    if ledger.truth(&dynamic) == Some(true) {
        ledger.assume(&[(&tokens, json!(16384))]);
        let lengths = ["data.max_prompt_length", "data.max_response_length"]
            .map(|key| ledger.whole(key).unwrap_or(512));
        let longest = lengths[0].saturating_add(lengths[1]).max(1);
        limit_in_tokens(ledger, (&dynamic, &tokens), 16384, longest);
        return ledger.idle_all(&[(&per_device, "use_dynamic_bsz is on"), (&all, "use_dynamic_bsz is on")]);
    }
    rules::map_count(ledger, &per_device, field, 1);
    let sequences = rules::count(ledger, &all, world);
    if ledger.peek(&all).is_some() {
        ledger.change(&all, field, (sequences / world).max(1), format!("on each of {world} devices"));
    }
    ledger.fill(field, 1);
}

/// A micro-batch with a limit in tokens, `usual` by default, and at least one sequence of the `longest` length.
fn limit_in_tokens(ledger: &mut Ledger, (dynamic, tokens): (&str, &str), usual: u64, longest: u64) {
    const FIELD: &str = "strategy.micro_batch_tokens";
    match rules::count(ledger, tokens, usual) {
        room if room < longest && ledger.peek(tokens).is_some() => {
            let why = format!("a sequence of up to {longest} tokens is never split");
            ledger.change(tokens, FIELD, longest, why);
        }
        _ => drop(rules::map_count(ledger, tokens, FIELD, usual)),
    }
    ledger.fold(dynamic, "the limit of a micro-batch is in tokens");
}

/// Length of the run, and intervals of checkpoints and evaluations.
fn run(ledger: &mut Ledger) {
    let field = format!("{R}.steps");
    rules::leave_unset(ledger, &["trainer.total_training_steps"]);
    rules::map_count(ledger, "trainer.total_training_steps", &field, 1);
    epochs(ledger, &field);
    for (key, name) in [("trainer.save_freq", "checkpoint"), ("trainer.test_freq", "evaluation")] {
        match ledger.number(key) {
            Some(steps) if steps > 0.0 => ledger.copy_number(key, &format!("{R}.{name}.every")),
            Some(_) => match ledger.draft(&field).and_then(Value::as_u64) {
                Some(steps) => ledger.change(key, &format!("{R}.{name}.every"), steps, "only at the end"),
                None => {
                    ledger.fold(key, format!("set `{R}.{name}.every`: the default is not only at the end"))
                }
            },
            None => ledger.refuse_all(&[(key, "not a number of steps")]),
        }
    }
    let keep = "trainer.max_actor_ckpt_to_keep";
    rules::leave_unset(ledger, &[keep]);
    rules::map_count(ledger, keep, &format!("{R}.checkpoint.keep_last"), 1);
    match ledger.number("data.seed") {
        Some(_) => ledger.copy_number("data.seed", "seed"),
        None => rules::leave_unset(ledger, &["data.seed"]),
    }
    if ledger.number("data.train_max_samples") == Some(-1.0) {
        ledger.idle("data.train_max_samples", "all");
    }
    match ledger.number("data.val_max_samples") {
        Some(-1.0) => ledger.idle("data.val_max_samples", "set by `evaluation.prompts`"),
        _ => drop(rules::map_count(ledger, "data.val_max_samples", &format!("{R}.evaluation.prompts"), 1)),
    }
}

fn epochs(ledger: &mut Ledger, field: &str) {
    let key = "trainer.total_epochs";
    let filters = ledger.truth("algorithm.filter_groups.enable") == Some(true);
    match ledger.draft(field) {
        None if filters => ledger.refuse_all(&[(key, NO_EPOCHS)]),
        None => ledger.assume(&[(key, json!(30))]),
        Some(_) => {}
    }
    rules::data_epochs(ledger, key, field, "total_training_steps");
}

/// AdamW from the keys below `section`, for the model of `owner`. Its schedule counts steps, as ours does.
fn optimizer(ledger: &mut Ledger, section: &str, owner: &str) {
    let key = |name: &str| format!("{section}.{name}");
    let adamw = format!("{owner}.optimizer.adamw");
    ledger.copy_number(&key("lr"), &format!("{adamw}.learning_rate"));
    ledger.copy_number(&key("weight_decay"), &format!("{adamw}.weight_decay"));
    // A critic decays the same weights as the policy.
    let decays = ledger.draft(&format!("{R}.optimizer.adamw.decays")).cloned().unwrap_or(json!("all"));
    ledger.fill(&format!("{adamw}.decays"), decays);
    rules::betas(ledger, &key("betas"), &format!("{adamw}.betas"));
    let clip = format!("{owner}.optimizer.max_grad_norm");
    rules::max_grad_norm(ledger, &format!("{}.grad_clip", section.trim_end_matches(".optim")), &clip);
    ledger.idle_all(&[(&key("clip_grad"), "`grad_clip` sets it")]);
    let usual = ["torch.optim", "torchao.optim", "bitsandbytes.optim"];
    match ledger.text(&key("optimizer")).as_deref() {
        None => {}
        Some("AdamW") => ledger.idle(&key("optimizer"), "AdamW is the optimizer"),
        Some("AdamW8bit" | "PagedAdamW8bit") => ledger.moments_in_eight_bits(&key("optimizer")),
        Some(_) => ledger.refuse(&key("optimizer"), "the optimizer is AdamW"),
    }
    match ledger.text(&key("optimizer_impl")) {
        None => {}
        Some(text) if usual.contains(&&*text) => {
            ledger.idle(&key("optimizer_impl"), "AdamW is the optimizer")
        }
        Some(_) => ledger.refuse(&key("optimizer_impl"), "the optimizer is AdamW"),
    }
    ledger.refuse_all(&[(&key("override_optimizer_config"), "the optimizer is AdamW with the fields above")]);
    let [steps, ratio, kind, old] =
        ["lr_warmup_steps", "lr_warmup_steps_ratio", "lr_scheduler_type", "warmup_style"].map(key);
    if ledger.number(&steps).is_some_and(|steps| steps <= 0.0) {
        ledger.idle(&steps, "set by `lr_warmup_steps_ratio`");
    }
    rules::leave_unset(ledger, &[&steps, &old]);
    if ledger.peek(&old).is_some() {
        ledger.rename(&[(&*old, &*kind)]);
    }
    ledger.assume(&[(&kind, json!("constant"))]);
    let schedule = Schedule {
        pipeline: owner,
        name: &kind,
        warmup: [&steps, &ratio],
        final_ratio: &key("min_lr_ratio"),
        updates_per_step: 1,
    };
    schedule.apply(ledger);
    match ledger.number(&key("num_cycles")) {
        Some(0.5) => ledger.idle(&key("num_cycles"), "half a cosine"),
        _ => ledger.refuse_all(&[(&key("num_cycles"), "the schedule is half a cosine")]),
    }
}

fn sampling(ledger: &mut Ledger) {
    let (key, field) = (|name: &str| format!("{ROLLOUT}.{name}"), |name: &str| format!("{R}.rollout.{name}"));
    ledger.copy_number("data.max_response_length", &field("max_new_tokens"));
    ledger.copy_number(&key("response_length"), &field("max_new_tokens"));
    ledger.copy_number(&key("temperature"), &field("temperature"));
    ledger.copy_number(&key("top_p"), &field("top_p"));
    match ledger.number(&key("top_k")) {
        Some(all) if all <= 0.0 => ledger.map(&key("top_k"), &field("top_k"), 0),
        _ => ledger.copy_number(&key("top_k"), &field("top_k")),
    }
    ledger.rollout_weights(&key("quantization"));
    speculation::of_vllm(ledger, &key("engine_kwargs.vllm.speculative_config"));
    ledger.fill(&field("batch_size"), ROLLOUT_BATCH_SIZE);
    let turns = key("multi_turn.enable");
    if ledger.truth(&turns) != Some(true) {
        ledger.idle_all(&[(&key("multi_turn.*"), "off")]);
    }
}

fn data(ledger: &mut Ledger) {
    let file = format!("{R}.data.file");
    for (key, field) in [("data.train_files", "path"), ("data.val_files", "held_out")] {
        let files = match ledger.peek(key).cloned() {
            None => continue,
            Some(Value::Array(files)) if files.len() == 1 => files[0].clone(),
            Some(files) => files,
        };
        ledger.map(key, &format!("{file}.{field}"), files);
    }
    columns(ledger, &format!("{file}.columns"));
    ledger.copy_number("data.max_prompt_length", &format!("{file}.max_prompt_tokens"));
    let (filter, cut, field) =
        ("data.filter_overlong_prompts", "data.truncation", format!("{file}.long_prompts"));
    match ledger.truth(filter) == Some(true) {
        true => {
            ledger.map(filter, &field, "leave_out");
            ledger.idle_all(&[(cut, "longer prompts are left out")]);
        }
        false => ledger.idle_all(&[(filter, "off")]),
    }
    match ledger.text(cut).as_deref() {
        None => {}
        Some("error") => ledger.map(cut, &field, "refuse"),
        Some(_) => ledger.change(cut, &field, "leave_out", "prompts are not truncated"),
    }
    let (shuffle, why) = ("data.shuffle", "prompts are always shuffled, by the seed");
    match ledger.truth(shuffle) {
        Some(true) => ledger.idle(shuffle, why),
        Some(false) => ledger.fold(shuffle, why),
        None => ledger.refuse_all(&[(shuffle, why)]),
    }
    // A dump of verl's defaults has both keys.
    let usual = |(key, name): (&str, &str)| ledger.text(key).is_some_and(|text| text == name);
    if [("data.image_key", "images"), ("data.video_key", "videos")].into_iter().all(usual) {
        ledger.idle_all(&[("data.image_key", "verl's default"), ("data.video_key", "verl's default")]);
    }
}

/// verl's columns; those of the prompt and the domain may be renamed.
fn columns(ledger: &mut Ledger, field: &str) {
    let keys = ["data.prompt_key", "data.reward_fn_key"];
    let [prompt, domain] = keys.map(|key| ledger.text(key));
    match (prompt.as_deref(), domain.as_deref()) {
        (None | Some("prompt"), None | Some("data_source")) => {
            ledger.fill(field, "verl");
            ledger.idle_all(&keys.map(|key| (key, "included in `columns: verl`")));
        }
        _ => {
            ledger.fill(&format!("{field}.answer"), "reward_model.ground_truth");
            for ((key, name), usual) in keys.iter().zip(["prompt", "domain"]).zip(["prompt", "data_source"]) {
                ledger.copy_text(key, &format!("{field}.{name}"));
                ledger.fill(&format!("{field}.{name}"), usual);
            }
        }
    }
}
