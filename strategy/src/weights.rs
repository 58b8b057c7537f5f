//! Weights of one unit: the part that this rank keeps, and the whole unit while it is on the device.

use std::ops::Range;

use anyroll_backends::{Buffer, CollectiveGroup, DType, Event, PinnedBuffer, Stream, Work};
use anyroll_models::Unit;
use tch::Tensor;

use crate::{
    FrozenWeights, Mesh, ParamsOn, Result, ZeroConfig,
    layout::{Layout, aligned, four_bit_bytes},
    memory::param_views,
    offload_arena::OffloadArena,
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
    /// Set for a unit that is kept in 4 bits.
    pub(crate) four_bits: Option<FourBits>,
}

/// Parameters of a unit in 4 bits that are too small for it, norms and biases: their indices and values, whole on every rank.
pub(crate) type FourBits = Vec<(usize, Tensor)>;

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
    /// The same in 4 bits, until it has been widened to `buffer`.
    pub(crate) packed: Option<Buffer>,
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
    /// Creates weights of this rank's part of a unit that are all zero. The ranks of `mesh` hold them together. `matrices` may
    /// be kept in 4 bits.
    pub(crate) fn new(
        (unit, is_of_experts): (&Unit, bool),
        matrices: &[usize],
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
        let (dtype, kept) = (config.precision.dtype(), layout.resident(config.stage, 0).len());
        let exact = is_in_four_bits(unit, config, matrices).then(|| ExactParams::new(unit, matrices));
        let (len, stored) = if exact.is_some() { (four_bit_bytes(kept), DType::U8) } else { (kept, dtype) };
        let len_bytes = len * stored.size_bytes();
        if config.params_on == ParamsOn::Host {
            // A unit without parameters has no bytes, but pinned memory cannot be empty.
            let storage = WeightsStorage::Host(PinnedBuffer::new(compute.device(), len_bytes.max(1))?);
            let zeros =
                |exact: ExactParams| exact.views(unit, &Buffer::zeros(compute, exact.len.max(1), dtype)?);
            let four_bits = exact.map(zeros).transpose()?;
            return Ok(Self { layout, group, holders, dtype, storage, whole: None, four_bits });
        }
        let exact_bytes = exact.as_ref().map_or(0, |exact| exact.len * dtype.size_bytes());
        let name = format!("weights of {}", unit.name);
        let memory = OffloadArena::zeros(name, compute, len_bytes + exact_bytes)?;
        let resident = memory.buffer(0..len, stored);
        let four_bits = exact.map(|exact| {
            let start = len_bytes / dtype.size_bytes();
            exact.views(unit, &memory.buffer(start..start + exact.len, dtype))
        });
        let whole = if config.gathers() || four_bits.is_some() {
            None
        } else {
            let views = param_views(unit, &layout, &resident)?;
            Some(Whole { buffer: resident.clone(), views, packed: None, arriving: None })
        };
        let (storage, four_bits) = (WeightsStorage::Device { memory, resident }, four_bits.transpose()?);
        Ok(Self { layout, group, holders, dtype, storage, whole, four_bits })
    }

    /// Returns this rank's shard.
    pub(crate) fn shard(&self) -> Range<usize> {
        self.layout.shard(self.group.rank())
    }

    /// Returns true if the whole unit is made before use and freed after it.
    pub(crate) fn is_made(&self, config: ZeroConfig) -> bool {
        config.gathers() || self.four_bits.is_some()
    }

    /// Returns where the elements `range` of the unit are stored: in elements, or bytes of those in 4 bits.
    pub(crate) fn stored(&self, range: Range<usize>) -> Range<usize> {
        match self.four_bits {
            Some(_) => four_bit_bytes(range.start)..four_bit_bytes(range.end),
            None => range,
        }
    }
}

/// Returns true if a unit, of which `matrices` may be kept in 4 bits, is.
pub(crate) fn is_in_four_bits(unit: &Unit, config: ZeroConfig, matrices: &[usize]) -> bool {
    config.frozen == FrozenWeights::Nf4 && !unit.trainable && !matrices.is_empty()
}

/// Layout of a unit's parameters that are not in 4 bits, whole on every rank.
pub(crate) struct ExactParams {
    /// Index of each in the unit, and its elements.
    params: Vec<(usize, Range<usize>)>,
    /// Length in elements.
    pub(crate) len: usize,
}

impl ExactParams {
    /// Lays out the parameters that are not `matrices`.
    pub(crate) fn new(unit: &Unit, matrices: &[usize]) -> Self {
        let mut len = 0;
        let others = unit.params.iter().enumerate().filter(|(param, _)| !matrices.contains(param));
        let params = others.map(|(param, spec)| {
            let start = len;
            len = aligned(start + spec.elements());
            (param, start..start + spec.elements())
        });
        Self { params: params.collect(), len }
    }

    /// Returns views of them in `memory`.
    fn views(&self, unit: &Unit, memory: &Buffer) -> Result<FourBits> {
        let view = |(param, range): &(usize, Range<usize>)| {
            Ok((*param, memory.slice(range.clone()).tensor(&unit.params[*param].shape)?))
        };
        self.params.iter().map(view).collect()
    }
}
