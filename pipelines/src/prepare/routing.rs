//! Checks of fields for mixtures of experts in training.

use anyroll_config::{Config, PipelineConfig, Precision, Section};

use crate::opened::Opened;

/// Reports fields that need experts whose choice can be given and counted, and a balancing loss in fp16.
pub(super) fn check(config: &Config, opened: Option<&Opened>, at: &Section) {
    if !at.is_read("pipeline") {
        return;
    }
    let (replays, balances, field) = match &config.pipeline {
        PipelineConfig::Rlvr(rlvr) => (
            rlvr.rollout.replay_routing,
            rlvr.algorithm.router_aux_loss_coef > 0.0,
            "pipeline.rlvr.algorithm.router_aux_loss_coef",
        ),
        PipelineConfig::Offline(offline) => {
            (false, offline.router_aux_loss_coef > 0.0, "pipeline.offline.router_aux_loss_coef")
        }
        PipelineConfig::Diffusion(_) => return,
    };
    if balances && matches!(config.strategy.precision, Precision::Fp16(_)) {
        let problem = "`strategy.precision` is fp16, whose loss scale does not reach the routers' loss";
        at.refuse(field, problem, "write `precision: bf16`, or leave it out");
    }
    let Some(shape) = opened.and_then(Opened::texts).map(|texts| &texts.base.config) else { return };
    let problem = match (&shape.expressed, &shape.experts) {
        (Some(_), _) => {
            "libtorch differentiates the model's layers, which do not tell the experts that they choose"
        }
        (None, None) => "the model has no layers with experts",
        (None, Some(_)) => return,
    };
    let asked = [(replays, "pipeline.rlvr.rollout.replay_routing"), (balances, field)];
    for (_, field) in asked.into_iter().filter(|(is_asked, _)| *is_asked) {
        at.refuse(field, problem, "leave it out");
    }
}
