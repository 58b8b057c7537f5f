//! Checks of `rollout.tensor_parallel`.

use anyroll_config::{Config, PipelineConfig, RlvrConfig, Section};

use super::sequence::check_groups;
use crate::opened::Opened;

const FIELD: &str = "pipeline.rlvr.rollout.tensor_parallel";

/// Remedy for a model of which ranks cannot have equal parts.
pub(super) const EQUAL_PARTS: &str = "each rank takes the same number of heads and columns: write a divisor of the query heads \
                                      that divides the key heads or that they divide, and that divides `intermediate_size`";

/// Reports ranks that cannot sample together.
pub(super) fn check(config: &Config, opened: Option<&Opened>, world_size: Option<usize>, at: &Section) {
    let PipelineConfig::Rlvr(rlvr) = &config.pipeline else { return };
    let ranks = rlvr.rollout.tensor_parallel;
    if ranks <= 1 || !at.is_read("pipeline") {
        return;
    }
    if let Some(part) = apart(config, rlvr) {
        at.refuse(
            FIELD,
            format!("{part}, where each rank samples by itself"),
            "write 1, or leave one of them out",
        );
        return;
    }
    check_groups(FIELD, ranks, world_size, at);
    let Some(shape) = opened.and_then(Opened::texts).map(|texts| &texts.base.config) else { return };
    if let Err(error) = shape.check_split(ranks as i64, rlvr.rollout.expert_parts()) {
        at.refuse(FIELD, error.to_string(), EQUAL_PARTS);
    }
    at.ensure(
        !rlvr.rollout.expert_parallel || shape.experts.is_some(),
        "pipeline.rlvr.rollout.expert_parallel",
        "the model has no experts",
        "leave it out",
    );
}

/// Returns the part of the config that needs ranks which sample by themselves.
fn apart(config: &Config, rlvr: &RlvrConfig) -> Option<&'static str> {
    let rollout = &rlvr.rollout;
    let parts = [
        (config.roles.rollout.is_some(), "`roles.rollout` has devices of its own"),
        (rollout.environment.is_some(), "`rollout.environment` answers turn by turn"),
        (rollout.asynchronous.ahead > 0, "`rollout.async` stops at a rank's own completions"),
        (rollout.strict, "`rollout.strict` wants the sums of training"),
        (config.model.has_dora(), "`lora.dora` needs the norms of whole rows"),
    ];
    parts.into_iter().find(|(is_asked, _)| *is_asked).map(|(_, part)| part)
}
