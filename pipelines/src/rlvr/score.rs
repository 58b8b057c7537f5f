//! What the samples of a step earn.

use super::{Setup, rollout::Sample};
use crate::{
    Result,
    algorithm::fill_missing,
    config::RewardConfig,
    data::Record,
    error_chain::one_line,
    metrics::Metrics,
    reward::{Outcome, coin_flips},
    train::Exchange,
};

/// What all ranks know of the step's samples, in the step's order.
pub struct Scored {
    /// What each earned.
    pub rewards: Vec<f64>,
    /// Tokens of each completion.
    pub lengths: Vec<f64>,
    /// 1 for a completion that ended by itself, else 0.
    pub finished: Vec<f64>,
    /// Whether some rank was asked to stop.
    pub stop: bool,
    /// Of the reward's terms, and how many samples were left out.
    pub terms: Metrics,
}

/// What this rank's samples earned.
struct Own {
    rewards: Vec<f64>,
    /// Sums of each term over the samples that were scored.
    sums: Vec<f64>,
    dropped: usize,
}

impl Setup {
    /// Scores this rank's samples and learns the others' scores.
    pub(super) fn score(
        &self,
        exchange: &Exchange,
        records: &[Record],
        samples: &[Sample],
        step: u64,
        stop: bool,
    ) -> Result<Scored> {
        let count = samples.len();
        let own = self.score_own(exchange.rank(), records, samples)?;
        let mut values = own.rewards;
        values.extend(samples.iter().map(|sample| sample.completion_len() as f64));
        values.extend(samples.iter().map(|sample| f64::from(u8::from(sample.finished))));
        values.push(f64::from(u8::from(stop)));
        values.push(own.dropped as f64);
        values.extend(own.sums);
        let gathered = exchange.gather(&values)?;
        let part = |index: usize| {
            let of_ranks: Vec<Vec<f64>> =
                gathered.iter().map(|values| values[index * count..(index + 1) * count].to_vec()).collect();
            self.share.ordered(&of_ranks)
        };
        let mut rewards = part(0);
        if self.rlvr.reward == RewardConfig::Random {
            let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
            rewards = coin_flips(mean, self.seed, step, 0, rewards.len());
        }
        let sum = |index: usize| gathered.iter().map(|values| values[3 * count + index]).sum::<f64>();
        let mut terms = Metrics::new();
        if matches!(self.rlvr.reward, RewardConfig::Sum(_)) {
            let scored = rewards.len() as f64 - sum(1);
            for (index, name) in self.reward.names().enumerate() {
                terms.insert(format!("reward/{name}/mean"), sum(2 + index) / scored);
            }
            terms.insert("reward/errors", sum(1));
        }
        Ok(Scored { rewards, lengths: part(1), finished: part(2), stop: sum(0) > 0.0, terms })
    }

    fn score_own(&self, rank: usize, records: &[Record], samples: &[Sample]) -> Result<Own> {
        let group_size = self.rlvr.group_size;
        let mut totals = Vec::with_capacity(samples.len());
        let mut sums = vec![0.0; self.reward.names().count()];
        let mut dropped = 0;
        let mut failure = None;
        for (number, sample) in self.share.samples_of(rank).zip(samples) {
            let record = &records[number / group_size];
            match self.reward.score(record, &sample.completion(&self.text(sample)?))? {
                Outcome::Scored { total, parts } => {
                    sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
                    totals.push(Some(total));
                }
                Outcome::Dropped(error) => {
                    tracing::warn!(error = one_line(&error), "a sample is left out of the step");
                    dropped += 1;
                    totals.push(None);
                    failure = Some(error);
                }
            }
        }
        match (fill_missing(&totals, group_size), failure) {
            (Some(rewards), _) => Ok(Own { rewards, sums, dropped }),
            (None, Some(error)) => Err(error.into()),
            (None, None) => Ok(Own { rewards: Vec::new(), sums, dropped }),
        }
    }
}
