//! Any of the models of velocities, where it is the config that says which.

use tch::{Device, Tensor};

use super::{DenoiseBatch, Dit, Lora, Sd3, Sd3Config, Texts};
use crate::Result;
use crate::autograd::{AutogradModel, Layout};
use crate::model::{Model, Unit, Weights};

/// A model of velocities. It holds no weights.
#[derive(Debug)]
pub enum Transformer {
    /// Of classes.
    Dit(Dit),
    /// Stable Diffusion 3's, or that of 3.5.
    Sd3(Sd3),
}

/// The shape of a published model's transformer.
#[derive(Clone, Debug, PartialEq)]
pub enum TransformerConfig {
    /// Stable Diffusion 3's, or that of 3.5.
    Sd3(Sd3Config),
}

impl TransformerConfig {
    /// Lays out the transformer for `device`, with adapters if there is a `lora` and with `texts` to show.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for sizes that make no model, [`crate::Error::Input`] for texts of other widths, or
    /// libtorch's error.
    pub fn build(&self, lora: Option<&Lora>, texts: Option<Texts>, device: Device) -> Result<Transformer> {
        let TransformerConfig::Sd3(config) = self;
        let model = Sd3::new(config.clone(), lora, device)?;
        Ok(Transformer::Sd3(match texts {
            Some(texts) => model.with_texts(texts)?,
            None => model,
        }))
    }

    /// The units without adapters.
    pub fn units(&self) -> Vec<Unit> {
        let TransformerConfig::Sd3(config) = self;
        Sd3::units(config)
    }

    /// The layers that may have an adapter: the linear ones of its blocks, as `transformer_blocks.0.attn.to_q`.
    pub fn modules(&self) -> Vec<String> {
        let units = self.units();
        let blocks = &units[1..units.len() - 1];
        let matrices = blocks.iter().flat_map(|unit| &unit.params).filter(|spec| spec.decay);
        let names = matrices.flat_map(|spec| &spec.parts).map(|part| part.name.as_str());
        names.map(|name| name.strip_suffix(".weight").unwrap_or(name).to_owned()).collect()
    }

    /// The channels of its latents, the multiple that their sides must be of, and the longest side.
    pub fn latents(&self) -> (i64, i64, i64) {
        let TransformerConfig::Sd3(Sd3Config { in_channels, patch_size, pos_embed_max_size, .. }) = self;
        (*in_channels, *patch_size, patch_size * pos_embed_max_size)
    }

    /// The widths of a text's tokens and, if it reads that, of a text as a whole.
    pub fn text_widths(&self) -> (i64, Option<i64>) {
        let TransformerConfig::Sd3(config) = self;
        (config.joint_attention_dim, Some(config.pooled_projection_dim))
    }
}

impl Transformer {
    /// The units of its adapters alone.
    pub fn adapter_units(&self) -> Vec<Unit> {
        self.units().iter().filter(|unit| unit.trainable).cloned().collect()
    }

    fn inner(&self) -> &dyn AutogradModel<Batch = DenoiseBatch> {
        match self {
            Transformer::Dit(dit) => dit,
            Transformer::Sd3(sd3) => sd3,
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
