//! The weighted sum of rewards that a run trains on.

use std::num::NonZeroUsize;
use std::sync::mpsc;
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::{Completion, Error, Exact, Failure, Reward, build};
use crate::config::RewardConfig;
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
    /// Of the records that it is for; all if there is none.
    domains: Vec<String>,
    max_error_rate: f64,
}

/// A completion to score, and what it answers.
#[derive(Clone, Debug)]
pub struct Case<'a> {
    /// What was asked.
    pub record: &'a Record,
    /// What was written, without its end token.
    pub text: String,
    /// Its length in tokens, its end token included.
    pub tokens: usize,
    /// Whether it ended by itself.
    pub finished: bool,
}

/// What became of a completion.
#[derive(Debug)]
pub enum Outcome {
    /// All terms that are for its record scored it.
    Scored(Score),
    /// A term could not.
    Failed {
        /// Which, in the order of [`RewardSum::names`].
        term: usize,
        /// Why.
        error: Error,
    },
}

/// What a completion earned.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    /// The weighted sum.
    pub total: f64,
    /// The score of the first term that is for its record, without its weight: what evaluation measures.
    pub measured: f64,
    /// Each term's own score, without its weight; `None` from one that is not for its record.
    pub parts: Vec<Option<f64>>,
}

impl RewardSum {
    /// What `config` says, ready to score.
    ///
    /// # Errors
    /// If a reward cannot start: its file does not load, or its sandbox does not hold.
    pub fn new(config: &RewardConfig) -> Result<Self, Failure> {
        let terms = match config {
            RewardConfig::Exact => {
                let (name, reward) = ("exact".to_owned(), Box::new(Exact));
                vec![Term { name, reward, weight: 1.0, domains: Vec::new(), max_error_rate: 0.0 }]
            }
            RewardConfig::Sum(terms) => {
                let mut built: Vec<Term> = Vec::new();
                for term in terms {
                    let reward = build(&term.kind)?;
                    let same = built.iter().filter(|other| other.reward.name() == reward.name()).count();
                    let name = reward.name();
                    let name = if same == 0 { name.to_owned() } else { format!("{name}_{}", same + 1) };
                    let (domains, max_error_rate) = (term.domains.clone(), term.max_error_rate);
                    built.push(Term { name, reward, weight: term.weight, domains, max_error_rate });
                }
                built
            }
        };
        Ok(Self { terms })
    }

    /// The names of the terms, each of its own.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.terms.iter().map(|term| term.name.as_str())
    }

    /// The share of a step's completions that each term may fail on.
    pub fn max_error_rates(&self) -> impl Iterator<Item = f64> {
        self.terms.iter().map(|term| term.max_error_rate)
    }

    /// Scores what `produce` hands over, on `workers` threads, while it goes on producing. Each case comes with its
    /// number; the outcomes are in the order of the numbers.
    ///
    /// # Errors
    /// Those of `produce`.
    pub fn score_while<'a, T, E>(
        &self,
        workers: NonZeroUsize,
        produce: impl FnOnce(&mut dyn FnMut(usize, Case<'a>)) -> Result<T, E>,
    ) -> Result<(T, Vec<Outcome>), E> {
        let (hand_over, cases) = mpsc::channel::<(usize, Case)>();
        let (cases, outcomes) = (Mutex::new(cases), Mutex::new(Vec::new()));
        let produced = thread::scope(|scope| {
            for _ in 0..workers.get() {
                scope.spawn(|| {
                    loop {
                        // The lock is held while waiting: whoever has it takes the next case.
                        let next = cases.lock().unwrap_or_else(PoisonError::into_inner).recv();
                        let Ok((number, case)) = next else { break };
                        let outcome = self.score(&case);
                        outcomes.lock().unwrap_or_else(PoisonError::into_inner).push((number, outcome));
                    }
                });
            }
            let produced = produce(&mut |number, case| {
                hand_over.send((number, case)).expect("the receiver lives until the scope's end");
            });
            drop(hand_over);
            produced
        })?;
        let mut outcomes = outcomes.into_inner().unwrap_or_else(PoisonError::into_inner);
        outcomes.sort_unstable_by_key(|(number, _)| *number);
        Ok((produced, outcomes.into_iter().map(|(_, outcome)| outcome).collect()))
    }

    /// What a completion says, for a vote: the answer that the first term which is for its record finds in it, or else
    /// its text.
    pub fn answer(&self, case: &Case) -> String {
        let completion = Completion { text: &case.text, tokens: Some(case.tokens), finished: case.finished };
        let measuring = self.terms.iter().find(|term| term.is_for(&case.record.domain));
        let found = measuring.and_then(|term| term.reward.extracted(&completion));
        found.unwrap_or_else(|| case.text.clone()).trim().to_owned()
    }

    /// Scores a completion by all terms that are for its record.
    pub fn score(&self, case: &Case) -> Outcome {
        let completion = Completion { text: &case.text, tokens: Some(case.tokens), finished: case.finished };
        let mut parts = Vec::with_capacity(self.terms.len());
        let mut total = 0.0;
        for (index, term) in self.terms.iter().enumerate() {
            if !term.is_for(&case.record.domain) {
                parts.push(None);
                continue;
            }
            match term.reward.score(case.record, &completion) {
                Ok(score) => {
                    total += term.weight * score;
                    parts.push(Some(score));
                }
                Err(error) => return Outcome::Failed { term: index, error },
            }
        }
        // The config's check has seen to it that every domain has a term.
        let measured = parts.iter().copied().flatten().next().unwrap_or(0.0);
        Outcome::Scored(Score { total, measured, parts })
    }
}

impl Term {
    fn is_for(&self, domain: &str) -> bool {
        self.domains.is_empty() || self.domains.iter().any(|it| it == domain)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::{LengthConfig, NoFields, RegexConfig, RewardKind, RewardTerm};

    fn term(kind: RewardKind, weight: f64) -> RewardTerm {
        RewardTerm { kind, weight, ..RewardTerm::of(RewardKind::Exact(NoFields {})) }
    }

    fn record(domain: &str) -> Record {
        Record { id: "1".into(), answer: "12".into(), domain: domain.into(), ..Record::default() }
    }

    fn case<'a>(record: &'a Record, text: &str) -> Case<'a> {
        Case { record, text: text.to_owned(), tokens: 8, finished: true }
    }

    #[test]
    fn sums_with_weights_the_terms_of_its_domain() {
        let regex = |pattern: &str| RewardKind::Regex(RegexConfig { pattern: pattern.to_owned() });
        let length = RewardKind::Length(LengthConfig { max_tokens: 10, buffer_tokens: 4 });
        let only = |domain: &str, term| RewardTerm { domains: vec![domain.to_owned()], ..term };
        let sum = RewardSum::new(&RewardConfig::Sum(vec![
            only("sums", term(RewardKind::Exact(NoFields {}), 1.0)),
            term(regex("[0-9]+"), 0.5),
            only("words", term(regex("[a-z]+"), 0.25)),
            term(length, 2.0),
        ]));
        let sum = sum.unwrap();
        assert_eq!(sum.names().collect::<Vec<_>>(), ["exact", "regex", "regex_2", "length"]);
        let check = |domain: &str, text: &str, total, measured, parts: [Option<f64>; 4]| {
            let record = record(domain);
            let Outcome::Scored(score) = sum.score(&case(&record, text)) else { panic!("{text}") };
            assert_eq!(score, Score { total, measured, parts: parts.to_vec() }, "{domain} {text}");
        };
        check("sums", "12", 0.5, 1.0, [Some(1.0), Some(1.0), None, Some(-0.5)]);
        check("words", "ab", -0.75, 0.0, [None, Some(0.0), Some(1.0), Some(-0.5)]);
    }

    #[test]
    fn a_term_that_fails_is_named() {
        let sum = RewardConfig::Sum(vec![
            term(RewardKind::Exact(NoFields {}), 1.0),
            term(RewardKind::Choice(NoFields {}), 1.0),
        ]);
        let sum = RewardSum::new(&sum).unwrap();
        let record = record("");
        let Outcome::Failed { term, error } = sum.score(&case(&record, "12")) else { panic!() };
        assert_eq!((term, error.to_string().as_str()), (1, "the reward `choice` failed for record 1"));
    }

    #[test]
    fn outcomes_are_in_the_order_of_the_cases_and_overlap_their_making() {
        let sum = RewardSum::new(&RewardConfig::Exact).unwrap();
        let records: Vec<Record> = (0..100).map(|n| Record { answer: n.to_string(), ..record("") }).collect();
        let workers = NonZeroUsize::new(4).unwrap();
        let (made, outcomes) = sum
            .score_while(workers, |hand_over| {
                for (number, record) in records.iter().enumerate().rev() {
                    // Every third is right.
                    hand_over(number, case(record, &(number - number % 3).to_string()));
                    if number == 50 {
                        thread::sleep(Duration::from_millis(5));
                    }
                }
                Ok::<_, Error>("made")
            })
            .unwrap();
        assert_eq!((made, outcomes.len()), ("made", 100));
        for (number, outcome) in outcomes.iter().enumerate() {
            let Outcome::Scored(score) = outcome else { panic!("{outcome:?}") };
            assert_eq!(score.total, if number % 3 == 0 { 1.0 } else { 0.0 }, "{number}");
        }
        let stopped = sum.score_while(workers, |_| Err::<(), _>("no")).unwrap_err();
        assert_eq!(stopped, "no");
    }
}
