//! A GPU whose driver has the interface that CUDA began with: the [`Device`] of [`crate::cuda`] and
//! [`crate::rocm`], which differ in names and little else ([`Vendor`], [`Dialect`]).
//!
//! A handle is the driver's own. libtorch's default stream is the driver's stream 0; ours are non-blocking, and are
//! in order with it only by events.
//!
//! Memory comes from a pool of our own. The drivers' plain release waits for the whole device, and so for collectives
//! that wait for other ranks; a pool takes memory back in stream order. The pool keeps nothing across a synchronization,
//! and never reuses memory whose release is pending, since the next allocation would wait for it.

mod arena;
mod compiler;
mod context;
mod driver;
mod facts;
mod graphs;
mod module;
mod pinned;
mod shared;
mod vendor;

use std::{
    collections::HashSet,
    ffi::{CStr, c_int, c_void},
    ptr,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::{
    Backend, BackendKind, Collective, Device, DeviceId, DeviceInfo, DeviceLoad, Diagnosis, Error, Grid,
    MemoryInfo, RawBuffer, RawEvent, RawGraph, RawSlice, RawStream, Reduction, Result, SharedHandle, Store,
    TorchDevice,
    device::{HostFn, opened, unsupported},
    ffi::{
        self,
        library::{self, Failed},
    },
    host::work::HostFailures,
    kernels::SOURCES,
    nccl::Nccl,
    safe::stream::report,
};
use context::Context;
use driver::{
    Address, NON_BLOCKING, OUT_OF_MEMORY, PoolProperties, REUSE_ALLOW_INTERNAL_DEPENDENCIES, WITHOUT_TIME,
};
pub(crate) use driver::{Driver, Handle};
use graphs::Graphs;
use module::Module;
use pinned::Pinned;
pub(crate) use vendor::{Dialect, Opened, Vendor};

/// `c10::DeviceType::CUDA`; libtorch's build for ROCm takes it, too.
const TORCH_KIND: c_int = 1;

/// See the module's description.
#[derive(Debug)]
struct Gpu {
    info: DeviceInfo,
    pci_bus_id: String,
    /// The architecture that its kernels are compiled for, by the compiler's name.
    architecture: String,
    /// A kernel may start before the previous one has ended.
    can_start_early: bool,
    granularity_bytes: usize,
    multiprocessors: c_int,
    allocated_bytes: AtomicUsize,
    pinned: Pinned,
    /// Unused events without time: making one takes longer than recording it.
    events: Mutex<Vec<Handle>>,
    /// Events with time. They are few, and are destroyed after use.
    timed: Mutex<HashSet<Handle>>,
    failures: HostFailures,
    /// The module of each of `kernels::SOURCES`, compiled when it is first needed.
    modules: [OnceLock<Result<Module>>; SOURCES.len()],
    /// See [`Device::recording_stream`].
    graphs: OnceLock<Result<Graphs>>,
    pool: Handle,
    /// The stream of allocations alone, so that each completes as soon as it is enqueued.
    allocations: Handle,
    context: Context,
}

/// A vendor as a [`Backend`].
#[derive(Debug)]
pub(crate) struct VendorBackend(pub(crate) &'static Vendor);

impl Backend for VendorBackend {
    fn kind(&self) -> BackendKind {
        self.0.backend
    }

    fn open(&self, ordinal: usize) -> Result<Arc<dyn Device>> {
        let id = DeviceId { backend: self.kind(), ordinal };
        opened::once(id, || Ok(Arc::new(Gpu::open(self.0, ordinal)?)))
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let driver = Driver::of(self.0)?;
        let devices = (0..facts::count(driver)?).map(|ordinal| facts::info(driver, ordinal)).collect();
        open_libtorch(self.0)?;
        devices
    }

    fn diagnose(&self, ordinal: usize) -> Result<Diagnosis> {
        let driver = Driver::of(self.0)?;
        let id = DeviceId { backend: self.kind(), ordinal };
        let address = |ordinal| {
            let number = facts::device(driver, ordinal)?;
            facts::pci_bus_id(driver, number).map_err(|failed| driver.error(id, failed))
        };
        let addresses = (0..facts::count(driver)?).map(address).collect::<Result<Vec<_>>>()?;
        let number = facts::device(driver, ordinal)?;
        let found = driver.dialect.diagnose(driver, number, ordinal, &addresses);
        found.map_err(|failed| driver.error(id, failed))
    }

    fn connect(
        &self,
        device: &dyn Device,
        store: Store,
        reduction: Reduction,
    ) -> Result<Arc<dyn Collective>> {
        // The open device, without the wrapper that a test may have around it: operations have streams of their own.
        let device = self.open(device.id().ordinal)?;
        Ok(Arc::new(Nccl::connect(self.0.collectives, device, store, reduction)?))
    }

    fn rank_environment(&self) -> &'static [(&'static str, &'static str)] {
        self.0.rank_environment
    }
}

impl Gpu {
    /// Opens a device, and looks for everything that could be missing.
    fn open(vendor: &'static Vendor, ordinal: usize) -> Result<Self> {
        let driver = Driver::of(vendor)?;
        let number = facts::device(driver, ordinal)?;
        let info = facts::info(driver, ordinal)?;
        open_libtorch(vendor)?;
        let context = Context::new(driver, ordinal, number)?;
        let granularity_bytes = arena::granularity_bytes(&context)?;
        let multiprocessors = driver
            .attribute(number, driver.vendor.multiprocessors)
            .map_err(|failed| context.error(failed))?;
        let architecture = driver.dialect.architecture(driver, number);
        let architecture = architecture.map_err(|failed| context.error(failed))?;
        let pci_bus_id = facts::pci_bus_id(driver, number).map_err(|failed| context.error(failed))?;
        let (mut pool, mut allocations) = (0, 0);
        let mut wait_for_releases: c_int = 0;
        // SAFETY: numbers and structs of our own; both handles are given back in `drop`.
        context.run(|driver| unsafe {
            driver.pool_create(&mut pool, &PoolProperties::on(number))?;
            let value = (&raw mut wait_for_releases).cast();
            driver.pool_set_attribute(pool, REUSE_ALLOW_INTERNAL_DEPENDENCIES, value)?;
            driver.stream_create(&mut allocations, NON_BLOCKING)
        })?;
        Ok(Self {
            info,
            pci_bus_id,
            can_start_early: driver.dialect.can_start_early(&architecture),
            architecture,
            granularity_bytes,
            multiprocessors,
            allocated_bytes: AtomicUsize::new(0),
            pinned: Pinned::default(),
            events: Mutex::default(),
            timed: Mutex::default(),
            failures: HostFailures::default(),
            modules: Default::default(),
            graphs: OnceLock::new(),
            pool,
            allocations,
            context,
        })
    }

    /// The kernels of a source, compiled for this device when the first of them is wanted.
    fn module(&self, index: usize) -> Result<&Module> {
        let compiled = self.modules[index].get_or_init(|| {
            let source = &SOURCES[index];
            let compiled = Module::compile(source, &self.architecture, &self.context);
            if let Err(error) = &compiled {
                tracing::warn!("no kernels of {:?} on {}: {error}", source.file, self.info.id);
            }
            compiled
        });
        compiled.as_ref().map_err(Clone::clone)
    }

    fn graphs(&self) -> Result<&Graphs> {
        self.graphs.get_or_init(|| Graphs::open(&self.context)).as_ref().map_err(Clone::clone)
    }

    fn try_alloc(&self, len: usize) -> Result<Address, Failed> {
        let mut address = 0;
        // SAFETY: a number and handles of our own. The wait makes the memory ready for every stream.
        unsafe {
            self.context.driver.alloc_from_pool(&mut address, len, self.pool, self.allocations)?;
            self.context.driver.stream_synchronize(self.allocations)?;
        }
        Ok(address)
    }
}

fn open_libtorch(vendor: &Vendor) -> Result<()> {
    const HINT: &str =
        "this libtorch is built without it: install the one for GPUs with `cargo xtask setup --gpu`";
    let open = || library::open_libtorch(vendor.backend, vendor.libtorch_file, TORCH_KIND, HINT);
    vendor.opened.libtorch.get_or_init(open).clone()
}

fn address(slice: RawSlice) -> Address {
    slice.buffer.0 + slice.offset as Address
}

/// A stream or an event.
fn handle(raw: u64) -> Handle {
    raw as Handle
}

// SAFETY: streams, events and copies are the driver's own; memory is handed out once it is ready for every stream
// and taken back in stream order; every call makes the context current first, so it may come from any thread.
unsafe impl Device for Gpu {
    fn id(&self) -> DeviceId {
        self.info.id
    }

    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        // What was released since the last synchronization is not in use any more.
        // SAFETY: the pool is live.
        self.context.run(|driver| unsafe { driver.pool_trim(self.pool, 0) })?;
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
        let busy = self.context.driver.dialect.busy(&self.pci_bus_id);
        Some(DeviceLoad { used_bytes: total_bytes - free_bytes, total_bytes, busy })
    }

    fn torch_device(&self) -> Option<TorchDevice> {
        let ordinal = self.info.id.ordinal;
        Some(TorchDevice::new(TORCH_KIND, ordinal as i32, tch::Device::Cuda(ordinal)))
    }

    unsafe fn alloc(&self, len: usize) -> Result<RawBuffer> {
        let _entered = self.context.enter()?;
        let address = self.try_alloc(len).or_else(|failed| {
            if failed.code != OUT_OF_MEMORY {
                return Err(failed);
            }
            // Pending releases may be what is missing: the device is given the time to finish them, once.
            // SAFETY: the context is current, and the pool is live.
            unsafe {
                self.context
                    .driver
                    .context_synchronize()
                    .and_then(|()| self.context.driver.pool_trim(self.pool, 0))
            }
            .and_then(|()| self.try_alloc(len))
        });
        let address = match address {
            Ok(address) => address,
            Err(failed) => {
                self.context.fits(len)?;
                return Err(self.context.memory_error(failed, len));
            }
        };
        self.allocated_bytes.fetch_add(len, Ordering::Relaxed);
        Ok(RawBuffer(address))
    }

    unsafe fn free(&self, buffer: RawBuffer, len: usize, stream: RawStream) -> Result<()> {
        // SAFETY: the caller gave the memory up; the driver takes it back after the stream's work.
        self.context.run(|driver| unsafe { driver.free_async(buffer.0, handle(stream.0)) })?;
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
        // SAFETY: the caller holds this reservation, which is not mapped.
        unsafe { arena::map(&self.context, arena.0, len)? };
        self.allocated_bytes.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn arena_unmap(&self, arena: RawBuffer, len: usize) -> Result<()> {
        // SAFETY: the caller holds this mapping, and nothing uses it.
        unsafe { arena::unmap(&self.context, arena.0, len)? };
        self.allocated_bytes.fetch_sub(len, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn arena_free(&self, arena: RawBuffer, len: usize) -> Result<()> {
        // SAFETY: the caller gave the reservation up.
        unsafe { arena::free(&self.context, arena.0, len) }
    }

    fn arena_granularity_bytes(&self) -> usize {
        self.granularity_bytes
    }

    fn shared_alloc(&self, len: usize) -> Result<(RawBuffer, SharedHandle)> {
        let (address, handle) = shared::alloc(&self.context, len)?;
        self.allocated_bytes.fetch_add(len, Ordering::Relaxed);
        Ok((RawBuffer(address), handle))
    }

    fn shared_open(&self, handle: &SharedHandle) -> Result<RawBuffer> {
        shared::open(&self.context, handle).map(RawBuffer)
    }

    unsafe fn alloc_pinned(&self, len: usize) -> Result<*mut u8> {
        self.pinned.alloc(&self.context, len)
    }

    unsafe fn free_pinned(&self, ptr: *mut u8, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.pinned.free(&self.context, ptr, len) }
    }

    unsafe fn fill(&self, dst: RawSlice, byte: u8, stream: RawStream) -> Result<()> {
        if dst.len == 0 {
            return Ok(());
        }
        // SAFETY: the caller keeps `dst` alive until the work is done.
        self.context.run(|driver| unsafe { driver.fill(address(dst), byte, dst.len, handle(stream.0)) })
    }

    unsafe fn copy_h2d(&self, dst: RawSlice, src: *const u8, stream: RawStream) -> Result<()> {
        let cut = self.pinned.cut(&self.context, src as usize, dst.len)?;
        self.context.run(|driver| {
            // SAFETY: the caller keeps both ranges alive until the work is done.
            cut.into_iter().filter(|part| !part.is_empty()).try_for_each(|part| unsafe {
                let to = address(dst) + part.start as Address;
                driver.copy_h2d(to, src.add(part.start).cast(), part.len(), handle(stream.0))
            })
        })
    }

    unsafe fn copy_d2h(&self, dst: *mut u8, src: RawSlice, stream: RawStream) -> Result<()> {
        let cut = self.pinned.cut(&self.context, dst as usize, src.len)?;
        self.context.run(|driver| {
            // SAFETY: the caller keeps both ranges alive until the work is done.
            cut.into_iter().filter(|part| !part.is_empty()).try_for_each(|part| unsafe {
                let from = address(src) + part.start as Address;
                driver.copy_d2h(dst.add(part.start).cast(), from, part.len(), handle(stream.0))
            })
        })
    }

    unsafe fn copy_d2d(&self, dst: RawSlice, src: RawSlice, stream: RawStream) -> Result<()> {
        if dst.len == 0 {
            return Ok(());
        }
        // SAFETY: the caller keeps both ranges alive until the work is done.
        self.context
            .run(|driver| unsafe { driver.copy_d2d(address(dst), address(src), dst.len, handle(stream.0)) })
    }

    fn stream_create(&self) -> Result<RawStream> {
        let mut stream = 0;
        // SAFETY: a number of our own; the caller gives the stream back.
        self.context.run(|driver| unsafe { driver.stream_create(&mut stream, NON_BLOCKING) })?;
        Ok(RawStream(stream as u64))
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> Result<()> {
        self.failures.forget(stream);
        // SAFETY: the caller's promise; the driver lets pending work finish.
        self.context.run(|driver| unsafe { driver.stream_destroy(handle(stream.0)) })
    }

    unsafe fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise.
        self.context.run(|driver| unsafe { driver.stream_synchronize(handle(stream.0)) })?;
        self.failures.check(self.info.id, stream)
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        // SAFETY: the caller's promise.
        self.context.run(|driver| unsafe { driver.stream_wait_event(handle(stream.0), handle(event.0), 0) })
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
        let kept = if timed { None } else { self.events.lock().unwrap().pop() };
        if let Some(event) = kept {
            return Ok(RawEvent(event as u64));
        }
        let flags = if timed { 0 } else { WITHOUT_TIME };
        let mut event = 0;
        // SAFETY: a number of our own; the caller gives the event back.
        self.context.run(|driver| unsafe { driver.event_create(&mut event, flags) })?;
        if timed {
            self.timed.lock().unwrap().insert(event);
        }
        Ok(RawEvent(event as u64))
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> Result<()> {
        let event = handle(event.0);
        if self.timed.lock().unwrap().remove(&event) {
            // SAFETY: the caller's promise; the driver keeps what pending waits need.
            return self.context.run(|driver| unsafe { driver.event_destroy(event) });
        }
        // Waits that are enqueued already hold on to the record that they were made for.
        self.events.lock().unwrap().push(event);
        Ok(())
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise.
        self.context.run(|driver| unsafe { driver.event_record(handle(event.0), handle(stream.0)) })
    }

    unsafe fn event_query(&self, event: RawEvent) -> Result<bool> {
        let _entered = self.context.enter()?;
        // SAFETY: the caller's promise.
        let outcome = unsafe { self.context.driver.event_query(handle(event.0)) };
        driver::reached(outcome).map_err(|failed| self.context.error(failed))
    }

    unsafe fn event_elapsed(&self, start: RawEvent, end: RawEvent) -> Result<Duration> {
        let mut elapsed_ms = 0.0;
        let (start, end) = (handle(start.0), handle(end.0));
        // SAFETY: the caller's promise, and a number of our own.
        self.context.run(|driver| unsafe { driver.event_elapsed(&mut elapsed_ms, start, end) })?;
        Ok(Duration::from_secs_f64(f64::from(elapsed_ms.max(0.0)) / 1e3))
    }

    unsafe fn enqueue_host_fn(&self, stream: RawStream, work: HostFn) -> Result<()> {
        self.context.run(|driver| {
            self.failures.enqueue(stream, work, |run, data| {
                // SAFETY: the caller's promise; `data` is what `run` takes.
                unsafe { driver.launch_host_function(handle(stream.0), run, data) }
            })
        })
    }

    fn multiprocessors(&self) -> Option<i64> {
        Some(self.multiprocessors.into())
    }

    fn has_kernels(&self) -> bool {
        self.module(0).is_ok()
    }

    fn has_kernel(&self, kernel: &'static CStr) -> bool {
        let is_for = |index: usize| {
            SOURCES[index].architecture.includes(&self.architecture) && self.module(index).is_ok()
        };
        source_of(kernel).is_some_and(is_for)
    }

    fn recording_stream(&self) -> Result<RawStream> {
        Ok(self.graphs()?.stream())
    }

    unsafe fn graph_begin(&self, _stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.graphs()?.begin(&self.context) }
    }

    unsafe fn graph_end(&self, _stream: RawStream) -> Result<RawGraph> {
        // SAFETY: the caller's promise.
        unsafe { self.graphs()?.end(&self.context) }
    }

    unsafe fn graph_launch(&self, graph: RawGraph, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.graphs()?.launch(&self.context, graph, stream) }
    }

    unsafe fn graph_destroy(&self, graph: RawGraph) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.graphs()?.destroy(&self.context, graph) }
    }

    unsafe fn launch(
        &self,
        kernel: &'static CStr,
        grid: Grid,
        arguments: &mut [*mut c_void],
        stream: RawStream,
    ) -> Result<()> {
        let Some(index) = source_of(kernel) else {
            return unsupported(self.info.id, format!("the kernel {kernel:?}"));
        };
        let function = self.module(index)?.function(kernel);
        let grid = Grid { starts_early: grid.starts_early && self.can_start_early, ..grid };
        // SAFETY: the arguments are those of the kernel, as the caller promises.
        self.context.run(|driver| unsafe {
            function.allow(grid.shared_bytes, driver)?;
            driver.dialect.launch(driver, function.raw, grid, handle(stream.0), arguments.as_mut_ptr())
        })
    }
}

/// Which of the sources has a kernel.
fn source_of(kernel: &'static CStr) -> Option<usize> {
    SOURCES.iter().position(|source| source.kernels.contains(&kernel))
}

impl Drop for Gpu {
    fn drop(&mut self) {
        for module in &mut self.modules {
            if let Some(Ok(module)) = module.take() {
                report(module.unload(&self.context));
            }
        }
        if let Some(Ok(graphs)) = self.graphs.take() {
            report(graphs.close(&self.context));
        }
        let events = std::mem::take(self.events.get_mut().unwrap());
        // SAFETY: made by `open` and `event_create`; the safe types hold the device as long as they hold these.
        let released = self.context.run(|driver| unsafe {
            events.into_iter().try_for_each(|event| driver.event_destroy(event))?;
            driver.stream_destroy(self.allocations)?;
            driver.pool_destroy(self.pool)
        });
        report(released);
    }
}
