//! The model that a policy is compared with: its frozen copy from after the warm-up.

use std::{path::Path, sync::Arc};

use anyroll_models::{Decoder, init::WeightSource};
use anyroll_strategy::{State, Zero, checkpoint};
use serde_json::Value;
use tch::Tensor;

use super::{Place, hold, offloaded};
use crate::{Error, Result, config::Role};

/// A frozen copy.
#[derive(Debug)]
pub struct Reference {
    /// Its weights.
    pub model: Zero<Decoder>,
    /// Sequences that a rank scores at a time.
    micro_batch_size: usize,
    /// What of it is on the device only while it scores.
    pub offloaded: Vec<State>,
}

impl Reference {
    /// A copy of `policy` on `place`, held as `role` says, which is kept in the run's `folder`; if it is `kept` there, from
    /// there. `weights` are the first ones of such a model. Every rank calls.
    pub fn freeze(
        policy: &mut Zero<Decoder>,
        role: &Role,
        place: &Place,
        weights: &dyn WeightSource,
        folder: &Path,
        kept: bool,
    ) -> Result<Self> {
        let decoder = Arc::new(policy.model().on(place.torch_device()?)?);
        let mut model = hold(decoder, &role.strategy, place, None, weights)?;
        let path = folder.join("reference");
        if kept {
            if !path.exists() {
                let problem = "it has kept no model to compare with, since it began without one: it goes on without one, \
                               or `anyroll export` the policy and start a new run from it";
                return Err(Error::Resume { run: folder.to_owned(), problem: problem.to_owned() });
            }
            checkpoint::load(&mut model, &path)?;
        } else {
            model.copy_weights_from(policy)?;
            checkpoint::save(&mut model, &path, Value::Null)?;
        }
        let micro_batch_size = role.strategy.micro_batch_size;
        Ok(Self { model, micro_batch_size, offloaded: offloaded(&role.strategy) })
    }

    /// What `score` makes of the model, so many sequences at a time; all of it is on the device for as long.
    pub fn score(
        &mut self,
        score: impl FnOnce(&mut Zero<Decoder>, usize) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.model.load_states(&self.offloaded)?;
        let scores = score(&mut self.model, self.micro_batch_size)?;
        self.model.offload_states(&self.offloaded)?;
        Ok(scores)
    }
}
