//! Checked files that the config of a published image model names.

use anyroll_config::EncodeConfig;
use anyroll_data::Record;
use anyroll_models::diffusion::Lora;
use anyroll_models::hf::{DiffusersFolder, ImageAdapterFiles, TextEmbeddings};
use anyroll_models::init::{Seed, WeightSource};

use super::PromptEncoders;

/// A published model and the texts that it paints.
pub struct Opened {
    /// The model.
    pub model: PublishedModel,
    /// The texts.
    pub texts: PaintedTexts,
}

/// A published image model.
pub struct PublishedModel {
    /// Folder of the model.
    pub folder: DiffusersFolder,
    /// Shape of the adapters; `None` without adapters.
    pub lora: Option<Lora>,
    /// Files of the adapters' initial values; `None` for new adapters.
    pub adapter: Option<ImageAdapterFiles>,
    /// Frames of a painted video; 1 for images.
    pub frames: usize,
    /// Frames, height and width of the denoised latents.
    pub sides: [i64; 3],
}

/// Texts to paint.
pub enum PaintedTexts {
    /// Texts that were encoded before the run.
    Encoded(EncodedTexts),
    /// Texts that are encoded when the run begins.
    ToEncode {
        /// The model's own encoders.
        encoders: Box<PromptEncoders>,
        /// Options of the encoders.
        encode: EncodeConfig,
        /// Records of the texts, with the columns that rewards read.
        records: Vec<Record>,
    },
}

impl PaintedTexts {
    /// Returns true if the run encodes them.
    pub fn are_to_encode(&self) -> bool {
        matches!(self, Self::ToEncode { .. })
    }
}

/// Encoded texts.
pub struct EncodedTexts {
    /// The file of the embeddings.
    pub embeddings: TextEmbeddings,
    /// Records of the texts, if the config names them.
    pub records: Option<Vec<Record>>,
}

impl Opened {
    /// Records of the texts, if the config names them.
    pub fn records(&self) -> Option<&[Record]> {
        match &self.texts {
            PaintedTexts::Encoded(texts) => texts.records.as_deref(),
            PaintedTexts::ToEncode { records, .. } => Some(records),
        }
    }
}

impl PublishedModel {
    /// Returns the model's folder and the initial values of its adapters, from their files or drawn with `seed`.
    pub fn into_weights(self, seed: u64) -> (DiffusersFolder, Box<dyn WeightSource>) {
        let adapter: Box<dyn WeightSource> = match self.adapter {
            Some(adapter) => Box::new(adapter),
            None => Box::new(Seed(seed)),
        };
        (self.folder, adapter)
    }
}
