//! Checks of `rollout.weights`.

use anyroll_config::{Config, PipelineConfig, RolloutWeights, Section};

use crate::opened::Opened;

const FIELD: &str = "pipeline.rlvr.rollout.weights";

/// Reports a model whose matrices cannot be in 8 bits.
pub(super) fn check(config: &Config, opened: Option<&Opened>, at: &Section) {
    let PipelineConfig::Rlvr(rlvr) = &config.pipeline else { return };
    if rlvr.rollout.weights != RolloutWeights::Fp8 || !at.is_read("pipeline") {
        return;
    }
    let Some(shape) = opened.and_then(Opened::texts).map(|texts| &texts.base.config) else { return };
    let ranks = rlvr.rollout.tensor_parallel as i64;
    // Ranks that cannot share it have an error of their own.
    let parts = rlvr.rollout.expert_parts();
    let is_shared = shape.check_split(ranks, parts).is_ok();
    let own = if is_shared { shape.part(ranks, parts) } else { shape.clone() };
    if let Err(error) = own.check_eight_bits() {
        at.refuse(FIELD, error.to_string(), "write `policy`, or leave it out");
    }
}
