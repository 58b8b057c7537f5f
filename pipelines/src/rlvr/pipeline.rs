//! [`Rlvr`]: what the loop trains here.

use std::path::Path;

use anyroll_strategy::checkpoint::{self, Saver};
use serde::{Deserialize, Serialize};

use super::{Critic, Roles, Setup, own_devices::OwnDevices, under_way::Rollout};
use crate::{
    Error, Result,
    algorithm::Moments,
    config::{Advantage, AlgorithmConfig, GrpoConfig, PolicyLoss, Role, Run, Scale},
    data::Dataset,
    launch::Rank,
    metrics::Metrics,
    reward::HeldModel,
    samples::Phase,
    train::{Evaluation, Exchange, Kept, Pipeline, Place, Plan, Reference, StepOutcome, adamw, describe},
};

/// A language model that learns from verifiable rewards.
pub struct Rlvr {
    run: Run,
    place: Place,
    /// Where the reference will be.
    reference_place: Option<Place>,
    setup: Setup,
    roles: Roles,
    /// This rank's.
    rollout: Rollout,
}

/// What one step leaves for the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Carried {
    /// Batches of prompts that the steps before drew: as many as there were steps, but with `mixed_groups`.
    pub batches: u64,
    /// The weight of the KL divergence off the reward, once a controller has moved it.
    #[serde(default)]
    pub kl_coef: Option<f64>,
    /// The moments of all rewards so far, if rewards are normalized by them.
    #[serde(default)]
    pub rewards: Option<Moments>,
}

impl Rlvr {
    /// Prepares a run, its policy on `place`, with its first weights. Opens the other roles' devices.
    pub fn new(run: Run, dataset: Dataset, place: Place, rank: &Rank) -> Result<Self> {
        let setup = Setup::new(&run, dataset, &place)?;
        let optimizer = match &setup.rlvr.warmup {
            Some(warmup) if warmup.steps > 0 => &warmup.optimizer,
            _ => &setup.rlvr.optimizer,
        };
        let policy = setup.policy(&run, &place, optimizer)?;
        let beside =
            |name, role: Option<&Role>| role.map(|role| place.beside(name, role, &run, rank)).transpose();
        let reference_place = beside("reference", run.held_reference())?;
        let critic_place = beside("critic", run.critic.as_ref())?;
        let critic = critic_place.map(|place| Critic::new(&run, &setup, &place)).transpose()?.flatten();
        let own_devices = |role| OwnDevices::open(&setup, role, rank.local_rank);
        let devices = run.rollout.as_ref().map(own_devices).transpose()?;
        let reward_models = HeldModel::all(&setup.rlvr.reward, &run, &place, rank)?;
        let roles = Roles { policy, reference: None, critic, reward_models };
        let rollout = Rollout { devices, ..Rollout::default() };
        Ok(Self { run, place, reference_place, setup, roles, rollout })
    }

    /// Whether there is something under way between steps.
    fn is_asynchronous(&self) -> bool {
        self.setup.rlvr.rollout.asynchronous.ahead > 0
    }
}

impl Pipeline for Rlvr {
    type Carried = Carried;

    fn plan(&self) -> Plan {
        let rlvr = &self.setup.rlvr;
        Plan {
            warmup_steps: rlvr.warmup.as_ref().map_or(0, |warmup| warmup.steps),
            steps: rlvr.steps.number(),
            evaluate_every: Some(rlvr.evaluation.every),
            save_every: rlvr.checkpoint.every,
            keep_last: rlvr.checkpoint.keep_last,
        }
    }

    fn best_by(&self, evaluation: &Metrics) -> Option<f64> {
        evaluation.get("eval/greedy").filter(|_| self.setup.rlvr.checkpoint.keep_best)
    }

    fn description(&self) -> String {
        describe(&title(&self.setup.rlvr.algorithm), &*self.setup.model, &self.run)
    }

    fn warmup_step(&mut self, exchange: &Exchange, step: u64) -> Result<f64> {
        let Self { setup, roles, .. } = self;
        let warmup = setup.rlvr.warmup.as_ref().expect("the plan has warm-up steps");
        setup.lesson().warmup_step(&mut roles.policy, exchange, warmup, setup.micro_batch_size, step)
    }

    fn check_learnt(&mut self) -> Result<()> {
        self.roles.policy.load_states(&self.setup.offloaded)?;
        self.roles.policy.check_learnt()?;
        self.roles.critic.as_mut().map_or(Ok(()), Critic::check_learnt)
    }

    fn end_warm_up(&mut self) -> Result<()> {
        Ok(self.roles.policy.reset_optimizer(adamw(&self.setup.rlvr.optimizer))?)
    }

    /// The reference; and the critic begins as the policy is, but for adapters, which it has none of.
    fn freeze(&mut self, kept: Kept) -> Result<()> {
        if let Some(critic) =
            self.roles.critic.as_mut().filter(|_| !kept.is_saved && !self.setup.has_adapters)
        {
            critic.begin_as(&mut self.roles.policy)?;
        }
        let (policy, weights) = (&mut self.roles.policy, &*self.setup.weights);
        let reference = self.reference_place.as_ref().zip(self.run.held_reference());
        let new = |(place, role)| Reference::new(policy, &self.run, role, place, weights, kept);
        self.roles.reference = reference.map(new).transpose()?;
        Ok(())
    }

    fn step(
        &mut self,
        exchange: &Exchange,
        step: u64,
        carried: &mut Carried,
        stop: bool,
    ) -> Result<StepOutcome> {
        self.setup.step(&mut self.roles, &mut self.rollout, exchange, step, carried, stop)
    }

    fn evaluate(&mut self, exchange: &Exchange, step: u64, phase: Phase) -> Result<Evaluation> {
        self.setup.evaluate(&mut self.roles, exchange, step, phase)
    }

    fn save(&mut self, saver: &mut Saver, path: &Path, position: serde_json::Value) -> Result<()> {
        self.rollout.finish()?;
        let under_way = &self.rollout.under_way;
        let under_way = self.is_asynchronous().then(|| serde_json::to_vec(under_way).expect("plain data"));
        let Roles { policy, critic, .. } = &mut self.roles;
        policy.load_states(&self.setup.offloaded)?;
        let stamp = saver.stamp();
        saver.start_with(policy, path, position, under_way, |folder| {
            critic.as_mut().map_or(Ok(()), |critic| critic.save(folder, stamp))
        })?;
        Ok(policy.start_offload(&self.setup.leaving)?)
    }

    fn load(&mut self, path: &Path) -> Result<()> {
        checkpoint::load(&mut self.roles.policy, path)?;
        if self.is_asynchronous() {
            let group = &self.place.group;
            let refused = |problem: String| Error::Resume { run: path.to_owned(), problem };
            let bytes = checkpoint::own(path, group.rank(), group.world_size())?.ok_or_else(|| {
                refused("it has no completions under way: write `rollout.async.ahead: 0` again".to_owned())
            })?;
            self.rollout.under_way =
                serde_json::from_slice(&bytes).map_err(|error| refused(error.to_string()))?;
        }
        self.roles.critic.as_mut().map_or(Ok(()), |critic| critic.load(path))
    }
}

/// The algorithm as papers call it.
fn title(algorithm: &AlgorithmConfig) -> String {
    let advantage = match (&algorithm.advantage, algorithm.whiten_advantages) {
        (Advantage::Reinforce(_), true) => "REINFORCE++",
        (Advantage::Reinforce(_), false) => "REINFORCE",
        (Advantage::Grpo(GrpoConfig { scale: Scale::None, .. }), true) => "REINFORCE++ with a baseline",
        (Advantage::Grpo(GrpoConfig { scale: Scale::None, .. }), false) => "Dr. GRPO",
        (Advantage::Grpo(_), _) => "GRPO",
        (Advantage::Gdpo(_), _) => "GDPO",
        (Advantage::Rloo, _) => "RLOO",
        (Advantage::Opo, _) => "OPO",
        (Advantage::Gpg, _) => "GPG",
        (Advantage::Remax, _) => "ReMax",
        (Advantage::Gae(_), _) => "PPO",
        (Advantage::None, _) => "on-policy distillation",
    };
    let loss = match &algorithm.loss {
        PolicyLoss::Clipped(_) | PolicyLoss::Reinforce => return advantage.to_owned(),
        PolicyLoss::Gspo(_) => "GSPO",
        PolicyLoss::Cispo(_) => "CISPO",
        PolicyLoss::Sapo(_) => "SAPO",
        PolicyLoss::Topr(_) => "TOPR",
        PolicyLoss::Gmpo(_) => "GMPO",
        PolicyLoss::Vespo(_) => "VESPO",
    };
    format!("{loss} on {advantage}")
}
