//! [`Collective`] over TCP: for the CPU, and for devices that have no library of their own.
//!
//! Operations run on the stream's host thread. Sockets move bytes straight between the buffers of two ranks, or between
//! copies of them in pinned memory where the host does not see a device's own. Sums are in rank order, and in fp32 for
//! floats, so that every rank gets the same bits at every world size and for every element type.
//!
//! libtorch's Gloo could move the bytes too. With more ranks than cores it spends half of their time on a thread that asks
//! for a lock whose holder waits for that very core.

use std::{
    iter,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tch::{Kind, Tensor};

use super::{
    address::Offered,
    host_copies::{HostCopies, Operand},
    links::{Broken, Links, Transfer},
    notice::Notice,
    rendezvous::Rendezvous,
};
use crate::{Buffer, Collective, Error, P2p, ReduceOp, Result, Store, Stream};

/// Transfers give up this much later than the deadline of the group above, which then names the operation first.
const GRACE: Duration = Duration::from_secs(1);

/// Connects the ranks that share `store` through the host's memory: for a backend without a library of collectives, whose
/// devices have pinned memory. Blocks until all are there or the store's time-out has passed.
///
/// # Errors
/// [`Error::Rendezvous`] when ranks do not meet.
pub fn connect_through_host(store: Store) -> Result<Arc<dyn Collective>> {
    Ok(Arc::new(Sockets::connect(store)?))
}

/// See the module's description.
#[derive(Debug)]
struct Sockets {
    shared: Arc<Shared>,
    store: Store,
    splits: AtomicU64,
    copies: HostCopies,
}

/// State that operations in flight share.
#[derive(Debug)]
struct Shared {
    links: Links,
    rank: usize,
    world_size: usize,
    timeout: Duration,
    aborted: AtomicBool,
    failure: Mutex<Option<Error>>,
    /// Name of each rank's host, unless all are on one.
    hosts: OnceLock<Vec<String>>,
}

impl Sockets {
    fn connect(store: Store) -> Result<Self> {
        let offered = Offered::to_ranks_of(&store)?;
        let rendezvous = store.rendezvous();
        let (rank, world_size) = (rendezvous.rank, rendezvous.world_size);
        let words = offered.to_string();
        let failed =
            move |message: String| Error::Unconnected { rank, world_size, offered: words.clone(), message };
        let (place, told) = (store.again()?, failed.clone());
        let connect = move || Shared::connect(&place, &offered).map_err(told);
        let ended = |heard: Option<&str>| {
            let late = || format!("not all came within {:?}", rendezvous.timeout);
            failed(heard.map_or_else(late, str::to_owned))
        };
        let (deadline, notice) = (rendezvous.timeout + GRACE, Notice::among(&store)?);
        let shared = rendezvous.in_time(deadline, notice.as_ref(), connect, ended);
        let shared = Arc::new(Notice::telling(notice.as_ref(), shared)?);
        Ok(Self { shared, store, splits: AtomicU64::new(0), copies: HostCopies::default() })
    }

    /// Enqueues `operation` on the operands as flat tensors of the host, unless there is nothing to move.
    fn enqueue<F>(
        &self,
        call: &'static str,
        operands: &[Operand<'_>],
        stream: &Stream,
        operation: F,
    ) -> Result<()>
    where
        F: FnOnce(&Shared, &[Tensor]) -> Result<()> + Send + 'static,
    {
        self.check()?;
        if !operands.is_empty() && operands.iter().all(|operand| operand.buffer().is_empty()) {
            return Ok(());
        }
        let bring = |operand: &Operand<'_>| self.copies.bring(*operand, stream);
        let copies = operands.iter().map(bring).collect::<Result<Vec<_>>>()?;
        let tensors: Vec<Tensor> = copies.iter().map(|copy| copy.tensor.shallow_clone()).collect();
        let shared = self.shared.clone();
        stream.enqueue_host_fn(Box::new(move || {
            // After a failure the other ranks are in no known state: a later operation would only wait.
            if shared.state(call).is_ok()
                && let Err(error) = operation(&shared, &tensors)
            {
                shared.fail(error);
            }
            Ok(())
        }))?;
        copies.into_iter().try_for_each(|copy| self.copies.give_back(copy, stream))
    }
}

impl Collective for Sockets {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn world_size(&self) -> usize {
        self.shared.world_size
    }

    fn sums_in_rank_order(&self) -> bool {
        true
    }

    fn broadcast(&self, buffer: &Buffer, root: usize, stream: &Stream) -> Result<()> {
        let operands = [Operand::Update(&buffer.as_bytes())];
        self.enqueue("broadcast", &operands, stream, move |shared, tensors| shared.spread(&tensors[0], root))
    }

    fn all_reduce(&self, buffer: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()> {
        op.check(buffer.dtype())?;
        self.enqueue("all_reduce", &[Operand::Update(buffer)], stream, move |shared, tensors| {
            let whole = &tensors[0];
            // Each rank reduces one slice of all, and then everybody gets every slice. The last may be shorter.
            let slices = slices(whole, whole.numel().div_ceil(shared.world_size), shared.world_size)?;
            let reduced = shared.reduce("all_reduce", &slices, op)?;
            slices[shared.rank].shallow_clone().f_copy_(&reduced)?;
            shared.gather("all_reduce", &slices)
        })
    }

    fn all_gather(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()> {
        let operands = [Operand::Write(output), Operand::Read(input)];
        self.enqueue("all_gather", &operands, stream, move |shared, tensors| {
            let (output, input) = (&tensors[0], &tensors[1]);
            let slices = slices(output, input.numel(), shared.world_size)?;
            copy_unless_same(&slices[shared.rank], input)?;
            shared.gather("all_gather", &slices)
        })
    }

    fn reduce_scatter(&self, output: &Buffer, input: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()> {
        op.check(input.dtype())?;
        let operands = [Operand::Write(output), Operand::Read(input)];
        self.enqueue("reduce_scatter", &operands, stream, move |shared, tensors| {
            let (output, input) = (&tensors[0], &tensors[1]);
            let slices = slices(input, output.numel(), shared.world_size)?;
            let reduced = shared.reduce("reduce_scatter", &slices, op)?;
            output.shallow_clone().f_copy_(&reduced)?;
            Ok(())
        })
    }

    fn all_to_all(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()> {
        let operands = [Operand::Write(output), Operand::Read(input)];
        self.enqueue("all_to_all", &operands, stream, move |shared, tensors| {
            let (output, input) = (&tensors[0], &tensors[1]);
            let len = input.numel() / shared.world_size;
            let (to, from) =
                (slices(output, len, shared.world_size)?, slices(input, len, shared.world_size)?);
            copy_unless_same(&to[shared.rank], &from[shared.rank])?;
            let sends = shared.peers().map(|peer| Transfer::send(&from[peer], peer));
            let receives = shared.peers().map(|peer| Transfer::receive(&to[peer], peer));
            shared.exchange("all_to_all", &receives.chain(sends).collect::<Vec<_>>())
        })
    }

    fn batch(&self, transfers: &[P2p], stream: &Stream) -> Result<()> {
        if transfers.is_empty() {
            return self.check();
        }
        let operands: Vec<_> = transfers
            .iter()
            .map(|transfer| match transfer {
                P2p::Send { buffer, .. } => Operand::Read(buffer),
                P2p::Recv { buffer, .. } => Operand::Write(buffer),
            })
            .collect();
        let peers: Vec<_> = transfers
            .iter()
            .map(|transfer| match transfer {
                P2p::Send { to, .. } => (*to, true),
                P2p::Recv { from, .. } => (*from, false),
            })
            .collect();
        self.enqueue("batch", &operands, stream, move |shared, tensors| {
            let ready = peers.into_iter().zip(tensors).map(|((peer, is_send), tensor)| match is_send {
                true => Transfer::send(tensor, peer),
                false => Transfer::receive(tensor, peer),
            });
            shared.exchange("batch", &ready.collect::<Vec<_>>())
        })
    }

    fn barrier(&self, stream: &Stream) -> Result<()> {
        self.enqueue("barrier", &[], stream, |shared, _| shared.meet())
    }

    fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Arc<dyn Collective>>> {
        self.check()?;
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        match self.store.split(number, color, key)? {
            Some(members) => Ok(Some(Arc::new(Self::connect(members.store)?))),
            None => Ok(None),
        }
    }

    fn name_hosts(&self, names: &[String]) {
        if names.windows(2).any(|pair| pair[0] != pair[1]) {
            let _ = self.shared.hosts.set(names.to_owned()); // the same each time
        }
    }

    fn waits_for(&self) -> Option<String> {
        self.shared.links.awaited().map(|peer| self.shared.words_for(peer))
    }

    fn check(&self) -> Result<()> {
        self.shared.state("check")
    }

    fn abort(&self, _why: &str) {
        self.shared.aborted.store(true, Ordering::Release);
        self.shared.links.close();
    }
}

impl Shared {
    /// Connects this rank of `store` to the others.
    ///
    /// # Errors
    /// The failure, in words.
    fn connect(store: &Store, offered: &Offered) -> Result<Self, String> {
        let Rendezvous { rank, world_size, timeout, .. } = *store.rendezvous();
        let timeout = timeout + GRACE;
        let links = Links::connect(store, offered.address()?, timeout)?;
        let aborted = AtomicBool::new(false);
        Ok(Shared {
            links,
            rank,
            world_size,
            timeout,
            aborted,
            failure: Mutex::default(),
            hosts: OnceLock::new(),
        })
    }

    fn state(&self, call: &str) -> Result<()> {
        if let Some(error) = &*self.failure.lock().unwrap() {
            return Err(error.clone());
        }
        if self.aborted.load(Ordering::Acquire) {
            return Err(Error::Aborted { call: call.into(), rank: self.rank });
        }
        Ok(())
    }

    /// Ends the communicator for a reason, unless it was aborted: then that is the reason.
    fn fail(&self, error: Error) {
        if !self.aborted.load(Ordering::Acquire) {
            self.failure.lock().unwrap().get_or_insert(error);
            self.links.close();
        }
    }

    /// The other ranks, each starting with its successor, so that not all send to one at once.
    fn peers(&self) -> impl Iterator<Item = usize> {
        let (rank, world_size) = (self.rank, self.world_size);
        (1..world_size).map(move |step| (rank + step) % world_size)
    }

    /// Makes all transfers at once.
    fn exchange(&self, call: &'static str, transfers: &[Transfer]) -> Result<()> {
        self.links.exchange(transfers, self.timeout).map_err(|Broken { peer, message }| Error::Collective {
            call: call.into(),
            rank: self.rank,
            world_size: self.world_size,
            message: format!("with {}: {message}", self.words_for(peer)),
        })
    }

    /// Gives every rank the slice of every other; each brings its own.
    fn gather(&self, call: &'static str, slices: &[Tensor]) -> Result<()> {
        let receives = self.peers().map(|peer| Transfer::receive(&slices[peer], peer));
        let sends = self.peers().map(|peer| Transfer::send(&slices[self.rank], peer));
        self.exchange(call, &receives.chain(sends).collect::<Vec<_>>())
    }

    /// Hands the root's `tensor` down a binomial tree.
    fn spread(&self, tensor: &Tensor, root: usize) -> Result<()> {
        const CALL: &str = "broadcast";
        let (rank, world_size) = (self.rank, self.world_size);
        let rank_at = |place: usize| (place + root) % world_size;
        // The root has place 0. A parent's place is without its child's lowest bit, so children add a bit below one's own.
        let place = (rank + world_size - root) % world_size;
        let lowest_bit =
            if place == 0 { world_size.next_power_of_two() } else { place & place.wrapping_neg() };
        if place > 0 {
            self.exchange(CALL, &[Transfer::receive(tensor, rank_at(place - lowest_bit))])?;
        }
        let bits = iter::successors(Some(lowest_bit / 2), |bit| Some(bit / 2)).take_while(|bit| *bit > 0);
        let children = bits.map(|bit| place + bit).filter(|child| *child < world_size);
        self.exchange(CALL, &children.map(|child| Transfer::send(tensor, rank_at(child))).collect::<Vec<_>>())
    }

    /// Returns when all ranks have come: each hears from the one behind it, then from two of them, then from four.
    fn meet(&self) -> Result<()> {
        let (rank, world_size) = (self.rank, self.world_size);
        let word = Tensor::zeros([1], (Kind::Uint8, tch::Device::Cpu));
        let heard = word.f_empty_like()?;
        for step in iter::successors(Some(1), |step| Some(2 * step)).take_while(|step| *step < world_size) {
            let receive = Transfer::receive(&heard, (rank + world_size - step) % world_size);
            self.exchange("barrier", &[receive, Transfer::send(&word, (rank + step) % world_size)])?;
        }
        Ok(())
    }

    /// The reduction of this rank's slice over all ranks.
    fn reduce(&self, call: &'static str, slices: &[Tensor], op: ReduceOp) -> Result<Tensor> {
        let mine = &slices[self.rank];
        let mut theirs: Vec<Tensor> = (0..self.world_size).map(|_| mine.shallow_clone()).collect();
        for peer in self.peers() {
            theirs[peer] = mine.f_empty_like()?;
        }
        let receives = self.peers().map(|peer| Transfer::receive(&theirs[peer], peer));
        let sends = self.peers().map(|peer| Transfer::send(&slices[peer], peer));
        self.exchange(call, &receives.chain(sends).collect::<Vec<_>>())?;
        reduce_in_rank_order(&theirs, op)
    }

    /// A rank, and its host if there are several.
    fn words_for(&self, rank: usize) -> String {
        let host = self.hosts.get().and_then(|names| names.get(rank));
        host.map_or_else(|| format!("rank {rank}"), |host| format!("rank {rank} on {host}"))
    }
}

/// `count` views of `len` elements each, in order; shorter where `tensor` ends.
fn slices(tensor: &Tensor, len: usize, count: usize) -> Result<Vec<Tensor>> {
    let end = tensor.numel();
    let slice = |index: usize| {
        let start = (index * len).min(end);
        Ok(tensor.f_narrow(0, start as i64, len.min(end - start) as i64)?)
    };
    (0..count).map(slice).collect()
}

/// An operation in place has its own slice where it belongs.
fn copy_unless_same(output: &Tensor, input: &Tensor) -> Result<()> {
    if output.data_ptr() != input.data_ptr() {
        output.shallow_clone().f_copy_(input)?;
    }
    Ok(())
}

/// Floats accumulate in fp32, integers in 64 bits.
pub(crate) fn reduce_in_rank_order(slices: &[Tensor], op: ReduceOp) -> Result<Tensor> {
    let kind = slices[0].kind();
    let is_float = matches!(kind, Kind::Float | Kind::BFloat16 | Kind::Half);
    let wide = if is_float { Kind::Float } else { Kind::Int64 };
    let mut sum = slices[0].f_to_kind(wide)?;
    for (rank, slice) in slices.iter().enumerate().skip(1) {
        let slice = slice.f_to_kind(wide)?;
        sum = match op {
            // The first sum may be a slice itself: only what was made here is written to.
            ReduceOp::Sum | ReduceOp::Avg if rank == 1 => sum.f_add(&slice)?,
            ReduceOp::Sum | ReduceOp::Avg => sum.f_add_(&slice)?,
            ReduceOp::Min => sum.f_minimum(&slice)?,
            ReduceOp::Max => sum.f_maximum(&slice)?,
        };
    }
    if op == ReduceOp::Avg {
        sum = sum.f_div_scalar(slices.len() as i64)?;
    }
    Ok(sum.f_to_kind(kind)?)
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use super::*;
    use crate::{BackendKind, DType, DeviceId, Rendezvous, open};

    #[test]
    fn groups_of_one_process_begin_side_by_side() {
        let places = Rendezvous::in_this_process(1, Duration::from_secs(60)).unwrap();
        let store = Store::connect(&places[0]).unwrap();
        let begin = |thread: usize| {
            let device = open(DeviceId { backend: BackendKind::CPU, ordinal: thread }).unwrap();
            let stream = Stream::new(&device).unwrap();
            let buffer = Buffer::zeros(&stream, 1, DType::U8).unwrap();
            for number in 0..100 {
                let part = store.prefix(&format!("{thread}/{number}/"), 0, 1).unwrap();
                let group = Sockets::connect(part).unwrap();
                group.broadcast(&buffer, 0, &stream).unwrap();
                group.barrier(&stream).unwrap();
                stream.synchronize().unwrap();
                group.check().unwrap();
            }
        };
        let begin = &begin;
        thread::scope(|scope| (0..8).for_each(|thread| drop(scope.spawn(move || begin(thread)))));
    }
}
