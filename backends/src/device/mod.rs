//! [`Device`]: what a backend supplies. The safe types above it are in [`crate::safe`].

mod cards;
mod dtype;
mod error;
mod info;
mod kind;
pub(crate) mod opened;
mod torch;

use std::{
    ffi::{CStr, c_void},
    fmt,
    time::Duration,
};

pub use cards::Card;
pub use dtype::DType;
pub use error::{Error, Result, without_backtrace};
pub use info::{DeviceInfo, DeviceLoad, Diagnosis, Limits, MemoryInfo};
pub use kind::{BackendKind, BackendTraits, DeviceId};
pub use torch::TorchDevice;

/// Opaque handles. Only the device that made one can read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawBuffer(pub u64);
/// See [`RawBuffer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawStream(pub u64);
/// See [`RawBuffer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawEvent(pub u64);

/// See [`RawBuffer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawGraph(pub u64);

/// The name under which other processes of the host open shared memory.
pub type SharedHandle = [u8; 64];

/// A part of a device allocation; offset and length in bytes. Not a bare address, since Vulkan has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawSlice {
    /// The allocation.
    pub buffer: RawBuffer,
    /// First byte.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
}

/// The threads that run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Number of neighbouring blocks that run at the same time and see each other's shared memory: a divisor of
    /// `blocks`, or 1.
    pub cluster: u32,
    /// Shared memory of a block beyond what the kernel declares.
    pub shared_bytes: u32,
    /// If the device can, its blocks start before the previous work on the stream has ended. The kernel itself waits for
    /// that work.
    pub starts_early: bool,
}

impl Grid {
    /// Independent blocks that start in stream order.
    pub const fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks, threads, cluster: 1, shared_bytes: 0, starts_early: false }
    }

    /// The same blocks, which may start early.
    pub const fn early(self) -> Self {
        Self { starts_early: true, ..self }
    }
}

/// One accelerator. A backend implements this and [`crate::Collective`], nothing else.
///
/// The verbs are raw and `unsafe`. [`crate::Stream`], [`crate::Event`], [`crate::Buffer`], [`crate::PinnedBuffer`] and
/// [`crate::Arena`] are written once above them, and hold the invariants for every backend. The conformance suite is
/// this comment as code.
///
/// # What callers may rely on
/// - *Order.* Work enqueued on one stream runs in that order. Work on two streams has no order, until
///   `stream_wait_event` makes one. An event that was never recorded counts as complete.
/// - *No blocking.* Enqueueing verbs (`free`, `fill`, `copy_*`, `stream_wait_event`, `event_record`,
///   `enqueue_host_fn`) return without waiting for the work, except on the stream that [`Device::torch_stream`]
///   returns when libtorch itself computes on the caller's thread, as it does on a CPU.
/// - *Errors.* Errors of enqueued work come out of the next `stream_synchronize` of that stream. No verb
///   panics. An absent device is [`Error::Unavailable`], a full one [`Error::OutOfMemory`] with the bytes.
/// - *Threads.* Every verb may be called from any thread.
/// - *Memory.* Fresh memory is not zeroed. Addresses are aligned to at least 64 bytes. A copy between host and
///   device takes pinned host memory only.
///
/// # Safety
/// Implementors uphold the above: the safe types hand out references to this memory on the strength of it.
pub unsafe trait Device: Send + Sync + fmt::Debug {
    /// Name of this device.
    fn id(&self) -> DeviceId;
    /// Facts that `doctor` shows.
    fn info(&self) -> DeviceInfo;
    /// Memory at this moment.
    fn memory_info(&self) -> Result<MemoryInfo>;
    /// Use of the device by all processes, read in less than a millisecond and without waiting for its work; `None` where
    /// the device is the host, or its driver does not report it.
    fn load(&self) -> Option<DeviceLoad> {
        None
    }
    /// Place of this device's tensors in libtorch, or `None` if libtorch cannot compute on it.
    fn torch_device(&self) -> Option<TorchDevice>;

    /// Allocates `len` bytes (more than zero) on the device.
    ///
    /// # Safety
    /// The buffer is released by [`Device::free`], once, and before the device goes away.
    unsafe fn alloc(&self, len: usize) -> Result<RawBuffer>;
    /// Releases a buffer after the work that is on `stream` now.
    ///
    /// # Safety
    /// `buffer` came from `alloc` with this `len`; nothing enqueued later or elsewhere uses it.
    unsafe fn free(&self, buffer: RawBuffer, len: usize, stream: RawStream) -> Result<()>;
    /// The address that kernels and libtorch see, or `None` where memory has no address.
    fn address(&self, buffer: RawBuffer) -> Option<*mut u8>;

    /// Reserves `len` bytes of addresses without memory behind them. `len` is a multiple of
    /// [`Device::arena_granularity_bytes`].
    ///
    /// # Safety
    /// The arena is released by [`Device::arena_free`], once, and before the device goes away.
    unsafe fn arena_reserve(&self, len: usize) -> Result<RawBuffer>;
    /// Puts physical memory (contents undefined) behind the whole arena. The address does not change.
    ///
    /// # Safety
    /// `arena` came from `arena_reserve` with this `len`, and is not mapped.
    unsafe fn arena_map(&self, arena: RawBuffer, len: usize) -> Result<()>;
    /// Gives the physical memory back; the address stays reserved.
    ///
    /// # Safety
    /// `arena` is mapped, and no work that uses it is pending on any stream.
    unsafe fn arena_unmap(&self, arena: RawBuffer, len: usize) -> Result<()>;
    /// Gives the addresses back.
    ///
    /// # Safety
    /// `arena` is not mapped and never used again.
    unsafe fn arena_free(&self, arena: RawBuffer, len: usize) -> Result<()>;
    /// Arena lengths are multiples of this.
    fn arena_granularity_bytes(&self) -> usize;
    /// Returns true if an arena that is mapped for the first time reads as zeros without being filled. It then takes
    /// memory only where it is written.
    fn arena_is_zeroed(&self) -> bool {
        false
    }

    /// Allocates zeroed memory that other processes of the host may open. It stays until the process ends.
    fn shared_alloc(&self, _len: usize) -> Result<(RawBuffer, SharedHandle)> {
        unsupported(self.id(), "memory shared with other processes")
    }
    /// Opens the shared memory of another process and device, for kernels of this one. It stays open until the process ends.
    fn shared_open(&self, _handle: &SharedHandle) -> Result<RawBuffer> {
        unsupported(self.id(), "memory shared with other processes")
    }

    /// Allocates zeroed, page-locked host memory.
    ///
    /// # Safety
    /// Released by [`Device::free_pinned`] with the same length, once.
    unsafe fn alloc_pinned(&self, len: usize) -> Result<*mut u8>;
    /// Releases pinned memory at once.
    ///
    /// # Safety
    /// `ptr` came from `alloc_pinned(len)`, and no copy uses it.
    unsafe fn free_pinned(&self, ptr: *mut u8, len: usize) -> Result<()>;

    /// Sets every byte of `dst`.
    ///
    /// # Safety
    /// `dst` lies in a live, mapped allocation of this device until the work is done.
    unsafe fn fill(&self, dst: RawSlice, byte: u8, stream: RawStream) -> Result<()>;
    /// Copies `dst.len` bytes from pinned host memory.
    ///
    /// # Safety
    /// The rule of `fill`; `src` is pinned, readable and unchanged until the work is done.
    unsafe fn copy_h2d(&self, dst: RawSlice, src: *const u8, stream: RawStream) -> Result<()>;
    /// Copies `src.len` bytes to pinned host memory.
    ///
    /// # Safety
    /// The rule of `copy_h2d`; nothing reads `dst` before the work is done.
    unsafe fn copy_d2h(&self, dst: *mut u8, src: RawSlice, stream: RawStream) -> Result<()>;
    /// Copies within the device; the ranges do not overlap and have one length.
    ///
    /// # Safety
    /// The rule of `fill`, for both.
    unsafe fn copy_d2d(&self, dst: RawSlice, src: RawSlice, stream: RawStream) -> Result<()>;

    /// A new stream, in no order with any other.
    fn stream_create(&self) -> Result<RawStream>;
    /// Lets the stream end after its pending work.
    ///
    /// # Safety
    /// `stream` came from `stream_create` and is not used again.
    unsafe fn stream_destroy(&self, stream: RawStream) -> Result<()>;
    /// Blocks the host until the work that is on `stream` now is done, and returns its first error.
    ///
    /// # Safety
    /// `stream` is live.
    unsafe fn stream_synchronize(&self, stream: RawStream) -> Result<()>;
    /// Orders later work on `stream` after the last record of `event`.
    ///
    /// # Safety
    /// Both are live and of this device.
    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()>;
    /// The stream that libtorch's operations of the calling thread go to. Owned by libtorch.
    fn torch_stream(&self) -> Result<RawStream>;

    /// An event to record, whatever it says before that. Only one that is `timed` knows when it was reached; streams
    /// pass one that is not in less time.
    fn event_create(&self, timed: bool) -> Result<RawEvent>;
    /// Releases an event; waits that were already enqueued stay valid.
    ///
    /// # Safety
    /// `event` came from `event_create` and is not used again.
    unsafe fn event_destroy(&self, event: RawEvent) -> Result<()>;
    /// Marks the work that is on `stream` now.
    ///
    /// # Safety
    /// Both are live and of this device.
    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()>;
    /// Returns true once the work before the last record is done.
    ///
    /// # Safety
    /// `event` is live.
    unsafe fn event_query(&self, event: RawEvent) -> Result<bool>;
    /// Time between the last records of two events that are both timed and complete.
    ///
    /// # Safety
    /// Both are live and of this device.
    unsafe fn event_elapsed(&self, start: RawEvent, end: RawEvent) -> Result<Duration>;

    /// Runs `work` on a host thread, in order with the stream. It must not call this device and must return.
    ///
    /// # Safety
    /// `stream` is live.
    unsafe fn enqueue_host_fn(&self, stream: RawStream, work: HostFn) -> Result<()>;

    /// Number of large blocks that run at the same time; `None` if the driver does not report it.
    fn multiprocessors(&self) -> Option<i64> {
        None
    }
    /// Returns true if [`Device::launch`] works: the device compiles kernels at run time, and the compiler was found.
    fn has_kernels(&self) -> bool {
        false
    }
    /// Returns true if this device has a kernel of `kernels/`; some are for a few devices only.
    fn has_kernel(&self, _kernel: &'static CStr) -> bool {
        false
    }
    /// Launches a kernel of `kernels/`. `arguments` are the addresses of its parameters' values, read
    /// before this returns.
    ///
    /// # Safety
    /// The arguments are those of the kernel's signature, and the memory they name lives until the work is done. The
    /// kernel takes turns if the grid starts early.
    unsafe fn launch(
        &self,
        kernel: &'static CStr,
        _grid: Grid,
        _arguments: &mut [*mut c_void],
        _stream: RawStream,
    ) -> Result<()> {
        unsupported(self.id(), format!("kernels at run time: {kernel:?}"))
    }

    /// The stream on which work is recorded, one for the life of the device: libraries keep memory for each stream that
    /// they have seen. [`Error::Unsupported`] if the device cannot record.
    fn recording_stream(&self) -> Result<RawStream> {
        unsupported(self.id(), "recorded work")
    }
    /// Begins to record the work that is enqueued on `stream`, instead of running it.
    ///
    /// # Safety
    /// `stream` is [`Device::recording_stream`]'s, nothing is pending there, and the recording is ended.
    unsafe fn graph_begin(&self, _stream: RawStream) -> Result<()> {
        unsupported(self.id(), "recorded work")
    }
    /// Ends the recording.
    ///
    /// # Safety
    /// Begun on `stream`; the graph is released by [`Device::graph_destroy`], once.
    unsafe fn graph_end(&self, _stream: RawStream) -> Result<RawGraph> {
        unsupported(self.id(), "recorded work")
    }
    /// Runs recorded work after the work that is on `stream` now.
    ///
    /// # Safety
    /// Both are live, and so is the memory that the work reads and writes, until it is done.
    unsafe fn graph_launch(&self, _graph: RawGraph, _stream: RawStream) -> Result<()> {
        unsupported(self.id(), "recorded work")
    }
    /// Releases recorded work; a run in flight continues.
    ///
    /// # Safety
    /// `graph` came from `graph_end` and is not used again.
    unsafe fn graph_destroy(&self, _graph: RawGraph) -> Result<()> {
        unsupported(self.id(), "recorded work")
    }
}

/// Host work in stream order; an error becomes the stream's error.
pub type HostFn = Box<dyn FnOnce() -> Result<(), String> + Send>;

/// Returns the error for a feature that this device does not have.
pub fn unsupported<T>(id: DeviceId, what: impl Into<String>) -> Result<T> {
    Err(Error::Unsupported { backend: id.backend, what: what.into() })
}
