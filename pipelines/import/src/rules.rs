//! Rules shared by several importers.

use serde_json::{Value, json};

use super::{ledger::Ledger, values};

/// The count in a key. An invalid count is refused, and `default` is used where others are computed from it.
pub(super) fn count(ledger: &mut Ledger, key: &str, default: u64) -> u64 {
    match (ledger.peek(key).is_some(), ledger.whole(key)) {
        (false, _) => default,
        (true, Some(count @ 1..)) => count,
        (true, _) => {
            ledger.refuse(key, "not an integer above 0");
            default
        }
    }
}

/// [`count`] for a key that maps to our field.
pub(super) fn map_count(ledger: &mut Ledger, key: &str, field: &str, default: u64) -> u64 {
    let count = count(ledger, key, default);
    if ledger.peek(key).is_some() {
        ledger.map(key, field, count);
    }
    count
}

/// Number of ranks that share each sequence.
pub(super) fn ranks_of_a_sequence(ledger: &mut Ledger, key: &str) -> u64 {
    map_count(ledger, key, "strategy.sequence_parallel", 1)
}

/// Number of ranks that hold every layer together.
pub(super) fn ranks_of_a_layer(ledger: &mut Ledger, key: &str) {
    match ledger.whole(key) {
        Some(1) => ledger.idle(key, "off"),
        _ => drop(map_count(ledger, key, "strategy.tensor_parallel", 1)),
    }
}

/// Number of ranks among which experts are spread.
pub(super) fn ranks_of_experts(ledger: &mut Ledger, key: &str) {
    match (ledger.whole(key), ledger.draft("strategy.tensor_parallel").is_some()) {
        (Some(1), _) => ledger.idle(key, "off"),
        (Some(_), true) => ledger.refuse(key, "`strategy.tensor_parallel` cuts each expert"),
        _ => drop(map_count(ledger, key, "strategy.expert_parallel", 1)),
    }
}

/// Number of ranks over which states are sharded; -1 is all.
pub(super) fn shard_group(ledger: &mut Ledger, key: &str) {
    match ledger.number(key) {
        Some(-1.0) => ledger.idle(key, "shards span all ranks"),
        _ => drop(map_count(ledger, key, "strategy.shard_group", 1)),
    }
}

/// Closes keys that stand for a variable of the shell, under which the program is started.
pub(super) fn settings_of_the_shell(ledger: &mut Ledger) {
    for key in ["cuda_visible_devices", "CUDA_VISIBLE_DEVICES"] {
        ledger.idle_ending(key, "a setting of the machine: set it in the shell, or set `devices`");
    }
}

/// Closes a number that is part of a field that an earlier row reports.
pub(super) fn fold_number(ledger: &mut Ledger, key: &str, why: &str) {
    match (ledger.peek(key), ledger.number(key)) {
        (None, _) => {}
        (Some(_), Some(_)) => ledger.fold(key, why),
        (Some(value), None) if values::is_unset(value) => ledger.idle(key, "left to its default"),
        (Some(_), None) => ledger.refuse(key, "not a number"),
    }
}

/// Closes keys whose value means unset, such as `null`.
pub(super) fn leave_unset(ledger: &mut Ledger, keys: &[&str]) {
    for key in keys {
        if ledger.peek(key).is_some_and(values::is_unset) {
            ledger.idle(key, "left to its default");
        }
    }
}

/// Converts a number of updates to steps.
pub(super) fn updates_to_steps(ledger: &mut Ledger, key: &str, field: &str, updates_per_step: u64) {
    leave_unset(ledger, &[key]);
    let updates = count(ledger, key, 1);
    match (ledger.peek(key).is_some(), updates_per_step) {
        (false, _) => {}
        (true, 1) => ledger.map(key, field, updates),
        (true, _) => {
            let why = format!("{updates_per_step} updates are one step here");
            ledger.change(key, field, updates.div_ceil(updates_per_step), why);
        }
    }
}

/// Epochs, unless `field` already has a number of steps, set by `steps`.
pub(super) fn data_epochs(ledger: &mut Ledger, key: &str, field: &str, steps: &str) {
    if ledger.peek(key).is_none() {
        return;
    }
    match (ledger.draft(field), ledger.number(key)) {
        (Some(_), _) => ledger.idle(key, format!("{steps} is set")),
        (None, Some(epochs)) if epochs > 0.0 => {
            let why = "a step may span two epochs, where others truncate or pad epochs to whole steps";
            ledger.change(key, field, json!({"data_epochs": values::json(epochs)}), why);
        }
        (None, _) => ledger.refuse(key, "not a number above 0"),
    }
}

/// AdamW's two decay rates.
pub(super) fn betas(ledger: &mut Ledger, key: &str, field: &str) {
    let Some(value) = ledger.peek(key).cloned() else { return };
    if values::is_unset(&value) {
        return ledger.idle(key, "left to its default");
    }
    let rates = value.as_array().map(|rates| rates.iter().map(values::number).collect::<Option<Vec<f64>>>());
    match rates.flatten().filter(|rates| rates.len() == 2) {
        Some(rates) => ledger.map(key, field, rates),
        None => ledger.refuse(key, "not a list of two numbers"),
    }
}

/// AdamW's two decay rates, in a key each; a missing one has the usual value.
pub(super) fn beta_keys(ledger: &mut Ledger, keys: [&str; 2], field: &str) {
    let mut rates = Vec::new();
    for (key, usual) in keys.into_iter().zip([0.9, 0.999]) {
        leave_unset(ledger, &[key]);
        match (ledger.peek(key).is_some(), ledger.number(key)) {
            (true, None) => {
                ledger.refuse(key, "not a number");
                rates.push(usual);
            }
            (_, rate) => rates.push(rate.unwrap_or(usual)),
        }
    }
    for key in keys {
        if ledger.peek(key).is_some() {
            ledger.map(key, field, rates.clone());
        }
    }
}

/// Gradient clipping norm; 0 and null mean no clipping.
pub(super) fn max_grad_norm(ledger: &mut Ledger, key: &str, field: &str) {
    match ledger.peek(key).is_some_and(values::is_unset) || ledger.number(key) == Some(0.0) {
        true => ledger.map(key, field, 0),
        false => ledger.copy_number(key, field),
    }
}

/// PEFT's `target_modules`; if missing, PEFT's default for the supported families.
pub(super) fn peft_targets(ledger: &mut Ledger, key: &str) {
    let default = json!(["q_proj", "v_proj"]);
    match ledger.peek(key) {
        Some(value) if values::is_unset(value) => ledger.map(key, "model.lora.targets", default),
        _ => {
            ledger.assume(&[(key, default)]);
            ledger.lora_targets(key);
        }
    }
}

/// The most tokens of a prompt.
pub(super) fn longest_prompt(ledger: &mut Ledger, key: &str, field: &str) {
    leave_unset(ledger, &[key]);
    let tokens = count(ledger, key, 1);
    if ledger.peek(key).is_some() {
        ledger.change(key, field, tokens, "longer prompts are left out, not truncated");
    }
}

/// Data files, one or a list.
pub(super) fn files(ledger: &mut Ledger, key: &str, field: &str) {
    match ledger.peek(key).cloned() {
        Some(Value::Array(files)) if files.len() == 1 => ledger.map(key, field, values::text(&files[0])),
        Some(files) => ledger.map(key, field, files),
        None => {}
    }
}

/// A data file. A dataset's name becomes a file's; `why` describes that file.
pub(super) fn data_file(ledger: &mut Ledger, key: &str, field: &str, why: &str) {
    let Some(name) = ledger.text(key) else { return };
    match [".jsonl", ".json", ".csv", ".parquet", ".arrow"].iter().any(|end| name.ends_with(end)) {
        true => ledger.map(key, field, name),
        false => ledger.change(key, field, format!("{name}.jsonl"), why),
    }
}
