//! `zero_stage: auto`: the fastest stage that fits.
//!
//! Stage 1 is the fastest on more than one rank: stage 0 steps every weight on every rank and gathers gradients in
//! fp32, where 1 gathers weights; 2 is the same as 1 here; 3 gathers weights for each block twice a micro-batch. On one
//! rank there is nothing to share, and 0 is all of them. docs/performance.md has them measured.

use super::{MemoryPlan, Planner};
use crate::{
    config::{Recompute, Run, StrategyConfig, ZeroStage},
    format::gib,
};

/// What `auto` came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settled {
    /// The policy's stage.
    pub policy: u8,
    /// The reference's.
    pub reference: Option<u8>,
    /// What they come to.
    pub plan: MemoryPlan,
    /// What the fastest stage comes to, if it is another.
    pub faster: Option<MemoryPlan>,
}

/// Why `auto` came to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsettled {
    /// Nobody has said how much memory a rank has.
    NoMemory,
    /// Not even the smallest stage fits.
    TooLarge {
        /// The phase in which it takes most.
        phase: &'static str,
        /// How much that is.
        needs: usize,
        /// What there is.
        memory_bytes: usize,
        /// What to write for it to fit, if something does.
        recompute: Option<Recompute>,
    },
}

/// The fastest stages of `run` that fit, among those that it leaves open; `None` if it leaves none open.
///
/// # Errors
/// [`Unsettled`].
pub fn settle(planner: &Planner, run: &Run) -> Result<Option<Settled>, Unsettled> {
    let policy = &run.policy.strategy;
    let reference = run.reference.as_ref().map(|role| &role.strategy);
    let is_open = |strategy: &StrategyConfig| strategy.zero_stage == ZeroStage::Auto;
    if !is_open(policy) && !reference.is_some_and(is_open) {
        return Ok(None);
    }
    let memory_bytes = run.memory_bytes.ok_or(Unsettled::NoMemory)?;
    let stages_of = |strategy: &StrategyConfig| match strategy.zero_stage {
        ZeroStage::Stage(stage) => vec![stage],
        ZeroStage::Auto if run.world_size == 1 => vec![0],
        ZeroStage::Auto => vec![1, 3],
    };
    let at = |strategy: &StrategyConfig, stage| StrategyConfig {
        zero_stage: ZeroStage::Stage(stage),
        ..strategy.clone()
    };
    let plan_of = |policy: &StrategyConfig, own, its: Option<u8>| {
        let reference = reference.zip(its).map(|(reference, stage)| at(reference, stage));
        planner.plan(&at(policy, own), reference.as_ref(), None)
    };
    // The policy's stage costs time in every micro-batch, the reference's in one pass: so it gives way first.
    let own = stages_of(policy);
    let its = reference.map_or(vec![None], |it| stages_of(it).into_iter().map(Some).collect());
    let candidates: Vec<(u8, Option<u8>)> =
        own.iter().flat_map(|&own| its.iter().map(move |&its| (own, its))).collect();
    let plans: Vec<MemoryPlan> = candidates.iter().map(|&(own, its)| plan_of(policy, own, its)).collect();
    if let Some(index) = plans.iter().position(|plan| plan.fits(memory_bytes)) {
        let (policy, reference) = candidates[index];
        let faster = (index > 0).then(|| plans[0]);
        return Ok(Some(Settled { policy, reference, plan: plans[index], faster }));
    }
    let (&(own, its), plan) =
        candidates.iter().zip(plans).min_by_key(|(_, plan)| plan.peak().1).expect("there are candidates");
    let recompute = [Recompute::Selective, Recompute::Full].into_iter().find(|&recompute| {
        plan_of(&StrategyConfig { recompute, ..policy.clone() }, own, its).fits(memory_bytes)
    });
    let (phase, needs) = plan.peak();
    Err(Unsettled::TooLarge { phase, needs, memory_bytes, recompute })
}

impl Settled {
    /// The stages that `auto` stands for, and why.
    pub fn reason(&self, memory_bytes: usize) -> String {
        let (phase, peak) = self.plan.peak();
        let stage = match self.reference {
            Some(reference) if reference != self.policy => {
                format!("{} for the policy and {reference} for its reference", self.policy)
            }
            _ => self.policy.to_string(),
        };
        let room = format!("{} of {} GiB in {phase}", gib(peak), gib(memory_bytes));
        match &self.faster {
            None => format!("auto is {stage}, the fastest: {room}"),
            Some(faster) => {
                let (phase, needs) = faster.peak();
                format!("auto is {stage}: {room}, and the fastest stage needs {} in {phase}", gib(needs))
            }
        }
    }
}
