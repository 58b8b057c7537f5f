//! [`Collective`] over HCCL.
//!
//! The library moves bytes and adds nothing up: it has no average, and no reductions of some element types, and its
//! sums round in an order of their own. What other ranks send goes to the host, which sums it in rank order and in fp32
//! while the stream waits; training moves gradients and adds them up on the device, and reduces nothing here.
//!
//! It promises nothing for a buffer that is its own source, nor for one that starts at any byte: those go by way of
//! memory of ours.

mod library;

use std::{
    collections::HashMap,
    ffi::c_void,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use tch::Tensor;

use super::acl::Handle;
use crate::{
    Buffer, Collective, DType, Device, P2p, PinnedBuffer, ReduceOp, Result, Store, Stream,
    collective::{
        communicator::{Communicator, Workspace},
        in_rank_order::InRankOrder,
        sockets::reduce_in_rank_order,
    },
    device::unsupported,
};
use library::{BYTES, Item, Library};

/// Alignment, in bytes, of the start of each buffer, and of its padded length in memory of ours.
const ALIGNMENT: usize = 512;

/// See the module's description.
#[derive(Debug)]
pub(super) struct Hccl {
    comm: Communicator<Library>,
    device: Arc<dyn Device>,
    store: Store,
    splits: AtomicU64,
    /// Memory that replaces buffers which the library cannot take.
    staging: Workspace,
    /// Memory for the slices of a reduction that other ranks send.
    workspace: Workspace,
    /// The same slices on the host, and their reduction.
    host: Mutex<Option<PinnedBuffer>>,
}

/// Returns an error if the library is not there.
pub(super) fn find() -> Result<()> {
    Library::get().map(drop)
}

impl Hccl {
    /// Connects the ranks that share `store`. Blocks until all are there or the store's time-out has passed.
    pub(super) fn connect(device: Arc<dyn Device>, store: Store) -> Result<Self> {
        let Some(torch) = device.torch_device() else {
            return unsupported(device.id(), "collectives: libtorch does not know it");
        };
        let comm = Communicator::connect(Library::get()?, torch, &store)?;
        let hccl = Self {
            comm,
            device,
            store,
            splits: AtomicU64::new(0),
            staging: Workspace::default(),
            workspace: Workspace::default(),
            host: Mutex::default(),
        };
        hccl.make_connections()?;
        Ok(hccl)
    }

    /// Runs each kind of operation once: the library connects two ranks in the first that needs it.
    fn make_connections(&self) -> Result<()> {
        let stream = Stream::new(&self.device)?;
        let input = Buffer::zeros(&stream, self.world_size(), DType::U8)?;
        let output = Buffer::zeros(&stream, self.world_size(), DType::U8)?;
        self.comm.within_deadline("the first operations", || {
            self.gather(&output, &input.slice(0..1), &stream)?;
            self.exchange(&output, &input, &stream)?;
            stream.synchronize()
        })
    }

    /// Runs `call` on the addresses of `output` and `input`, or of memory of ours in their place.
    fn staged(
        &self,
        output: &Buffer,
        input: &Buffer,
        stream: &Stream,
        call: impl FnOnce(*mut c_void, *mut c_void) -> Result<()>,
    ) -> Result<()> {
        let (dst, src) = (output.address()?, input.address()?);
        let are_apart = dst as usize + output.len_bytes() <= src as usize
            || src as usize + input.len_bytes() <= dst as usize;
        if are_apart && is_aligned(dst) && is_aligned(src) {
            return call(dst, src);
        }
        let (from, to) = (input.as_bytes(), output.as_bytes());
        let start = to.len().next_multiple_of(ALIGNMENT);
        let both = self.staging.take(start + from.len(), stream)?;
        let (staged_to, staged_from) = (both.slice(0..to.len()), both.slice(start..start + from.len()));
        staged_from.copy_from(&from, stream)?;
        call(staged_to.address()?, staged_from.address()?)?;
        to.copy_from(&staged_to, stream)
    }
}

impl InRankOrder for Hccl {
    fn gather(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()> {
        let (count, raw) = (input.len_bytes() as u64, handle(stream));
        self.staged(output, input, stream, |dst, src| {
            // SAFETY: the lengths fit, and the buffers live until the operation is done, by the trait's contract.
            self.comm.enqueue("all_gather", |library, comm| unsafe {
                library.calls.all_gather(src, dst, count, BYTES, comm, raw)
            })
        })
    }

    fn exchange(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()> {
        let (count, raw) = ((input.len_bytes() / self.world_size()) as u64, handle(stream));
        self.staged(output, input, stream, |dst, src| {
            // SAFETY: as in `gather`.
            self.comm.enqueue("all_to_all", |library, comm| unsafe {
                library.calls.all_to_all(src, count, BYTES, dst, count, BYTES, comm, raw)
            })
        })
    }

    /// On the host.
    fn reduce(&self, output: &Buffer, received: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()> {
        let start = received.len_bytes().next_multiple_of(ALIGNMENT);
        let len = start + output.len_bytes();
        let mut host = self.host.lock().unwrap();
        if host.as_ref().is_none_or(|host| host.len_bytes() < len) {
            *host = Some(PinnedBuffer::new(&self.device, len)?);
        }
        let host = host.as_mut().expect("made above");
        host.copy_from(0, received, stream)?;
        let (at, kind, elements) = (host.address() as usize, output.dtype().kind(), output.len());
        let ranks = self.world_size();
        stream.enqueue_host_fn(Box::new(move || {
            let view = |offset: usize, shape: &[i64]| {
                let at = (at + offset) as *const u8;
                // SAFETY: pinned memory that its next use and its end wait for; the copy to here is done, and the one
                // from here comes later in the stream.
                unsafe { Tensor::f_from_blob(at, shape, &strides(shape), kind, tch::Device::Cpu) }
            };
            let reduce = || -> Result<()> {
                let slices = view(0, &[ranks as i64, elements as i64])?.f_unbind(0)?;
                Ok(view(start, &[elements as i64])?.f_copy_(&reduce_in_rank_order(&slices, op)?)?)
            };
            reduce().map_err(|error| error.to_string())
        }))?;
        host.copy_to(start, output, stream)
    }

    fn workspace(&self) -> &Workspace {
        &self.workspace
    }
}

impl Collective for Hccl {
    fn rank(&self) -> usize {
        self.comm.rank
    }

    fn world_size(&self) -> usize {
        self.comm.world_size
    }

    fn sums_in_rank_order(&self) -> bool {
        true
    }

    fn broadcast(&self, buffer: &Buffer, root: usize, stream: &Stream) -> Result<()> {
        if buffer.is_empty() {
            return self.check();
        }
        let at = buffer.address()?;
        let (count, raw) = (buffer.len_bytes() as u64, handle(stream));
        let run = |at| {
            // SAFETY: the buffer lives until the operation is done, by the trait's contract.
            self.comm.enqueue("broadcast", |library, comm| unsafe {
                library.calls.broadcast(at, count, BYTES, root as u32, comm, raw)
            })
        };
        if is_aligned(at) {
            return run(at);
        }
        let staged = self.staging.take(buffer.len_bytes(), stream)?;
        let bytes = buffer.as_bytes();
        staged.copy_from(&bytes, stream)?;
        run(staged.address()?)?;
        bytes.copy_from(&staged, stream)
    }

    fn all_reduce(&self, buffer: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()> {
        op.check(buffer.dtype())?;
        if buffer.is_empty() {
            return self.check();
        }
        self.reduce_all(buffer, op, stream)
    }

    fn all_gather(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()> {
        if input.is_empty() { self.check() } else { self.gather(output, input, stream) }
    }

    fn reduce_scatter(&self, output: &Buffer, input: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()> {
        op.check(input.dtype())?;
        if output.is_empty() { self.check() } else { self.reduce_slice(output, input, op, stream) }
    }

    fn all_to_all(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()> {
        if input.is_empty() { self.check() } else { self.exchange(output, input, stream) }
    }

    fn batch(&self, transfers: &[P2p], stream: &Stream) -> Result<()> {
        // One call takes one transfer a direction and rank: the second between the same two goes in the second call.
        let mut calls: Vec<Vec<Item>> = Vec::new();
        let mut taken: HashMap<(usize, bool), usize> = HashMap::new();
        let mut places = Vec::new();
        let mut len = 0;
        for transfer in transfers.iter().filter(|transfer| !transfer.buffer().is_empty()) {
            let bytes = transfer.buffer().as_bytes();
            places.push((transfer, len..len + bytes.len()));
            len += bytes.len().next_multiple_of(ALIGNMENT);
        }
        if places.is_empty() {
            return self.check();
        }
        let staging = self.staging.take(len, stream)?;
        for (transfer, place) in &places {
            let (staged, bytes) = (staging.slice(place.clone()), place.len());
            let (peer, is_send) = match transfer {
                P2p::Send { buffer, to } => {
                    staged.copy_from(&buffer.as_bytes(), stream)?;
                    (*to, true)
                }
                P2p::Recv { from, .. } => (*from, false),
            };
            let make = if is_send { Item::send } else { Item::receive };
            let call = taken.entry((peer, is_send)).or_default();
            if calls.len() == *call {
                calls.push(Vec::new());
            }
            calls[*call].push(make(staged.address()?, bytes, peer));
            *call += 1;
        }
        let raw = handle(stream);
        for mut items in calls {
            // SAFETY: the items live through the call, and the memory until the operation is done.
            self.comm.enqueue("batch", |library, comm| unsafe {
                library.calls.batch_send_receive(items.as_mut_ptr(), items.len() as u32, comm, raw)
            })?;
        }
        for (transfer, place) in places {
            if let P2p::Recv { buffer, .. } = transfer {
                buffer.as_bytes().copy_from(&staging.slice(place), stream)?;
            }
        }
        Ok(())
    }

    fn barrier(&self, stream: &Stream) -> Result<()> {
        // One byte of everybody: the library's own barrier is not what libtorch uses either.
        let bytes = self.workspace.take(self.world_size(), stream)?;
        self.gather(&bytes, &bytes.slice(self.rank()..self.rank() + 1), stream)
    }

    fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Arc<dyn Collective>>> {
        self.check()?;
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        match self.store.split(number, color, key)? {
            Some(part) => Ok(Some(Arc::new(Self::connect(self.device.clone(), part.store)?))),
            None => Ok(None),
        }
    }

    fn check(&self) -> Result<()> {
        self.comm.check()
    }

    fn abort(&self, why: &str) {
        self.comm.abort(why);
    }
}

fn is_aligned(address: *mut c_void) -> bool {
    (address as usize).is_multiple_of(ALIGNMENT)
}

/// Strides of a dense tensor.
fn strides(shape: &[i64]) -> Vec<i64> {
    (0..shape.len()).map(|dim| shape[dim + 1..].iter().product()).collect()
}

fn handle(stream: &Stream) -> Handle {
    stream.raw().0 as Handle
}
