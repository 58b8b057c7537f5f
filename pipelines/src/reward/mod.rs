//! Rewards: the scores of completions.
//!
//! A [`Reward`] scores one completion. [`RewardSum`] is the weighted sum of a config's rewards, on which a
//! run trains. A [`Scorer`] runs it on threads of its own; a [`HeldModel`] is evaluated by all ranks
//! together. `docs/guides/rewards.md` has an example of each.

mod choice;
mod code;
mod countdown;
mod endpoint;
mod exact;
mod ifeval;
mod judge;
mod length;
mod math;
mod model;
mod pattern;
mod python;
mod repetition;
mod scorer;
mod sharded_model;
mod sum;

pub use choice::Choice;
pub use code::Code;
pub use countdown::Countdown;
pub(crate) use endpoint::key;
pub use exact::Exact;
pub use ifeval::Ifeval;
pub use judge::Judge;
pub use length::Length;
pub use math::Math;
pub use model::{Model, OpenModel};
pub use pattern::Pattern;
pub use python::{Images, Python};
pub use repetition::Repetition;
pub use scorer::{Scorer, Scoring};
pub use sharded_model::HeldModel;
pub use sum::{Case, Outcome, RewardSum, Score};

pub use crate::failure::{Failure, RewardError as Error};

use std::num::NonZeroUsize;

use indexmap::IndexMap;

use crate::config::RewardKind;
use crate::data::Record;
use crate::error_chain::one_line;

/// Unique names for a sum's terms: `math`, `length`, `math_2`.
pub fn distinct(names: &[&str]) -> Vec<String> {
    let number = |index: usize| names[..=index].iter().filter(|name| **name == names[index]).count();
    let numbered = names.iter().enumerate().map(|(index, name)| match number(index) {
        1 => (*name).to_owned(),
        number => format!("{name}_{number}"),
    });
    numbered.collect()
}

/// Fails if a term failed on more of `samples` than its allowed fraction. `terms` are names, these fractions,
/// and the failures over all ranks; `own` are the failures of this rank, each with the index of its term.
pub fn check_error_rates<'a>(
    terms: impl Iterator<Item = (&'a str, f64, f64)>,
    samples: usize,
    own: Vec<(usize, Error)>,
) -> crate::Result<()> {
    warn_of(own.iter().map(|(_, error)| error));
    for (index, (name, max_error_rate, failed)) in terms.enumerate() {
        if failed > max_error_rate * samples as f64 {
            let source = own.into_iter().rfind(|(term, _)| *term == index).map(|(_, error)| error);
            let (name, failed) = (name.to_owned(), failed as usize);
            return Err(crate::Error::Reward { name, failed, samples, max_error_rate, source });
        }
    }
    Ok(())
}

/// Warns of failures, once for all samples with the same cause, since a broken reward fails on each.
fn warn_of<'a>(failures: impl Iterator<Item = &'a Error>) {
    const MOST_TOLD: usize = 5;
    let mut alike: IndexMap<(&str, String), Vec<&Error>> = IndexMap::new();
    for error in failures {
        alike.entry((error.name, error.failure.to_string())).or_default().push(error);
    }
    for errors in alike.values().take(MOST_TOLD) {
        tracing::warn!(samples = errors.len(), first = one_line(errors[0]), "samples could not be scored");
    }
    if alike.len() > MOST_TOLD {
        let samples: usize = alike.values().skip(MOST_TOLD).map(Vec::len).sum();
        tracing::warn!(samples, "more samples could not be scored, for other reasons");
    }
}

/// A completion of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion<'a> {
    /// Text without the end token.
    pub text: &'a str,
    /// Length in tokens, including the end token; `None` if nothing was tokenized.
    pub tokens: Option<usize>,
    /// True if it ended by itself, false if it was cut at the maximum length.
    pub finished: bool,
}

/// Batching of a reward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// One completion at a time, as soon as it ends.
    Each,
    /// Batches of this many completions with consecutive numbers, as soon as all of them have ended.
    Batches(NonZeroUsize),
}

/// Scores a completion against its record.
pub trait Reward: Send + Sync {
    /// Its name in metrics and errors.
    fn name(&self) -> &'static str;

    /// Scores `completion`. An error is for causes outside the policy, such as an invalid gold answer; an
    /// invalid completion gets a low score.
    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error>;

    /// Batching that the reward wants.
    fn takes(&self) -> Takes {
        Takes::Each
    }

    /// Scores a batch of completions, in order.
    fn score_many(&self, cases: &[(&Record, Completion)]) -> Vec<Result<f64, Error>> {
        cases.iter().map(|(record, completion)| self.score(record, completion)).collect()
    }

    /// The part of `completion` that is compared with the gold answer, if the reward extracts one.
    fn extracted(&self, _completion: &Completion) -> Option<String> {
        None
    }
}

/// Creates the reward that `kind` names; a model is loaded on the host.
///
/// # Errors
/// If it cannot start, for example because its file does not load or its sandbox is unsafe.
///
/// # Panics
/// If a pattern or a template is invalid, which the config's check excludes.
pub fn build(kind: &RewardKind) -> Result<Box<dyn Reward>, Failure> {
    Ok(match kind {
        RewardKind::Exact(_) => Box::new(Exact),
        RewardKind::Math(config) => Box::new(Math::new(*config)),
        RewardKind::Choice(_) => Box::new(Choice),
        RewardKind::Countdown(_) => Box::new(Countdown),
        RewardKind::Regex(config) => {
            Box::new(Pattern::new(&config.pattern).expect("a pattern that was checked"))
        }
        RewardKind::Ifeval(config) => Box::new(Ifeval::new(*config)),
        RewardKind::Code(config) => Box::new(Code::new(config)?),
        RewardKind::Judge(config) => Box::new(Judge::new(config)?),
        RewardKind::Model(config) => Box::new(Model::new(config, Model::open(config)?)?),
        RewardKind::Python(config) => Box::new(Python::new(config)?),
        RewardKind::Environment(_) => return Err("it scores an episode, not a single completion".into()),
        RewardKind::Length(config) => Box::new(Length::new(*config)),
        RewardKind::Repetition(config) => Box::new(Repetition::new(*config)),
    })
}
