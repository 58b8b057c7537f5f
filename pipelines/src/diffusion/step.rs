//! One step of any method: scores, advantages and metrics of samples.

use std::{mem, ops::Range, time::Instant};

use anyroll_algorithm::{Earned, fill_missing};
use anyroll_backends::profile::span;
use anyroll_config::{Advantage, GrpoConfig, MethodConfig, Scale};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::{
    ImageModels, ImageTask,
    noise::{Purpose, order},
    policy_gradient::as_flow_grpo,
    scorer::Scores,
};
use crate::{
    Result,
    metrics::Metrics,
    train::{Exchange, Reduce, StepOutcome, Update, reduced},
};

/// Scores of all ranks' samples, in the step's order.
pub struct Scored {
    /// Reward of each sample.
    pub rewards: Vec<f64>,
    /// Number of samples without a reward.
    pub dropped: usize,
    /// Statistics of each term of the reward.
    pub terms: Vec<TermSums>,
    /// True if some rank was asked to stop.
    pub stop: bool,
}

reduced! {
    /// Sums over samples of a term of the reward.
    pub struct TermSums {
        /// Sum of its finite scores.
        sum score: f64,
        /// Number of samples with a finite score.
        sum finite: f64,
        /// Number of samples on which the term failed.
        sum failed: f64,
    }
}

/// Scores that a rank sends to the others.
#[derive(Serialize, Deserialize)]
struct RankScores {
    /// Score of each sample, in the rank's order; not finite if a term excludes the image.
    total: Vec<f64>,
    /// Statistics of each term.
    terms: Vec<TermSums>,
    /// True if this rank was asked to stop.
    stop: bool,
}

/// Times at which the parts of a step began.
pub struct Clock {
    started: Instant,
    generated: Instant,
    rewarded: Instant,
}

impl Clock {
    /// Creates the clock of a step that began at `started`, with samples complete at `generated`.
    pub fn new(started: Instant, generated: Instant) -> Self {
        Self { started, generated, rewarded: Instant::now() }
    }
}

impl ImageTask {
    /// Runs step `step`, from 0. `stop` is this rank's request to end the run after the step. Every rank must call
    /// this.
    pub fn step(
        &self,
        models: &mut ImageModels,
        exchange: &Exchange,
        step: u64,
        stop: bool,
    ) -> Result<StepOutcome> {
        match &self.config.method {
            MethodConfig::Refl(refl) => self.step_by_backpropagation(models, exchange, step, stop, refl),
            MethodConfig::DraftK(draft) => {
                self.step_by_backpropagation(models, exchange, step, stop, &self.as_refl(draft))
            }
            MethodConfig::FlowGrpo(grpo) => self.step_by_policy_gradient(models, exchange, step, stop, grpo),
            MethodConfig::DanceGrpo(grpo) => {
                self.step_by_policy_gradient(models, exchange, step, stop, &as_flow_grpo(grpo))
            }
            MethodConfig::DiffusionNft(nft) => {
                self.step_by_forward_process(models, exchange, step, stop, nft)
            }
        }
    }

    /// Scores the images of this rank's latents, and exchanges scores with the other ranks.
    pub fn score(
        &self,
        exchange: &Exchange,
        latents: &Tensor,
        labels: &Tensor,
        step: u64,
        stop: bool,
    ) -> Result<Scored> {
        let _named = span(format_args!("score"));
        let scores = self.scorer.score(&self.paint_for_reward(latents, labels)?)?;
        self.exchange_scores(exchange, scores, step, stop)
    }

    /// Returns all ranks' scores, given this rank's. A sample with a non-finite score gets the mean of the rest of
    /// its group, so that the sample teaches nothing.
    pub fn exchange_scores(
        &self,
        exchange: &Exchange,
        scores: Scores,
        step: u64,
        stop: bool,
    ) -> Result<Scored> {
        let values =
            |scores: &Tensor| -> Result<Vec<f64>> { Ok(Vec::try_from(scores.f_to_kind(Kind::Double)?)?) };
        let terms = scores.parts.iter().zip(self.scorer.failed(&scores.failures)).map(|(part, failed)| {
            let finite: Vec<f64> = values(part)?.into_iter().filter(|score| score.is_finite()).collect();
            Ok(TermSums { score: finite.iter().sum(), finite: finite.len() as f64, failed })
        });
        let own = RankScores { total: values(&scores.total)?, terms: terms.collect::<Result<_>>()?, stop };
        let mut of_ranks = exchange.gather(&own)?;
        let stop = of_ranks.iter().any(|rank| rank.stop);
        let totals: Vec<Vec<f64>> = of_ranks.iter_mut().map(|rank| mem::take(&mut rank.total)).collect();
        let mut terms = mem::take(&mut of_ranks[0].terms);
        of_ranks.into_iter().skip(1).for_each(|rank| terms.reduce(rank.terms));
        let failed: Vec<f64> = terms.iter().map(|term| term.failed).collect();
        self.scorer.check_error_rates(&failed, self.share.samples(), scores.failures)?;
        let scores: Vec<Option<f64>> = self
            .share
            .ordered(totals)
            .into_iter()
            .map(|score: f64| score.is_finite().then_some(score))
            .collect();
        let dropped = scores.iter().filter(|score| score.is_none()).count();
        let mut rewards =
            fill_missing(&scores, self.share.group_size).unwrap_or_else(|| vec![0.0; scores.len()]);
        if self.config.shuffle_rewards {
            let order = order(Purpose::Shuffle, self.seed, step, rewards.len());
            rewards = order.into_iter().map(|sample| rewards[sample]).collect();
        }
        Ok(Scored { rewards, dropped, terms, stop })
    }

    /// This rank's advantages, clamped: fp32 `[N]`.
    pub fn advantages(&self, scored: &Scored, numbers: &[usize], scale: Scale, clip: f64) -> Result<Tensor> {
        const EPS: f64 = 1e-4;
        let kind = Advantage::Grpo(GrpoConfig { scale, eps: EPS });
        let lengths = vec![1.0; scored.rewards.len()];
        let (rewards, group_size) = (&scored.rewards[..], self.share.group_size);
        let all = kind.formula().of_samples(&Earned { rewards, lengths: &lengths, greedy: &[], group_size });
        let own: Vec<f32> = numbers.iter().map(|&number| all[number].clamp(-clip, clip) as f32).collect();
        Ok(Tensor::f_from_slice(&own)?.f_to_device(self.device)?)
    }

    /// Number of samples in a mini-batch, over all ranks.
    pub fn mini_batch_len(&self) -> f64 {
        self.share.range(0).len() as f64
    }

    /// Waits for a step's optimizer steps, and returns the metrics of the step, including `losses`.
    pub fn finish(
        &self,
        models: &mut ImageModels,
        update: Update,
        scored: &Scored,
        losses: Metrics,
        clock: &Clock,
    ) -> Result<StepOutcome> {
        let stepped = models.learner.finish(update)?;
        let mut metrics = reward_metrics(scored, self.scorer.names());
        metrics.merge(losses);
        metrics.merge(stepped.metrics);
        metrics.merge(stepped.costs);
        let images = scored.rewards.len() as f64;
        let step_s = clock.started.elapsed().as_secs_f64();
        let generate_s = (clock.generated - clock.started).as_secs_f64();
        metrics.insert("perf/images_per_s", images / step_s);
        if generate_s > 0.0 {
            let denoised = images * self.sampler.steps() as f64;
            metrics.insert("perf/denoising_steps_per_s", denoised / generate_s);
        }
        metrics.insert("time/generate_s", generate_s);
        metrics.insert("time/reward_s", (clock.rewarded - clock.generated).as_secs_f64());
        metrics.insert("time/train_s", clock.rewarded.elapsed().as_secs_f64());
        metrics.insert("time/step_s", step_s);
        Ok(StepOutcome { metrics, samples: Vec::new(), stop: scored.stop })
    }
}

/// Metrics of the rewards, and of each term by name.
fn reward_metrics<'a>(scored: &Scored, names: impl Iterator<Item = &'a str>) -> Metrics {
    let rewards = &scored.rewards;
    let count = rewards.len() as f64;
    let mut metrics = Metrics::new();
    // If no reward counts, there is no mean.
    if scored.dropped < rewards.len() {
        let mean = rewards.iter().sum::<f64>() / count;
        let squares: f64 = rewards.iter().map(|reward| (reward - mean).powi(2)).sum();
        metrics.insert("reward/mean", mean);
        metrics.insert("reward/std", (squares / (count - 1.0).max(1.0)).sqrt());
        metrics.insert("reward/min", rewards.iter().copied().fold(f64::INFINITY, f64::min));
        metrics.insert("reward/max", rewards.iter().copied().fold(f64::NEG_INFINITY, f64::max));
    }
    metrics.insert("reward/dropped", scored.dropped as f64);
    for (name, &TermSums { score, finite, failed }) in names.zip(&scored.terms) {
        if finite > 0.0 {
            metrics.insert(format!("reward/{name}/mean"), score / finite);
        }
        if finite < count {
            metrics.insert(format!("reward/{name}/dropped"), count - finite);
        }
        if failed > 0.0 {
            metrics.insert(format!("reward/{name}/errors"), failed);
        }
    }
    metrics
}

/// The rows `range` of a tensor.
pub fn rows(tensor: &Tensor, range: &Range<usize>) -> Result<Tensor> {
    Ok(tensor.f_narrow(0, range.start as i64, range.len() as i64)?)
}
