//! The critic: what a policy's tokens are expected to earn, from which advantages are made (PPO).
//!
//! It is the policy's model under a value head, held by a strategy of its own on the same ranks. In a step it has its
//! turn before the policy is trained: it values the samples, is trained towards what followed, and leaves the device.

use std::{path::Path, sync::Arc};

use anyroll_models::ValueModel;
use anyroll_strategy::{
    State, StepStats, Zero,
    checkpoint::{self, Stamp},
};
use tch::Tensor;

use super::{
    Decoder, Setup,
    loss::{ValueStats, ValueTargets, count, value_loss},
    score::Scored,
    targets::moments,
};
use crate::{
    Error, Result,
    base_model::UnderNewHead,
    config::{CriticConfig, Run},
    inference::Sample,
    metrics::Metrics,
    train::{Exchange, Place, adamw, finish_steps, hold, learning_rate, offloaded},
};

/// Where the critic lies in a checkpoint.
const FOLDER: &str = "critic";

/// The model that values tokens.
#[derive(Debug)]
pub struct Critic {
    config: CriticConfig,
    model: Zero<ValueModel>,
    /// Sequences that a rank puts through forward and backward at a time.
    micro_batch_size: usize,
    /// What of it is on the device only in its turn.
    offloaded: Vec<State>,
}

/// What the critic is trained towards.
pub struct Valued {
    /// Of all of the rank's tokens.
    pub targets: ValueTargets,
    /// Value, return and advantage of each of the rank's tokens that is trained on.
    pub seen: Vec<[f64; 3]>,
}

impl Valued {
    /// Over all ranks: values, returns and advantages, and how much of the returns' variance the values explain, which
    /// is 0 if they are no better than a constant.
    pub fn metrics(&self, exchange: &Exchange) -> Result<Metrics> {
        /// Returns that hardly differ leave nothing to explain; verl's.
        const EPS: f64 = 1e-5;
        let of = |index: usize| self.seen.iter().map(move |token| token[index]);
        let mut metrics = Metrics::new();
        let missed: Vec<f64> = self.seen.iter().map(|[value, follows, _]| follows - value).collect();
        let missed = moments(exchange, &missed)?;
        if missed.count == 0.0 {
            return Ok(metrics); // all of the step is left out
        }
        for (index, name) in ["values", "returns", "advantages"].into_iter().enumerate() {
            let own: Vec<f64> = of(index).collect();
            let found = moments(exchange, &own)?;
            let least = of(index).fold(f64::INFINITY, f64::min);
            let most = of(index).fold(f64::NEG_INFINITY, f64::max);
            let of_ranks = exchange.gather(&[least, most])?;
            let least = of_ranks.iter().map(|rank| rank[0]).fold(f64::INFINITY, f64::min);
            let most = of_ranks.iter().map(|rank| rank[1]).fold(f64::NEG_INFINITY, f64::max);
            for (quantity, value) in [("mean", found.mean), ("min", least), ("max", most)] {
                metrics.insert(format!("critic/{name}/{quantity}"), value);
            }
            if name == "returns" {
                let explained = 1.0 - missed.squares / (found.squares + EPS * found.count);
                metrics.insert("critic/vf_explained_var", explained);
            }
        }
        Ok(metrics)
    }
}

impl Critic {
    /// The critic that `run` asks for, if it does, on `place`, with the policy's first weights under a head of 0; away
    /// from the device.
    pub fn new(run: &Run, setup: &Setup, place: &Place) -> Result<Option<Self>> {
        let (Some(config), Some(role)) = (&setup.rlvr.critic, &run.critic) else { return Ok(None) };
        let model = ValueModel::new(setup.model.config().clone(), place.torch_device()?)?;
        let model = model.deterministic(role.strategy.deterministic);
        let weights = UnderNewHead(&*setup.weights);
        let adamw = adamw(&config.optimizer);
        let mut model = hold(Arc::new(model), &role.strategy, place, Some(adamw), &weights)?;
        let offloaded = offloaded(&role.strategy);
        model.offload_states(&offloaded)?;
        let micro_batch_size = role.strategy.micro_batch_size;
        Ok(Some(Self { config: config.clone(), model, micro_batch_size, offloaded }))
    }

    /// Whether the policy waits in step `step` for the critic to have learnt something.
    pub fn learns_alone(&self, step: u64) -> bool {
        step < self.config.warmup_steps
    }

    /// An error if its steps so far have led to nothing that is a model.
    pub fn check_learnt(&mut self) -> Result<()> {
        self.model.load_states(&self.offloaded)?;
        self.model.check_learnt()?;
        self.leave()
    }

    /// Takes over the policy's weights below the head.
    pub fn begin_as(&mut self, policy: &mut Zero<Decoder>) -> Result<()> {
        self.model.load_states(&self.offloaded)?;
        self.model.copy_shared_weights_from(policy)?;
        self.leave()
    }

    /// Writes it into the new checkpoint `folder`, of `stamp`.
    pub fn save(&mut self, folder: &Path, stamp: Stamp) -> Result<(), anyroll_strategy::Error> {
        self.model.load_states(&self.offloaded)?;
        checkpoint::save(&mut self.model, &folder.join(FOLDER), stamp, serde_json::Value::Null)?;
        self.model.offload_states(&self.offloaded)?;
        Ok(())
    }

    /// Loads what [`Self::save`] wrote.
    pub fn load(&mut self, folder: &Path) -> Result<()> {
        let path = folder.join(FOLDER);
        if !path.exists() {
            let problem = "it has no critic, since the run began without one: take `critic` out again";
            return Err(Error::Resume { run: folder.to_owned(), problem: problem.to_owned() });
        }
        self.model.load_states(&self.offloaded)?;
        checkpoint::load(&mut self.model, &path)?;
        self.leave()
    }

    fn leave(&mut self) -> Result<()> {
        self.model.offload_states(&self.offloaded)?;
        Ok(())
    }
}

/// The critic's part of a step.
impl Setup {
    /// The value of each token of this rank's samples, fp32 `[M]` on the policy's device; the critic is on its own
    /// afterwards.
    pub fn values(&self, critic: &mut Critic, samples: &[Sample]) -> Result<Tensor> {
        critic.model.load_states(&critic.offloaded)?;
        let parts = samples.chunks(critic.micro_batch_size);
        let device = critic.model.torch_device();
        let parts = parts.map(|samples| Ok(critic.model.score(&self.pack_for(device, samples)?)?));
        let parts: Vec<Tensor> = parts.collect::<Result<_>>()?;
        Ok(Tensor::f_cat(&parts, 0)?.f_to_device(self.device)?)
    }

    /// Trains the critic on the samples, in the policy's epochs and mini-batches; it leaves the device.
    pub fn update_critic(
        &self,
        critic: &mut Critic,
        exchange: &Exchange,
        samples: &[Sample],
        targets: &ValueTargets,
        scored: &Scored,
        step: u64,
    ) -> Result<Metrics> {
        let rlvr = &self.rlvr;
        let (aggregation, clip) = (rlvr.algorithm.aggregation, critic.config.value_clip);
        let learning_rate = learning_rate(&critic.config.optimizer, step, rlvr.steps.number());
        let device = critic.model.torch_device();
        let targets = targets.on(device)?;
        let mut stats = ValueStats::default();
        let mut steps: Vec<StepStats> = Vec::new();
        for _ in 0..rlvr.epochs {
            for mini_batch in 0..self.share.mini_batches {
                let count = count(aggregation, &scored.trained_lengths(self.share.range(mini_batch)));
                for part in self.share.micro_batches(mini_batch, critic.micro_batch_size) {
                    let targets = targets.part(part.clone())?;
                    let batch = self.pack_for(device, &samples[part])?;
                    critic.model.accumulate(&batch, |values| {
                        Ok(value_loss(clip, values, &targets, count, &mut stats)?)
                    })?;
                }
                steps.push(critic.model.step(learning_rate)?);
            }
        }
        let stepped = finish_steps(&critic.model, &steps)?;
        critic.leave()?;
        let sums = exchange.sum(&stats.read()?)?;
        let epochs = rlvr.epochs as f64;
        let losses = count(aggregation, &scored.trained_lengths(0..scored.lengths.len())) * epochs;
        let tokens = scored.lengths.iter().sum::<f64>() * epochs;
        let mut metrics = Metrics::new();
        metrics.insert("critic/vf_loss", sums[0] / losses);
        if clip.is_some() {
            metrics.insert("critic/vf_clipfrac", sums[1] / tokens);
        }
        for (name, value) in stepped.iter() {
            metrics.insert(format!("critic/{name}"), value);
        }
        metrics.insert("critic/learning_rate", learning_rate);
        Ok(metrics)
    }
}
