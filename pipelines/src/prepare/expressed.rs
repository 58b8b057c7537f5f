//! Checks of a model whose layers libtorch differentiates.

use anyroll_config::{Config, PipelineConfig, Section};

use crate::opened::Opened;

/// Reports a setting that needs products of layers that are written by hand.
pub(super) fn check(config: &Config, opened: Option<&Opened>, at: &Section) {
    let texts = opened.and_then(Opened::texts);
    let is_expressed = texts.is_some_and(|texts| texts.base.config.expressed.is_some());
    let PipelineConfig::Rlvr(rlvr) = &config.pipeline else { return };
    at.ensure(
        !(is_expressed && rlvr.rollout.strict),
        "pipeline.rlvr.rollout.strict",
        "libtorch differentiates the model's layers, whose sums depend on the number of rows",
        "leave it out; `rollout/logprob_diff_max` says how far sampling and training are apart",
    );
}
