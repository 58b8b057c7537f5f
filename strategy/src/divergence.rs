//! Checks of training as a whole, for failures that no single step reports. In fp16 steps are skipped, and a
//! step that makes a weight infinite has a finite gradient.

use anyroll_models::Model;
use tch::{Kind, Tensor};

use crate::{Error, Result, State, Zero, loss_scale::Counters};

impl<M: Model> Zero<M> {
    /// Checks the outcome of the optimizer's steps so far. Every rank calls; waits for the device.
    ///
    /// # Errors
    /// [`Error::NonFiniteWeights`] if a trained weight is infinite or NaN in the precision that the model
    /// runs in, and [`Error::AllSkipped`] if there were steps and all were skipped.
    pub fn check_divergence(&mut self) -> Result<()> {
        self.needs("check_divergence", &[State::Params, State::Optimizer])?;
        let elements = self.non_finite_weights()?;
        if elements > 0.0 {
            return Err(Error::NonFiniteWeights { elements: elements as u64 });
        }
        match self.counters()? {
            Some(Counters { step: steps, taken: 0, .. }) if steps > 0 => Err(Error::AllSkipped { steps }),
            _ => Ok(()),
        }
    }

    /// Returns the number of trained weights that are infinite or NaN, over all ranks' shards.
    fn non_finite_weights(&mut self) -> Result<f64> {
        let model = self.own.clone();
        let mut found = Tensor::f_zeros([], (Kind::Double, self.torch_device()))?;
        for (index, _) in model.units().iter().enumerate().filter(|(_, unit)| unit.trainable) {
            let kind = self.units[index].dtype.kind();
            let rounded = self.own_weights(index)?.f_to_kind(kind)?;
            let wrong = rounded.f_isfinite()?.f_logical_not()?;
            for range in &self.counted[index] {
                let wrong = wrong.f_narrow(0, range.start as i64, range.len() as i64)?.f_sum(Kind::Double)?;
                found = found.f_add(&wrong.f_to_device(found.device())?)?;
            }
        }
        Ok(self.sum_of_ranks(&found)?.f_double_value(&[])?)
    }
}
