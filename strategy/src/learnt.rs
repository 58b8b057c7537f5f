//! Whether training has led to a model, where each single step has no reason to complain: in fp16 steps are skipped, and
//! the step that makes a weight infinite has a gradient that is not.

use anyroll_models::Model;
use tch::{Kind, Tensor};

use crate::{Error, Result, State, Zero, loss_scale::Counters};

impl<M: Model> Zero<M> {
    /// Checks what the optimizer's steps so far have led to. Every rank calls; waits for the device.
    ///
    /// # Errors
    /// [`Error::NonFiniteWeights`] if a trained weight is no number in the precision that the model runs in, and
    /// [`Error::AllSkipped`] if there were steps and each of them was skipped.
    pub fn check_learnt(&mut self) -> Result<()> {
        self.needs("check_learnt", &[State::Params, State::Optimizer])?;
        let elements = self.non_finite_weights()?;
        if elements > 0.0 {
            return Err(Error::NonFiniteWeights { elements: elements as u64 });
        }
        match self.counters()? {
            Some(Counters { step: steps, taken: 0, .. }) if steps > 0 => Err(Error::AllSkipped { steps }),
            _ => Ok(()),
        }
    }

    /// How many trained weights of all ranks' shards are infinite or NaN.
    fn non_finite_weights(&mut self) -> Result<f64> {
        let model = self.model.clone();
        let mut found = Tensor::f_zeros([], (Kind::Double, self.torch_device()))?;
        for (index, _) in model.units().iter().enumerate().filter(|(_, unit)| unit.trainable) {
            let kind = self.units[index].dtype.kind();
            let rounded = self.own_weights(index)?.f_to_kind(kind)?;
            let wrong = rounded.f_isfinite()?.f_logical_not()?.f_sum(Kind::Double)?;
            found = found.f_add(&wrong.f_to_device(found.device())?)?;
        }
        Ok(self.sum_of_ranks(&found)?.f_double_value(&[])?)
    }
}
