//! Which rewards ROLL's workers are.

use serde_json::{Value, json};

use super::{
    ledger::Ledger,
    roll_data::{Domains, domain_of},
    shared::R,
};

/// The reward that scores in one of three ways and takes something off for short answers.
const CROSS_THINK: &str = "CrossThinkQARuleRewardWorker";

pub(super) fn rewards(ledger: &mut Ledger, domains: &Domains) {
    let workers = workers(ledger);
    let has_domains = !matches!(domains, Domains::One);
    let is_mix = matches!(domains, Domains::Mixed(_));
    let mut terms = Vec::new();
    let mut taken = Vec::new();
    for (key, worker) in workers {
        scoring(ledger, key.trim_end_matches("worker_cls"), &worker);
        let (reward, why) = match reward_of(&worker) {
            Ok(reward) => reward,
            Err(why) => {
                ledger.refuse(&key, why);
                continue;
            }
        };
        let tags = key.replace(".worker_cls", ".tag_included");
        match ledger.peek(&tags).cloned() {
            Some(domains @ Value::Array(_)) if has_domains => {
                let mut term = reward;
                term["domains"] = if is_mix { json!([domain_of(&key)]) } else { domains };
                terms.push(term);
                taken.push((key, why, Some(tags)));
            }
            None if has_domains => ledger.refuse(&key, "say the tags of its records in the term's `domains`"),
            _ => {
                terms.push(reward);
                taken.push((key, why, None));
            }
        }
    }
    for (key, why, tags) in taken {
        match why {
            "" => ledger.map(&key, &format!("{R}.reward"), terms.clone()),
            why => ledger.change(&key, &format!("{R}.reward"), terms.clone(), why),
        }
        if let Some(tags) = tags {
            let place = if is_mix { "in the `domains` of its source" } else { "in the term's `domains`" };
            ledger.fold(&tags, place);
        }
    }
    if has_domains {
        ledger.fill(&format!("{R}.data.file.columns.domain"), "tag");
    }
    ledger.idle_all(&[("rewards.*", "rewards here are functions in the ranks' processes")]);
}

/// The keys of rewards' workers, and their classes without modules.
pub(super) fn workers(ledger: &Ledger) -> Vec<(String, String)> {
    let keys = ledger.keys().filter(|key| key.starts_with("rewards.") && key.ends_with(".worker_cls"));
    let class = |text: String| text.rsplit('.').next().unwrap_or_default().to_owned();
    keys.filter_map(|key| Some((key.clone(), class(ledger.text(key)?)))).collect()
}

/// The reward of a worker and what differs, if anything does; or why there is none.
fn reward_of(worker: &str) -> Result<(Value, &'static str), &'static str> {
    match worker {
        "MathRuleRewardWorker" => Ok((json!({"math": {"only_boxed": true}}), "")),
        "MultipleChoiceBoxedRuleRewardWorker" => {
            Ok((json!({"choice": {}}), "without a box the letter of `answer is B` counts"))
        }
        CROSS_THINK => {
            Ok((json!({"choice": {}}), "1 or 0, and no penalty for what repeats: `repetition` has that"))
        }
        "GeneralRuleRewardWorker" => {
            Err("its records name functions in `func_name`; `ifeval` reads IFEval's `instruction_id_list`")
        }
        "CodeSandboxRewardWorker" => {
            Err("its records have `test_cases`; `code` reads the tests in the answer, see docs/rewards.md")
        }
        "LLMJudgeRewardWorker" => {
            Err("its judge answers YES or NO; say `judge` with a template that asks for a number")
        }
        _ => Err("see docs/rewards.md for what there is"),
    }
}

/// What changes a worker's scores or the prompts that are kept for them, below `section`, which ends in a dot.
fn scoring(ledger: &mut Ledger, section: &str, worker: &str) {
    let key = |name: &str| format!("{section}{name}");
    let [kind, penalty] = ["reward_type", "response_length_penalty_coef"].map(key);
    if worker == CROSS_THINK {
        if ledger.peek(&kind).is_some() {
            ledger.fold(&kind, "the right letter is 1, and anything else 0");
        }
        ledger.refuse_all(&[(&penalty, "shape lengths with the `length` reward")]);
    }
    let why = "this worker of ROLL's does not read it";
    ledger.idle_all(&[(&kind, why), (&penalty, why)]);
    let filter = key("query_filter_config.type");
    match ledger.text(&filter).as_deref() {
        None => {}
        Some("no_filter") => ledger.idle(&filter, "off"),
        Some(_) => ledger.refuse(&filter, "say `selection.mixed_groups` or `selection.difficulty`"),
    }
}
