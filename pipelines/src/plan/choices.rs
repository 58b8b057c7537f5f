//! Every choice of stage, offload and recomputation, and what each comes to.

use serde::Serialize;

use super::{MemoryPlan, Planner};
use crate::config::{Offload, OffloadConfig, OptimizerOffload, Recompute, Run, StrategyConfig, ZeroStage};

/// One choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// Of the policy, and of a reference and a critic that have none of their own.
    pub zero_stage: u8,
    /// `offload.optimizer` of the policy.
    pub optimizer: OptimizerOffload,
    /// `offload.params` of the policy.
    pub params: Offload,
    /// `offload.params` of the reference; `None` without one.
    pub reference_params: Option<Offload>,
    /// What backward runs again.
    pub recompute: Recompute,
    /// What it comes to.
    pub plan: MemoryPlan,
}

const OPTIMIZER: [OptimizerOffload; 3] =
    [OptimizerOffload::None, OptimizerOffload::BetweenSteps, OptimizerOffload::CpuStep];
const RECOMPUTE: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];

const PARAMS: [Offload; 2] = [Offload::None, Offload::Cpu];
const REFERENCE_PARAMS: [Offload; 3] = [Offload::None, Offload::BetweenSteps, Offload::Cpu];

/// All choices of `run`, by stage; those that differ in recomputation only side by side, three of them.
pub fn choices(planner: &Planner, run: &Run) -> Vec<Choice> {
    let reference_params = match planner.has_reference() {
        true => REFERENCE_PARAMS.map(Some).to_vec(),
        false => vec![None],
    };
    let mut all = Vec::new();
    for zero_stage in 0..=3 {
        for (optimizer, params) in OPTIMIZER.into_iter().flat_map(|it| PARAMS.map(|params| (it, params))) {
            for &reference_params in &reference_params {
                let reference = reference_params.map(|params| reference_of(run, zero_stage, params));
                all.extend(RECOMPUTE.map(|recompute| {
                    let policy = StrategyConfig {
                        zero_stage: ZeroStage::Stage(zero_stage),
                        recompute,
                        offload: OffloadConfig { optimizer, params },
                        ..run.policy.strategy.clone()
                    };
                    let plan = planner.plan(&policy, reference.as_ref(), critic_of(run, &policy).as_ref());
                    Choice { zero_stage, optimizer, params, reference_params, recompute, plan }
                }));
            }
        }
    }
    all
}

/// The critic goes along where it says nothing of its own.
fn critic_of(run: &Run, policy: &StrategyConfig) -> Option<StrategyConfig> {
    let (critic, says) = (&run.critic.as_ref()?.strategy, &run.config.roles.critic.strategy);
    let offload = OffloadConfig {
        optimizer: says.offload.optimizer.unwrap_or(policy.offload.optimizer),
        params: critic.offload.params,
    };
    Some(StrategyConfig {
        zero_stage: stage_of(says.zero_stage, policy.zero_stage),
        recompute: says.recompute.unwrap_or(policy.recompute),
        offload,
        ..critic.clone()
    })
}

/// The reference goes along where it has no stage of its own.
fn reference_of(run: &Run, stage: u8, params: Offload) -> StrategyConfig {
    let reference = run.reference.as_ref().expect("the planner has one");
    let says = run.config.roles.reference.strategy.zero_stage;
    let zero_stage = stage_of(says, ZeroStage::Stage(stage));
    let offload = OffloadConfig { params, ..reference.strategy.offload.clone() };
    StrategyConfig { zero_stage, offload, ..reference.strategy.clone() }
}

/// A role's own stage, or the policy's where it has none or leaves it open.
fn stage_of(says: Option<ZeroStage>, policy: ZeroStage) -> ZeroStage {
    says.filter(|stage| *stage != ZeroStage::Auto).unwrap_or(policy)
}
