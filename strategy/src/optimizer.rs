//! The optimizer's part of a unit: accumulated gradients, moments, and the step.

use std::ops::Range;

use anyroll_backends::{DType, Stream, ops};
use tch::Tensor;

use crate::{AdamW, Precision, Result, layout::Layout, memory::flat, offload::Movable};

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
    /// Holds the moments and the master.
    pub(crate) memory: Movable,
    pub(crate) exp_avg: Tensor,
    pub(crate) exp_avg_sq: Tensor,
    /// The weights that are stepped, if the model runs with rounded ones.
    pub(crate) master: Option<Tensor>,
    /// Holds the gradient.
    pub(crate) gradient_memory: Movable,
    pub(crate) gradient: Tensor,
    runs: Vec<(Range<usize>, bool)>,
}

impl OptimizerState {
    /// All zero, the master too. `name` is the unit's.
    pub(crate) fn new(
        name: &str,
        layout: &Layout,
        range: Range<usize>,
        precision: Precision,
        compute: &Stream,
    ) -> Result<Self> {
        let (len, runs) = (range.len(), layout.decay_runs(&range));
        let masters = usize::from(precision != Precision::Fp32);
        let zeros = |what: &str, count: usize| {
            let len_bytes = count * len * DType::F32.size_bytes();
            Movable::zeros(format!("{what} of {name}"), compute, len_bytes)
        };
        let memory = zeros("optimizer states", 2 + masters)?;
        let gradient_memory = zeros("gradients", 1)?;
        let part = |index: usize| flat(&memory.buffer(index * len..(index + 1) * len, DType::F32));
        let (exp_avg, exp_avg_sq) = (part(0)?, part(1)?);
        let master = (masters == 1).then(|| part(2)).transpose()?;
        let gradient = flat(&gradient_memory.buffer(0..len, DType::F32))?;
        Ok(Self { range, memory, exp_avg, exp_avg_sq, master, gradient_memory, gradient, runs })
    }

    /// Forgets the moments.
    pub(crate) fn reset(&mut self, compute: &Stream) -> Result<()> {
        self.memory.ready(compute)?;
        drop(self.exp_avg.f_zero_()?);
        drop(self.exp_avg_sq.f_zero_()?);
        Ok(())
    }

    /// One step of AdamW on `weights`, which are this range's, or on the master that they are then rounded from.
    /// `scale` (fp32, one element, on the device) multiplies the gradient; where it is not finite nothing changes.
    /// `step` counts from 1.
    pub(crate) fn step(
        &mut self,
        weights: &Tensor,
        scale: &Tensor,
        adamw: &AdamW,
        learning_rate: f64,
        step: u64,
    ) -> Result<()> {
        let stepped = self.master.as_ref().unwrap_or(weights);
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
                &mut part(stepped)?,
                &mut part(&self.exp_avg)?,
                &mut part(&self.exp_avg_sq)?,
                &part(&self.gradient)?,
                scale,
                &hyper,
            )?;
        }
        if let Some(master) = &self.master {
            weights.shallow_clone().f_copy_(master)?;
        }
        Ok(())
    }
}
