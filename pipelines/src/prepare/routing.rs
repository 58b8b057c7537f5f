//! Checks of fields for mixtures of experts in training.

use anyroll_config::{Config, PipelineConfig, Section};

use crate::opened::Opened;

/// Reports fields that need experts whose choice can be given and counted.
pub(super) fn check(config: &Config, opened: Option<&Opened>, at: &Section) {
    let Some(shape) = opened.and_then(Opened::texts).map(|texts| &texts.base.config) else { return };
    if !at.is_read("pipeline") || (shape.experts.is_some() && shape.expressed.is_none()) {
        return;
    }
    let problem = match shape.expressed {
        Some(_) => {
            "libtorch differentiates the model's layers, which do not tell the experts that they choose"
        }
        None => "the model has no layers with experts",
    };
    if let PipelineConfig::Rlvr(rlvr) = &config.pipeline
        && rlvr.rollout.replay_routing
    {
        at.refuse("pipeline.rlvr.rollout.replay_routing", problem, "leave it out");
    }
}
