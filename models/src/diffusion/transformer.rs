//! Any of the velocity models, chosen by its config.

use tch::{Device, Tensor};

use super::{DenoiseBatch, Dit, Lora, Sd3, Sd3Config, TextWidths, Texts, Wan, WanConfig};
use crate::Result;
use crate::autograd::{AutogradModel, Layout};
use crate::model::{Model, Unit, Weights};

/// A velocity model. It holds no weights.
#[derive(Debug)]
pub enum Transformer {
    /// Class-conditional.
    Dit(Box<Dit>),
    /// Stable Diffusion 3's or 3.5's.
    Sd3(Box<Sd3>),
    /// Wan's, for videos.
    Wan(Box<Wan>),
}

/// The shape of a published model's transformer.
#[derive(Clone, Debug, PartialEq)]
pub enum TransformerConfig {
    /// Stable Diffusion 3's or 3.5's.
    Sd3(Sd3Config),
    /// Wan's, for videos.
    Wan(WanConfig),
}

/// Latents that a transformer accepts. Sizes are frames, height and width; an image has one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentSizes {
    /// Number of channels.
    pub channels: i64,
    /// Each size must be a multiple of this.
    pub multiple: [i64; 3],
    /// Maximum of each size.
    pub most: [i64; 3],
    /// True if latents have frames.
    pub is_video: bool,
}

impl TransformerConfig {
    /// Lays out the transformer for `device`, with adapters if there is a `lora`, and with `texts` that
    /// labels refer to.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for invalid sizes, [`crate::Error::Input`] for texts of other widths, or
    /// libtorch's error.
    pub fn build(&self, lora: Option<&Lora>, texts: Option<Texts>, device: Device) -> Result<Transformer> {
        Ok(match self {
            Self::Sd3(config) => {
                let model = Sd3::new(config.clone(), lora, device)?;
                let model = match texts {
                    Some(texts) => model.with_texts(texts)?,
                    None => model,
                };
                Transformer::Sd3(Box::new(model))
            }
            Self::Wan(config) => {
                let model = Wan::new(config.clone(), lora, device)?;
                let model = match texts {
                    Some(texts) => model.with_texts(texts)?,
                    None => model,
                };
                Transformer::Wan(Box::new(model))
            }
        })
    }

    /// Returns the units without adapters.
    pub fn units(&self) -> Vec<Unit> {
        match self {
            Self::Sd3(config) => Sd3::units(config),
            Self::Wan(config) => Wan::units(config),
        }
    }

    /// Returns the units of the adapters `lora` alone.
    ///
    /// # Errors
    /// The errors of [`Self::build`].
    pub fn adapter_units(&self, lora: &Lora) -> Result<Vec<Unit>> {
        let model = self.build(Some(lora), None, Device::Cpu)?;
        Ok(model.units().iter().filter(|unit| unit.trainable).cloned().collect())
    }

    /// Returns the layers that may have an adapter: the linear layers of its blocks, such as
    /// `transformer_blocks.0.attn.to_q`.
    pub fn modules(&self) -> Vec<String> {
        let units = self.units();
        let blocks = &units[1..units.len() - 1];
        let matrices = blocks.iter().flat_map(|unit| &unit.params).filter(|spec| spec.decay);
        let names = matrices.flat_map(|spec| &spec.parts).map(|part| part.name.as_str());
        names.map(|name| name.strip_suffix(".weight").unwrap_or(name).to_owned()).collect()
    }

    /// Returns the latents that it accepts.
    pub fn latents(&self) -> LatentSizes {
        match self {
            Self::Sd3(Sd3Config { in_channels, patch_size, pos_embed_max_size, .. }) => {
                let longest = patch_size * pos_embed_max_size;
                let (multiple, most) = ([1, *patch_size, *patch_size], [1, longest, longest]);
                LatentSizes { channels: *in_channels, multiple, most, is_video: false }
            }
            Self::Wan(WanConfig { in_channels, patch_size, rope_max_seq_len, .. }) => {
                let most = patch_size.map(|size| size * rope_max_seq_len);
                LatentSizes { channels: *in_channels, multiple: *patch_size, most, is_video: true }
            }
        }
    }

    /// For a pair of transformers, returns the sigma down to which the first is used; below it the second is
    /// used.
    pub fn boundary(&self) -> Option<f64> {
        match self {
            Self::Sd3(_) => None,
            Self::Wan(config) => config.boundary_ratio,
        }
    }

    /// Returns the widths of the texts that the model reads.
    pub fn text_widths(&self) -> TextWidths {
        match self {
            Self::Sd3(config) => config.text_widths(),
            Self::Wan(config) => config.text_widths(),
        }
    }
}

impl Transformer {
    fn inner(&self) -> &dyn AutogradModel<Batch = DenoiseBatch> {
        match self {
            Transformer::Dit(dit) => &**dit,
            Transformer::Sd3(sd3) => &**sd3,
            Transformer::Wan(wan) => &**wan,
        }
    }
}

impl AutogradModel for Transformer {
    type Batch = DenoiseBatch;

    fn layout(&self) -> &Layout {
        self.inner().layout()
    }

    fn adapters(&self, batch: &DenoiseBatch) -> bool {
        self.inner().adapters(batch)
    }

    fn input<'a>(&self, batch: &'a DenoiseBatch) -> (&'a Tensor, bool) {
        self.inner().input(batch)
    }

    fn run(&self, block: usize, weights: &Weights, x: &Tensor, batch: &DenoiseBatch) -> Result<Tensor> {
        self.inner().run(block, weights, x, batch)
    }
}
