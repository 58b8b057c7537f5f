//! The phases of a step of a language model, following [`crate::rlvr`] and [`crate::offline`].

use anyroll_config::{
    FrozenWeights, Offload, OptimizerOffload, PipelineConfig, Precision, Reduction, RolloutWeights,
};
use anyroll_models::{Decoder, PackedSize};
use anyroll_strategy::{
    plan::{Ranks, held},
    timeline::Elapsed,
};

use super::{
    Cluster, Phase, StepTime,
    demand::Demand,
    network::Network,
    rates::Rates,
    sampling::Sampling,
    training::{Away, Place, Trained, Update, Worked, scored, trained},
};
use crate::{
    NoTime,
    plan::{Strategies, texts::Texts},
    run::{Run, Strategy},
    train::zero_config,
};

impl Texts {
    /// Time of a step of `run` under `strategies` on `cluster`, whose ranks share shards in groups of `sharers`.
    pub(in crate::plan) fn time(
        &self,
        run: &Run,
        strategies: &Strategies,
        (cluster, sharers): (&Cluster, usize),
    ) -> Result<StepTime, NoTime> {
        let policy = &strategies.policy;
        let place = place(policy, cluster, sharers)?;
        if cluster.is_16_bit && policy.precision == Precision::Fp32 {
            return Err(NoTime::Fp32);
        }
        if policy.tensor_parallel > 1 {
            return Err(NoTime::Tensor);
        }
        if policy.expert_parallel > 1 {
            return Err(NoTime::Experts);
        }
        if policy.frozen_weights == FrozenWeights::Nf4 {
            return Err(NoTime::FourBits);
        }
        let mut trained = [Some(policy), strategies.critic.as_ref()].into_iter().flatten();
        if trained.any(|it| it.offload.optimizer == OptimizerOffload::CpuStep) {
            return Err(NoTime::CpuStep);
        }
        let step = Step { texts: self, run, strategies, at: (place, cluster.rates(policy)) };
        let sampling = step.sampling();
        let between: Vec<Phase> = [step.scoring()?, step.critic()?].into_iter().flatten().collect();
        let trained = step.training(between.iter().map(|phase| phase.seconds).sum())?;
        let training = step.training_phases(&trained, sampling.map_or(0.0, |phase| phase.seconds));
        let phases = sampling.into_iter().chain(between).chain(training).collect();
        Ok(step.finish(phases, &trained))
    }
}

/// Ranks of a role, and their groups.
fn place(strategy: &Strategy, cluster: &Cluster, sharers: usize) -> Result<Place, NoTime> {
    let rates = cluster.rates(strategy);
    let Cluster { hosts, devices_per_host, link, .. } = *cluster;
    let between = link.unwrap_or(f64::INFINITY);
    let network = Network { hosts, devices_per_host, in_host: rates.in_host, between };
    let uneven = |ranks| NoTime::Uneven { ranks, devices_per_host };
    let shards = network.neighbours(sharers).ok_or(uneven(sharers))?;
    let together = strategy.sequence_parallel;
    network.neighbours(together).ok_or(uneven(together))?;
    Ok(Place { network, shards, ordered: strategy.reduction == Reduction::Ordered })
}

/// A step of a rank.
struct Step<'a> {
    texts: &'a Texts,
    run: &'a Run,
    strategies: &'a Strategies,
    at: (Place, Rates),
}

impl Step<'_> {
    /// Sampling on the policy's devices.
    fn sampling(&self) -> Option<Phase> {
        let PipelineConfig::Rlvr(rlvr) = &self.run.config.pipeline else { return None };
        if self.run.rollout.is_some() {
            return None;
        }
        let (together, samples) = (self.texts.together, self.texts.samples_per_rank);
        let sampling = Sampling {
            sequences: samples * together,
            in_flight: rlvr.rollout.batch_size.min(samples).max(1) * together,
            prompts: self.run.batches.prompts_per_rank * together,
            prompt: self.texts.work.prompt,
            completion: self.texts.work.completion,
            together,
        };
        let dtype = zero_config(&self.strategies.policy).precision.dtype();
        let (seconds, demand) = sampling.time(&self.texts.model, dtype, &self.at.1);
        Some(Phase::new("sampling", Elapsed { total: seconds, waited: 0.0 }, demand))
    }

    /// Log-probs of the reference, or of the policy itself.
    fn scoring(&self) -> Result<Option<Phase>, NoTime> {
        let Strategies { policy, reference, .. } = self.strategies;
        let (model, strategy): (&Decoder, &Strategy) = match reference {
            Some(reference) => (&self.texts.reference, reference),
            None if self.texts.scores_itself => (&self.texts.model, policy),
            None => return Ok(None),
        };
        let all = self.update(strategy, self.texts.samples_per_rank);
        let (elapsed, demand) = scored(model, zero_config(strategy), all, self.at).ok_or(NoTime::Layers)?;
        Ok(Some(Phase::new("scoring", elapsed, demand)))
    }

    fn critic(&self) -> Result<Option<Phase>, NoTime> {
        let (Some(critic), Some(model)) = (&self.strategies.critic, &self.texts.critic) else {
            return Ok(None);
        };
        let trained = self.trains(model, critic, 0)?;
        let all = self.update(critic, self.texts.samples_per_rank);
        let values = scored(model, zero_config(critic), all, self.at).ok_or(NoTime::Layers)?;
        let (mut elapsed, mut demand) = values;
        for (part, of_part) in [trained.forward, trained.backward, trained.optimizer] {
            elapsed.total += part.total;
            elapsed.waited += part.waited;
            demand = demand + of_part;
        }
        Ok(Some(Phase::new("critic", elapsed, demand)))
    }

    /// The policy's updates. Its states return meanwhile, and during the `before` seconds before.
    fn training(&self, before: f64) -> Result<Trained, NoTime> {
        let policy = &self.strategies.policy;
        let model = if policy.keep_logits { &self.texts.keeping_logits } else { &self.texts.model };
        let returned = (before * self.at.1.host_link) as usize;
        self.trains(model, policy, self.offloaded().saturating_sub(returned))
    }

    fn trains(&self, model: &impl Worked, strategy: &Strategy, away: usize) -> Result<Trained, NoTime> {
        let (updates, sequences) = self.updates();
        let update = self.update(strategy, sequences);
        let config = zero_config(strategy);
        trained(model, config, (update, updates), Away { bytes: away }, self.at).ok_or(NoTime::Layers)
    }

    fn training_phases(&self, trained: &Trained, sampling: f64) -> Vec<Phase> {
        let Trained { forward, backward, optimizer, gathered, .. } = *trained;
        let parts = [("forward", forward), ("backward", backward), ("optimizer", optimizer)];
        let mut phases: Vec<Phase> =
            parts.into_iter().map(|(name, (elapsed, demand))| Phase::new(name, elapsed, demand)).collect();
        if gathered.0.total > 0.0 {
            phases.push(Phase::new("weights", gathered.0, gathered.1));
        }
        let leaving = self.offloaded() as f64 / self.at.1.host_link;
        if leaving > 0.0 {
            // Sampling goes on meanwhile. States return while the passes run; the optimizer waits for the rest.
            let waited = (leaving - sampling).max(0.0);
            let demand = Demand { host_link_s: 2.0 * leaving, ..Demand::default() };
            phases.push(Phase::new("offload", Elapsed { total: waited, waited }, demand));
        }
        phases
    }

    /// Bytes of optimizer states that a rank sends to the host in a step.
    fn offloaded(&self) -> usize {
        let policy = &self.strategies.policy;
        let samples =
            matches!(self.run.config.pipeline, PipelineConfig::Rlvr(_)) && self.run.rollout.is_none();
        if !samples || policy.offload.optimizer != OptimizerOffload::BetweenSteps {
            return 0;
        }
        let shards = self.at.0.shards.ranks;
        let ranks = Ranks {
            world_size: shards,
            shards,
            tensor: 1,
            experts: 1,
            granularity_bytes: 1,
            sums_in_rank_order: true,
        };
        held(&self.texts.model, zero_config(policy), true, ranks).optimizer
    }

    /// Updates of a step, and a rank's sequences in each.
    fn updates(&self) -> (usize, usize) {
        let per_update = self.run.batches.sequences_per_update;
        let epochs = match &self.run.config.pipeline {
            PipelineConfig::Rlvr(rlvr) => rlvr.epochs,
            _ => 1,
        };
        ((self.texts.samples_per_rank / per_update.max(1)).max(1) * epochs.max(1), per_update)
    }

    /// Micro-batches of so many sequences.
    fn update(&self, strategy: &Strategy, sequences: usize) -> Update {
        let work = &self.texts.work;
        let longest = (work.prompt + work.completion).saturating_sub(1).max(1);
        let most = match strategy.micro_batch_tokens {
            Some(tokens) => (tokens / longest).max(1),
            None => strategy.micro_batch_size.max(1),
        };
        let size = |sequences| {
            let sharing = work.sharing.min(sequences);
            let whole = PackedSize::of_groups(sequences, sharing, work.prompt, work.completion);
            whole.over(strategy.sequence_parallel)
        };
        let rest = sequences % most;
        if sequences < most {
            return Update { count: 1, size: size(sequences.max(1)), rest: None };
        }
        Update { count: sequences / most, size: size(most), rest: (rest > 0).then(|| size(rest)) }
    }

    fn finish(&self, phases: Vec<Phase>, trained: &Trained) -> StepTime {
        let seconds: f64 = phases.iter().map(|phase| phase.seconds).sum();
        let work = &self.texts.work;
        let (updates, sequences) = self.updates();
        let tokens = updates * sequences * (work.prompt + work.completion).saturating_sub(1);
        let training_s = trained.seconds();
        StepTime {
            seconds,
            training_s,
            tokens,
            tokens_per_s: tokens as f64 / seconds,
            training_tokens_per_s: tokens as f64 / training_s,
            flops_utilization: trained.model_flops / training_s / self.at.1.peak,
            phases,
            not_counted: self.not_counted(),
        }
    }

    fn not_counted(&self) -> Vec<String> {
        let mut parts = vec!["rewards, evaluations and checkpoints".to_owned()];
        if let Some(rollout) = &self.run.rollout {
            parts.push(rollout.describe());
        }
        let policy = &self.strategies.policy;
        if let PipelineConfig::Rlvr(rlvr) = &self.run.config.pipeline {
            if rlvr.rollout.strict {
                parts.push("the cost of `rollout.strict`".into());
            }
            if rlvr.rollout.weights == RolloutWeights::Fp8 {
                parts.push("the gain of `rollout.weights: fp8`".into());
            }
            if self.run.config.model.has_adapters() && !rlvr.rollout.merge_adapters {
                parts.push("the cost of sampling with separate adapters".into());
            }
        }
        if self.strategies.reference.as_ref().is_some_and(|it| it.offload.params == Offload::BetweenSteps) {
            parts.push("loading the reference".into());
        }
        if policy.sequence_parallel > 1 {
            parts.push("ordering heads for `sequence_parallel`".into());
        }
        parts
    }
}
