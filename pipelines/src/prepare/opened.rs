//! What a config names, opened once: the parts of a run take it from here.

use anyroll_models::hf::ModelFolder;

use super::{images, texts};
use crate::base_model::BaseModel;
use crate::config::{Config, PipelineConfig, Section};
use crate::data::Dataset;
use crate::diffusion;
use crate::reward;

/// What a config names.
pub enum Opened {
    /// A run of a language model.
    Texts(Box<Texts>),
    /// A run of a model of images that are made in code.
    Shapes,
    /// A run of a published model of images.
    Images(Box<diffusion::Opened>),
}

/// What the config of a language model names.
pub struct Texts {
    /// Prompts and answers.
    pub dataset: Dataset,
    /// The model that is trained.
    pub base: BaseModel,
    /// The model that it is compared with, if that is another one.
    pub reference: Option<ModelFolder>,
    /// The reward models in the order of the reward's terms.
    pub reward_models: Vec<reward::OpenModel>,
}

impl Opened {
    /// What the config of a language model names.
    pub fn texts(&self) -> Option<&Texts> {
        match self {
            Self::Texts(texts) => Some(texts),
            Self::Shapes | Self::Images(_) => None,
        }
    }

    /// The same, of all that was opened.
    pub fn into_texts(self) -> Option<Texts> {
        match self {
            Self::Texts(texts) => Some(*texts),
            Self::Shapes | Self::Images(_) => None,
        }
    }

    /// Prompts and answers, of a run that has some.
    pub fn dataset(&self) -> Option<&Dataset> {
        self.texts().map(|texts| &texts.dataset)
    }
}

/// Opens all that `config` names and reports what does not fit; `None` if something could not be opened.
pub(super) fn open(config: &Config, at: &Section) -> Option<Opened> {
    if config.model.is_of_images() != matches!(config.pipeline, PipelineConfig::Diffusion(_)) {
        return None; // which is reported
    }
    match &config.pipeline {
        PipelineConfig::Rlvr(rlvr) => texts::of_rlvr(config, rlvr, at),
        PipelineConfig::Offline(offline) => texts::of_offline(config, offline, at),
        PipelineConfig::Diffusion(diffusion) => images::open(&config.model, diffusion, at),
    }
}
