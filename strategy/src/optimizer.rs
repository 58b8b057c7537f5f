//! The optimizer's part of a unit: accumulated gradients, moments, and the step.

use std::ops::Range;

use anyroll_backends::{Buffer, DType, PinnedBuffer, Stream};
use tch::{Device, Kind, Tensor};

use crate::{
    Result, StepsOn, ZeroConfig,
    layout::Layout,
    memory::flat,
    moments::{self, MomentState, RoundedPart, StepHyper},
    offload_arena::OffloadArena,
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

/// Optimizer states of the elements that this rank steps: the whole unit at stage 0, this rank's shard above.
#[derive(Debug)]
pub(crate) struct OptimizerState {
    /// Range of the unit that this rank steps.
    pub(crate) range: Range<usize>,
    pub(crate) storage: StateStorage,
    pub(crate) moments: MomentState,
    /// Master weights, fp32, if the model runs with another copy.
    pub(crate) master: Option<Tensor>,
    /// First fp32 element of the master weights in the states' memory on the device.
    master_at: usize,
    /// Memory of the gradient.
    pub(crate) gradient_memory: OffloadArena,
    pub(crate) gradient: Tensor,
}

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

/// Returns the bytes of the states of `len` elements of a unit: two moments, and the optimizer's own weights.
pub(crate) fn bytes(config: ZeroConfig, layout: &Layout, len: usize) -> usize {
    let master = if config.has_master() { len * DType::F32.size_bytes() } else { 0 };
    moments::bytes(config.moments, layout, len) + master
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
        let (len, has_master) = (range.len(), config.has_master());
        let master_at = moments::bytes(config.moments, layout, len) / DType::F32.size_bytes();
        let zeros =
            |what: &str, bytes: usize| OffloadArena::zeros(format!("{what} of {name}"), compute, bytes);
        let gradient_memory = zeros("gradients", len * DType::F32.size_bytes())?;
        let gradient = flat(&gradient_memory.buffer(0..len, DType::F32))?;
        let (storage, moments, master) = match config.steps_on {
            StepsOn::Device => {
                let memory = zeros("optimizer states", bytes(config, layout, len))?;
                let moments = MomentState::new(config.moments, layout, &range, Some(&memory))?;
                let master = || flat(&memory.buffer(master_at..master_at + len, DType::F32));
                let master = has_master.then(master).transpose()?;
                (StateStorage::Device(memory), moments, master)
            }
            StepsOn::Host => {
                let moments = MomentState::new(config.moments, layout, &range, None)?;
                let master = Tensor::f_zeros([len as i64], (Kind::Float, Device::Cpu))?;
                let staging = PinnedBuffer::new(compute.device(), len * DType::F32.size_bytes())?;
                (StateStorage::Host(staging), moments, Some(master))
            }
        };
        Ok(Self { range, storage, moments, master, master_at, gradient_memory, gradient })
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

    /// Returns the part of the moment with index `moment` at `shard` in the unit. The caller has made it ready.
    pub(crate) fn moment(&self, moment: usize, shard: &Range<usize>) -> Result<Part> {
        let start = shard.start - self.range.start;
        let range = start..start + shard.len();
        Ok(match &self.moments {
            MomentState::Fp32 { moments, .. } => {
                self.part(&moments[moment], moment * self.range.len(), range)?
            }
            MomentState::EightBit(rounded) => Part::EightBit(rounded.part(moment, range)),
        })
    }

    /// Returns the part of the master weights at `shard` in the unit; `None` without any. The caller has made them ready.
    pub(crate) fn master(&self, shard: &Range<usize>) -> Result<Option<Part>> {
        let start = shard.start - self.range.start;
        let part = |master| self.part(master, self.master_at, start..start + shard.len());
        self.master.as_ref().map(part).transpose()
    }

    /// Returns a part of fp32 `values`, which begin at element `at` of the states' memory on the device.
    fn part(&self, values: &Tensor, at: usize, range: Range<usize>) -> Result<Part> {
        Ok(match &self.storage {
            StateStorage::Device(memory) => {
                Part::Device(memory.buffer(at + range.start..at + range.end, DType::F32))
            }
            StateStorage::Host(_) => {
                Part::Host(values.f_narrow(0, range.start as i64, range.len() as i64)?)
            }
        })
    }

    /// Sets the moments to zero.
    pub(crate) fn reset(&mut self, compute: &Stream) -> Result<()> {
        self.storage.ready(compute)?;
        self.moments.reset()
    }

    /// If steps run on the host, starts the copy of the gradient to it.
    pub(crate) fn send_gradient(&mut self, to_host: &Stream) -> Result<()> {
        if let StateStorage::Host(staging) = &mut self.storage {
            staging.copy_from(0, &self.gradient_memory.buffer(0..self.range.len(), DType::F32), to_host)?;
        }
        Ok(())
    }

    /// Runs one AdamW step on `weights`, which cover this range, or on the master weights that are then
    /// rounded to them. `factors` are those of [`anyroll_backends::ops::AdamW::factors`], on the device or host that steps.
    /// Weights stepped on the host are copied on `to_device`.
    pub(crate) fn step(
        &mut self,
        weights: &Buffer,
        factors: &Tensor,
        hyper: &StepHyper,
        (compute, to_device): (&Stream, &Stream),
    ) -> Result<()> {
        match &mut self.storage {
            StateStorage::Device(memory) => {
                memory.ready_to_write(compute)?;
                let weights = flat(weights)?;
                let stepped = self.master.as_ref().unwrap_or(&weights);
                self.moments.step(stepped, &self.gradient, factors, hyper)?;
                if let Some(master) = &self.master {
                    weights.shallow_clone().f_copy_(master)?;
                }
                memory.used(compute)
            }
            StateStorage::Host(staging) => {
                let len = self.range.len();
                let gradient = Tensor::f_from_data_size(staging.bytes()?, &[len as i64], Kind::Float)?;
                let master = self.master.as_ref().expect("the host has master weights");
                self.moments.step(master, &gradient, factors, hyper)?;
                let rounded = master.f_to_kind(flat(weights)?.kind())?;
                rounded.f_copy_data_u8(staging.bytes_mut()?, len)?;
                staging.copy_to(0, weights, to_device)?;
                Ok(compute.wait_stream(to_device)?)
            }
        }
    }
}

/// A part of a unit's states, whose values are fp32.
#[derive(Debug)]
pub(crate) enum Part {
    Device(Buffer),
    /// A row on the host.
    Host(Tensor),
    /// Widened when it is read, so that few are fp32 at a time.
    EightBit(RoundedPart),
}

impl Part {
    /// Returns the values on `device`.
    pub(crate) fn on(&self, device: Device) -> Result<Tensor> {
        match self {
            Self::Device(buffer) => flat(buffer),
            Self::Host(tensor) => Ok(tensor.f_to_device(device)?),
            Self::EightBit(moment) => Ok(moment.values()?.f_to_device(device)?),
        }
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Device(buffer) => buffer.len(),
            Self::Host(tensor) => tensor.numel(),
            Self::EightBit(moment) => moment.len(),
        }
    }
}
