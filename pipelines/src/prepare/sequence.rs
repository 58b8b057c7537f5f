//! Checks of `strategy.sequence_parallel`.

use anyroll_config::{Config, PipelineConfig, Section};
use anyroll_models::DecoderConfig;

use crate::opened::{Opened, Texts};

const FIELD: &str = "strategy.sequence_parallel";

/// Reports ranks that cannot run their micro-batches together.
pub(super) fn check(config: &Config, opened: Option<&Opened>, world_size: Option<usize>, at: &Section) {
    let ranks = config.strategy.sequence_parallel;
    if ranks <= 1 || !at.is_read("pipeline") {
        return;
    }
    if let Some(part) = unsplit(&config.pipeline) {
        at.refuse(FIELD, format!("{part} cannot be split over ranks"), "leave it out");
        return;
    }
    check_groups(FIELD, ranks, world_size, at);
    for (what, shape) in opened.and_then(Opened::texts).into_iter().flat_map(shapes) {
        if let Err(error) = shape.check_slices() {
            at.refuse(FIELD, format!("{what}: {error}"), "leave it out");
        }
    }
}

/// Reports a field whose groups of ranks do not divide all ranks.
pub(super) fn check_groups(field: &str, ranks: usize, world_size: Option<usize>, at: &Section) {
    let Some(world_size) = world_size else { return };
    at.ensure(
        world_size.is_multiple_of(ranks),
        field,
        format!("{world_size} ranks cannot be divided into groups of {ranks}"),
        format!("write a divisor of {world_size}, or other `devices`"),
    );
}

/// Returns the part of a pipeline that works on whole micro-batches only.
pub(super) fn unsplit(pipeline: &PipelineConfig) -> Option<&'static str> {
    match pipeline {
        PipelineConfig::Diffusion(_) => Some("a model of images"),
        PipelineConfig::Offline(offline) if offline.objective.ilql().is_some() => {
            Some("`ilql`'s heads of values")
        }
        PipelineConfig::Offline(offline) if offline.objective.distills().is_some() => {
            Some("a teacher's output")
        }
        PipelineConfig::Rlvr(rlvr) if rlvr.rollout.strict => {
            Some("with `rollout.strict`, which wants the bits of sampling, attention")
        }
        PipelineConfig::Offline(_) | PipelineConfig::Rlvr(_) => None,
    }
}

/// Returns the shapes of all models that the ranks share.
pub(super) fn shapes(texts: &Texts) -> Vec<(&'static str, &DecoderConfig)> {
    let Texts { base, reference, reward_models, .. } = texts;
    let reference = reference.iter().map(|folder| ("the reference", folder.decoder_config()));
    let reward_models = reward_models.iter().map(|opened| ("a reward model", opened.folder.decoder_config()));
    std::iter::once(("the model", &base.config)).chain(reference).chain(reward_models).collect()
}
