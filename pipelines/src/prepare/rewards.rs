//! Checks of everything that rewards name: patterns, templates, models, files, keys, and the processes that they
//! start.

use std::path::Path;

use anyroll_config::{
    CodeConfig, Config, DataConfig, ImageReward, JudgeConfig, PipelineConfig, PythonConfig, RewardConfig,
    RewardKind, RewardTerm, Section, host,
};
use anyroll_data::{Dataset, files};
use anyroll_reward::{Failure, Judge, Model, OpenModel, Pattern, Python, Reward, build, key};

use super::environment;

/// Opens the reward models, in the order of the terms, and reports terms that cannot be used. `at` is the reward's
/// section.
pub(super) fn open(reward: &RewardConfig, at: &Section) -> Option<Vec<OpenModel>> {
    if !at.has_all_items() {
        return None;
    }
    let opened: Vec<Option<OpenModel>> = reward
        .terms()
        .iter()
        .enumerate()
        .filter_map(|(index, term)| open_kind(&term.kind, &at.item(index)))
        .collect();
    opened.into_iter().collect()
}

/// Checks a single reward. `at` contains its name.
pub(super) fn check_alone(kind: &RewardKind, at: &Section) {
    match kind {
        RewardKind::Model(model) => {
            let alone = "here is no policy, and there are no ranks";
            let help = "leave it out: it computes on the host";
            at.ensure(model.devices.is_none(), "model.devices", alone, help);
            at.ensure(model.strategy.is_none(), "model.strategy", alone, help);
            at.ensure(model.backend == host(), "model.backend", alone, help);
        }
        RewardKind::Environment(_) => {
            let help = "train with `rollout.environment`: its rewards are in `samples.jsonl`";
            at.refuse("environment", "it is of episodes, and here is none", help);
        }
        _ => {}
    }
    kind.validate(at);
    open_kind(kind, at);
}

/// Opens a term's model. Returns `Some(None)` with a problem if it cannot be used, and `None` for a term without a
/// model. `at` is the term's section.
fn open_kind(kind: &RewardKind, at: &Section) -> Option<Option<OpenModel>> {
    match kind {
        RewardKind::Model(model) => {
            if !at.is_read("model.path") {
                return Some(None);
            }
            let help = "give the folder of a sequence classifier with one label, or with `per_step` of a token \
                        classifier with two; docs/guides/rewards.md has the kinds";
            return Some(at.take(Model::open(model), "model.path", |why| why.to_string(), help));
        }
        RewardKind::Regex(regex) if at.is_read("regex.pattern") => {
            let help = "mend the pattern; it has no look-around and no back-references";
            at.take(Pattern::new(&regex.pattern), "regex.pattern", |why| why.to_string(), help);
        }
        RewardKind::Code(code) if code.http.is_none() => check_readable(code, &at.below("code")),
        RewardKind::Judge(judge) => check_judge(judge, &at.below("judge")),
        RewardKind::Python(python) => check_file("python.path", &python.path, at),
        _ => {}
    }
    None
}

fn check_readable(code: &CodeConfig, at: &Section) {
    for (index, readable) in code.readable.iter().enumerate() {
        let help = "write the path from the root of a folder or file that exists";
        let holds = readable.is_absolute() && readable.exists();
        let message = format!("{} is not there", readable.display());
        at.ensure(holds, &format!("readable[{index}]"), message, help);
    }
}

fn check_judge(judge: &JudgeConfig, at: &Section) {
    if at.is_read("pattern") {
        let help = "write one group, around the number, as in `Score: ([0-9.]+)`; `(?:...)` is none";
        at.take(Judge::pattern(&judge.pattern), "pattern", |why| why.to_string(), help);
    }
    if at.is_read("template") {
        let help = "write a text with `{{ prompt }}`, `{{ completion }}` and `{{ answer }}`, as Jinja has it";
        at.take(Judge::templates(&judge.template), "template", |why| why.to_string(), help);
    }
}

/// Reports keys of endpoints that are missing from this process's environment.
pub(super) fn have_keys(config: &Config, at: &Section) {
    let PipelineConfig::Rlvr(rlvr) = &config.pipeline else { return };
    if !at.below("pipeline.rlvr.reward").has_all_items() {
        return;
    }
    for (index, term) in rlvr.reward.terms().iter().enumerate() {
        let (name, variable) = match &term.kind {
            RewardKind::Judge(judge) => ("judge", &judge.key_variable),
            RewardKind::Remote(remote) => ("remote", &remote.key_variable),
            RewardKind::Code(CodeConfig { http: Some(http), .. }) => ("code.http", &http.key_variable),
            _ => continue,
        };
        if let Some(variable) = variable {
            let field = format!("pipeline.rlvr.reward[{index}].{name}.key_variable");
            let help = "set it, or leave the field out if the endpoint wants no key";
            at.take(key(variable), &field, |why| why.to_string(), help);
        }
    }
}

/// Starts the processes of rewards on this machine, and reports those that fail, and the first record on which a reward
/// can only fail, from the `dataset` if it was opened. Without `runs_code` it starts no process: neither a user's file,
/// nor the sandbox, in which the records' tests would run.
pub(super) fn start(config: &Config, dataset: Option<&Dataset>, runs_code: bool, at: &Section) {
    let reward = at.below("pipeline").below(config.pipeline.name()).below("reward");
    if !reward.has_all_items() {
        return;
    }
    match &config.pipeline {
        PipelineConfig::Rlvr(rlvr) => {
            if runs_code {
                environment::start(&rlvr.rollout, dataset, at);
            }
            for (index, term) in rlvr.reward.terms().iter().enumerate() {
                let at = reward.item(index);
                match &term.kind {
                    RewardKind::Python(_) | RewardKind::Code(_) if !runs_code => {}
                    RewardKind::Python(python) => {
                        let loaded = load_function(python, &at.below("python"));
                        if let (Some(reward), Some(dataset)) = (loaded, dataset) {
                            check_records(&reward, term, &rlvr.data, dataset, &at);
                        }
                    }
                    kind @ (RewardKind::Math(_)
                    | RewardKind::Choice(_)
                    | RewardKind::Countdown(_)
                    | RewardKind::Ifeval(_)
                    | RewardKind::Code(_))
                        if at.is_sound(kind.name()) =>
                    {
                        let help = "run it where user namespaces are allowed, or name a service in `http`";
                        let started = at.take(build(kind), kind.name(), Failure::to_string, help);
                        if let (Some(reward), Some(dataset)) = (started, dataset) {
                            check_records(&*reward, term, &rlvr.data, dataset, &at);
                        }
                    }
                    _ => {}
                }
            }
        }
        PipelineConfig::Diffusion(diffusion) if runs_code => {
            for (index, kind) in diffusion.reward.fields() {
                if let ImageReward::Python(python) = kind {
                    let at = reward.below(&index);
                    drop(load_function(python, &at.below("python")));
                }
            }
        }
        PipelineConfig::Diffusion(_) | PipelineConfig::Offline(_) => {}
    }
}

/// Reports the first record of the term on which its reward can only fail.
fn check_records(
    reward: &dyn Reward,
    term: &RewardTerm,
    config: &DataConfig,
    dataset: &Dataset,
    at: &Section,
) {
    let mut records = dataset.examples();
    records.retain(|record| term.domains.is_empty() || term.domains.contains(&record.domain));
    let Err(error) = reward.check_all(&records) else { return };
    let domain = records.iter().find(|record| record.id == error.record).map(|record| &*record.domain);
    let place = place(config, domain.unwrap_or_default(), &error.record);
    let help = "no completion of this record can be scored: mend it or the reward, or take the record out";
    at.refuse(term.kind.name(), format!("{place}: {}", error.failure), help);
}

/// File and line of the record `id` of a domain, as far as `data` and the id tell them.
fn place(data: &DataConfig, domain: &str, id: &str) -> String {
    let file = match data {
        DataConfig::File(file) => file,
        DataConfig::Mix(sources) => match sources.iter().find(|source| source.domain == domain) {
            Some(source) => return place(&source.data, "", id),
            None => return id.to_owned(),
        },
        _ => return id.to_owned(),
    };
    // With several files the id begins with the file's name.
    let (is_named, row) = match id.strip_prefix("line ") {
        Some(line) => (false, format!(":{line}")),
        None => (!id.starts_with("row "), format!(", {id}")),
    };
    let groups = [Some(&file.path), file.held_out.as_ref()];
    let files = groups.into_iter().flatten().filter_map(|paths| files(paths).ok());
    let names: Vec<String> = match is_named {
        true => Vec::new(),
        false => files
            .filter(|files| files.len() == 1)
            .map(|files| format!("{}{row}", files[0].display()))
            .collect(),
    };
    if names.is_empty() { id.to_owned() } else { names.join(" or ") }
}

fn load_function(python: &PythonConfig, at: &Section) -> Option<Python> {
    if !at.is_sound("") {
        return None;
    }
    let help =
        "mend the file or the function's name, or name in `python` an interpreter that has what it imports";
    at.take(Python::new(python), "path", |failure| failure.to_string(), help)
}

/// Reports a missing file, or a folder in its place.
pub(super) fn check_file(name: &str, path: &Path, at: &Section) {
    let message = format!("there is no file {}", path.display());
    at.ensure(path.is_file(), name, message, "give its path; a relative one starts at the config's folder");
}
