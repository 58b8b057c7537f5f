//! What `distill` learns from: a published model that says what it would, with all odds, in the place of every token.
//!
//! Its logits are never there as a whole, nor for long: it says what its head would read, and the policy's head makes a few
//! tokens' logits of that beside its own.

use std::{path::Path, sync::Arc};

use anyroll_backends::ops::{Divergence, copy_across, moved};
use anyroll_models::{self as models, HiddenModel, PackedBatch, hf::ModelFolder};
use anyroll_strategy::{State, Zero};
use tch::{Device, Tensor};

use super::{Written, written::pack};
use crate::{
    Result,
    config::{DistillConfig, Role},
    train::{Place, hold, offloaded},
};

/// A teacher, held as references are.
#[derive(Debug)]
pub struct Teacher {
    model: Zero<HiddenModel>,
    divergence: Divergence,
    /// Sequences that a rank scores at a time.
    micro_batch_size: usize,
    /// What of it is on the device only while it scores.
    offloaded: Vec<State>,
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
    /// The model in the folder `path` on `place`, held as `role` says. Every rank calls.
    pub fn open(path: &Path, distill: &DistillConfig, role: &Role, place: &Place) -> Result<Self> {
        let folder = ModelFolder::open(path).map_err(models::Error::from)?;
        let model = HiddenModel::new(folder.decoder_config().clone(), place.torch_device()?)?;
        let mut model = hold(Arc::new(model), &role.strategy, place, None, &folder)?;
        let offloaded = offloaded(&role.strategy);
        model.offload_states(&offloaded)?;
        let DistillConfig { beta, temperature, .. } = *distill;
        let micro_batch_size = role.strategy.micro_batch_size;
        Ok(Self { model, divergence: Divergence { beta, temperature }, micro_batch_size, offloaded })
    }

    /// What it says of the answers in `sequences`, for a policy on `device`. Every rank calls with as many.
    pub fn read(&mut self, sequences: &[Written], device: Device) -> Result<Taught> {
        self.model.load_states(&self.offloaded)?;
        let here = self.model.torch_device();
        let parts = sequences.chunks(self.micro_batch_size);
        let parts =
            parts.map(|part| Ok(self.model.score(&pack(part, here)?)?)).collect::<Result<Vec<_>>>()?;
        let rows = moved(&Tensor::f_cat(&parts, 0)?, device)?;
        let (unit, param) = self.model.model().lm_head();
        let lm_head = self.model.unit_weights(unit)?.swap_remove(param);
        // A copy, since the weights themselves may leave.
        let mut copied = Tensor::f_empty(lm_head.size(), (lm_head.kind(), device))?;
        copy_across(&mut copied, &lm_head)?;
        self.model.offload_states(&self.offloaded)?;
        Ok(Taught { rows, lm_head: copied, divergence: self.divergence })
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
