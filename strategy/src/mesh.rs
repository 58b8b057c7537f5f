//! [`Mesh`]: the layout of the ranks, and their groups.

use std::sync::Arc;

use anyroll_backends::{Buffer, CollectiveGroup, DType, ReduceOp, Stream};
use anyroll_models::{self as models, Peers, Room};
use tch::Tensor;

use crate::Result;

/// The ranks as `replicas x sequence`, with the ranks of a sequence next to each other: ranks `r S` to `(r + 1) S - 1` run
/// their batches together, each a slice of the rows. Weights and gradients are sharded over all ranks. A
/// [`CollectiveGroup`] alone is a mesh in which each rank runs its own batches.
#[derive(Clone, Debug)]
pub struct Mesh {
    world: CollectiveGroup,
    /// The ranks that share this rank's batches; `None` if there are no others.
    sequence: Option<CollectiveGroup>,
}

impl From<CollectiveGroup> for Mesh {
    fn from(world: CollectiveGroup) -> Self {
        Self { world, sequence: None }
    }
}

impl Mesh {
    /// Lays out the ranks of `world`, of which `sequence` consecutive ones share their batches; it divides their number.
    /// Every rank calls this. Blocks the host.
    pub fn new(world: CollectiveGroup, sequence: usize) -> Result<Self> {
        if sequence == 1 {
            return Ok(world.into());
        }
        let sequence = neighbours(&world, "sequence", sequence)?;
        Ok(Self { world, sequence: Some(sequence) })
    }

    /// Returns all ranks.
    pub fn world(&self) -> &CollectiveGroup {
        &self.world
    }

    /// Returns the ranks that share this rank's batches, whose tensors `compute` writes and reads.
    pub(crate) fn peers(&self, compute: &Stream) -> Option<Arc<dyn Peers>> {
        self.sequence.as_ref().map(|group| peers(group, compute))
    }
}

/// Returns the group of this rank's `count` neighbours, called `name`: ranks `r C` to `(r + 1) C - 1` of `world`, where
/// C = `count` divides their number. Every rank calls this. Blocks the host.
pub fn neighbours(world: &CollectiveGroup, name: &str, count: usize) -> Result<CollectiveGroup> {
    let (rank, world_size) = (world.rank(), world.world_size());
    assert!(world_size.is_multiple_of(count), "{world_size} ranks in groups of {count}");
    let group = world.split(name, Some((rank / count) as u32), (rank % count) as i32)?;
    Ok(group.expect("a rank with a color has a group"))
}

/// Returns the ranks of `group` as [`Peers`], whose tensors `compute` writes and reads.
pub fn peers(group: &CollectiveGroup, compute: &Stream) -> Arc<dyn Peers> {
    Arc::new(Neighbours { group: group.clone(), compute: compute.clone() })
}

#[derive(Debug)]
struct Neighbours {
    group: CollectiveGroup,
    compute: Stream,
}

impl Neighbours {
    /// Copies `tensor` to memory that collectives read.
    fn buffer(&self, tensor: &Tensor) -> models::Result<Buffer> {
        let buffer = self.memory(tensor, tensor.numel())?;
        buffer.tensor(&tensor.size())?.f_copy_(tensor)?;
        Ok(buffer)
    }

    /// Allocates memory for `len` elements of the type of `tensor`.
    fn memory(&self, tensor: &Tensor, len: usize) -> models::Result<Buffer> {
        let dtype = DType::of(tensor.kind()).expect("ranks send tensors of the types of weights and tokens");
        Ok(Buffer::zeros(&self.compute, len, dtype)?)
    }
}

impl Peers for Neighbours {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn count(&self) -> usize {
        self.group.world_size()
    }

    fn all_to_all(&self, parts: &Tensor) -> models::Result<Tensor> {
        let (sent, received) = (self.buffer(parts)?, self.memory(parts, parts.numel())?);
        self.group.all_to_all(&received, &sent, &self.compute)?.wait_stream(&self.compute)?;
        Ok(received.tensor(&parts.size())?)
    }

    fn all_gather(&self, own: &Tensor) -> models::Result<Tensor> {
        let (sent, all) = (self.buffer(own)?, self.memory(own, own.numel() * self.count())?);
        self.group.all_gather(&all, &sent, &self.compute)?.wait_stream(&self.compute)?;
        Ok(all.tensor(&[&[self.count() as i64], own.size().as_slice()].concat())?)
    }

    fn sum_(&self, x: &mut Tensor) -> models::Result<()> {
        let buffer = self.buffer(x)?;
        self.group.all_reduce(&buffer, ReduceOp::Sum, &self.compute)?.wait_stream(&self.compute)?;
        Ok(x.f_copy_(&buffer.tensor(&x.size())?)?)
    }

    fn are_recorded(&self) -> bool {
        self.group.is_recordable()
    }

    fn room(&self, elements: i64, like: &Tensor) -> models::Result<Arc<dyn Room>> {
        let parts = self.memory(like, elements as usize * self.count())?;
        Ok(Arc::new(Parts { group: self.group.clone(), parts }))
    }

    fn watch(&self) -> models::Result<()> {
        Ok(self.group.watch("recorded steps", &self.compute)?)
    }

    fn check(&self) -> models::Result<()> {
        Ok(self.group.check()?)
    }
}

/// The parts of all ranks of a group.
#[derive(Debug)]
struct Parts {
    group: CollectiveGroup,
    parts: Buffer,
}

impl Room for Parts {
    fn parts(&self, len: i64) -> models::Result<Tensor> {
        let ranks = self.group.world_size();
        Ok(self.parts.slice(0..ranks * len as usize).tensor(&[ranks as i64, len])?)
    }

    fn exchange(&self, len: i64) -> models::Result<()> {
        let (len, rank) = (len as usize, self.group.rank());
        let all = self.parts.slice(0..self.group.world_size() * len);
        // While a step is recorded, libtorch has another stream.
        let compute = Stream::torch(self.group.stream().device())?;
        Ok(self.group.all_gather_on(&all, &all.slice(rank * len..(rank + 1) * len), &compute)?)
    }
}
