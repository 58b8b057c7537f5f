//! The critic: predicts the returns of the policy's tokens, from which PPO computes advantages.
//!
//! The critic is the policy's model with a value head, under its own strategy on the same ranks. In a step it comes
//! before the policy: it values the samples, is trained on their returns, and is offloaded.

use std::{path::Path, sync::Arc};

use anyroll_config::{CriticConfig, RlvrConfig};
use anyroll_models::{ValueModel, init::WeightSource};
use anyroll_strategy::{
    Zero,
    checkpoint::{self, Save},
};
use tch::Tensor;

use super::{
    Decoder, Task,
    advantages::spreads,
    loss::{ValueStats, ValueTargets, count, value_loss},
    pack::Packing,
    prepare::token_counts,
    rows::Scored,
};
use crate::{
    Error, Result,
    base_model::UnderNewHead,
    inference::Sample,
    metrics::Metrics,
    run::Run,
    train::{Exchange, Learner, Place, Schedule},
};

/// The critic's folder in a checkpoint.
const FOLDER: &str = "critic";

/// The model that predicts values of tokens.
#[derive(Debug)]
pub struct Critic {
    config: CriticConfig,
    learner: Learner<ValueModel>,
}

/// Targets of the critic.
pub struct Valued {
    /// Targets of all tokens of this rank.
    pub targets: ValueTargets,
    /// Trained tokens of this rank.
    pub seen: Vec<ValuedToken>,
}

/// A token with its value.
pub struct ValuedToken {
    /// The critic's value.
    pub value: f64,
    /// The return, which is the target of the value.
    pub follows: f64,
    /// The advantage of the token.
    pub advantage: f64,
}

impl Valued {
    /// Metrics over all ranks: values, returns and advantages, and the fraction of the returns' variance that the
    /// values explain. The fraction is 0 for values that are no better than a constant.
    pub fn metrics(&self, exchange: &Exchange) -> Result<Metrics> {
        /// Added to the variance of returns, as in verl, so that returns that hardly differ leave nothing to explain.
        const EPS: f64 = 1e-5;
        let column = |of: fn(&ValuedToken) -> f64| self.seen.iter().map(of).collect::<Vec<f64>>();
        let [values, returns, advantages, missed] = [
            column(|token| token.value),
            column(|token| token.follows),
            column(|token| token.advantage),
            column(|token| token.follows - token.value),
        ];
        let found = spreads(exchange, &[&values, &returns, &advantages, &missed])?;
        let [values, returns, advantages, missed] = found[..] else { unreachable!("a spread for each list") };
        let mut metrics = Metrics::new();
        if missed.moments.count == 0.0 {
            return Ok(metrics); // no sample of the step is trained on
        }
        for (name, spread) in [("values", values), ("returns", returns), ("advantages", advantages)] {
            let quantities = [("mean", spread.moments.mean), ("min", spread.least), ("max", spread.most)];
            for (quantity, value) in quantities {
                metrics.insert(format!("critic/{name}/{quantity}"), value);
            }
            if name == "returns" {
                let scale = spread.moments.squares + EPS * spread.moments.count;
                metrics.insert("critic/vf_explained_var", 1.0 - missed.moments.squares / scale);
            }
        }
        Ok(metrics)
    }
}

impl Critic {
    /// Creates the critic of `run` on `place`, with the policy's initial `weights` and a zero head, offloaded; `None`
    /// if the run has no critic.
    pub fn new(
        run: &Run,
        config: &RlvrConfig,
        policy: &Decoder,
        weights: &dyn WeightSource,
        place: &Place,
    ) -> Result<Option<Self>> {
        let (Some(critic), Some(role)) = (&config.critic, &run.critic) else { return Ok(None) };
        let model = ValueModel::new(policy.config().clone(), place.torch_device()?)?;
        let model = Arc::new(model.deterministic(role.strategy.deterministic));
        let (optimizer, steps) = (critic.optimizer.clone(), run.steps);
        let schedule = Schedule { optimizer, steps, warmup: None };
        let mut learner = Learner::new(model, role, place, &UnderNewHead(weights), schedule)?;
        learner.offload()?;
        Ok(Some(Self { config: critic.clone(), learner }))
    }

    /// Returns true if only the critic is trained in step `step`.
    pub fn learns_alone(&self, step: u64) -> bool {
        step < self.config.warmup_steps
    }

    /// Returns an error if the critic's optimizer steps so far have led to weights that are not finite.
    pub fn check_divergence(&mut self) -> Result<()> {
        self.learner.check_divergence()?;
        Ok(self.learner.offload()?)
    }

    /// Copies the policy's weights below the head.
    pub fn begin_as(&mut self, policy: &mut Zero<Decoder>) -> Result<()> {
        self.learner.load()?;
        self.learner.model.copy_shared_weights_from(policy)?;
        Ok(self.learner.offload()?)
    }

    /// Writes the critic into the new checkpoint `folder`, as a part of its `save`.
    pub fn save(&mut self, folder: &Path, save: Save) -> anyroll_strategy::Result<()> {
        self.learner.load()?;
        let path = folder.join(FOLDER);
        checkpoint::save(&mut self.learner.model, &path, save, serde_json::Value::Null)?;
        self.learner.offload()
    }

    /// Loads a checkpoint of [`Self::save`].
    pub fn restore(&mut self, folder: &Path) -> Result<()> {
        let path = folder.join(FOLDER);
        if !path.exists() {
            let problem = "it has no critic, since the run began without one: take `critic` out again";
            return Err(Error::Resume { run: folder.to_owned(), problem: problem.to_owned() });
        }
        self.learner.load()?;
        self.learner.restore(&path)?;
        Ok(self.learner.offload()?)
    }

    /// Values of the tokens of this rank's samples, fp32 `[M]` on `device`; the critic stays on its own device.
    pub fn values(&mut self, packing: &Packing, samples: &[Sample], device: tch::Device) -> Result<Tensor> {
        self.learner.load()?;
        let own = self.learner.device();
        let model = &mut self.learner.model;
        let lengths = token_counts(samples);
        let parts = self.learner.micro_batch.split(&lengths, 0..samples.len(), model.group())?;
        let parts = parts.into_iter().map(|part| Ok(model.score(&packing.pack(own, &samples[part])?)?));
        let parts: Vec<Tensor> = parts.collect::<Result<_>>()?;
        Ok(Tensor::f_cat(&parts, 0)?.f_to_device(device)?)
    }

    /// Trains the critic on the samples, in the policy's epochs and mini-batches, and offloads it.
    pub fn update(
        &mut self,
        exchange: &Exchange,
        task: &Task,
        scored: &Scored,
        targets: &ValueTargets,
        step: u64,
    ) -> Result<Metrics> {
        let Task { config, share, packing, .. } = task;
        let (aggregation, clip) = (config.algorithm.aggregation, self.config.value_clip);
        let (device, micro_batch) = (self.learner.device(), self.learner.micro_batch);
        let lengths = token_counts(&scored.own);
        let targets = targets.on(device)?;
        let mut stats = ValueStats::default();
        let update = self.learner.update(step, config.epochs, share.mini_batches, |model, mini_batch| {
            let count = count(aggregation, &scored.trained_lengths(share.range(mini_batch.index)));
            let own = share.own_range(mini_batch.index);
            for part in micro_batch.split(&lengths, own, model.group())? {
                let targets = targets.part(part.clone())?;
                let batch = packing.pack(device, &scored.own[part])?;
                model.accumulate(&batch, |values| {
                    Ok(value_loss(clip, values, &targets, count, &mut stats)?)
                })?;
            }
            Ok(())
        })?;
        let stepped = self.learner.finish(update)?;
        self.learner.offload()?;
        let sums = exchange.reduce(&stats.read()?)?;
        let epochs = config.epochs as f64;
        let losses = count(aggregation, &scored.trained_lengths(0..scored.rows.len())) * epochs;
        let mut metrics = Metrics::new();
        metrics.insert("critic/vf_loss", sums.loss / losses);
        if clip.is_some() {
            metrics.insert("critic/vf_clipfrac", sums.clipped / (scored.tokens() * epochs));
        }
        for (name, value) in stepped.metrics.iter() {
            metrics.insert(format!("critic/{name}"), value);
        }
        Ok(metrics)
    }
}
