//! The Ascend backend: Huawei's runtime library, ACL, and its collectives, HCCL. It works in the device's default
//! context, as libtorch and HCCL do, so that streams, events and addresses pass between the three.
//!
//! No run-time compiler takes our kernels, so operations are libtorch's. libtorch has the device as PrivateUse1, for which
//! tch has no name: `shim/mps.cpp` borrows one that is unused here.
//!
//! Releases are in stream order. The library's own release of memory knows no stream, and that of a stream waits for its
//! work, so both are kept with an event; a later call releases or reuses them.

mod acl;
mod arena;
mod context;
mod copies;
mod hccl;

use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::{
    Backend, BackendKind, BackendTraits, Collective, Device, DeviceId, DeviceInfo, DeviceLoad, Diagnosis,
    Error, Limits, MemoryInfo, RawBuffer, RawEvent, RawSlice, RawStream, Reduction, Result, Store,
    TorchDevice,
    device::{HostFn, opened},
    ffi::{self, library},
    host::work::HostFailures,
    safe::stream::report,
};
use acl::{AI_CORES, Acl, EVENT_COMPLETE, EVENT_SYNC, EVENT_TIME_LINE, HUGE_FIRST, Handle, TOTAL_MEMORY};
use arena::Arenas;
use context::Context;
use copies::{Copier, Copy, Pinned};
use hccl::Hccl;

/// `c10::DeviceType::PrivateUse1`
const TORCH_KIND: c_int = 20;
/// Time that an allocation which finds no memory waits for pending releases.
const RELEASES_TIMEOUT_MS: i32 = 10_000;

/// The open device. A process has one at a time: its name in tch has no number.
static OPEN: Mutex<Option<usize>> = Mutex::new(None);

/// See the module's description.
#[derive(Debug)]
struct Npu {
    info: DeviceInfo,
    granularity_bytes: usize,
    allocated_bytes: AtomicUsize,
    pinned: Pinned,
    arenas: Arenas,
    copier: Copier,
    failures: HostFailures,
    retired: Mutex<Vec<Retired>>,
    /// Unused streams without work. Hardware has some two thousand.
    idle: Mutex<Vec<Handle>>,
    context: Arc<Context>,
}

/// A resource that is unused once an event is reached.
#[derive(Debug)]
struct Retired {
    after: Handle,
    what: Resource,
}

#[derive(Debug)]
enum Resource {
    Memory(u64),
    Stream(Handle),
}

/// The entry of the list in `lib.rs`.
pub(crate) static BACKEND: Ascend = Ascend;

/// Ascend as a [`Backend`].
#[derive(Debug)]
pub(crate) struct Ascend;

impl BackendKind {
    /// Huawei Ascend.
    pub const ASCEND: Self = Self::new(&BackendTraits::accelerator("ascend"));
}

impl Backend for Ascend {
    fn kind(&self) -> BackendKind {
        BackendKind::ASCEND
    }

    fn open(&self, ordinal: usize) -> Result<Arc<dyn Device>> {
        let id = DeviceId { backend: BackendKind::ASCEND, ordinal };
        opened::once(id, || Ok(Arc::new(Npu::open(id)?)))
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let acl = Acl::get()?;
        let devices = (0..count(acl)?).map(|ordinal| info(acl, ordinal)).collect();
        open_libtorch()?;
        devices
    }

    fn diagnose(&self, _ordinal: usize) -> Result<Diagnosis> {
        let found = hccl::find().map_or_else(|error| error.to_string(), |()| "found".into());
        Ok(Diagnosis { details: vec![("HCCL".into(), found)], limits: Limits::default() })
    }

    fn connect(&self, device: &dyn Device, store: Store, _: Reduction) -> Result<Arc<dyn Collective>> {
        // The open device, without the wrapper that a test may have around it: operations have streams of their own.
        Ok(Arc::new(Hccl::connect(self.open(device.id().ordinal)?, store)?))
    }
}

fn count(acl: &Acl) -> Result<usize> {
    match acl.count()? {
        0 => Err(acl::unavailable(&["aclrtGetDeviceCount"], "this process sees no device")),
        count => Ok(count),
    }
}

fn info(acl: &Acl, ordinal: usize) -> Result<DeviceInfo> {
    let id = DeviceId { backend: BackendKind::ASCEND, ordinal };
    let attribute = |number| acl.attribute(ordinal, number).map_err(|failed| acl.error(id, failed));
    let total_bytes = attribute(TOTAL_MEMORY)? as usize;
    let details = [
        ("driver", acl.version.clone()),
        ("memory", format!("{:.1} GiB", total_bytes as f64 / f64::from(1 << 30))),
        ("AI cores", attribute(AI_CORES)?.to_string()),
    ];
    let details = details.map(|(name, value)| (name.to_owned(), value)).to_vec();
    Ok(DeviceInfo { id, name: acl.soc_name(), total_bytes: Some(total_bytes), details })
}

fn open_libtorch() -> Result<()> {
    const HINT: &str = "build libtorch_npu 2.11 without Python, and name its folder in ANYROLL_LIBRARIES";
    static OPENED: OnceLock<Result<()>> = OnceLock::new();
    let open = || library::open_libtorch(BackendKind::ASCEND, "libtorch_npu.so", TORCH_KIND, HINT);
    OPENED.get_or_init(open).clone()
}

impl Npu {
    /// Opens a device, and looks for everything that could be missing.
    fn open(id: DeviceId) -> Result<Self> {
        let acl = Acl::get()?;
        let ordinal = id.ordinal;
        let count = count(acl)?;
        if ordinal >= count {
            let reason = format!("{id} was asked for, and this process sees {count} devices");
            return Err(acl::unavailable(&acl::FILES, reason));
        }
        let mut open = OPEN.lock().unwrap();
        if let Some(other) = *open {
            let reason = format!("this process has device {other} open, and can have one");
            return Err(acl::unavailable(&[], reason));
        }
        open_libtorch()?;
        let context = Arc::new(Context::new(acl, id)?);
        let granularity_bytes = arena::granularity_bytes(&context)?;
        // SAFETY: libtorch's support of the device is loaded.
        if unsafe { ffi::anyroll_npu_start(ordinal as c_int) } != 0 {
            return Err(Error::Torch(ffi::last_error()));
        }
        *open = Some(ordinal);
        Ok(Self {
            info: info(acl, ordinal)?,
            granularity_bytes,
            allocated_bytes: AtomicUsize::new(0),
            pinned: Pinned::default(),
            arenas: Arenas::default(),
            copier: Copier::default(),
            failures: HostFailures::default(),
            retired: Mutex::default(),
            idle: Mutex::default(),
            context,
        })
    }

    /// Retires `what` after the work that is on `stream` now.
    fn retire(&self, what: Resource, stream: RawStream) -> Result<()> {
        let mut after = 0;
        // SAFETY: a number of our own; the caller's stream.
        self.context.run(|acl| unsafe {
            acl.event_create(&mut after, EVENT_SYNC)?;
            acl.event_record(after, handle(stream.0))
        })?;
        self.retired.lock().unwrap().push(Retired { after, what });
        Ok(())
    }

    /// Releases retired resources whose event is reached. Returns true if some are left.
    fn reap(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        let mut retired = self.retired.lock().unwrap();
        for one in std::mem::take(&mut *retired) {
            if !self.is_reached(one.after)? {
                retired.push(one);
                continue;
            }
            // SAFETY: the event is ours alone; the memory was given up, and its last work is done.
            let released = unsafe {
                self.context.acl.event_destroy(one.after).and_then(|()| match one.what {
                    Resource::Memory(address) => self.context.acl.free(address as *mut c_void),
                    Resource::Stream(stream) => {
                        self.idle.lock().unwrap().push(stream);
                        Ok(())
                    }
                })
            };
            report(released.map_err(|failed| self.context.error(failed)));
        }
        Ok(!retired.is_empty())
    }

    /// The context is current.
    fn is_reached(&self, event: Handle) -> Result<bool> {
        let mut status = 0;
        // SAFETY: the caller's event, and a number of our own.
        unsafe { self.context.acl.event_status(event, &mut status) }
            .map_err(|failed| self.context.error(failed))?;
        Ok(status == EVENT_COMPLETE)
    }

    fn try_alloc(&self, len: usize) -> Result<u64, library::Failed> {
        let mut address = ptr::null_mut();
        // SAFETY: an address of our own.
        unsafe { self.context.acl.malloc(&mut address, len, HUGE_FIRST)? };
        Ok(address as u64)
    }

    /// # Safety
    /// The rule of the verbs of [`Device`] that copy.
    unsafe fn copy(&self, copy: Copy, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match copy.is_aligned() {
                _ if copy.len == 0 => Ok(()),
                true => copy.enqueue(&self.context, handle(stream.0)),
                false => self.enqueue_host_fn(stream, self.copier.work(&self.context, copy)?),
            }
        }
    }
}

fn address(slice: RawSlice) -> u64 {
    slice.buffer.0 + slice.offset as u64
}

/// A stream or an event.
fn handle(raw: u64) -> Handle {
    raw as Handle
}

// SAFETY: streams, events and copies are the library's own; memory is taken back once the work before its release is
// done; every call makes the context current first, so it may come from any thread.
unsafe impl Device for Npu {
    fn id(&self) -> DeviceId {
        self.info.id
    }

    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        self.reap()?;
        let _entered = self.context.enter()?;
        let (free_bytes, total_bytes) = self.context.memory()?;
        Ok(MemoryInfo {
            free_bytes,
            total_bytes,
            allocated_bytes: self.allocated_bytes.load(Ordering::Relaxed),
            pinned_bytes: self.pinned.bytes(),
        })
    }

    fn load(&self) -> Option<DeviceLoad> {
        let _entered = self.context.enter().ok()?;
        let (free_bytes, total_bytes) = self.context.memory().ok()?;
        // The library has no call for how busy the device is.
        Some(DeviceLoad { used_bytes: total_bytes - free_bytes, total_bytes, busy: None })
    }

    fn torch_device(&self) -> Option<TorchDevice> {
        // A name of tch's that nothing uses here, since it has none for PrivateUse1: see `shim/mps.cpp`.
        Some(TorchDevice::new(TORCH_KIND, self.info.id.ordinal as i32, tch::Device::Mps))
    }

    unsafe fn alloc(&self, len: usize) -> Result<RawBuffer> {
        let is_pending = self.reap()?;
        let _entered = self.context.enter()?;
        let address = self.try_alloc(len).or_else(|failed| {
            if !acl::is_out_of_memory(failed) || !is_pending || self.context.fits(len).is_err() {
                return Err(failed);
            }
            // Pending releases may be what is missing: the device is given the time to finish them, once.
            // SAFETY: the context is current.
            unsafe { self.context.acl.device_synchronize(RELEASES_TIMEOUT_MS)? };
            report(self.reap().map(drop));
            self.try_alloc(len)
        });
        let address = address.map_err(|failed| self.context.memory_error(failed, len))?;
        self.allocated_bytes.fetch_add(len, Ordering::Relaxed);
        Ok(RawBuffer(address))
    }

    unsafe fn free(&self, buffer: RawBuffer, len: usize, stream: RawStream) -> Result<()> {
        self.retire(Resource::Memory(buffer.0), stream)?;
        self.allocated_bytes.fetch_sub(len, Ordering::Relaxed);
        Ok(())
    }

    fn address(&self, buffer: RawBuffer) -> Option<*mut u8> {
        Some(buffer.0 as *mut u8)
    }

    unsafe fn arena_reserve(&self, len: usize) -> Result<RawBuffer> {
        arena::reserve(&self.context, len).map(RawBuffer)
    }

    unsafe fn arena_map(&self, arena: RawBuffer, len: usize) -> Result<()> {
        self.reap()?;
        // SAFETY: the caller holds this reservation, which is not mapped.
        unsafe { self.arenas.map(&self.context, arena.0, len)? };
        self.allocated_bytes.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn arena_unmap(&self, arena: RawBuffer, len: usize) -> Result<()> {
        // SAFETY: the caller holds this mapping, and nothing uses it.
        unsafe { self.arenas.unmap(&self.context, arena.0)? };
        self.allocated_bytes.fetch_sub(len, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn arena_free(&self, arena: RawBuffer, _len: usize) -> Result<()> {
        // SAFETY: the caller gave the reservation up.
        unsafe { arena::free(&self.context, arena.0) }
    }

    fn arena_granularity_bytes(&self) -> usize {
        self.granularity_bytes
    }

    unsafe fn alloc_pinned(&self, len: usize) -> Result<*mut u8> {
        self.pinned.alloc(&self.context, len)
    }

    unsafe fn free_pinned(&self, ptr: *mut u8, _len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.pinned.free(&self.context, ptr) }
    }

    unsafe fn fill(&self, dst: RawSlice, byte: u8, stream: RawStream) -> Result<()> {
        if dst.len == 0 {
            return Ok(());
        }
        let to = address(dst) as *mut c_void;
        // SAFETY: the caller keeps `dst` alive until the work is done.
        self.context.run(|acl| unsafe { acl.fill(to, dst.len, byte.into(), dst.len, handle(stream.0)) })
    }

    unsafe fn copy_h2d(&self, dst: RawSlice, src: *const u8, stream: RawStream) -> Result<()> {
        self.pinned.check(&self.context, src as u64, dst.len)?;
        let copy =
            Copy { to: address(dst), from: src as u64, len: dst.len, direction: acl::Direction::ToDevice };
        // SAFETY: the caller keeps both ranges alive until the work is done.
        unsafe { self.copy(copy, stream) }
    }

    unsafe fn copy_d2h(&self, dst: *mut u8, src: RawSlice, stream: RawStream) -> Result<()> {
        self.pinned.check(&self.context, dst as u64, src.len)?;
        let copy =
            Copy { to: dst as u64, from: address(src), len: src.len, direction: acl::Direction::ToHost };
        // SAFETY: the caller keeps both ranges alive until the work is done.
        unsafe { self.copy(copy, stream) }
    }

    unsafe fn copy_d2d(&self, dst: RawSlice, src: RawSlice, stream: RawStream) -> Result<()> {
        let direction = acl::Direction::WithinDevice;
        let copy = Copy { to: address(dst), from: address(src), len: dst.len, direction };
        // SAFETY: the caller keeps both ranges alive until the work is done.
        unsafe { self.copy(copy, stream) }
    }

    fn stream_create(&self) -> Result<RawStream> {
        self.reap()?;
        if let Some(idle) = self.idle.lock().unwrap().pop() {
            return Ok(RawStream(idle as u64));
        }
        let mut stream = 0;
        // SAFETY: a number of our own; the caller gives the stream back.
        self.context.run(|acl| unsafe { acl.stream_create(&mut stream) })?;
        Ok(RawStream(stream as u64))
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> Result<()> {
        self.failures.forget(stream);
        self.retire(Resource::Stream(handle(stream.0)), stream)
    }

    unsafe fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise.
        self.context.run(|acl| unsafe { acl.stream_synchronize(handle(stream.0)) })?;
        self.failures.check(self.info.id, stream)
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        // SAFETY: the caller's promise.
        self.context.run(|acl| unsafe { acl.stream_wait_event(handle(stream.0), handle(event.0)) })
    }

    fn torch_stream(&self) -> Result<RawStream> {
        let mut stream = ptr::null_mut();
        // SAFETY: an address of our own; libtorch's support of the device is loaded.
        if unsafe { ffi::anyroll_torch_stream(TORCH_KIND, self.info.id.ordinal as c_int, &mut stream) } != 0 {
            return Err(Error::Torch(ffi::last_error()));
        }
        Ok(RawStream(stream as u64))
    }

    fn event_create(&self, timed: bool) -> Result<RawEvent> {
        // Of this kind an event may be recorded again, does not wait before its first record, and may be destroyed
        // while streams wait for it: the library's older kinds differ in all three.
        let flags = if timed { EVENT_SYNC | EVENT_TIME_LINE } else { EVENT_SYNC };
        let mut event = 0;
        // SAFETY: a number of our own; the caller gives the event back.
        self.context.run(|acl| unsafe { acl.event_create(&mut event, flags) })?;
        Ok(RawEvent(event as u64))
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> Result<()> {
        // SAFETY: the caller's promise; the library keeps what pending waits need.
        self.context.run(|acl| unsafe { acl.event_destroy(handle(event.0)) })
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise.
        self.context.run(|acl| unsafe { acl.event_record(handle(event.0), handle(stream.0)) })
    }

    unsafe fn event_query(&self, event: RawEvent) -> Result<bool> {
        let _entered = self.context.enter()?;
        self.is_reached(handle(event.0))
    }

    unsafe fn event_elapsed(&self, start: RawEvent, end: RawEvent) -> Result<Duration> {
        let mut elapsed_ms = 0.0;
        let (start, end) = (handle(start.0), handle(end.0));
        // SAFETY: the caller's promise, and a number of our own.
        self.context.run(|acl| unsafe { acl.event_elapsed(&mut elapsed_ms, start, end) })?;
        Ok(Duration::from_secs_f64(f64::from(elapsed_ms.max(0.0)) / 1e3))
    }

    unsafe fn enqueue_host_fn(&self, stream: RawStream, work: HostFn) -> Result<()> {
        self.context.run(|acl| {
            self.failures.enqueue(stream, work, |run, data| {
                // SAFETY: the caller's promise; `data` is what `run` takes.
                unsafe { acl.launch_host_function(handle(stream.0), run, data) }
            })
        })
    }
}

impl Drop for Npu {
    fn drop(&mut self) {
        const TIMEOUT_MS: i32 = 1000;
        // SAFETY: the context is current. What is late is what the warning below is for.
        let _ = self.context.run(|acl| unsafe { acl.device_synchronize(TIMEOUT_MS) });
        if self.reap().unwrap_or(true) {
            tracing::warn!(
                "work on {} has not ended: its streams and memory are left to the process's end",
                self.info.id
            );
        }
        let idle = std::mem::take(self.idle.get_mut().unwrap());
        // SAFETY: nobody holds them, and they have no work, so that this does not wait.
        let destroyed = self
            .context
            .run(|acl| unsafe { idle.into_iter().try_for_each(|stream| acl.stream_destroy(stream)) });
        report(destroyed);
        *OPEN.lock().unwrap() = None;
    }
}
