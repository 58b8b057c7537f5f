//! `zero_stage: auto`: the fastest stage that fits.
//!
//! Stage 1 is the fastest on more than one rank. Stage 0 steps every weight on every rank and gathers
//! gradients in fp32, where stage 1 gathers weights. Stage 2 equals 1 here; stage 3 gathers the weights of
//! each block twice per micro-batch. On one rank there is nothing to shard, so all stages are stage 0. A role
//! that only scores keeps its weights whole at stage 0 and needs no gather. docs/results/training.md has
//! measurements.

use anyroll_config::Recompute;

use super::{MemoryPlan, Planner, Strategies, Tightest};
use crate::{
    format::gib,
    run::{Role, Run, Strategy},
};

/// A stage for each role of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stages {
    /// The policy's.
    pub policy: u8,
    /// The reference's.
    pub reference: Option<u8>,
    /// The critic's.
    pub critic: Option<u8>,
    /// Stage of all reward models that leave theirs to `auto`.
    pub reward_models: Option<u8>,
}

/// Result of `auto`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settled {
    /// The stages of all roles, including those set in the config.
    pub stages: Stages,
    /// Roles whose stage was `auto`, with the chosen one.
    pub open: Vec<(&'static str, u8)>,
    /// `keep_logits` of the policy, if `auto` chose that too.
    pub keep_logits: Option<bool>,
    /// Memory at these stages.
    pub plan: MemoryPlan,
    /// Memory at the fastest stages, if those do not fit.
    pub faster: Option<MemoryPlan>,
}

/// Reason why `auto` found no stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unsettled {
    /// The device's memory is unknown.
    NoMemory,
    /// Even the stage with the smallest memory does not fit.
    TooLarge {
        /// The phase that misses the most memory.
        tightest: Tightest,
        /// A `recompute` with which it would fit, if there is one.
        recompute: Option<Recompute>,
    },
}

impl Stages {
    /// Stages of a run that leaves none to `auto`.
    pub fn of(run: &Run) -> Self {
        let number = |role: &Role| role.strategy.zero_stage;
        Self {
            policy: number(&run.policy),
            reference: run.reference.as_ref().map(number),
            critic: run.critic.as_ref().map(number),
            reward_models: None,
        }
    }

    /// Roles whose stage `run` leaves to `auto`, with their stage in `self`.
    fn open(self, run: &Run) -> Vec<(&'static str, u8)> {
        let is_open = |role: &&Role| role.has_open_stage;
        let models = run.reward_models.iter().flatten().find(is_open);
        let roles = [
            ("the policy", Some(&run.policy), Some(self.policy)),
            ("the reference", run.reference.as_ref(), self.reference),
            ("the critic", run.critic.as_ref(), self.critic),
            ("reward models", models, self.reward_models),
        ];
        let open = roles.into_iter().filter(|(_, role, _)| role.as_ref().is_some_and(is_open));
        open.filter_map(|(name, _, stage)| Some((name, stage?))).collect()
    }

    /// Possible stages of `run`, fastest first. Stages of the policy and the critic cost time in every
    /// micro-batch, those of the reference and reward models in one pass. The latter are therefore raised first. The
    /// policy, which also samples, comes last.
    fn candidates(run: &Run) -> Vec<Self> {
        let stages = |role: &Role| match role.has_open_stage {
            false => vec![role.strategy.zero_stage],
            true if run.world_size == 1 => vec![0],
            true => vec![1, 3],
        };
        let of = |role: &Option<Role>| {
            role.as_ref().map_or(vec![None], |role| stages(role).into_iter().map(Some).collect())
        };
        let is_open = |role: &Role| role.has_open_stage;
        let models: &[Option<u8>] = match run.reward_models.iter().flatten().any(is_open) {
            false => &[None],
            true if run.world_size == 1 => &[Some(0)],
            true => &[Some(0), Some(3)],
        };
        let (references, critics) = (of(&run.reference), of(&run.critic));
        let mut candidates = Vec::new();
        for policy in stages(&run.policy) {
            for (&critic, &reference) in
                critics.iter().flat_map(|it| references.iter().map(move |its| (it, its)))
            {
                let with = |&reward_models| Self { policy, reference, critic, reward_models };
                candidates.extend(models.iter().map(with));
            }
        }
        candidates
    }
}

impl Strategies {
    /// Strategies of `run` at these stages.
    pub(super) fn of(run: &Run, stages: Stages) -> Self {
        let at = |role: &Role, zero_stage| Strategy { zero_stage, ..role.strategy.clone() };
        let of =
            |role: &Option<Role>, stage: Option<u8>| role.as_ref().zip(stage).map(|(role, it)| at(role, it));
        let open = |role: &Role| stages.reward_models.filter(|_| role.has_open_stage);
        let model = |role: &Role| at(role, open(role).unwrap_or(role.strategy.zero_stage));
        Self {
            policy: at(&run.policy, stages.policy),
            reference: of(&run.reference, stages.reference),
            critic: of(&run.critic, stages.critic),
            reward_models: run.reward_models.iter().map(|role| role.as_ref().map(model)).collect(),
        }
    }
}

impl Planner {
    /// Memory of `run` at these stages.
    pub fn plan_at(&self, run: &Run, stages: Stages) -> MemoryPlan {
        self.plan(&Strategies::of(run, stages))
    }

    /// Memory if the policy keeps logits; `None` if `run` sets `keep_logits` itself.
    pub fn keeping_logits(&self, run: &Run, stages: Stages) -> Option<MemoryPlan> {
        let mut keeping = run.clone();
        keeping.policy.strategy.keep_logits = true;
        let is_said = run.config.strategy.keep_logits.is_some();
        (!is_said && self.has_logits()).then(|| self.plan_at(&keeping, stages))
    }
}

/// The fastest stages of `run` that fit, among those left to `auto`; `None` if it leaves none.
///
/// # Errors
/// [`Unsettled`].
pub fn settle(planner: &Planner, run: &Run) -> Result<Option<Settled>, Unsettled> {
    if !run.roles().any(|role| role.has_open_stage) {
        return Ok(None);
    }
    let memory_bytes = run.policy_memory_bytes().ok_or(Unsettled::NoMemory)?;
    let candidates = Stages::candidates(run);
    let plans: Vec<MemoryPlan> = candidates.iter().map(|&stages| planner.plan_at(run, stages)).collect();
    if let Some(index) = plans.iter().position(|plan| plan.fits(memory_bytes)) {
        let (stages, plan) = (candidates[index], plans[index].clone());
        let faster = (index > 0).then(|| plans[0].clone());
        let is_open = run.policy.has_open_stage;
        let keeping = planner.keeping_logits(run, stages).filter(|_| is_open);
        // Kept logits must not shrink the KV cache.
        let keeping = keeping.filter(|keeping| {
            keeping.fits(memory_bytes) && keeping.generate.kv_cache == plan.generate.kv_cache
        });
        let keep_logits = keeping.as_ref().map(|_| true).or(run.config.strategy.keep_logits);
        let (open, plan) = (stages.open(run), keeping.unwrap_or(plan));
        return Ok(Some(Settled { stages, open, keep_logits, plan, faster }));
    }
    let tightest = plans.iter().map(|plan| plan.tightest(memory_bytes));
    let (&smallest, tightest) =
        candidates.iter().zip(tightest).min_by_key(|(_, it)| it.missing()).expect("there are candidates");
    let recompute = [Recompute::Selective, Recompute::Full]
        .into_iter()
        .find(|&recompute| planner.plan_at(&recomputing(run, recompute), smallest).fits(memory_bytes));
    Err(Unsettled::TooLarge { tightest, recompute })
}

/// `run` with `recompute` in its top-level strategy, and in the critic's unless that sets its own.
fn recomputing(run: &Run, recompute: Recompute) -> Run {
    let mut run = run.clone();
    run.policy.strategy.recompute = recompute;
    if let Some(critic) = &mut run.critic {
        critic.strategy.recompute = run.config.roles.critic.strategy.recompute.unwrap_or(recompute);
    }
    run
}

impl Settled {
    /// The stages that `auto` chose, with the reason, as one line.
    pub fn reason(&self, memory_bytes: usize) -> String {
        let (phase, peak) = self.plan.peak();
        let all_are = |stage| self.open.iter().all(|(_, other)| *other == stage);
        let stage = match self.open[0] {
            ("the policy", stage) if all_are(stage) => stage.to_string(),
            _ => {
                let stages: Vec<_> =
                    self.open.iter().map(|(role, stage)| format!("{stage} for {role}")).collect();
                stages.join(", ")
            }
        };
        let kept = if self.keep_logits == Some(true) { " and logits kept" } else { "" };
        let room = format!("{} of {} GiB in {phase}{kept}", gib(peak), gib(memory_bytes));
        match &self.faster {
            None => format!("auto is {stage}, the fastest: {room}"),
            Some(faster) => {
                let Tightest { phase, needs, .. } = faster.tightest(memory_bytes);
                format!("auto is {stage}: {room}, and the fastest stage needs {} in {phase}", gib(needs))
            }
        }
    }
}
