//! Folders, tokenizers and data that a config names, each opened once for the planner and a rank's set-up.

use anyroll_config::DitConfig;
use anyroll_data::{self, Dataset};
use anyroll_models::hf::ModelFolder;
use anyroll_reward::OpenModel;

use crate::base_model::BaseModel;
use crate::diffusion;

/// Everything that a config names, opened.
pub enum Opened {
    /// A run of a language model.
    Texts(Box<Texts>),
    /// A run of an image model of this shape, on images that are made in code.
    Shapes(DitConfig),
    /// A run of a published image model.
    Images(Box<diffusion::Opened>),
}

/// Everything that the config of a language model names, opened.
pub struct Texts {
    /// Prompts and answers.
    pub dataset: Dataset,
    /// The model that is trained.
    pub base: BaseModel,
    /// The published reference; `None` if the policy's frozen copy is the reference, or without a KL term.
    pub reference: Option<ModelFolder>,
    /// The reward models in the order of the reward's terms.
    pub reward_models: Vec<OpenModel>,
}

impl Opened {
    /// Returns everything that the config of a language model names; `None` for an image run.
    pub fn texts(&self) -> Option<&Texts> {
        match self {
            Self::Texts(texts) => Some(texts),
            Self::Shapes(_) | Self::Images(_) => None,
        }
    }

    /// Returns the same by value.
    pub fn into_texts(self) -> Option<Texts> {
        match self {
            Self::Texts(texts) => Some(*texts),
            Self::Shapes(_) | Self::Images(_) => None,
        }
    }

    /// Prompts and answers; `None` for a run without records.
    pub fn dataset(&self) -> Option<&Dataset> {
        self.texts().map(|texts| &texts.dataset)
    }

    /// Digest of the records; `None` for a run without records.
    pub fn digest(&self) -> Option<u32> {
        match self {
            Self::Texts(texts) => Some(texts.dataset.digest()),
            Self::Shapes(_) => None,
            Self::Images(images) => images.records().map(anyroll_data::digest),
        }
    }
}
