//! One RL step: sample, score, center within each group, update.

use std::time::Instant;

use anyroll_strategy::{StepStats, Zero};
use tch::Tensor;

use super::{
    Decoder, Reference, Roles, Setup,
    exchange::Exchange,
    loss::{Drift, LARGEST, LossStats, SUMS, Targets, policy_loss},
    rollout::{Purpose, Sample, Sampling, sample_seed},
    score::Scored,
};
use crate::{
    Result,
    algorithm::{count_groups, group_advantages},
    data::{Draw, Record},
    metrics::Metrics,
};

/// What a step leaves: its metrics, and whether some rank was asked to stop.
#[derive(Debug)]
pub struct StepOutcome {
    /// Over all ranks.
    pub metrics: Metrics,
    /// Whether the run should end here.
    pub stop: bool,
}

/// What this rank trains on in a step: its samples in its own order, and what goes with each.
struct Batch<'a> {
    samples: &'a [Sample],
    advantages: &'a [f64],
    /// Log-probs under the reference of all tokens of all samples, in their order.
    reference: Option<Tensor>,
    scored: &'a Scored,
}

impl Setup {
    /// Step `step`, from 0. Every rank calls; `stop` is this rank's wish to end the run after it.
    pub fn step(&self, roles: &mut Roles, exchange: &Exchange, step: u64, stop: bool) -> Result<StepOutcome> {
        let rlvr = &self.rlvr;
        let share = self.share;
        let started = Instant::now();
        let records = self.dataset.train_batch(Draw::Rollout, self.seed, step, rlvr.prompts_per_step);
        let samples = self.sample_groups(&mut roles.policy, exchange.rank(), &records, step)?;
        let generated = Instant::now();

        let scored = self.score(exchange, &records, &samples, step, stop)?;
        let own: Vec<f64> = share.samples_of(exchange.rank()).map(|sample| scored.rewards[sample]).collect();
        let advantages = group_advantages(&own, rlvr.group_size, rlvr.algorithm.divide_by_std);
        let rewarded = Instant::now();

        let reference = match &mut roles.reference {
            Some(reference) => Some(self.reference_logprobs(reference, &samples)?),
            None => None,
        };
        let batch = Batch { samples: &samples, advantages: &advantages, reference, scored: &scored };
        let update = self.update(&mut roles.policy, exchange, &batch, step)?;
        let trained = Instant::now();

        let mut metrics = self.sample_metrics(&scored);
        metrics.merge(scored.terms.clone());
        metrics.merge(update);
        let tokens: f64 = scored.lengths.iter().sum();
        let step_s = (trained - started).as_secs_f64();
        metrics.insert("perf/tokens_per_s", tokens / step_s);
        metrics.insert("time/generate_s", (generated - started).as_secs_f64());
        metrics.insert("time/reward_s", (rewarded - generated).as_secs_f64());
        metrics.insert("time/train_s", (trained - rewarded).as_secs_f64());
        metrics.insert("time/step_s", step_s);
        Ok(StepOutcome { metrics, stop: scored.stop })
    }

    /// This rank's groups, in its own order.
    fn sample_groups(
        &self,
        policy: &mut Zero<Decoder>,
        rank: usize,
        records: &[Record],
        step: u64,
    ) -> Result<Vec<Sample>> {
        let rollout = &self.rlvr.rollout;
        let how = Sampling { temperature: rollout.temperature, top_k: rollout.top_k, top_p: rollout.top_p };
        let seed = |sample| sample_seed(Purpose::Rollout, self.seed, step, sample);
        let asked: Vec<(&Record, u64)> = self
            .share
            .samples_of(rank)
            .map(|sample| (&records[sample / self.rlvr.group_size], seed(sample)))
            .collect();
        self.sample(policy, &asked, how)
    }

    /// Log-probs of the samples' completions under the reference, fp32, all tokens in a row.
    fn reference_logprobs(&self, reference: &mut Reference, samples: &[Sample]) -> Result<Tensor> {
        let parts: Result<Vec<Tensor>> = samples
            .chunks(reference.micro_batch_size)
            .map(|samples| Ok(reference.model.score(&self.pack(samples)?)?.logprobs))
            .collect();
        Ok(Tensor::f_cat(&parts?, 0)?)
    }

    /// Trains on the samples: `epochs` times over all mini-batches, an optimizer step each.
    fn update(
        &self,
        policy: &mut Zero<Decoder>,
        exchange: &Exchange,
        batch: &Batch,
        step: u64,
    ) -> Result<Metrics> {
        let rlvr = &self.rlvr;
        let schedule = self.schedule(&rlvr.optimizer.schedule);
        let learning_rate = rlvr.optimizer.adamw.learning_rate * schedule.factor(step, rlvr.steps);
        let (mut stats, mut drift) = (LossStats::default(), Drift::default());
        let mut steps: Vec<StepStats> = Vec::new();
        for epoch in 0..rlvr.epochs {
            for mini_batch in 0..self.share.mini_batches {
                for (samples, targets) in self.mini_batch(batch, mini_batch)? {
                    policy.accumulate(&self.pack(samples)?, |scores| {
                        if epoch == 0 && mini_batch == 0 {
                            // The weights are still those that sampled: what differs is the engine.
                            drift.add(&scores.logprobs, &targets.old_logprobs)?;
                        }
                        Ok(policy_loss(&rlvr.algorithm, scores, &targets, &mut stats)?)
                    })?;
                }
                steps.push(policy.step(learning_rate)?);
            }
        }
        let mut grad_norm = 0.0;
        for stats in &steps {
            grad_norm += policy.finish_step(stats)? / steps.len() as f64;
        }
        let mut metrics = self.loss_metrics(exchange, batch.scored, &stats, &drift)?;
        metrics.insert("grad_norm", grad_norm);
        metrics.insert("learning_rate", learning_rate);
        Ok(metrics)
    }

    /// The micro-batches of a mini-batch with what they are trained towards.
    fn mini_batch<'a>(&self, batch: &Batch<'a>, mini_batch: usize) -> Result<Vec<(&'a [Sample], Targets)>> {
        let own = self.share.own_range(mini_batch);
        let tokens = batch.scored.lengths[self.share.range(mini_batch)].iter().sum();
        let tokens_of = |samples: &[Sample]| samples.iter().map(Sample::completion_len).sum::<usize>();
        let mut offset = tokens_of(&batch.samples[..own.start]);
        let samples = batch.samples[own.clone()].chunks(self.micro_batch_size);
        let advantages = batch.advantages[own].chunks(self.micro_batch_size);
        let mut parts = Vec::new();
        for (samples, advantages) in samples.zip(advantages) {
            let old: Vec<f32> = samples.iter().flat_map(|sample| sample.logprobs.iter().copied()).collect();
            let repeated: Vec<f32> = samples
                .iter()
                .zip(advantages)
                .flat_map(|(sample, &advantage)| {
                    std::iter::repeat_n(advantage as f32, sample.completion_len())
                })
                .collect();
            let to_device = |values: &[f32]| Tensor::f_from_slice(values)?.f_to_device(self.device);
            let own_tokens = tokens_of(samples);
            let part = |logprobs: &Tensor| logprobs.f_narrow(0, offset as i64, own_tokens as i64);
            let targets = Targets {
                old_logprobs: to_device(&old)?,
                advantages: to_device(&repeated)?,
                ref_logprobs: batch.reference.as_ref().map(part).transpose()?,
                tokens,
            };
            parts.push((samples, targets));
            offset += own_tokens;
        }
        Ok(parts)
    }

    /// Means over the tokens that were trained on, over all ranks; and how far the engines are apart.
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
        let tokens = scored.lengths.iter().sum::<f64>() * self.rlvr.epochs as f64;
        let mut metrics = Metrics::new();
        for (index, name) in SUMS.into_iter().enumerate() {
            if name != "loss/kl" || self.rlvr.algorithm.kl_coef > 0.0 {
                metrics.insert(name, sum(index) / tokens);
            }
        }
        let first_tokens: f64 = scored.lengths[self.share.range(0)].iter().sum();
        metrics.insert("rollout/logprob_diff_mean", sum(SUMS.len()) / first_tokens);
        metrics.insert(LARGEST[0], max(SUMS.len() + 1));
        metrics.insert("rollout/logprob_diff_max", max(SUMS.len() + 2));
        Ok(metrics)
    }

    /// What the samples show by themselves.
    fn sample_metrics(&self, scored: &Scored) -> Metrics {
        let Scored { rewards, lengths, finished, .. } = scored;
        let groups = count_groups(rewards, self.rlvr.group_size);
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
        ] {
            metrics.insert(name, value);
        }
        metrics
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The unbiased standard deviation.
fn std(values: &[f64]) -> f64 {
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (values.len() - 1) as f64).sqrt()
}

fn smallest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}
