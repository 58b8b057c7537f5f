//! What the config of a published model of images names, opened and found to fit.

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

/// A published model of images.
pub struct PublishedModel {
    /// Its folder.
    pub folder: DiffusersFolder,
    /// The shape of its adapters, if it has some.
    pub lora: Option<Lora>,
    /// Their first values, if they are not new.
    pub adapter: Option<ImageAdapterFiles>,
    /// Frames of what is painted; 1 of images.
    pub frames: usize,
    /// Frames, height and width of what is denoised.
    pub sides: [i64; 3],
}

/// Texts to paint.
pub enum PaintedTexts {
    /// Encoded beforehand.
    Encoded(EncodedTexts),
    /// To be encoded when the run begins.
    ToEncode {
        /// The model's own encoders.
        encoders: Box<PromptEncoders>,
        /// How they read.
        encode: EncodeConfig,
        /// What they read, with what rewards read.
        records: Vec<Record>,
    },
}

/// Texts as encoders have read them.
pub struct EncodedTexts {
    /// The file of the embeddings.
    pub embeddings: TextEmbeddings,
    /// What is known of each text, where the config names that.
    pub records: Option<Vec<Record>>,
}

impl Opened {
    /// What is known of each text, where the config names that.
    pub fn records(&self) -> Option<&[Record]> {
        match &self.texts {
            PaintedTexts::Encoded(texts) => texts.records.as_deref(),
            PaintedTexts::ToEncode { records, .. } => Some(records),
        }
    }
}

impl PublishedModel {
    /// The model's folder and the first values of its adapters: those of a file, or of `seed`.
    pub fn into_weights(self, seed: u64) -> (DiffusersFolder, Box<dyn WeightSource>) {
        let adapter: Box<dyn WeightSource> = match self.adapter {
            Some(adapter) => Box::new(adapter),
            None => Box::new(Seed(seed)),
        };
        (self.folder, adapter)
    }
}
