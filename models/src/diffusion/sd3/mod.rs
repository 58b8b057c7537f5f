//! Transformer of Stable Diffusion 3, from text embeddings to latents (MMDiT, Esser et al. 2024), and of 3.5
//! with a second attention and normed queries and keys. Weights have the names of diffusers'
//! `SD3Transformer2DModel`.
//!
//! Its blocks are the embedding, the joint blocks and the head, each with a unit of its own. Blocks pass on
//! `[B, 1 + S + T, C]`: a row of conditioning, the text, then the patches; the last joint block drops the
//! text. The backward is libtorch's.
//!
//! Letters in shapes: B latents, S text tokens, T patches, C inner size, H heads.

mod block;
mod config;
mod embedding;
mod head;
mod position;

use tch::{Device, Tensor};

pub use config::Sd3Config;
pub(crate) use position::PositionTable;

use super::layers::stacked;
use super::{DenoiseBatch, Lora, Shared, Texts};
use crate::autograd::{AutogradModel, Layout};
use crate::model::{Unit, Weights};
use crate::{Error, Result};
use block::Block;
use embedding::Embedding;
use head::Head;

/// The transformer. It holds no weights.
#[derive(Debug)]
pub struct Sd3 {
    config: Sd3Config,
    layout: Layout,
    embedding: Embedding,
    blocks: Vec<Block>,
    head: Head,
    /// Position encoding of one axis, for rows as for columns: fp32 `[pos_embed_max_size, C / 2]`.
    places: Shared,
    texts: Option<Texts>,
}

impl Sd3 {
    /// Lays out a transformer whose weights and batches will be on `device`. With `lora`, its layers have
    /// adapters, and all other weights are frozen. A batch's labels are indices into the texts of
    /// [`Self::with_texts`].
    ///
    /// # Errors
    /// [`Error::Config`] for invalid sizes, or libtorch's error.
    pub fn new(config: Sd3Config, lora: Option<&Lora>, device: Device) -> Result<Sd3> {
        config.validate()?;
        lora.map_or(Ok(()), Lora::validate)?;
        let (first, embedding) = Embedding::layout(&config);
        let blocks = (0..config.num_layers).map(|layer| Block::layout(&config, layer, lora));
        let (last, head) = Head::layout(&config);
        let (layout, blocks) = stacked(first, blocks, last, lora.is_some());
        let places = Shared::new(position::places(&config)?.f_to_device(device)?);
        Ok(Sd3 { layout, config, embedding, blocks, head, places, texts: None })
    }

    /// Returns the units of a transformer without adapters.
    pub(crate) fn units(config: &Sd3Config) -> Vec<Unit> {
        let blocks = (0..config.num_layers).map(|layer| Block::layout(config, layer, None).0);
        let (first, last) = (Embedding::layout(config).0, Head::layout(config).0);
        std::iter::once(first).chain(blocks).chain([last]).collect()
    }

    /// Sets the texts that labels refer to.
    ///
    /// # Errors
    /// [`Error::Input`] for texts of other widths than the config's.
    pub fn with_texts(self, texts: Texts) -> Result<Sd3> {
        texts.check(self.config.text_widths())?;
        Ok(Sd3 { texts: Some(texts), ..self })
    }

    /// Returns the shape.
    pub fn config(&self) -> &Sd3Config {
        &self.config
    }

    /// Runs a block on these texts.
    pub(super) fn run_on(
        &self,
        block: usize,
        weights: &Weights,
        x: &Tensor,
        batch: &DenoiseBatch,
        texts: &Texts,
    ) -> Result<Tensor> {
        if block == 0 {
            let (context, pooled) = texts.of(&batch.labels)?;
            let text = (&context, &pooled.expect("checked with the texts"));
            return self.embedding.forward(weights, x, &batch.sigmas, text, &self.places.beside(x)?);
        }
        match self.blocks.get(block - 1) {
            Some(block) => block.forward(&self.config, weights, x, texts.tokens()),
            None => self.head.forward(&self.config, weights, x, &batch.latents.size()),
        }
    }

    fn check(&self, batch: &DenoiseBatch) -> Result<()> {
        let Sd3Config { in_channels, patch_size, pos_embed_max_size, .. } = self.config;
        let found = batch.latents.size();
        let side_fits = |side: i64| side % patch_size == 0 && side / patch_size <= pos_embed_max_size;
        let fits =
            found.len() == 4 && found[1] == in_channels && found[2..].iter().all(|&side| side_fits(side));
        let problem = format!(
            "are {found:?}, must be [B, {in_channels}, height, width], of sides that are multiples of {patch_size}, \
             at most {}",
            patch_size * pos_embed_max_size
        );
        if fits { Ok(()) } else { Err(Error::Input { what: "latents", problem }) }
    }
}

/// Outputs velocities, fp32 `[B, out_channels, height, width]`.
impl AutogradModel for Sd3 {
    type Batch = DenoiseBatch;

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn adapters(&self, batch: &DenoiseBatch) -> bool {
        batch.adapters
    }

    fn input<'a>(&self, batch: &'a DenoiseBatch) -> (&'a Tensor, bool) {
        (&batch.latents, batch.latents_grad)
    }

    fn run(&self, block: usize, weights: &Weights, x: &Tensor, batch: &DenoiseBatch) -> Result<Tensor> {
        if block == 0 {
            self.check(batch)?;
        }
        self.run_on(block, weights, x, batch, Texts::of_model(&self.texts)?)
    }
}
