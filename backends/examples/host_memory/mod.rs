//! A backend in under 150 lines of code: memory of the host, and streams that are threads. Collectives are Gloo's, which
//! moves what the host can reach. `docs/adding_a_backend.md` says what each part becomes on an accelerator, and
//! `tests/conformance/tests/cpu.rs` holds it to the contract.
#![allow(clippy::unit_arg)] // `done` takes whatever a verb ends with

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::{collections::HashMap, time::Duration, time::Instant};

use anyroll_backends::{BackendKind, Device, DeviceId, DeviceInfo, Error, HostFn, MemoryInfo, Result};
use anyroll_backends::{RawBuffer, RawEvent, RawSlice, RawStream, TorchDevice};

const TOTAL_BYTES: usize = 4 << 30;
const ALIGNMENT: usize = 64;
/// libtorch computes on the caller's thread, and what is enqueued on its stream runs there, at once.
const TORCH: RawStream = RawStream(u64::MAX);

/// The device.
#[derive(Debug, Default)]
pub struct HostMemory {
    ordinal: usize,
    allocated: Arc<AtomicUsize>,
    pinned: AtomicUsize,
    handles: AtomicU64,
    streams: Mutex<HashMap<u64, Queue>>,
    events: Mutex<HashMap<u64, Arc<Event>>>,
}

/// A stream: its thread ends when the sender is gone. The first error waits for `stream_synchronize`.
type Queue = (mpsc::Sender<HostFn>, Arc<Mutex<Option<String>>>);

/// How often an event was recorded, how often it was reached, and when it was last.
type Event = (Mutex<(u64, u64, Option<Instant>)>, Condvar);

/// A panic is an error, and the stream goes on.
fn run(work: HostFn) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|it| (*it).to_owned());
        Err(text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default())
    })
}

#[rustfmt::skip] // what fits in a line is one, here and below
impl HostMemory {
    /// Opens it; `ordinal` tells ranks apart.
    pub fn open(ordinal: usize) -> Arc<dyn Device> { Arc::new(Self { ordinal, ..Self::default() }) }

    fn failed(&self, message: impl Into<String>) -> Error { Error::Stream { device: self.id(), message: message.into() } }
    fn event(&self, event: RawEvent) -> Arc<Event> { self.events.lock().unwrap()[&event.0].clone() }
    fn at(slice: RawSlice) -> usize { slice.buffer.0 as usize + slice.offset }

    fn enqueue(&self, stream: RawStream, work: HostFn) -> Result<()> {
        if stream == TORCH { return run(work).map_err(|message| self.failed(message)); }
        self.streams.lock().unwrap()[&stream.0].0.send(work).map_err(|_| self.failed("its thread is gone"))
    }
    fn copy(&self, to: usize, from: usize, len: usize, stream: RawStream) -> Result<()> {
        // SAFETY: the verb's caller keeps both ranges alive until this has run, and they do not overlap.
        let copy = move || unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, len) };
        self.enqueue(stream, Box::new(move || done(copy())))
    }

    /// The address of zeroed memory, counted as `held`.
    fn take(&self, len: usize, held: &AtomicUsize) -> Result<u64> {
        let free_bytes = TOTAL_BYTES.saturating_sub(self.allocated.load(SeqCst));
        let layout = Layout::from_size_align(len, ALIGNMENT).ok().filter(|_| len <= free_bytes);
        // SAFETY: nobody asks for no bytes.
        let address = layout.map_or(std::ptr::null_mut(), |layout| unsafe { alloc_zeroed(layout) });
        let full = Error::OutOfMemory { device: self.id(), requested_bytes: len, free_bytes };
        held.fetch_add(if address.is_null() { 0 } else { len }, SeqCst);
        if address.is_null() { Err(full) } else { Ok(address as u64) }
    }
}

fn done<T, E>(_: T) -> Result<(), E> {
    Ok(())
}

/// # Safety
/// `take` returned the address for this length and counter, and nothing uses it any more.
unsafe fn give_back(address: u64, len: usize, held: &AtomicUsize) {
    // SAFETY: the caller's promise; `take` made this layout.
    unsafe { dealloc(address as *mut u8, Layout::from_size_align_unchecked(len, ALIGNMENT)) }
    held.fetch_sub(len, SeqCst);
}

// SAFETY: a stream is one thread with a queue, an event is reached in queue order, and memory is the process's own.
#[rustfmt::skip]
unsafe impl Device for HostMemory {
    fn id(&self) -> DeviceId { DeviceId { backend: BackendKind::Cpu, ordinal: self.ordinal } }
    fn info(&self) -> DeviceInfo { DeviceInfo { id: self.id(), name: "host".into(), total_bytes: None, details: vec![] } }
    fn torch_device(&self) -> Option<TorchDevice> { Some(TorchDevice { kind: 0, index: -1 }) }
    fn torch_stream(&self) -> Result<RawStream> { Ok(TORCH) }
    fn memory_info(&self) -> Result<MemoryInfo> {
        let (allocated_bytes, pinned_bytes) = (self.allocated.load(SeqCst), self.pinned.load(SeqCst));
        let free_bytes = TOTAL_BYTES.saturating_sub(allocated_bytes);
        Ok(MemoryInfo { free_bytes, total_bytes: TOTAL_BYTES, allocated_bytes, pinned_bytes })
    }

    unsafe fn alloc(&self, len: usize) -> Result<RawBuffer> { self.take(len, &self.allocated).map(RawBuffer) }
    unsafe fn free(&self, buffer: RawBuffer, len: usize, stream: RawStream) -> Result<()> {
        let allocated = self.allocated.clone();
        // SAFETY: the caller's promise, once the work before this is done.
        self.enqueue(stream, Box::new(move || done(unsafe { give_back(buffer.0, len, &allocated) })))
    }
    fn address(&self, buffer: RawBuffer) -> Option<*mut u8> { Some(buffer.0 as *mut u8) }
    unsafe fn alloc_pinned(&self, len: usize) -> Result<*mut u8> { Ok(self.take(len, &self.pinned)? as *mut u8) }
    unsafe fn free_pinned(&self, ptr: *mut u8, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        done(unsafe { give_back(ptr as u64, len, &self.pinned) })
    }

    // An accelerator gives an arena's pages back and keeps its addresses. Here they stay, and only count as gone.
    fn arena_granularity_bytes(&self) -> usize { 4096 }
    unsafe fn arena_reserve(&self, len: usize) -> Result<RawBuffer> { self.take(len, &0.into()).map(RawBuffer) }
    unsafe fn arena_map(&self, _: RawBuffer, len: usize) -> Result<()> { done(self.allocated.fetch_add(len, SeqCst)) }
    unsafe fn arena_unmap(&self, _: RawBuffer, len: usize) -> Result<()> { done(self.allocated.fetch_sub(len, SeqCst)) }
    unsafe fn arena_free(&self, arena: RawBuffer, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        done(unsafe { give_back(arena.0, len, &len.into()) })
    }

    unsafe fn fill(&self, dst: RawSlice, byte: u8, stream: RawStream) -> Result<()> {
        // SAFETY: the caller keeps `dst` alive until this has run.
        let fill = move || unsafe { std::ptr::write_bytes(Self::at(dst) as *mut u8, byte, dst.len) };
        self.enqueue(stream, Box::new(move || done(fill())))
    }
    unsafe fn copy_h2d(&self, dst: RawSlice, src: *const u8, stream: RawStream) -> Result<()> {
        self.copy(Self::at(dst), src as usize, dst.len, stream)
    }
    unsafe fn copy_d2h(&self, dst: *mut u8, src: RawSlice, stream: RawStream) -> Result<()> {
        self.copy(dst as usize, Self::at(src), src.len, stream)
    }
    unsafe fn copy_d2d(&self, dst: RawSlice, src: RawSlice, stream: RawStream) -> Result<()> {
        self.copy(Self::at(dst), Self::at(src), dst.len, stream)
    }

    fn stream_create(&self) -> Result<RawStream> {
        let (sender, queue) = mpsc::channel::<HostFn>();
        let (failure, handle) = (Arc::new(Mutex::new(None)), self.handles.fetch_add(1, SeqCst));
        self.streams.lock().unwrap().insert(handle, (sender, failure.clone()));
        let keep_first = move |message| done::<_, ()>(failure.lock().unwrap().get_or_insert(message));
        std::thread::spawn(move || queue.into_iter().try_for_each(|work| run(work).or_else(&keep_first)));
        Ok(RawStream(handle))
    }
    unsafe fn stream_destroy(&self, it: RawStream) -> Result<()> { done(self.streams.lock().unwrap().remove(&it.0)) }
    unsafe fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        let (send, reached) = mpsc::channel();
        self.enqueue(stream, Box::new(move || send.send(()).map_err(|it| it.to_string())))?;
        reached.recv().map_err(|it| self.failed(it.to_string()))?;
        let failure = self.streams.lock().unwrap().get(&stream.0).and_then(|it| it.1.lock().unwrap().take());
        failure.map_or(Ok(()), |message| Err(self.failed(message)))
    }
    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        let event = self.event(event);
        let target = event.0.lock().unwrap().0; // a later record does not move this wait
        let wait = move || event.1.wait_while(event.0.lock().unwrap(), |it| it.1 < target).is_ok();
        self.enqueue(stream, Box::new(move || done(wait())))
    }
    unsafe fn enqueue_host_fn(&self, stream: RawStream, work: HostFn) -> Result<()> { self.enqueue(stream, work) }

    fn event_create(&self, _timed: bool) -> Result<RawEvent> {
        let handle = self.handles.fetch_add(1, SeqCst);
        self.events.lock().unwrap().insert(handle, Arc::default());
        Ok(RawEvent(handle))
    }
    unsafe fn event_destroy(&self, it: RawEvent) -> Result<()> { done(self.events.lock().unwrap().remove(&it.0)) }
    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let event = self.event(event);
        event.0.lock().unwrap().0 += 1;
        self.enqueue(stream, Box::new(move || {
            let mut state = event.0.lock().unwrap();
            (state.1, state.2) = (state.1 + 1, Some(Instant::now()));
            done(event.1.notify_all())
        }))
    }
    unsafe fn event_query(&self, event: RawEvent) -> Result<bool> {
        let (recorded, reached, _) = *self.event(event).0.lock().unwrap();
        Ok(recorded == reached)
    }
    unsafe fn event_elapsed(&self, start: RawEvent, end: RawEvent) -> Result<Duration> {
        let reached = |event| match *self.event(event).0.lock().unwrap() {
            (recorded, reached, Some(time)) if recorded == reached => Ok(time),
            _ => Err(self.failed("elapsed time of an event that is not reached")),
        };
        Ok(reached(end)?.saturating_duration_since(reached(start)?))
    }
}
