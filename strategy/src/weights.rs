//! Weights of one unit: the part that this rank keeps, and the whole unit while it is on the device.

use std::ops::Range;

use anyroll_backends::{Buffer, CollectiveGroup, DType, Event, PinnedBuffer, Stream, Work};
use anyroll_models::Unit;
use tch::Tensor;

use crate::{
    Mesh, ParamsOn, Result, ZeroConfig, layout::Layout, memory::param_views, offload_arena::OffloadArena,
};

/// Every whole weight of a model: one list of tensors per unit.
pub type Weights = Vec<Vec<Tensor>>;

/// Clones the handles: both lists share the same tensors.
pub fn shared(weights: &Weights) -> Weights {
    weights.iter().map(|unit| unit.iter().map(Tensor::shallow_clone).collect()).collect()
}

/// Weights of one unit.
#[derive(Debug)]
pub(crate) struct UnitState {
    pub(crate) layout: Layout,
    /// The ranks over which it is sharded.
    pub(crate) group: CollectiveGroup,
    /// The ranks that each have a part of the parameters; `None` if this rank's are whole.
    pub(crate) holders: Option<CollectiveGroup>,
    pub(crate) dtype: DType,
    pub(crate) storage: WeightsStorage,
    /// The whole unit, while it is on the device.
    pub(crate) whole: Option<Whole>,
}

/// Placement of the part of a unit that this rank keeps: all of it below stage 3, its shard at stage 3.
#[derive(Debug)]
pub(crate) enum WeightsStorage {
    Device {
        /// Memory of `resident`.
        memory: OffloadArena,
        resident: Buffer,
    },
    Host(PinnedBuffer),
}

impl WeightsStorage {
    pub(crate) fn arena(&mut self) -> Option<&mut OffloadArena> {
        match self {
            Self::Device { memory, .. } => Some(memory),
            Self::Host(_) => None,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Whole {
    pub(crate) buffer: Buffer,
    pub(crate) views: Vec<Tensor>,
    /// The gather or copy that fills it, until it has been waited for.
    pub(crate) arriving: Option<Arriving>,
}

/// Weights in flight.
#[derive(Debug)]
pub(crate) enum Arriving {
    /// From the other ranks.
    Gather(Work),
    /// From the host, until the copy is done.
    Copy(Event),
}

impl Arriving {
    /// Makes `compute` wait for them.
    pub(crate) fn wait(self, compute: &Stream) -> Result<()> {
        match self {
            Self::Gather(work) => Ok(work.wait_stream(compute)?),
            Self::Copy(copied) => Ok(compute.wait(&copied)?),
        }
    }
}

impl UnitState {
    /// Creates weights of this rank's part of a unit that are all zero. The ranks of `mesh` hold them together.
    pub(crate) fn new(
        (unit, is_of_experts): (&Unit, bool),
        mesh: &Mesh,
        config: ZeroConfig,
        compute: &Stream,
    ) -> Result<Self> {
        let (group, holders) = match mesh.experts.as_ref().filter(|_| is_of_experts) {
            Some(of) => (of.shards.clone(), Some(of.holders.clone())),
            None => (mesh.shards.clone(), mesh.tensor.clone()),
        };
        let alike = mesh.alike_ranks() / if is_of_experts { mesh.expert_ranks() } else { 1 };
        let layout = Layout::new(unit, alike).in_shards(group.world_size());
        let (len, dtype) = (layout.resident(config.stage, 0).len(), config.precision.dtype());
        let len_bytes = len * dtype.size_bytes();
        if config.params_on == ParamsOn::Host {
            // A unit without parameters has no bytes, but pinned memory cannot be empty.
            let storage = WeightsStorage::Host(PinnedBuffer::new(compute.device(), len_bytes.max(1))?);
            return Ok(Self { layout, group, holders, dtype, storage, whole: None });
        }
        let memory = OffloadArena::zeros(format!("weights of {}", unit.name), compute, len_bytes)?;
        let resident = memory.buffer(0..len, dtype);
        let whole = if config.gathers() {
            None
        } else {
            let views = param_views(unit, &layout, &resident)?;
            Some(Whole { buffer: resident.clone(), views, arriving: None })
        };
        let storage = WeightsStorage::Device { memory, resident };
        Ok(Self { layout, group, holders, dtype, storage, whole })
    }

    /// Returns this rank's shard.
    pub(crate) fn shard(&self) -> Range<usize> {
        self.layout.shard(self.group.rank())
    }
}
