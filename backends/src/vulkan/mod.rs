//! Vulkan: any GPU with a driver for it, and processors through lavapipe. It has memory, order and kernels. libtorch does
//! not compute on it, so no model runs, and collectives go through the host.
//!
//! `loader` finds devices, `context` is one that is open, `memory` its allocations, `stream` a thread that submits,
//! `timeline` the order between streams and with the host.

mod context;
mod kernels;
mod launch;
mod loader;
mod memory;
mod shader;
mod stream;
#[cfg(test)]
mod tests;
mod timeline;

use std::{
    collections::HashMap,
    ffi::{CStr, c_void},
    fmt,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use ash::vk;

use crate::{
    Backend, BackendKind, BackendTraits, Collective, Device, DeviceId, DeviceInfo, Error, Grid, MemoryInfo,
    RawBuffer, RawEvent, RawSlice, RawStream, Reduction, Result, Store, TorchDevice, connect_through_host,
    device::{HostFn, opened},
};
use context::Context;
use kernels::Kernels;
use memory::{GRANULARITY_BYTES, Memory, Place};
use stream::{Item, Kept, Recording, Stream};
use timeline::{Mark, Stamp};

/// The stream in place of libtorch's, which computes nothing here.
const DEFAULT: RawStream = RawStream(0);

/// See the module's description.
struct Vulkan {
    context: Arc<Context>,
    memory: Arc<Memory>,
    next_handle: AtomicU64,
    streams: Mutex<HashMap<u64, Stream>>,
    /// Threads of destroyed streams, which may still have work.
    ending: Mutex<Vec<JoinHandle<()>>>,
    events: Mutex<HashMap<u64, Event>>,
    /// Compiled when the first of them is needed.
    kernels: OnceLock<Result<Arc<Kernels>>>,
}

struct Event {
    is_timed: bool,
    /// The last one.
    record: Option<Record>,
}

/// The point of a stream at which an event was recorded, and the time, if the event is timed.
#[derive(Clone)]
struct Record {
    mark: Arc<Mark>,
    stamp: Option<Arc<Stamp>>,
}

/// The entry of the list in `lib.rs`.
pub(crate) static BACKEND: VulkanBackend = VulkanBackend;

/// Vulkan as a [`Backend`].
#[derive(Debug)]
pub(crate) struct VulkanBackend;

impl BackendKind {
    /// Any GPU with Vulkan compute.
    pub const VULKAN: Self = Self::new(&BackendTraits {
        shares_devices: true,
        runs_models: false,
        ..BackendTraits::accelerator("vulkan")
    });
}

impl Backend for VulkanBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::VULKAN
    }

    fn open(&self, ordinal: usize) -> Result<Arc<dyn Device>> {
        let id = DeviceId { backend: BackendKind::VULKAN, ordinal };
        opened::once(id, || Ok(Arc::new(Vulkan::open(id)?)))
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let found = loader::physical_devices()?;
        let id = |ordinal| DeviceId { backend: BackendKind::VULKAN, ordinal };
        Ok(found.iter().enumerate().map(|(ordinal, physical)| physical.info(id(ordinal))).collect())
    }

    fn connect(&self, _: &dyn Device, store: Store, _: Reduction) -> Result<Arc<dyn Collective>> {
        connect_through_host(store)
    }
}

impl Vulkan {
    /// Opens a device, and looks for everything that could be missing.
    fn open(id: DeviceId) -> Result<Self> {
        let mut found = loader::physical_devices()?;
        if id.ordinal >= found.len() {
            let reason = format!("{id} was asked for, and this process sees {} devices", found.len());
            return Err(Error::Unavailable { backend: id.backend, tried: Vec::new(), reason });
        }
        let context = Arc::new(Context::open(id, found.swap_remove(id.ordinal))?);
        let memory = Arc::new(Memory::new(&context)?);
        let device = Self {
            context,
            memory,
            next_handle: AtomicU64::new(DEFAULT.0 + 1),
            streams: Mutex::default(),
            ending: Mutex::default(),
            events: Mutex::default(),
            kernels: OnceLock::new(),
        };
        device.start(DEFAULT)?;
        Ok(device)
    }

    fn start(&self, handle: RawStream) -> Result<()> {
        let name = format!("{} stream {}", self.context.id, handle.0);
        let stream = Stream::spawn(&self.context, &self.memory, name)?;
        self.streams.lock().unwrap().insert(handle.0, stream);
        Ok(())
    }

    fn handle(&self) -> u64 {
        self.next_handle.fetch_add(1, Ordering::Relaxed)
    }

    fn enqueue(&self, stream: RawStream, item: Item) -> Result<()> {
        let streams = self.streams.lock().unwrap();
        match streams.get(&stream.0) {
            Some(stream) if stream.enqueue(item) => Ok(()),
            _ => Err(self.dead("stream", stream.0)),
        }
    }

    fn commands(&self, stream: RawStream, recording: Recording, kept: Option<Kept>) -> Result<()> {
        self.enqueue(stream, Item::Commands(recording, kept))
    }

    fn dead(&self, what: &str, handle: u64) -> Error {
        Error::Stream { device: self.context.id, message: format!("{what} {handle} does not exist any more") }
    }

    fn kernels(&self) -> Result<&Arc<Kernels>> {
        let compile = || {
            let compiled = Kernels::compile(&self.context).map(Arc::new);
            if let Err(error) = &compiled {
                tracing::warn!("no kernels on {}: {error}", self.context.id);
            }
            compiled
        };
        self.kernels.get_or_init(compile).as_ref().map_err(Clone::clone)
    }

    /// The last record of an event.
    fn record_of(&self, event: RawEvent) -> Result<Option<Record>> {
        let events = self.events.lock().unwrap();
        events.get(&event.0).map(|event| event.record.clone()).ok_or_else(|| self.dead("event", event.0))
    }

    /// The time stamp of an event that is reached.
    fn stamp_of(&self, event: RawEvent) -> Result<Arc<Stamp>> {
        if let Some(Record { mark, stamp: Some(stamp) }) = self.record_of(event)?
            && let Some(point) = mark.get()
            && point.is_reached()?
        {
            return Ok(stamp);
        }
        let message = "elapsed time of an event that is not reached".into();
        Err(Error::Stream { device: self.context.id, message })
    }

    /// Copies `len` bytes, which may be none.
    fn copy(&self, to: Place, from: Place, len: usize, who_reads: Reader, stream: RawStream) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let region = vk::BufferCopy { src_offset: from.offset, dst_offset: to.offset, size: len as u64 };
        let recording = move |device: &ash::Device, commands| {
            // SAFETY: the caller of the verb keeps both ranges alive until this is done; they do not overlap.
            unsafe { device.cmd_copy_buffer(commands, from.buffer, to.buffer, &[region]) };
            if matches!(who_reads, Reader::Host) {
                let written = [vk::MemoryBarrier::default()
                    .src_access_mask(vk::AccessFlags::TRANSFER_WRITE)
                    .dst_access_mask(vk::AccessFlags::HOST_READ)];
                let (from, to) = (vk::PipelineStageFlags::TRANSFER, vk::PipelineStageFlags::HOST);
                let none = vk::DependencyFlags::empty();
                // SAFETY: the structs live through the call.
                unsafe { device.cmd_pipeline_barrier(commands, from, to, none, &written, &[], &[]) };
            }
        };
        self.commands(stream, Box::new(recording), None)
    }
}

/// For whom a copy has to be visible besides later work of the device.
#[derive(Clone, Copy)]
enum Reader {
    Device,
    Host,
}

impl fmt::Debug for Vulkan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vulkan({}, {})", self.context.id, self.context.physical.name)
    }
}

// SAFETY: a stream submits in order, each submission after the one before; an event is a point in that order; memory
// is given back once its stream has come so far. The driver's calls that must not overlap are behind locks.
unsafe impl Device for Vulkan {
    fn id(&self) -> DeviceId {
        self.context.id
    }

    fn info(&self) -> DeviceInfo {
        self.context.physical.info(self.context.id)
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        Ok(self.memory.info())
    }

    fn torch_device(&self) -> Option<TorchDevice> {
        None
    }

    unsafe fn alloc(&self, len: usize) -> Result<RawBuffer> {
        self.memory.alloc(len)
    }

    unsafe fn free(&self, buffer: RawBuffer, _len: usize, stream: RawStream) -> Result<()> {
        let block = self.memory.remove(buffer)?;
        self.enqueue(stream, Item::Free(block))
    }

    fn address(&self, buffer: RawBuffer) -> Option<*mut u8> {
        Some(buffer.0 as *mut u8)
    }

    unsafe fn arena_reserve(&self, len: usize) -> Result<RawBuffer> {
        self.memory.reserve(len)
    }

    unsafe fn arena_map(&self, arena: RawBuffer, len: usize) -> Result<()> {
        self.memory.map(arena, len)
    }

    unsafe fn arena_unmap(&self, arena: RawBuffer, _len: usize) -> Result<()> {
        self.memory.unmap(arena)
    }

    unsafe fn arena_free(&self, arena: RawBuffer, _len: usize) -> Result<()> {
        self.memory.forget(arena)
    }

    fn arena_granularity_bytes(&self) -> usize {
        GRANULARITY_BYTES
    }

    unsafe fn alloc_pinned(&self, len: usize) -> Result<*mut u8> {
        self.memory.alloc_pinned(len)
    }

    unsafe fn free_pinned(&self, ptr: *mut u8, _len: usize) -> Result<()> {
        self.memory.free_pinned(ptr)
    }

    unsafe fn fill(&self, dst: RawSlice, byte: u8, stream: RawStream) -> Result<()> {
        if dst.len == 0 {
            return Ok(());
        }
        let (to, pattern) = (self.memory.of(dst)?, self.memory.pattern(byte));
        let (start, end) = (to.offset, to.offset + dst.len as u64);
        // The driver fills whole words; what is before and after them is copied.
        let first_word = start.next_multiple_of(4).min(end);
        let last_word = (end / 4 * 4).max(first_word);
        let edges = [(start, first_word), (last_word, end)].into_iter().filter(|(from, to)| from < to);
        let edges: Vec<_> = edges
            .map(|(from, end)| vk::BufferCopy {
                src_offset: pattern.offset,
                dst_offset: from,
                size: end - from,
            })
            .collect();
        let recording = move |device: &ash::Device, commands| {
            // SAFETY: the caller of the verb keeps the range alive until this is done.
            unsafe {
                if first_word < last_word {
                    let word = u32::from_ne_bytes([byte; 4]);
                    device.cmd_fill_buffer(commands, to.buffer, first_word, last_word - first_word, word);
                }
                if !edges.is_empty() {
                    device.cmd_copy_buffer(commands, pattern.buffer, to.buffer, &edges);
                }
            }
        };
        self.commands(stream, Box::new(recording), None)
    }

    unsafe fn copy_h2d(&self, dst: RawSlice, src: *const u8, stream: RawStream) -> Result<()> {
        let (to, from) = (self.memory.of(dst)?, self.memory.of_pinned(src, dst.len)?);
        self.copy(to, from, dst.len, Reader::Device, stream)
    }

    unsafe fn copy_d2h(&self, dst: *mut u8, src: RawSlice, stream: RawStream) -> Result<()> {
        let (to, from) = (self.memory.of_pinned(dst, src.len)?, self.memory.of(src)?);
        self.copy(to, from, src.len, Reader::Host, stream)
    }

    unsafe fn copy_d2d(&self, dst: RawSlice, src: RawSlice, stream: RawStream) -> Result<()> {
        self.copy(self.memory.of(dst)?, self.memory.of(src)?, dst.len, Reader::Device, stream)
    }

    fn stream_create(&self) -> Result<RawStream> {
        self.ending.lock().unwrap().retain(|thread| !thread.is_finished());
        let stream = RawStream(self.handle());
        self.start(stream)?;
        Ok(stream)
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> Result<()> {
        let ended = self.streams.lock().unwrap().remove(&stream.0);
        // The thread ends after its pending work, and nobody waits for it.
        let ended = ended.ok_or_else(|| self.dead("stream", stream.0))?;
        self.ending.lock().unwrap().push(ended.end());
        Ok(())
    }

    unsafe fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        let mark = Arc::new(Mark::default());
        let failure = {
            let streams = self.streams.lock().unwrap();
            streams.get(&stream.0).ok_or_else(|| self.dead("stream", stream.0))?.failure()
        };
        self.enqueue(stream, Item::Record(mark.clone()))?;
        let reached = mark.wait().wait();
        match failure.lock().unwrap().take() {
            Some(error) => Err(error),
            None => reached,
        }
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        match self.record_of(event)? {
            Some(record) => self.enqueue(stream, Item::Wait(record.mark)),
            None => Ok(()),
        }
    }

    fn torch_stream(&self) -> Result<RawStream> {
        Ok(DEFAULT)
    }

    fn event_create(&self, timed: bool) -> Result<RawEvent> {
        let handle = self.handle();
        self.events.lock().unwrap().insert(handle, Event { is_timed: timed, record: None });
        Ok(RawEvent(handle))
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> Result<()> {
        self.events.lock().unwrap().remove(&event.0).map(drop).ok_or_else(|| self.dead("event", event.0))
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let mark = Arc::new(Mark::default());
        let mut events = self.events.lock().unwrap();
        let state = events.get_mut(&event.0).ok_or_else(|| self.dead("event", event.0))?;
        let stamp = if state.is_timed { Some(Arc::new(Stamp::new(&self.context)?)) } else { None };
        state.record = Some(Record { mark: mark.clone(), stamp: stamp.clone() });
        drop(events);
        if let Some(stamp) = stamp {
            let pool = stamp.pool;
            let recording = move |device: &ash::Device, commands| {
                // SAFETY: the submission keeps the pool until it is done.
                unsafe {
                    device.cmd_reset_query_pool(commands, pool, 0, 1);
                    device.cmd_write_timestamp(commands, vk::PipelineStageFlags::BOTTOM_OF_PIPE, pool, 0);
                }
            };
            self.commands(stream, Box::new(recording), Some(stamp))?;
        }
        self.enqueue(stream, Item::Record(mark))
    }

    unsafe fn event_query(&self, event: RawEvent) -> Result<bool> {
        match self.record_of(event)? {
            None => Ok(true),
            Some(record) => record.mark.get().map_or(Ok(false), |point| point.is_reached()),
        }
    }

    unsafe fn event_elapsed(&self, start: RawEvent, end: RawEvent) -> Result<Duration> {
        self.stamp_of(start)?.until(&*self.stamp_of(end)?)
    }

    unsafe fn enqueue_host_fn(&self, stream: RawStream, work: HostFn) -> Result<()> {
        self.enqueue(stream, Item::Host(work))
    }

    fn has_kernels(&self) -> bool {
        self.kernels().is_ok()
    }

    unsafe fn launch(
        &self,
        kernel: &'static CStr,
        _grid: Grid,
        arguments: &mut [*mut c_void],
        stream: RawStream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        let work = unsafe { self.kernels()?.prepare(&self.memory, kernel, arguments)? };
        let Some(work) = work else { return Ok(()) };
        self.commands(stream, work.recording, Some(work.kept))?;
        match work.scratch {
            Some(block) => self.enqueue(stream, Item::Free(block)),
            None => Ok(()),
        }
    }
}

impl Drop for Vulkan {
    /// Waits for the threads, since the driver does not like it when a process ends in the midst of its calls. Their work is
    /// pending in the driver at most: what else a stream may have holds on to the device.
    fn drop(&mut self) {
        let streams = std::mem::take(self.streams.get_mut().unwrap());
        let mut threads = std::mem::take(self.ending.get_mut().unwrap());
        threads.extend(streams.into_values().map(Stream::end));
        // The last owner may have been a function on one of the threads, which must not wait for itself, nor for one
        // that waits for it.
        if threads.iter().all(|it| it.thread().id() != thread::current().id()) {
            threads.into_iter().for_each(|it| drop(it.join()));
        }
    }
}
