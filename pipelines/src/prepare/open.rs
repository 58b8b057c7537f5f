//! Opens the files that a config names.

use anyroll_config::{Config, PipelineConfig, Section};

use super::{images, texts};
use crate::opened::Opened;

/// Opens the files of `config` and reports those that do not fit; `None` if one could not be opened. Without
/// `reads_weights` the weights of language models need not be there.
pub(super) fn open(config: &Config, at: &Section, reads_weights: bool) -> Option<Opened> {
    if config.model.is_of_images() != matches!(config.pipeline, PipelineConfig::Diffusion(_)) {
        return None; // reported elsewhere
    }
    match &config.pipeline {
        PipelineConfig::Rlvr(rlvr) => texts::of_rlvr(config, rlvr, at, reads_weights),
        PipelineConfig::Offline(offline) => texts::of_offline(config, offline, at, reads_weights),
        PipelineConfig::Diffusion(diffusion) => images::open(&config.model, diffusion, at),
    }
}
