//! [`Collective`] over libtorch's Gloo: for the CPU, and for devices that have no library of their own.
//!
//! Operations run on the stream's host thread. Gloo only moves bytes here, straight between the buffers of two
//! ranks, or between copies of them in pinned memory where the host does not see a device's own; sums are ours, in
//! rank order and in fp32 for floats, so that every rank gets the same bits at every world size and for every element
//! type. Gloo's own collectives are left alone: libtorch 2.11 notes each of them in one table of all groups of the
//! process, without a lock, and groups that begin at the same time crash.

use std::{
    ffi::{CString, c_int, c_void},
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
    notice::Notice,
    rendezvous::{Rendezvous, millis},
};
use crate::{Buffer, Collective, Error, P2p, ReduceOp, Result, Store, Stream, ffi};

/// Gloo gives up this much later than the deadline of the group above, which then names the operation first.
const GRACE: Duration = Duration::from_secs(1);

/// Connects the ranks that share `store` through the host's memory: for a backend without a library of collectives, whose
/// devices have pinned memory. Blocks until all are there or the store's time-out has passed.
///
/// # Errors
/// [`Error::Rendezvous`] when ranks do not meet.
pub fn connect_through_host(store: Store) -> Result<Arc<dyn Collective>> {
    Ok(Arc::new(Gloo::connect(store)?))
}

/// See the module's description.
#[derive(Debug)]
struct Gloo {
    shared: Arc<Shared>,
    store: Store,
    splits: AtomicU64,
    copies: HostCopies,
}

/// State that operations in flight share.
#[derive(Debug)]
struct Shared {
    raw: *mut c_void,
    rank: usize,
    world_size: usize,
    timeout: Duration,
    aborted: AtomicBool,
    failure: Mutex<Option<Error>>,
    /// Peer of the transfer that is waited for.
    awaited: Mutex<Option<usize>>,
    /// Name of each rank's host, unless all are on one.
    hosts: OnceLock<Vec<String>>,
}

// SAFETY: c10d's process groups lock inside, and operations come from one stream's thread at a time.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Gloo {
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
        // Gloo tries again, and each time for as long as it may.
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

impl Collective for Gloo {
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
        self.enqueue("broadcast", &operands, stream, move |gloo, tensors| gloo.spread(&tensors[0], root))
    }

    fn all_reduce(&self, buffer: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()> {
        op.check(buffer.dtype())?;
        self.enqueue("all_reduce", &[Operand::Update(buffer)], stream, move |gloo, tensors| {
            let whole = &tensors[0];
            // Each rank reduces one slice of all, and then everybody gets every slice. The last may be shorter.
            let slices = slices(whole, whole.numel().div_ceil(gloo.world_size), gloo.world_size)?;
            let reduced = gloo.reduce("all_reduce", &slices, op)?;
            slices[gloo.rank].shallow_clone().f_copy_(&reduced)?;
            gloo.gather("all_reduce", &slices)
        })
    }

    fn all_gather(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()> {
        let operands = [Operand::Write(output), Operand::Read(input)];
        self.enqueue("all_gather", &operands, stream, move |gloo, tensors| {
            let (output, input) = (&tensors[0], &tensors[1]);
            let slices = slices(output, input.numel(), gloo.world_size)?;
            copy_unless_same(&slices[gloo.rank], input)?;
            gloo.gather("all_gather", &slices)
        })
    }

    fn reduce_scatter(&self, output: &Buffer, input: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()> {
        op.check(input.dtype())?;
        let operands = [Operand::Write(output), Operand::Read(input)];
        self.enqueue("reduce_scatter", &operands, stream, move |gloo, tensors| {
            let (output, input) = (&tensors[0], &tensors[1]);
            let slices = slices(input, output.numel(), gloo.world_size)?;
            let reduced = gloo.reduce("reduce_scatter", &slices, op)?;
            output.shallow_clone().f_copy_(&reduced)?;
            Ok(())
        })
    }

    fn all_to_all(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()> {
        let operands = [Operand::Write(output), Operand::Read(input)];
        self.enqueue("all_to_all", &operands, stream, move |gloo, tensors| {
            let (output, input) = (&tensors[0], &tensors[1]);
            let len = input.numel() / gloo.world_size;
            let (to, from) = (slices(output, len, gloo.world_size)?, slices(input, len, gloo.world_size)?);
            copy_unless_same(&to[gloo.rank], &from[gloo.rank])?;
            let sends = gloo.peers().map(|peer| Transfer::send(&from[peer], peer));
            let receives = gloo.peers().map(|peer| Transfer::receive(&to[peer], peer));
            gloo.exchange("all_to_all", &receives.chain(sends).collect::<Vec<_>>())
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
        self.enqueue("batch", &operands, stream, move |gloo, tensors| {
            let ready = peers.into_iter().zip(tensors).map(|((peer, is_send), tensor)| Transfer {
                tensor: tensor.shallow_clone(),
                peer,
                is_send,
            });
            gloo.exchange("batch", &ready.collect::<Vec<_>>())
        })
    }

    fn barrier(&self, stream: &Stream) -> Result<()> {
        self.enqueue("barrier", &[], stream, |gloo, _| gloo.meet())
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
        let peer = *self.shared.awaited.lock().unwrap();
        peer.map(|peer| self.shared.words_for(peer))
    }

    fn check(&self) -> Result<()> {
        self.shared.state("check")
    }

    fn abort(&self, _why: &str) {
        self.shared.aborted.store(true, Ordering::Release);
        self.shared.interrupt();
    }
}

impl Shared {
    /// Connects this rank of `store` to the others.
    ///
    /// # Errors
    /// The words of Gloo.
    fn connect(store: &Store, offered: &Offered) -> Result<Self, String> {
        let Rendezvous { rank, world_size, timeout, .. } = *store.rendezvous();
        let timeout = timeout + GRACE;
        let (host, interfaces) = match offered {
            Offered::Address(address) => (address.to_string(), String::new()),
            Offered::Interfaces(names) => (String::new(), names.clone()),
        };
        let [host, interfaces] =
            [host, interfaces].map(|text| CString::new(text).expect("no variable and no address has a NUL"));
        // SAFETY: the store and the strings live through the call.
        let raw = unsafe {
            ffi::anyroll_gloo_new(
                store.raw(),
                rank as c_int,
                world_size as c_int,
                millis(timeout),
                host.as_ptr(),
                interfaces.as_ptr(),
            )
        };
        if raw.is_null() {
            return Err(ffi::last_error());
        }
        let aborted = AtomicBool::new(false);
        let (failure, awaited, hosts) = (Mutex::default(), Mutex::default(), OnceLock::new());
        Ok(Shared { raw, rank, world_size, timeout, aborted, failure, awaited, hosts })
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
            self.interrupt();
        }
    }

    /// Wakes whoever waits in this communicator: here, and through the closed connections on the other ranks.
    ///
    /// Gloo has no call for it. But a receive that passes its deadline fails everything that is pending on the
    /// communicator's connections and closes them, so one that nobody answers does it.
    fn interrupt(&self) {
        const UNANSWERED_TAG: c_int = c_int::MAX;
        let nothing = Tensor::zeros([1], (Kind::Uint8, tch::Device::Cpu));
        for peer in (0..self.world_size).filter(|peer| *peer != self.rank) {
            // SAFETY: the group is live, and the tensor is until the receive has failed.
            let work = unsafe {
                ffi::anyroll_gloo_recv(self.raw, ffi::tensor_ptr(&nothing), peer as c_int, UNANSWERED_TAG)
            };
            if !work.is_null() {
                // SAFETY: the shim handed us this Work, and we free it once. It fails, as it should.
                unsafe {
                    ffi::anyroll_work_wait(work, 1);
                    ffi::anyroll_work_free(work);
                }
            }
        }
    }

    /// The other ranks, each starting with its successor, so that not all send to one at once.
    fn peers(&self) -> impl Iterator<Item = usize> {
        let (rank, world_size) = (self.rank, self.world_size);
        (1..world_size).map(move |step| (rank + step) % world_size)
    }

    /// Runs all transfers at once. Those of no elements are nothing, on both sides.
    fn exchange(&self, call: &'static str, transfers: &[Transfer]) -> Result<()> {
        const TAG: c_int = 0; // transfers between two ranks match in order, so one tag serves all
        let mut started = Vec::with_capacity(transfers.len());
        for Transfer { tensor, peer, is_send } in transfers.iter().filter(|one| one.tensor.numel() > 0) {
            // Gloo knows few element types; everything is bytes to what only moves it.
            let bytes = tensor.f_view_dtype(Kind::Uint8)?;
            let start = if *is_send { ffi::anyroll_gloo_send } else { ffi::anyroll_gloo_recv };
            // SAFETY: the group is live, and so is the tensor's memory until `finish` returns.
            started.push((*peer, unsafe { start(self.raw, ffi::tensor_ptr(&bytes), *peer as c_int, TAG) }));
        }
        // All are waited for, also after a failure: the memory is in use until then.
        let finish = |(peer, work)| self.finish(call, peer, work);
        started.into_iter().map(finish).fold(Ok(()), Result::and)
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

    /// Waits for a transfer that was started with `peer`, or returns the error of its start.
    fn finish(&self, call: &'static str, peer: usize, work: *mut c_void) -> Result<()> {
        let error = || Error::Collective {
            call: call.into(),
            rank: self.rank,
            world_size: self.world_size,
            message: format!("with {}: {}", self.words_for(peer), ffi::last_error()),
        };
        if work.is_null() {
            return Err(error());
        }
        *self.awaited.lock().unwrap() = Some(peer);
        // SAFETY: the shim handed us this Work, and we free it once.
        let code = unsafe { ffi::anyroll_work_wait(work, millis(self.timeout)) };
        let outcome = if code == 0 { Ok(()) } else { Err(error()) };
        *self.awaited.lock().unwrap() = None;
        // SAFETY: as above; c10d's own threads hold their own reference.
        unsafe { ffi::anyroll_work_free(work) };
        outcome
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The destructor joins Gloo's threads. None waits for another rank: after a success there is nothing to
        // wait for, and a failure has interrupted them.
        // SAFETY: no operation holds the group any more.
        unsafe { ffi::anyroll_gloo_free(self.raw) };
    }
}

/// One transfer of an operation.
struct Transfer {
    tensor: Tensor,
    peer: usize,
    is_send: bool,
}

impl Transfer {
    fn send(tensor: &Tensor, to: usize) -> Self {
        Self { tensor: tensor.shallow_clone(), peer: to, is_send: true }
    }

    fn receive(tensor: &Tensor, from: usize) -> Self {
        Self { tensor: tensor.shallow_clone(), peer: from, is_send: false }
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

    /// libtorch's own collectives crash here: see the module's description.
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
                let gloo = Gloo::connect(part).unwrap();
                gloo.broadcast(&buffer, 0, &stream).unwrap();
                gloo.barrier(&stream).unwrap();
                stream.synchronize().unwrap();
                gloo.check().unwrap();
            }
        };
        let begin = &begin;
        thread::scope(|scope| (0..8).for_each(|thread| drop(scope.spawn(move || begin(thread)))));
    }
}
