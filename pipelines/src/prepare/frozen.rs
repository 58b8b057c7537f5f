//! Checks of `strategy.frozen_weights`.

use anyroll_config::{Config, FrozenWeights, PipelineConfig, Section};

use crate::opened::Opened;

const FIELD: &str = "strategy.frozen_weights";

/// Reports a model that has no frozen matrices in 4 bits.
pub(super) fn check(config: &Config, opened: Option<&Opened>, at: &Section) {
    if config.strategy.frozen_weights != FrozenWeights::Nf4 || !at.is_read("pipeline") {
        return;
    }
    let layers = opened.and_then(Opened::texts).map(|texts| &texts.base.config);
    let problem = if matches!(config.pipeline, PipelineConfig::Diffusion(_)) {
        "keeps the matrices of a language model, and not those of a model of images"
    } else if !config.model.has_adapters() {
        "finds no frozen weights, since all of the model is trained: set `model.lora`"
    } else if config.model.has_dora() {
        "is not combined with `lora.dora`, whose magnitudes begin as norms of weights that are not rounded"
    } else if config.strategy.tensor_parallel > 1 {
        "is not combined with `strategy.tensor_parallel`, which cuts blocks of 64 values: shard with \
         `strategy.zero_stage: 3`"
    } else if layers.is_some_and(|shape| shape.expressed.is_some()) {
        "does not keep the matrices of layers that libtorch differentiates"
    } else {
        return;
    };
    at.refuse(FIELD, format!("nf4 {problem}"), "write `precision`, or leave it out");
}
