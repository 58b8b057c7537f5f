//! Checks of an environment: its file exists, the model can read its messages, and it starts.

use std::sync::Arc;

use anyroll_config::error_chain::one_line;
use anyroll_config::{EnvironmentConfig, RlvrConfig, RolloutConfig, Section, Speaker};
use anyroll_data::{CharTokenizer, Dataset, Tokenizer};

use super::rewards::check_file;
use super::texts::Policy;
use crate::environment::Environment;

const PATH: &str = "pipeline.rlvr.rollout.environment";

/// Reports a missing file, and messages that the model cannot read. Without a `policy` messages are not checked.
pub(super) fn check(rlvr: &RlvrConfig, policy: Option<&Policy>, at: &Section) {
    let Some(environment) = &rlvr.rollout.environment else { return };
    let at = at.below(PATH);
    check_file("path", &environment.path, &at);
    if let Some(policy) = policy {
        check_role(environment, policy.tokenizer(), &at);
    }
}

/// Reports a role of the environment that the model cannot read; `tokenizer` is a published model's.
fn check_role(environment: &EnvironmentConfig, tokenizer: Option<&Tokenizer>, at: &Section) {
    let help = "write `none`: what it says then stands as it is";
    let speaker = tokenizer
        .map_or(environment.role.unwrap_or(Speaker::None), |tokenizer| tokenizer.speaker(environment.role));
    let Some(role) = speaker.role() else { return };
    let Some(tokenizer) = tokenizer.filter(|tokenizer| tokenizer.is_of_chat()) else {
        return at.refuse("role", "without `model.chat: true` there are no messages", help);
    };
    let read = tokenizer.encode_observation("ok", Some(role), tokenizer.stop_tokens()[0]);
    at.take(read, "role", |error| one_line(error), help);
}

/// Starts the environment, and reports a file without the class, and the first record without a parameter of `reset`.
pub(super) fn start(rollout: &RolloutConfig, dataset: Option<&Dataset>, at: &Section) {
    if !at.is_sound(PATH) {
        return;
    }
    // The environment's messages are not read here.
    let tokenizer = Arc::new(Tokenizer::Characters(CharTokenizer::new(&[].into())));
    let help =
        "mend the file or the class's name, or name in `python` an interpreter that has what it imports";
    let started = Environment::new(rollout, tokenizer);
    let started = at.take(started, &format!("{PATH}.path"), |failure| failure.to_string(), help);
    let (Some(Some(environment)), Some(dataset)) = (started, dataset) else { return };
    let records = dataset.examples();
    let found = records.iter().find_map(|record| Some((record, environment.missing(record)?)));
    if let Some((record, problem)) = found {
        let message = format!("{}: `reset` of the class: {problem}", record.id);
        at.refuse(&format!("{PATH}.class"), message, "name the columns of the data as the parameters are");
    }
}
