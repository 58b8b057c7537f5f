//! Faults on demand, for tests: a device whose streams are late at random and one whose memory comes back full of
//! NaN, as any may be, and one that breaks the contract, to see that the conformance suite notices.

use std::{
    ffi::{CStr, c_void},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::{
    Device, DeviceId, DeviceInfo, DeviceLoad, Grid, HostFn, MemoryInfo, RawBuffer, RawEvent, RawSlice,
    RawStream, Result, TorchDevice,
};

/// Wraps a device and lets work of its own streams (not libtorch's) start up to `max_delay` late, from a seeded
/// sequence: results must be the same. Finds waits that are missing.
#[derive(Debug)]
pub struct Delayed {
    device: Arc<dyn Device>,
    state: AtomicU64,
    max_delay: Duration,
}

impl Delayed {
    /// See the type.
    pub fn wrap(device: Arc<dyn Device>, seed: u64, max_delay: Duration) -> Arc<dyn Device> {
        Arc::new(Self { device, state: AtomicU64::new(seed), max_delay })
    }

    /// Enqueues a pause on `stream`. Half of them are none, so that fast follows slow.
    fn delay(&self, stream: RawStream) -> Result<()> {
        if self.device.torch_stream()? == stream {
            return Ok(());
        }
        let draw = mix(self.state.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed));
        if draw & 1 == 0 {
            return Ok(());
        }
        let pause = self.max_delay.mul_f64((draw >> 11) as f64 / (1u64 << 53) as f64);
        // SAFETY: the caller's stream is live, and the pause calls no device.
        unsafe {
            self.device.enqueue_host_fn(
                stream,
                Box::new(move || {
                    std::thread::sleep(pause);
                    Ok(())
                }),
            )
        }
    }
}

/// Wraps a device and fills the memory of an arena with NaN, of whatever type, before it is given back and when it
/// is there again: results must be the same. Finds contents that were not restored.
#[derive(Debug)]
pub struct Poisoned {
    device: Arc<dyn Device>,
}

impl Poisoned {
    /// See the type.
    pub fn wrap(device: Arc<dyn Device>) -> Arc<dyn Device> {
        Arc::new(Self { device })
    }

    /// # Safety
    /// `arena` is mapped, has `len` bytes, and no work on it is pending.
    unsafe fn poison(&self, arena: RawBuffer, len: usize) -> Result<()> {
        const NAN: u8 = 0xff;
        let stream = self.device.torch_stream()?;
        // SAFETY: the caller's promise; the fill is done when this returns.
        unsafe {
            self.device.fill(RawSlice { buffer: arena, offset: 0, len }, NAN, stream)?;
            self.device.stream_synchronize(stream)
        }
    }
}

/// SplitMix64's output function (Steele, Lea, Flood 2014).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A way to break the contract of [`Device`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Streams do not wait for events.
    LosesWaits,
    /// Copies leave out the last byte.
    ShortCopies,
    /// Device memory is never given back.
    Leaks,
    /// Errors of enqueued work do not come out.
    HidesErrors,
}

/// Wraps a device and breaks its contract in one way.
#[derive(Debug)]
pub struct Faulty {
    device: Arc<dyn Device>,
    fault: Fault,
}

impl Faulty {
    /// See the type.
    pub fn wrap(device: Arc<dyn Device>, fault: Fault) -> Arc<dyn Device> {
        Arc::new(Self { device, fault })
    }

    fn copied_bytes(&self, len: usize) -> usize {
        if self.fault == Fault::ShortCopies { len.saturating_sub(1) } else { len }
    }
}

/// The verbs that are safe to call, passed on.
macro_rules! forward_safe {
    () => {
        fn id(&self) -> DeviceId {
            self.device.id()
        }
        fn info(&self) -> DeviceInfo {
            self.device.info()
        }
        fn memory_info(&self) -> Result<MemoryInfo> {
            self.device.memory_info()
        }
        fn load(&self) -> Option<DeviceLoad> {
            self.device.load()
        }
        fn torch_device(&self) -> Option<TorchDevice> {
            self.device.torch_device()
        }
        fn address(&self, buffer: RawBuffer) -> Option<*mut u8> {
            self.device.address(buffer)
        }
        fn arena_granularity_bytes(&self) -> usize {
            self.device.arena_granularity_bytes()
        }
        fn stream_create(&self) -> Result<RawStream> {
            self.device.stream_create()
        }
        fn torch_stream(&self) -> Result<RawStream> {
            self.device.torch_stream()
        }
        fn event_create(&self, timed: bool) -> Result<RawEvent> {
            self.device.event_create(timed)
        }
        fn has_kernels(&self) -> bool {
            self.device.has_kernels()
        }
    };
}

/// Passes verbs on, late where one names its stream in brackets.
macro_rules! forward {
    ($( $( [$late:ident] )? $name:ident ( $($arg:ident: $ty:ty),* ) -> $ret:ty; )*) => {$(
        unsafe fn $name(&self, $($arg: $ty),*) -> Result<$ret> {
            $( self.delay($late)?; )?
            // SAFETY: the caller's promise, passed on.
            unsafe { self.device.$name($($arg),*) }
        }
    )*};
}

// SAFETY: every verb is the wrapped device's, later in the same order.
unsafe impl Device for Delayed {
    forward_safe!();

    forward! {
        alloc(len: usize) -> RawBuffer;
        [stream] free(buffer: RawBuffer, len: usize, stream: RawStream) -> ();
        arena_reserve(len: usize) -> RawBuffer;
        arena_map(arena: RawBuffer, len: usize) -> ();
        arena_unmap(arena: RawBuffer, len: usize) -> ();
        arena_free(arena: RawBuffer, len: usize) -> ();
        alloc_pinned(len: usize) -> *mut u8;
        free_pinned(ptr: *mut u8, len: usize) -> ();
        [stream] fill(dst: RawSlice, byte: u8, stream: RawStream) -> ();
        [stream] copy_h2d(dst: RawSlice, src: *const u8, stream: RawStream) -> ();
        [stream] copy_d2h(dst: *mut u8, src: RawSlice, stream: RawStream) -> ();
        [stream] copy_d2d(dst: RawSlice, src: RawSlice, stream: RawStream) -> ();
        stream_destroy(stream: RawStream) -> ();
        stream_synchronize(stream: RawStream) -> ();
        stream_wait_event(stream: RawStream, event: RawEvent) -> ();
        event_destroy(event: RawEvent) -> ();
        event_record(event: RawEvent, stream: RawStream) -> ();
        event_query(event: RawEvent) -> bool;
        event_elapsed(start: RawEvent, end: RawEvent) -> Duration;
        [stream] enqueue_host_fn(stream: RawStream, work: HostFn) -> ();
        [stream] launch(
            kernel: &'static CStr, grid: Grid, arguments: &mut [*mut c_void], stream: RawStream
        ) -> ();
    }
}

// SAFETY: every verb is the wrapped device's; what an arena holds after `arena_map` is undefined.
unsafe impl Device for Poisoned {
    forward_safe!();
    forward! {
        alloc(len: usize) -> RawBuffer;
        free(buffer: RawBuffer, len: usize, stream: RawStream) -> ();
        arena_reserve(len: usize) -> RawBuffer;
        arena_free(arena: RawBuffer, len: usize) -> ();
        alloc_pinned(len: usize) -> *mut u8;
        free_pinned(ptr: *mut u8, len: usize) -> ();
        fill(dst: RawSlice, byte: u8, stream: RawStream) -> ();
        copy_h2d(dst: RawSlice, src: *const u8, stream: RawStream) -> ();
        copy_d2h(dst: *mut u8, src: RawSlice, stream: RawStream) -> ();
        copy_d2d(dst: RawSlice, src: RawSlice, stream: RawStream) -> ();
        stream_destroy(stream: RawStream) -> ();
        stream_synchronize(stream: RawStream) -> ();
        stream_wait_event(stream: RawStream, event: RawEvent) -> ();
        event_destroy(event: RawEvent) -> ();
        event_record(event: RawEvent, stream: RawStream) -> ();
        event_query(event: RawEvent) -> bool;
        event_elapsed(start: RawEvent, end: RawEvent) -> Duration;
        enqueue_host_fn(stream: RawStream, work: HostFn) -> ();
    }

    unsafe fn arena_map(&self, arena: RawBuffer, len: usize) -> Result<()> {
        // SAFETY: the caller's promise, passed on; nobody else knows of the memory yet.
        unsafe { self.device.arena_map(arena, len).and_then(|()| self.poison(arena, len)) }
    }

    unsafe fn arena_unmap(&self, arena: RawBuffer, len: usize) -> Result<()> {
        // SAFETY: the caller's promise, passed on: it is mapped, and nothing uses it.
        unsafe { self.poison(arena, len).and_then(|()| self.device.arena_unmap(arena, len)) }
    }
}

// SAFETY: every verb is the wrapped device's but for the fault. Where order is lost, memory is kept for ever, so
// that no fault makes a verb touch memory that is gone.
unsafe impl Device for Faulty {
    forward_safe!();

    forward! {
        alloc(len: usize) -> RawBuffer;
        arena_reserve(len: usize) -> RawBuffer;
        arena_map(arena: RawBuffer, len: usize) -> ();
        arena_unmap(arena: RawBuffer, len: usize) -> ();
        arena_free(arena: RawBuffer, len: usize) -> ();
        alloc_pinned(len: usize) -> *mut u8;
        fill(dst: RawSlice, byte: u8, stream: RawStream) -> ();
        stream_destroy(stream: RawStream) -> ();
        event_destroy(event: RawEvent) -> ();
        event_record(event: RawEvent, stream: RawStream) -> ();
        event_query(event: RawEvent) -> bool;
        event_elapsed(start: RawEvent, end: RawEvent) -> Duration;
        enqueue_host_fn(stream: RawStream, work: HostFn) -> ();
        launch(
            kernel: &'static CStr, grid: Grid, arguments: &mut [*mut c_void], stream: RawStream
        ) -> ();
    }

    unsafe fn free(&self, buffer: RawBuffer, len: usize, stream: RawStream) -> Result<()> {
        if matches!(self.fault, Fault::LosesWaits | Fault::Leaks) {
            return Ok(());
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { self.device.free(buffer, len, stream) }
    }

    unsafe fn free_pinned(&self, ptr: *mut u8, len: usize) -> Result<()> {
        if self.fault == Fault::LosesWaits {
            return Ok(());
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { self.device.free_pinned(ptr, len) }
    }

    unsafe fn copy_h2d(&self, dst: RawSlice, src: *const u8, stream: RawStream) -> Result<()> {
        let dst = RawSlice { len: self.copied_bytes(dst.len), ..dst };
        // SAFETY: the caller's promise, passed on for a part.
        unsafe { self.device.copy_h2d(dst, src, stream) }
    }

    unsafe fn copy_d2h(&self, dst: *mut u8, src: RawSlice, stream: RawStream) -> Result<()> {
        let src = RawSlice { len: self.copied_bytes(src.len), ..src };
        // SAFETY: as above.
        unsafe { self.device.copy_d2h(dst, src, stream) }
    }

    unsafe fn copy_d2d(&self, dst: RawSlice, src: RawSlice, stream: RawStream) -> Result<()> {
        let len = self.copied_bytes(dst.len);
        // SAFETY: as above.
        unsafe { self.device.copy_d2d(RawSlice { len, ..dst }, RawSlice { len, ..src }, stream) }
    }

    unsafe fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise, passed on.
        let outcome = unsafe { self.device.stream_synchronize(stream) };
        if self.fault == Fault::HidesErrors { Ok(()) } else { outcome }
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        if self.fault == Fault::LosesWaits {
            return Ok(());
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { self.device.stream_wait_event(stream, event) }
    }
}
