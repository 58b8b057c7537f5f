//! What verl rewards: its own scores by the data's name, a function of the user's or a reward model, and the penalty for
//! length of DAPO's manager.

use serde_json::{Value, json};

use crate::import::{
    ledger::Ledger,
    rules,
    shared::{DOWNLOAD, R},
    values,
};

/// Older names of what stands below `reward` now.
const RENAMED: [(&str, &str); 5] = [
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
/// Where the penalty for length has stood.
const OVERLONG: [&str; 3] = [
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
];

const HOST: &str = "a reward model computes on the host unless its `backend` says otherwise";
const SANDBOX: &str = "say where in the `code` reward: see docs/guides/rewards.md";
const BY_NAME: &str = "verl scores by the name of the data: this is for gsm8k and its like, docs/guides/rewards.md has the others";

pub(super) fn apply(ledger: &mut Ledger) {
    ledger.rename(&RENAMED);
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
            ledger.idle(key, "the longest completion");
        }
    }
    for section in OVERLONG {
        ledger.idle_all(&[(&format!("{section}.*"), "in the `length` reward, if it is on")]);
    }
    ledger.refuse_all(&[
        (MODEL, "name it in a `model` term of `pipeline.rlvr.reward`, beside the function"),
        ("reward.sandbox_fusion.url", SANDBOX),
        ("sandbox_fusion.url", SANDBOX),
        ("reward.reward_kwargs*", "say it in the reward's fields"),
        ("reward_model.reward_kwargs*", "say it in the reward's fields"),
        ("custom_reward_function.reward_kwargs*", "say it in the reward's fields"),
        ("reward.custom_reward_function.reward_kwargs*", "say it in the reward's fields"),
    ]);
    ledger.idle_all(&[
        (FUNCTION_NAME, "no file with it is named"),
        (MANAGER, "completions are scored as they end"),
        ("reward.reward_manager.*", "completions are scored as they end"),
        ("reward.reward_model.*", HOST),
        ("reward_model.*", HOST),
        ("reward.num_workers", "say `scoring.workers`"),
        ("reward.sandbox_fusion.*", "there is no sandbox's url"),
        ("sandbox_fusion.*", "there is no sandbox's url"),
    ]);
}

/// The key that says what scores, the reward that it becomes, and what is to be known of it.
fn scorer(ledger: &mut Ledger) -> (&'static str, Value, &'static str) {
    if let Some(path) = ledger.text(FUNCTION) {
        let function = ledger.text(FUNCTION_NAME).unwrap_or_else(|| "compute_score".to_owned());
        if ledger.peek(FUNCTION_NAME).is_some() {
            ledger.fold(FUNCTION_NAME, "in the `python` reward");
        }
        let term = json!({"python": {"path": path, "function": function, "signature": "verl"}});
        return (FUNCTION, term, "as verl calls it");
    }
    let is_model = ledger.truth("reward.reward_model.enable") == Some(true);
    match ledger.text(MODEL) {
        Some(path) if is_model => (MODEL, json!({"model": {"path": path, "chat": true}}), DOWNLOAD),
        Some(_) => {
            ledger.idle(MODEL, "the reward model is off");
            (MANAGER, json!({"math": {}}), BY_NAME)
        }
        None => (MANAGER, json!({"math": {}}), BY_NAME),
    }
}

/// DAPO's penalty for completions that come close to the longest length, and the key that turns it on.
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
            ledger.refuse(
                &key("enable"),
                "its `len` is not a whole number of tokens that a completion may have",
            );
            None
        }
    }
}
