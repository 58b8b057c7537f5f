//! Rewards of OpenRLHF's PPO: a function or a reward model, with normalization, bounds and a length penalty.

use serde_json::{Value, json};

use super::{
    ledger::Ledger,
    rules,
    shared::{DOWNLOAD, R},
    values,
};

/// Rewards of completions, and the length penalty.
pub(super) fn rewards(ledger: &mut Ledger) {
    let field = format!("{R}.reward");
    let (buffer, factor) = ("reward.overlong_buffer_len", "reward.overlong_penalty_factor");
    let scorer = scorer(ledger);
    let is_model = scorer.as_ref().is_some_and(|(key, ..)| *key == REWARD_MODEL);
    normalize_reward(ledger, is_model);
    let penalty = overlong(ledger, buffer, factor);
    match (ledger.peek(factor).is_some(), &penalty) {
        (false, _) => {}
        (true, Some(_)) => ledger.fold(factor, "the weight of the `length` reward"),
        (true, None) => ledger.idle(factor, "used with the buffer only"),
    }
    match (scorer, penalty) {
        (Some((key, term, why)), Some(penalty)) => {
            ledger.change(key, &field, json!([term, penalty]), why);
            ledger.map(buffer, &field, json!([term, penalty]));
        }
        (Some((key, term, why)), None) => ledger.change(key, &field, json!([term]), why),
        (None, Some(_)) => ledger.refuse(buffer, "set the reward to which the `length` reward is added"),
        (None, None) => {}
    }
    let template = "data.apply_chat_template";
    if ledger.peek(template).is_some() {
        match is_model {
            true => ledger.fold(
                template,
                "the reward model's `chat`; prompts have the model's template if there is one",
            ),
            false => ledger.idle(template, "the model's chat template is used if there is one"),
        }
    }
}

pub(super) const REWARD_MODEL: &str = "reward.model_name_or_path";

/// The key that sets the reward, the reward, and a remark.
fn scorer(ledger: &mut Ledger) -> Option<(&'static str, Value, &'static str)> {
    let remote = "reward.remote_url";
    if let Some(path) = ledger.text(remote) {
        ledger.idle_all(&[(REWARD_MODEL, "`reward.remote_url` scores")]);
        if path.contains(',') {
            ledger.refuse(remote, "set each of the servers in a term of `pipeline.rlvr.reward`");
            return None;
        }
        if path.starts_with("http://") || path.starts_with("https://") {
            let why = "it gets the file's prompts, without a chat template";
            return Some((remote, json!({"remote": {"url": path}}), why));
        }
        if !path.ends_with(".py") {
            ledger.refuse(
                remote,
                "a reward is a function in a `.py` file, or a URL: see docs/guides/rewards.md",
            );
            return None;
        }
        let term = json!({"python": {"path": path, "function": "reward_func", "signature": "openrlhf"}});
        return Some((remote, term, "it gets the file's prompts, without a chat template"));
    }
    let path = ledger.text(REWARD_MODEL)?;
    if path.contains(',') {
        ledger.refuse(REWARD_MODEL, "set each of the models in a term of `pipeline.rlvr.reward`");
        return None;
    }
    // Without a template OpenRLHF scores prompt and completion as one text.
    let chat = ledger.truth("data.apply_chat_template") == Some(true);
    Some((REWARD_MODEL, json!({"model": {"path": path, "chat": chat}}), DOWNLOAD))
}

fn normalize_reward(ledger: &mut Ledger, is_model: bool) {
    let key = "reward.normalize_enable";
    match (ledger.peek(key).is_some(), ledger.truth(key)) {
        (false, _) => {}
        (true, Some(true)) if is_model => {
            let why = "statistics of all rewards so far; OpenRLHF's are saved with the reward model";
            let norm = json!({"mean": "running", "std": "running"});
            ledger.change(key, &format!("{R}.algorithm.reward_norm"), norm, why);
        }
        (true, Some(true)) => ledger.idle(key, "only a reward model's scores are normalized"),
        (true, Some(false)) => ledger.idle(key, "off"),
        (true, None) => ledger.refuse(key, "neither true nor false"),
    }
}

/// OpenRLHF's default clips to -10 and 10. With rewards compared within a group it clips the result, which
/// these bounds never change.
pub(super) fn reward_clip(ledger: &mut Ledger, a: &str) {
    let (key, field) = ("reward.clip_range", format!("{a}.reward_clip"));
    let estimator = ledger.text("algo.advantage.estimator");
    let is_plain = matches!(estimator.as_deref(), Some("gae" | "reinforce"));
    if is_plain {
        ledger.assume(&[(key, json!([-10, 10]))]);
    }
    let bounds: Vec<f64> = match ledger.peek(key) {
        None => return,
        Some(Value::Array(bounds)) => bounds.iter().filter_map(values::number).collect(),
        Some(_) => Vec::new(),
    };
    match bounds[..] {
        [low, high] if low == -high && is_plain => ledger.map(key, &field, values::json(high)),
        [low, high] if low == -high => {
            let why = "rewards are clipped before they are compared within the group, not after";
            ledger.change(key, &field, values::json(high), why);
        }
        _ => ledger
            .refuse(key, "rewards are clipped to plus and minus the same bound, `algorithm.reward_clip`"),
    }
}

/// The length penalty as a term; its key stays for the caller, which adds the term.
fn overlong(ledger: &mut Ledger, buffer: &str, factor: &str) -> Option<Value> {
    let weight = match ledger.peek(factor) {
        Some(_) => ledger.number(factor),
        None => Some(1.0),
    };
    rules::leave_unset(ledger, &[buffer]);
    ledger.peek(buffer)?;
    let longest = ledger.draft(&format!("{R}.rollout.max_new_tokens")).and_then(Value::as_u64);
    match (ledger.whole(buffer), longest, weight) {
        (_, _, Some(0.0)) => ledger.idle(buffer, "its factor is 0"),
        (Some(tokens @ 1..), Some(longest), Some(weight)) if tokens <= longest => {
            let length = json!({"max_tokens": longest, "buffer_tokens": tokens});
            return Some(json!({"length": length, "weight": values::json(weight)}));
        }
        (.., None) => ledger.refuse(buffer, format!("`{factor}` is not a number")),
        (_, None, _) => ledger.refuse(buffer, "the longest completion is unknown: set it as well"),
        _ => ledger.refuse(buffer, "not an integer up to the length of a completion"),
    }
    None
}
