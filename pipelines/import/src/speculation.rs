//! Prompt-lookup speculation of vLLM and transformers.

use serde_json::json;

use super::ledger::Ledger;

const FIELD: &str = "pipeline.rlvr.rollout.speculation";
const MOST_TOKENS: u64 = 15;

/// Maps vLLM's `speculative_config` at `key`, if its method is `ngram`; other tables answer for other methods.
pub(super) fn of_vllm(ledger: &mut Ledger, key: &str) {
    let at = |name: &str| format!("{key}.{name}");
    if ledger.text(&at("method")).as_deref() != Some("ngram") {
        return;
    }
    ledger.fold(&at("method"), "prompt lookup, while few sequences are left: `max_sequences`");
    number_of_tokens(ledger, &at("num_speculative_tokens"));
    // One of the two is the other one's default, and 5 that of both.
    let [most, least] = ["prompt_lookup_max", "prompt_lookup_min"].map(at);
    let given = ledger.whole(&most).or(ledger.whole(&least)).unwrap_or(5);
    ledger.assume(&[(&most, json!(given)), (&least, json!(given))]);
    ledger.copy_number(&most, &format!("{FIELD}.prompt_lookup_max"));
    ledger.copy_number(&least, &format!("{FIELD}.prompt_lookup_min"));
}

/// Maps transformers' `prompt_lookup_num_tokens` and what belongs to it, among the keys at `key`.
pub(super) fn of_transformers(ledger: &mut Ledger, key: &str) {
    let at = |name: &str| format!("{key}.{name}");
    let (tokens, most) = (at("prompt_lookup_num_tokens"), at("max_matching_ngram_size"));
    if ledger.whole(&tokens).is_none() {
        return;
    }
    number_of_tokens(ledger, &tokens);
    ledger.assume(&[(&most, json!(2))]);
    ledger.copy_number(&most, &format!("{FIELD}.prompt_lookup_max"));
    ledger.fill(&format!("{FIELD}.prompt_lookup_min"), 1);
}

fn number_of_tokens(ledger: &mut Ledger, key: &str) {
    let field = format!("{FIELD}.num_speculative_tokens");
    match ledger.whole(key) {
        Some(tokens) if tokens > MOST_TOKENS => {
            ledger.change(key, &field, MOST_TOKENS, "the most that a sequence proposes");
        }
        _ => ledger.copy_number(key, &field),
    }
}
