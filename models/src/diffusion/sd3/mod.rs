//! Stable Diffusion 3's transformer of latents, from text embeddings (MMDiT, Esser et al. 2024), and that of 3.5 with
//! its second attention and normed queries and keys. Weights have the names of diffusers' `SD3Transformer2DModel`.
//!
//! Its blocks are the embedding, the joint blocks and the head, each with a unit of its own. What goes from block to
//! block is `[B, 1 + S + T, C]`: a row of conditioning, the text, then the patches; the last joint block drops the
//! text. Their backward is libtorch's.
//!
//! Letters in shapes: B latents, S text tokens, T patches, C inner size, H heads.

mod block;
mod config;
mod embedding;
mod head;
mod position;

use std::sync::{Mutex, PoisonError};

use tch::{Device, Tensor};

pub use config::Sd3Config;

use crate::autograd::{AutogradModel, Layout};
use crate::model::Weights;
use crate::{Error, Result};
use block::Block;
use embedding::Embedding;
use head::Head;

/// Points on the lines from data to noise, with what the data shall show.
#[derive(Debug)]
pub struct Sd3Batch {
    /// The points: fp32 `[B, in_channels, height, width]`, both sizes multiples of the patch's.
    pub latents: Tensor,
    /// How far each is from the data, 0 to 1: fp32 `[B]`.
    pub sigmas: Tensor,
    /// The text's tokens: `[B, S, joint_attention_dim]`.
    pub context: Tensor,
    /// The text as a whole: `[B, pooled_projection_dim]`.
    pub pooled: Tensor,
    /// Whether backward should find the gradient of the points as well.
    pub latents_grad: bool,
}

/// The transformer. It holds no weights.
#[derive(Debug)]
pub struct Sd3 {
    config: Sd3Config,
    layout: Layout,
    embedding: Embedding,
    blocks: Vec<Block>,
    head: Head,
    /// Where each patch is: fp32 `[pos_embed_max_size, pos_embed_max_size, C]`. Behind a lock only because tch's
    /// tensors are not `Sync`; nobody writes to it.
    positions: Mutex<Tensor>,
}

impl Sd3 {
    /// Lays out a transformer whose weights and batches will be on `device`.
    ///
    /// # Errors
    /// [`Error::Config`] for sizes that make no model, or libtorch's error.
    pub fn new(config: Sd3Config, device: Device) -> Result<Sd3> {
        config.validate()?;
        let (unit, embedding) = Embedding::layout(&config);
        let mut units = vec![unit];
        let mut blocks = Vec::with_capacity(config.num_layers);
        for layer in 0..config.num_layers {
            let (unit, block) = Block::layout(&config, layer);
            units.push(unit);
            blocks.push(block);
        }
        let (unit, head) = Head::layout(&config);
        units.push(unit);
        let positions = Mutex::new(position::table(&config)?.f_to_device(device)?);
        Ok(Sd3 { layout: Layout::new(units), config, embedding, blocks, head, positions })
    }

    /// The shape that it was made from.
    pub fn config(&self) -> &Sd3Config {
        &self.config
    }

    fn check(&self, batch: &Sd3Batch) -> Result<()> {
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

    fn positions(&self) -> Tensor {
        self.positions.lock().unwrap_or_else(PoisonError::into_inner).shallow_clone()
    }
}

/// Its result are velocities, fp32 `[B, out_channels, height, width]`.
impl AutogradModel for Sd3 {
    type Batch = Sd3Batch;

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn input<'a>(&self, batch: &'a Sd3Batch) -> (&'a Tensor, bool) {
        (&batch.latents, batch.latents_grad)
    }

    fn run(&self, block: usize, weights: &Weights, x: &Tensor, batch: &Sd3Batch) -> Result<Tensor> {
        if block == 0 {
            self.check(batch)?;
            return self.embedding.forward(weights, x, batch, &self.positions());
        }
        match self.blocks.get(block - 1) {
            Some(block) => block.forward(&self.config, weights, x, batch.context.size()[1]),
            None => self.head.forward(&self.config, weights, x, &batch.latents.size()),
        }
    }
}
