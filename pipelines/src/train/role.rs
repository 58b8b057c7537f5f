//! Conversion of a role's config to the values of its strategy and optimizer.

use std::sync::Arc;

use anyroll_config::{Offload, OffloadConfig, OptimizerConfig, OptimizerOffload, ScheduleConfig};
use anyroll_models::{Model, init::WeightSource};
use anyroll_strategy::{AdamW, ParamsOn, Schedule, State, StepsOn, Zero, ZeroConfig, ZeroStage};

use super::Place;
use crate::{
    Result,
    run::{Run, Strategy},
};

/// Holds `model` on the ranks of `place`, with weights read from `weights`; with `adamw`, ready for training.
pub fn hold<M: Model>(
    model: Arc<M>,
    strategy: &Strategy,
    place: &Place,
    adamw: Option<AdamW>,
    weights: &dyn WeightSource,
) -> Result<Zero<M>> {
    let config = zero_config(strategy);
    let mut zero = Zero::from_source(model, config, adamw, &place.device, place.mesh.clone(), weights)?;
    zero.prepare_offload(&offloaded(strategy));
    Ok(zero)
}

/// The config of ZeRO for a strategy.
pub fn zero_config(strategy: &Strategy) -> ZeroConfig {
    ZeroConfig {
        stage: match strategy.zero_stage {
            0 => ZeroStage::Zero0,
            1 => ZeroStage::Zero1,
            2 => ZeroStage::Zero2,
            _ => ZeroStage::Zero3,
        },
        precision: strategy.precision,
        recompute: strategy.recompute,
        steps_on: match strategy.offload.optimizer {
            OptimizerOffload::None | OptimizerOffload::BetweenSteps => StepsOn::Device,
            OptimizerOffload::CpuStep => StepsOn::Host,
        },
        params_on: match strategy.offload.params {
            Offload::None | Offload::BetweenSteps => ParamsOn::Device,
            Offload::Cpu => ParamsOn::Host,
        },
        frozen: strategy.frozen_weights,
        moments: strategy.moments,
    }
}

/// States that are offloaded between uses. Gradients are only freed, so they belong to the optimizer's states.
pub fn offloaded(strategy: &Strategy) -> Vec<State> {
    let OffloadConfig { optimizer, params } = strategy.offload;
    let mut states = Vec::new();
    match optimizer {
        OptimizerOffload::None => {}
        OptimizerOffload::BetweenSteps => states.extend([State::Optimizer, State::Gradients]),
        OptimizerOffload::CpuStep => states.push(State::Gradients),
    }
    if params == Offload::BetweenSteps {
        states.push(State::Params);
    }
    states
}

/// Options of AdamW.
pub fn adamw(optimizer: &OptimizerConfig) -> AdamW {
    let [beta1, beta2] = optimizer.adamw.betas;
    AdamW {
        betas: (beta1, beta2),
        eps: optimizer.adamw.eps,
        weight_decay: optimizer.adamw.weight_decay,
        decays: optimizer.adamw.decays,
        max_grad_norm: match optimizer.max_grad_norm {
            0.0 => f64::INFINITY,
            norm => norm,
        },
    }
}

/// The learning rate of step `step`, from 0, out of `steps`.
pub fn learning_rate(optimizer: &OptimizerConfig, step: u64, steps: u64) -> f64 {
    optimizer.adamw.learning_rate * schedule(&optimizer.schedule, steps).factor(step, steps)
}

/// Bytes that this process has allocated on the model's device, without libtorch's own memory.
pub fn allocated_bytes<M: Model>(model: &Zero<M>) -> Result<f64> {
    Ok(model.group().stream().device().memory_info()?.allocated_bytes as f64)
}

/// The learning-rate schedule over `steps`.
fn schedule(config: &ScheduleConfig, steps: u64) -> Schedule {
    match config {
        ScheduleConfig::Constant(c) => Schedule::Constant { warmup_steps: c.warmup_steps.of(steps) },
        ScheduleConfig::Linear(c) => {
            Schedule::Linear { warmup_steps: c.warmup_steps.of(steps), final_ratio: c.final_ratio }
        }
        ScheduleConfig::Cosine(c) => {
            Schedule::Cosine { warmup_steps: c.warmup_steps.of(steps), final_ratio: c.final_ratio }
        }
        ScheduleConfig::Wsd(c) => Schedule::Wsd {
            warmup_steps: c.warmup_steps.of(steps),
            decay_steps: c.decay_steps.of(steps),
            final_ratio: c.final_ratio,
        },
    }
}

/// Description of a run in one line: its algorithm's `title`, its model's size and its placement.
pub fn describe(title: &str, model: &impl Model, run: &Run) -> String {
    let parameters: usize = model.units().iter().flat_map(|unit| &unit.params).map(|p| p.elements()).sum();
    let reason = run.stage_reason.as_ref().map_or(String::new(), |reason| format!(" ({reason})"));
    let covered = run.steps_reason.as_ref();
    let covered = covered.map(|reason| format!(", {} steps: {reason}", run.steps));
    let elsewhere: String = run.elsewhere().iter().map(|role| format!(", {role}")).collect();
    format!(
        "{title}, {parameters} parameters, {} on {} x {}{elsewhere}, ZeRO {}{reason}, seed {}{}",
        run.policy.strategy.precision.name(),
        run.world_size,
        run.policy.backend,
        run.policy.strategy.zero_stage,
        run.config.seed,
        covered.unwrap_or_default(),
    )
}
