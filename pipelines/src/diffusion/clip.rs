//! How well an image goes with its text, as a CLIP sees them.

use anyroll_models::{Unit, clip::Clip, hf::ClipFolder, init::whole};
use tch::{Device, Kind, Tensor, no_grad};

use crate::{
    Error, Result,
    config::ClipRewardConfig,
    data::{HfTokenizer, Record},
    error_chain::one_line,
    reward::Failure,
};

/// Texts that are read at a time.
const TEXTS: usize = 64;

/// A CLIP that has read its texts.
#[derive(Debug)]
pub struct ClipScorer {
    clip: Clip,
    weights: Vec<Tensor>,
    /// The vector of each text: fp32 `[texts, projection]`.
    texts: Tensor,
}

impl ClipScorer {
    /// Reads the texts of `records`.
    pub fn new(config: &ClipRewardConfig, records: &[Record], device: Device) -> Result<Self> {
        let (folder, tokenizer) =
            open(config).map_err(|failure| Error::Start { name: "clip".into(), failure })?;
        let clip = Clip::new(folder.config().clone())?;
        let kind = config.dtype.dtype().kind();
        let read = |unit: &Unit| {
            let params = unit.params.iter().map(|spec| whole(&folder, spec, kind, device));
            params.collect::<anyroll_models::Result<Vec<Tensor>>>()
        };
        let [images, texts] = clip.units();
        let of_texts = read(texts)?;
        let tokens = tokens(&tokenizer, records, &clip)?;
        let vectors = no_grad(|| {
            let vectors = tokens.chunks(TEXTS).map(|texts| clip.embed_texts(&of_texts, texts));
            vectors.collect::<anyroll_models::Result<Vec<_>>>()
        })?;
        Ok(Self { weights: read(images)?, texts: Tensor::f_cat(&vectors, 0)?, clip })
    }

    /// The cosine of each image and its text: fp32 `[B]`. `images` are -1 to 1, what is beyond is cut off, and `labels` are
    /// the numbers of the texts.
    pub fn score(&self, images: &Tensor, labels: &Tensor) -> Result<Tensor> {
        let images = images.f_mul_scalar(0.5)?.f_add_scalar(0.5)?.f_clamp(0.0, 1.0)?;
        let seen = self.clip.embed_images(&self.weights, &images)?;
        let said = self.texts.f_index_select(0, labels)?;
        Ok(seen.f_mul(&said)?.f_sum_dim_intlist([-1i64].as_slice(), false, Kind::Float)?)
    }
}

/// Checks all of the folder but the weights' values.
pub fn open(config: &ClipRewardConfig) -> Result<(ClipFolder, HfTokenizer), Failure> {
    let folder = ClipFolder::open(&config.path).map_err(|error| one_line(&error))?;
    let tokenizer = HfTokenizer::open(&config.path).map_err(|error| one_line(&error))?;
    Ok((folder, tokenizer))
}

/// Each text as CLIP's own code reads it: one that is too long is cut off, and ends as all do.
fn tokens(tokenizer: &HfTokenizer, records: &[Record], clip: &Clip) -> Result<Vec<Vec<i64>>> {
    let (most, end) = (clip.config().max_position_embeddings as usize, clip.config().eos_token_id);
    let mut cut = 0;
    let mut all = Vec::with_capacity(records.len());
    for record in records {
        let mut text = tokenizer.encode(&record.prompt, true)?;
        cut += usize::from(text.len() > most);
        text.truncate(most);
        if text.last() != Some(&end) {
            text.truncate(most - 1);
            text.push(end);
        }
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
