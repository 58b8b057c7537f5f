//! Importer of TRL's SFT, DPO, reward, PRM, KTO and GKD trainers: `SFTConfig`, `DPOConfig`, `RewardConfig`,
//! `PRMConfig`, `KTOConfig` or `GKDConfig` with the model's and the script's arguments in one YAML. Defaults are TRL's.
//! Their keys are alike, so `--from` must name the trainer.

use serde_json::{Value, json};

use super::{ledger::Ledger, rules, shared::DOWNLOAD, trl, values};

/// Pipeline of the imported configs.
const P: &str = "pipeline.offline";

/// The config's trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trainer {
    /// `SFTTrainer`.
    Sft,
    /// `DPOTrainer`.
    Dpo,
    /// `RewardTrainer`.
    Reward,
    /// `PRMTrainer`.
    Prm,
    /// `KTOTrainer`.
    Kto,
    /// `GKDTrainer`.
    Gkd,
}

const PACKED: &str = "sequences are packed without padding and do not attend to each other";

const IDLE: [(&str, &str); 10] = [
    ("train_sampling_strategy", "records are shuffled in every epoch, independent of the number of devices"),
    ("packing", PACKED),
    ("packing_strategy", PACKED),
    ("eval_packing", PACKED),
    ("padding_free", PACKED),
    ("pad_to_multiple_of", PACKED),
    ("pad_token", PACKED),
    ("label_pad_token_id", PACKED),
    ("precompute_ref_*", "the reference scores a step's answers before the step"),
    ("model_adapter_name", "the reference is the model with its adapters off"),
];

const REFUSED: [(&str, &str); 9] = [
    ("neftune_noise_alpha", "noise on embeddings is not supported"),
    ("chat_template_path", "the template is that of the model's folder"),
    ("eos_token", "an answer ends with the model's end token"),
    ("use_weighting", "all pairs have the same weight"),
    ("ld_alpha", "all tokens of an answer have the same weight"),
    ("loss_weights", "there is only one objective"),
    ("reference_free", "use `simpo` or `orpo`, which have no reference"),
    ("f_divergence_*", "the divergence is the reverse KL"),
    ("generate_during_eval", "set the number of prompts in `evaluation.completions`"),
];

fn defaults(trainer: Trainer) -> Vec<(&'static str, Value)> {
    let learning_rate = match trainer {
        Trainer::Sft | Trainer::Gkd => 2e-5,
        Trainer::Dpo | Trainer::Kto => 1e-6,
        Trainer::Reward => 1e-4,
        Trainer::Prm => 1e-5,
    };
    let mut defaults = vec![
        ("per_device_train_batch_size", json!(8)),
        ("gradient_accumulation_steps", json!(1)),
        ("learning_rate", json!(learning_rate)),
        ("lr_scheduler_type", json!("linear")),
        ("adam_beta1", json!(0.9)),
        ("adam_beta2", json!(0.999)),
        ("weight_decay", json!(0.0)),
        ("max_grad_norm", json!(1.0)),
        ("max_length", json!(1024)),
        ("eval_strategy", json!("no")),
        ("seed", json!(42)),
    ];
    match trainer {
        Trainer::Dpo => defaults.extend([("loss_type", json!("sigmoid")), ("beta", json!(0.1))]),
        Trainer::Kto => defaults.extend([
            ("loss_type", json!("kto")),
            ("beta", json!(0.1)),
            ("desirable_weight", json!(1.0)),
            ("undesirable_weight", json!(1.0)),
        ]),
        Trainer::Gkd => {
            defaults.extend([("beta", json!(0.5)), ("temperature", json!(0.9)), ("lmbda", json!(0.5))]);
        }
        Trainer::Prm => defaults.extend([
            ("max_prompt_length", json!(512)),
            ("step_separator", json!("\n")),
            ("train_on_last_step_only", json!(false)),
        ]),
        Trainer::Sft | Trainer::Reward => {}
    }
    defaults
}

pub(super) fn apply(ledger: &mut Ledger, trainer: Trainer) {
    ledger.rename(&[("max_seq_length", "max_length")]);
    ledger.assume(&defaults(trainer));
    ledger.fill("name", format!("imported_from_trl_{}", format!("{trainer:?}").to_lowercase()));
    ledger.fill("backend", "auto");
    trl::model(ledger);
    batches(ledger, trainer);
    trl::steps(ledger, P, 1);
    trl::optimizer(ledger, P, 1);
    ledger.copy_number("router_aux_loss_coef", &format!("{P}.router_aux_loss_coef"));
    match trainer {
        Trainer::Sft => sft(ledger),
        Trainer::Dpo => dpo(ledger),
        Trainer::Reward => reward(ledger),
        Trainer::Prm => prm(ledger),
        Trainer::Kto => kto(ledger),
        Trainer::Gkd => gkd(ledger),
    }
    data(ledger, trainer);
    evaluation(ledger);
    trl::run(ledger, P, 1);
    trl::sources(ledger);
    ledger.idle_all(&IDLE);
    ledger.idle_all(&trl::IDLE);
    ledger.refuse_all(&REFUSED);
    ledger.refuse_all(&trl::REFUSED);
}

/// TRL counts batches in records per device, ours are records per step over all ranks. A micro-batch counts
/// both answers of a pair.
fn batches(ledger: &mut Ledger, trainer: Trainer) {
    rules::leave_unset(ledger, &["num_processes"]);
    let world = rules::map_count(ledger, "num_processes", "devices", 1);
    let (key, field) = ("per_device_train_batch_size", "strategy.micro_batch_size");
    let per_device = rules::count(ledger, key, 8);
    match trainer {
        _ if ledger.peek(key).is_none() => {}
        Trainer::Sft | Trainer::Prm | Trainer::Kto | Trainer::Gkd => ledger.map(key, field, per_device),
        Trainer::Dpo | Trainer::Reward => {
            ledger.change(key, field, per_device.saturating_mul(2), "a pair is two sequences")
        }
    }
    let key = "gradient_accumulation_steps";
    let accumulation = rules::count(ledger, key, 1);
    if ledger.peek(key).is_some() {
        let why = format!("{per_device} records, {accumulation} times, on {world} devices");
        let records = per_device.saturating_mul(accumulation).saturating_mul(world);
        ledger.change(key, &format!("{P}.batch_size"), records, why);
    }
    if ledger.peek("per_device_eval_batch_size").is_some() {
        ledger.idle("per_device_eval_batch_size", "evaluation uses the micro-batches of training");
    }
}

fn sft(ledger: &mut Ledger) {
    ledger.fill(&format!("{P}.objective"), "sft");
    match ledger.text("loss_type").as_deref() {
        Some("nll" | "chunked_nll") => ledger.idle("loss_type", "the objective is the likelihood"),
        Some(_) => ledger.refuse("loss_type", "the objective is the likelihood"),
        None => {}
    }
    let is_text = ledger.peek("dataset_text_field").is_some();
    if !is_text && ledger.peek("completion_only_loss").is_none() {
        ledger.assume(&[("assistant_only_loss", json!(false))]);
        if ledger.truth("assistant_only_loss") == Some(false) {
            let why = "the assistant's messages are trained, the others are not";
            ledger.change("assistant_only_loss", &format!("{P}.turns"), "all", why);
        }
    }
    for key in ["completion_only_loss", "assistant_only_loss"] {
        match (ledger.peek(key).is_some(), ledger.truth(key)) {
            (false, _) => {}
            (true, None) if !ledger.peek(key).is_some_and(values::is_unset) => {
                ledger.refuse(key, "neither true nor false");
            }
            (true, Some(false)) if key == "completion_only_loss" && !is_text => {
                ledger.refuse(key, "only the answer is trained, not the prompt");
            }
            (true, Some(true)) if key == "assistant_only_loss" => {
                ledger.map(key, &format!("{P}.turns"), "all");
            }
            _ if is_text => ledger.idle(key, "all tokens of a text are trained"),
            _ => ledger.idle(key, "only the answer is trained"),
        }
    }
}

fn dpo(ledger: &mut Ledger) {
    let loss = match ledger.peek("loss_type") {
        Some(Value::Array(kinds)) if kinds.len() == 1 => Some(values::text(&kinds[0])),
        other => other.map(values::text),
    };
    let kind = match loss.as_deref() {
        Some("sigmoid") => "dpo",
        Some("ipo") => "ipo",
        Some("hinge") => "hinge",
        _ => {
            return ledger.refuse(
                "loss_type",
                "losses are sigmoid, ipo and hinge; others are objectives of their own",
            );
        }
    };
    let field = format!("{P}.objective.{kind}");
    ledger.copy_number("beta", &format!("{field}.beta"));
    let beta = ledger.draft(&format!("{field}.beta")).cloned().unwrap_or(json!(0.1));
    ledger.map("loss_type", &format!("{field}.beta"), beta);
    for (key, name) in [("label_smoothing", "label_smoothing"), ("rpo_alpha", "sft_weight")] {
        match ledger.number(key) {
            _ if kind == "dpo" => ledger.copy_number(key, &format!("{field}.{name}")),
            Some(0.0) => ledger.idle(key, "off"),
            Some(_) => ledger.refuse(key, format!("`{kind}` has none")),
            None => {}
        }
    }
}

fn kto(ledger: &mut Ledger) {
    let kind = match ledger.text("loss_type").as_deref() {
        Some(kind @ ("kto" | "apo_zero_unpaired")) => kind.to_owned(),
        _ => return ledger.refuse("loss_type", "losses are kto and apo_zero_unpaired"),
    };
    let field = format!("{P}.objective.{kind}");
    for key in ["beta", "desirable_weight", "undesirable_weight"] {
        ledger.copy_number(key, &format!("{field}.{key}"));
    }
    let beta = ledger.draft(&format!("{field}.beta")).cloned().unwrap_or(json!(0.1));
    match kind.as_str() {
        "kto" => {
            let why = "prompts and answers are mismatched over the whole step, not on each device";
            ledger.change("loss_type", &format!("{field}.beta"), beta, why);
        }
        _ => ledger.map("loss_type", &format!("{field}.beta"), beta),
    }
}

/// In TRL the teacher or the policy may answer prompts; here only the file's answers are distilled.
fn gkd(ledger: &mut Ledger) {
    let field = format!("{P}.objective.distill");
    for key in ["beta", "temperature"] {
        ledger.copy_number(key, &format!("{field}.{key}"));
    }
    let own = "answers come from the file; to distill on the policy's own answers use `rlvr` with \
               `kl_in: advantage`, docs/guides/distillation.md";
    match ledger.number("lmbda") {
        Some(0.0) => ledger.idle("lmbda", "answers come from the file"),
        _ => ledger.refuse("lmbda", own),
    }
    let teachers = "write the teacher's answers to the file first, with `anyroll generate`";
    match ledger.truth("seq_kd") {
        Some(false) => ledger.idle("seq_kd", "off"),
        Some(true) => ledger.refuse("seq_kd", teachers),
        None => {}
    }
    if let Some(name) = ledger.text("teacher_model_name_or_path") {
        ledger.change("teacher_model_name_or_path", "roles.reference.path", name, DOWNLOAD);
    }
    let idle = [
        ("max_new_tokens", "training samples nothing"),
        ("teacher_model_init_kwargs*", "set `roles.reference.strategy`"),
    ];
    ledger.idle_all(&idle);
}

fn reward(ledger: &mut Ledger) {
    let field = format!("{P}.objective.reward_model.center");
    ledger.copy_number("center_rewards_coefficient", &field);
    ledger.fill(&field, 0.0);
}

fn prm(ledger: &mut Ledger) {
    let field = format!("{P}.objective.prm");
    ledger.copy_text("step_separator", &format!("{field}.step_separator"));
    ledger.flag("train_on_last_step_only", &format!("{field}.train_on_last_step_only"));
    let whole = "a solution is bounded together with its prompt, by `max_length`";
    ledger.refuse_all(&[("max_completion_length", whole)]);
}

/// TRL's columns: pairs in `chosen` and `rejected`, conversations in `messages`, texts in the column of a
/// key, labelled answers in `completion` with a `label`, and labelled steps in `completions` with `labels`.
fn data(ledger: &mut Ledger, trainer: Trainer) {
    let file = format!("{P}.data.file");
    let is_text = trainer == Trainer::Sft && ledger.peek("dataset_text_field").is_some();
    let why = match trainer {
        Trainer::Sft if is_text => "a JSONL, Parquet or Arrow file: write the dataset to it first",
        Trainer::Sft => {
            "a JSONL, Parquet or Arrow file with conversations in `messages`: write the dataset to it \
                         first; for plain texts set `columns: {text: text}`"
        }
        _ => "a JSONL, Parquet or Arrow file: write the dataset to it first, and name its columns",
    };
    rules::data_file(ledger, "dataset_name", &format!("{file}.path"), why);
    rules::longest_prompt(ledger, "max_prompt_length", &format!("{file}.max_prompt_tokens"));
    if is_text {
        ledger.copy_text("dataset_text_field", &format!("{file}.columns.text"));
    }
    let columns = match trainer {
        Trainer::Sft if is_text => &[][..],
        Trainer::Sft | Trainer::Gkd => &[("answer", "messages")],
        Trainer::Dpo | Trainer::Reward => &[("answer", "chosen"), ("rejected", "rejected")],
        Trainer::Kto => &[("answer", "completion"), ("label", "label")],
        Trainer::Prm => &[("steps", "completions"), ("step_labels", "labels")],
    };
    for (column, name) in columns {
        ledger.fill(&format!("{file}.columns.{column}"), *name);
    }
    lengths(ledger, trainer, &file);
}

/// TRL truncates longer records, but leaves out longer texts of a reward model.
fn lengths(ledger: &mut Ledger, trainer: Trainer, file: &str) {
    let (key, mode) = ("max_length", "truncation_mode");
    let truncate = format!("{file}.long_prompts.truncate");
    match ledger.whole(key) {
        None if ledger.peek(key).is_some_and(|value| !values::is_unset(value)) => {
            ledger.refuse(key, "not an integer");
        }
        None => ledger.idle_all(&[(key, "no limit"), (mode, "without `max_length` nothing is truncated")]),
        Some(most) => {
            ledger.map(key, &format!("{file}.max_tokens"), most);
            match ledger.text(mode).as_deref() {
                _ if trainer == Trainer::Reward => {
                    ledger.idle_all(&[(mode, "longer records are left out, as in TRL")]);
                }
                Some("keep_start" | "keep_end") => ledger.copy_text(mode, &truncate),
                Some(_) => ledger.refuse(mode, "modes are keep_start and keep_end"),
                None => ledger.fill(&truncate, "keep_start"),
            }
        }
    }
}

/// Without evaluation settings TRL evaluates nothing, and trains on all records.
fn evaluation(ledger: &mut Ledger) {
    let key = "eval_strategy";
    match ledger.text(key).as_deref() {
        Some("steps" | "epoch") => {}
        _ if ledger.truth(key) == Some(false) => {
            ledger.map(key, &format!("{P}.evaluation.prompts"), 0);
            ledger.idle_all(&[("eval_steps", "evaluation is off")]);
        }
        _ => ledger.refuse(key, "must be no, steps or epoch"),
    }
}
