//! ROLL's training prompts, and the share of each domain.

use serde_json::{Value, json};

use super::rewards::workers;
use crate::{ledger::Ledger, rules, shared::R, values};

/// ROLL's default for the most tokens of a prompt.
pub(super) const PROMPT_LENGTH: u64 = 1024;

/// Prefix of the domains' shares; the domain's name follows.
const SHARES: &str = "actor_train.data_args.domain_interleave_probs.";

/// Division of the prompts among `rewards`.
pub(super) enum Domains {
    /// One reward for all prompts.
    One,
    /// A share of the prompts for each reward.
    Mixed(Vec<Domain>),
    /// Several rewards, of which not all have a share.
    AsTheyCome,
}

/// The prompts of a reward, selected by tags.
pub(super) struct Domain {
    name: String,
    share: f64,
    tags: Value,
}

impl Domains {
    pub(super) fn of(ledger: &Ledger) -> Self {
        let workers = workers(ledger);
        if workers.len() < 2 {
            return Self::One;
        }
        let domain = |(key, _): &(String, String)| {
            let name = domain_of(key);
            let share = ledger.number(&format!("{SHARES}{name}")).filter(|share| *share > 0.0)?;
            let tags = ledger.peek(&format!("rewards.{name}.tag_included")).filter(|tags| tags.is_array())?;
            Some(Domain { share, tags: tags.clone(), name: name.to_owned() })
        };
        let shares = ledger.keys().filter(|key| key.starts_with(SHARES)).count();
        let domains = workers.iter().map(domain).collect::<Option<Vec<_>>>();
        domains.filter(|domains| domains.len() == shares).map_or(Self::AsTheyCome, Self::Mixed)
    }
}

/// Domain of a reward's worker, from its key.
pub(super) fn domain_of(worker: &str) -> &str {
    worker.trim_start_matches("rewards.").trim_end_matches(".worker_cls")
}

pub(super) fn data(ledger: &mut Ledger, domains: &Domains) {
    let key = "actor_train.data_args.file_name";
    let path = format!("{R}.data.file.path");
    rules::files(ledger, key, &path);
    for name in ["prompt", "messages"] {
        ledger.copy_text(&format!("actor_train.data_args.{name}"), &format!("{R}.data.file.columns.prompt"));
    }
    ledger.fill(&format!("{R}.data.file.columns.answer"), "ground_truth");
    // ROLL leaves out longer prompts, too.
    ledger.copy_number("prompt_length", &format!("{R}.data.file.max_prompt_tokens"));
    ledger.fill(&format!("{R}.data.file.max_prompt_tokens"), PROMPT_LENGTH);
    let validation = "validation.data_args.file_name";
    if let Some(files) = ledger.peek(validation).filter(|files| !values::is_off(files)).cloned() {
        match domains {
            Domains::Mixed(_) => {
                ledger.fold(validation, "set `held_out` in the sources with records in that file")
            }
            Domains::One | Domains::AsTheyCome => {
                ledger.map(validation, &format!("{R}.data.file.held_out"), files);
            }
        }
    }
    match domains {
        Domains::One => ledger.idle_all(&[(&format!("{SHARES}*"), "there is only one domain")]),
        Domains::Mixed(domains) => mix(ledger, domains),
        Domains::AsTheyCome => {}
    }
    let why = "give each of `rewards` a share above 0 and its `tag_included`";
    ledger.refuse_all(&[("actor_train.data_args.domain_interleave_probs*", why)]);
}

/// A mix with one source per domain, all with the same files.
fn mix(ledger: &mut Ledger, domains: &[Domain]) {
    let file = ledger.take(&format!("{R}.data.file"));
    let source = |Domain { name, share, tags }: &Domain| {
        let mut file = file.clone();
        file["domains"] = tags.clone();
        json!({"domain": name, "weight": share, "data": {"file": file}})
    };
    let sources: Vec<Value> = domains.iter().map(source).collect();
    for (index, Domain { name, .. }) in domains.iter().enumerate() {
        let key = format!("{SHARES}{name}");
        match index {
            0 => {
                let why = "spread evenly over the steps, where ROLL rounds the prompts of each step";
                ledger.change(&key, &format!("{R}.data.mix"), sources.clone(), why);
            }
            _ => ledger.fold(&key, "the weight of its source"),
        }
    }
}
