//! The weighted sum of rewards that a run trains on.

use super::{Completion, Error, Exact, Reward, build};
use crate::config::{OnError, RewardConfig};
use crate::data::Record;

/// The weighted sum of a config's rewards.
pub struct RewardSum {
    terms: Vec<Term>,
}

struct Term {
    /// The reward's, with a number behind it if another term has the same.
    name: String,
    reward: Box<dyn Reward>,
    weight: f64,
    on_error: OnError,
}

/// What became of a completion.
#[derive(Debug)]
pub enum Outcome {
    /// All terms scored it.
    Scored {
        /// Their weighted sum.
        total: f64,
        /// Each one's own score, without its weight.
        parts: Vec<f64>,
    },
    /// A term failed, and its config says that the sample is then left out.
    Dropped(Error),
}

impl RewardSum {
    /// What `config` says; for the random control, the reward whose mean it has.
    pub fn new(config: &RewardConfig) -> Self {
        let RewardConfig::Sum(terms) = config else {
            let reward = Box::new(Exact);
            let name = reward.name().to_owned();
            return Self { terms: vec![Term { name, reward, weight: 1.0, on_error: OnError::Stop }] };
        };
        let mut built: Vec<Term> = Vec::new();
        for term in terms {
            let reward = build(&term.kind);
            let same = built.iter().filter(|other| other.reward.name() == reward.name()).count();
            let name = reward.name();
            let name = if same == 0 { name.to_owned() } else { format!("{name}_{}", same + 1) };
            built.push(Term { name, reward, weight: term.weight, on_error: term.on_error });
        }
        Self { terms: built }
    }

    /// The names of the terms, each of its own.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.terms.iter().map(|term| term.name.as_str())
    }

    /// Scores a completion by all terms.
    ///
    /// # Errors
    /// The first failure of a term whose `on_error` is `stop`.
    pub fn score(&self, record: &Record, completion: &Completion) -> Result<Outcome, Error> {
        let mut parts = Vec::with_capacity(self.terms.len());
        let mut total = 0.0;
        let mut dropped = None;
        for term in &self.terms {
            match (term.reward.score(record, completion), term.on_error) {
                (Ok(score), _) => {
                    total += term.weight * score;
                    parts.push(score);
                }
                (Err(error), OnError::Stop) => return Err(error),
                (Err(error), OnError::Drop) => dropped = Some(error),
            }
        }
        Ok(dropped.map_or(Outcome::Scored { total, parts }, Outcome::Dropped))
    }

    /// The score by the first term alone, which is what evaluation measures: the others shape the training.
    ///
    /// # Errors
    /// If the term fails, whatever its `on_error`: a measurement has no holes.
    pub fn measure(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        self.terms[0].reward.score(record, completion)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{LengthConfig, NoFields, RegexConfig, RewardKind, RewardTerm};

    fn term(kind: RewardKind, weight: f64, on_error: OnError) -> RewardTerm {
        RewardTerm { kind, weight, on_error }
    }

    #[test]
    fn sums_with_weights_and_leaves_out_what_failed() {
        let regex = |pattern: &str| RewardKind::Regex(RegexConfig { pattern: pattern.to_owned() });
        let length = RewardKind::Length(LengthConfig { max_tokens: 10, buffer_tokens: 4 });
        let config = |on_error| {
            RewardConfig::Sum(vec![
                term(RewardKind::Exact(NoFields {}), 1.0, OnError::Stop),
                term(regex("[0-9]+"), 0.5, OnError::Stop),
                term(regex("[a-z]+"), 0.25, OnError::Stop),
                term(length.clone(), 2.0, on_error),
            ])
        };
        let record = Record { id: "1".to_owned(), prompt: String::new(), answer: "12".to_owned() };
        let sum = RewardSum::new(&config(OnError::Drop));
        assert_eq!(sum.names().collect::<Vec<_>>(), ["exact", "regex", "regex_2", "length"]);

        let long = Completion { text: "12", tokens: Some(8), finished: true };
        let Outcome::Scored { total, parts } = sum.score(&record, &long).unwrap() else { panic!() };
        assert_eq!((total, parts), (0.5, vec![1.0, 1.0, 0.0, -0.5]));
        assert_eq!(sum.measure(&record, &long).unwrap(), 1.0);

        let unknown = Completion { tokens: None, ..long };
        assert!(
            matches!(sum.score(&record, &unknown).unwrap(), Outcome::Dropped(error) if error.name == "length")
        );
        let error = RewardSum::new(&config(OnError::Stop)).score(&record, &unknown).unwrap_err();
        assert_eq!(error.to_string(), "the reward `length` failed for record 1");
    }
}
