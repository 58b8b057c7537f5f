//! The optimizer's part of a unit: accumulated gradients, moments, and the step.

use std::ops::Range;

use anyroll_backends::{Buffer, DType, PinnedBuffer, Stream, ops};
use tch::{Device, Kind, Tensor};

use crate::{
    AdamW, Decays, Result, StepsOn, ZeroConfig, layout::Layout, memory::flat, offload_arena::OffloadArena,
};

/// Statistics of a step, on the device. [`crate::Zero::finish_step`] waits for the step and reads them.
#[derive(Debug)]
pub struct StepStats {
    /// Number of the step, from 1.
    pub(crate) step: u64,
    pub(crate) grad_norm: Tensor,
    /// Loss scale of the step, in fp16.
    pub(crate) loss_scale: Option<Tensor>,
}

/// Outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stepped {
    /// Global norm of the gradient before clipping. `None` if the gradient overflowed fp16: the step was
    /// skipped and the loss scale halved.
    pub grad_norm: Option<f64>,
    /// Loss scale of the step, in fp16.
    pub loss_scale: Option<f64>,
}

/// Optimizer states of the elements that this rank steps, in fp32: the whole unit at stage 0, this rank's
/// shard above.
#[derive(Debug)]
pub(crate) struct OptimizerState {
    /// Range of the unit that this rank steps.
    pub(crate) range: Range<usize>,
    pub(crate) storage: StateStorage,
    pub(crate) exp_avg: Tensor,
    pub(crate) exp_avg_sq: Tensor,
    /// Master weights, if the model runs with another copy.
    pub(crate) master: Option<Tensor>,
    /// Memory of the gradient.
    pub(crate) gradient_memory: OffloadArena,
    pub(crate) gradient: Tensor,
    runs: Vec<(Range<usize>, bool)>,
}

/// Index of the first moment in the states' device memory.
pub(crate) const EXP_AVG: usize = 0;
/// Index of the second moment.
pub(crate) const EXP_AVG_SQ: usize = 1;
/// Index of the master weights.
pub(crate) const MASTER: usize = 2;

/// Placement of the moments and the master weights.
#[derive(Debug)]
pub(crate) enum StateStorage {
    /// On the device, in this memory.
    Device(OffloadArena),
    /// On the host, with a staging buffer for the gradient and then for the new weights.
    Host(PinnedBuffer),
}

impl StateStorage {
    /// Makes moments and master weights ready for `compute`.
    pub(crate) fn ready(&mut self, compute: &Stream) -> Result<()> {
        match self {
            Self::Device(memory) => memory.ready_to_write(compute),
            Self::Host(_) => Ok(()),
        }
    }
}

impl OptimizerState {
    /// Creates states that are all zero, including the master weights. `name` is the unit's.
    pub(crate) fn new(
        name: &str,
        layout: &Layout,
        range: Range<usize>,
        config: ZeroConfig,
        compute: &Stream,
    ) -> Result<Self> {
        let (len, runs) = (range.len(), layout.decay_runs(&range));
        let zeros = |what: &str, count: usize| {
            let len_bytes = count * len * DType::F32.size_bytes();
            OffloadArena::zeros(format!("{what} of {name}"), compute, len_bytes)
        };
        let gradient_memory = zeros("gradients", 1)?;
        let gradient = flat(&gradient_memory.buffer(0..len, DType::F32))?;
        let (storage, [exp_avg, exp_avg_sq], master) = match config.steps_on {
            StepsOn::Device => {
                let values = config.optimizer_values();
                let memory = zeros("optimizer states", values)?;
                let part = |index: usize| flat(&memory.buffer(index * len..(index + 1) * len, DType::F32));
                let moments = [part(EXP_AVG)?, part(EXP_AVG_SQ)?];
                let master = (values > MASTER).then(|| part(MASTER)).transpose()?;
                (StateStorage::Device(memory), moments, master)
            }
            StepsOn::Host => {
                let zeros = || Tensor::f_zeros([len as i64], (Kind::Float, Device::Cpu));
                let staging = PinnedBuffer::new(compute.device(), len * DType::F32.size_bytes())?;
                (StateStorage::Host(staging), [zeros()?, zeros()?], Some(zeros()?))
            }
        };
        Ok(Self { range, storage, exp_avg, exp_avg_sq, master, gradient_memory, gradient, runs })
    }

    /// Returns the part of the accumulated gradient at `shard` in the unit.
    pub(crate) fn own_gradient(&self, shard: Range<usize>) -> Result<Tensor> {
        let start = shard.start - self.range.start;
        Ok(self.gradient.f_narrow(0, start as i64, shard.len() as i64)?)
    }

    /// Returns the memory of [`Self::own_gradient`].
    pub(crate) fn own_gradient_buffer(&self, shard: Range<usize>) -> Buffer {
        let start = shard.start - self.range.start;
        self.gradient_memory.buffer(start..start + shard.len(), DType::F32)
    }

    /// Returns the part of the state with index `which` at `shard` in the unit. The caller has made it ready.
    pub(crate) fn part(&self, which: usize, shard: &Range<usize>) -> Result<Part> {
        let start = shard.start - self.range.start;
        if let StateStorage::Device(memory) = &self.storage {
            let start = which * self.range.len() + start;
            return Ok(Part::Device(memory.buffer(start..start + shard.len(), DType::F32)));
        }
        let states = [Some(&self.exp_avg), Some(&self.exp_avg_sq), self.master.as_ref()];
        let tensor = states[which].expect("the host has master weights");
        Ok(Part::Host(tensor.f_narrow(0, start as i64, shard.len() as i64)?))
    }

    /// Sets the moments to zero.
    pub(crate) fn reset(&mut self, compute: &Stream) -> Result<()> {
        self.storage.ready(compute)?;
        drop(self.exp_avg.f_zero_()?);
        drop(self.exp_avg_sq.f_zero_()?);
        Ok(())
    }

    /// If steps run on the host, starts the copy of the gradient to it.
    pub(crate) fn send_gradient(&mut self, to_host: &Stream) -> Result<()> {
        if let StateStorage::Host(staging) = &mut self.storage {
            staging.copy_from(0, &self.gradient_memory.buffer(0..self.range.len(), DType::F32), to_host)?;
        }
        Ok(())
    }

    /// Runs one AdamW step on `weights`, which cover this range, or on the master weights that are then
    /// rounded to them. `factors` are those of [`ops::AdamW::factors`], on the device or host that steps.
    /// Weights stepped on the host are copied on `to_device`.
    pub(crate) fn step(
        &mut self,
        weights: &Buffer,
        factors: &Tensor,
        hyper: &StepHyper,
        (compute, to_device): (&Stream, &Stream),
    ) -> Result<()> {
        let moments = [&self.exp_avg, &self.exp_avg_sq];
        match &mut self.storage {
            StateStorage::Device(memory) => {
                memory.ready_to_write(compute)?;
                let weights = flat(weights)?;
                let stepped = self.master.as_ref().unwrap_or(&weights);
                step_runs(&self.runs, stepped, moments, &self.gradient, factors, hyper)?;
                if let Some(master) = &self.master {
                    weights.shallow_clone().f_copy_(master)?;
                }
                memory.used(compute)
            }
            StateStorage::Host(staging) => {
                let len = self.range.len();
                let gradient = Tensor::f_from_data_size(staging.bytes()?, &[len as i64], Kind::Float)?;
                let master = self.master.as_ref().expect("the host has master weights");
                step_runs(&self.runs, master, moments, &gradient, factors, hyper)?;
                let rounded = master.f_to_kind(flat(weights)?.kind())?;
                rounded.f_copy_data_u8(staging.bytes_mut()?, len)?;
                staging.copy_to(0, weights, to_device)?;
                Ok(compute.wait_stream(to_device)?)
            }
        }
    }
}

/// A part of a unit's states, fp32.
#[derive(Debug)]
pub(crate) enum Part {
    Device(Buffer),
    /// A row on the host.
    Host(Tensor),
}

impl Part {
    /// Returns the values on `device`.
    pub(crate) fn on(&self, device: Device) -> Result<Tensor> {
        match self {
            Self::Device(buffer) => flat(buffer),
            Self::Host(tensor) => Ok(tensor.f_to_device(device)?),
        }
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Device(buffer) => buffer.len(),
            Self::Host(tensor) => tensor.numel(),
        }
    }
}

/// The numbers of a step that are the same for every unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepHyper {
    pub(crate) adamw: AdamW,
    pub(crate) learning_rate: f64,
}

/// Steps `weights`, one run of equal weight decay at a time.
fn step_runs(
    runs: &[(Range<usize>, bool)],
    weights: &Tensor,
    [exp_avg, exp_avg_sq]: [&Tensor; 2],
    gradient: &Tensor,
    factors: &Tensor,
    StepHyper { adamw, learning_rate }: &StepHyper,
) -> Result<()> {
    for (run, decay) in runs {
        let part = |tensor: &Tensor| tensor.f_narrow(0, run.start as i64, run.len() as i64);
        let decays = *decay || adamw.decays == Decays::All;
        let weight_decay = if decays { adamw.weight_decay } else { 0.0 };
        let hyper = ops::AdamW { weight_decay, ..adamw.hyper(*learning_rate) };
        let (mut weights, gradient) = (part(weights)?, part(gradient)?);
        ops::adamw_(&mut weights, &mut part(exp_avg)?, &mut part(exp_avg_sq)?, &gradient, factors, &hyper)?;
    }
    Ok(())
}
