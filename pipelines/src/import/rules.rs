//! Rules that several importers have in common.

use serde_json::json;

use super::{ledger::Ledger, values};

/// The count that a key says. What is no count is refused, and `default` stands in where others are made from it.
pub(super) fn count(ledger: &mut Ledger, key: &str, default: u64) -> u64 {
    match (ledger.peek(key).is_some(), ledger.whole(key)) {
        (false, _) => default,
        (true, Some(count @ 1..)) => count,
        (true, _) => {
            ledger.refuse(key, "not a whole number above 0");
            default
        }
    }
}

/// As [`count`], for a key that is a field of ours.
pub(super) fn map_count(ledger: &mut Ledger, key: &str, field: &str, default: u64) -> u64 {
    let count = count(ledger, key, default);
    if ledger.peek(key).is_some() {
        ledger.map(key, field, count);
    }
    count
}

/// Keys that may be there and say nothing, as `null` does.
pub(super) fn leave_unset(ledger: &mut Ledger, keys: &[&str]) {
    for key in keys {
        if ledger.peek(key).is_some_and(values::is_unset) {
            ledger.idle(key, "left to its default");
        }
    }
}

/// What is counted in updates there is counted in steps here.
pub(super) fn updates_to_steps(ledger: &mut Ledger, key: &str, field: &str, updates_per_step: u64) {
    leave_unset(ledger, &[key]);
    let updates = count(ledger, key, 1);
    match (ledger.peek(key).is_some(), updates_per_step) {
        (false, _) => {}
        (true, 1) => ledger.map(key, field, updates),
        (true, _) => {
            let why = format!("{updates_per_step} updates make a step of ours");
            ledger.change(key, field, updates.div_ceil(updates_per_step), why);
        }
    }
}

/// Passes over the data, unless `field` has a number of steps by what `steps` says.
pub(super) fn data_epochs(ledger: &mut Ledger, key: &str, field: &str, steps: &str) {
    if ledger.peek(key).is_none() {
        return;
    }
    match (ledger.draft(field), ledger.number(key)) {
        (Some(_), _) => ledger.idle(key, format!("{steps} is given")),
        (None, Some(epochs)) if epochs > 0.0 => {
            let why = "a step may end one and begin the next, where others cut or fill each to whole steps";
            ledger.change(key, field, json!({"data_epochs": values::json(epochs)}), why);
        }
        (None, _) => ledger.refuse(key, "not a number above 0"),
    }
}

/// The norm that gradients are scaled down to; 0 and none are no clipping.
pub(super) fn max_grad_norm(ledger: &mut Ledger, key: &str, field: &str) {
    match ledger.peek(key).is_some_and(values::is_unset) || ledger.number(key) == Some(0.0) {
        true => ledger.map(key, field, 0),
        false => ledger.copy_number(key, field),
    }
}

/// PEFT's `target_modules`; without any, what it takes for the families that are here.
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
        ledger.change(key, field, tokens, "longer prompts are left out, and not cut");
    }
}

/// A file of data, or a dataset's name, which becomes that of a file: `why` says what it has to be.
pub(super) fn data_file(ledger: &mut Ledger, key: &str, field: &str, why: &str) {
    let Some(name) = ledger.text(key) else { return };
    match [".jsonl", ".parquet", ".arrow"].iter().any(|end| name.ends_with(end)) {
        true => ledger.map(key, field, name),
        false => ledger.change(key, field, format!("{name}.jsonl"), why),
    }
}
