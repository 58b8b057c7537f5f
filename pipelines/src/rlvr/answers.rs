//! Answers of a policy to prompts, scored: a greedy completion and samples of each. The common part of a run's
//! evaluation and of `anyroll evaluate`.

use std::{ops::ControlFlow, sync::Arc};

use anyroll_algorithm::{majority, pass_at_k};
use anyroll_config::error_chain::one_line;
use anyroll_data::Record;
use anyroll_reward::{Outcome, Score};
use anyroll_strategy::Weights;

use super::{grader::Grader, rollout::Engine, terms::TermSums};
use crate::{
    Result,
    inference::{Sample, SampleRequest, Sampling},
    train::{Exchange, Purpose, reduced, sample_seed},
};

reduced! {
    /// Statistics of an evaluation's completions.
    struct Totals {
        /// Number of all completions.
        sum completions: u64,
        /// Statistics of each term of the reward.
        nested terms: Vec<TermSums>,
    }
}

/// Sampling of the answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Asking {
    /// Completions of each prompt, in addition to the greedy one.
    pub samples: usize,
    /// Sampling parameters of these.
    pub how: Sampling,
    /// Most tokens of a completion, including its end.
    pub max_new_tokens: usize,
    /// Seed; a completion depends on it, the index of its prompt and its own index.
    pub seed: u64,
}

/// Completions with their scores.
#[derive(Default)]
pub struct Measured {
    /// The completions.
    pub samples: Vec<Sample>,
    /// Score of each, or the failure of its reward.
    pub scores: Vec<Result<Score, String>>,
    /// Statistics of each term of the reward, over the completions of all ranks.
    pub terms: Vec<TermSums>,
}

/// Scored answers to prompts.
pub struct Answers {
    /// The greedy completion of each prompt.
    pub greedy: Measured,
    /// The samples, prompt after prompt.
    pub drawn: Measured,
}

/// The policy, sampler and rewards that answer prompts.
pub struct Answering<'a> {
    /// The engine.
    pub engine: &'a Engine,
    /// The policy's weights.
    pub weights: &'a Weights,
    /// The scoring of completions.
    pub grader: &'a mut Grader,
    /// The ranks.
    pub exchange: &'a Exchange,
    /// Version of the weights.
    pub version: u64,
    /// Called with the number of completions that have just ended.
    pub progress: &'a dyn Fn(usize),
}

impl Answering<'_> {
    /// Answers and scores `records`, of which the first has index `first` among the prompts of all ranks. Every rank
    /// must call this.
    pub fn answers(&mut self, records: &[Arc<Record>], first: usize, asking: &Asking) -> Result<Answers> {
        let Asking { samples, how, max_new_tokens, seed } = *asking;
        let greedy = records.iter().map(|record| {
            let sample = Sample::begin(self.grader.tokenizer.encode_prompt(record)?);
            Ok((record, SampleRequest { sample, seed: 0, how: Sampling::GREEDY, max_new_tokens }))
        });
        let greedy = greedy.collect::<Result<Vec<_>>>()?;
        let best = self.measure(greedy.clone())?;
        if samples == 0 {
            return Ok(Answers { greedy: best, drawn: Measured::default() });
        }
        let mut asked = Vec::with_capacity(records.len() * samples);
        for (index, (record, greedy)) in greedy.iter().enumerate() {
            // Every evaluation has the same random numbers, so that only the policy changes the result.
            let seed = |sample| sample_seed(Purpose::Evaluation, seed, 0, (first + index) * samples + sample);
            for sample in 0..samples {
                asked.push((*record, SampleRequest { seed: seed(sample), how, ..greedy.clone() }));
            }
        }
        Ok(Answers { greedy: best, drawn: self.measure(asked)? })
    }

    /// Samples, and scores completions in the meantime. Every rank must call this.
    fn measure(&mut self, asked: Vec<(&Arc<Record>, SampleRequest)>) -> Result<Measured> {
        let Self { engine, weights, grader, exchange, version, progress } = self;
        let (records, asked): (Vec<&Arc<Record>>, Vec<SampleRequest>) = asked.into_iter().unzip();
        let scoring = grader.begin();
        let sampled =
            engine.sample(weights, *version, &asked, records.iter().copied(), |samples, ended| {
                for &index in ended {
                    scoring.hand_over(index, grader.case(records[index], &samples[index]));
                }
                progress(ended.len());
                ControlFlow::Continue(())
            })?;
        let outcomes = grader.finish(exchange, scoring)?;
        let scores = outcomes.iter().map(|outcome| match outcome {
            Outcome::Scored(score) => Ok(score.clone()),
            Outcome::Failed { error, .. } => Err(one_line(error)),
        });
        let scores = scores.collect();
        let terms = TermSums::of(grader.sum.names().len(), outcomes.iter());
        let Totals { completions, terms } =
            exchange.reduce(&Totals { completions: asked.len() as u64, terms })?;
        let failed: Vec<f64> = terms.iter().map(|sums| sums.failed).collect();
        grader.check_error_rates(&failed, completions as usize, outcomes)?;
        Ok(Measured { samples: sampled.samples, scores, terms })
    }
}

/// Verdicts on a prompt's completions.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdicts {
    /// Measure of the greedy completion.
    pub greedy: f64,
    /// Vote of each sample, and true if it is right.
    pub votes: Vec<(String, bool)>,
}

impl Verdicts {
    /// Returns the number of right samples.
    pub fn correct(&self) -> usize {
        self.votes.iter().filter(|(_, right)| *right).count()
    }

    /// Returns the probability that one of `k` samples is right: [`pass_at_k`].
    pub fn pass_at(&self, k: usize) -> f64 {
        pass_at_k(self.votes.len(), self.correct(), k)
    }

    /// Returns the probability that the most frequent answer is right: [`majority`].
    pub fn majority(&self) -> f64 {
        majority(&self.votes)
    }
}

impl Answers {
    /// Verdicts on the completions of prompt `index`, which is that of `record`; `None` if a completion could not be
    /// scored. A completion is right if its measure is 1 or above.
    pub fn verdicts(
        &self,
        index: usize,
        record: &Arc<Record>,
        samples: usize,
        grader: &Grader,
    ) -> Option<Verdicts> {
        let measure = |score: &Result<Score, String>| score.as_ref().ok().map(|score| score.measured);
        let range = index * samples..(index + 1) * samples;
        let values: Option<Vec<f64>> = self.drawn.scores[range.clone()].iter().map(measure).collect();
        let answers =
            self.drawn.samples[range].iter().map(|sample| grader.sum.answer(&grader.case(record, sample)));
        let right = values?.into_iter().map(|value| value >= 1.0);
        Some(Verdicts { greedy: measure(&self.greedy.scores[index])?, votes: answers.zip(right).collect() })
    }
}
