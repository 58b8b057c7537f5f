//! Which rewards ROLL's workers are.

use serde_json::{Value, json};

use super::{
    ledger::Ledger,
    roll_data::{Domains, domain_of},
    shared::R,
    values,
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
        let section = key.trim_end_matches("worker_cls");
        ledger.hide(&format!("{section}judge_api_key"));
        scoring(ledger, section, &worker);
        let (reward, why) = match reward_of(ledger, section, &worker) {
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

/// The reward of a worker, whose keys are below `section`, and what differs, if anything does; or why there is none.
fn reward_of(
    ledger: &mut Ledger,
    section: &str,
    worker: &str,
) -> Result<(Value, &'static str), &'static str> {
    match worker {
        "MathRuleRewardWorker" => Ok((
            json!({"math": {}}),
            "without a box ROLL reads what stands behind the last empty line or `</think>` alone",
        )),
        "MultipleChoiceBoxedRuleRewardWorker" => {
            Ok((json!({"choice": {}}), "without a box the letter of `answer is B` counts"))
        }
        CROSS_THINK => {
            Ok((json!({"choice": {}}), "1 or 0, and no penalty for what repeats: `repetition` has that"))
        }
        "GeneralRuleRewardWorker" => Err(
            "its records name functions in `func_name`: say `ifeval` for records with IFEval's `instruction_id_list`, or a `python` function that calls these",
        ),
        "CodeSandboxRewardWorker" => {
            Ok((code(ledger, section)?, "programs are in Python and import what they use"))
        }
        "LLMJudgeRewardWorker" => Ok((
            judge(ledger, section)?,
            "the question has other words, and an answer without YES or NO is a failure, where ROLL gives 0",
        )),
        _ => Err("see docs/guides/rewards.md for what there is"),
    }
}

/// Programs run in this machine's sandbox, or in the one behind `code_url`, as long as ROLL lets them.
fn code(ledger: &mut Ledger, section: &str) -> Result<Value, &'static str> {
    let [local, url] = ["use_local", "code_url"].map(|name| format!("{section}{name}"));
    let is_local = ledger.truth(&local) != Some(false);
    let service = ledger.text(&url).filter(|_| !is_local && !ledger.peek(&url).is_some_and(values::is_unset));
    if !is_local && service.is_none() {
        return Err("`use_local` is off, and there is no `code_url`: say `code.http.url`");
    }
    if ledger.peek(&local).is_some() {
        ledger.fold(&local, if is_local { "in this machine's sandbox" } else { "at `code.http.url`" });
    }
    match service {
        None => {
            ledger.idle_all(&[(&url, "programs run on this machine")]);
            Ok(json!({"code": {"timeout_s": 20}}))
        }
        Some(service) => {
            ledger.fold(&url, "in the term's `code.http.url`");
            Ok(json!({"code": {"timeout_s": 30, "http": {"url": service}}}))
        }
    }
}

/// The name of a question of ROLL's whose answer is YES or NO, the only one that it has.
const JUDGE_PROMPT: &str = "Qwen2.5-7B-Instruct-RLVR-prompt";

/// What a judge is asked in its place.
const JUDGE_TEMPLATE: &str = "\
Does the solution come to the reference answer? Compare only its final answer, in whatever language or form it is. If it is
unclear, incomplete or several answers, it does not. Answer with one word, YES or NO.

Question:
{{ prompt }}

Solution:
{{ completion }}

Reference answer:
{{ answer }}
";

/// The variable for the key that a config of ROLL's holds.
const JUDGE_KEY: &str = "JUDGE_API_KEY";

/// Where the judge is that ROLL would start itself.
const JUDGE_URL: &str = "http://127.0.0.1:8000/v1";

/// A judge behind an endpoint: ROLL's, or where the user serves the model that ROLL would have loaded.
fn judge(ledger: &mut Ledger, section: &str) -> Result<Value, &'static str> {
    let key = |name: &str| format!("{section}{name}");
    let [prompt, kind, url, name, secret] =
        ["judge_prompt", "judge_model_type", "judge_api_url", "judge_model_name", "judge_api_key"].map(key);
    if ledger.text(&prompt).as_deref() != Some(JUDGE_PROMPT) {
        return Err("its `judge_prompt` is none that ROLL has: say `judge` with a template of your own");
    }
    let mut judge =
        json!({"pattern": r"(?i)\b(YES|NO)\b", "words": {"YES": 1, "NO": 0}, "template": JUDGE_TEMPLATE});
    let (model, answer_tokens) = match ledger.text(&kind).as_deref() {
        Some("api") => {
            let (Some(url_text), Some(_)) = (ledger.text(&url), ledger.text(&name)) else {
                return Err("its `judge_api_url` and `judge_model_name` are not both there");
            };
            judge["url"] = json!(url_text);
            ledger.fold(&url, "in the term's `judge.url`");
            if ledger.peek(&secret).is_some() {
                judge["key_variable"] = json!(JUDGE_KEY);
                ledger.fold(&secret, format!("export it as {JUDGE_KEY}: no config holds a key"));
            }
            (name, None)
        }
        Some(kind @ ("inference" | "cluster")) => {
            let own = key("model_args.model_name_or_path");
            let shared = "reward_model.model_args.model_name_or_path".to_owned();
            let is_shared = kind == "cluster" && ledger.peek(&shared).is_some();
            let model = if is_shared { shared } else { own };
            if ledger.peek(&model).is_none() {
                return Err("its `model_args.model_name_or_path` is not there");
            }
            judge["url"] = json!(JUDGE_URL);
            (model, Some(key("generating_args.max_new_tokens")))
        }
        _ => return Err("its `judge_model_type` is not api, inference or cluster"),
    };
    judge["model"] = json!(ledger.text(&model));
    ledger.fold(&kind, format!("the judge is served at {}, by whatever you start there", judge["url"]));
    ledger.fold(&model, "in the term's `judge.model`, the model's name there");
    if let Some(tokens) = answer_tokens.filter(|tokens| ledger.whole(tokens).is_some()) {
        judge["max_tokens"] = json!(ledger.whole(&tokens));
        ledger.fold(&tokens, "in the term's `judge.max_tokens`");
    }
    ledger.fold(&prompt, "in other words, in the term's `judge.template`");
    ledger.idle_all(&[
        (&key("generating_args.*"), "the judge is asked at temperature 0"),
        (&key("judge_*"), "the judge is not asked so"),
        ("reward_model.*", "the judge is served by whatever you start at `judge.url`"),
    ]);
    Ok(json!({"judge": judge}))
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
