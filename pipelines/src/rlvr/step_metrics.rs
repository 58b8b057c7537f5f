//! Metrics of a step, from rows, sums and clocks.

use std::{
    mem,
    time::{Duration, Instant},
};

use anyroll_algorithm::count_groups;
use anyroll_config::KlTerm;

use super::{
    Task,
    loss::{CorrectionSums, LossTotals, count},
    prepare::Batch,
    rewards::Rewards,
    rollout::Spent,
    rows::{Row, Scored},
    terms::TermSums,
    update::{PolicyUpdate, Updated},
};
use crate::{Result, metrics::Metrics, train::Exchange};

/// Metrics of a step's samples and update.
pub fn step_metrics(task: &Task, rewards: &Rewards, scored: &Scored, updated: &Updated) -> Metrics {
    let mut metrics = of_rows(task, scored);
    metrics.merge(TermSums::metrics(&scored.terms, rewards.grader.sum.names()));
    metrics.merge(scored.selection.clone());
    if let Some(staleness) = &scored.staleness {
        metrics.merge(staleness.metrics(task.share.prompts));
    }
    metrics.merge(updated.critic.clone());
    if let Some(policy) = &updated.policy {
        metrics.merge(of_update(task, scored, policy));
    }
    metrics
}

/// Durations of the parts of a step.
pub struct Clock {
    started: Instant,
    last: Instant,
    /// Time of gathering the weights.
    pub gather: Duration,
    /// Time and work of sampling and scoring.
    pub spent: Spent,
    /// Bytes allocated on the device at the end of sampling and scoring.
    pub generate_bytes: f64,
    /// Time of preparing and updating.
    pub train: Duration,
}

impl Clock {
    /// Starts the clock of a step.
    pub fn start() -> Self {
        let (started, zero) = (Instant::now(), Duration::ZERO);
        let spent = Spent::default();
        Self { started, last: started, gather: zero, spent, generate_bytes: 0.0, train: zero }
    }

    /// Time since the last lap.
    pub fn lap(&mut self) -> Duration {
        let now = Instant::now();
        now - mem::replace(&mut self.last, now)
    }

    /// Metrics of the step, which ends with the last lap and has `tokens` tokens.
    pub fn metrics(&self, task: &Task, tokens: f64) -> Metrics {
        let Spent { effort, waited, generating, rewarding } = self.spent;
        let step_s = (self.last - self.started).as_secs_f64();
        let mut metrics = named([
            ("perf/tokens_per_s", tokens / step_s),
            ("perf/generate_allocated_bytes", self.generate_bytes),
            ("perf/generate_passes", effort.passes as f64),
            ("time/offload_s", waited.as_secs_f64()),
            ("time/gather_s", self.gather.as_secs_f64()),
            ("time/generate_s", generating.as_secs_f64()),
            ("time/reward_s", rewarding.as_secs_f64()),
            ("time/train_s", self.train.as_secs_f64()),
            ("time/step_s", step_s),
        ]);
        if task.config.rollout.environment.is_some() {
            metrics.insert("perf/kept_tokens", effort.kept_tokens as f64);
        }
        if let Some(per_proposal) = effort.speculated.tokens_per_proposal() {
            metrics.insert("perf/proposed_tokens", effort.speculated.proposed as f64);
            metrics.insert("perf/accepted_tokens", effort.speculated.accepted as f64);
            metrics.insert("perf/tokens_per_proposal", per_proposal);
        }
        if let Some(own_devices) = effort.own_devices {
            metrics.insert("time/rollout_s", own_devices.as_secs_f64());
            metrics.insert("time/weights_s", effort.sent.as_secs_f64());
            metrics.insert("perf/rollout_engines", effort.engines as f64);
        }
        metrics
    }
}

/// Metrics of the rows of a step's samples.
fn of_rows(task: &Task, scored: &Scored) -> Metrics {
    let (rewards, lengths) = (scored.column(|row| row.reward), scored.lengths());
    let measured = scored.column(|row| row.measured);
    let groups = count_groups(&measured, task.share.group_size);
    let group_total = task.share.prompts as f64;
    let share = |is: fn(&Row) -> bool| {
        scored.rows.iter().filter(|row| is(row)).count() as f64 / scored.rows.len() as f64
    };
    let finished = scored.column(|row| f64::from(u8::from(row.finished)));
    let mut metrics = named([
        ("reward/mean", mean(&rewards)),
        ("reward/std", std(&rewards)),
        ("reward/min", smallest(&rewards)),
        ("reward/max", largest(&rewards)),
        ("group/all_right", groups.all_right as f64 / group_total),
        ("group/all_wrong", groups.all_wrong as f64 / group_total),
        ("group/mixed", groups.mixed as f64 / group_total),
        ("response_length/mean", mean(&lengths)),
        ("response_length/min", smallest(&lengths)),
        ("response_length/max", largest(&lengths)),
        ("response_length/clipped", 1.0 - mean(&finished)),
        ("selection/left_out", share(|row| !row.trained)),
    ]);
    if task.config.rollout.environment.is_some() {
        let turns = scored.column(|row| row.turns as f64);
        metrics.insert("turns/mean", mean(&turns));
        metrics.insert("turns/min", smallest(&turns));
        metrics.insert("turns/max", largest(&turns));
    }
    if !scored.greedy.is_empty() {
        metrics.insert("reward/greedy", mean(&scored.greedy));
    }
    metrics
}

/// Metrics of KL divergences in the reward, values and importance weights, over all ranks. Every rank must call this.
pub fn batch_metrics(batch: &Batch, exchange: &Exchange, scored: &Scored) -> Result<Metrics> {
    let mut metrics = batch.kl.as_ref().map_or_else(Metrics::new, |kl| kl.metrics(scored));
    if let Some(values) = &batch.values {
        metrics.merge(values.metrics(exchange)?);
    }
    if let Some(correction) = &batch.correction {
        let tokens = scored.tokens();
        let own = CorrectionSums::read(&correction.stack()?)?;
        let CorrectionSums { weights, squares, changed } = exchange.reduce(&own)?;
        metrics.insert("rollout/weight_mean", weights / tokens);
        metrics.insert("rollout/weight_changed", changed / tokens);
        // Kish's effective fraction of the tokens: 1 if all weights are equal. It is 0 if all tokens are masked.
        let effective = if squares > 0.0 { weights.powi(2) / (squares * tokens) } else { 0.0 };
        metrics.insert("rollout/effective_share", effective);
    }
    Ok(metrics)
}

/// Metrics of the policy's update.
fn of_update(task: &Task, scored: &Scored, update: &PolicyUpdate) -> Metrics {
    let mut metrics = of_losses(task, scored, &update.totals);
    metrics.merge(update.stepped.costs.clone());
    metrics.insert("perf/shared_rows", update.shared_rows);
    metrics.insert("perf/rank_balance", update.rank_balance);
    metrics.insert("time/load_s", update.load_wait.as_secs_f64());
    metrics.merge(update.stepped.metrics.clone());
    metrics.merge(update.routers.clone());
    metrics
}

/// Metrics of the losses, means over trained tokens, and of the difference between sampling and training.
fn of_losses(task: &Task, scored: &Scored, totals: &LossTotals) -> Metrics {
    let (algorithm, epochs) = (&task.config.algorithm, task.config.epochs as f64);
    let losses = count(algorithm.aggregation, &scored.trained_lengths(0..scored.rows.len())) * epochs;
    let tokens = scored.tokens() * epochs;
    let kl_in_loss = algorithm.kl_coef > 0.0 && matches!(algorithm.kl_in, KlTerm::Loss(_));
    let sums = &totals.sums;
    let mut metrics = Metrics::new();
    metrics.insert("loss/policy", sums.policy / losses);
    if kl_in_loss {
        metrics.insert("loss/kl", sums.kl / losses);
    }
    metrics.insert("kl/old", sums.kl_old / tokens);
    metrics.insert("entropy", sums.entropy / tokens);
    if algorithm.loss.formula().clips() {
        metrics.insert("clip_fraction/low", sums.clipped_low / tokens);
        metrics.insert("clip_fraction/high", sums.clipped_high / tokens);
    }
    metrics.insert("ratio/mean", sums.ratio / tokens);
    if algorithm.off_policy_mask.is_some() {
        metrics.insert("off_policy_fraction", sums.off_policy / tokens);
    }
    let first = scored.rows[task.share.range(0)].iter().map(|row| row.tokens as f64);
    metrics.insert("rollout/logprob_diff_mean", totals.drift / first.sum::<f64>());
    metrics.insert("ratio/max", totals.ratio);
    metrics.insert("rollout/logprob_diff_max", totals.largest_drift);
    metrics
}

fn named<const N: usize>(values: [(&str, f64); N]) -> Metrics {
    let mut metrics = Metrics::new();
    values.into_iter().for_each(|(name, value)| metrics.insert(name, value));
    metrics
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Unbiased standard deviation; 0 for a single value.
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
