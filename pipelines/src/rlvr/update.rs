//! Update of a step: first the critic, if there is one, then the policy. Only one model's states are on the device at
//! a time.

use std::time::Duration;

use super::{
    Decoder, Models, Task,
    balance::{Dealt, dealt},
    loss::{LossStats, LossTotals, count, policy_loss},
    prepare::{Batch, token_counts},
    rows::Scored,
};
use crate::{
    Error, Result,
    metrics::Metrics,
    train::{Exchange, Learner, MiniBatch, RouterStats, Stepped, reduced},
};

/// Results of an update of the policy, over all ranks.
pub struct PolicyUpdate {
    /// Sums over tokens of all mini-batches.
    pub totals: LossTotals,
    /// Results of the optimizer steps.
    pub stepped: Stepped,
    /// Metrics of the routers over all ranks; empty without experts.
    pub routers: Metrics,
    /// Fraction of the sequences' tokens that shared prompts saved.
    pub shared_rows: f64,
    /// Mean number of a rank's training rows over the largest.
    pub rank_balance: f64,
    /// Time that compute waited for states to load.
    pub load_wait: Duration,
}

reduced! {
    /// Statistics of an update of the policy, over all ranks.
    struct Passed {
        /// Statistics of the losses.
        nested totals: LossTotals,
        /// Training rows.
        sum rows: f64,
        /// Training rows of the rank with most.
        max most_rows: f64,
    }
}

/// Results of a step's update.
pub struct Updated {
    /// Metrics of the critic, over all ranks; empty without one.
    pub critic: Metrics,
    /// Results of the policy; `None` while only the critic is trained.
    pub policy: Option<PolicyUpdate>,
}

/// Trains on the samples of step `step`. Every rank must call this.
pub fn update(
    task: &Task,
    models: &mut Models,
    exchange: &Exchange,
    scored: &Scored,
    batch: &Batch,
    step: u64,
) -> Result<Updated> {
    let mut critic_metrics = Metrics::new();
    if let (Some(critic), Some(values)) = (&mut models.critic, &batch.values) {
        critic_metrics = critic.update(exchange, task, scored, &values.targets, step)?;
        if critic.learns_alone(step) {
            return Ok(Updated { critic: critic_metrics, policy: None });
        }
        models.learner.load()?;
    }
    let policy = update_policy(task, &mut models.learner, exchange, scored, batch, step)?;
    Ok(Updated { critic: critic_metrics, policy: Some(policy) })
}

/// Trains the policy: `epochs` passes over all mini-batches, with an optimizer step each.
fn update_policy(
    task: &Task,
    learner: &mut Learner<Decoder>,
    exchange: &Exchange,
    scored: &Scored,
    batch: &Batch,
    step: u64,
) -> Result<PolicyUpdate> {
    let Task { config, share, packing, .. } = task;
    let (device, micro_batch) = (learner.device(), learner.micro_batch);
    let router_aux_loss_coef = config.algorithm.router_aux_loss_coef;
    let dealt = match config.balance_ranks && exchange.world_size() > 1 {
        true => Some(dealt(task, exchange, &scored.own, &batch.targets)?),
        false => None,
    };
    let (samples, targets, numbers) = match &dealt {
        Some(Dealt { samples, targets, numbers }) => (samples, targets, numbers.clone()),
        None => (&scored.own, &batch.targets, share.samples_of(exchange.rank()).collect()),
    };
    let lengths = token_counts(samples);
    let (mut stats, mut routers) = (LossStats::default(), RouterStats::default());
    let (mut rows, mut inputs) = (0, 0);
    let update = learner.update(step, config.epochs, share.mini_batches, |policy, mini_batch| {
        let MiniBatch { epoch, index } = mini_batch;
        let count = count(config.algorithm.aggregation, &scored.trained_lengths(share.range(index)));
        let parts = micro_batch.split(&lengths, share.own_range(index), policy.group())?;
        let balance = router_aux_loss_coef / (parts.len() * exchange.world_size()) as f64;
        for part in parts {
            let targets = targets.part(part.clone())?;
            let pass = step * config.epochs as u64 + epoch as u64;
            let packed = packing.pack_to_train(device, &samples[part.clone()], pass, &numbers[part])?;
            (rows, inputs) = (rows + packed.tokens(), inputs + packed.inputs());
            let packed = packed.watching(balance);
            policy.accumulate(&packed, |scores| {
                if mini_batch.is_first() {
                    // The weights are still those of the step. Differences come from the engine, or from older
                    // weights that began a completion which this step continued.
                    stats.add_drift(&scores.logprobs, &targets.rollout_logprobs)?;
                }
                Ok(policy_loss(&config.algorithm, scores, &targets, count, &mut stats)?)
            })?;
            routers.add(&packed, mini_batch.is_first())?;
        }
        Ok(())
    })?;
    let stepped = learner.finish(update)?;
    let own = Passed { totals: stats.read()?, rows: rows as f64, most_rows: rows as f64 };
    let Passed { totals, rows: all_rows, most_rows } = exchange.reduce(&own)?;
    if config.rollout.strict && totals.largest_drift != 0.0 {
        return Err(Error::NotStrict { largest: totals.largest_drift });
    }
    Ok(PolicyUpdate {
        totals,
        stepped,
        routers: routers.metrics(exchange, router_aux_loss_coef > 0.0, packing.routes.is_some())?,
        shared_rows: 1.0 - rows as f64 / inputs as f64,
        rank_balance: all_rows / (most_rows * exchange.world_size() as f64),
        load_wait: learner.model.load_wait()?,
    })
}
