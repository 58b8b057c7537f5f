//! Importer of trlx's TRLConfig YAML: sections train, model, tokenizer, optimizer, scheduler and method.

use serde_json::{Value, json};

use super::shared::{DOWNLOAD, R, REPORTS};
use super::{ledger::Ledger, rules, values};

const FOLDER: &str = "set by the model's folder";

pub(super) const IDLE: [(&str, &str); 21] = [
    ("train.tracker", REPORTS),
    ("train.project_name", REPORTS),
    ("train.entity_name", REPORTS),
    ("train.group_name", REPORTS),
    ("train.tags", REPORTS),
    ("train.logging_dir", REPORTS),
    ("train.rollout_logging_dir", REPORTS),
    ("train.checkpoint_dir", "checkpoints are in the run folder"),
    ("train.save_optimizer", "checkpoints contain everything"),
    ("train.save_best", "the last checkpoints are kept"),
    ("train.resume_from_checkpoint", "`anyroll run --resume DIR`"),
    ("train.pipeline", "prompts come from `data`"),
    ("train.trainer_kwargs*", "the method is `algorithm`"),
    ("train.seq_length", "a prompt that does not fit the model is an error before training starts"),
    ("model.model_arch_type", FOLDER),
    ("model.model_extra_configs*", FOLDER),
    ("tokenizer.*", FOLDER),
    ("method.gen_experience_kwargs", "rollouts are sampled with `gen_kwargs`"),
    ("method.gen_kwargs.do_sample", "completions are sampled"),
    ("method.gen_kwargs.eos_token_id", FOLDER),
    ("method.gen_kwargs.pad_token_id", FOLDER),
];

const REFUSED: [(&str, &str); 6] = [
    ("model.num_layers_unfrozen", "train all layers, or set `model.lora`"),
    ("model.peft_config*", "set `model.lora`"), // what of it is not a LoRA's
    ("model.delta_kwargs*", "set `model.lora`"),
    ("method.num_value_layers_unfrozen", "the critic is a separate model, and all its layers are trained"),
    ("method.ref_mean", "use an advantage that centers within the group"),
    ("method.ref_std", "use an advantage that centers within the group"),
];

pub(super) fn apply(ledger: &mut Ledger) {
    model(ledger);
    if !is_ppo(ledger) {
        return ledger.idle_all(&[("*", "only PPO and ILQL are imported")]);
    }
    adapters(ledger);
    train(ledger);
    optimizer(ledger, R);
    method(ledger);
    if ledger.number("model.num_layers_unfrozen") == Some(-1.0) {
        ledger.idle("model.num_layers_unfrozen", "all layers are trained");
    }
    ledger.idle_all(&IDLE);
    ledger.refuse_all(&REFUSED);
}

/// Name of the run, and folder of its model.
pub(super) fn model(ledger: &mut Ledger) {
    match ledger.text("train.run_name") {
        Some(_) => ledger.copy_text("train.run_name", "name"),
        None => ledger.fill("name", "imported_from_trlx"),
    }
    ledger.fill("backend", "auto");
    for key in ["model.model_path", "tokenizer.tokenizer_path"] {
        match ledger.text(key) {
            Some(path) if key.starts_with("model") => {
                ledger.change(key, "model.path", path, DOWNLOAD);
            }
            Some(_) => ledger.idle(key, FOLDER),
            None => {}
        }
    }
}

/// Returns true if the method is PPO. Another method must not become a PPO run.
fn is_ppo(ledger: &mut Ledger) -> bool {
    let mut is_ppo = true;
    for (key, name) in [("method.name", "ppoconfig"), ("train.trainer", "accelerateppotrainer")] {
        rules::leave_unset(ledger, &[key]);
        match ledger.text(key).map(|text| text.to_ascii_lowercase()) {
            None => {}
            Some(text) if text == name => ledger.idle(key, "it is PPO, as `algorithm` is"),
            Some(_) => {
                ledger.refuse(key, "only PPO and ILQL are imported, each with its own trainer");
                is_ppo = false;
            }
        }
    }
    is_ppo
}

/// PEFT's `LoraConfig`, with its defaults.
fn adapters(ledger: &mut Ledger) {
    let key = |name: &str| format!("model.peft_config.{name}");
    if ledger.text(&key("peft_type")).is_none_or(|kind| !kind.eq_ignore_ascii_case("lora")) {
        return;
    }
    ledger.fold(&key("peft_type"), "by `model.lora`");
    ledger.idle_all(&[(&key("task_type"), "adapters are always for a decoder")]);
    ledger.assume(&[(&key("r"), json!(8)), (&key("lora_alpha"), json!(8))]);
    for (name, field) in [("r", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout")] {
        ledger.copy_number(&key(name), &format!("model.lora.{field}"));
    }
    ledger.switch(&key("use_rslora"), "model.lora.rslora", true);
    ledger.switch(&key("use_dora"), "model.lora.dora", true);
    rules::peft_targets(ledger, &key("target_modules"));
    let layers = key("layers_to_transform");
    match ledger.peek(&layers).cloned() {
        None | Some(Value::Null) => {}
        Some(Value::Array(numbers)) => ledger.map(&layers, "model.lora.layers", numbers),
        Some(number) => ledger.map(&layers, "model.lora.layers", vec![number]),
    }
}

/// trlx counts steps in optimizer updates, of which a round of rollouts has several.
fn train(ledger: &mut Ledger) {
    ledger.copy_number("train.seed", "seed");
    let updates = updates_per_step(ledger);
    for (key, name) in [("checkpoint_interval", "checkpoint"), ("eval_interval", "evaluation")] {
        let field = format!("{R}.{name}.every");
        rules::updates_to_steps(ledger, &format!("train.{key}"), &field, updates);
    }
    length(ledger, updates);
}

/// Length of the run, which ends with its last round of rollouts or its last update, whichever comes first.
fn length(ledger: &mut Ledger, updates_per_step: u64) {
    let (epochs, total) = ("train.epochs", "train.total_steps");
    let field = format!("{R}.steps");
    let rounds = rules::count(ledger, epochs, u64::MAX);
    let steps = rules::count(ledger, total, u64::MAX).div_ceil(updates_per_step);
    if rounds < steps {
        ledger.change(epochs, &field, rounds, "a round of rollouts is a step");
        ledger.idle_all(&[(total, "`epochs` ends the run first")]);
    } else {
        rules::updates_to_steps(ledger, total, &field, updates_per_step);
        ledger.idle_all(&[(epochs, "`total_steps` ends the run first")]);
    }
}

/// Divides a round of rollouts into updates; returns their number over all epochs of the round.
fn updates_per_step(ledger: &mut Ledger) -> u64 {
    let micro_batch = "strategy.micro_batch_size";
    rules::leave_unset(ledger, &["train.minibatch_size"]);
    if ledger.peek("train.minibatch_size").is_some() {
        rules::map_count(ledger, "train.minibatch_size", micro_batch, 1);
    }
    let rollouts = ledger.whole("method.num_rollouts").unwrap_or(0).max(1);
    let key = "train.batch_size";
    let batch = rules::count(ledger, key, rollouts);
    let mini_batches = rollouts.div_ceil(batch);
    if ledger.peek(key).is_some() {
        ledger.fill(micro_batch, batch);
        let why = format!("{rollouts} rollouts per step in updates of {batch}");
        match rollouts % mini_batches {
            0 => ledger.change(key, &format!("{R}.mini_batches"), mini_batches, why),
            _ => ledger.refuse(key, format!("{why}: these have unequal sizes")),
        }
    }
    mini_batches.saturating_mul(ledger.whole("method.ppo_epochs").unwrap_or(1).max(1))
}

/// Maps the sections `optimizer` and `scheduler` to fields of `pipeline`.
pub(super) fn optimizer(ledger: &mut Ledger, pipeline: &str) {
    let name = "optimizer.name";
    match ledger.text(name).map(|name| name.to_ascii_lowercase()).as_deref() {
        Some("adamw") => {
            let why = "AdamW is the optimizer; trlx clips no gradients";
            ledger.change(name, &format!("{pipeline}.optimizer.max_grad_norm"), 0, why);
        }
        Some("adam") => {
            ledger.change(name, &format!("{pipeline}.optimizer.adamw.weight_decay"), 0, "AdamW without decay")
        }
        Some(_) => ledger.refuse(name, "the optimizer is AdamW"),
        None => {}
    }
    let adamw = format!("{pipeline}.optimizer.adamw");
    for (key, field) in [("lr", "learning_rate"), ("eps", "eps"), ("weight_decay", "weight_decay")] {
        ledger.copy_number(&format!("optimizer.kwargs.{key}"), &format!("{adamw}.{field}"));
    }
    rules::betas(ledger, "optimizer.kwargs.betas", &format!("{adamw}.betas"));
    ledger.fill(&format!("{pipeline}.optimizer.max_grad_norm"), 0);
    schedule(ledger, pipeline);
}

/// torch's schedulers under trlx's names. They set the final rate, where ours is a share of the peak.
fn schedule(ledger: &mut Ledger, pipeline: &str) {
    let field = &format!("{pipeline}.optimizer.schedule");
    let kind = match ledger.text("scheduler.name").as_deref() {
        Some("cosine_annealing") => "cosine",
        Some("linear") => "linear",
        Some(_) => return ledger.refuse("scheduler.name", "must be constant, linear or cosine"),
        None => return,
    };
    let peak = ledger.draft(&format!("{pipeline}.optimizer.adamw.learning_rate")).and_then(Value::as_f64);
    match (ledger.number("scheduler.kwargs.eta_min"), peak) {
        (Some(end), Some(peak)) if peak > 0.0 => {
            let ratio = values::json((end / peak).clamp(0.0, 1.0));
            ledger.change(
                "scheduler.kwargs.eta_min",
                &format!("{field}.{kind}.final_ratio"),
                ratio,
                "relative to the peak",
            );
        }
        _ => {}
    }
    ledger.map("scheduler.name", &format!("{field}.{kind}.warmup_steps"), 0);
    ledger.idle_all(&[("scheduler.kwargs.T_max", "the schedule ends with the run")]);
}

fn method(ledger: &mut Ledger) {
    let a = format!("{R}.algorithm");
    if let Some(rollouts) = ledger.whole("method.num_rollouts") {
        let chunk = ledger.whole("method.chunk_size").unwrap_or(rollouts);
        ledger.map("method.num_rollouts", &format!("{R}.prompts_per_step"), rollouts);
        ledger.fill(&format!("{R}.group_size"), 1);
        ledger.fill(&format!("{a}.whiten_advantages"), true);
        if ledger.peek("method.chunk_size").is_some() {
            ledger.map("method.chunk_size", &format!("{R}.rollout.batch_size"), chunk);
        }
        ledger.fill(&format!("{R}.rollout.batch_size"), chunk);
    }
    critic(ledger, &a);
    ledger.copy_number("method.ppo_epochs", &format!("{R}.epochs"));
    if let Some(clip) = ledger.number("method.cliprange") {
        ledger.fill(&format!("{a}.loss.clipped.clip_high"), clip);
        ledger.copy_number("method.cliprange", &format!("{a}.loss.clipped.clip_low"));
    }
    scale_reward(ledger, &a);
    ledger.copy_number("method.cliprange_reward", &format!("{a}.reward_clip"));
    ledger.copy_number("method.init_kl_coef", &format!("{a}.kl_coef"));
    match (ledger.number("method.target"), ledger.number("method.horizon")) {
        (Some(target), horizon) => {
            let horizon = horizon.unwrap_or(10_000.0);
            let adaptive =
                serde_json::json!({"reward": {"adaptive": {"target": target, "horizon": horizon}}});
            ledger.map("method.target", &format!("{a}.kl_in"), adaptive);
            rules::fold_number(ledger, "method.horizon", "in `kl_in`");
        }
        (None, _) => ledger.fill(&format!("{a}.kl_in"), serde_json::json!({"reward": {}})),
    }
    ledger.idle_all(&[
        ("method.target", "the coefficient is fixed"),
        ("method.horizon", "used with the target only"),
    ]);
    let (all, longest) = ("method.gen_kwargs.max_length", "method.gen_kwargs.max_new_tokens");
    match (ledger.whole(all), ledger.peek(longest).is_some()) {
        (Some(_), true) => ledger.idle(all, "`max_new_tokens` is set"),
        (Some(tokens), false) => {
            let why = "limits the completion only, where trlx counts its prompt too";
            ledger.change(all, &format!("{R}.rollout.max_new_tokens"), tokens, why);
        }
        (None, _) => ledger.refuse_all(&[(all, "not an integer")]),
    }
    ledger.refuse_all(&[("method.gen_kwargs.min_length", "a completion ends with its end token")]);
    for (key, field) in [
        ("max_new_tokens", "max_new_tokens"),
        ("temperature", "temperature"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
    ] {
        ledger.copy_number(&format!("method.gen_kwargs.{key}"), &format!("{R}.rollout.{field}"));
    }
}

/// trlx divides by the standard deviation, and subtracts no mean.
fn scale_reward(ledger: &mut Ledger, a: &str) {
    let (key, field) = ("method.scale_reward", format!("{a}.reward_norm.std"));
    let clips = ledger.number("method.cliprange_reward").is_some();
    match ledger.text(key).map(|scale| scale.to_ascii_lowercase()).as_deref() {
        None => {}
        Some("running") if clips => {
            ledger.change(key, &field, "running", "rewards are clipped after scaling, not before");
        }
        Some("running") => ledger.map(key, &field, "running"),
        Some("ignored" | "none" | "null" | "false") => ledger.idle(key, "off"),
        Some(_) => ledger.refuse(key, "rewards are scaled by the deviation of all so far, `running`"),
    }
}

/// One model with two heads and one optimizer becomes two models with equal optimizers.
fn critic(ledger: &mut Ledger, a: &str) {
    let (gae, critic) = (format!("{a}.advantage.gae"), format!("{R}.critic"));
    ledger.copy_number("method.gamma", &format!("{gae}.gamma"));
    ledger.copy_number("method.lam", &format!("{gae}.lambda"));
    ledger.fill(&format!("{gae}.lambda"), 0.95);
    ledger.copy_number("method.cliprange_value", &format!("{critic}.value_clip"));
    ledger.fill_as(&format!("{critic}.optimizer"), &format!("{R}.optimizer"));
    ledger.idle_all(&[("method.vf_coef", "the critic has its own optimizer")]);
}
