//! Checks of `strategy.expert_parallel`.

use anyroll_config::{Config, PipelineConfig, Section};

use super::layers::check_replicas;
use super::sequence::{check_groups, shapes};
use crate::opened::Opened;

const FIELD: &str = "strategy.expert_parallel";

/// Reports ranks among which experts cannot be spread. `on_host` is their number on each host.
pub(super) fn check(
    config: &Config,
    opened: Option<&Opened>,
    (world_size, on_host): (Option<usize>, usize),
    at: &Section,
) {
    let ranks = config.strategy.expert_parallel;
    if ranks <= 1 || !at.is_read("pipeline") {
        return;
    }
    if let Some(problem) = apart(config) {
        at.refuse(FIELD, problem, "leave it out");
        return;
    }
    check_groups(FIELD, ranks, world_size, at);
    check_replicas(FIELD, (config, ranks), on_host, at);
    let Some(texts) = opened.and_then(Opened::texts) else { return };
    for (what, shape) in shapes(texts) {
        if let Err(error) = shape.check_spread(ranks as i64) {
            let help = "each rank takes the same number of experts: write a divisor of `num_experts`";
            at.refuse(FIELD, format!("{what}: {error}"), help);
        }
    }
    let shape = &texts.base.config;
    at.ensure(
        shape.experts.is_some() || shape.expressed.is_some(),
        FIELD,
        "the model has no experts",
        "leave it out, or set `strategy.zero_stage` to 3 to shard its weights",
    );
}

/// Returns the reason why a config has no experts that can be spread.
fn apart(config: &Config) -> Option<&'static str> {
    match &config.pipeline {
        PipelineConfig::Diffusion(_) => Some("a model of images has no experts"),
        PipelineConfig::Offline(offline) if offline.objective.ilql().is_some() => {
            Some("experts below `ilql`'s heads of values cannot be spread over ranks")
        }
        _ if config.strategy.tensor_parallel > 1 => {
            Some("`strategy.tensor_parallel` cuts each expert, so that experts cannot be spread over ranks")
        }
        PipelineConfig::Offline(_) | PipelineConfig::Rlvr(_) => None,
    }
}
