//! [`Scaler`]: the per-step numbers that only the device knows, so that no step waits for the host. Both the
//! number of steps taken and the fp16 loss scale depend on whether the gradient overflowed.

use anyroll_models::model::Gradient;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::{AdamW, Fp16Config, Precision, Result, StepStats};

/// The part of a [`Scaler`] that a checkpoint keeps, and the count of all steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Counters {
    /// Steps, including skipped ones.
    pub(crate) step: u64,
    /// Steps that were not skipped.
    pub(crate) taken: u64,
    /// `Some` in fp16.
    loss_scale: Option<ScaleCounters>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct ScaleCounters {
    scale: f64,
    /// Steps since the scale last changed.
    growing: u32,
}

#[derive(Debug)]
pub(crate) struct Scaler {
    /// Steps that were not skipped: fp64, one element.
    taken: Tensor,
    loss_scale: Option<Dynamic>,
}

#[derive(Debug)]
struct Dynamic {
    config: Fp16Config,
    /// fp32, one element.
    scale: Tensor,
    /// Steps since the scale last changed: int32, one element.
    growing: Tensor,
}

impl Scaler {
    /// Returns the state before the first step.
    pub(crate) fn new(precision: Precision, device: Device) -> Result<Self> {
        let loss_scale = match precision {
            Precision::Fp32 | Precision::Bf16 => None,
            Precision::Fp16(config) => Some(Dynamic {
                config,
                scale: Tensor::f_full([], config.initial_scale, (Kind::Float, device))?,
                growing: Tensor::f_zeros([], (Kind::Int, device))?,
            }),
        };
        Ok(Self { taken: Tensor::f_zeros([], (Kind::Double, device))?, loss_scale })
    }

    /// Returns to the state before the first step.
    pub(crate) fn reset(&mut self) -> Result<()> {
        let start = |dynamic: &Dynamic| ScaleCounters { scale: dynamic.config.initial_scale, growing: 0 };
        let loss_scale = self.loss_scale.as_ref().map(start);
        self.restore(Counters { step: 0, taken: 0, loss_scale })
    }

    /// Returns the gradient of the scaled loss.
    pub(crate) fn scaled<G: Gradient>(&self, grad: G) -> Result<G> {
        match &self.loss_scale {
            Some(dynamic) => Ok(grad.scaled(&dynamic.scale)?),
            None => Ok(grad),
        }
    }

    /// Turns the norm of the scaled gradient into the factors that AdamW reads on the device
    /// (`ops::AdamW::factors`) and into the step's statistics. `step` counts from 1. The step counts as taken
    /// unless the norm is not finite.
    pub(crate) fn advance(
        &mut self,
        scaled_norm: &Tensor,
        adamw: &AdamW,
        step: u64,
    ) -> Result<(Tensor, StepStats)> {
        let loss_scale = self.loss_scale.as_ref().map(|dynamic| dynamic.scale.copy());
        let grad_norm = match &loss_scale {
            Some(scale) => scaled_norm.f_div(scale)?,
            None => scaled_norm.shallow_clone(),
        };
        // Like torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
        let max_norm = adamw.max_grad_norm;
        let room = match max_norm.is_finite() {
            true => grad_norm.f_add_scalar(1e-6)?.f_reciprocal()?.f_mul_scalar(max_norm)?,
            false => grad_norm.f_ones_like()?,
        };
        // NaN if the norm is infinite or NaN: AdamW then changes nothing.
        let mut factor = room.f_clamp_max(1.0)?.f_add(&grad_norm.f_mul_scalar(0.0)?)?;
        if let Some(scale) = &loss_scale {
            factor = factor.f_div(scale)?;
        }
        let finite = scaled_norm.f_isfinite()?;
        drop(self.taken.f_add_(&finite)?);
        let factors = adamw.hyper(0.0).factors(&factor, &self.taken)?;
        if let Some(dynamic) = &mut self.loss_scale {
            dynamic.update(&finite)?;
        }
        Ok((factors, StepStats { step, grad_norm, loss_scale }))
    }

    /// Reads the counters; waits for the device. `step` is the count of all steps.
    pub(crate) fn counters(&self, step: u64) -> Result<Counters> {
        let loss_scale = self.loss_scale.as_ref().map(|dynamic| -> Result<_> {
            let growing = dynamic.growing.f_int64_value(&[])? as u32;
            Ok(ScaleCounters { scale: dynamic.scale.f_double_value(&[])?, growing })
        });
        let taken = self.taken.f_double_value(&[])? as u64;
        Ok(Counters { step, taken, loss_scale: loss_scale.transpose()? })
    }

    /// Sets the counters. The loss scale stays unchanged if either side has none.
    pub(crate) fn restore(&mut self, counters: Counters) -> Result<()> {
        drop(self.taken.f_fill_(counters.taken as f64)?);
        if let (Some(dynamic), Some(from)) = (&mut self.loss_scale, counters.loss_scale) {
            drop(dynamic.scale.f_fill_(from.scale)?);
            drop(dynamic.growing.f_fill_(i64::from(from.growing))?);
        }
        Ok(())
    }
}

impl Dynamic {
    /// Updates the scale after a step; `finite` says if its gradient was finite.
    fn update(&mut self, finite: &Tensor) -> Result<()> {
        let overflowed = finite.f_logical_not()?.f_to_kind(Kind::Float)?;
        let interval = i64::from(self.config.growth_interval);
        drop(self.scale.f_internal_amp_update_scale_(&self.growing, &overflowed, 2.0, 0.5, interval)?);
        Ok(())
    }
}
