//! verl's rewards: its own scores by the data's name, a user's function or a reward model, and the length
//! penalty of DAPO's manager.

use serde_json::{Value, json};

use crate::{
    ledger::Ledger,
    rules,
    shared::{DOWNLOAD, R},
    values,
};

/// Older names of keys that are now below `reward`.
const OLD_TO_NEW: [(&str, &str); 8] = [
    ("reward_model.sandbox_fusion.url", "reward.sandbox_fusion.url"),
    ("reward_model.sandbox_fusion.max_concurrent", "reward.sandbox_fusion.max_concurrent"),
    ("reward_model.sandbox_fusion.memory_limit_mb", "reward.sandbox_fusion.memory_limit_mb"),
    ("custom_reward_function.path", FUNCTION),
    ("custom_reward_function.name", FUNCTION_NAME),
    ("reward_model.enable", "reward.reward_model.enable"),
    ("reward_model.model.path", MODEL),
    ("reward_model.reward_manager", MANAGER),
];

const FUNCTION: &str = "reward.custom_reward_function.path";
const FUNCTION_NAME: &str = "reward.custom_reward_function.name";
const MODEL: &str = "reward.reward_model.model_path";
const MANAGER: &str = "reward.reward_manager.name";
/// Sections of the length penalty in different versions.
const OVERLONG: [&str; 3] = [
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
];

const HOST: &str = "a reward model runs on the host unless its `backend` is set";
/// Settings of the server or the ranks that score with a reward model.
const SERVED: [&str; 25] = [
    "enable",
    "enable_resource_pool",
    "n_gpus_per_node",
    "nnodes",
    "strategy",
    "model.input_tokenizer",
    "model.path",
    "model.use_shm",
    "model.trust_remote_code",
    "model.use_remove_padding",
    "model.use_fused_kernels",
    "model.fsdp_config.*",
    "model.tokenizer_path",
    "micro_batch_size*",
    "use_dynamic_bsz",
    "forward_max_token_len_per_gpu",
    "forward_*",
    "ulysses_sequence_parallel_size",
    "megatron.*",
    "profiler.*",
    "launch_reward_fn_async",
    "use_reward_loop",
    "num_workers",
    "rollout.*",
    "nccl_timeout",
];

const SANDBOX: &str = "set the sandbox in the `code` reward: see docs/guides/rewards.md";
const BY_NAME: &str =
    "verl scores by the data's name: this suits gsm8k and similar data, others are in docs/guides/rewards.md";

pub(super) fn apply(ledger: &mut Ledger) {
    ledger.rename(&OLD_TO_NEW);
    ledger.assume(&[(MANAGER, json!("naive"))]);
    rules::leave_unset(ledger, &[FUNCTION, MODEL, MANAGER]);
    let penalty = penalty(ledger);
    let (key, scorer, why) = scorer(ledger);
    let mut terms = vec![scorer];
    terms.extend(penalty.iter().map(|(_, term)| term.clone()));
    let reward = format!("{R}.reward");
    match ledger.peek(key).is_some() {
        true => ledger.change(key, &reward, terms.clone(), why),
        false => ledger.fill(&reward, terms.clone()),
    }
    if let Some((key, _)) = penalty {
        ledger.map(&key, &reward, terms);
    }
    let longest = ledger.draft(&format!("{R}.rollout.max_new_tokens")).and_then(Value::as_u64);
    for key in ["reward.reward_kwargs.max_resp_len", "reward_model.reward_kwargs.max_resp_len"] {
        if longest.is_some() && ledger.whole(key) == longest {
            ledger.idle(key, "equal to the longest completion");
        }
    }
    for section in OVERLONG {
        ledger.idle_all(&[(&format!("{section}.*"), "in the `length` reward, if it is on")]);
    }
    ledger.refuse_all(&[
        (MODEL, "set it in a `model` term of `pipeline.rlvr.reward`, in addition to the function"),
        ("reward.sandbox_fusion.url", SANDBOX),
        ("sandbox_fusion.url", SANDBOX),
        ("reward.reward_kwargs*", "set it in the reward's fields"),
        ("reward_model.reward_kwargs*", "set it in the reward's fields"),
        ("custom_reward_function.reward_kwargs*", "set it in the reward's fields"),
        ("reward.custom_reward_function.reward_kwargs*", "set it in the reward's fields"),
    ]);
    for section in ["reward.reward_model", "reward_model"] {
        for name in SERVED {
            ledger.idle_all(&[(&format!("{section}.{name}"), HOST)]);
        }
        for name in ["model.override_config*", "max_length", "model.external_lib"] {
            let why = "a reward model scores whole texts, as its folder says";
            ledger.fold_all(&[(&format!("{section}.{name}"), why)]);
        }
    }
    ledger.idle_all(&[
        (FUNCTION_NAME, "no file is set for it"),
        (MANAGER, "each completion is scored when it ends"),
        ("reward.reward_manager.*", "each completion is scored when it ends"),
        ("reward.num_workers", "set `scoring.workers`"),
        ("reward.sandbox_fusion.url", "no sandbox URL is set"),
        ("reward.sandbox_fusion.max_concurrent", "no sandbox URL is set"),
        ("reward.sandbox_fusion.memory_limit_mb", "no sandbox URL is set"),
        ("sandbox_fusion.url", "no sandbox URL is set"),
        ("sandbox_fusion.max_concurrent", "no sandbox URL is set"),
        ("sandbox_fusion.memory_limit_mb", "no sandbox URL is set"),
    ]);
}

/// The key that sets the reward, the reward, and a remark.
fn scorer(ledger: &mut Ledger) -> (&'static str, Value, &'static str) {
    if let Some(path) = ledger.text(FUNCTION) {
        let function = ledger.text(FUNCTION_NAME).unwrap_or_else(|| "compute_score".to_owned());
        if ledger.peek(FUNCTION_NAME).is_some() {
            ledger.fold(FUNCTION_NAME, "in the `python` reward");
        }
        let term = json!({"python": {"path": path, "function": function, "signature": "verl"}});
        return (FUNCTION, term, "called with verl's arguments");
    }
    let is_model = ledger.truth("reward.reward_model.enable") == Some(true);
    match ledger.text(MODEL) {
        Some(path) if is_model => {
            ledger.fold("reward.reward_model.enable", "in the reward's terms");
            (MODEL, json!({"model": {"path": path, "chat": true}}), DOWNLOAD)
        }
        Some(_) => {
            ledger.idle(MODEL, "the reward model is off");
            (MANAGER, json!({"math": {}}), BY_NAME)
        }
        None => (MANAGER, json!({"math": {}}), BY_NAME),
    }
}

/// DAPO's penalty for completions close to the maximum length, and the key that turns it on.
fn penalty(ledger: &mut Ledger) -> Option<(String, Value)> {
    let is_on = |section: &&str| ledger.truth(&format!("{section}.enable")) == Some(true);
    let section = OVERLONG.into_iter().find(|section| is_on(section))?;
    let key = |name: &str| format!("{section}.{name}");
    let weight = ledger.number(&key("penalty_factor")).unwrap_or(1.0);
    let longest = ledger.draft(&format!("{R}.rollout.max_new_tokens")).and_then(Value::as_u64);
    match (ledger.whole(&key("len")), longest) {
        (Some(tokens @ 1..), Some(longest)) if tokens <= longest => {
            let length = json!({"max_tokens": longest, "buffer_tokens": tokens});
            Some((key("enable"), json!({"length": length, "weight": values::json(weight)})))
        }
        _ => {
            ledger.refuse(&key("enable"), "its `len` is not an integer up to the length of a completion");
            None
        }
    }
}
