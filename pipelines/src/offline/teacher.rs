//! The teacher of `distill`: a published model that gives its distribution at every token.
//!
//! Its logits never exist as a whole. It returns its head's inputs, from which the policy's head computes the
//! logits of a few tokens at a time, next to its own.

use anyroll_backends::ops::{Divergence, copy_across, moved};
use anyroll_config::DistillConfig;
use anyroll_models::{self as models, HiddenModel, PackedBatch, hf::ModelFolder};
use tch::{Device, Tensor};

use super::{Tokenized, gradient::token_counts, tokenized::pack};
use crate::{
    Result,
    run::Role,
    train::{Place, Reference},
};

/// A teacher, held like a reference.
#[derive(Debug)]
pub struct Teacher {
    model: Reference<HiddenModel>,
    divergence: Divergence,
}

/// Outputs of a teacher for the tokens of some answers, in order, on the policy's device.
#[derive(Debug)]
pub struct Taught {
    /// `[tokens, D]`
    rows: Tensor,
    /// `[W, D]`
    lm_head: Tensor,
    divergence: Divergence,
}

impl Teacher {
    /// Loads the model in `folder` on `place` under the strategy of `role`. Every rank must call this.
    pub fn new(folder: &ModelFolder, distill: &DistillConfig, role: &Role, place: &Place) -> Result<Self> {
        let model = Reference::published(folder, role, place, HiddenModel::new)?;
        let DistillConfig { beta, temperature, .. } = *distill;
        Ok(Self { model, divergence: Divergence { beta, temperature } })
    }

    /// Outputs for the answers in `sequences`, for a policy on `device`. Every rank must call this with the
    /// same number.
    pub fn read(&mut self, sequences: &[Tokenized], device: Device) -> Result<Taught> {
        let divergence = self.divergence;
        self.model.score(|model, micro_batch| {
            let here = model.torch_device();
            let parts = micro_batch.split(&token_counts(sequences), 0..sequences.len(), model.group())?;
            let parts = parts.into_iter().map(|part| Ok(model.score(&pack(&sequences[part], here)?)?));
            let parts = parts.collect::<Result<Vec<_>>>()?;
            let rows = moved(&Tensor::f_cat(&parts, 0)?, device)?;
            let (unit, param) = model.model().lm_head();
            let weights = model.unit_weights(unit)?.swap_remove(param);
            // A copy, since the weights may be offloaded.
            let mut lm_head = Tensor::f_empty(weights.size(), (weights.kind(), device))?;
            copy_across(&mut lm_head, &weights)?;
            Ok(Taught { rows, lm_head, divergence })
        })
    }
}

impl Taught {
    /// Adds the outputs for the batch's targets, which start at index `start`.
    pub fn beside(&self, batch: PackedBatch, start: i64) -> models::Result<PackedBatch> {
        let rows = self.rows.f_narrow(0, start, batch.targets())?;
        let (lm_head, divergence) = (self.lm_head.shallow_clone(), self.divergence);
        batch.with_teacher(models::Teacher { rows, lm_head, divergence })
    }
}
