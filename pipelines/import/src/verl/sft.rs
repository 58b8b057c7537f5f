//! Importer of verl's `fsdp_sft_trainer`: a command's overrides. Defaults are those of its `sft_trainer.yaml`. Its
//! successor is `sft_engine.rs`.

use serde_json::{Value, json};

use super::sft_engine;
use crate::{
    ledger::Ledger,
    rules,
    schedule::Schedule,
    shared::{DOWNLOAD, REPORTS},
    values,
};

/// Pipeline of the imported configs.
pub(super) const P: &str = "pipeline.offline";

const PACKED: &str = "sequences are always packed";
pub(super) const READER: &str = "every rank reads the data itself, without workers";

/// Keys of both trainers that change nothing here.
const BOTH_IDLE: [(&str, &str); 15] = [
    ("data.use_shm", READER),
    ("data.balance_dp_token", "every rank has an equal share of each step"),
    ("model.use_shm", READER),
    ("model.trust_remote_code", "no code is run from a model's folder"),
    ("model.use_liger", "fused kernels are always used"),
    ("trainer.default_local_dir", "set by --output"),
    ("trainer.default_hdfs_dir", "set by --output"),
    ("trainer.project_name", REPORTS),
    ("trainer.logger", REPORTS),
    ("trainer.nnodes", "torchrun, Slurm or Kubernetes start the ranks of several hosts"),
    ("trainer.device", "`backend: auto` takes the first usable one"),
    ("trainer.resume_*", "`anyroll run --resume DIR`"),
    ("trainer.profile_interval", REPORTS),
    ("trainer.balance_batch", "every rank has an equal share of each step"),
    ("profiler.*", REPORTS),
];

const IDLE: [(&str, &str); 11] = [
    ("data.multiturn.tools_key", "conversations are rendered by the model's chat template"),
    ("data.multiturn.enable_thinking_key", "conversations are rendered by the model's chat template"),
    ("model.strategy", "one layout serves every stage"),
    ("model.fsdp_config.model_dtype", "the master weights are fp32"),
    ("model.fsdp_config.wrap_policy.*", "a model is a list of blocks, each gathered separately"),
    ("use_remove_padding", PACKED),
    ("trainer.checkpoint.*", "checkpoints contain everything"),
    ("trainer.max_ckpt_to_keep", "set by `checkpoint.keep_last`"),
    ("checkpoint_handler*", "checkpoints are in the run folder"),
    ("data.micro_batch_size", "verl reads `micro_batch_size_per_gpu` instead"),
    ("data.name", REPORTS),
];

/// Keys of both trainers that are refused.
const BOTH_REFUSED: [(&str, &str); 5] = [
    ("$*", "the variable's value is unknown: write it out"),
    ("data.custom_cls.*", "records are read by their columns"),
    (
        "data.apply_chat_template_kwargs*",
        "conversations are rendered by the model's chat template without options",
    ),
    ("data.train_max_samples", "shorten the file"),
    ("model.external_lib", "code from outside the model is not run"),
];

const REFUSED: [(&str, &str); 3] = [
    ("data.chat_template", "the template is that of the model's folder"),
    ("model.fsdp_config.cpu_offload", "set `strategy.offload`"),
    ("model.fsdp_config.offload_params", "set `strategy.offload`"),
];

fn defaults() -> [(&'static str, Value); 16] {
    [
        ("data.train_batch_size", json!(256)),
        ("data.micro_batch_size_per_gpu", json!(4)),
        ("data.max_length", json!(1024)),
        ("data.truncation", json!("error")),
        ("model.enable_gradient_checkpointing", json!(true)),
        ("optim.lr", json!(1e-5)),
        ("optim.betas", json!([0.9, 0.95])),
        ("optim.weight_decay", json!(0.01)),
        ("optim.lr_warmup_steps_ratio", json!(0.1)),
        ("optim.clip_grad", json!(1.0)),
        ("optim.lr_scheduler", json!("cosine")),
        ("trainer.total_epochs", json!(4)),
        ("trainer.seed", json!(1)),
        ("trainer.save_freq", json!(-1)),
        ("trainer.test_freq", json!(-1)),
        ("data.val_files", Value::Null),
    ]
}

pub(crate) fn apply(ledger: &mut Ledger) {
    if sft_engine::is_engine(ledger) {
        return sft_engine::apply(ledger);
    }
    ledger.assume(&defaults());
    model_of(ledger, "model.partial_pretrain");
    strategy(ledger);
    rules::map_count(ledger, "data.train_batch_size", &format!("{P}.batch_size"), 256);
    rules::map_count(ledger, "data.micro_batch_size_per_gpu", "strategy.micro_batch_size", 4);
    ledger.copy_number("trainer.seed", "seed");
    optimizer(ledger);
    run(ledger);
    data(ledger);
    rest(ledger, &IDLE, &REFUSED);
}

/// Name, objective and model of a run; `path` is the key with the model's folder.
pub(super) fn model_of(ledger: &mut Ledger, path: &str) {
    super::name(ledger);
    ledger.fill("backend", "auto");
    ledger.fill(&format!("{P}.objective"), "sft");
    if let Some(folder) = ledger.text(path) {
        ledger.change(path, "model.path", folder, DOWNLOAD);
    }
    ledger.fill("model.chat", true);
    ledger.either("model.enable_gradient_checkpointing", "strategy.recompute", "full", "none");
}

fn strategy(ledger: &mut Ledger) {
    ledger.fill("strategy.zero_stage", 3);
    ledger.fill("strategy.precision", "bf16");
    adapters(ledger);
    rules::ranks_of_a_sequence(ledger, "ulysses_sequence_parallel_size");
}

/// Keys without a field of their own: those of both trainers, and a trainer's own ones.
pub(super) fn rest(ledger: &mut Ledger, idle: &[(&str, &str)], refused: &[(&str, &str)]) {
    ledger.fold_all(&[("trainer.n_gpus_per_node", "the launcher's processes decide it: set `devices`")]);
    ledger.idle_all(idle);
    ledger.idle_all(&BOTH_IDLE);
    ledger.refuse_all(refused);
    ledger.refuse_all(&BOTH_REFUSED);
}

pub(super) fn adapters(ledger: &mut Ledger) {
    match ledger.number("model.lora_rank").is_some_and(|rank| rank > 0.0) {
        true => {
            ledger.assume(&[("model.lora_alpha", json!(16))]);
            ledger.copy_number("model.lora_rank", "model.lora.rank");
            ledger.copy_number("model.lora_alpha", "model.lora.alpha");
            ledger.lora_targets("model.target_modules");
        }
        false => ledger.idle_all(&[
            ("model.lora_rank", "off"),
            ("model.lora_alpha", "the rank is 0"),
            ("model.target_modules", "the rank is 0"),
        ]),
    }
}

fn optimizer(ledger: &mut Ledger) {
    let adamw = format!("{P}.optimizer.adamw");
    ledger.copy_number("optim.lr", &format!("{adamw}.learning_rate"));
    ledger.copy_number("optim.weight_decay", &format!("{adamw}.weight_decay"));
    ledger.fill(&format!("{adamw}.decays"), "all");
    rules::betas(ledger, "optim.betas", &format!("{adamw}.betas"));
    rules::max_grad_norm(ledger, "optim.clip_grad", &format!("{P}.optimizer.max_grad_norm"));
    let schedule = Schedule {
        pipeline: P,
        name: "optim.lr_scheduler",
        warmup: ["optim.lr_warmup_steps", "optim.lr_warmup_steps_ratio"],
        final_ratio: "optim.min_lr_ratio",
        updates_per_step: 1,
    };
    schedule.apply(ledger);
}

/// Length of the run, and intervals of checkpoints and evaluations.
pub(super) fn run(ledger: &mut Ledger) {
    let field = format!("{P}.steps");
    rules::leave_unset(ledger, &["trainer.total_training_steps"]);
    rules::map_count(ledger, "trainer.total_training_steps", &field, 1);
    rules::data_epochs(ledger, "trainer.total_epochs", &field, "total_training_steps");
    for (key, name) in [("trainer.save_freq", "checkpoint"), ("trainer.test_freq", "evaluation")] {
        match ledger.number(key) {
            Some(steps) if steps > 0.0 => ledger.copy_number(key, &format!("{P}.{name}.every")),
            Some(_) => ledger.fold(key, format!("set `{P}.{name}.every`: the default is not once per epoch")),
            None => ledger.refuse_all(&[(key, "not a number of steps")]),
        }
    }
}

/// A record is a conversation, or a prompt with its answer, each possibly a field of its column.
fn data(ledger: &mut Ledger) {
    files_and_lengths(ledger);
    columns(ledger, &format!("{P}.data.file.columns"));
}

pub(super) fn files_and_lengths(ledger: &mut Ledger) {
    let file = format!("{P}.data.file");
    for (key, field) in [("data.train_files", "path"), ("data.val_files", "held_out")] {
        rules::leave_unset(ledger, &[key]);
        rules::files(ledger, key, &format!("{file}.{field}"));
    }
    for key in ["data.train_max_samples", "data.val_max_samples"] {
        if ledger.number(key) == Some(-1.0) {
            ledger.idle(key, "all");
        }
    }
    ledger.copy_number("data.max_length", &format!("{file}.max_tokens"));
    let (cut, field) = ("data.truncation", format!("{file}.long_prompts"));
    match ledger.text(cut).as_deref() {
        Some("error") => ledger.map(cut, &field, "refuse"),
        Some("right") => ledger.map(cut, &field, json!({"truncate": "keep_start"})),
        Some("left") => ledger.map(cut, &field, json!({"truncate": "keep_end"})),
        _ => ledger.refuse(cut, "must be error, left or right"),
    }
}

fn columns(ledger: &mut Ledger, field: &str) {
    let (turns, messages) = ("data.multiturn.enable", "data.multiturn.messages_key");
    if ledger.truth(turns) == Some(true) {
        ledger.map(turns, &format!("{P}.turns"), "all");
        ledger.copy_text(messages, &format!("{field}.answer"));
        ledger.fill(&format!("{field}.answer"), "messages");
        let why = "records are conversations";
        return ledger.idle_all(&[("data.prompt_*", why), ("data.response_*", why)]);
    }
    ledger.idle_all(&[(turns, "off"), (messages, "records are no conversations")]);
    for (name, usual, ours) in [("prompt", "question", "prompt"), ("response", "answer", "answer")] {
        let [column, parts] = ["key", "dict_keys"].map(|end| format!("data.{name}_{end}"));
        rules::leave_unset(ledger, &[&parts]);
        ledger.assume(&[(&column, json!(usual))]);
        let name = ledger.text(&column).unwrap_or_default();
        let part = match ledger.peek(&parts) {
            Some(Value::Array(parts)) => parts.iter().map(values::text).collect::<Vec<_>>(),
            Some(part) => vec![values::text(part)],
            None => Vec::new(),
        };
        let path = [vec![name], part].concat().join(".");
        ledger.map(&column, &format!("{field}.{ours}"), path);
        ledger.fold_all(&[(&parts, "part of the column's name")]);
    }
}
