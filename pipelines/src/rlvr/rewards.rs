//! Rewards of sampled completions: [`Rewards`] scores them, and returns rows of all ranks.

use std::sync::Arc;

use anyroll_algorithm::{decoupled, fill_missing};
use anyroll_config::{Advantage, GdpoConfig};
use anyroll_reward::{Outcome, Score};
use serde::{Deserialize, Serialize};

use super::{
    Task,
    advantages::{fill_turns, of_turns},
    control::deal,
    grader::Grader,
    rollout::{Group, Staleness},
    rows::{Row, Scored},
    terms::TermSums,
};
use crate::{
    Result,
    inference::Sample,
    metrics::Metrics,
    train::{Exchange, Reduce, Share},
};

/// Scores the completions of steps.
pub struct Rewards {
    /// The scoring of completions.
    pub grader: Grader,
    /// The run's options.
    pub task: Arc<Task>,
}

/// A sample in a rank's report to the others.
#[derive(Debug, Serialize, Deserialize)]
struct Report {
    /// Batch of its prompt, and index of the prompt in the batch.
    prompt: (u64, usize),
    /// The reward; `None` if it could not be scored, or is not finite.
    reward: Option<f64>,
    /// The measure of evaluations.
    measured: Option<f64>,
    /// Score of each term; `None` if the term does not apply or failed.
    terms: Vec<Option<f64>>,
    /// Reward of each turn, NaN without a score; empty if rewards are per episode.
    turn_rewards: Vec<f64>,
    tokens: usize,
    turns: usize,
    finished: bool,
}

/// A rank's report on a batch.
#[derive(Serialize, Deserialize)]
struct RankReport {
    samples: Vec<Report>,
    /// Rewards of the greedy completions of the rank's prompts, if there are any.
    greedy: Vec<Option<f64>>,
    terms: Vec<TermSums>,
    staleness: Option<Staleness>,
    stop: bool,
}

impl Rewards {
    /// Returns the scored samples of all ranks, from this rank's groups and their `outcomes`. Outcomes of samples precede
    /// those of greedy completions, if there are any, which are not trained on. `batch` is the index of the batch.
    pub fn score(
        &self,
        exchange: &Exchange,
        taken: Vec<Group>,
        outcomes: Vec<Outcome>,
        staleness: Option<Staleness>,
        batch: u64,
        stop: bool,
    ) -> Result<Scored> {
        let group_size = self.task.share.group_size;
        let own: Vec<usize> = self.task.share.prompts_of(exchange.rank()).collect();
        let prompt = |group: &Group| {
            let per_batch = own.len() as u64;
            (group.number / per_batch, own[(group.number % per_batch) as usize])
        };
        let prompts: Vec<(u64, usize)> = taken.iter().map(prompt).collect();
        let samples = taken.into_iter().flat_map(|group| group.samples.into_iter().take(group_size));
        let samples: Vec<Sample> = samples.collect();
        let (of_samples, of_greedy) = outcomes.split_at(samples.len());
        let reported = samples.iter().zip(of_samples).enumerate();
        let report = |(index, (sample, outcome))| self.report(prompts[index / group_size], sample, outcome);
        let columns = of_samples.iter().map(|outcome| self.grader.columns(outcome)).collect();
        let greedy_failures = of_greedy.iter().filter(|outcome| matches!(outcome, Outcome::Failed { .. }));
        let own = RankReport {
            samples: reported.map(report).collect(),
            greedy: of_greedy.iter().map(|outcome| value(outcome, |score| score.total)).collect(),
            terms: TermSums::of(self.grader.sum.names().len(), of_samples.iter().chain(greedy_failures)),
            staleness,
            stop,
        };
        let (mut reports, mut greedy) = (Vec::new(), Vec::new());
        let (mut terms, mut staleness, mut stop) = (Vec::<TermSums>::new(), None, false);
        for rank in exchange.gather(&own)? {
            reports.push(rank.samples);
            greedy.push(rank.greedy);
            terms.reduce(rank.terms);
            Reduce::reduce(&mut staleness, rank.staleness);
            stop |= rank.stop;
        }
        let greedy = match of_greedy {
            [] => Vec::new(),
            _ => Share { group_size: 1, ..self.task.share }.ordered(greedy),
        };
        let failed: Vec<f64> = terms.iter().map(|sums| sums.failed).collect();
        self.grader.check_error_rates(&failed, self.task.share.samples() + greedy.len(), outcomes)?;
        let mut rows = self.rows(self.task.share.ordered(reports), &greedy);
        if self.task.config.scoring.random {
            deal(&mut rows, self.task.seed, batch);
        }
        let greedy = fill(&greedy, 1);
        let selection = Metrics::new();
        Ok(Scored { rows, greedy, own: samples, columns, terms, staleness, batches: 1, selection, stop })
    }

    fn report(&self, prompt: (u64, usize), sample: &Sample, outcome: &Outcome) -> Report {
        let algorithm = &self.task.config.algorithm;
        let reward = value(outcome, |score| score.total);
        let terms = 0..self.grader.sum.names().len();
        Report {
            prompt,
            reward,
            measured: value(outcome, |score| score.measured),
            terms: terms.map(|term| value(outcome, |score| score.parts[term].unwrap_or(f64::NAN))).collect(),
            turn_rewards: match algorithm.credit.gamma() {
                Some(_) => of_turns(sample, reward, self.grader.sum.weight_of_turns()),
                None => Vec::new(),
            },
            tokens: sample.completion_len(),
            turns: sample.turns().len(),
            finished: sample.finished(),
        }
    }

    /// Rows of all ranks' samples, in the step's order.
    fn rows(&self, reports: Vec<Report>, greedy: &[Option<f64>]) -> Vec<Row> {
        let group_size = self.task.config.group_size;
        let column = |of: fn(&Report) -> Option<f64>| {
            fill(&reports.iter().map(of).collect::<Vec<Option<f64>>>(), group_size)
        };
        let (rewards, measured) = (column(|report| report.reward), column(|report| report.measured));
        let decoupled = self.decoupled(&reports);
        let mut turn_rewards: Vec<Vec<f64>> =
            reports.iter().map(|report| report.turn_rewards.clone()).collect();
        if self.task.config.algorithm.credit.gamma().is_some() {
            fill_turns(&mut turn_rewards, group_size);
        }
        let row = |(index, (report, turn_rewards)): (usize, (Report, Vec<f64>))| {
            let compares = greedy.get(index / group_size).is_none_or(Option::is_some);
            let ended = report.finished || !self.task.config.selection.leave_out_cut;
            Row {
                prompt: report.prompt,
                terms: report.terms,
                reward: rewards[index],
                measured: measured[index],
                decoupled: decoupled.get(index).copied(),
                turn_rewards,
                tokens: report.tokens,
                turns: report.turns,
                finished: report.finished,
                trained: report.reward.is_some() && compares && ended,
            }
        };
        reports.into_iter().zip(turn_rewards).enumerate().map(row).collect()
    }

    /// Sums of separately normalized terms, if advantages are computed from these. A missing score of a term counts
    /// as the mean of the sample's group.
    fn decoupled(&self, reports: &[Report]) -> Vec<f64> {
        let Advantage::Gdpo(GdpoConfig { eps }) = self.task.config.algorithm.advantage else {
            return Vec::new();
        };
        let group_size = self.task.config.group_size;
        let of_term = |(term, weight): (usize, f64)| {
            let scores: Vec<Option<f64>> = reports.iter().map(|report| report.terms[term]).collect();
            (weight, fill(&scores, group_size))
        };
        let terms: Vec<(f64, Vec<f64>)> = self.grader.sum.weights().enumerate().map(of_term).collect();
        decoupled(&terms, group_size, eps)
    }
}

/// A finite number of a score; `None` without one.
fn value(outcome: &Outcome, of: impl Fn(&Score) -> f64) -> Option<f64> {
    match outcome {
        Outcome::Scored(score) => Some(of(score)).filter(|value| value.is_finite()),
        Outcome::Failed { .. } => None,
    }
}

/// Replaces missing values as [`fill_missing`] does, or by 0 if there are none.
pub fn fill(values: &[Option<f64>], group_size: usize) -> Vec<f64> {
    fill_missing(values, group_size).unwrap_or_else(|| vec![0.0; values.len()])
}
