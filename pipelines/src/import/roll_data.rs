//! Which prompts ROLL trains on, and how many of each domain.

use serde_json::{Value, json};

use super::{ledger::Ledger, roll_rewards::workers, shared::R, values};

/// The most tokens of a prompt, where none is said.
pub(super) const PROMPT_LENGTH: u64 = 1024;

/// What share of the prompts each domain has; a domain's name follows.
const SHARES: &str = "actor_train.data_args.domain_interleave_probs.";

/// What `rewards` makes of the prompts.
pub(super) enum Domains {
    /// There is one reward, for all of them.
    One,
    /// Each reward has a share of them.
    Mixed(Vec<Domain>),
    /// There are several rewards, and not each says its share.
    AsTheyCome,
}

/// The prompts of a reward: those whose tags it lists.
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

/// The domain of a reward's worker, by its key.
pub(super) fn domain_of(worker: &str) -> &str {
    worker.trim_start_matches("rewards.").trim_end_matches(".worker_cls")
}

pub(super) fn data(ledger: &mut Ledger, domains: &Domains) {
    let key = "actor_train.data_args.file_name";
    let path = format!("{R}.data.file.path");
    match ledger.peek(key).cloned() {
        Some(Value::Array(files)) if files.len() == 1 => ledger.map(key, &path, values::text(&files[0])),
        Some(files) => ledger.map(key, &path, files),
        None => {}
    }
    for name in ["prompt", "messages"] {
        ledger.copy_text(&format!("actor_train.data_args.{name}"), &format!("{R}.data.file.columns.prompt"));
    }
    ledger.fill(&format!("{R}.data.file.columns.answer"), "ground_truth");
    // It leaves longer ones out, too.
    ledger.copy_number("prompt_length", &format!("{R}.data.file.max_prompt_tokens"));
    ledger.fill(&format!("{R}.data.file.max_prompt_tokens"), PROMPT_LENGTH);
    let validation = "validation.data_args.file_name";
    if let Some(files) = ledger.peek(validation).filter(|files| !values::is_off(files)).cloned() {
        match domains {
            Domains::Mixed(_) => {
                ledger.fold(validation, "say `held_out` in the sources that have records in it")
            }
            Domains::One | Domains::AsTheyCome => {
                ledger.map(validation, &format!("{R}.data.file.held_out"), files);
            }
        }
    }
    match domains {
        Domains::One => ledger.idle_all(&[(&format!("{SHARES}*"), "there is one domain")]),
        Domains::Mixed(domains) => mix(ledger, domains),
        Domains::AsTheyCome => {}
    }
    let why = "give each of `rewards` a share above 0 and its `tag_included`";
    ledger.refuse_all(&[("actor_train.data_args.domain_interleave_probs*", why)]);
}

/// A source for each domain, of the same files.
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
                let why = "evenly over the steps, where ROLL rounds the prompts of each";
                ledger.change(&key, &format!("{R}.data.mix"), sources.clone(), why);
            }
            _ => ledger.fold(&key, "the weight of its source"),
        }
    }
}
