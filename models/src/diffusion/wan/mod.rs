//! Wan's transformer of latents of videos, from text embeddings (Wan 2.1 and 2.2, Wan Team 2025). Weights have the names
//! of diffusers' `WanTransformer3DModel`.
//!
//! Its blocks are the embedding, the transformer blocks and the head, each with a unit of its own. What goes from block to
//! block is `[B, 7 + S + T, C]`: a row for the sigma, six that modulate the blocks, the text, then the patches. Their
//! backward is libtorch's.
//!
//! Letters in shapes: B latents, S text tokens, T patches, C inner size, H heads, D width of a head.

mod block;
mod config;
mod embedding;
mod head;
mod rotary;
pub mod vae;

use tch::{Device, Kind, Tensor};

pub use config::WanConfig;
pub use vae::{WanVaeConfig, WanVaeDecoder, WanVaeTape};

use super::layers::stacked;
use super::{DenoiseBatch, Lora, Shared, Texts};
use crate::autograd::{AutogradModel, Layout};
use crate::model::{Unit, Weights};
use crate::{Error, Result};
use block::Block;
use embedding::Embedding;
use head::Head;

/// Rows in front of the text.
const ROWS: i64 = 7;

/// The transformer. It holds no weights.
#[derive(Debug)]
pub struct Wan {
    config: WanConfig,
    layout: Layout,
    embedding: Embedding,
    blocks: Vec<Block>,
    head: Head,
    /// Cosines and sines of every place: fp32 `[rope_max_seq_len, D / 2]`.
    turns: [Shared; 2],
    texts: Option<Texts>,
}

impl Wan {
    /// Lays out a transformer whose weights and batches will be on `device`; with `lora`, adapters are beside its
    /// layers, and all else is frozen. A batch's labels are numbers of [`Self::with_texts`].
    ///
    /// # Errors
    /// [`Error::Config`] for sizes that make no model, or libtorch's error.
    pub fn new(config: WanConfig, lora: Option<&Lora>, device: Device) -> Result<Wan> {
        config.validate()?;
        lora.map_or(Ok(()), Lora::validate)?;
        let (first, embedding) = Embedding::layout(&config);
        let blocks = (0..config.num_layers).map(|layer| Block::layout(&config, layer, lora));
        let (last, head) = Head::layout(&config);
        let (layout, blocks) = stacked(first, blocks, last, lora.is_some());
        let angles = rotary::angles(&config)?;
        let on_device = |turn: Tensor| -> Result<Shared> {
            Ok(Shared::new(turn.f_to_kind(Kind::Float)?.f_to_device(device)?))
        };
        let turns = [on_device(angles.f_cos()?)?, on_device(angles.f_sin()?)?];
        Ok(Wan { layout, config, embedding, blocks, head, turns, texts: None })
    }

    /// The units of a transformer without adapters.
    pub(crate) fn units(config: &WanConfig) -> Vec<Unit> {
        let blocks = (0..config.num_layers).map(|layer| Block::layout(config, layer, None).0);
        let (first, last) = (Embedding::layout(config).0, Head::layout(config).0);
        std::iter::once(first).chain(blocks).chain([last]).collect()
    }

    /// The same transformer with texts to show.
    ///
    /// # Errors
    /// [`Error::Input`] for texts of another width than the config's.
    pub fn with_texts(self, texts: Texts) -> Result<Wan> {
        texts.check(self.config.text_dim, None)?;
        Ok(Wan { texts: Some(texts), ..self })
    }

    /// The shape that it was made from.
    pub fn config(&self) -> &WanConfig {
        &self.config
    }

    fn texts(&self) -> Result<&Texts> {
        Texts::of_model(&self.texts)
    }

    /// Patches in time and of either side.
    fn grid(&self, batch: &DenoiseBatch) -> Result<[i64; 3]> {
        let WanConfig { in_channels, patch_size, rope_max_seq_len, .. } = self.config;
        let found = batch.latents.size();
        if let &[_, channels, frames, height, width] = &found[..] {
            let sides = [frames, height, width];
            let fits = |axis: usize| {
                let patches = sides[axis] / patch_size[axis];
                sides[axis] % patch_size[axis] == 0 && (1..=rope_max_seq_len).contains(&patches)
            };
            if channels == in_channels && (0..3).all(fits) {
                return Ok([0, 1, 2].map(|axis| sides[axis] / patch_size[axis]));
            }
        }
        let problem = format!(
            "are {found:?}, must be [B, {in_channels}, frames, height, width], of at most {rope_max_seq_len} patches of \
             {patch_size:?} each way"
        );
        Err(Error::Input { what: "latents", problem })
    }
}

/// Its result are velocities, fp32 `[B, in_channels, frames, height, width]`.
impl AutogradModel for Wan {
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
        let (config, texts, grid) = (&self.config, self.texts()?, self.grid(batch)?);
        if block == 0 {
            let (text, _) = texts.of(&batch.labels)?;
            return self.embedding.forward(config, weights, x, &batch.sigmas, &text);
        }
        match self.blocks.get(block - 1) {
            Some(block) => {
                let [cos, sin] = &self.turns;
                let turns =
                    [rotary::of_grid(config, &cos.get(), grid)?, rotary::of_grid(config, &sin.get(), grid)?];
                block.forward(config, weights, x, texts.tokens(), &turns)
            }
            None => self.head.forward(config, weights, x, texts.tokens(), grid),
        }
    }
}
