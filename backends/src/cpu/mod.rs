//! The CPU backend: the reference for all others.
//!
//! A stream is a worker thread, as asynchronous as a GPU's, so that a missing wait fails here and not first on
//! eight GPUs. libtorch computes on the caller's thread, so its stream is *inline*: what is enqueued there runs
//! at once, and waiting for an event blocks the caller.

mod stream;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::{
    Backend, BackendKind, BackendTraits, Collective, Device, DeviceId, DeviceInfo, Error, MemoryInfo,
    RawBuffer, RawEvent, RawSlice, RawStream, Reduction, Result, Store, TorchDevice, connect_through_host,
    device::HostFn,
    host::{memory, work::run},
};
use stream::{EventState, Worker};

/// The stream on which libtorch computes: the caller's own thread.
const INLINE: RawStream = RawStream(0);

/// The host's processor as a [`Backend`].
#[derive(Debug)]
pub(crate) struct Cpu;

/// The entry of the list in `lib.rs`.
pub(crate) static BACKEND: Cpu = Cpu;

impl BackendKind {
    /// The host's processor; the reference for all others.
    pub const CPU: Self = Self::new(&BackendTraits {
        is_host: true,
        shares_devices: true,
        adds_by_rows: true,
        ..BackendTraits::accelerator("cpu")
    });
}

impl Backend for Cpu {
    fn kind(&self) -> BackendKind {
        BackendKind::CPU
    }

    /// A device of its own for each call; `ordinal` only tells ranks apart.
    fn open(&self, ordinal: usize) -> Result<Arc<dyn Device>> {
        Ok(CpuDevice::open(ordinal))
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![CpuDevice::open(0).info()])
    }

    fn connect(&self, _: &dyn Device, store: Store, _: Reduction) -> Result<Arc<dyn Collective>> {
        connect_through_host(store)
    }
}

/// See the module's description.
#[derive(Debug)]
struct CpuDevice {
    id: DeviceId,
    allocated_bytes: Arc<AtomicUsize>,
    pinned_bytes: AtomicUsize,
    next_handle: AtomicU64,
    streams: Mutex<HashMap<u64, Worker>>,
    events: Mutex<HashMap<u64, Arc<EventState>>>,
}

impl CpuDevice {
    fn open(ordinal: usize) -> Arc<Self> {
        memory::keep_freed_memory();
        Arc::new(Self {
            id: DeviceId { backend: BackendKind::CPU, ordinal },
            allocated_bytes: Arc::default(),
            pinned_bytes: AtomicUsize::new(0),
            next_handle: AtomicU64::new(1),
            streams: Mutex::default(),
            events: Mutex::default(),
        })
    }

    fn handle(&self) -> u64 {
        self.next_handle.fetch_add(1, Ordering::Relaxed)
    }

    /// Runs `work` in order with `stream`.
    fn enqueue(&self, stream: RawStream, work: HostFn) -> Result<()> {
        if stream == INLINE {
            return run(work).map_err(|message| Error::Stream { device: self.id, message });
        }
        let streams = self.streams.lock().unwrap();
        match streams.get(&stream.0) {
            Some(worker) => {
                worker.enqueue(work).map_err(|message| Error::Stream { device: self.id, message })
            }
            None => Err(self.dead("stream", stream.0)),
        }
    }

    fn event(&self, event: RawEvent) -> Result<Arc<EventState>> {
        self.events.lock().unwrap().get(&event.0).cloned().ok_or_else(|| self.dead("event", event.0))
    }

    fn dead(&self, what: &'static str, handle: u64) -> Error {
        Error::Stream { device: self.id, message: format!("{what} {handle} does not exist any more") }
    }

    fn out_of_memory(&self, requested_bytes: usize) -> Error {
        let free_bytes = memory::host().map_or(0, |(free, _)| free);
        Error::OutOfMemory { device: self.id, requested_bytes, free_bytes }
    }
}

/// An address that may cross to a worker thread: the caller of the verb vouches for what lies behind it.
struct Address(*mut u8);
// SAFETY: a plain number until it is used, and its users state why they may.
unsafe impl Send for Address {}

impl Address {
    fn of(slice: RawSlice) -> Self {
        Self((slice.buffer.0 as usize + slice.offset) as *mut u8)
    }

    /// By method, so that closures capture the whole (`Send`) value and not the bare pointer.
    fn get(&self) -> *mut u8 {
        self.0
    }
}

// SAFETY: a stream is one thread with a queue; an event is recorded in queue order and waited for on the
// waiting stream's own thread; memory is the process's own.
unsafe impl Device for CpuDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn info(&self) -> DeviceInfo {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let details = vec![
            ("cores".to_owned(), threads.to_string()),
            ("libtorch threads".to_owned(), tch::get_num_threads().to_string()),
        ];
        let total_bytes = memory::host().ok().map(|(_, total)| total);
        DeviceInfo { id: self.id, name: memory::processor_name(), total_bytes, details }
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let (free_bytes, total_bytes) = memory::host().map_err(|source| Error::Driver {
            device: self.id,
            call: "read /proc/meminfo",
            code: source.raw_os_error().unwrap_or(0).into(),
            message: source.to_string(),
        })?;
        Ok(MemoryInfo {
            free_bytes,
            total_bytes,
            allocated_bytes: self.allocated_bytes.load(Ordering::Relaxed),
            pinned_bytes: self.pinned_bytes.load(Ordering::Relaxed),
        })
    }

    fn torch_device(&self) -> Option<TorchDevice> {
        Some(TorchDevice::CPU)
    }

    unsafe fn alloc(&self, len: usize) -> Result<RawBuffer> {
        let address = memory::map(len, memory::Access::ReadWrite).ok_or_else(|| self.out_of_memory(len))?;
        self.allocated_bytes.fetch_add(len, Ordering::Relaxed);
        Ok(RawBuffer(address as u64))
    }

    unsafe fn free(&self, buffer: RawBuffer, len: usize, stream: RawStream) -> Result<()> {
        let allocated = self.allocated_bytes.clone();
        self.enqueue(
            stream,
            Box::new(move || {
                // SAFETY: `alloc` made this mapping, and the caller gave it up.
                unsafe { memory::unmap(buffer.0 as *mut u8, len) };
                allocated.fetch_sub(len, Ordering::Relaxed);
                Ok(())
            }),
        )
    }

    fn address(&self, buffer: RawBuffer) -> Option<*mut u8> {
        Some(buffer.0 as *mut u8)
    }

    unsafe fn arena_reserve(&self, len: usize) -> Result<RawBuffer> {
        let address = memory::map(len, memory::Access::None).ok_or_else(|| self.out_of_memory(len))?;
        Ok(RawBuffer(address as u64))
    }

    unsafe fn arena_map(&self, arena: RawBuffer, len: usize) -> Result<()> {
        // SAFETY: the caller holds this reservation.
        if !unsafe { memory::commit(arena.0 as *mut u8, len) } {
            return Err(self.out_of_memory(len));
        }
        self.allocated_bytes.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn arena_unmap(&self, arena: RawBuffer, len: usize) -> Result<()> {
        // SAFETY: the caller holds this reservation, and nothing uses it.
        unsafe { memory::decommit(arena.0 as *mut u8, len) };
        self.allocated_bytes.fetch_sub(len, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn arena_free(&self, arena: RawBuffer, len: usize) -> Result<()> {
        // SAFETY: the caller gave the reservation up.
        unsafe { memory::unmap(arena.0 as *mut u8, len) };
        Ok(())
    }

    fn arena_granularity_bytes(&self) -> usize {
        memory::page_bytes()
    }

    fn arena_is_zeroed(&self) -> bool {
        true
    }

    unsafe fn alloc_pinned(&self, len: usize) -> Result<*mut u8> {
        let address = memory::map(len, memory::Access::ReadWrite).ok_or_else(|| self.out_of_memory(len))?;
        self.pinned_bytes.fetch_add(len, Ordering::Relaxed);
        Ok(address)
    }

    unsafe fn free_pinned(&self, ptr: *mut u8, len: usize) -> Result<()> {
        // SAFETY: `alloc_pinned` made this mapping, and the caller gave it up.
        unsafe { memory::unmap(ptr, len) };
        self.pinned_bytes.fetch_sub(len, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn fill(&self, dst: RawSlice, byte: u8, stream: RawStream) -> Result<()> {
        let (to, len) = (Address::of(dst), dst.len);
        self.enqueue(
            stream,
            Box::new(move || {
                // SAFETY: the caller keeps `dst` alive until this has run.
                unsafe { std::ptr::write_bytes(to.get(), byte, len) };
                Ok(())
            }),
        )
    }

    unsafe fn copy_h2d(&self, dst: RawSlice, src: *const u8, stream: RawStream) -> Result<()> {
        self.copy(Address::of(dst), Address(src.cast_mut()), dst.len, stream)
    }

    unsafe fn copy_d2h(&self, dst: *mut u8, src: RawSlice, stream: RawStream) -> Result<()> {
        self.copy(Address(dst), Address::of(src), src.len, stream)
    }

    unsafe fn copy_d2d(&self, dst: RawSlice, src: RawSlice, stream: RawStream) -> Result<()> {
        self.copy(Address::of(dst), Address::of(src), dst.len, stream)
    }

    fn stream_create(&self) -> Result<RawStream> {
        let handle = self.handle();
        let worker = Worker::spawn(format!("{} stream {handle}", self.id))
            .map_err(|source| Error::Stream { device: self.id, message: source.to_string() })?;
        self.streams.lock().unwrap().insert(handle, worker);
        Ok(RawStream(handle))
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> Result<()> {
        // Dropping the queue's sender ends the thread after its pending work; nobody waits for it.
        self.streams.lock().unwrap().remove(&stream.0).map(drop).ok_or_else(|| self.dead("stream", stream.0))
    }

    unsafe fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        if stream == INLINE {
            return Ok(());
        }
        let failure = {
            let streams = self.streams.lock().unwrap();
            streams.get(&stream.0).ok_or_else(|| self.dead("stream", stream.0))?.failure()
        };
        let reached = Arc::new(EventState::default());
        let target = reached.begin_record();
        let mark = reached.clone();
        self.enqueue(
            stream,
            Box::new(move || {
                mark.finish_record(target);
                Ok(())
            }),
        )?;
        reached.wait(target);
        match failure.lock().unwrap().take() {
            Some(message) => Err(Error::Stream { device: self.id, message }),
            None => Ok(()),
        }
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        let event = self.event(event)?;
        let target = event.recorded();
        if event.is_complete(target) {
            return Ok(());
        }
        self.enqueue(
            stream,
            Box::new(move || {
                event.wait(target);
                Ok(())
            }),
        )
    }

    fn torch_stream(&self) -> Result<RawStream> {
        Ok(INLINE)
    }

    fn event_create(&self, _timed: bool) -> Result<RawEvent> {
        let handle = self.handle();
        self.events.lock().unwrap().insert(handle, Arc::default());
        Ok(RawEvent(handle))
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> Result<()> {
        self.events.lock().unwrap().remove(&event.0).map(drop).ok_or_else(|| self.dead("event", event.0))
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let event = self.event(event)?;
        let target = event.begin_record();
        self.enqueue(
            stream,
            Box::new(move || {
                event.finish_record(target);
                Ok(())
            }),
        )
    }

    unsafe fn event_query(&self, event: RawEvent) -> Result<bool> {
        let event = self.event(event)?;
        Ok(event.is_complete(event.recorded()))
    }

    unsafe fn event_elapsed(&self, start: RawEvent, end: RawEvent) -> Result<Duration> {
        match (self.event(start)?.finished_at(), self.event(end)?.finished_at()) {
            (Some(start), Some(end)) => Ok(end.saturating_duration_since(start)),
            _ => Err(Error::Stream {
                device: self.id,
                message: "elapsed time of an event that is not complete".into(),
            }),
        }
    }

    unsafe fn enqueue_host_fn(&self, stream: RawStream, work: HostFn) -> Result<()> {
        self.enqueue(stream, work)
    }
}

impl CpuDevice {
    fn copy(&self, dst: Address, src: Address, len: usize, stream: RawStream) -> Result<()> {
        self.enqueue(
            stream,
            Box::new(move || {
                // SAFETY: the caller of the verb keeps both ranges alive, and they do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(src.get().cast_const(), dst.get(), len) };
                Ok(())
            }),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    // The safe `Event` is recorded once, when it is made. These are the rules about other ones.

    #[test]
    fn an_event_that_was_never_recorded_is_complete() {
        let device = CpuDevice::open(0);
        let (stream, event) = (device.stream_create().unwrap(), device.event_create(false).unwrap());
        // SAFETY: both are live until the end.
        unsafe {
            assert!(device.event_query(event).unwrap());
            device.stream_wait_event(stream, event).unwrap();
            device.stream_synchronize(stream).unwrap();
            device.stream_destroy(stream).unwrap();
            device.event_destroy(event).unwrap();
        }
    }

    #[test]
    fn a_wait_is_for_the_last_record_before_it() {
        let device = CpuDevice::open(0);
        let (first, second) = (device.stream_create().unwrap(), device.stream_create().unwrap());
        let event = device.event_create(false).unwrap();
        let (open, opened) = mpsc::channel::<()>();
        // SAFETY: all are live until their end; a wait that was enqueued outlives its event.
        unsafe {
            device.event_record(event, first).unwrap();
            device.stream_wait_event(second, event).unwrap();
            device
                .enqueue_host_fn(first, Box::new(move || opened.recv().map_err(|e| e.to_string())))
                .unwrap();
            device.event_record(event, first).unwrap();
            assert!(!device.event_query(event).unwrap());
            device.stream_synchronize(second).unwrap(); // returns: the second record came after the wait

            device.stream_wait_event(second, event).unwrap();
            device.event_destroy(event).unwrap();
            open.send(()).unwrap();
            device.stream_synchronize(second).unwrap();
            device.stream_destroy(first).unwrap();
            device.stream_destroy(second).unwrap();
        }
    }

    #[test]
    fn threads_of_streams_end_with_them() {
        let device = CpuDevice::open(77);
        let streams: Vec<_> = (0..20).map(|_| device.stream_create().unwrap()).collect();
        await_threads("cpu:77 stream", 20);
        for stream in streams {
            // SAFETY: live until here.
            unsafe { device.stream_destroy(stream).unwrap() };
        }
        await_threads("cpu:77 stream", 0);
    }

    /// Returns once this process has `count` threads whose name starts with `prefix`.
    fn await_threads(prefix: &str, count: usize) {
        let is_named = |task: &std::path::Path| {
            std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.starts_with(prefix))
        };
        let start = std::time::Instant::now();
        loop {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap();
            let found = tasks.flatten().filter(|task| is_named(&task.path())).count();
            if found == count {
                return;
            }
            assert!(start.elapsed() < Duration::from_secs(10), "{found} threads, not {count}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
