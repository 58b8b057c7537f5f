//! Scoring of completions, in training and in evaluations.

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use anyroll_data::{Record, Tokenizer};
use anyroll_reward::{Case, Outcome, RewardSum, Score, Scorer, Scoring};

use super::reward_model::ShardedModel;
use crate::{
    Error, Result,
    error_rates::check_error_rates,
    inference::{Episode, Sample},
    samples::Columns,
    train::Exchange,
};

/// Time that completions have to be scored once the run is to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(4);

/// Scores completions, on its own threads and with the models that the ranks hold together.
pub struct Grader {
    /// The sum of reward terms of a completion.
    pub sum: Arc<RewardSum>,
    /// The threads.
    pub scorer: Scorer,
    /// The models that the ranks hold together, in the order of the reward's terms.
    pub models: Vec<ShardedModel>,
    /// Tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Set once the run is to stop.
    pub stop: Arc<AtomicBool>,
}

impl Grader {
    /// Creates a set of completions to score together, initially empty.
    pub fn begin(&self) -> Scoring {
        self.scorer.begin()
    }

    /// Returns true if the ranks hold models that score.
    pub fn has_models(&self) -> bool {
        !self.models.is_empty()
    }

    /// A completion as input of rewards.
    pub fn case(&self, record: &Arc<Record>, sample: &Sample) -> Case {
        case(&self.tokenizer, record, sample)
    }

    /// Columns that reward functions logged for a completion; none if a term failed.
    pub fn columns(&self, outcome: &Outcome) -> Columns {
        match outcome {
            Outcome::Scored(score) => self.columns_of(score),
            Outcome::Failed { .. } => Columns::new(),
        }
    }

    /// Columns that reward functions logged with a score.
    pub fn columns_of(&self, score: &Score) -> Columns {
        let terms = self.sum.names().zip(&score.logged).filter(|(_, logged)| !logged.columns.is_empty());
        terms.map(|(name, logged)| (name.to_owned(), logged.columns.clone())).collect()
    }

    /// Waits for the outcomes of all completions handed over. Every rank must call this.
    ///
    /// # Errors
    /// [`Error::Unscored`] on all ranks if the run is to stop and a rank's completions are not scored in time.
    pub fn finish(&mut self, exchange: &Exchange, scoring: Scoring) -> Result<Vec<Outcome>> {
        let is_scored = scoring.wait(&self.stop, STOP_TIMEOUT);
        if exchange.any(!is_scored)? {
            return Err(Error::Unscored);
        }
        scoring.finish(&mut self.models)
    }

    /// Returns an error if a term failed on more of `completions` than allowed; `failed` has the counts over all
    /// ranks.
    pub fn check_error_rates(
        &self,
        failed: &[f64],
        completions: usize,
        outcomes: Vec<Outcome>,
    ) -> Result<()> {
        let own = outcomes.into_iter().filter_map(|outcome| match outcome {
            Outcome::Failed { term, error } => Some((term, error)),
            Outcome::Scored(_) => None,
        });
        let terms = self.sum.names().zip(self.sum.max_error_rates()).zip(failed);
        let terms = terms.map(|((name, max_error_rate), &failed)| (name, max_error_rate, failed));
        check_error_rates(terms, completions, own.collect())
    }
}

/// A completion as input of rewards; with several turns the last one.
pub fn case(tokenizer: &Tokenizer, record: &Arc<Record>, sample: &Sample) -> Case {
    Case {
        record: record.clone(),
        text: sample.text(tokenizer),
        tokens: sample.completion_len(),
        finished: sample.finished(),
        episode: sample.episode.as_ref().map(Episode::reward),
    }
}
