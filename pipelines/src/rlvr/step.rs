//! One RL step: sample, score, prepare, update.

use std::time::Instant;

use anyroll_strategy::{StepStats, Zero};

use super::{
    Decoder, Roles, Setup,
    collect::{Collected, Source},
    loss::{Drift, LARGEST, LossStats, SUMS, Targets, count, policy_loss},
    pipeline::Carried,
    score::Scored,
    targets::Prepared,
    under_way::Rollout,
};
use crate::{
    Error, Result,
    algorithm::count_groups,
    config::{KlTerm, PolicyLoss},
    inference::Sample,
    metrics::Metrics,
    train::{Exchange, StepOutcome, allocated_bytes, finish_steps, learning_rate},
};

impl Setup {
    /// Step `step`, from 0. Every rank calls; `stop` is this rank's wish to end the run after the step.
    pub fn step(
        &self,
        roles: &mut Roles,
        rollout: &mut Rollout,
        exchange: &Exchange,
        step: u64,
        carried: &mut Carried,
        stop: bool,
    ) -> Result<StepOutcome> {
        let rlvr = &self.rlvr;
        let started = Instant::now();
        roles.policy.start_offload(&self.leaving)?; // what is still here, as in the first step
        if let Some(reference) = &mut roles.reference {
            reference.model.offload_states(&reference.offloaded)?;
        }
        let offloaded = Instant::now();
        // Devices of their own merge adapters themselves.
        let weights = match rollout.devices.is_some() {
            true => roles.policy.weights()?,
            false => self.weights_to_sample(&mut roles.policy)?,
        };
        roles.policy.group().stream().synchronize()?; // only to tell how long ranks wait for each other's parts
        let gathered = Instant::now();
        let mut source = Source {
            weights: &weights,
            policy: &mut roles.policy,
            reward_models: &mut roles.reward_models,
            waited: offloaded - started,
        };
        let collected = self.collect(&mut source, exchange, rollout, (step, carried.batches), stop)?;
        let Collected { samples, scored, .. } = &collected;
        let (rewarded, waited) = (Instant::now(), source.waited);
        roles.policy.offload_states(&self.leaving)?; // after a rollout that was shorter than the copies
        let generate_bytes = allocated_bytes(&roles.policy)?;
        drop(weights);
        let away = Instant::now();
        let waited = waited + (away - rewarded);

        let (prepared, update) = self.train(roles, exchange, samples, scored, (step, carried))?;
        let trained = Instant::now();

        let mut metrics = self.sample_metrics(scored);
        metrics.merge(scored.terms.metrics(self.reward.names()));
        metrics.merge(collected.metrics.clone());
        metrics.merge(update);
        metrics.merge(prepared.metrics(exchange, scored)?);
        let tokens: f64 = scored.lengths.iter().sum();
        let step_s = (trained - started).as_secs_f64();
        metrics.insert("perf/tokens_per_s", tokens / step_s);
        metrics.insert("perf/generate_allocated_bytes", generate_bytes);
        metrics.insert("perf/generate_passes", collected.effort.passes as f64);
        if self.environment.is_some() {
            metrics.insert("perf/kept_tokens", collected.effort.kept_tokens as f64);
        }
        metrics.insert("time/offload_s", waited.as_secs_f64());
        metrics.insert("time/gather_s", (gathered - offloaded).as_secs_f64());
        metrics.insert("time/generate_s", collected.generating.as_secs_f64());
        metrics.insert("time/reward_s", collected.rewarding.as_secs_f64());
        metrics.insert("time/train_s", (trained - away).as_secs_f64());
        metrics.insert("time/step_s", step_s);
        carried.rewards = prepared.rewards;
        carried.kl_coef = prepared.next_kl_coef(rlvr.algorithm.kl_in, scored);
        carried.batches += collected.batches;
        Ok(StepOutcome { metrics, stop: scored.stop })
    }

    /// Prepares the samples and trains on them: first the critic, if there is one, then the policy, so that the states of
    /// one of them are on the device at a time.
    fn train(
        &self,
        roles: &mut Roles,
        exchange: &Exchange,
        samples: &[Sample],
        scored: &Scored,
        (step, carried): (u64, &Carried),
    ) -> Result<(Prepared, Metrics)> {
        if roles.critic.is_none() {
            roles.policy.load_states(&self.offloaded)?; // behind all that comes before the first step
        }
        let prepared = self.prepare(roles, exchange, samples, scored, carried)?;
        let mut metrics = Metrics::new();
        if let (Some(critic), Some(values)) = (&mut roles.critic, &prepared.values) {
            metrics.merge(self.update_critic(critic, exchange, samples, &values.targets, scored, step)?);
            if critic.learns_alone(step) {
                return Ok((prepared, metrics));
            }
            roles.policy.load_states(&self.offloaded)?;
        }
        let policy = &mut roles.policy;
        metrics.merge(self.update(policy, exchange, samples, &prepared.targets, scored, step)?);
        Ok((prepared, metrics))
    }

    /// Trains the policy: `epochs` times over all mini-batches, an optimizer step each.
    fn update(
        &self,
        policy: &mut Zero<Decoder>,
        exchange: &Exchange,
        samples: &[Sample],
        targets: &Targets,
        scored: &Scored,
        step: u64,
    ) -> Result<Metrics> {
        let rlvr = &self.rlvr;
        let learning_rate = learning_rate(&rlvr.optimizer, step, self.steps);
        let numbers: Vec<usize> = self.share.samples_of(exchange.rank()).collect();
        let (mut stats, mut drift) = (LossStats::default(), Drift::default());
        let (mut rows, mut inputs) = (0, 0);
        let mut steps: Vec<StepStats> = Vec::new();
        for epoch in 0..rlvr.epochs {
            for mini_batch in 0..self.share.mini_batches {
                let count =
                    count(rlvr.algorithm.aggregation, &scored.trained_lengths(self.share.range(mini_batch)));
                for part in self.share.micro_batches(mini_batch, self.micro_batch_size) {
                    let targets = targets.part(part.clone())?;
                    let (pass, numbers) = (step * rlvr.epochs as u64 + epoch as u64, &numbers[part.clone()]);
                    let batch = self.pack(&samples[part])?;
                    let batch = self.to_train(batch, pass, numbers.iter().copied())?;
                    (rows, inputs) = (rows + batch.tokens(), inputs + batch.inputs());
                    policy.accumulate(&batch, |scores| {
                        if epoch == 0 && mini_batch == 0 {
                            // The weights are still those of the step: what differs is the engine, or the weights
                            // that began what this step went on with.
                            drift.add(&scores.logprobs, &targets.rollout_logprobs)?;
                        }
                        Ok(policy_loss(&rlvr.algorithm, scores, &targets, count, &mut stats)?)
                    })?;
                }
                steps.push(policy.step(learning_rate)?);
            }
        }
        let train_bytes = allocated_bytes(policy)?;
        policy.start_offload(&self.leaving)?;
        let stepped = finish_steps(policy, &steps)?;
        let mut metrics = self.loss_metrics(exchange, scored, &stats, &drift)?;
        metrics.insert("perf/allocated_bytes", train_bytes);
        metrics.insert("perf/shared_rows", 1.0 - rows as f64 / inputs as f64);
        metrics.insert("time/load_s", policy.load_wait()?.as_secs_f64());
        metrics.merge(stepped);
        metrics.insert("learning_rate", learning_rate);
        Ok(metrics)
    }

    /// The losses, means over the tokens that were trained on, and how far the engines are apart; over all ranks.
    fn loss_metrics(
        &self,
        exchange: &Exchange,
        scored: &Scored,
        stats: &LossStats,
        drift: &Drift,
    ) -> Result<Metrics> {
        let (sums, largest) = stats.read()?;
        let (drift_sum, drift_largest) = drift.read()?;
        let own = [&sums[..], &[drift_sum, largest[0], drift_largest]].concat();
        let gathered = exchange.gather(&own)?;
        let sum = |index: usize| gathered.iter().map(|rank| rank[index]).sum::<f64>();
        let max = |index: usize| gathered.iter().map(|rank| rank[index]).fold(f64::NEG_INFINITY, f64::max);
        let (algorithm, epochs) = (&self.rlvr.algorithm, self.rlvr.epochs as f64);
        let tokens = scored.lengths.iter().sum::<f64>() * epochs;
        let losses = count(algorithm.aggregation, &scored.trained_lengths(0..scored.lengths.len())) * epochs;
        let kl_in_loss = algorithm.kl_coef > 0.0 && matches!(algorithm.kl_in, KlTerm::Loss(_));
        let clips = !matches!(
            algorithm.loss,
            PolicyLoss::Reinforce | PolicyLoss::Sapo(_) | PolicyLoss::Topr(_) | PolicyLoss::Vespo(_)
        );
        let mut metrics = Metrics::new();
        for (index, name) in SUMS.into_iter().enumerate() {
            match name {
                "loss/kl" if !kl_in_loss => {}
                "clip_fraction/low" | "clip_fraction/high" if !clips => {}
                "off_policy_fraction" if algorithm.off_policy_mask.is_none() => {}
                "loss/policy" | "loss/kl" => metrics.insert(name, sum(index) / losses),
                _ => metrics.insert(name, sum(index) / tokens),
            }
        }
        let first_tokens: f64 = scored.lengths[self.share.range(0)].iter().sum();
        metrics.insert("rollout/logprob_diff_mean", sum(SUMS.len()) / first_tokens);
        metrics.insert(LARGEST[0], max(SUMS.len() + 1));
        let drift_largest = max(SUMS.len() + 2);
        if self.rlvr.rollout.strict && drift_largest != 0.0 {
            return Err(Error::NotStrict { largest: drift_largest });
        }
        metrics.insert("rollout/logprob_diff_max", drift_largest);
        Ok(metrics)
    }

    /// What the samples show by themselves.
    fn sample_metrics(&self, scored: &Scored) -> Metrics {
        let Scored { rewards, measured, lengths, finished, turns, trained, greedy, .. } = scored;
        let groups = count_groups(measured, self.rlvr.group_size);
        let group_total = self.rlvr.prompts_per_step as f64;
        let mut metrics = Metrics::new();
        for (name, value) in [
            ("reward/mean", mean(rewards)),
            ("reward/std", std(rewards)),
            ("reward/min", smallest(rewards)),
            ("reward/max", largest(rewards)),
            ("group/all_right", groups.all_right as f64 / group_total),
            ("group/all_wrong", groups.all_wrong as f64 / group_total),
            ("group/mixed", groups.mixed as f64 / group_total),
            ("response_length/mean", mean(lengths)),
            ("response_length/min", smallest(lengths)),
            ("response_length/max", largest(lengths)),
            ("response_length/clipped", 1.0 - mean(finished)),
            ("selection/left_out", trained.iter().filter(|it| !**it).count() as f64 / trained.len() as f64),
        ] {
            metrics.insert(name, value);
        }
        if self.environment.is_some() {
            metrics.insert("turns/mean", mean(turns));
            metrics.insert("turns/min", smallest(turns));
            metrics.insert("turns/max", largest(turns));
        }
        if !greedy.is_empty() {
            metrics.insert("reward/greedy", mean(greedy));
        }
        metrics
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The unbiased standard deviation; 0 of a single value.
fn std(values: &[f64]) -> f64 {
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (values.len() - 1).max(1) as f64).sqrt()
}

fn smallest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}
