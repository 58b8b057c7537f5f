//! Rewards for ROLL's reward workers.

use serde_json::{Value, json};

use super::data::{Domains, domain_of};
use crate::{ledger::Ledger, shared::R, values};

/// Settings of a reward's processes, which decide no score.
const WORKERS: [&str; 19] = [
    "judge_prompt",
    "judge_model_type",
    "judge_api_url",
    "judge_model_name",
    "judge_api_key",
    "data_args",
    "device_mapping",
    "generating_args",
    "infer_batch_size",
    "model_args",
    "strategy_args",
    "training_args",
    "world_size",
    "tag_included",
    "system_envs",
    "max_concurrency",
    "num_gpus_per_worker",
    "code_url",
    "use_local",
];

/// A worker that scores by one of three rules, with a penalty for short answers.
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
            None if has_domains => {
                ledger.refuse(&key, "write the tags of its records in the term's `domains`")
            }
            _ => {
                terms.push(reward);
                taken.push((key, why, None));
            }
        }
    }
    for (index, (key, why, tags)) in taken.into_iter().enumerate() {
        match (index, why) {
            (0, "") => ledger.map(&key, &format!("{R}.reward"), terms.clone()),
            (0, why) => ledger.change(&key, &format!("{R}.reward"), terms.clone(), why),
            (_, "") => ledger.fold(&key, "a term of the reward"),
            (_, why) => ledger.fold(&key, format!("a term of the reward; {why}")),
        }
        if let Some(tags) = tags {
            let place = if is_mix { "in the `domains` of its source" } else { "in the term's `domains`" };
            ledger.fold(&tags, place);
        }
    }
    if has_domains {
        ledger.fill(&format!("{R}.data.file.columns.domain"), "tag");
    }
    let names: Vec<String> =
        ledger.keys().filter_map(|key| key.strip_prefix("rewards.")).map(str::to_owned).collect();
    for name in names {
        let Some((_, field)) = name.split_once('.') else { continue };
        if WORKERS.iter().any(|known| {
            field.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        }) {
            ledger.idle(&format!("rewards.{name}"), "rewards here are functions in the ranks' processes");
        }
    }
}

/// Keys of the rewards' workers, with their class names.
pub(super) fn workers(ledger: &Ledger) -> Vec<(String, String)> {
    let keys = ledger.keys().filter(|key| key.starts_with("rewards.") && key.ends_with(".worker_cls"));
    let class = |text: String| text.rsplit('.').next().unwrap_or_default().to_owned();
    keys.filter_map(|key| Some((key.clone(), class(ledger.text(key)?)))).collect()
}

/// The reward of a worker with keys below `section`, and its difference, empty if there is none. An error is
/// the reason why it is unsupported.
fn reward_of(
    ledger: &mut Ledger,
    section: &str,
    worker: &str,
) -> Result<(Value, &'static str), &'static str> {
    match worker {
        "MathRuleRewardWorker" => Ok((
            json!({"math": {}}),
            "without a box ROLL reads only the text after the last empty line or `</think>`",
        )),
        "MultipleChoiceBoxedRuleRewardWorker" => {
            Ok((json!({"choice": {}}), "without a box the letter of `answer is B` counts"))
        }
        CROSS_THINK => Ok((
            json!({"choice": {}}),
            "scores 1 or 0, without a penalty for repetition: `repetition` has that",
        )),
        "GeneralRuleRewardWorker" => {
            Err("its records name functions in `func_name`: use `ifeval` for records with IFEval's \
             `instruction_id_list`, or a `python` function that calls them")
        }
        "CodeSandboxRewardWorker" => {
            Ok((code(ledger, section)?, "programs must be in Python and contain their imports"))
        }
        "LLMJudgeRewardWorker" => Ok((
            judge(ledger, section)?,
            "the question is worded differently, and an answer without YES or NO is a failure, where ROLL gives 0",
        )),
        _ => Err("see docs/guides/rewards.md for supported rewards"),
    }
}

/// Programs run in this machine's sandbox, or in the one at `code_url`, with ROLL's time limit.
fn code(ledger: &mut Ledger, section: &str) -> Result<Value, &'static str> {
    let [local, url] = ["use_local", "code_url"].map(|name| format!("{section}{name}"));
    let is_local = ledger.truth(&local) != Some(false);
    let service = ledger.text(&url).filter(|_| !is_local && !ledger.peek(&url).is_some_and(values::is_unset));
    if !is_local && service.is_none() {
        return Err("`use_local` is off, but there is no `code_url`: set `code.http.url`");
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

/// Name of ROLL's only question with YES or NO as its answer.
const JUDGE_PROMPT: &str = "Qwen2.5-7B-Instruct-RLVR-prompt";

/// The judge's prompt in its place.
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

/// Environment variable for the key, which ROLL's config contains.
const JUDGE_KEY: &str = "JUDGE_API_KEY";

/// URL for a judge that ROLL would start itself.
const JUDGE_URL: &str = "http://127.0.0.1:8000/v1";

/// The judge's endpoint: ROLL's, or one at which the user serves the model that ROLL would load.
fn judge(ledger: &mut Ledger, section: &str) -> Result<Value, &'static str> {
    let key = |name: &str| format!("{section}{name}");
    let [prompt, kind, url, name, secret] =
        ["judge_prompt", "judge_model_type", "judge_api_url", "judge_model_name", "judge_api_key"].map(key);
    if ledger.text(&prompt).as_deref() != Some(JUDGE_PROMPT) {
        return Err("its `judge_prompt` is not one of ROLL's: write `judge` with your own template");
    }
    let mut judge =
        json!({"pattern": r"(?i)\b(YES|NO)\b", "words": {"YES": 1, "NO": 0}, "template": JUDGE_TEMPLATE});
    let (model, answer_tokens) = match ledger.text(&kind).as_deref() {
        Some("api") => {
            let (Some(url_text), Some(_)) = (ledger.text(&url), ledger.text(&name)) else {
                return Err("its `judge_api_url` or `judge_model_name` is missing");
            };
            judge["url"] = json!(url_text);
            ledger.fold(&url, "in the term's `judge.url`");
            if ledger.peek(&secret).is_some() {
                judge["key_variable"] = json!(JUDGE_KEY);
                ledger.fold(&secret, format!("export it as {JUDGE_KEY}: configs contain no keys"));
            }
            (name, None)
        }
        Some(kind @ ("inference" | "cluster")) => {
            let own = key("model_args.model_name_or_path");
            let shared = "reward_model.model_args.model_name_or_path".to_owned();
            let is_shared = kind == "cluster" && ledger.peek(&shared).is_some();
            let model = if is_shared { shared } else { own };
            if ledger.peek(&model).is_none() {
                return Err("its `model_args.model_name_or_path` is missing");
            }
            judge["url"] = json!(JUDGE_URL);
            (model, Some(key("generating_args.max_new_tokens")))
        }
        _ => return Err("its `judge_model_type` is not api, inference or cluster"),
    };
    judge["model"] = json!(ledger.text(&model));
    ledger.fold(&kind, format!("you must serve the judge at {}", judge["url"]));
    ledger.fold(&model, "in the term's `judge.model`, the model's name there");
    if let Some(tokens) = answer_tokens.filter(|tokens| ledger.whole(tokens).is_some()) {
        judge["max_tokens"] = json!(ledger.whole(&tokens));
        ledger.fold(&tokens, "in the term's `judge.max_tokens`");
    }
    ledger.fold(&prompt, "replaced by the term's `judge.template`");
    ledger.idle_all(&[
        (&key("generating_args.*"), "the judge samples at temperature 0"),
        (&key("judge_*"), "not used for this judge"),
        ("reward_model.*", "you must serve the judge at `judge.url`"),
    ]);
    Ok(json!({"judge": judge}))
}

/// Keys that change a worker's scores or filter its prompts, below `section`, which ends in a dot.
fn scoring(ledger: &mut Ledger, section: &str, worker: &str) {
    let key = |name: &str| format!("{section}{name}");
    let [kind, penalty] = ["reward_type", "response_length_penalty_coef"].map(key);
    if worker == CROSS_THINK {
        if ledger.peek(&kind).is_some() {
            ledger.fold(&kind, "the right letter is 1, and anything else 0");
        }
        ledger.refuse_all(&[(&penalty, "shape lengths with the `length` reward")]);
    }
    let why = "this worker does not read it";
    ledger.idle_all(&[(&kind, why), (&penalty, why)]);
    let filter = key("query_filter_config.type");
    match ledger.text(&filter).as_deref() {
        None => {}
        Some("no_filter") => ledger.idle(&filter, "off"),
        Some(_) => ledger.refuse(&filter, "set `selection.mixed_groups` or `selection.difficulty`"),
    }
}
