//! Advice while a run is in progress: rules over the history of its metrics, each with a remedy.
//!
//! `rules` has the rules and their thresholds, as pure functions of a [`Recent`]. [`AdviceLog`] remembers what was
//! said, so that each advice comes once per run, also after a resume.

mod history;
mod log;
mod rules;

use serde::{Deserialize, Serialize};

pub use history::Recent;
pub use log::{AdviceLog, read_advice};
pub use rules::{RULES, Rule, page};

/// An advice: what was observed, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Advice {
    /// The step after which it came.
    pub step: u64,
    /// Name of the rule; for a rule about a part of the run, followed by the part's name.
    pub rule: String,
    /// The observation and the remedy.
    pub text: String,
}

/// Returns all advice that the history gives, in the order of the rules.
pub fn advice(history: &Recent) -> Vec<Advice> {
    let Some(step) = history.step() else { return Vec::new() };
    let mut all = Vec::new();
    for Rule { name, remedy, observe, .. } in &RULES {
        for (part, observed) in observe(history) {
            let rule = format!("{name} {part}").trim_end().to_owned();
            all.push(Advice { step, rule, text: format!("{observed}: {remedy}") });
        }
    }
    all
}
