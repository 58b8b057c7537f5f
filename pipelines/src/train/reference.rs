//! The model that a policy is compared with: its frozen copy from after the warm-up, or a published one.

use std::sync::Arc;

use anyroll_models::{Decoder, DecoderConfig, Model, hf::ModelFolder, init::WeightSource};
use anyroll_strategy::{State, Zero, checkpoint};
use serde_json::Value;
use tch::Device;

use super::{Kept, Place, hold, offloaded};
use crate::{Error, Result, run::Role};

/// A frozen copy, or another model, which may say something else than a policy does.
#[derive(Debug)]
pub struct Reference<M: Model = Decoder> {
    /// Its weights.
    model: Zero<M>,
    /// Sequences that a rank scores at a time.
    micro_batch_size: usize,
    /// What of it is on the device only while it scores.
    offloaded: Vec<State>,
}

impl Reference {
    /// The reference on `place`, held as `role` says: the `published` model, or else a copy of `policy`, which is saved where
    /// `kept` says, or comes from there. `weights` are the first ones of such a model. Every rank calls.
    pub fn new(
        policy: &mut Zero<Decoder>,
        published: Option<&ModelFolder>,
        role: &Role,
        place: &Place,
        weights: &dyn WeightSource,
        kept: Kept,
    ) -> Result<Self> {
        match published {
            Some(model) => Self::published(model, role, place, Decoder::new),
            None => Self::freeze(policy, role, place, weights, kept),
        }
    }

    fn freeze(
        policy: &mut Zero<Decoder>,
        role: &Role,
        place: &Place,
        weights: &dyn WeightSource,
        kept: Kept,
    ) -> Result<Self> {
        let decoder = Arc::new(policy.model().on(place.torch_device()?)?);
        let mut model = hold(decoder, &role.strategy, place, None, weights)?;
        let path = kept.folder.join("reference");
        if kept.is_saved {
            if !path.exists() {
                let problem = "it has kept no model to compare with, since it began without one: it goes on without one, \
                               or `anyroll export` the policy and start a new run from it";
                return Err(Error::Resume { run: kept.folder.to_owned(), problem: problem.to_owned() });
            }
            checkpoint::check_stamp(&path, kept.stamp())?;
            checkpoint::load(&mut model, &path)?;
        } else {
            model.copy_weights_from(policy)?;
            checkpoint::save(&mut model, &path, kept.stamp(), Value::Null)?;
        }
        Ok(Self::held(model, role))
    }
}

impl<M: Model> Reference<M> {
    /// The published model in `folder` on `place`, held as `role` says, of what `lay_out` makes of its shape. Every rank calls.
    pub fn published(
        folder: &ModelFolder,
        role: &Role,
        place: &Place,
        lay_out: impl FnOnce(DecoderConfig, Device) -> anyroll_models::Result<M>,
    ) -> Result<Self> {
        let model = lay_out(folder.decoder_config().clone(), place.torch_device()?)?;
        Ok(Self::held(hold(Arc::new(model), &role.strategy, place, None, folder)?, role))
    }

    fn held(model: Zero<M>, role: &Role) -> Self {
        let micro_batch_size = role.strategy.micro_batch_size;
        Self { model, micro_batch_size, offloaded: offloaded(&role.strategy) }
    }

    /// Takes it off the device, as far as it may leave.
    pub fn offload(&mut self) -> Result<()> {
        self.model.offload_states(&self.offloaded)?;
        Ok(())
    }

    /// What `score` makes of the model, so many sequences at a time; all of it is on the device for as long.
    pub fn score<S>(&mut self, score: impl FnOnce(&mut Zero<M>, usize) -> Result<S>) -> Result<S> {
        self.model.load_states(&self.offloaded)?;
        let scores = score(&mut self.model, self.micro_batch_size)?;
        self.model.offload_states(&self.offloaded)?;
        Ok(scores)
    }
}
