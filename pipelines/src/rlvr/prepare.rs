//! Inputs of the loss, from scored rows: log-probs, advantages, and weights of tokens.

use anyroll_algorithm::Moments;
use anyroll_config::{KlTerm, OldLogprobs};
use anyroll_models::PackedBatch;
use anyroll_strategy::Zero;
use tch::Tensor;

use super::{
    Decoder, Models, Task,
    advantages::{Advantages, Evidence, SampleKl, TokenAdvantages, lengths, shaped_rewards},
    critic::{Valued, ValuedToken},
    loss::{Correction, CorrectionSums, Targets, ValueTargets, most_uncertain, token_weights},
    pipeline::Carried,
    rows::Scored,
};
use crate::{
    Result,
    inference::Sample,
    train::{Exchange, MicroBatch},
};

/// A rank's samples of a step, ready for training.
pub struct Batch {
    /// Targets of all of the rank's tokens.
    pub targets: Targets,
    /// Advantages of the same tokens.
    pub advantages: Vec<f64>,
    /// Targets of the critic, for the same tokens.
    pub values: Option<Valued>,
    /// Moments of all rewards so far, if they normalize rewards.
    pub reward_moments: Option<Moments>,
    /// Sums over the correction weights of tokens, on the device; `None` without a correction.
    pub correction: Option<CorrectionSums<Tensor>>,
    /// KL divergences that are subtracted from rewards or advantages.
    pub kl: Option<SampleKl>,
}

/// Prepares this rank's samples, with the state `carried` from previous steps. Every rank must call this.
pub fn prepare(
    task: &Task,
    models: &mut Models,
    exchange: &Exchange,
    scored: &Scored,
    carried: &Carried,
) -> Result<Batch> {
    let algorithm = &task.config.algorithm;
    let samples = &scored.own;
    let (rewards, reward_moments) = shaped_rewards(algorithm, task.share.group_size, scored, carried.rewards);
    let lengths = lengths(samples);
    let sampled: Vec<f32> = samples.iter().flat_map(|sample| sample.logprobs.iter().copied()).collect();
    let rollout_logprobs = models.to_device(&sampled)?;
    let (old_logprobs, entropies) = match task.config.old_logprobs() {
        OldLogprobs::Rollout => (rollout_logprobs.shallow_clone(), None),
        OldLogprobs::Recompute => {
            let [logprobs, entropies] = models.policy_scores(task, samples)?;
            (logprobs, Some(entropies))
        }
    };
    let (kl, ref_logprobs) = match (models.reference_logprobs(task, samples)?, algorithm.kl_in) {
        (Some(reference), KlTerm::Reward(_) | KlTerm::Advantage) => {
            let of_tokens = to_host(&old_logprobs.f_sub(&reference)?)?;
            let coef = carried.kl_coef.unwrap_or(algorithm.kl_coef);
            let weighed = (coef, algorithm.credit.gamma().is_some());
            (Some(SampleKl::gather(exchange, &task.share, scored, of_tokens, weighed)?), None)
        }
        (reference, _) => (None, reference),
    };
    let values = models.values(task, samples)?;
    let on_host = values.as_ref().map(to_host).transpose()?;
    let makes = Advantages { algorithm, share: &task.share, exchange };
    let evidence = Evidence { scored, rewards, kl: kl.as_ref(), values: on_host.as_deref() };
    let advantages = makes.of_tokens(&evidence)?;

    let correction =
        Correction::new(&task.config.rollout_correction(), &old_logprobs, &rollout_logprobs, &lengths)?;
    let trained = makes.trained_tokens(scored);
    let mut weights_of_tokens = token_weights(algorithm.aggregation, &lengths);
    for (weight, _) in weights_of_tokens.iter_mut().zip(&trained).filter(|(_, trained)| !**trained) {
        *weight = 0.0;
    }
    let (mut policy_weights, correction) = correction.map(|it| (it.weights, it.sums)).unzip();
    if let (Some(share), Some(entropies)) = (algorithm.top_entropy, entropies) {
        let entropies = to_host(&entropies)?;
        let own = entropies.iter().zip(&trained).filter(|(_, trained)| **trained);
        let own: Vec<f64> = own.map(|(entropy, _)| *entropy).collect();
        let all = exchange.gather_rows(&own)?.concat();
        let chosen = models.to_device(&most_uncertain(share, &entropies, all))?;
        policy_weights = Some(match policy_weights {
            Some(weights) => weights.f_mul(&chosen)?,
            None => chosen,
        });
    }
    let token_weights = models.to_device(&weights_of_tokens)?;
    let values = match (values, on_host) {
        (Some(old_values), Some(on_host)) => Some(Valued {
            targets: ValueTargets {
                lengths: lengths.clone(),
                returns: models.to_device(&to_f32(&advantages.returns))?,
                old_values,
                token_weights: token_weights.shallow_clone(),
            },
            seen: seen(&advantages, &on_host, &trained),
        }),
        _ => None,
    };
    let targets = Targets {
        rollout_logprobs,
        old_logprobs,
        advantages: models.to_device(&to_f32(&advantages.of_tokens))?,
        ref_logprobs,
        policy_weights,
        token_weights,
        lengths,
    };
    let advantages = advantages.of_tokens;
    Ok(Batch { targets, advantages, values, reward_moments, correction, kl })
}

/// The trained tokens, with the critic's `values`.
fn seen(advantages: &TokenAdvantages, values: &[f64], trained: &[bool]) -> Vec<ValuedToken> {
    let token = |index: usize| ValuedToken {
        value: values[index],
        follows: advantages.returns[index],
        advantage: advantages.of_tokens[index],
    };
    (0..values.len()).filter(|&index| trained[index]).map(token).collect()
}

/// Log-probs of the samples' completions, fp32, all tokens concatenated, and entropies of the predicted
/// distributions.
pub(super) fn scores(
    model: &mut Zero<Decoder>,
    micro_batch: MicroBatch,
    samples: &[Sample],
    pack: impl Fn(&[Sample]) -> Result<PackedBatch>,
) -> Result<[Tensor; 2]> {
    let (mut logprobs, mut entropies) = (Vec::new(), Vec::new());
    for part in micro_batch.split(&token_counts(samples), 0..samples.len(), model.group())? {
        let scores = model.score(&pack(&samples[part])?)?;
        logprobs.push(scores.logprobs);
        entropies.push(scores.entropy);
    }
    Ok([Tensor::f_cat(&logprobs, 0)?, Tensor::f_cat(&entropies, 0)?])
}

/// Returns the number of tokens of each sample.
pub(super) fn token_counts(samples: &[Sample]) -> Vec<usize> {
    samples.iter().map(|sample| sample.sequence().tokens.len()).collect()
}

/// Copies values of tokens to the host; waits for the device.
fn to_host(tensor: &Tensor) -> Result<Vec<f64>> {
    let values: Vec<f32> = tensor.f_to_device(tch::Device::Cpu)?.try_into()?;
    Ok(values.into_iter().map(f64::from).collect())
}

fn to_f32(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}
