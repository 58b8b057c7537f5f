//! [`Mesh`]: the layout of the ranks, and their groups.

use std::sync::{Arc, Mutex};

use anyroll_backends::{Buffer, CollectiveGroup, DType, HostExchange, ReduceOp, Stream};
use anyroll_models::{self as models, Peers, Room, Sharers, join_columns};
use tch::Tensor;

use crate::{Result, traffic::Traffic};

/// Layout of the ranks. Four divisions, each of neighbours within the one before:
/// - by matrices: ranks `r T` to `(r + 1) T - 1` are a tensor group. Each holds some heads and columns of every layer, and
///   all run their batches together ([`Self::in_tensor_groups`]). The ranks with the same place in their groups have the same
///   parts, so what follows is among these;
/// - by rows: Q of them run their batches together, each a slice of the rows ([`Self::in_sequence_groups`]);
/// - by state: a shard group, over which weights, gradients and moments are sharded. S ranks, with all places, hold a replica
///   of the model. S is all ranks, unless [`Self::in_shard_groups`] says otherwise. It does not depend on Q.
/// - by experts: within a shard group, E of them each have a part of the experts of every layer ([`Self::in_expert_groups`]).
///   The states of experts are sharded over the S / E ranks with the same part, all others over S ranks. It does not depend
///   on Q either: a rank runs its own rows, and those that are sent to its experts.
///
/// A [`CollectiveGroup`] alone is a mesh of one shard group, in which each rank runs its own batches.
#[derive(Clone, Debug)]
pub struct Mesh {
    world: CollectiveGroup,
    /// The ranks that hold one model together; `None` if each holds whole layers.
    pub(crate) tensor: Option<CollectiveGroup>,
    /// The ranks with the same part of the layers.
    alike: CollectiveGroup,
    /// The ranks that share one replica of this part.
    pub(crate) shards: CollectiveGroup,
    /// The ranks with the same shard of all replicas; `None` for one replica.
    pub(crate) replicas: Option<CollectiveGroup>,
    /// The ranks among which experts are spread; `None` if each runs all experts.
    pub(crate) experts: Option<ExpertGroups>,
    /// The ranks that each take a slice of the rows; `None` if there are no others.
    sequence: Option<CollectiveGroup>,
    /// The ranks that share this rank's batches; `None` if there are no others.
    sharers: Option<CollectiveGroup>,
}

/// The ranks that a rank's experts depend on.
#[derive(Clone, Debug)]
pub(crate) struct ExpertGroups {
    /// Ranks that have all experts together, each its own.
    pub(crate) holders: CollectiveGroup,
    /// Ranks of the shard group that have the same experts.
    pub(crate) shards: CollectiveGroup,
}

impl From<CollectiveGroup> for Mesh {
    fn from(world: CollectiveGroup) -> Self {
        Self {
            alike: world.clone(),
            shards: world.clone(),
            world,
            tensor: None,
            replicas: None,
            experts: None,
            sequence: None,
            sharers: None,
        }
    }
}

impl Mesh {
    /// Divides the ranks into tensor groups of `ranks` neighbours, a divisor of their number. Comes before the other
    /// divisions. Every rank calls this. Blocks the host.
    pub fn in_tensor_groups(self, ranks: usize) -> Result<Self> {
        if ranks == 1 {
            return Ok(self);
        }
        let tensor = neighbours(&self.world, "tensor", ranks)?;
        let (group, place) = (self.world.rank() / ranks, tensor.rank());
        let alike = self.world.split("alike", Some(place as u32), group as i32)?;
        let alike = alike.expect("a rank with a color has a group");
        Ok(Self { shards: alike.clone(), alike, sharers: Some(tensor.clone()), tensor: Some(tensor), ..self })
    }

    /// Divides the ranks with the same part into groups of `ranks` neighbours that run their batches together; a divisor of
    /// their number. Every rank calls this. Blocks the host.
    pub fn in_sequence_groups(self, ranks: usize) -> Result<Self> {
        if ranks == 1 {
            return Ok(self);
        }
        let sequence = neighbours(&self.alike, "sequence", ranks)?;
        let sharers = match self.tensor_ranks() {
            1 => sequence.clone(),
            parts => neighbours(&self.world, "sharers", parts * ranks)?,
        };
        Ok(Self { sequence: Some(sequence), sharers: Some(sharers), ..self })
    }

    /// Divides the ranks into groups of `ranks` neighbours that hold a replica of the model, a divisor of their number and a
    /// multiple of a tensor group's. Every rank calls this. Blocks the host.
    ///
    /// Gradients are summed over a shard group in each micro-batch, and over the replicas once in a step. Both sums are in
    /// rank order, if the group's are.
    pub fn in_shard_groups(self, ranks: usize) -> Result<Self> {
        if ranks == self.world.world_size() {
            return Ok(self);
        }
        let ranks = ranks / self.tensor_ranks();
        let shards = neighbours(&self.alike, "shards", ranks)?;
        let (shard, replica) = (shards.rank(), self.alike.rank() / ranks);
        let replicas = self.alike.split("replicas", Some(shard as u32), replica as i32)?;
        Ok(Self { shards, replicas, ..self })
    }

    /// Divides each shard group into groups of `ranks` neighbours among which experts are spread, a divisor of its ranks. Comes
    /// after the other divisions, and not with tensor groups. Every rank calls this. Blocks the host.
    pub fn in_expert_groups(self, ranks: usize) -> Result<Self> {
        if ranks == 1 {
            return Ok(self);
        }
        assert!(self.tensor.is_none(), "a rank has a part of the experts, or of each");
        let holders = neighbours(&self.shards, "experts", ranks)?;
        let (place, group) = (holders.rank(), self.shards.rank() / ranks);
        let shards = self.shards.split("shards of experts", Some(place as u32), group as i32)?;
        let shards = shards.expect("a rank with a color has a group");
        Ok(Self { experts: Some(ExpertGroups { holders, shards }), ..self })
    }

    /// Returns which of as many equal slices of the model's states as there are ranks this rank saves. Unless ranks hold the
    /// model together, it is one of its own shard.
    pub(crate) fn saved_slice(&self) -> usize {
        let (replica, replicas) =
            self.replicas.as_ref().map_or((0, 1), |group| (group.rank(), group.world_size()));
        let place = self.tensor.as_ref().map_or(0, CollectiveGroup::rank);
        (self.shards.rank() * replicas + replica) * self.tensor_ranks() + place
    }

    /// The error that ended one of the groups, if one has.
    pub(crate) fn check(&self) -> Result<()> {
        let others = [&self.tensor, &self.replicas, &self.sequence, &self.sharers].map(Option::as_ref);
        let of_experts = self.experts.iter().flat_map(|experts| [&experts.holders, &experts.shards]);
        let others = others.into_iter().flatten().chain(of_experts);
        let groups = [&self.world, &self.alike, &self.shards].into_iter().chain(others);
        Ok(groups.into_iter().try_for_each(CollectiveGroup::check)?)
    }

    /// Returns the number of ranks that hold one model together.
    pub(crate) fn tensor_ranks(&self) -> usize {
        self.tensor.as_ref().map_or(1, CollectiveGroup::world_size)
    }

    /// Returns the number of ranks among which experts are spread.
    pub(crate) fn expert_ranks(&self) -> usize {
        self.experts.as_ref().map_or(1, |experts| experts.holders.world_size())
    }

    /// Returns the number of ranks with the same part of the layers.
    pub(crate) fn alike_ranks(&self) -> usize {
        self.alike.world_size()
    }

    /// Returns all ranks.
    pub fn world(&self) -> &CollectiveGroup {
        &self.world
    }

    /// Returns the ranks that share this rank's batches, whose tensors `compute` writes and reads.
    pub(crate) fn sharers(&self, compute: &Stream) -> Option<Sharers> {
        let all = peers(self.sharers.as_ref()?, compute);
        Some(Sharers { all, rows: self.sequence.as_ref().map(|group| peers(group, compute)) })
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
    measured_peers(group, compute, &Arc::default())
}

/// Returns [`peers`] that measure the rows that they send to any rank.
pub(crate) fn measured_peers(
    group: &CollectiveGroup,
    compute: &Stream,
    traffic: &Arc<Traffic>,
) -> Arc<dyn Peers> {
    let (group, compute, traffic) = (group.clone(), compute.clone(), traffic.clone());
    Arc::new(Neighbours { group, compute, traffic, shared: Mutex::default() })
}

#[derive(Debug)]
struct Neighbours {
    group: CollectiveGroup,
    compute: Stream,
    /// Rows of [`Peers::all_to_all_rows`].
    traffic: Arc<Traffic>,
    /// Memory that the devices of the ranks share, once it was asked for; `None` in it if they share none.
    shared: Mutex<Option<Option<Arc<HostExchange>>>>,
}

impl Neighbours {
    /// Returns the memory of `tensor` for a collective, or of a dense copy.
    fn sent(&self, tensor: &Tensor) -> models::Result<Buffer> {
        Ok(Buffer::of_tensor(tensor.f_contiguous()?, &self.compute))
    }

    /// Returns a tensor for what a collective receives, like `like`, and its memory. libtorch keeps such memory between uses;
    /// the driver's would let the host wait.
    fn received(&self, size: &[i64], like: &Tensor) -> models::Result<(Tensor, Buffer)> {
        let tensor = Tensor::f_empty(size, (like.kind(), like.device()))?;
        let buffer = Buffer::of_tensor(tensor.shallow_clone(), &self.compute);
        Ok((tensor, buffer))
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
        let (tensor, received) = self.received(&parts.size(), parts)?;
        let work = self.group.all_to_all(&received, &self.sent(parts)?, &self.compute)?;
        work.wait_stream(&self.compute)?;
        Ok(tensor)
    }

    fn all_to_all_rows(&self, rows: Tensor, sent: &[usize], received: &[usize]) -> models::Result<Tensor> {
        let mut size = rows.size();
        let width = size[1..].iter().product::<i64>() as usize;
        size[0] = received.iter().sum::<usize>() as i64;
        let elements = |lens: &[usize]| lens.iter().map(|len| len * width).collect::<Vec<_>>();
        let (sent, received) = (elements(sent), elements(received));
        let own = self.sent(&rows)?;
        let (tensor, all) = self.received(&size, &rows)?;
        drop(rows);
        let to_others = sent.iter().sum::<usize>() - sent[self.rank()];
        self.traffic.measure(to_others * own.dtype().size_bytes(), &self.compute, || {
            let work = self.group.all_to_all_of((&all, &received), (&own, &sent), &self.compute)?;
            Ok(work.wait_stream(&self.compute)?)
        })?;
        Ok(tensor)
    }

    fn all_gather(&self, own: &Tensor) -> models::Result<Tensor> {
        let size = [&[self.count() as i64], own.size().as_slice()].concat();
        let (tensor, all) = self.received(&size, own)?;
        self.group.all_gather(&all, &self.sent(own)?, &self.compute)?.wait_stream(&self.compute)?;
        Ok(tensor)
    }

    fn sum_(&self, x: &mut Tensor) -> models::Result<()> {
        let dense = x.f_contiguous()?;
        let sum = self.sent(&dense)?;
        self.group.all_reduce(&sum, ReduceOp::Sum, &self.compute)?.wait_stream(&self.compute)?;
        if x.is_contiguous() { Ok(()) } else { Ok(x.f_copy_(&dense)?) }
    }

    fn are_recorded(&self) -> bool {
        self.group.is_recordable()
    }

    fn room(&self, elements: i64, like: &Tensor) -> models::Result<Arc<dyn Room>> {
        let dtype = DType::of(like.kind()).expect("ranks send tensors of the types of weights");
        let len_bytes = elements as usize * dtype.size_bytes();
        let mut shared = self.shared.lock().expect("no panic while it is held");
        if shared.as_ref().is_none_or(|shared| shared.as_ref().is_some_and(|it| it.len_bytes() < len_bytes)) {
            // What is too small stays: twice the length bounds the sum of all.
            let exchange = HostExchange::new(&self.group, len_bytes.next_power_of_two())?;
            *shared = Some(exchange.map(Arc::new));
        }
        let group = self.group.clone();
        Ok(match shared.as_ref().expect("made above") {
            Some(exchange) => Arc::new(HostRoom { group, exchange: exchange.clone(), dtype }),
            None => {
                let zeros = |len| Buffer::zeros(&self.compute, len, dtype);
                let parts = zeros(elements as usize * self.count())?;
                Arc::new(GroupRoom { group, parts, sum: zeros(elements as usize)? })
            }
        })
    }
}

/// Exchanges by kernels between the devices of a host.
#[derive(Debug)]
struct HostRoom {
    group: CollectiveGroup,
    exchange: Arc<HostExchange>,
    dtype: DType,
}

impl Room for HostRoom {
    fn own(&self, size: &[i64]) -> models::Result<Tensor> {
        let len = size.iter().product::<i64>() as usize;
        Ok(self.exchange.own(len, self.dtype).tensor(size)?)
    }

    fn sum_into(&self, sum: &mut Tensor, is_added: bool) -> models::Result<()> {
        Ok(self.exchange.sum(sum, is_added)?)
    }

    fn join_into(&self, joined: &mut Tensor, widths: [i64; 2]) -> models::Result<()> {
        Ok(self.exchange.join(joined, widths)?)
    }

    fn watch(&self) -> models::Result<()> {
        watch(&self.group)
    }

    fn check(&self) -> models::Result<()> {
        self.group.check()?;
        if self.exchange.has_failed()? {
            self.group.give_up("recorded steps")?;
        }
        Ok(())
    }
}

/// Exchanges by the group's library.
#[derive(Debug)]
struct GroupRoom {
    group: CollectiveGroup,
    parts: Buffer,
    sum: Buffer,
}

impl GroupRoom {
    /// Returns the parts of all ranks, `[ranks, ...]`.
    fn gathered(&self, size: &[i64]) -> models::Result<Tensor> {
        let (len, ranks) = (size.iter().product::<i64>() as usize, self.group.world_size());
        let all = self.parts.slice(0..ranks * len);
        // While a step is recorded, libtorch has another stream.
        let compute = Stream::torch(self.group.stream().device())?;
        self.group.all_gather_on(&all, &self.own_of(len), &compute)?;
        Ok(all.tensor(&[&[ranks as i64], size].concat())?)
    }

    fn own_of(&self, len: usize) -> Buffer {
        self.parts.slice(self.group.rank() * len..(self.group.rank() + 1) * len)
    }
}

impl Room for GroupRoom {
    fn own(&self, size: &[i64]) -> models::Result<Tensor> {
        Ok(self.own_of(size.iter().product::<i64>() as usize).tensor(size)?)
    }

    fn sum_into(&self, sum: &mut Tensor, is_added: bool) -> models::Result<()> {
        let (parts, kind) = (self.gathered(&sum.size())?, sum.kind());
        let to = match is_added {
            true => self.sum.slice(0..sum.numel()).tensor(&sum.size())?,
            false => sum.shallow_clone(),
        };
        drop(parts.f_sum_intlist_out(&to, [0].as_slice(), false, kind)?);
        if is_added {
            drop(sum.f_add_(&to)?);
        }
        Ok(())
    }

    fn join_into(&self, joined: &mut Tensor, [width, count]: [i64; 2]) -> models::Result<()> {
        join_columns(&self.gathered(&[joined.size()[0], width])?, count, joined)
    }

    fn watch(&self) -> models::Result<()> {
        watch(&self.group)
    }

    fn check(&self) -> models::Result<()> {
        Ok(self.group.check()?)
    }
}

/// Gives what libtorch's stream has now the deadline of an operation.
fn watch(group: &CollectiveGroup) -> models::Result<()> {
    Ok(group.watch("recorded steps", &Stream::torch(group.stream().device())?)?)
}
