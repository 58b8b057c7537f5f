//! Importer of ROLL's agentic pipeline, whose environments are ROLL's own classes. Refuses ROLL's pipelines
//! that are not reinforcement learning of a language model.

use serde_json::json;

use crate::{ledger::Ledger, rules, shared::R};

/// Keys of unsupported pipelines, with their counterparts here.
const OTHERS: [(&str, &str); 3] = [
    ("sft_train.", "supervised training uses `pipeline: offline`, docs/guides/offline.md"),
    ("student.", "distillation is `objective: distill` of `pipeline: offline`, docs/guides/distillation.md"),
    (
        "actor_train.model_args.model_config_kwargs.",
        "image models use `pipeline: diffusion`, docs/guides/diffusion.md",
    ),
];

const FOR_CLASS: &str = "for the environment's class";

/// Refuses the config of an unsupported pipeline, and returns true for one.
pub(super) fn is_another(ledger: &mut Ledger) -> bool {
    let of = |(start, _): &&(&str, &str)| ledger.keys().any(|key| key.starts_with(start));
    let Some((start, why)) = OTHERS.iter().find(of) else { return false };
    let key = ledger.keys().find(|key| key.starts_with(start)).cloned().expect("just found");
    ledger.refuse(&key, *why);
    ledger.idle_all(&[("*", "only the RLVR, agentic and DPO pipelines are imported")]);
    true
}

/// Imports the agentic pipeline's keys. Environment settings belong in the class that the user writes. A
/// trajectory is a completion of several turns here, counted by `rollout_batch_size`.
pub(super) fn apply(ledger: &mut Ledger) {
    let is_agentic = |key: &String| key.starts_with("train_env_manager.") || key.starts_with("custom_envs.");
    if !ledger.keys().any(is_agentic) {
        return;
    }
    let environment = format!("{R}.rollout.environment");
    rules::map_count(ledger, "max_actions_per_traj", &format!("{environment}.max_turns"), 1);
    rules::map_count(ledger, "max_tokens_per_step", &format!("{environment}.max_turn_tokens"), 1);
    let group = rules::count(ledger, "train_env_manager.group_size", 1);
    let batch = "rollout_batch_size";
    if let Some(trajectories) = ledger.whole(batch) {
        let why = format!("{trajectories} trajectories in groups of {group}");
        let prompts = (trajectories / group).max(1);
        match trajectories.is_multiple_of(group) {
            true => ledger.change(batch, &format!("{R}.prompts_per_step"), prompts, why),
            false => ledger.refuse(batch, format!("{why}: these have unequal sizes")),
        }
    }
    if ledger.peek("train_env_manager.group_size").is_some() {
        ledger.map("train_env_manager.group_size", &format!("{R}.group_size"), group);
    }
    ledger.fill(&format!("{R}.group_size"), group);
    ledger.fill(&format!("{R}.reward"), json!([{"environment": {}}]));
    normalization(ledger);
    let tags = "train_env_manager.tags";
    let why =
        "write the environment as a class and set it in `rollout.environment`, docs/guides/environments.md";
    ledger.refuse_all(&[(tags, why)]);
    let sections: Vec<String> = ledger
        .keys()
        .filter_map(|key| Some(format!("{}.*", key.strip_suffix(".env_type")?)))
        .chain(["custom_env*", "train_env_manager.*", "val_env_manager.*"].map(str::to_owned))
        .collect();
    for section in sections {
        ledger.idle_all(&[(&section, FOR_CLASS)]);
    }
    for key in [
        "agent_*",
        "single_prompt_agent_*",
        "env_manager_cls",
        "default_history_length",
        "max_env_step_concurrent",
    ] {
        ledger.idle_all(&[(key, FOR_CLASS)]);
    }
    for end in ["_pattern", "_format_penalty", "agent_template", "agent_system_template", "_step_template"] {
        ledger.idle_ending(end, FOR_CLASS);
    }
}

/// Normalization of the trajectories' rewards.
fn normalization(ledger: &mut Ledger) {
    let [grouping, method] = ["reward_normalization.grouping", "reward_normalization.method"];
    let over = match ledger.text(grouping).as_deref() {
        Some("traj_group_id") => "group",
        Some("batch" | "tags") => "batch",
        None => return,
        Some(_) => return ledger.refuse(grouping, "rewards are compared within the group or the step"),
    };
    let field = format!("{R}.algorithm.reward_norm");
    let norm = match ledger.text(method).as_deref() {
        None | Some("identity") => return ledger.idle_all(&[(grouping, "off"), (method, "off")]),
        Some("mean_std") => json!({"mean": over, "std": over}),
        Some("mean") => json!({"mean": over}),
        Some(_) => return ledger.refuse(method, "see `algorithm.reward_norm`"),
    };
    ledger.map(method, &field, norm);
    ledger.fold(grouping, format!("statistics of the {over}"));
}
