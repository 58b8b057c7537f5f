//! What a step's samples are trained towards: log-probs to compare with, advantages, and weights.

use anyroll_models::PackedBatch;
use anyroll_strategy::Zero;
use tch::Tensor;

use super::{
    Decoder, Roles, Setup,
    critic::Valued,
    loss::{Correction, CorrectionStats, Targets, ValueTargets, most_uncertain, token_weights},
    pipeline::Carried,
    score::Scored,
};
use crate::{
    Result,
    algorithm::{Earned, Moments, gae, normalize, returns, sample_advantages},
    config::{AdaptiveKlConfig, Advantage, KlTerm, OldLogprobs, Over, RewardNormConfig},
    inference::Sample,
    metrics::Metrics,
    train::Exchange,
};

/// A rank's samples of a step, ready to be trained on.
pub struct Prepared {
    /// Of all of the rank's tokens.
    pub targets: Targets,
    /// Of the critic, of the same tokens.
    pub values: Option<Valued>,
    /// Of all rewards so far, if they are normalized by those.
    pub rewards: Option<Moments>,
    correction: Option<CorrectionStats>,
    kl: Option<KlOfSamples>,
}

/// The KL divergence from the reference, where it goes off rewards or advantages.
pub(super) struct KlOfSamples {
    /// Of each of the rank's tokens: old log-prob less the reference's.
    pub of_tokens: Vec<f64>,
    /// Sums over each sample of the step, in its order.
    of_samples: Vec<f64>,
    /// What it weighs in this step.
    pub coef: f64,
}

impl Setup {
    /// Prepares this rank's samples, with what the steps before left.
    pub fn prepare(
        &self,
        roles: &mut Roles,
        exchange: &Exchange,
        samples: &[Sample],
        scored: &Scored,
        carried: &Carried,
    ) -> Result<Prepared> {
        let algorithm = &self.rlvr.algorithm;
        let kl_coef = carried.kl_coef.unwrap_or(algorithm.kl_coef);
        let (rewards, running) = self.shaped_rewards(scored, carried.rewards);
        let lengths: Vec<i64> = samples.iter().map(|sample| sample.completion_len() as i64).collect();
        let sampled: Vec<f32> = samples.iter().flat_map(|sample| sample.logprobs.iter().copied()).collect();
        let rollout_logprobs = self.to_device(&sampled)?;
        let (old_logprobs, entropies) = match algorithm.old_logprobs {
            OldLogprobs::Rollout => (rollout_logprobs.shallow_clone(), None),
            OldLogprobs::Recompute => {
                let pack = |samples: &[Sample]| self.pack(samples);
                let [logprobs, entropies] = scores(&mut roles.policy, self.micro_batch_size, samples, pack)?;
                (logprobs, Some(entropies))
            }
        };
        let (kl, ref_logprobs) = match (self.reference_logprobs(roles, samples)?, algorithm.kl_in) {
            (Some(reference), KlTerm::Reward(_) | KlTerm::Advantage) => {
                let of_tokens = old_logprobs.f_sub(&reference)?;
                (Some(self.kl_of_samples(exchange, &of_tokens, &lengths, kl_coef)?), None)
            }
            (reference, _) => (None, reference),
        };
        let values = match &mut roles.critic {
            Some(critic) => Some(self.values(critic, samples)?),
            None => None,
        };
        let on_host = values.as_ref().map(to_host).transpose()?;
        let advantages =
            self.advantages(exchange, scored, rewards, samples, (kl.as_ref(), on_host.as_deref()))?;
        let correction =
            Correction::new(&algorithm.rollout_correction, &old_logprobs, &rollout_logprobs, &lengths)?;
        let mut weights_of_tokens = token_weights(algorithm.aggregation, &lengths);
        let trained = self.trained_tokens(exchange, scored, &lengths);
        weights_of_tokens
            .iter_mut()
            .zip(&trained)
            .filter(|(_, trained)| !**trained)
            .for_each(|(it, _)| *it = 0.0);
        let (mut weights, correction) = correction.map(|it| (it.weights, it.stats)).unzip();
        if let (Some(share), Some(entropies)) = (algorithm.top_entropy, entropies) {
            let is_chosen = self.chosen_by_entropy(exchange, share, &to_host(&entropies)?, &trained)?;
            weights = Some(match weights {
                Some(weights) => weights.f_mul(&is_chosen)?,
                None => is_chosen,
            });
        }
        let token_weights = self.to_device(&weights_of_tokens)?;
        let values = match (values, on_host) {
            (Some(old_values), Some(on_host)) => Some(Valued {
                targets: ValueTargets {
                    lengths: lengths.clone(),
                    returns: self.to_device(&to_f32(&advantages.returns))?,
                    old_values,
                    token_weights: token_weights.shallow_clone(),
                },
                seen: advantages.seen(&on_host, &trained),
            }),
            _ => None,
        };
        let targets = Targets {
            rollout_logprobs,
            old_logprobs,
            advantages: self.to_device(&to_f32(&advantages.of_tokens))?,
            ref_logprobs,
            policy_weights: weights,
            token_weights,
            lengths,
        };
        Ok(Prepared { targets, values, rewards: running, correction, kl })
    }

    /// [`most_uncertain`] of the tokens that are trained on, on all ranks.
    fn chosen_by_entropy(
        &self,
        exchange: &Exchange,
        share: f64,
        entropies: &[f64],
        trained: &[bool],
    ) -> Result<Tensor> {
        let own = entropies.iter().zip(trained).filter(|(_, trained)| **trained);
        let own: Vec<f64> = own.map(|(entropy, _)| *entropy).collect();
        let all = exchange.gather_uneven(&own)?.concat();
        self.to_device(&most_uncertain(share, entropies, all))
    }

    /// Those of the frozen copy, or of the policy with its adapters off; `None` where nothing compares with them.
    fn reference_logprobs(&self, roles: &mut Roles, samples: &[Sample]) -> Result<Option<Tensor>> {
        match &mut roles.reference {
            Some(reference) => {
                let logprobs = reference.score(|model, size| {
                    let device = model.torch_device();
                    logprobs(model, size, samples, |samples| self.pack_for(device, samples))
                })?;
                Ok(Some(logprobs.f_to_device(self.device)?))
            }
            None if self.has_adapters && self.rlvr.algorithm.kl_coef > 0.0 => {
                let pack = |samples: &[Sample]| Ok(self.pack(samples)?.without_adapters());
                Ok(Some(logprobs(&mut roles.policy, self.micro_batch_size, samples, pack)?))
            }
            None => Ok(None),
        }
    }

    fn kl_of_samples(
        &self,
        exchange: &Exchange,
        of_tokens: &Tensor,
        lengths: &[i64],
        coef: f64,
    ) -> Result<KlOfSamples> {
        let of_tokens = to_host(of_tokens)?;
        let own: Vec<f64> = sequences(&of_tokens, lengths).map(|tokens| tokens.iter().sum()).collect();
        let of_samples = self.share.ordered(&exchange.gather(&own)?);
        Ok(KlOfSamples { of_tokens, of_samples, coef })
    }

    /// The rewards of all samples, normalized and clamped, and the moments of all steps' rewards, if they are used.
    fn shaped_rewards(&self, scored: &Scored, running: Option<Moments>) -> (Vec<f64>, Option<Moments>) {
        let algorithm = &self.rlvr.algorithm;
        let earned = if scored.decoupled.is_empty() { &scored.rewards } else { &scored.decoupled };
        let (mut rewards, mut moments) = (earned.clone(), running.unwrap_or_default());
        normalize(algorithm.reward_norm, &mut rewards, self.rlvr.group_size, &mut moments);
        clip(&mut rewards, algorithm.reward_clip);
        let RewardNormConfig { mean, std } = algorithm.reward_norm;
        (rewards, [mean, std].contains(&Over::Running).then_some(moments))
    }

    /// The advantages of this rank's tokens, from all samples' `rewards`; `values` are the critic's.
    fn advantages(
        &self,
        exchange: &Exchange,
        scored: &Scored,
        rewards: Vec<f64>,
        samples: &[Sample],
        (kl, values): (Option<&KlOfSamples>, Option<&[f64]>),
    ) -> Result<TokenAdvantages> {
        let algorithm = &self.rlvr.algorithm;
        let by_turns = algorithm.credit.gamma();
        let lengths: Vec<i64> = samples.iter().map(|sample| sample.completion_len() as i64).collect();
        let lengths = &lengths[..];
        let (off_reward, off_advantage) = match algorithm.kl_in {
            KlTerm::Advantage => (None, kl),
            KlTerm::Reward(_) | KlTerm::Loss(_) => (kl, None),
        };
        let mut of_tokens: Vec<f64> = match (algorithm.advantage, values) {
            // Here, and only here, tokens of a turn differ.
            (Advantage::Gae(config), Some(values)) => {
                let rewards = self.token_rewards(exchange, (scored, &rewards), samples, off_reward);
                let of_sequences = sequences(&rewards, lengths).zip(sequences(values, lengths)).zip(samples);
                let of_sequence = |((rewards, values), sample)| {
                    gae(config.lambda, &self.gammas(sample, config.gamma), rewards, values)
                };
                of_sequences.flat_map(of_sequence).collect()
            }
            (Advantage::Reinforce(config), _)
                if config.gamma < 1.0 || off_reward.is_some() || by_turns.is_some() =>
            {
                let rewards = self.token_rewards(exchange, (scored, &rewards), samples, off_reward);
                let of_sequences = sequences(&rewards, lengths).zip(samples);
                let of_sequence = |(rewards, sample)| returns(rewards, &self.gammas(sample, config.gamma));
                of_sequences.flat_map(of_sequence).collect()
            }
            _ => match by_turns {
                Some(gamma) => self.turn_advantages(exchange, scored, samples, (gamma, off_reward))?,
                None => self.sample_advantages(exchange, scored, rewards, lengths, off_reward),
            },
        };
        let add = |values: &[f64]| of_tokens.iter().zip(values).map(|(own, value)| own + value).collect();
        let returns = values.map_or(Vec::new(), add);
        // Each token's own divergence, and not that of those after it: nothing of it is a value's to predict.
        if let Some(kl) = off_advantage {
            of_tokens.iter_mut().zip(&kl.of_tokens).for_each(|(token, of)| *token -= kl.coef * of);
        }
        if algorithm.whiten_advantages {
            let trained = of_tokens.iter().zip(self.trained_tokens(exchange, scored, lengths));
            let seen: Vec<f64> = trained.filter(|(_, trained)| *trained).map(|(token, _)| *token).collect();
            moments(exchange, &seen)?.whiten(&mut of_tokens);
        }
        clip(&mut of_tokens, algorithm.advantage_clip);
        Ok(TokenAdvantages { of_tokens, returns })
    }

    /// The advantages of this rank's samples, for each of their tokens.
    fn sample_advantages(
        &self,
        exchange: &Exchange,
        scored: &Scored,
        mut rewards: Vec<f64>,
        lengths: &[i64],
        kl: Option<&KlOfSamples>,
    ) -> Vec<f64> {
        let (algorithm, group_size) = (&self.rlvr.algorithm, self.rlvr.group_size);
        if let Some(kl) = kl {
            rewards.iter_mut().zip(&kl.of_samples).for_each(|(reward, of)| *reward -= kl.coef * of);
        }
        let mut greedy = scored.greedy.clone();
        clip(&mut greedy, algorithm.reward_clip);
        let earned = Earned { rewards: &rewards, lengths: &scored.lengths, greedy: &greedy, group_size };
        let of_samples = sample_advantages(&algorithm.advantage, earned);
        let own = self.share.samples_of(exchange.rank()).zip(lengths);
        own.flat_map(|(sample, &length)| std::iter::repeat_n(of_samples[sample], length as usize)).collect()
    }

    /// Whether each of this rank's tokens is trained on.
    fn trained_tokens(&self, exchange: &Exchange, scored: &Scored, lengths: &[i64]) -> Vec<bool> {
        let samples = self.share.samples_of(exchange.rank()).zip(lengths);
        samples
            .flat_map(|(sample, &length)| std::iter::repeat_n(scored.trained[sample], length as usize))
            .collect()
    }

    fn to_device(&self, values: &[f32]) -> Result<Tensor> {
        Ok(Tensor::f_from_slice(values)?.f_to_device(self.device)?)
    }
}

/// Advantages of a rank's tokens, and what their values should have been; empty without values.
struct TokenAdvantages {
    of_tokens: Vec<f64>,
    returns: Vec<f64>,
}

impl TokenAdvantages {
    /// Value, return and advantage of each token that is trained on.
    fn seen(&self, values: &[f64], trained: &[bool]) -> Vec<[f64; 3]> {
        let tokens = (0..values.len()).filter(|&token| trained[token]);
        tokens.map(|token| [values[token], self.returns[token], self.of_tokens[token]]).collect()
    }
}

/// Log-probs of the samples' completions, fp32, all tokens in a row.
fn logprobs(
    model: &mut Zero<Decoder>,
    micro_batch_size: usize,
    samples: &[Sample],
    pack: impl Fn(&[Sample]) -> Result<PackedBatch>,
) -> Result<Tensor> {
    let [logprobs, _] = scores(model, micro_batch_size, samples, pack)?;
    Ok(logprobs)
}

/// Log-probs as [`logprobs`] has them, and the entropies of the distributions that they are of.
fn scores(
    model: &mut Zero<Decoder>,
    micro_batch_size: usize,
    samples: &[Sample],
    pack: impl Fn(&[Sample]) -> Result<PackedBatch>,
) -> Result<[Tensor; 2]> {
    let (mut logprobs, mut entropies) = (Vec::new(), Vec::new());
    for samples in samples.chunks(micro_batch_size) {
        let scores = model.score(&pack(samples)?)?;
        logprobs.push(scores.logprobs);
        entropies.push(scores.entropy);
    }
    Ok([Tensor::f_cat(&logprobs, 0)?, Tensor::f_cat(&entropies, 0)?])
}

impl Prepared {
    /// What the rewards' KL divergence and the correction's weights were, over all ranks.
    pub fn metrics(&self, exchange: &Exchange, scored: &Scored) -> Result<Metrics> {
        let mut metrics = Metrics::new();
        if let Some(kl) = &self.kl {
            metrics.insert("kl/reference", kl.mean(scored));
            metrics.insert("kl/coef", kl.coef);
        }
        if let Some(values) = &self.values {
            metrics.merge(values.metrics(exchange)?);
        }
        if let Some(correction) = &self.correction {
            let tokens: f64 = scored.lengths.iter().sum();
            let sums = exchange.sum(&correction.read()?)?;
            metrics.insert("rollout/weight_mean", sums[0] / tokens);
            metrics.insert("rollout/weight_changed", sums[2] / tokens);
            // Kish's effective share of the tokens: 1 if all weigh the same. Nothing is left if all are masked.
            let effective = if sums[1] > 0.0 { sums[0].powi(2) / (sums[1] * tokens) } else { 0.0 };
            metrics.insert("rollout/effective_share", effective);
        }
        Ok(metrics)
    }

    /// The next step's weight of the KL divergence off the reward; `None` if no controller moves it.
    pub fn next_kl_coef(&self, term: KlTerm, scored: &Scored) -> Option<f64> {
        let (Some(kl), KlTerm::Reward(config)) = (&self.kl, term) else { return None };
        let samples = scored.lengths.len();
        config.adaptive.map(|adaptive| next_kl_coef(adaptive, kl.coef, kl.mean(scored), samples))
    }
}

impl KlOfSamples {
    /// The mean over samples of the mean over each one's tokens.
    fn mean(&self, scored: &Scored) -> f64 {
        // A sample whose episode never began has no tokens.
        let of_samples = self.of_samples.iter().zip(&scored.lengths);
        let means = of_samples.map(|(sum, length)| sum / length.max(1.0));
        means.sum::<f64>() / scored.lengths.len() as f64
    }
}

/// Ziegler et al. (2019), section 2.2: in proportion to how far `kl` is off, by at most a fifth in `horizon` samples.
fn next_kl_coef(config: AdaptiveKlConfig, coef: f64, kl: f64, samples: usize) -> f64 {
    let off = (kl / config.target - 1.0).clamp(-0.2, 0.2);
    coef * (1.0 + off * samples as f64 / config.horizon)
}

/// The parts of `values` that belong to sequences of these lengths.
fn sequences<'a>(values: &'a [f64], lengths: &'a [i64]) -> impl Iterator<Item = &'a [f64]> {
    let mut start = 0;
    lengths.iter().map(move |&length| {
        let end = start + length as usize;
        let part = &values[start..end];
        start = end;
        part
    })
}

/// Values of tokens on the host; waits for the device.
fn to_host(tensor: &Tensor) -> Result<Vec<f64>> {
    let values: Vec<f32> = tensor.f_to_device(tch::Device::Cpu)?.try_into()?;
    Ok(values.into_iter().map(f64::from).collect())
}

fn to_f32(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

/// Of the values of all ranks, in two passes, since one would cancel.
pub(super) fn moments(exchange: &Exchange, own: &[f64]) -> Result<Moments> {
    let sums = exchange.sum(&[own.len() as f64, own.iter().sum()])?;
    let (count, mean) = (sums[0], sums[1] / sums[0].max(1.0));
    let squares = own.iter().map(|value| (value - mean).powi(2)).sum();
    Ok(Moments { count, mean, squares: exchange.sum(&[squares])?[0] })
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
    fn the_controller_moves_towards_the_target_by_at_most_a_fifth() {
        let config = AdaptiveKlConfig { target: 0.1, horizon: 1000.0 };
        for (kl, expected) in [(0.1, 0.5), (0.11, 0.505), (5.0, 0.51), (0.0, 0.49), (-3.0, 0.49)] {
            let found = next_kl_coef(config, 0.5, kl, 100);
            assert!((found - expected).abs() < 1e-12, "{kl}: {found} is not {expected}");
        }
    }

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
