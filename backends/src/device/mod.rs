//! [`Device`]: what a backend supplies. The safe types above it are in [`crate::stream`] and [`crate::buffer`].

pub(crate) mod dtype;
pub(crate) mod error;
pub(crate) mod opened;

use std::{
    ffi::{CStr, c_void},
    fmt,
    str::FromStr,
    time::Duration,
};

use crate::{Error, Result, ascend, ffi};

/// The families of accelerators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendKind {
    /// The host's processor; the reference for all others.
    Cpu,
    /// NVIDIA.
    Cuda,
    /// AMD.
    Rocm,
    /// Huawei Ascend.
    Ascend,
    /// Any GPU with Vulkan compute.
    Vulkan,
}

impl BackendKind {
    /// Every backend, in the order in which `auto` prefers them.
    pub const ALL: [Self; 5] = [Self::Cuda, Self::Rocm, Self::Ascend, Self::Vulkan, Self::Cpu];

    /// Whether it is the host itself, which holds as many ranks as one asks for.
    pub const fn is_host(self) -> bool {
        matches!(self, Self::Cpu)
    }

    /// Whether one device serves several ranks: their collectives go through the host.
    pub const fn shares_devices(self) -> bool {
        matches!(self, Self::Cpu | Self::Vulkan)
    }

    /// Whether libtorch computes on it, so that models can run.
    pub const fn runs_models(self) -> bool {
        !matches!(self, Self::Vulkan)
    }

    /// Whether a model on it can compute each row by itself: [`crate::ops::exist_by_rows`] says for which models.
    pub const fn adds_by_rows(self) -> bool {
        matches!(self, Self::Cpu | Self::Cuda | Self::Rocm)
    }

    /// The name used in YAML and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
            Self::Ascend => "ascend",
            Self::Vulkan => "vulkan",
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for BackendKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            format!("no backend {name:?}: choose one of {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// One device of one backend: `cuda:0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId {
    /// The family.
    pub backend: BackendKind,
    /// Its index on this host.
    pub ordinal: usize,
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.backend, self.ordinal)
    }
}

/// Memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free on the whole device, whoever uses the rest.
    pub free_bytes: usize,
    /// Total of the device.
    pub total_bytes: usize,
    /// Held by this process through this [`Device`]: buffers and mapped arenas.
    pub allocated_bytes: usize,
    /// Pinned host memory held by this process through this [`Device`].
    pub pinned_bytes: usize,
}

/// What `doctor` shows of a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Which.
    pub id: DeviceId,
    /// The vendor's name of the product.
    pub name: String,
    /// Its memory, where that is known without opening it.
    pub total_bytes: Option<usize>,
    /// Further facts, as name and value.
    pub details: Vec<(String, String)>,
}

/// What `doctor` shows of a device besides: it takes a while to find out.
#[derive(Clone, Debug, Default)]
pub struct Diagnosis {
    /// Further facts, as name and value.
    pub details: Vec<(String, String)>,
    /// What the hardware can do at most.
    pub limits: Limits,
}

/// What the hardware can do at most, as it states it; `None` where it does not.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// Bytes a second that its memory reads and writes, together.
    pub memory_bytes_per_s: Option<f64>,
    /// Bytes a second over its link to the host, one way.
    pub host_bytes_per_s: Option<f64>,
    /// Bytes a second over its links to other devices, one way.
    pub peer_bytes_per_s: Option<f64>,
    /// Operations a second in products of dense bf16 matrices.
    pub bf16_flops: Option<f64>,
}

/// Where libtorch keeps tensors of this device: its device type and index as c10 numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TorchDevice {
    /// `c10::DeviceType`: 0 CPU, 1 CUDA (and ROCm, which presents itself so), 20 PrivateUse1.
    pub kind: i32,
    /// The index, or -1 for the CPU.
    pub index: i32,
}

impl TorchDevice {
    /// The same as tch names it, or `None` for a device type that tch has no name for.
    pub fn tch(self) -> Option<tch::Device> {
        match self.kind {
            0 => Some(tch::Device::Cpu),
            1 => usize::try_from(self.index).ok().map(tch::Device::Cuda),
            // A name without a number, which is lent: see `shim/npu.cpp`.
            ascend::TORCH_KIND => Some(tch::Device::Mps),
            _ => None,
        }
    }

    /// What tch names so, or `None` where no backend has such tensors.
    pub(crate) fn of(device: tch::Device) -> Option<Self> {
        match device {
            tch::Device::Cpu => Some(Self { kind: 0, index: -1 }),
            tch::Device::Cuda(index) => Some(Self { kind: 1, index: index as i32 }),
            tch::Device::Mps => {
                // SAFETY: reads a number.
                let index = unsafe { ffi::anyroll_npu_index() };
                Some(Self { kind: ascend::TORCH_KIND, index })
            }
            tch::Device::Vulkan => None,
        }
    }
}

/// Gives back to a device the memory that libtorch keeps for its next tensors there: for what is not libtorch's, such as
/// [`Buffer`](crate::Buffer)s. A host's is never kept.
///
/// # Errors
/// libtorch's, such as a failure of what the device was doing.
pub fn release_cached(device: tch::Device) -> Result<()> {
    let kept = TorchDevice::of(device).filter(|device| device.kind != 0);
    // SAFETY: libtorch's support of a device that has tensors is loaded, and memory of live tensors is not given back.
    match kept.is_some_and(|device| unsafe { ffi::anyroll_empty_cache(device.kind) } != 0) {
        true => Err(Error::Torch(ffi::last_error())),
        false => Ok(()),
    }
}

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

/// Which threads run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// How many blocks.
    pub blocks: u32,
    /// Of a block.
    pub threads: u32,
    /// Neighbouring blocks that run side by side and see each other's shared memory, a divisor of the blocks; 1 where
    /// none do.
    pub cluster: u32,
    /// Shared memory of a block beyond what the kernel declares.
    pub shared_bytes: u32,
    /// Whether blocks may start before what is in front on the stream has ended, where the device can do that: the
    /// kernel itself waits for it.
    pub starts_early: bool,
}

impl Grid {
    /// Blocks that have nothing to do with each other, in turn with all else.
    pub const fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks, threads, cluster: 1, shared_bytes: 0, starts_early: false }
    }

    /// The same, which may start early.
    pub const fn early(self) -> Self {
        Self { starts_early: true, ..self }
    }
}

/// One accelerator. A backend implements this and [`crate::Collective`], nothing else.
///
/// The verbs are raw and `unsafe`; [`crate::Stream`], [`crate::Event`], [`crate::Buffer`],
/// [`crate::PinnedBuffer`] and [`crate::Arena`] are written once above them and hold the invariants for every
/// backend. The conformance suite is this comment as code.
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
    /// Which device this is.
    fn id(&self) -> DeviceId;
    /// What `doctor` shows.
    fn info(&self) -> DeviceInfo;
    /// Memory at this moment.
    fn memory_info(&self) -> Result<MemoryInfo>;
    /// Where libtorch keeps tensors of this device, or `None` if libtorch cannot compute on it.
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
    /// As for [`Device::alloc`], with [`Device::arena_free`].
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
    /// As for `fill`; `src` is pinned, readable and unchanged until the work is done.
    unsafe fn copy_h2d(&self, dst: RawSlice, src: *const u8, stream: RawStream) -> Result<()>;
    /// Copies `src.len` bytes to pinned host memory.
    ///
    /// # Safety
    /// As for `copy_h2d`; nothing reads `dst` before the work is done.
    unsafe fn copy_d2h(&self, dst: *mut u8, src: RawSlice, stream: RawStream) -> Result<()>;
    /// Copies within the device; the ranges do not overlap and have one length.
    ///
    /// # Safety
    /// As for `fill`, for both.
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
    /// Whether the work before the last record is done.
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

    /// How many blocks of a large kernel run side by side, where the driver says so.
    fn multiprocessors(&self) -> Option<i64> {
        None
    }
    /// Whether [`Device::launch`] works: the device compiles kernels at run time, and its compiler is there.
    fn has_kernels(&self) -> bool {
        false
    }
    /// Whether a kernel of `kernels/` that is not for every device is for this one.
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

    /// The stream that work is recorded on, one for the life of the device: libraries keep memory for each stream
    /// that they have seen. [`Error::Unsupported`] where nothing can be recorded.
    fn recording_stream(&self) -> Result<RawStream> {
        unsupported(self.id(), "recorded work")
    }
    /// Begins to record what is enqueued on `stream`, instead of running it.
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
    /// Runs recorded work after what is on `stream`.
    ///
    /// # Safety
    /// Both are live, and so is the memory that the work reads and writes, until it is done.
    unsafe fn graph_launch(&self, _graph: RawGraph, _stream: RawStream) -> Result<()> {
        unsupported(self.id(), "recorded work")
    }
    /// Releases recorded work; a run in flight goes on.
    ///
    /// # Safety
    /// `graph` came from `graph_end` and is not used again.
    unsafe fn graph_destroy(&self, _graph: RawGraph) -> Result<()> {
        unsupported(self.id(), "recorded work")
    }
}

/// Host work in stream order; an error becomes the stream's error.
pub type HostFn = Box<dyn FnOnce() -> Result<(), String> + Send>;

/// The error for something this device does not do.
pub fn unsupported<T>(id: DeviceId, what: impl Into<String>) -> Result<T> {
    Err(Error::Unsupported { backend: id.backend, what: what.into() })
}
