//! The weighted sum of rewards that a run trains on.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyroll_config::{RewardConfig, RewardKind, RewardTerm};
use anyroll_data::Record;

use super::{
    Completion, Error, Exact, Failure, JointModel, Logged, Model, OpenModel, Reward, StartError, Takes,
    build, distinct, model,
};

/// Name of the environment's reward.
const ENVIRONMENT: &str = "environment";

/// The weighted sum of a config's rewards.
pub struct RewardSum {
    terms: Vec<Term>,
}

struct Term {
    /// Name of the reward, made [`distinct`].
    name: String,
    by: By,
    weight: f64,
    /// Domains of the records that it applies to; all if empty.
    domains: Vec<String>,
    max_error_rate: f64,
}

/// Scoring mechanism of a term.
enum By {
    /// Threads of a [`super::Scorer`].
    Threads(Box<dyn Reward>),
    /// All ranks together after sampling, with the next of their [`JointModel`]s.
    Ranks,
    /// The environment's rewards, already known: their sum over the turns.
    Environment,
}

/// A completion to score, with its record.
#[derive(Clone, Debug)]
pub struct Case {
    /// Record of the prompt.
    pub record: Arc<Record>,
    /// Completion without the end token.
    pub text: String,
    /// Length in tokens, including the end token.
    pub tokens: usize,
    /// True if it ended by itself.
    pub finished: bool,
    /// Sum of the environment's rewards, or the failure of the episode; `None` without an environment.
    pub episode: Option<Result<f64, Failure>>,
}

/// Result of scoring a completion.
#[derive(Debug)]
pub enum Outcome {
    /// Scores of all terms that apply to its record.
    Scored(Score),
    /// A term failed.
    Failed {
        /// Index of the term, in the order of [`RewardSum::names`].
        term: usize,
        /// Cause.
        error: Error,
    },
}

/// Scores of a completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    /// Weighted sum.
    pub total: f64,
    /// Unweighted score of the first term that applies to its record, which evaluations report.
    pub measured: f64,
    /// Unweighted score of each term; `None` if the term does not apply to the record.
    pub parts: Vec<Option<f64>>,
    /// Metrics and columns that each term logged.
    pub logged: Vec<Logged>,
}

impl RewardSum {
    /// Creates the rewards of `config`. `models` are its reward models on the host, in the order of its terms, with
    /// `None` for one that the ranks hold together.
    ///
    /// # Errors
    /// The term that cannot start, for example because its file does not load or its sandbox is unsafe.
    pub fn new(config: &RewardConfig, models: Vec<Option<OpenModel>>) -> Result<Self, StartError> {
        let terms = match config {
            RewardConfig::Exact => {
                let (name, by) = ("exact".to_owned(), By::Threads(Box::new(Exact)));
                vec![Term { name, by, weight: 1.0, domains: Vec::new(), max_error_rate: 0.0 }]
            }
            RewardConfig::Sum(terms) => {
                let mut models = models.into_iter();
                let started = |(index, term): (usize, &RewardTerm)| {
                    let name = || format!("pipeline.rlvr.reward[{index}]");
                    By::new(&term.kind, &mut models).map_err(|failure| StartError { name: name(), failure })
                };
                let scorers = terms.iter().enumerate().map(started);
                let scorers = scorers.collect::<Result<Vec<_>, _>>()?;
                let names = distinct(&scorers.iter().map(By::name).collect::<Vec<_>>());
                let built = names.into_iter().zip(scorers).zip(terms);
                let term_of = |((name, by), term): (_, &RewardTerm)| {
                    let (domains, max_error_rate) = (term.domains.clone(), term.max_error_rate);
                    Term { name, by, weight: term.weight, domains, max_error_rate }
                };
                built.map(term_of).collect()
            }
        };
        Ok(Self { terms })
    }

    /// A sum of one reward with weight 1.
    #[cfg(test)]
    pub(super) fn of(reward: Box<dyn Reward>) -> Self {
        let (name, by) = (reward.name().to_owned(), By::Threads(reward));
        Self { terms: vec![Term { name, by, weight: 1.0, domains: Vec::new(), max_error_rate: 0.0 }] }
    }

    /// Unique names of the terms.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.terms.iter().map(|term| term.name.as_str())
    }

    /// Weights of the terms.
    pub fn weights(&self) -> impl Iterator<Item = f64> {
        self.terms.iter().map(|term| term.weight)
    }

    /// Weight of an environment's reward for a turn.
    pub fn weight_of_turns(&self) -> f64 {
        let of_turns = self.terms.iter().filter(|term| matches!(term.by, By::Environment));
        of_turns.map(|term| term.weight).sum()
    }

    /// Fraction of a step's completions on which each term may fail.
    pub fn max_error_rates(&self) -> impl Iterator<Item = f64> {
        self.terms.iter().map(|term| term.max_error_rate)
    }

    /// Scores a case and stores it on the board under its number, along with any batches that it completes.
    pub(super) fn score_on(&self, board: &Mutex<Board>, number: usize, case: Case) {
        let (parts, logged) = self.score_each(&case);
        let complete = {
            let mut board = lock(board);
            board.put(number, Entry { case, parts, logged });
            self.complete_batches(&board, number)
        };
        for (term, reward, batch) in complete {
            let scores = reward.score_many(&completions(&batch));
            lock(board).add(term, &batch, scores);
        }
    }

    /// Outcomes of all cases on the board, ordered by number, once no more cases follow. Scores the remaining
    /// batches; terms of the ranks are scored by `models`. Every rank must call this if there are any.
    pub(super) fn score_rest<M: JointModel>(
        &self,
        mut board: Board,
        models: &mut [M],
    ) -> Result<Vec<Outcome>, M::Error> {
        let mut models = models.iter_mut();
        for (index, term) in self.terms.iter().enumerate() {
            let rest = board.cases(0..board.0.len(), |entry| term.wants(index, entry));
            let scores = match &term.by {
                By::Ranks => models.next().expect("one for each such term").score(&completions(&rest))?,
                By::Threads(reward) if reward.takes() != Takes::Each && !rest.is_empty() => {
                    reward.score_many(&completions(&rest))
                }
                By::Threads(_) | By::Environment => continue,
            };
            board.add(index, &rest, scores);
        }
        Ok(board.0.into_iter().flatten().map(|entry| self.outcome(entry.parts, entry.logged)).collect())
    }

    /// Returns true if some term applies to records of `domain`.
    pub fn scores(&self, domain: &str) -> bool {
        self.terms.iter().any(|term| term.is_for(domain))
    }

    /// The vote of a completion: the answer that the first applicable term extracts from it, or its text.
    pub fn answer(&self, case: &Case) -> String {
        self.extracted(case).unwrap_or_else(|| case.text.clone()).trim().to_owned()
    }

    /// The answer that the first applicable term extracts from a completion, if it does.
    pub fn extracted(&self, case: &Case) -> Option<String> {
        let measuring = self.terms.iter().find(|term| term.is_for(&case.record.domain))?;
        measuring.by.threads()?.extracted(&case.completion())
    }

    /// Scores a case by all terms without batches, up to the first that fails.
    fn score_each(&self, case: &Case) -> (Parts, Vec<Logged>) {
        let mut parts: Parts = self.terms.iter().map(|_| None).collect();
        let mut logged = vec![Logged::default(); self.terms.len()];
        for ((term, part), logged) in self.terms.iter().zip(&mut parts).zip(&mut logged) {
            if !term.is_for(&case.record.domain) {
                continue;
            }
            let score = match &term.by {
                By::Threads(reward) if reward.takes() == Takes::Each => {
                    let scored = reward.score_and_log(&case.record, &case.completion());
                    scored.map(|(score, of_term)| {
                        *logged = of_term;
                        score
                    })
                }
                By::Environment => {
                    let given = case.episode.clone().expect("a config that was checked has an environment");
                    given.map_err(|failure| Error::new(ENVIRONMENT, &case.record, failure))
                }
                By::Threads(_) | By::Ranks => continue,
            };
            let failed = score.is_err();
            *part = Some(score);
            if failed {
                break;
            }
        }
        (parts, logged)
    }

    /// Batches that are complete now that case `number` is on the board. Numbers decide which cases form a
    /// batch, not the order of arrival, which would change the last bits of scores.
    fn complete_batches(&self, board: &Board, number: usize) -> Vec<Complete<'_>> {
        let mut complete = Vec::new();
        for (index, term) in self.terms.iter().enumerate() {
            let Some(reward) = term.by.threads() else { continue };
            let Takes::Batches(size) = reward.takes() else { continue };
            let first = number - number % size;
            let range = first..first + size.get();
            if board.has_all(range.clone()) {
                let batch = board.cases(range, |entry| term.wants(index, entry));
                if !batch.is_empty() {
                    complete.push((index, reward, batch));
                }
            }
        }
        complete
    }

    fn outcome(&self, parts: Parts, logged: Vec<Logged>) -> Outcome {
        let (mut total, mut scores) = (0.0, Vec::with_capacity(parts.len()));
        for (index, (term, part)) in self.terms.iter().zip(parts).enumerate() {
            match part.transpose() {
                Ok(score) => {
                    total += term.weight * score.unwrap_or(0.0);
                    scores.push(score);
                }
                Err(error) => return Outcome::Failed { term: index, error },
            }
        }
        // The config's check ensures that every domain has a term.
        let measured = scores.iter().copied().flatten().next().unwrap_or(0.0);
        Outcome::Scored(Score { total, measured, parts: scores, logged })
    }
}

impl Case {
    fn completion(&self) -> Completion<'_> {
        Completion { text: &self.text, tokens: Some(self.tokens), finished: self.finished }
    }
}

impl Term {
    fn is_for(&self, domain: &str) -> bool {
        self.domains.is_empty() || self.domains.iter().any(|it| it == domain)
    }

    /// Returns true if this term, with this index, has yet to score the case.
    fn wants(&self, index: usize, entry: &Entry) -> bool {
        entry.parts[index].is_none() && self.is_for(&entry.case.record.domain)
    }
}

impl By {
    /// `models` yields the next reward models on the host, `None` for one that the ranks hold.
    fn new(kind: &RewardKind, models: &mut impl Iterator<Item = Option<OpenModel>>) -> Result<Self, Failure> {
        match kind {
            RewardKind::Environment(_) => Ok(Self::Environment),
            RewardKind::Model(config) => Ok(match models.next().flatten() {
                Some(opened) => Self::Threads(Box::new(Model::new(config, opened)?)),
                None => Self::Ranks,
            }),
            kind => build(kind).map(Self::Threads),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Threads(reward) => reward.name(),
            Self::Ranks => model::NAME,
            Self::Environment => ENVIRONMENT,
        }
    }

    fn threads(&self) -> Option<&dyn Reward> {
        match self {
            Self::Threads(reward) => Some(&**reward),
            Self::Ranks | Self::Environment => None,
        }
    }
}

/// Cases in the form that rewards take.
fn completions(cases: &[(usize, Case)]) -> Vec<(&Record, Completion<'_>)> {
    cases.iter().map(|(_, case)| (&*case.record, case.completion())).collect()
}

/// Index of a term, its reward, and a batch of cases with their numbers.
type Complete<'a> = (usize, &'a dyn Reward, Vec<(usize, Case)>);

/// Result of each term for a case; `None` if it is pending or the term does not apply.
type Parts = Vec<Option<Result<f64, Error>>>;

/// A case with its results so far.
struct Entry {
    case: Case,
    parts: Parts,
    /// Metrics and columns that each term logged.
    logged: Vec<Logged>,
}

/// All cases so far, indexed by number.
#[derive(Default)]
pub(super) struct Board(Vec<Option<Entry>>);

impl Board {
    fn put(&mut self, number: usize, entry: Entry) {
        let length = self.0.len().max(number + 1);
        self.0.resize_with(length, || None);
        self.0[number] = Some(entry);
    }

    fn has_all(&self, range: Range<usize>) -> bool {
        self.0.get(range).is_some_and(|part| part.iter().all(Option::is_some))
    }

    /// Cases in a range that are present and `wanted`, with their numbers.
    fn cases(&self, range: Range<usize>, wanted: impl Fn(&Entry) -> bool) -> Vec<(usize, Case)> {
        let there = range.filter_map(|number| Some((number, self.0[number].as_ref()?)));
        there.filter(|(_, it)| wanted(it)).map(|(number, it)| (number, it.case.clone())).collect()
    }

    /// Stores the scores of `cases` by `term`.
    fn add(&mut self, term: usize, cases: &[(usize, Case)], scores: Vec<Result<f64, Error>>) {
        for ((number, _), score) in cases.iter().zip(scores) {
            self.0[*number].as_mut().expect("it was there").parts[term] = Some(score);
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::super::{Scorer, scorer::tests::no_models};
    use super::*;
    use anyroll_config::{LengthConfig, NoFields, RegexConfig, RewardTerm};

    fn term(kind: RewardKind, weight: f64) -> RewardTerm {
        RewardTerm { kind, weight, ..RewardTerm::of(RewardKind::Exact(NoFields {})) }
    }

    fn record(domain: &str) -> Record {
        Record { id: "1".into(), answer: "12".into(), domain: domain.into(), ..Record::default() }
    }

    fn sum(config: &RewardConfig) -> RewardSum {
        RewardSum::new(config, Vec::new()).unwrap()
    }

    fn scorer(sum: RewardSum, workers: usize) -> Scorer {
        Scorer::start(Arc::new(sum), NonZeroUsize::new(workers).unwrap()).unwrap()
    }

    fn score(scorer: &Scorer, case: Case) -> Outcome {
        let scoring = scorer.begin();
        scoring.hand_over(0, case);
        scoring.finish(&mut no_models()).unwrap().pop().unwrap()
    }

    fn case(record: &Record, text: &str) -> Case {
        let (record, text) = (Arc::new(record.clone()), text.to_owned());
        Case { record, text, tokens: 8, finished: true, episode: None }
    }

    #[test]
    fn sums_with_weights_the_terms_of_its_domain() {
        let regex = |pattern: &str| RewardKind::Regex(RegexConfig { pattern: pattern.to_owned() });
        let length = RewardKind::Length(LengthConfig { max_tokens: 10, buffer_tokens: 4 });
        let only = |domain: &str, term| RewardTerm { domains: vec![domain.to_owned()], ..term };
        let sum = sum(&RewardConfig::Sum(vec![
            only("sums", term(RewardKind::Exact(NoFields {}), 1.0)),
            term(regex("[0-9]+"), 0.5),
            only("words", term(regex("[a-z]+"), 0.25)),
            term(length, 2.0),
        ]));
        assert_eq!(sum.names().collect::<Vec<_>>(), ["exact", "regex", "regex_2", "length"]);
        let scorer = scorer(sum, 1);
        let check = |domain: &str, text: &str, total, measured, parts: [Option<f64>; 4]| {
            let record = record(domain);
            let Outcome::Scored(score) = score(&scorer, case(&record, text)) else { panic!("{text}") };
            let logged = vec![Logged::default(); parts.len()];
            assert_eq!(score, Score { total, measured, parts: parts.to_vec(), logged }, "{domain} {text}");
        };
        check("sums", "12", 0.5, 1.0, [Some(1.0), Some(1.0), None, Some(-0.5)]);
        check("words", "ab", -0.75, 0.0, [None, Some(0.0), Some(1.0), Some(-0.5)]);
    }

    #[test]
    fn a_term_that_fails_is_named() {
        let sum = sum(&RewardConfig::Sum(vec![
            term(RewardKind::Exact(NoFields {}), 1.0),
            term(RewardKind::Choice(NoFields {}), 1.0),
        ]));
        let record = record("");
        let Outcome::Failed { term, error } = score(&scorer(sum, 1), case(&record, "12")) else { panic!() };
        assert_eq!((term, error.to_string().as_str()), (1, "the reward `choice` failed for record 1"));
    }

    /// Scores a completion by the size of its batch, and records the batches.
    struct Crowd {
        size: NonZeroUsize,
        batches: Mutex<Vec<Vec<String>>>,
    }

    impl Reward for Arc<Crowd> {
        fn name(&self) -> &'static str {
            "crowd"
        }

        fn takes(&self) -> Takes {
            Takes::Batches(self.size)
        }

        fn score(&self, record: &Record, _: &Completion) -> Result<f64, Error> {
            Err(Error::new(self.name(), record, "it takes several"))
        }

        fn score_many(&self, cases: &[(&Record, Completion)]) -> Vec<Result<f64, Error>> {
            lock(&self.batches).push(cases.iter().map(|(record, _)| record.id.clone()).collect());
            cases.iter().map(|_| Ok(cases.len() as f64)).collect()
        }
    }

    #[test]
    fn batches_follow_from_the_cases_numbers() {
        let size = NonZeroUsize::new(4).unwrap();
        for (domains, missing, expected) in [
            (vec![], None, vec!["0 1 2 3", "4 5 6 7", "8 9"]),
            (vec![], Some(5), vec!["0 1 2 3", "4 6 7 8 9"]),
            (vec!["even".to_owned()], None, vec!["0 2", "4 6", "8"]),
        ] {
            let batches = Arc::new(Crowd { size, batches: Mutex::new(Vec::new()) });
            let crowd = Term {
                name: "crowd".into(),
                by: By::Threads(Box::new(batches.clone())),
                weight: 0.5,
                domains,
                max_error_rate: 0.0,
            };
            let mut sum = sum(&RewardConfig::Exact);
            sum.terms.push(crowd);
            let domain = |n: usize| if n.is_multiple_of(2) { "even" } else { "odd" };
            let record = |n: usize| Record { id: n.to_string(), ..record(domain(n)) };
            let records: Vec<Record> = (0..10).map(record).collect();
            let scorer = scorer(sum, 3);
            let scoring = scorer.begin();
            let numbers = [7, 3, 9, 0, 1, 2, 8, 5, 4, 6];
            for number in numbers.into_iter().filter(|number| Some(*number) != missing) {
                scoring.hand_over(number, case(&records[number], "12"));
            }
            let outcomes = scoring.finish(&mut no_models()).unwrap();
            let mut found: Vec<String> = lock(&batches.batches).iter().map(|ids| ids.join(" ")).collect();
            found.sort();
            assert_eq!(found, expected);
            let numbers = (0..10).filter(|number| Some(*number) != missing);
            for (number, outcome) in numbers.zip(outcomes.iter()) {
                let Outcome::Scored(score) = outcome else { panic!("{outcome:?}") };
                let batch = found.iter().find(|ids| ids.split(' ').any(|id| id == number.to_string()));
                let crowd = batch.map(|ids| ids.split(' ').count() as f64);
                let total = 1.0 + 0.5 * crowd.unwrap_or(0.0);
                assert_eq!((score.total, score.measured), (total, 1.0), "{number}");
                assert_eq!(score.parts, [Some(1.0), crowd], "{number}");
            }
        }
    }
}
