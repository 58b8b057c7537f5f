//! Rewards: the scores of completions.
//!
//! A [`Reward`] scores one completion. [`RewardSum`] is the weighted sum of a config's rewards, on which a
//! run trains. A [`Scorer`] runs it on threads of its own; a [`JointModel`] is evaluated by all ranks
//! together. `docs/guides/rewards.md` has an example of each.

#![forbid(unsafe_code)]

mod choice;
mod code;
mod countdown;
mod endpoint;
mod exact;
mod failure;
mod ifeval;
mod judge;
mod length;
mod logged;
mod math;
mod model;
mod pattern;
pub mod process;
mod python;
mod remote;
mod repetition;
mod scorer;
mod sum;

pub use choice::Choice;
pub use code::Code;
pub use countdown::Countdown;
pub use endpoint::key;
pub use exact::Exact;
pub use ifeval::Ifeval;
pub use judge::Judge;
pub use length::Length;
pub use logged::Logged;
pub use math::Math;
pub use model::{Model, OpenModel, Reader, Text, Texts, pack, scores_of};
pub use pattern::Pattern;
pub use python::{Images, Python, missing};
pub use remote::Remote;
pub use repetition::Repetition;
pub use scorer::{Scorer, Scoring};
pub use sum::{Case, Outcome, RewardSum, Score};

pub use failure::{Failure, RewardError as Error, StartError};

use std::num::NonZeroUsize;

use anyroll_config::RewardKind;
use anyroll_data::Record;

/// Unique names for a sum's terms: `math`, `length`, `math_2`.
pub fn distinct(names: &[&str]) -> Vec<String> {
    let number = |index: usize| names[..=index].iter().filter(|name| **name == names[index]).count();
    let numbered = names.iter().enumerate().map(|(index, name)| match number(index) {
        1 => (*name).to_owned(),
        number => format!("{name}_{number}"),
    });
    numbered.collect()
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

/// A reward model that the ranks hold together, and score with together.
pub trait JointModel {
    /// Failure of a device or of another rank.
    type Error;

    /// Scores of this rank's completions, in order. Every rank must call this, even with no completions.
    ///
    /// # Errors
    /// If a device or another rank fails. The failure of a completion is in its place.
    fn score(&mut self, cases: &[(&Record, Completion)]) -> Result<Vec<Result<f64, Error>>, Self::Error>;
}

/// Scores a completion against its record.
pub trait Reward: Send + Sync {
    /// Its name in metrics and errors.
    fn name(&self) -> &'static str;

    /// Scores `completion`. An error is for causes outside the policy, such as an invalid gold answer; an
    /// invalid completion gets a low score.
    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error>;

    /// Scores `completion`, with what a user's function logged for it.
    ///
    /// # Errors
    /// The error of [`Self::score`].
    fn score_and_log(&self, record: &Record, completion: &Completion) -> Result<(f64, Logged), Error> {
        Ok((self.score(record, completion)?, Logged::default()))
    }

    /// Refuses a record on which [`Self::score`] fails for every completion, as far as the record alone decides it.
    ///
    /// # Errors
    /// The error that `score` would return.
    fn check(&self, _record: &Record) -> Result<(), Error> {
        Ok(())
    }

    /// Checks several records.
    ///
    /// # Errors
    /// The error of the first record that is refused.
    fn check_all(&self, records: &[Record]) -> Result<(), Error> {
        records.iter().try_for_each(|record| self.check(record))
    }

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
        RewardKind::Remote(config) => Box::new(Remote::new(config)?),
        RewardKind::Python(config) => Box::new(Python::new(config)?),
        RewardKind::Environment(_) => return Err("it scores an episode, not a single completion".into()),
        RewardKind::Length(config) => Box::new(Length::new(*config)),
        RewardKind::Repetition(config) => Box::new(Repetition::new(*config)),
    })
}
