//! Wan's transformer, from text embeddings to latents of videos (Wan 2.1 and 2.2, Wan Team 2025). Weights
//! have the names of diffusers' `WanTransformer3DModel`.
//!
//! Its blocks are the embedding, the transformer blocks and the head, each with its own unit. Blocks pass on
//! `[B, 7 + S + T, C]`: a row for the sigma, six rows that modulate the blocks, the text, then the patches.
//! The backward is libtorch's.
//!
//! Wan 2.2's 14B is a pair of transformers: the first is used at high sigmas, the second at low ones. Each
//! unit holds the parameters of both at its position, and each point of a batch goes through one of them. So
//! ranks whose points have different sigmas gather and reduce the same units in the same order. Parameters
//! that no point used have a gradient of 0.
//!
//! Letters in shapes: B latents, S text tokens, T patches, C inner size, H heads, D width of a head.

mod block;
mod config;
mod embedding;
mod head;
mod rotary;
pub mod vae;

use tch::{Device, Kind, Tensor};

pub use config::{EXPERTS, WanConfig};
pub use vae::{VideoLatentSize, WanVaeConfig, WanVaeDecoder, WanVaeTape};

use super::layers::{Params, stacked};
use super::{DenoiseBatch, Lora, Shared, Texts};
use crate::autograd::{AutogradModel, Layout};
use crate::model::{ParamSpec, Unit, Weights};
use crate::{Error, Result};
use block::Block;
use embedding::Embedding;
use head::Head;

/// Number of rows before the text.
const ROWS: i64 = 7;

/// The transformer, or a pair. It holds no weights.
#[derive(Debug)]
pub struct Wan {
    config: WanConfig,
    layout: Layout,
    /// One per transformer, like `blocks` and `heads`.
    embeddings: Vec<Embedding>,
    blocks: Vec<Vec<Block>>,
    heads: Vec<Head>,
    /// Cosines and sines of every position: fp32 `[rope_max_seq_len, D / 2]`.
    turns: [Shared; 2],
    texts: Option<Texts>,
}

/// Inputs of a block.
struct Points<'a> {
    x: &'a Tensor,
    sigmas: &'a Tensor,
    labels: &'a Tensor,
    texts: &'a Texts,
    /// Patches in time, per column and per row.
    grid: [i64; 3],
}

/// A unit, its adapters' parameters, and the positions of each transformer's layers.
type Placed<P> = (Unit, Vec<ParamSpec>, Vec<P>);

impl Wan {
    /// Lays out a transformer whose weights and batches will be on `device`. With `lora`, its layers have
    /// adapters, and all other weights are frozen. A batch's labels are indices into the texts of
    /// [`Self::with_texts`].
    ///
    /// # Errors
    /// [`Error::Config`] for invalid sizes, or libtorch's error.
    pub fn new(config: WanConfig, lora: Option<&Lora>, device: Device) -> Result<Wan> {
        config.validate()?;
        lora.map_or(Ok(()), Lora::validate)?;
        let ((first, _, embeddings), (last, _, heads)) = (embeddings(&config), heads(&config));
        let blocks = (0..config.num_layers).map(|layer| blocks(&config, layer, lora));
        let (layout, blocks) = stacked(first, blocks, last, lora.is_some());
        let angles = rotary::angles(&config)?;
        let on_device = |turn: Tensor| -> Result<Shared> {
            Ok(Shared::new(turn.f_to_kind(Kind::Float)?.f_to_device(device)?))
        };
        let turns = [on_device(angles.f_cos()?)?, on_device(angles.f_sin()?)?];
        Ok(Wan { layout, config, embeddings, blocks, heads, turns, texts: None })
    }

    /// Returns the units of a transformer without adapters.
    pub(crate) fn units(config: &WanConfig) -> Vec<Unit> {
        let blocks = (0..config.num_layers).map(|layer| blocks(config, layer, None).0);
        std::iter::once(embeddings(config).0).chain(blocks).chain([heads(config).0]).collect()
    }

    /// Sets the texts that labels refer to.
    ///
    /// # Errors
    /// [`Error::Input`] for texts of another width than the config's.
    pub fn with_texts(self, texts: Texts) -> Result<Wan> {
        texts.check(self.config.text_widths())?;
        Ok(Wan { texts: Some(texts), ..self })
    }

    /// Returns the shape.
    pub fn config(&self) -> &WanConfig {
        &self.config
    }

    /// Runs a block of the first transformer on these texts, whatever the sigmas are.
    pub(super) fn run_first(
        &self,
        block: usize,
        weights: &Weights,
        x: &Tensor,
        batch: &DenoiseBatch,
        texts: &Texts,
    ) -> Result<Tensor> {
        let DenoiseBatch { sigmas, labels, .. } = batch;
        self.run_expert(0, block, weights, &Points { x, sigmas, labels, texts, grid: self.grid(batch)? })
    }

    /// Returns the number of patches in time, per column and per row.
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

/// Outputs velocities, fp32 `[B, in_channels, frames, height, width]`.
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
        let (DenoiseBatch { sigmas, labels, .. }, grid) = (batch, self.grid(batch)?);
        let points = Points { x, sigmas, labels, texts: Texts::of_model(&self.texts)?, grid };
        let of_second = self.of_second(&batch.sigmas)?;
        match (of_second.contains(&false), of_second.contains(&true)) {
            (_, false) => self.run_expert(0, block, weights, &points),
            (false, true) => self.run_expert(1, block, weights, &points),
            (true, true) => self.run_both(&of_second, block, weights, &points),
        }
    }
}

impl Wan {
    /// For each point, returns true if it belongs to the second transformer. Empty for a single transformer.
    fn of_second(&self, sigmas: &Tensor) -> Result<Vec<bool>> {
        let Some(boundary) = self.config.boundary_ratio else { return Ok(Vec::new()) };
        Ok(Vec::try_from(sigmas.f_lt(boundary)?)?)
    }

    /// Runs a block of the transformer `expert`.
    fn run_expert(&self, expert: usize, block: usize, weights: &Weights, points: &Points) -> Result<Tensor> {
        let &Points { texts, grid, .. } = points;
        let config = &self.config;
        if block == 0 {
            let (text, _) = texts.of(points.labels)?;
            return self.embeddings[expert].forward(config, weights, points.x, points.sigmas, &text);
        }
        match self.blocks.get(block - 1) {
            Some(blocks) => {
                let [cos, sin] = self.turns.each_ref().map(|turn| turn.beside(points.x));
                let turns = [rotary::of_grid(config, &cos?, grid)?, rotary::of_grid(config, &sin?, grid)?];
                blocks[expert].forward(config, weights, points.x, texts.tokens(), &turns)
            }
            None => self.heads[expert].forward(config, weights, points.x, texts.tokens(), grid),
        }
    }

    /// Runs a block of both transformers, each for its own points.
    fn run_both(
        &self,
        of_second: &[bool],
        block: usize,
        weights: &Weights,
        points: &Points,
    ) -> Result<Tensor> {
        let (second, first): (Vec<usize>, Vec<usize>) =
            (0..of_second.len()).partition(|&number| of_second[number]);
        let mut outputs = Vec::with_capacity(2);
        for (expert, numbers) in [&first, &second].into_iter().enumerate() {
            let own = |all: &Tensor| all.f_index_select(0, &indices(numbers, all.device())?);
            let (x, sigmas, labels) = (own(points.x)?, own(points.sigmas)?, own(points.labels)?);
            let own = Points { x: &x, sigmas: &sigmas, labels: &labels, ..*points };
            outputs.push(self.run_expert(expert, block, weights, &own)?);
        }
        let outputs = Tensor::f_cat(&outputs, 0)?;
        let mut places = vec![0; of_second.len()];
        first.iter().chain(&second).enumerate().for_each(|(place, &number)| places[number] = place);
        Ok(outputs.f_index_select(0, &indices(&places, outputs.device())?)?)
    }
}

fn indices(numbers: &[usize], device: Device) -> Result<Tensor, tch::TchError> {
    let numbers: Vec<i64> = numbers.iter().map(|&number| number as i64).collect();
    Tensor::f_from_slice(&numbers)?.f_to_device(device)
}

fn embeddings(config: &WanConfig) -> Placed<Embedding> {
    placed(config, "embedding", None, |params, prefix| Embedding::layout(config, params, prefix))
}

fn blocks(config: &WanConfig, layer: usize, lora: Option<&Lora>) -> Placed<Block> {
    let name = format!("blocks.{layer}");
    placed(config, &name, lora, |params, prefix| Block::layout(config, params, &format!("{prefix}{name}")))
}

fn heads(config: &WanConfig) -> Placed<Head> {
    placed(config, "proj_out", None, |params, prefix| Head::layout(config, params, prefix))
}

/// Returns the unit `name`, to which `layout` adds the parameters of each transformer in turn.
fn placed<P>(
    config: &WanConfig,
    name: &str,
    lora: Option<&Lora>,
    layout: impl Fn(&mut Params, &str) -> P,
) -> Placed<P> {
    let mut params = Params::with_lora(lora);
    let layers = config.experts().iter().map(|prefix| layout(&mut params, prefix)).collect();
    let (unit, adapters) = params.into_units(name);
    (unit, adapters, layers)
}
