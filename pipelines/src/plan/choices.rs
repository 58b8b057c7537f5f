//! Memory plans for every choice of stage, offload and recomputation.

use anyroll_config::{Offload, OffloadConfig, OptimizerOffload, Recompute, ZeroStage};
use serde::Serialize;

use super::{MemoryPlan, Planner, Strategies};
use crate::run::{Run, Strategy};

/// One choice and its plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// Stage of the policy, and of roles that set none of their own.
    pub zero_stage: u8,
    /// `offload.optimizer` of the policy.
    pub optimizer: OptimizerOffload,
    /// `offload.params` of the policy.
    pub params: Offload,
    /// `offload.params` of a reference on the policy's devices; `None` without one.
    pub reference_params: Option<Offload>,
    /// Activations that backward recomputes.
    pub recompute: Recompute,
    /// Memory under this choice.
    pub plan: MemoryPlan,
}

const OPTIMIZER: [OptimizerOffload; 3] =
    [OptimizerOffload::None, OptimizerOffload::BetweenSteps, OptimizerOffload::CpuStep];
const RECOMPUTE: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];

const PARAMS: [Offload; 2] = [Offload::None, Offload::Cpu];
const REFERENCE_PARAMS: [Offload; 3] = [Offload::None, Offload::BetweenSteps, Offload::Cpu];

/// All choices of `run`, ordered by stage. The three that differ in recomputation only are adjacent.
pub fn choices(planner: &Planner, run: &Run) -> Vec<Choice> {
    let reference_params = match planner.has_reference() {
        true => REFERENCE_PARAMS.map(Some).to_vec(),
        false => vec![None],
    };
    let mut all = Vec::new();
    for zero_stage in 0..=3 {
        for (optimizer, params) in OPTIMIZER.into_iter().flat_map(|it| PARAMS.map(|params| (it, params))) {
            for &reference_params in &reference_params {
                let reference = reference_of(run, zero_stage, reference_params);
                let reward_models = reward_models_of(run, zero_stage);
                all.extend(RECOMPUTE.map(|recompute| {
                    let policy = Strategy {
                        zero_stage,
                        recompute,
                        offload: OffloadConfig { optimizer, params },
                        ..run.policy.strategy.clone()
                    };
                    let plan = planner.plan(&Strategies {
                        reference: reference.clone(),
                        critic: critic_of(run, &policy),
                        reward_models: reward_models.clone(),
                        policy,
                    });
                    Choice { zero_stage, optimizer, params, reference_params, recompute, plan }
                }));
            }
        }
    }
    all
}

/// The critic follows the policy where its own strategy sets nothing.
fn critic_of(run: &Run, policy: &Strategy) -> Option<Strategy> {
    let (critic, says) = (&run.critic.as_ref()?.strategy, &run.config.roles.critic.strategy);
    let offload = OffloadConfig {
        optimizer: says.offload.optimizer.unwrap_or(policy.offload.optimizer),
        params: critic.offload.params,
    };
    Some(Strategy {
        zero_stage: stage_of(says.zero_stage, policy.zero_stage),
        recompute: says.recompute.unwrap_or(policy.recompute),
        offload,
        ..critic.clone()
    })
}

/// The reference follows the policy where it sets no stage of its own.
fn reference_of(run: &Run, stage: u8, params: Option<Offload>) -> Option<Strategy> {
    let reference = &run.reference.as_ref()?.strategy;
    let zero_stage = stage_of(run.config.roles.reference.strategy.zero_stage, stage);
    let params = params.unwrap_or(reference.offload.params);
    let offload = OffloadConfig { params, ..reference.offload.clone() };
    Some(Strategy { zero_stage, offload, ..reference.clone() })
}

/// Reward models follow the policy if their stage is `auto`. They have only weights to shard.
fn reward_models_of(run: &Run, stage: u8) -> Vec<Option<Strategy>> {
    let open = if stage == 3 { 3 } else { 0 };
    let models = run.reward_models.iter().map(|role| {
        let role = role.as_ref()?;
        let zero_stage = if role.has_open_stage { open } else { role.strategy.zero_stage };
        Some(Strategy { zero_stage, ..role.strategy.clone() })
    });
    models.collect()
}

/// A role's own stage, or the policy's if it is unset or `auto`.
fn stage_of(says: Option<ZeroStage>, policy: u8) -> u8 {
    match says {
        Some(ZeroStage::Stage(stage)) => stage,
        Some(ZeroStage::Auto) | None => policy,
    }
}
