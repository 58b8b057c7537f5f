//! The `clip` reward: similarity of an image and its text.

use anyroll_config::{ClipRewardConfig, RewardDtype, error_chain::one_line};
use anyroll_data::{HfTokenizer, Record};
use anyroll_models::{Unit, clip::Clip, hf::ClipFolder, init::whole};
use anyroll_reward::{Failure, StartError};
use tch::{Device, Kind, Tensor, no_grad};

use crate::Result;

/// Texts encoded in a batch.
const TEXTS: usize = 64;

/// Image tower of a CLIP.
#[derive(Debug)]
pub struct ImageTower {
    clip: Clip,
    weights: Vec<Tensor>,
}

impl ImageTower {
    /// Loads the tower of `folder` on `device`.
    pub fn read(folder: &ClipFolder, dtype: RewardDtype, device: Device) -> Result<Self> {
        let clip = Clip::new(folder.config().clone())?;
        let weights = read(folder, clip.units()[0], dtype, device)?;
        Ok(Self { clip, weights })
    }

    /// Unit vectors of images: fp32 `[B, projection]`. `images` are -1 to 1; other values are clamped.
    pub fn vectors(&self, images: &Tensor) -> Result<Tensor> {
        let images = images.f_mul_scalar(0.5)?.f_add_scalar(0.5)?.f_clamp(0.0, 1.0)?;
        Ok(self.clip.embed_images(&self.weights, &images)?)
    }
}

/// A CLIP with the vectors of its texts.
#[derive(Debug)]
pub struct ClipScorer {
    tower: ImageTower,
    /// The vector of each text: fp32 `[texts, projection]`.
    texts: Tensor,
}

impl ClipScorer {
    /// Loads the model and encodes the texts of `records`.
    pub fn new(config: &ClipRewardConfig, records: &[Record], device: Device) -> Result<Self> {
        let (folder, tokenizer) =
            open(config).map_err(|failure| StartError { name: "clip".into(), failure })?;
        let tower = ImageTower::read(&folder, config.dtype, device)?;
        let of_texts = read(&folder, tower.clip.units()[1], config.dtype, device)?;
        let tokens = tokens(&tokenizer, records, &tower.clip)?;
        let vectors = no_grad(|| {
            let vectors = tokens.chunks(TEXTS).map(|texts| tower.clip.embed_texts(&of_texts, texts));
            vectors.collect::<anyroll_models::Result<Vec<_>>>()
        })?;
        Ok(Self { texts: Tensor::f_cat(&vectors, 0)?, tower })
    }

    /// Cosine of each image with its text: fp32 `[B]`. `images` are -1 to 1, other values are clamped;
    /// `labels` are the indices of the texts.
    pub fn score(&self, images: &Tensor, labels: &Tensor) -> Result<Tensor> {
        let seen = self.tower.vectors(images)?;
        let said = self.texts.f_index_select(0, labels)?;
        Ok(seen.f_mul(&said)?.f_sum_dim_intlist([-1i64].as_slice(), false, Kind::Float)?)
    }
}

/// Checks everything in the folder except the weights' values.
pub fn open(config: &ClipRewardConfig) -> Result<(ClipFolder, HfTokenizer), Failure> {
    let folder = ClipFolder::open(&config.path).map_err(|error| one_line(&error))?;
    let tokenizer = HfTokenizer::open_clip(&config.path).map_err(|error| one_line(&error))?;
    Ok((folder, tokenizer))
}

/// Weights of a tower.
fn read(folder: &ClipFolder, unit: &Unit, dtype: RewardDtype, device: Device) -> Result<Vec<Tensor>> {
    let params = unit.params.iter().map(|spec| whole(folder, spec, dtype.dtype().kind(), device));
    Ok(params.collect::<anyroll_models::Result<_>>()?)
}

/// Tokens of each text as in CLIP's own code: a longer text is truncated and keeps its end token.
fn tokens(tokenizer: &HfTokenizer, records: &[Record], clip: &Clip) -> Result<Vec<Vec<i64>>> {
    let config = &clip.config().text_config;
    let (most, end) = (config.max_position_embeddings as usize, config.eos_token_id);
    let mut cut = 0;
    let mut all = Vec::with_capacity(records.len());
    for record in records {
        let (text, is_cut) = tokenizer.encode_ending(&record.prompt, most, end)?;
        cut += usize::from(is_cut);
        all.push(text);
    }
    if cut > 0 {
        tracing::warn!(
            "{cut} of {} texts have more than the {most} tokens that `clip` reads, and are cut",
            all.len()
        );
    }
    Ok(all)
}
