//! What a config names, opened once: the planner and a rank's set-up take folders, tokenizers and data from here.

use anyroll_config::DitConfig;
use anyroll_data::{self, Dataset};
use anyroll_models::hf::ModelFolder;
use anyroll_reward::OpenModel;

use crate::base_model::BaseModel;
use crate::diffusion;

/// What a config names.
pub enum Opened {
    /// A run of a language model.
    Texts(Box<Texts>),
    /// A run of a model of this shape, of images that are made in code.
    Shapes(DitConfig),
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
    pub reward_models: Vec<OpenModel>,
}

impl Opened {
    /// What the config of a language model names.
    pub fn texts(&self) -> Option<&Texts> {
        match self {
            Self::Texts(texts) => Some(texts),
            Self::Shapes(_) | Self::Images(_) => None,
        }
    }

    /// The same, of all that was opened.
    pub fn into_texts(self) -> Option<Texts> {
        match self {
            Self::Texts(texts) => Some(*texts),
            Self::Shapes(_) | Self::Images(_) => None,
        }
    }

    /// Prompts and answers, of a run that has some.
    pub fn dataset(&self) -> Option<&Dataset> {
        self.texts().map(|texts| &texts.dataset)
    }

    /// Tells the records of a run from all others; `None` where it has none.
    pub fn digest(&self) -> Option<u32> {
        match self {
            Self::Texts(texts) => Some(texts.dataset.digest()),
            Self::Shapes(_) => None,
            Self::Images(images) => images.records().map(anyroll_data::digest),
        }
    }
}
