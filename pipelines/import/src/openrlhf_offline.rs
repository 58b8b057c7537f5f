//! Importer of OpenRLHF's `train_sft`, `train_dpo`, `train_rm` and former `train_prm` and `train_kto` commands, with
//! flat or dotted flags. Defaults are OpenRLHF's.

use serde_json::{Value, json};

use super::{ledger::Ledger, openrlhf, rules, values};

/// Pipeline of the imported configs.
const P: &str = "pipeline.offline";

/// The command's trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trainer {
    /// `train_sft`.
    Sft,
    /// `train_dpo`.
    Dpo,
    /// `train_rm`.
    Rm,
    /// `train_prm`.
    Prm,
    /// `train_kto`.
    Kto,
}

/// Flat flags with their dotted replacements, where PPO's differ.
const FLAT_TO_DOTTED: [(&str, &str); 26] = [
    ("pretrain", "model.model_name_or_path"),
    ("ref_pretrain", "ref.model_name_or_path"),
    ("ref_offload", "ref.offload"),
    ("gradient_checkpointing", "model.gradient_checkpointing_enable"),
    ("gradient_checkpointing_use_reentrant", "model.gradient_checkpointing_reentrant"),
    ("learning_rate", "adam.lr"),
    ("adam_betas", "adam.betas"),
    ("l2", "adam.weight_decay"),
    ("beta", "model.beta"),
    ("ipo", "model.ipo_enable"),
    ("label_smoothing", "model.label_smoothing"),
    ("nll_loss_coef", "model.nll_loss_coef"),
    ("loss", "model.loss_type"),
    ("margin_loss", "model.margin_loss_enable"),
    ("compute_fp32_loss", "model.compute_fp32_loss_enable"),
    ("aux_loss_coef", "model.aux_loss_coef"),
    ("pretrain_mode", "model.pretrain_mode_enable"),
    ("dataset", "data.dataset"),
    ("dataset_probs", "data.dataset_probs"),
    ("eval_dataset", "eval.dataset"),
    ("output_key", "data.output_key"),
    ("prompt_key", "data.prompt_key"),
    ("chosen_key", "data.chosen_key"),
    ("rejected_key", "data.rejected_key"),
    ("multiturn", "data.multiturn"),
    ("max_len", "data.max_len"),
];

/// Prefixes of PPO's dotted flags that these programs share.
const COMMON: [&str; 5] = ["ds.", "train.", "data.", "ckpt.", "eval."];

const IDLE: [(&str, &str); 16] = [
    ("local_rank", "`anyroll run` starts the ranks"),
    ("use_ms", "nothing is downloaded"),
    ("full_determinism", "`strategy.deterministic` is the default"),
    ("train.full_determinism_enable", "`strategy.deterministic` is the default"),
    ("muon.*", "AdamW is the optimizer"),
    ("disable_fast_tokenizer", "the model's folder has its tokenizer"),
    ("data.disable_fast_tokenizer", "the model's folder has its tokenizer"),
    ("data.dataloader_num_workers", "every rank reads the data itself, without workers"),
    ("dataset_split", "datasets are files"),
    ("data.dataset_split", "datasets are files"),
    ("eval_split", "datasets are files"),
    ("eval.split", "datasets are files"),
    ("model.gradient_checkpointing_reentrant", "blocks are recomputed as a whole"),
    ("value_head_prefix", "an exported reward model has transformers' name for its head"),
    ("ds.value_head_prefix", "an exported reward model has transformers' name for its head"),
    ("model.compute_fp32_loss_enable", "losses are computed in fp32 or above"),
];

const REFUSED: [(&str, &str); 5] = [
    ("model.margin_loss_enable", "margins of pairs are not supported"),
    ("model.pretrain_mode_enable", "plain texts are trained only by `train_sft`, from `input_key`"),
    ("tokenizer_chat_template", "the template is that of the model's folder"),
    ("data.tokenizer_chat_template", "the template is that of the model's folder"),
    ("data.dataset_probs", "write the files in a `mix` with their weights"),
];

fn defaults(trainer: Trainer) -> Vec<(&'static str, Value)> {
    let (learning_rate, micro_batch_size, length) = match trainer {
        Trainer::Sft => (5e-6, 8, 2048),
        Trainer::Dpo => (1e-5, 8, 512),
        Trainer::Rm => (9e-6, 1, 512),
        Trainer::Prm => (1e-6, 1, 2048),
        Trainer::Kto => (1e-5, 8, 2048),
    };
    vec![
        ("train.batch_size", json!(128)),
        ("train.micro_batch_size", json!(micro_batch_size)),
        ("train.seed", json!(42)),
        ("ds.zero_stage", json!(2)),
        ("adam.lr", json!(learning_rate)),
        ("adam.betas", json!(["0.9", "0.95"])),
        ("max_norm", json!(1.0)),
        ("data.max_len", json!(length)),
        ("eval.dataset", Value::Null),
    ]
}

pub(super) fn apply(ledger: &mut Ledger, trainer: Trainer) {
    let common = |(_, new): &&(&str, &str)| COMMON.iter().any(|section| new.starts_with(section));
    let renamed = openrlhf::FLAT_TO_DOTTED.iter().filter(common);
    ledger.rename(FLAT_TO_DOTTED.iter().chain(renamed));
    ledger.assume(&defaults(trainer));
    ledger.fill("name", format!("imported_from_openrlhf_{}", format!("{trainer:?}").to_lowercase()));
    ledger.fill("backend", "auto");
    openrlhf::model(ledger, "model.");
    openrlhf::strategy(ledger, "model.");
    batches(ledger, trainer);
    openrlhf::optimizer(ledger, P, "");
    match ledger.text("optim").as_deref() {
        None => {}
        Some("adam") => ledger.idle("optim", "AdamW is the optimizer"),
        Some(_) => ledger.refuse("optim", "the optimizer is AdamW"),
    }
    match trainer {
        Trainer::Sft => ledger.fill(&format!("{P}.objective"), "sft"),
        Trainer::Dpo => dpo(ledger),
        Trainer::Rm => reward_model(ledger),
        Trainer::Prm => prm(ledger),
        Trainer::Kto => kto(ledger),
    }
    reference(ledger);
    data(ledger, trainer);
    ledger.idle_all(&IDLE);
    ledger.idle_all(&openrlhf::IDLE);
    ledger.copy_number("model.aux_loss_coef", &format!("{P}.router_aux_loss_coef"));
    ledger.refuse_all(&REFUSED);
    ledger.refuse_all(&openrlhf::REFUSED);
}

/// OpenRLHF counts batches in records; a pair in a micro-batch is one record.
fn batches(ledger: &mut Ledger, trainer: Trainer) {
    let (key, field) = ("train.micro_batch_size", "strategy.micro_batch_size");
    let size = rules::count(ledger, key, 1);
    match trainer {
        _ if ledger.peek(key).is_none() => {}
        Trainer::Sft | Trainer::Prm | Trainer::Kto => ledger.map(key, field, size),
        Trainer::Dpo | Trainer::Rm => {
            ledger.change(key, field, size.saturating_mul(2), "a pair is two sequences");
        }
    }
    let records = rules::map_count(ledger, "train.batch_size", &format!("{P}.batch_size"), 128);
    ledger.copy_number("train.seed", "seed");
    let epochs = if trainer == Trainer::Sft { 2 } else { 1 };
    if ledger.peek("eval.dataset").is_some_and(values::is_unset) {
        ledger.idle_all(&[("eval.steps", "evaluation is off")]);
    }
    openrlhf::run(ledger, P, records, ("train.max_epochs", epochs));
}

fn dpo(ledger: &mut Ledger) {
    let key = "model.ipo_enable";
    let kind = match ledger.truth(key) {
        Some(true) => "ipo",
        _ => "dpo",
    };
    let field = format!("{P}.objective.{kind}");
    ledger.assume(&[("model.beta", json!(0.1))]);
    ledger.copy_number("model.beta", &format!("{field}.beta"));
    if kind == "ipo" {
        ledger.fold(key, "part of the objective, with means over tokens where OpenRLHF has sums");
    }
    let (smoothing, nll) = ("model.label_smoothing", "model.nll_loss_coef");
    if kind == "dpo" {
        ledger.copy_number(smoothing, &format!("{field}.label_smoothing"));
        if let Some(weight) = ledger.number(nll) {
            let why = "the mean over all tokens, where OpenRLHF averages the answers' means";
            ledger.change(nll, &format!("{field}.sft_weight"), values::json(weight), why);
        }
    }
    ledger.refuse_all(&[(smoothing, "`ipo` has none"), (nll, "`ipo` has none")]);
    ledger.idle_all(&[(key, "off")]);
}

fn kto(ledger: &mut Ledger) {
    let field = |name: &str| format!("{P}.objective.kto.{name}");
    ledger.assume(&[("model.beta", json!(0.01))]);
    let why = "the mean over mismatched prompts and answers is that of the whole step, not of each device";
    if let Some(beta) = ledger.number("model.beta") {
        ledger.change("model.beta", &field("beta"), values::json(beta), why);
    }
    ledger.copy_number("desirable_loss_weight", &field("desirable_weight"));
    ledger.copy_number("undesirable_loss_weight", &field("undesirable_weight"));
}

/// The reference must be the initial policy.
fn reference(ledger: &mut Ledger) {
    let (reference, model) = ("ref.model_name_or_path", ledger.draft("model.path").cloned());
    match ledger.text(reference) {
        None => {}
        Some(path) if Some(json!(path)) == model => {
            ledger.idle(reference, "the reference is the model as it was at the start");
        }
        Some(_) => ledger.refuse(reference, "the reference is the model as it was at the start"),
    }
}

fn reward_model(ledger: &mut Ledger) {
    ledger.fill(&format!("{P}.objective.reward_model.center"), 0.0);
    match ledger.text("model.loss_type").as_deref() {
        None => {}
        Some("sigmoid" | "log_exp" | "logexp") => {
            ledger.idle("model.loss_type", "every loss type is -log sigmoid of the difference here");
        }
        Some(_) => ledger.refuse("model.loss_type", "the loss is -log sigmoid of the difference"),
    }
}

/// OpenRLHF's process reward model is a language model, of which the reward tokens' logits are compared at each
/// placeholder.
fn prm(ledger: &mut Ledger) {
    let field = format!("{P}.objective.prm.step_separator");
    if let Some(token) = ledger.text("placeholder_token") {
        let why = "the model has a head of two classes, in place of the logits of reward tokens";
        ledger.change("placeholder_token", &field, token, why);
    }
    ledger.fill(&field, "\n");
    let why = "labels are true and false, or probabilities: write the first of these tokens as true";
    ledger.fold_all(&[("reward_tokens", why)]);
}

/// OpenRLHF's columns: pairs in `chosen` and `rejected`, answers in `output_key` or conversations, or texts,
/// in `input_key`, and labels in `label_key`.
fn data(ledger: &mut Ledger, trainer: Trainer) {
    let file = format!("{P}.data.file");
    let why = "a JSONL, Parquet or Arrow file: write the dataset to it first";
    rules::data_file(ledger, "data.dataset", &format!("{file}.path"), why);
    match ledger.peek("eval.dataset").is_some_and(values::is_unset) {
        true => ledger.map("eval.dataset", &format!("{P}.evaluation.prompts"), 0),
        false => rules::data_file(ledger, "eval.dataset", &format!("{file}.held_out"), why),
    }
    let column = |name: &str| format!("{file}.columns.{name}");
    match trainer {
        Trainer::Sft | Trainer::Kto => {
            ledger.assume(&[("data.input_key", json!("input"))]);
            let has_answers = ledger.peek("data.output_key").is_some();
            let pretrain = "model.pretrain_mode_enable";
            let is_text = trainer == Trainer::Sft && !has_answers && ledger.truth(pretrain) == Some(true);
            ledger.copy_text("data.output_key", &column("answer"));
            let input = match (has_answers, is_text) {
                (true, _) => "prompt",
                (false, true) => "text",
                (false, false) => "answer",
            };
            ledger.copy_text("data.input_key", &column(input));
            if is_text {
                ledger.fold(pretrain, "in `columns.text`");
            }
            ledger.switch("data.multiturn", &format!("{P}.turns"), "all");
        }
        Trainer::Prm => {
            ledger.assume(&[("data.input_key", json!("input")), ("data.label_key", json!("label"))]);
            let why = "a list: write the text up to the first step to `prompt`, and the rest to this list, \
                       divided at the placeholders";
            ledger.change("data.input_key", &column("steps"), "completions", why);
            ledger.copy_text("data.label_key", &column("step_labels"));
        }
        Trainer::Dpo | Trainer::Rm => {
            ledger.assume(&[("data.chosen_key", json!("chosen")), ("data.rejected_key", json!("rejected"))]);
            ledger.copy_text("data.prompt_key", &column("prompt"));
            ledger.copy_text("data.chosen_key", &column("answer"));
            ledger.copy_text("data.rejected_key", &column("rejected"));
        }
    }
    if trainer == Trainer::Kto {
        ledger.assume(&[("data.label_key", json!("label"))]);
        ledger.copy_text("data.label_key", &column("label"));
    }
    if let Some(most) = ledger.whole("data.max_len") {
        let why = match trainer {
            Trainer::Rm => "longer records are left out, not truncated",
            _ => "truncated likewise, but the last token does not become the end token",
        };
        ledger.change("data.max_len", &format!("{file}.max_tokens"), most, why);
        if trainer != Trainer::Rm {
            ledger.fill(&format!("{file}.long_prompts.truncate"), "keep_start");
        }
    }
    if ledger.peek("data.apply_chat_template").is_some() {
        ledger.flag("data.apply_chat_template", "model.chat");
    }
    ledger.fill("model.chat", false);
    if ledger.number("data.dataset_probs") == Some(1.0) {
        ledger.idle("data.dataset_probs", "one file");
    }
}
