//! Importer of verl's `sft_trainer`: a command's overrides. Defaults are those of its `sft_trainer_engine.yaml`, with
//! FSDP.

use serde_json::{Value, json};

use super::sft::{P, READER, adapters, files_and_lengths, model_of, rest, run};
use crate::{ledger::Ledger, rules};

const PACKED: &str = "sequences are always packed";
const TEMPLATE: &str = "conversations are rendered by the model's chat template";
const BLOCKS: &str = "blocks are hand-written";

const IDLE: [(&str, &str); 28] = [
    ("data.num_workers", READER),
    ("data.tools_key", TEMPLATE),
    ("data.enable_thinking_*", TEMPLATE),
    ("data.ignore_input_ids_mismatch", "a conversation is rendered as a whole"),
    ("data.pad_mode", PACKED),
    ("model.use_remove_padding", PACKED),
    ("engine.pad_to_length*", PACKED),
    ("model.use_fused_kernels", "fused kernels are always used"),
    ("model.fused_kernel_options.*", "fused kernels are always used"),
    ("model.tiled_mlp.*", BLOCKS),
    ("model.lora.*", "Megatron's adapters are for its engine"),
    ("model.mtp.*", "heads for several tokens are not trained"),
    ("engine.model_dtype", "the master weights are fp32"),
    ("engine.wrap_policy.*", "a model is a list of blocks, each gathered separately"),
    ("engine.forward_prefetch", "the next block is always gathered ahead"),
    ("engine.use_orig_params", "one layout serves every stage"),
    ("engine.seed", "`trainer.seed` seeds everything"),
    ("engine.entropy_*", "no entropy is computed"),
    ("engine.use_torch_compile", BLOCKS),
    ("engine.use_no_sync_for_gradient_accumulation", "gradients are reduced after every micro-batch"),
    ("engine.forward_only", "the model is trained"),
    ("engine.turbo_config.*", "of another engine"),
    ("optim.total_training_steps", "the schedule ends with the run"),
    ("optim.zero_indexed_step", "a schedule starts with the first rate above 0"),
    ("checkpoint.*", "checkpoints contain everything"),
    ("optim", "the optimizer is AdamW"),
    ("model", "the model is a folder"),
    ("data.multiturn.enable", "records are always conversations"),
];

const REFUSED: [(&str, &str); 11] = [
    ("data.val_max_samples", "shorten the file"),
    ("model.hf_config_path", "the config is that of the model's folder"),
    ("model.tokenizer_path", "the tokenizer is that of the model's folder"),
    ("model.custom_chat_template", "the template is that of the model's folder"),
    ("model.override_config*", "the config is that of the model's folder"),
    ("model.enable_activation_offload", "set `strategy.recompute`"),
    ("model.exclude_modules", "name the matrices with adapters in `model.lora.targets`"),
    ("model.lora_adapter_path", "set the adapter's folder as `model.path`"),
    ("engine.full_determinism", "set `strategy.deterministic`"),
    ("engine.qat.*", "weights are not quantised"),
    ("engine.strategy", "set `strategy.zero_stage`"),
];

fn defaults() -> [(&'static str, Value); 19] {
    [
        ("data.train_batch_size", json!(256)),
        ("data.use_dynamic_bsz", json!(true)),
        ("data.micro_batch_size_per_gpu", json!(4)),
        ("data.max_token_len_per_gpu", json!(8192)),
        ("data.max_length", json!(1024)),
        ("data.truncation", json!("error")),
        ("data.messages_key", json!("messages")),
        ("data.val_files", Value::Null),
        ("model.enable_gradient_checkpointing", json!(true)),
        ("engine.strategy", json!("fsdp")),
        ("optim.lr", json!(1e-3)),
        ("optim.betas", json!([0.9, 0.999])),
        ("optim.weight_decay", json!(0.01)),
        ("optim.clip_grad", json!(1.0)),
        ("trainer.total_epochs", json!(4)),
        ("trainer.seed", json!(1)),
        ("trainer.save_freq", json!(-1)),
        ("trainer.test_freq", json!(-1)),
        ("optim.lr_warmup_steps_ratio", json!(0.0)),
    ]
}

/// Returns true for keys of this trainer: its predecessor names the model `partial_pretrain`.
pub(super) fn is_engine(ledger: &Ledger) -> bool {
    let is_own = |key: &String| *key == "model.path" || key.split('.').next() == Some("engine");
    ledger.peek("model.partial_pretrain").is_none() && ledger.keys().any(is_own)
}

pub(super) fn apply(ledger: &mut Ledger) {
    ledger.idle_ending("._target_", "configs do not name classes");
    ledger.assume(&defaults());
    model_of(ledger, "model.path");
    adapters(ledger);
    engine(ledger);
    rules::map_count(ledger, "data.train_batch_size", &format!("{P}.batch_size"), 256);
    micro_batch(ledger);
    ledger.copy_number("trainer.seed", "seed");
    rules::max_grad_norm(ledger, "optim.clip_grad", &format!("{P}.optimizer.max_grad_norm"));
    super::optimizer(ledger, "optim", P);
    run(ledger);
    let keep = "trainer.max_ckpt_to_keep";
    rules::leave_unset(ledger, &[keep]);
    rules::map_count(ledger, keep, &format!("{P}.checkpoint.keep_last"), 1);
    ledger.fill(&format!("{P}.turns"), "all");
    ledger.copy_text("data.messages_key", &format!("{P}.data.file.columns.answer"));
    files_and_lengths(ledger);
    if ledger.draft(&format!("{P}.data.file.held_out")).is_none() {
        ledger.fill(&format!("{P}.evaluation.prompts"), 0);
    }
    rest(ledger, &IDLE, &REFUSED);
}

/// FSDP's sharding; other engines are refused.
fn engine(ledger: &mut Ledger) {
    match ledger.text("engine").as_deref() {
        Some("fsdp") => ledger.idle("engine", "the stage is set by `reshard_after_forward`"),
        Some(_) => ledger.refuse("engine", "of its engines FSDP is imported: set `strategy` by hand"),
        None => {}
    }
    if matches!(ledger.text("engine.strategy").as_deref(), Some("fsdp" | "fsdp2")) {
        super::fsdp(ledger, "engine.strategy", "engine");
    }
    rules::ranks_of_a_sequence(ledger, "engine.ulysses_sequence_parallel_size");
}

/// A number of sequences, or of tokens.
fn micro_batch(ledger: &mut Ledger) {
    let [dynamic, tokens, sequences] =
        ["use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu"]
            .map(|name| format!("data.{name}"));
    match ledger.truth(&dynamic) {
        Some(true) => {
            let longest = ledger.whole("data.max_length").unwrap_or(1024).max(1);
            super::limit_in_tokens(ledger, (&dynamic, &tokens), 8192, longest);
            ledger.idle_all(&[(&sequences, "`use_dynamic_bsz` is on")]);
        }
        Some(false) => {
            rules::map_count(ledger, &sequences, "strategy.micro_batch_size", 4);
            ledger.idle_all(&[(&dynamic, "off"), (&tokens, "`use_dynamic_bsz` is off")]);
        }
        None => ledger.refuse(&dynamic, "neither true nor false"),
    }
}
