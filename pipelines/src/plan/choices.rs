//! Every choice of stage, offload and recomputation, and what each comes to.

use serde::Serialize;

use super::{MemoryPlan, Planner};
use crate::config::{
    Offload, OffloadConfig, OptimizerOffload, Recompute, Run, StrategyConfig, ZeroStage,
};

/// One choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// Of the policy, and of a reference that has none of its own.
    pub zero_stage: u8,
    /// `offload.optimizer` of the policy.
    pub optimizer: OptimizerOffload,
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

/// All choices of `run`, from the fastest stage's least offload on, those of one place and three recomputations side
/// by side.
pub fn choices(planner: &Planner, run: &Run) -> Vec<Choice> {
    let reference_params: &[Option<Offload>] = match planner.has_reference() {
        true => &[Some(Offload::None), Some(Offload::BetweenSteps)],
        false => &[None],
    };
    let mut all = Vec::new();
    for zero_stage in 0..=3 {
        for optimizer in OPTIMIZER {
            for &params in reference_params {
                for recompute in RECOMPUTE {
                    let policy = with(&run.policy.strategy, zero_stage, recompute);
                    let offload = OffloadConfig { optimizer, ..policy.offload.clone() };
                    let policy = StrategyConfig { offload, ..policy };
                    let reference = params.map(|params| reference_of(run, zero_stage, params));
                    let plan = planner.plan(&policy, reference.as_ref());
                    all.push(Choice { zero_stage, optimizer, reference_params: params, recompute, plan });
                }
            }
        }
    }
    all
}

fn with(strategy: &StrategyConfig, stage: u8, recompute: Recompute) -> StrategyConfig {
    StrategyConfig { zero_stage: ZeroStage::Stage(stage), recompute, ..strategy.clone() }
}

/// The reference goes along where it has no stage of its own.
fn reference_of(run: &Run, stage: u8, params: Offload) -> StrategyConfig {
    let reference = run.reference.as_ref().expect("the planner has one");
    let zero_stage = match run.config.roles.reference.strategy.zero_stage {
        Some(ZeroStage::Stage(own)) => ZeroStage::Stage(own),
        _ => ZeroStage::Stage(stage),
    };
    let offload = OffloadConfig { params, ..reference.strategy.offload.clone() };
    StrategyConfig { zero_stage, offload, ..reference.strategy.clone() }
}
