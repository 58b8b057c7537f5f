//! The optimizer's part of a unit: accumulated gradients, moments, and the step.

use std::ops::Range;

use anyroll_backends::{Buffer, DType, Stream, ops};
use tch::Tensor;

use crate::{AdamW, Result, layout::Layout, memory::flat};

/// What a step did, read when it is needed: reading waits for the device.
#[derive(Debug)]
pub struct StepStats {
    pub(crate) grad_norm: Tensor,
}

impl StepStats {
    /// The global norm of the gradient before clipping.
    pub fn grad_norm(&self) -> Result<f64> {
        Ok(self.grad_norm.f_double_value(&[])?)
    }
}

/// The states of the elements that this rank steps: all of a unit at stage 0, its shard above. fp32.
#[derive(Debug)]
pub(crate) struct OptimizerState {
    /// Which part of the unit.
    pub(crate) range: Range<usize>,
    pub(crate) gradient: Tensor,
    pub(crate) exp_avg: Tensor,
    pub(crate) exp_avg_sq: Tensor,
    runs: Vec<(Range<usize>, bool)>,
}

impl OptimizerState {
    pub(crate) fn new(layout: &Layout, range: Range<usize>, stream: &Stream) -> Result<Self> {
        let zeros = || flat(&Buffer::zeros(stream, range.len(), DType::F32)?);
        let (gradient, exp_avg, exp_avg_sq) = (zeros()?, zeros()?, zeros()?);
        let runs = layout.decay_runs(&range);
        Ok(Self { range, gradient, exp_avg, exp_avg_sq, runs })
    }

    /// One step of AdamW on `weights`, which are this range's. `scale` (fp32, one element, on the device)
    /// multiplies the gradient; where it is not finite nothing changes. `step` counts from 1.
    pub(crate) fn step(
        &mut self,
        weights: &Tensor,
        scale: &Tensor,
        adamw: &AdamW,
        learning_rate: f64,
        step: u64,
    ) -> Result<()> {
        for (run, decay) in &self.runs {
            let part = |tensor: &Tensor| tensor.f_narrow(0, run.start as i64, run.len() as i64);
            let hyper = ops::AdamW {
                learning_rate,
                betas: adamw.betas,
                eps: adamw.eps,
                weight_decay: if *decay { adamw.weight_decay } else { 0.0 },
                step,
            };
            ops::adamw_(
                &mut part(weights)?,
                &mut part(&self.exp_avg)?,
                &mut part(&self.exp_avg_sq)?,
                &part(&self.gradient)?,
                scale,
                &hyper,
            )?;
        }
        Ok(())
    }
}
