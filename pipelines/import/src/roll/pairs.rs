//! Importer of ROLL's DPO pipeline, whose keys for model, strategy and optimizer are those of RLVR.

use serde_json::{Value, json};

use super::{adamw, model, refuse_before_idle, strategy, template};
use crate::{ledger::Ledger, rules, values};

/// Pipeline of the imported configs.
const P: &str = "pipeline.offline";

/// Keys that only this pipeline has.
const OWN: [&str; 4] = ["chosen_key", "rejected_key", "ipo", "label_smoothing"];

const ARGS: &str = "actor_train.training_args";
const DATA: &str = "actor_train.data_args.file_name";

fn defaults() -> [(&'static str, Value); 16] {
    [
        ("exp_name", json!("imported_from_roll_dpo")),
        ("seed", json!(42)),
        ("max_steps", json!(500)),
        ("save_steps", json!(50)),
        ("eval_steps", json!(10)),
        ("max_grad_norm", json!(1.0)),
        ("ipo", json!(false)),
        ("beta", json!(0.1)),
        ("chosen_key", json!("chosen")),
        ("rejected_key", json!("rejected")),
        ("actor_train.training_args.learning_rate", json!(5e-5)),
        ("actor_train.training_args.lr_scheduler_type", json!("linear")),
        ("actor_train.training_args.per_device_train_batch_size", json!(8)),
        ("actor_train.training_args.gradient_accumulation_steps", json!(1)),
        ("actor_train.training_args.num_train_epochs", json!(1)),
        ("actor_train.model_args.dtype", json!("bf16")),
    ]
}

/// Returns true for a config of this pipeline.
pub(super) fn is_of_pairs(ledger: &Ledger) -> bool {
    OWN.iter().any(|key| ledger.peek(key).is_some())
}

pub(super) fn apply(ledger: &mut Ledger) {
    ledger.assume(&defaults());
    ledger.copy_text("exp_name", "name");
    ledger.fill("backend", "auto");
    model(ledger, &["actor_train"]);
    ledger.fill("model.chat", true);
    let ranks_per_replica = strategy::strategy(ledger, P);
    batches(ledger, ranks_per_replica);
    run(ledger);
    adamw(ledger, ARGS, P);
    objective(ledger);
    data(ledger);
    template(ledger);
    ledger.idle_all(&[
        ("actor_train.training_args.max_steps", "ROLL sets it to `max_steps`"),
        ("validation.*", "pairs are evaluated with the settings of training"),
        ("actor_train.training_args.bf16", "set by `model_args.dtype`"),
        ("actor_train.training_args.fp16", "set by `model_args.dtype`"),
    ]);
    refuse_before_idle(ledger);
}

/// ROLL counts pairs per device, ours are pairs per step over all ranks, and sequences in a micro-batch.
fn batches(ledger: &mut Ledger, ranks_per_replica: u64) {
    let [per_device, accumulation] =
        ["per_device_train_batch_size", "gradient_accumulation_steps"].map(|name| format!("{ARGS}.{name}"));
    let pairs = rules::count(ledger, &per_device, 8);
    let times = rules::count(ledger, &accumulation, 1);
    let replicas = (strategy::world(ledger) / ranks_per_replica).max(1);
    if ledger.peek(&per_device).is_some() {
        let field = "strategy.micro_batch_size";
        ledger.change(&per_device, field, pairs.saturating_mul(2), "a pair is two sequences");
    }
    if ledger.peek(&accumulation).is_some() {
        let why = format!("{pairs} pairs, {times} times, on {replicas} replicas");
        let batch = pairs.saturating_mul(times).saturating_mul(replicas);
        ledger.change(&accumulation, &format!("{P}.batch_size"), batch, why);
    }
}

fn run(ledger: &mut Ledger) {
    let epochs = format!("{ARGS}.num_train_epochs");
    ledger.fold(
        &epochs,
        "ROLL ends with the first of these epochs and `max_steps`; `steps` is the run's length",
    );
    for (key, field) in [
        ("seed", "seed".to_owned()),
        ("max_steps", format!("{P}.steps")),
        ("save_steps", format!("{P}.checkpoint.every")),
        ("max_ckpt_to_keep", format!("{P}.checkpoint.keep_last")),
        ("max_grad_norm", format!("{P}.optimizer.max_grad_norm")),
    ] {
        ledger.copy_number(key, &field);
    }
}

fn objective(ledger: &mut Ledger) {
    let kind = match ledger.truth("ipo") {
        Some(true) => "ipo",
        Some(false) => "dpo",
        None => return ledger.refuse("ipo", "neither true nor false"),
    };
    let field = format!("{P}.objective.{kind}");
    ledger.copy_number("beta", &format!("{field}.beta"));
    let smoothing = "label_smoothing";
    match (kind, ledger.number(smoothing)) {
        ("dpo", _) => ledger.copy_number(smoothing, &format!("{field}.label_smoothing")),
        (_, Some(_)) => ledger.idle(smoothing, "ROLL's IPO does not read it"),
        _ => {}
    }
    match kind {
        "ipo" => ledger.refuse(
            "ipo",
            "ROLL's has log-probs of whole answers, ours their means over tokens: set another `beta`",
        ),
        _ => ledger.idle("ipo", "off"),
    }
}

/// A pair is a prompt in `instruction` with two answers. Longer ones are left out, as here.
fn data(ledger: &mut Ledger) {
    let file = format!("{P}.data.file");
    rules::files(ledger, DATA, &format!("{file}.path"));
    let held_out = "validation.data_args.file_name";
    match ledger.peek(held_out).is_some_and(|files| !values::is_unset(files)) {
        true => {
            rules::files(ledger, held_out, &format!("{file}.held_out"));
            ledger.copy_number("eval_steps", &format!("{P}.evaluation.every"));
        }
        false => {
            ledger.fill(&format!("{P}.evaluation.prompts"), 0);
            ledger.idle_all(&[("eval_steps", "without `validation` ROLL evaluates nothing")]);
        }
    }
    ledger.fill(&format!("{file}.columns.prompt"), "instruction");
    ledger.copy_text("chosen_key", &format!("{file}.columns.answer"));
    ledger.copy_text("rejected_key", &format!("{file}.columns.rejected"));
    ledger.copy_number("sequence_length", &format!("{file}.max_tokens"));
}
