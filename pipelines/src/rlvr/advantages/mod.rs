//! Advantages of this rank's tokens, from scored rows.
//!
//! [`Advantages::of_tokens`] has the order: rewards minus KL, the estimator of `algorithm.advantage` over samples,
//! turns or tokens, KL in advantages, whitening, clipping. The estimators are pure functions in
//! [`anyroll_algorithm`].

mod kl;
mod moments;
mod turns;

use std::iter::repeat_n;

use anyroll_algorithm::{Earned, Moments, gae, normalize, returns};
use anyroll_config::{Advantage, AlgorithmConfig, KlTerm, Over, RewardNormConfig};

pub use kl::SampleKl;
pub use moments::{moments, spreads};
pub use turns::{fill_turns, fitted, of_turns};

use super::rows::Scored;
use crate::{
    Result,
    inference::Sample,
    train::{Exchange, Share},
};

/// Options of the advantages.
pub struct Advantages<'a> {
    /// Config of the formulas.
    pub algorithm: &'a AlgorithmConfig,
    /// Division of samples among ranks.
    pub share: &'a Share,
    /// The ranks.
    pub exchange: &'a Exchange,
}

/// Inputs of the advantages.
pub struct Evidence<'a> {
    /// Samples of all ranks.
    pub scored: &'a Scored,
    /// Shaped rewards of the samples: see [`shaped_rewards`].
    pub rewards: Vec<f64>,
    /// KL divergences from the reference, unless they go into the loss.
    pub kl: Option<&'a SampleKl>,
    /// The critic's values of this rank's tokens.
    pub values: Option<&'a [f64]>,
}

/// Advantages of a rank's tokens, sample after sample.
pub struct TokenAdvantages {
    /// Advantages.
    pub of_tokens: Vec<f64>,
    /// Returns, the targets of values; empty without values.
    pub returns: Vec<f64>,
}

/// Returns the rewards of all samples, normalized and clamped. Also returns the moments of all steps' rewards, if
/// these normalize.
pub fn shaped_rewards(
    algorithm: &AlgorithmConfig,
    group_size: usize,
    scored: &Scored,
    running: Option<Moments>,
) -> (Vec<f64>, Option<Moments>) {
    let mut rewards = scored.column(|row| row.decoupled.unwrap_or(row.reward));
    let mut moments = running.unwrap_or_default();
    normalize(algorithm.reward_norm, &mut rewards, group_size, &mut moments);
    clip(&mut rewards, algorithm.reward_clip);
    let RewardNormConfig { mean, std } = algorithm.reward_norm;
    (rewards, [mean, std].contains(&Over::Running).then_some(moments))
}

impl Advantages<'_> {
    /// Returns the advantages of this rank's tokens. Every rank must call this.
    pub fn of_tokens(&self, evidence: &Evidence) -> Result<TokenAdvantages> {
        let algorithm = self.algorithm;
        let Evidence { scored, kl, values, .. } = *evidence;
        let by_turns = algorithm.credit.gamma();
        let (off_reward, off_advantage) = match algorithm.kl_in {
            KlTerm::Advantage => (None, kl),
            KlTerm::Reward(_) | KlTerm::Loss(_) => (kl, None),
        };
        let mut of_tokens: Vec<f64> = match (algorithm.advantage, values) {
            // Only here do tokens of a turn differ.
            (Advantage::Gae(config), Some(values)) => {
                let (rewards, lengths) = (self.token_rewards(evidence, off_reward), lengths(&scored.own));
                let of_samples = sequences(&rewards, &lengths).zip(sequences(values, &lengths));
                let of_sample = |((rewards, values), sample)| {
                    gae(config.lambda, &self.gammas(sample, config.gamma), rewards, values)
                };
                of_samples.zip(&scored.own).flat_map(of_sample).collect()
            }
            (Advantage::Reinforce(config), _)
                if config.gamma < 1.0 || off_reward.is_some() || by_turns.is_some() =>
            {
                let (rewards, lengths) = (self.token_rewards(evidence, off_reward), lengths(&scored.own));
                sequences(&rewards, &lengths)
                    .zip(&scored.own)
                    .flat_map(|(rewards, sample)| returns(rewards, &self.gammas(sample, config.gamma)))
                    .collect()
            }
            _ => match by_turns {
                Some(gamma) => turns::over_turns(self, scored, gamma, off_reward),
                None => self.over_samples(evidence, off_reward),
            },
        };
        let add = |values: &[f64]| of_tokens.iter().zip(values).map(|(own, value)| own + value).collect();
        let returns = values.map_or(Vec::new(), add);
        // Only a token's own divergence is subtracted, not that of later tokens, since values do not predict it.
        if let Some(kl) = off_advantage {
            of_tokens.iter_mut().zip(&kl.of_tokens).for_each(|(token, of)| *token -= kl.coef * of);
        }
        if algorithm.whiten_advantages {
            let trained = of_tokens.iter().zip(self.trained_tokens(scored));
            let seen: Vec<f64> = trained.filter(|(_, trained)| *trained).map(|(token, _)| *token).collect();
            moments(self.exchange, &seen)?.whiten(&mut of_tokens);
        }
        clip(&mut of_tokens, algorithm.advantage_clip);
        Ok(TokenAdvantages { of_tokens, returns })
    }

    /// True for each of this rank's trained tokens.
    pub fn trained_tokens(&self, scored: &Scored) -> Vec<bool> {
        let of_sample =
            |(row, sample): (usize, &Sample)| repeat_n(scored.rows[row].trained, sample.completion_len());
        scored.of_rank(self.share, self.exchange.rank()).flat_map(of_sample).collect()
    }

    /// One advantage per sample.
    fn over_samples(&self, evidence: &Evidence, kl: Option<&SampleKl>) -> Vec<f64> {
        let scored = evidence.scored;
        let mut rewards = evidence.rewards.clone();
        if let Some(kl) = kl {
            rewards.iter_mut().zip(&kl.rows).for_each(|(reward, row)| *reward -= kl.coef * row.of_sample);
        }
        let mut greedy = scored.greedy.clone();
        clip(&mut greedy, self.algorithm.reward_clip);
        let (lengths, group_size) = (scored.lengths(), self.share.group_size);
        let earned = Earned { rewards: &rewards, lengths: &lengths, greedy: &greedy, group_size };
        let of_samples = self.algorithm.advantage.formula().of_samples(&earned);
        let of_sample = |(row, sample): (usize, &Sample)| repeat_n(of_samples[row], sample.completion_len());
        scored.of_rank(self.share, self.exchange.rank()).flat_map(of_sample).collect()
    }

    /// The reward of each of this rank's tokens, minus its KL divergence. A sample's reward is at its last token, and
    /// a turn's reward is at the turn's last token.
    fn token_rewards(&self, evidence: &Evidence, kl: Option<&SampleKl>) -> Vec<f64> {
        let scored = evidence.scored;
        let tokens = scored.own.iter().map(Sample::completion_len).sum();
        let penalties = |kl: &SampleKl| kl.of_tokens.iter().map(|of_token| -kl.coef * of_token).collect();
        let mut of_tokens = kl.map_or(vec![0.0; tokens], penalties);
        let mut end = 0;
        for (row, sample) in scored.of_rank(self.share, self.exchange.rank()) {
            let earned: Vec<(usize, f64)> = match self.algorithm.credit.gamma() {
                None => vec![(sample.completion_len(), evidence.rewards[row])],
                Some(_) => {
                    turns::lengths(sample).zip(scored.rows[row].turn_rewards.iter().copied()).collect()
                }
            };
            for (length, reward) in earned {
                end += length;
                if length > 0 {
                    of_tokens[end - 1] += reward;
                }
            }
        }
        of_tokens
    }

    /// Discount of later rewards at each sampled token of a sample: `gamma`, times that of `credit` at the end of a
    /// turn.
    fn gammas(&self, sample: &Sample, gamma: f64) -> Vec<f64> {
        turns::gammas(turns::lengths(sample), gamma, self.algorithm.credit.gamma().unwrap_or(1.0))
    }
}

/// Tokens of each completion.
pub fn lengths(samples: &[Sample]) -> Vec<i64> {
    samples.iter().map(|sample| sample.completion_len() as i64).collect()
}

/// Splits `values` into sequences of these lengths.
fn sequences<'a>(values: &'a [f64], lengths: &'a [i64]) -> impl Iterator<Item = &'a [f64]> {
    let mut start = 0;
    lengths.iter().map(move |&length| {
        let end = start + length as usize;
        let part = &values[start..end];
        start = end;
        part
    })
}

fn clip(values: &mut [f64], bound: Option<f64>) {
    if let Some(bound) = bound {
        values.iter_mut().for_each(|value| *value = value.clamp(-bound, bound));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_cut_by_sequence_and_clipped_by_size() {
        let parts: Vec<&[f64]> = sequences(&[1.0, 2.0, 3.0], &[2, 0, 1]).collect();
        assert_eq!(parts, [&[1.0, 2.0][..], &[], &[3.0]]);
        let mut values = [-3.0, 0.5, 3.0];
        clip(&mut values, None);
        assert_eq!(values, [-3.0, 0.5, 3.0]);
        clip(&mut values, Some(2.0));
        assert_eq!(values, [-2.0, 0.5, 2.0]);
    }
}
