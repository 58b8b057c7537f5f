//! What a completion earns.
//!
//! A [`Reward`] scores one completion; [`RewardSum`] is what a run trains on, the weighted sum of those that its config
//! names, and a [`Scorer`] has the threads on which it does; a [`HeldModel`] is asked by all ranks together. `docs/rewards.md` has an example of each.

mod choice;
mod code;
mod countdown;
mod endpoint;
mod exact;
mod held;
mod ifeval;
mod judge;
mod length;
mod math;
mod model;
mod pattern;
mod python;
mod repetition;
mod scorer;
mod sum;

pub use choice::Choice;
pub use code::Code;
pub use countdown::Countdown;
pub(crate) use endpoint::key;
pub use exact::Exact;
pub use held::HeldModel;
pub use ifeval::Ifeval;
pub use judge::Judge;
pub use length::Length;
pub use math::Math;
pub use model::{Model, OpenModel};
pub use pattern::Pattern;
pub use python::{Images, Python};
pub use repetition::Repetition;
pub use scorer::{Scorer, Scoring};
pub use sum::{Case, Outcome, RewardSum, Score};

pub use crate::failure::{Failure, RewardError as Error};

use std::num::NonZeroUsize;

use indexmap::IndexMap;

use crate::config::RewardKind;
use crate::data::Record;
use crate::error_chain::one_line;

/// The names of a sum's terms, each of its own: `math`, `length`, `math_2`.
pub fn distinct(names: &[&str]) -> Vec<String> {
    let number = |index: usize| names[..=index].iter().filter(|name| **name == names[index]).count();
    let numbered = names.iter().enumerate().map(|(index, name)| match number(index) {
        1 => (*name).to_owned(),
        number => format!("{name}_{number}"),
    });
    numbered.collect()
}

/// An error if a term failed on more of `samples` than its share of them: `terms` are names, these shares, and on how many
/// each failed over all ranks, and `own` the failures of this rank, each with the number of its term.
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

/// Warns of what went wrong, once for all samples of which the same is to be said: a reward that is broken fails on each.
fn warn_of<'a>(failures: impl Iterator<Item = &'a Error>) {
    const MOST_TOLD: usize = 5;
    let mut alike: IndexMap<(&str, String), Vec<&Error>> = IndexMap::new();
    for error in failures {
        alike.entry((error.name, error.failure.to_string())).or_default().push(error);
    }
    for errors in alike.values().take(MOST_TOLD) {
        tracing::warn!(samples = errors.len(), first = one_line(errors[0]), "samples cannot be scored");
    }
    if alike.len() > MOST_TOLD {
        let samples: usize = alike.values().skip(MOST_TOLD).map(Vec::len).sum();
        tracing::warn!(samples, "more samples cannot be scored, for other reasons");
    }
}

/// What a policy wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion<'a> {
    /// Without its end token.
    pub text: &'a str,
    /// Its length in tokens, its end token included; `None` where nothing was tokenized.
    pub tokens: Option<usize>,
    /// Whether it ended by itself and was not cut at its longest length.
    pub finished: bool,
}

/// How a reward is handed completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// Each by itself, as soon as it is there.
    Each,
    /// So many of consecutive numbers together, as soon as they are there.
    Batches(NonZeroUsize),
}

/// Scores a completion against its record.
pub trait Reward: Send + Sync {
    /// Its name in metrics and errors.
    fn name(&self) -> &'static str;

    /// The score of `completion`. An error is for what is not the policy's doing, such as an answer that cannot be
    /// right in any form; a completion that is no answer scores low.
    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error>;

    /// How it is handed completions.
    fn takes(&self) -> Takes {
        Takes::Each
    }

    /// The scores of several completions, in their order, from one that takes several at a time.
    fn score_many(&self, cases: &[(&Record, Completion)]) -> Vec<Result<f64, Error>> {
        cases.iter().map(|(record, completion)| self.score(record, completion)).collect()
    }

    /// The part of `completion` that is taken for the answer, where the reward looks for one.
    fn extracted(&self, _completion: &Completion) -> Option<String> {
        None
    }
}

/// The reward that `kind` names, ready to score; a model is on the host.
///
/// # Errors
/// If it cannot start, since its file does not load or its sandbox does not hold.
///
/// # Panics
/// If a pattern or a template is none, which the config's check has seen to.
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
        RewardKind::Environment(_) => return Err("it is of an episode, and no completion by itself".into()),
        RewardKind::Length(config) => Box::new(Length::new(*config)),
        RewardKind::Repetition(config) => Box::new(Repetition::new(*config)),
    })
}
