//! What the config of a published model of images names.

use anyroll_models::diffusion::Lora;
use anyroll_models::hf::{DiffusersFolder, ImageAdapterFiles, TextEmbeddings};

use super::PromptEncoders;
use crate::data::Record;

/// Folders and files, opened, and found to fit.
pub struct Opened {
    /// The model.
    pub folder: DiffusersFolder,
    /// The shape of its adapters, if it has some.
    pub lora: Option<Lora>,
    /// Their first values, if they are not new.
    pub adapter: Option<ImageAdapterFiles>,
    /// The texts as encoders read them beforehand.
    pub texts: Option<TextEmbeddings>,
    /// What reads them when the run begins, if they were not.
    pub encoders: Option<PromptEncoders>,
    /// What is known of each text.
    pub records: Option<Vec<Record>>,
}
