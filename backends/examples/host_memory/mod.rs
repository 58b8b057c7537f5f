//! A backend to start from: memory of the host, and streams that are threads. Collectives go over TCP, which moves
//! whatever the host can reach. `docs/adding_a_backend.md` says what each part becomes on an accelerator.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyroll_backends::{
    Backend, BackendKind, BackendTraits, Collective, Device, DeviceId, DeviceInfo, Error, HostFn, MemoryInfo,
    RawBuffer, RawEvent, RawSlice, RawStream, Reduction, Result, Store, TorchDevice, connect_through_host,
};

/// The entry of the list in `backends/src/lib.rs`.
pub static BACKEND: HostBackend = HostBackend;

/// The name, and the facts that differ from those of most accelerators.
const KIND: BackendKind =
    BackendKind::new(&BackendTraits { shares_devices: true, ..BackendTraits::accelerator("host_memory") });

const TOTAL_BYTES: usize = 4 << 30;
const ALIGNMENT: usize = 64;
/// libtorch computes on the caller's thread, and work that is enqueued on its stream runs there, at once.
const TORCH: RawStream = RawStream(u64::MAX);

/// The family: it opens devices and connects ranks.
#[derive(Debug)]
pub struct HostBackend;

impl Backend for HostBackend {
    fn kind(&self) -> BackendKind {
        KIND
    }

    fn open(&self, ordinal: usize) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(HostMemory { ordinal, ..HostMemory::default() }))
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![self.open(0)?.info()])
    }

    fn connect(&self, _: &dyn Device, store: Store, _: Reduction) -> Result<Arc<dyn Collective>> {
        connect_through_host(store)
    }
}

/// One device.
#[derive(Debug, Default)]
struct HostMemory {
    /// Tells ranks apart.
    ordinal: usize,
    allocated: Arc<AtomicUsize>,
    pinned: AtomicUsize,
    handles: AtomicU64,
    streams: Mutex<HashMap<u64, Stream>>,
    events: Mutex<HashMap<u64, Arc<Event>>>,
}

/// A stream's thread ends when its queue is dropped.
#[derive(Debug)]
struct Stream {
    queue: mpsc::Sender<HostFn>,
    /// The first error since the last synchronization.
    failure: Arc<Mutex<Option<String>>>,
}

#[derive(Debug, Default)]
struct Event {
    counters: Mutex<Counters>,
    advanced: Condvar,
}

#[derive(Debug, Default)]
struct Counters {
    recorded: u64,
    reached: u64,
    reached_at: Option<Instant>,
}

impl HostMemory {
    fn enqueue(&self, stream: RawStream, work: HostFn) -> Result<()> {
        if stream == TORCH {
            return run(work).map_err(|message| self.failed(message));
        }
        let streams = self.streams.lock().unwrap();
        streams[&stream.0].queue.send(work).map_err(|_| self.failed("its thread is gone"))
    }

    fn copy(&self, to: usize, from: usize, len: usize, stream: RawStream) -> Result<()> {
        let copy = move || {
            // SAFETY: the verb's caller keeps both ranges alive until this has run, and they do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, len) };
            Ok(())
        };
        self.enqueue(stream, Box::new(copy))
    }

    /// Returns the address of zeroed memory, which counts as `held`.
    fn take(&self, len: usize, held: &AtomicUsize) -> Result<u64> {
        let free_bytes = TOTAL_BYTES.saturating_sub(self.allocated.load(SeqCst));
        let full = Error::OutOfMemory { device: self.id(), requested_bytes: len, free_bytes };
        match Layout::from_size_align(len, ALIGNMENT) {
            Ok(layout) if len <= free_bytes => {
                // SAFETY: no caller asks for zero bytes.
                let address = unsafe { alloc_zeroed(layout) };
                if address.is_null() {
                    return Err(full);
                }
                held.fetch_add(len, SeqCst);
                Ok(address as u64)
            }
            _ => Err(full),
        }
    }

    fn event(&self, event: RawEvent) -> Arc<Event> {
        self.events.lock().unwrap()[&event.0].clone()
    }

    fn handle(&self) -> u64 {
        self.handles.fetch_add(1, SeqCst)
    }

    fn failed(&self, message: impl Into<String>) -> Error {
        Error::Stream { device: self.id(), message: message.into() }
    }
}

/// # Safety
/// `take` returned the address for this length and counter, and nothing uses it any more.
unsafe fn give_back(address: u64, len: usize, held: &AtomicUsize) {
    // SAFETY: the caller's promise; `take` made this layout.
    unsafe { dealloc(address as *mut u8, Layout::from_size_align_unchecked(len, ALIGNMENT)) }
    held.fetch_sub(len, SeqCst);
}

/// Turns a panic into an error, so that the stream's later work still runs.
fn run(work: HostFn) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        Err(text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default())
    })
}

fn address_of(slice: RawSlice) -> usize {
    slice.buffer.0 as usize + slice.offset
}

// SAFETY: a stream is one thread with a queue, an event is reached in queue order, and memory is the process's own.
unsafe impl Device for HostMemory {
    fn id(&self) -> DeviceId {
        DeviceId { backend: KIND, ordinal: self.ordinal }
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo { id: self.id(), name: "host".into(), total_bytes: Some(TOTAL_BYTES), details: vec![] }
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let (allocated_bytes, pinned_bytes) = (self.allocated.load(SeqCst), self.pinned.load(SeqCst));
        let free_bytes = TOTAL_BYTES.saturating_sub(allocated_bytes);
        Ok(MemoryInfo { free_bytes, total_bytes: TOTAL_BYTES, allocated_bytes, pinned_bytes })
    }

    fn torch_device(&self) -> Option<TorchDevice> {
        Some(TorchDevice::CPU)
    }

    unsafe fn alloc(&self, len: usize) -> Result<RawBuffer> {
        self.take(len, &self.allocated).map(RawBuffer)
    }

    unsafe fn free(&self, buffer: RawBuffer, len: usize, stream: RawStream) -> Result<()> {
        let allocated = self.allocated.clone();
        let free = move || {
            // SAFETY: the caller's promise, once the work in front of this is done.
            unsafe { give_back(buffer.0, len, &allocated) };
            Ok(())
        };
        self.enqueue(stream, Box::new(free))
    }

    fn address(&self, buffer: RawBuffer) -> Option<*mut u8> {
        Some(buffer.0 as *mut u8)
    }

    // An accelerator returns an arena's pages and keeps its addresses. Here they stay, and only count as returned.
    unsafe fn arena_reserve(&self, len: usize) -> Result<RawBuffer> {
        self.take(len, &AtomicUsize::new(0)).map(RawBuffer)
    }

    unsafe fn arena_map(&self, _: RawBuffer, len: usize) -> Result<()> {
        self.allocated.fetch_add(len, SeqCst);
        Ok(())
    }

    unsafe fn arena_unmap(&self, _: RawBuffer, len: usize) -> Result<()> {
        self.allocated.fetch_sub(len, SeqCst);
        Ok(())
    }

    unsafe fn arena_free(&self, arena: RawBuffer, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { give_back(arena.0, len, &AtomicUsize::new(len)) };
        Ok(())
    }

    fn arena_granularity_bytes(&self) -> usize {
        4096
    }

    unsafe fn alloc_pinned(&self, len: usize) -> Result<*mut u8> {
        self.take(len, &self.pinned).map(|address| address as *mut u8)
    }

    unsafe fn free_pinned(&self, ptr: *mut u8, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { give_back(ptr as u64, len, &self.pinned) };
        Ok(())
    }

    unsafe fn fill(&self, dst: RawSlice, byte: u8, stream: RawStream) -> Result<()> {
        let fill = move || {
            // SAFETY: the caller keeps `dst` alive until this has run.
            unsafe { std::ptr::write_bytes(address_of(dst) as *mut u8, byte, dst.len) };
            Ok(())
        };
        self.enqueue(stream, Box::new(fill))
    }

    unsafe fn copy_h2d(&self, dst: RawSlice, src: *const u8, stream: RawStream) -> Result<()> {
        self.copy(address_of(dst), src as usize, dst.len, stream)
    }

    unsafe fn copy_d2h(&self, dst: *mut u8, src: RawSlice, stream: RawStream) -> Result<()> {
        self.copy(dst as usize, address_of(src), src.len, stream)
    }

    unsafe fn copy_d2d(&self, dst: RawSlice, src: RawSlice, stream: RawStream) -> Result<()> {
        self.copy(address_of(dst), address_of(src), dst.len, stream)
    }

    fn stream_create(&self) -> Result<RawStream> {
        let (queue, work) = mpsc::channel::<HostFn>();
        let failure = Arc::new(Mutex::new(None));
        let first_failure = failure.clone();
        thread::spawn(move || {
            for work in work {
                if let Err(message) = run(work) {
                    first_failure.lock().unwrap().get_or_insert(message);
                }
            }
        });
        let handle = self.handle();
        self.streams.lock().unwrap().insert(handle, Stream { queue, failure });
        Ok(RawStream(handle))
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> Result<()> {
        self.streams.lock().unwrap().remove(&stream.0);
        Ok(())
    }

    unsafe fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        let (reached, wait) = mpsc::channel();
        self.enqueue(stream, Box::new(move || reached.send(()).map_err(|error| error.to_string())))?;
        wait.recv().map_err(|error| self.failed(error.to_string()))?;
        let streams = self.streams.lock().unwrap();
        let failure = streams.get(&stream.0).and_then(|stream| stream.failure.lock().unwrap().take());
        failure.map_or(Ok(()), |message| Err(self.failed(message)))
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        let event = self.event(event);
        // A later record does not move this wait.
        let target = event.counters.lock().unwrap().recorded;
        let wait = move || {
            let counters = event.counters.lock().unwrap();
            drop(event.advanced.wait_while(counters, |counters| counters.reached < target));
            Ok(())
        };
        self.enqueue(stream, Box::new(wait))
    }

    fn torch_stream(&self) -> Result<RawStream> {
        Ok(TORCH)
    }

    fn event_create(&self, _timed: bool) -> Result<RawEvent> {
        let handle = self.handle();
        self.events.lock().unwrap().insert(handle, Arc::default());
        Ok(RawEvent(handle))
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> Result<()> {
        self.events.lock().unwrap().remove(&event.0);
        Ok(())
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let event = self.event(event);
        event.counters.lock().unwrap().recorded += 1;
        let reach = move || {
            let mut counters = event.counters.lock().unwrap();
            counters.reached += 1;
            counters.reached_at = Some(Instant::now());
            event.advanced.notify_all();
            Ok(())
        };
        self.enqueue(stream, Box::new(reach))
    }

    unsafe fn event_query(&self, event: RawEvent) -> Result<bool> {
        let event = self.event(event);
        let counters = event.counters.lock().unwrap();
        Ok(counters.reached == counters.recorded)
    }

    unsafe fn event_elapsed(&self, start: RawEvent, end: RawEvent) -> Result<Duration> {
        let reached_at = |event| match *self.event(event).counters.lock().unwrap() {
            Counters { recorded, reached, reached_at: Some(time) } if reached == recorded => Ok(time),
            _ => Err(self.failed("elapsed time of an event that is not reached")),
        };
        Ok(reached_at(end)?.saturating_duration_since(reached_at(start)?))
    }

    unsafe fn enqueue_host_fn(&self, stream: RawStream, work: HostFn) -> Result<()> {
        self.enqueue(stream, work)
    }
}
