//! [`Collective`] over NCCL and RCCL, which have one ABI.
//!
//! In rank order ([`Reduction::Ordered`]) the library moves elements and does not add them up: its reductions round
//! in an order of their own, and its reduce-scatter and all-reduce differ from each other in a third of the bf16
//! elements. Slices travel by all-to-all, and a kernel sums them in fp32, in rank order, rounding once, so that every
//! rank, stage and backend gets the same bits. [`Reduction::Library`] leaves reductions to the library.

mod library;

use std::{
    ffi::c_int,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    Buffer, Collective, DType, Device, P2p, ReduceOp, Reduction, Result, Store, Stream,
    collective::{
        communicator::{Communicator, Handle, Workspace},
        in_rank_order::InRankOrder,
        rendezvous::Part,
    },
    device::unsupported,
    ffi::library::Failed,
    kernels::strategy::reduce_in_rank_order,
};
pub(crate) use library::Installation;
use library::{Config, Library, NO_COLOR, StreamHandle, dtype_number, op_number};

/// See the module's description.
#[derive(Debug)]
pub(crate) struct Nccl {
    comm: Communicator<Library>,
    device: Arc<dyn Device>,
    reduction: Reduction,
    store: Store,
    splits: AtomicU64,
    /// Memory for the slices of other ranks, until they are summed.
    workspace: Workspace,
}

impl Nccl {
    /// Connects the ranks that share `store`. Blocks until all are there or the store's time-out has passed.
    pub(crate) fn connect(
        installation: &'static Installation,
        device: Arc<dyn Device>,
        store: Store,
        reduction: Reduction,
    ) -> Result<Self> {
        let library = installation.library()?;
        let Some(torch) = device.torch_device() else {
            return unsupported(device.id(), "collectives: libtorch does not know it");
        };
        if !device.has_kernels() {
            return unsupported(
                device.id(),
                "collectives without run-time kernels, which sum what ranks send",
            );
        }
        Self::over(Communicator::connect(library, torch, &store)?, device, reduction, store)
    }

    fn over(
        comm: Communicator<Library>,
        device: Arc<dyn Device>,
        reduction: Reduction,
        store: Store,
    ) -> Result<Self> {
        let splits = AtomicU64::new(0);
        let nccl = Self { comm, device, reduction, store, splits, workspace: Workspace::default() };
        nccl.make_connections()?;
        Ok(nccl)
    }

    /// Runs each kind of operation once. The library connects two ranks in the first operation that needs it, and
    /// waits for the other rank then; here that is allowed, and in an operation it is not.
    fn make_connections(&self) -> Result<()> {
        let stream = Stream::new(&self.device)?;
        let input = Buffer::zeros(&stream, self.world_size(), DType::F32)?;
        let output = Buffer::zeros(&stream, self.world_size(), DType::F32)?;
        self.comm.within_deadline("the first operations", || {
            self.gather(&output, &input.slice(0..1), &stream)?;
            self.exchange(&output, &input, &stream)?;
            if self.reduction == Reduction::Library {
                self.all_reduce(&input, ReduceOp::Sum, &stream)?;
                self.reduce_scatter(&output.slice(0..1), &input, ReduceOp::Sum, &stream)?;
            }
            stream.synchronize()
        })
    }

    /// The communicator of `part`, or `None` for a rank that is in no part. Every rank calls.
    fn split_off(&self, part: Option<&Part>) -> Result<Option<Communicator<Library>>> {
        const CALL: &str = "ncclCommSplit";
        // The library takes half the colors that we do, so a part is known by its first rank.
        let color = part.map_or(NO_COLOR, |part| part.first as c_int);
        let key = part.map_or(0, |part| part.store.rendezvous().rank as c_int);
        let mut child: Handle = 0;
        self.comm.within_deadline(CALL, || {
            // SAFETY: the parent is live, since this thread is inside; the rest is ours and lives through the call.
            self.comm.enqueue(CALL, |library, parent| unsafe {
                library.calls.comm_split(parent, color, key, &mut child, &Config::BLOCKING)
            })
        })?;
        part.map(|part| self.comm.child(child, &part.store)).transpose()
    }
}

impl InRankOrder for Nccl {
    fn gather(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()> {
        let (dst, src) = (output.address()?, input.address()?);
        let (count, dtype, stream) = (input.len(), dtype_number(input.dtype()), handle(stream));
        // SAFETY: the lengths fit, and the buffers live until the operation is done, by the trait's contract.
        self.comm.enqueue("all_gather", |library, comm| unsafe {
            library.calls.all_gather(src, dst, count, dtype, comm, stream)
        })
    }

    fn exchange(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()> {
        let (dst, src) = (output.address()?, input.address()?);
        let count = input.len() / self.world_size();
        let (dtype, size) = (dtype_number(input.dtype()), input.dtype().size_bytes());
        let (world_size, stream) = (self.world_size(), handle(stream));
        self.comm.enqueue("all_to_all", |library, comm| {
            // SAFETY: the lengths fit, and the buffers live until the operation is done, by the trait's contract.
            let native = unsafe { library.all_to_all(src, dst, count, dtype, comm, stream) };
            native.unwrap_or_else(|| {
                grouped(
                    library,
                    (0..world_size).flat_map(|peer| [(peer, true), (peer, false)]),
                    |(peer, is_send)| {
                        let (offset, peer) = (peer * count * size, peer as c_int);
                        // SAFETY: as above, slice by slice.
                        unsafe {
                            if is_send {
                                library.calls.send(src.byte_add(offset), count, dtype, peer, comm, stream)
                            } else {
                                library.calls.recv(dst.byte_add(offset), count, dtype, peer, comm, stream)
                            }
                        }
                    },
                )
            })
        })
    }

    fn reduce(&self, output: &Buffer, received: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()> {
        reduce_in_rank_order(output, received, op, stream)
    }

    fn workspace(&self) -> &Workspace {
        &self.workspace
    }
}

impl Collective for Nccl {
    fn rank(&self) -> usize {
        self.comm.rank
    }

    fn world_size(&self) -> usize {
        self.comm.world_size
    }

    fn sums_in_rank_order(&self) -> bool {
        self.reduction == Reduction::Ordered
    }

    fn broadcast(&self, buffer: &Buffer, root: usize, stream: &Stream) -> Result<()> {
        if buffer.is_empty() {
            return self.check();
        }
        let (at, stream) = (buffer.address()?, handle(stream));
        let (count, dtype, root) = (buffer.len(), dtype_number(buffer.dtype()), root as c_int);
        // SAFETY: the buffer lives until the operation is done, by the trait's contract.
        self.comm.enqueue("broadcast", |library, comm| unsafe {
            library.calls.broadcast(at, at, count, dtype, root, comm, stream)
        })
    }

    fn all_reduce(&self, buffer: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()> {
        op.check(buffer.dtype())?;
        if buffer.is_empty() {
            return self.check();
        }
        if self.reduction == Reduction::Library {
            let (at, stream) = (buffer.address()?, handle(stream));
            let (count, dtype, op) = (buffer.len(), dtype_number(buffer.dtype()), op_number(op));
            // SAFETY: the buffer lives until the operation is done, by the trait's contract.
            return self.comm.enqueue("all_reduce", |library, comm| unsafe {
                library.calls.all_reduce(at, at, count, dtype, op, comm, stream)
            });
        }
        self.reduce_all(buffer, op, stream)
    }

    fn all_gather(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()> {
        if input.is_empty() { self.check() } else { self.gather(output, input, stream) }
    }

    fn reduce_scatter(&self, output: &Buffer, input: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()> {
        op.check(input.dtype())?;
        if output.is_empty() {
            return self.check();
        }
        if self.reduction == Reduction::Ordered {
            return self.reduce_slice(output, input, op, stream);
        }
        let (dst, src, stream) = (output.address()?, input.address()?, handle(stream));
        let (count, dtype, op) = (output.len(), dtype_number(input.dtype()), op_number(op));
        // SAFETY: the lengths fit, and the buffers live until the operation is done, by the trait's contract.
        self.comm.enqueue("reduce_scatter", |library, comm| unsafe {
            library.calls.reduce_scatter(src, dst, count, dtype, op, comm, stream)
        })
    }

    fn all_to_all(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()> {
        if input.is_empty() { self.check() } else { self.exchange(output, input, stream) }
    }

    fn batch(&self, transfers: &[P2p], stream: &Stream) -> Result<()> {
        let mut ready = Vec::with_capacity(transfers.len());
        for transfer in transfers.iter().filter(|transfer| !transfer.buffer().is_empty()) {
            let at = transfer.buffer().address()?;
            let (count, dtype) = (transfer.buffer().len(), dtype_number(transfer.buffer().dtype()));
            let (peer, is_send) = match transfer {
                P2p::Send { to, .. } => (*to as c_int, true),
                P2p::Recv { from, .. } => (*from as c_int, false),
            };
            ready.push((at, count, dtype, peer, is_send));
        }
        if ready.is_empty() {
            return self.check();
        }
        let stream = handle(stream);
        self.comm.enqueue("batch", |library, comm| {
            grouped(library, ready, |(at, count, dtype, peer, is_send)| {
                // SAFETY: the buffers live until the operation is done, by the trait's contract.
                unsafe {
                    if is_send {
                        library.calls.send(at, count, dtype, peer, comm, stream)
                    } else {
                        library.calls.recv(at, count, dtype, peer, comm, stream)
                    }
                }
            })
        })
    }

    fn barrier(&self, stream: &Stream) -> Result<()> {
        // One byte of everybody.
        let bytes = self.workspace.take(self.world_size(), stream)?;
        self.gather(&bytes, &bytes.slice(self.rank()..self.rank() + 1), stream)
    }

    fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Arc<dyn Collective>>> {
        self.check()?;
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        let part = self.store.split(number, color, key)?;
        match (self.split_off(part.as_ref())?, part) {
            (Some(comm), Some(part)) => {
                Ok(Some(Arc::new(Self::over(comm, self.device.clone(), self.reduction, part.store)?)))
            }
            _ => Ok(None),
        }
    }

    fn is_recordable(&self) -> bool {
        true
    }

    fn check(&self) -> Result<()> {
        self.comm.check()
    }

    fn abort(&self, why: &str) {
        self.comm.abort(why);
    }
}

/// Makes one call for each of `items` as one group. The group is closed whatever happens inside of it.
fn grouped<T>(
    library: &Library,
    items: impl IntoIterator<Item = T>,
    call: impl FnMut(T) -> Result<(), Failed>,
) -> Result<(), Failed> {
    // SAFETY: closed below, in this thread.
    unsafe { library.calls.group_start()? };
    let inside = items.into_iter().try_for_each(call);
    // SAFETY: opened above.
    let end = unsafe { library.calls.group_end() };
    inside.and(end)
}

fn handle(stream: &Stream) -> StreamHandle {
    stream.raw().0 as Handle
}

/// The version of an installed library, as `2.28.9`; `None` where there is none.
pub(crate) fn version(installation: &Installation) -> Option<String> {
    let mut version = 0;
    // SAFETY: a number of our own.
    unsafe { installation.library().ok()?.calls.version(&mut version) }.ok()?;
    Some(format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100))
}
