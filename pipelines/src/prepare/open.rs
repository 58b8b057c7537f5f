//! Opens the files that a config names.

use anyroll_config::{Config, PipelineConfig, Section};

use super::{images, texts};
use crate::opened::Opened;

/// Opens the files of `config` and reports those that do not fit; `None` if one could not be opened.
pub(super) fn open(config: &Config, at: &Section) -> Option<Opened> {
    if config.model.is_of_images() != matches!(config.pipeline, PipelineConfig::Diffusion(_)) {
        return None; // reported elsewhere
    }
    match &config.pipeline {
        PipelineConfig::Rlvr(rlvr) => texts::of_rlvr(config, rlvr, at),
        PipelineConfig::Offline(offline) => texts::of_offline(config, offline, at),
        PipelineConfig::Diffusion(diffusion) => images::open(&config.model, diffusion, at),
    }
}
