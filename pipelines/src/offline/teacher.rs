//! What `distill` learns from: a published model that says what it would, with all odds, in the place of every token.
//!
//! Its logits are never there as a whole, nor for long: it says what its head would read, and the policy's head makes a few
//! tokens' logits of that beside its own.

use anyroll_backends::ops::{Divergence, copy_across, moved};
use anyroll_models::{self as models, HiddenModel, PackedBatch, hf::ModelFolder};
use tch::{Device, Tensor};

use super::{Written, written::pack};
use crate::{
    Result,
    config::DistillConfig,
    run::Role,
    train::{Place, Reference},
};

/// A teacher, held as references are.
#[derive(Debug)]
pub struct Teacher {
    model: Reference<HiddenModel>,
    divergence: Divergence,
}

/// What a teacher says of the tokens of some answers, in their order, on the policy's device.
#[derive(Debug)]
pub struct Taught {
    /// `[tokens, D]`
    rows: Tensor,
    /// `[W, D]`
    lm_head: Tensor,
    divergence: Divergence,
}

impl Teacher {
    /// The model in `folder` on `place`, held as `role` says. Every rank calls.
    pub fn new(folder: &ModelFolder, distill: &DistillConfig, role: &Role, place: &Place) -> Result<Self> {
        let model = Reference::published(folder, role, place, HiddenModel::new)?;
        let DistillConfig { beta, temperature, .. } = *distill;
        Ok(Self { model, divergence: Divergence { beta, temperature } })
    }

    /// What it says of the answers in `sequences`, for a policy on `device`. Every rank calls with as many.
    pub fn read(&mut self, sequences: &[Written], device: Device) -> Result<Taught> {
        let divergence = self.divergence;
        self.model.score(|model, micro_batch_size| {
            let here = model.torch_device();
            let parts = sequences.chunks(micro_batch_size);
            let parts = parts.map(|part| Ok(model.score(&pack(part, here)?)?)).collect::<Result<Vec<_>>>()?;
            let rows = moved(&Tensor::f_cat(&parts, 0)?, device)?;
            let (unit, param) = model.model().lm_head();
            let weights = model.unit_weights(unit)?.swap_remove(param);
            // A copy, since the weights themselves may leave.
            let mut lm_head = Tensor::f_empty(weights.size(), (weights.kind(), device))?;
            copy_across(&mut lm_head, &weights)?;
            Ok(Taught { rows, lm_head, divergence })
        })
    }
}

impl Taught {
    /// The batch beside what is said of its targets, which are those from `start` on.
    pub fn beside(&self, batch: PackedBatch, start: i64) -> models::Result<PackedBatch> {
        let rows = self.rows.f_narrow(0, start, batch.targets())?;
        let (lm_head, divergence) = (self.lm_head.shallow_clone(), self.divergence);
        batch.with_teacher(models::Teacher { rows, lm_head, divergence })
    }
}
