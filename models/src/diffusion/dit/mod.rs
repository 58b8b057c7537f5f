//! A class-conditional diffusion transformer (DiT with adaLN-Zero, Peebles and Xie 2023, whose weight names
//! it uses). Patches of an image are tokens, and class and sigma modulate the blocks.
//!
//! Its blocks are the embedding, the transformer blocks and the head, each with a unit of its own. Blocks
//! pass on `[B, 1 + T, C]`: a row of conditioning, then the T patches. So a block's input is one tensor, and
//! the gradient of the conditioning reaches the embedding through it. The backward is libtorch's.
//!
//! Letters in shapes: B points, T patches, C hidden size, H heads.

mod block;
mod config;
mod embedding;
mod head;

use tch::Tensor;

pub use config::DitConfig;

use super::DenoiseBatch;
use crate::autograd::{AutogradModel, Layout};
use crate::model::Weights;
use crate::{Error, Result};
use block::Block;
use embedding::Embedding;
use head::Head;

/// A diffusion transformer. It holds no weights.
#[derive(Debug)]
pub struct Dit {
    config: DitConfig,
    layout: Layout,
    embedding: Embedding,
    blocks: Vec<Block>,
    head: Head,
}

impl Dit {
    /// Lays out a transformer.
    ///
    /// # Errors
    /// [`Error::Config`] for invalid sizes.
    pub fn new(config: DitConfig) -> Result<Dit> {
        config.validate()?;
        let (unit, embedding) = Embedding::layout(&config);
        let mut units = vec![unit];
        let mut blocks = Vec::with_capacity(config.layers);
        for layer in 0..config.layers {
            let (unit, block) = Block::layout(&config, layer);
            units.push(unit);
            blocks.push(block);
        }
        let (unit, head) = Head::layout(&config);
        units.push(unit);
        Ok(Dit { layout: Layout::new(units), config, embedding, blocks, head })
    }

    /// Returns the shape.
    pub fn config(&self) -> &DitConfig {
        &self.config
    }

    fn check(&self, batch: &DenoiseBatch) -> Result<()> {
        let DitConfig { channels, image_size, .. } = self.config;
        let (found, wanted) = (batch.latents.size(), [channels, image_size, image_size]);
        let problem = format!("are {found:?}, must be [B, {channels}, {image_size}, {image_size}]");
        let fits = found.len() == 4 && found[1..] == wanted;
        if fits { Ok(()) } else { Err(Error::Input { what: "latents", problem }) }
    }
}

/// Returns velocities, fp32 `[B, channels, height, width]`.
impl AutogradModel for Dit {
    type Batch = DenoiseBatch;

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn input<'a>(&self, batch: &'a DenoiseBatch) -> (&'a Tensor, bool) {
        (&batch.latents, batch.latents_grad)
    }

    fn run(&self, block: usize, weights: &Weights, x: &Tensor, batch: &DenoiseBatch) -> Result<Tensor> {
        if block == 0 {
            self.check(batch)?;
            return self.embedding.forward(&self.config, weights, x, batch);
        }
        match self.blocks.get(block - 1) {
            Some(block) => block.forward(&self.config, weights, x),
            None => self.head.forward(&self.config, weights, x),
        }
    }
}

/// Returns the conditioning `[B, 1, C]`, activated, and the patches `[B, T, C]` of a hidden tensor.
fn conditioned(x: &Tensor) -> Result<(Tensor, Tensor)> {
    Ok((x.f_narrow(1, 0, 1)?.f_silu()?, x.f_narrow(1, 1, x.size()[1] - 1)?))
}
