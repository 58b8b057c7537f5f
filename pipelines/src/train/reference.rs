//! The reference: a frozen copy of the policy after the warm-up, or a published model.

use std::sync::Arc;

use anyroll_models::{Decoder, DecoderConfig, Model, hf::ModelFolder, init::WeightSource};
use anyroll_strategy::{State, Zero, checkpoint};
use serde_json::Value;
use tch::Device;

use super::{Kept, MicroBatch, Place, hold, offloaded};
use crate::{Error, Result, run::Role};

/// A frozen copy of the policy, or another model, whose output may differ from a policy's.
#[derive(Debug)]
pub struct Reference<M: Model = Decoder> {
    /// Weights of the reference.
    model: Zero<M>,
    /// Limit of what a rank scores at a time.
    micro_batch: MicroBatch,
    /// States that are on the device only during scoring.
    offloaded: Vec<State>,
}

impl Reference {
    /// Creates the reference on `place` under the strategy of `role`: the `published` model, or else a copy of
    /// `policy`. A copy is saved to the folder of `kept`, or loaded if it was saved before. `weights` are the
    /// initial ones of a copy, which its own then replace. Every rank must call this.
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
            checkpoint::save(&mut model, &path, kept.save(), Value::Null)?;
        }
        Ok(Self::held(model, role))
    }
}

impl<M: Model> Reference<M> {
    /// Loads the published model in `folder` on `place` under the strategy of `role`. `lay_out` builds the model from
    /// its shape. Every rank must call this.
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
        let micro_batch = MicroBatch::of(&role.strategy);
        Self { model, micro_batch, offloaded: offloaded(&role.strategy) }
    }

    /// Offloads the states that may be offloaded.
    pub fn offload(&mut self) -> Result<()> {
        self.model.offload_states(&self.offloaded)?;
        Ok(())
    }

    /// Calls `score` with the model and the limit of its micro-batches; all states are on the device during the call.
    pub fn score<S>(&mut self, score: impl FnOnce(&mut Zero<M>, MicroBatch) -> Result<S>) -> Result<S> {
        self.model.load_states(&self.offloaded)?;
        let scores = score(&mut self.model, self.micro_batch)?;
        self.model.offload_states(&self.offloaded)?;
        Ok(scores)
    }
}
