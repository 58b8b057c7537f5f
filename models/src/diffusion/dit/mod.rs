//! A class-conditional diffusion transformer: patches of an image as tokens, and blocks that the class and the
//! sigma modulate (DiT with adaLN-Zero, Peebles and Xie 2023, whose names the weights have).
//!
//! Its blocks are the embedding, the transformer blocks and the head, each with a unit of its own. What goes from
//! block to block is `[B, 1 + T, C]`: a row of conditioning, then the T patches. So a block's input is one tensor,
//! and what the conditioning is due reaches the embedding through it. Their backward is libtorch's.
//!
//! Letters in shapes: B points, T patches, C hidden size, H heads.

mod block;
mod config;
mod embedding;
mod head;

use tch::Tensor;

pub use config::DitConfig;

use super::{DenoiseBatch, layers};
use crate::autograd::{AutogradModel, Layout};
use crate::model::{Init, ParamSpec, Part, Weights};
use crate::{Error, Result};

/// A diffusion transformer. It holds no weights.
#[derive(Debug)]
pub struct Dit {
    config: DitConfig,
    layout: Layout,
}

impl Dit {
    /// Lays out a transformer.
    ///
    /// # Errors
    /// [`Error::Config`] for sizes that make no model.
    pub fn new(config: DitConfig) -> Result<Dit> {
        config.validate()?;
        let mut units = vec![embedding::unit(&config)];
        units.extend((0..config.layers).map(|layer| block::unit(&config, layer)));
        units.push(head::unit(&config));
        Ok(Dit { layout: Layout::new(units), config })
    }

    /// The shape that it was made from.
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

/// Its result are velocities, fp32 `[B, channels, height, width]`.
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
            return embedding::forward(&self.config, weights, x, batch);
        }
        if block == self.config.layers + 1 {
            return head::forward(&self.config, weights, x);
        }
        block::forward(&self.config, weights, x)
    }
}

/// A matrix of a linear layer, and its bias.
fn linear(name: &str, rows: i64, columns: i64, init: Init) -> [ParamSpec; 2] {
    let weight = param(format!("{name}.weight"), vec![rows, columns], init);
    let bias = param(format!("{name}.bias"), vec![rows], Init::Zeros);
    [ParamSpec { decay: true, ..weight }, bias]
}

/// As torch.nn.Linear has it by default: a deviation of `1 / sqrt(3 columns)`.
fn usual(columns: i64) -> Init {
    Init::Normal { std: 1.0 / (3.0 * columns as f64).sqrt() }
}

/// A parameter that does not decay.
fn param(name: String, shape: Vec<i64>, init: Init) -> ParamSpec {
    let parts = vec![Part { name: name.clone(), rows: shape[0] }];
    ParamSpec { name, shape, parts, init, decay: false }
}

/// The parameters `N`, `N + 1` of a block's unit, as a linear layer of `x`.
fn apply_linear(weights: &Weights, first: usize, x: &Tensor) -> Result<Tensor> {
    Ok(x.f_linear(weights.get(0, first), Some(weights.get(0, first + 1)))?)
}

/// The conditioning `[B, 1, C]`, activated, and the patches `[B, T, C]` of a hidden tensor.
fn conditioned(x: &Tensor) -> Result<(Tensor, Tensor)> {
    Ok((x.f_narrow(1, 0, 1)?.f_silu()?, x.f_narrow(1, 1, x.size()[1] - 1)?))
}

/// `norm(x) (1 + scale) + shift`, the norm without weights.
fn modulate(x: &Tensor, shift: &Tensor, scale: &Tensor) -> Result<Tensor> {
    layers::modulate(&layers::layer_norm(x)?, shift, scale)
}
