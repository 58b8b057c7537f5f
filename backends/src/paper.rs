//! Memory of functions that libtorch runs and differentiates, measured without the memory, the values or a device.
//!
//! The function itself runs on tensors that have a shape and no values: libtorch's meta tensors. An allocator counts what each
//! would take. So a measurement has the lifetimes of a real run, those of saved tensors and gradients included. Operations of
//! [`ops`](crate::ops) allocate what they do on a device with kernels, and launch nothing.
//!
//! Not counted is temporary memory inside a library's kernel, such as a convolution's workspace.

use std::{
    cell::Cell,
    ffi::{CStr, c_void},
    marker::PhantomData,
    sync::Arc,
    time::Duration,
};

use tch::{Kind, Tensor};

use crate::{
    BackendKind, BackendTraits, Device, DeviceId, DeviceInfo, Error, Grid, HostFn, MemoryInfo, RawBuffer,
    RawEvent, RawSlice, RawStream, Result, TorchDevice, device::unsupported, ffi,
};

/// The name by which tch reaches tensors without values.
const DEVICE: tch::Device = tch::Device::Mps;

thread_local! {
    /// True for a host, in this thread's measurement.
    static ON_HOST: Cell<Option<bool>> = const { Cell::new(None) };
}

/// The measurement of a thread. Its tensors stay in the thread.
#[derive(Debug)]
pub struct Meter {
    outer: Option<bool>,
    of_thread: PhantomData<*const ()>,
}

impl Meter {
    /// Begins a measurement of the calling thread, which ends with the meter: of a host's memory, or of an accelerator's. One that
    /// the thread is in already goes on behind it, without this one's tensors.
    ///
    /// # Errors
    /// libtorch's.
    pub fn new(on_host: bool) -> Result<Self> {
        // SAFETY: takes nothing; the count is this thread's.
        match unsafe { ffi::anyroll_measure_begin() } {
            0 => Ok(Self { outer: ON_HOST.replace(Some(on_host)), of_thread: PhantomData }),
            _ => Err(Error::Torch(ffi::last_error())),
        }
    }

    /// Returns a dense tensor without values.
    ///
    /// # Errors
    /// libtorch's.
    pub fn tensor(&self, size: &[i64], kind: Kind) -> Result<Tensor, tch::TchError> {
        Tensor::f_empty(size, (kind, DEVICE))
    }

    /// Returns the bytes of the tensors that are alive.
    pub fn live(&self) -> usize {
        self.counted().0
    }

    /// Returns the most bytes that were alive at a time, since the last [`Self::restart`].
    pub fn peak(&self) -> usize {
        self.counted().1
    }

    /// Begins a new peak with the tensors that are alive, and returns their bytes.
    pub fn restart(&self) -> usize {
        // SAFETY: this thread is in a measurement.
        unsafe { ffi::anyroll_measure_restart() };
        self.live()
    }

    fn counted(&self) -> (usize, usize) {
        let (mut live, mut peak) = (0, 0);
        // SAFETY: this thread is in a measurement; both places are written.
        unsafe { ffi::anyroll_measured(&raw mut live, &raw mut peak) };
        (live as usize, peak as usize)
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        ON_HOST.set(self.outer);
        // SAFETY: ends what this meter began; the meter cannot leave its thread.
        unsafe { ffi::anyroll_measure_end() };
    }
}

/// Returns true for a tensor of a measurement.
pub(crate) fn has(tensor: &Tensor) -> bool {
    ON_HOST.get().is_some() && tensor.device() == DEVICE
}

/// Returns true for a tensor of a host's measurement.
pub(crate) fn has_on_host(tensor: &Tensor) -> bool {
    has(tensor) && ON_HOST.get() == Some(true)
}

/// The device of a measurement; `None` for a host's, which has no kernels for tensors of this kind.
pub(crate) fn device() -> Option<Arc<dyn Device>> {
    (ON_HOST.get() == Some(false)).then(|| Arc::new(Paper) as Arc<dyn Device>)
}

/// A device that has all kernels and runs none.
#[derive(Debug)]
struct Paper;

const TRAITS: BackendTraits = BackendTraits::accelerator("paper");

macro_rules! refuse {
    ($( $name:ident ( $($ty:ty),* ) -> $ret:ty; )*) => {$(
        unsafe fn $name(&self, $(_: $ty),*) -> Result<$ret> {
            unsupported(self.id(), stringify!($name))
        }
    )*};
}

// SAFETY: no verb hands out memory, and nothing runs that could touch any.
unsafe impl Device for Paper {
    fn id(&self) -> DeviceId {
        DeviceId { backend: BackendKind::new(&TRAITS), ordinal: 0 }
    }
    fn info(&self) -> DeviceInfo {
        DeviceInfo { id: self.id(), name: TRAITS.name.to_owned(), total_bytes: None, details: Vec::new() }
    }
    fn memory_info(&self) -> Result<MemoryInfo> {
        unsupported(self.id(), "memory")
    }
    fn torch_device(&self) -> Option<TorchDevice> {
        None
    }
    fn address(&self, _: RawBuffer) -> Option<*mut u8> {
        None
    }
    fn arena_granularity_bytes(&self) -> usize {
        1
    }
    fn stream_create(&self) -> Result<RawStream> {
        unsupported(self.id(), "streams")
    }
    fn torch_stream(&self) -> Result<RawStream> {
        Ok(RawStream(0))
    }
    fn event_create(&self, _: bool) -> Result<RawEvent> {
        unsupported(self.id(), "events")
    }
    fn has_kernels(&self) -> bool {
        true
    }
    fn has_kernel(&self, _: &'static CStr) -> bool {
        true
    }
    unsafe fn launch(&self, _: &'static CStr, _: Grid, _: &mut [*mut c_void], _: RawStream) -> Result<()> {
        Ok(())
    }

    refuse! {
        alloc(usize) -> RawBuffer;
        free(RawBuffer, usize, RawStream) -> ();
        arena_reserve(usize) -> RawBuffer;
        arena_map(RawBuffer, usize) -> ();
        arena_unmap(RawBuffer, usize) -> ();
        arena_free(RawBuffer, usize) -> ();
        alloc_pinned(usize) -> *mut u8;
        free_pinned(*mut u8, usize) -> ();
        fill(RawSlice, u8, RawStream) -> ();
        copy_h2d(RawSlice, *const u8, RawStream) -> ();
        copy_d2h(*mut u8, RawSlice, RawStream) -> ();
        copy_d2d(RawSlice, RawSlice, RawStream) -> ();
        stream_destroy(RawStream) -> ();
        stream_synchronize(RawStream) -> ();
        stream_wait_event(RawStream, RawEvent) -> ();
        event_destroy(RawEvent) -> ();
        event_record(RawEvent, RawStream) -> ();
        event_query(RawEvent) -> bool;
        event_elapsed(RawEvent, RawEvent) -> Duration;
        enqueue_host_fn(RawStream, HostFn) -> ();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BF16: Kind = Kind::BFloat16;

    #[test]
    fn tensors_count_while_they_live_in_the_innermost_measurement() {
        let outer = Meter::new(false).unwrap();
        let x = outer.tensor(&[3, 5], BF16).unwrap();
        assert_eq!((outer.live(), outer.peak()), (30, 30));
        {
            let inner = Meter::new(true).unwrap();
            let y = inner.tensor(&[7], Kind::Float).unwrap();
            drop(inner.tensor(&[100], Kind::Float).unwrap());
            assert_eq!((inner.live(), inner.peak()), (28, 428));
            assert_eq!((inner.restart(), inner.peak()), (28, 28));
            drop(x);
            assert_eq!(inner.live(), 28);
            drop(y);
        }
        assert_eq!((outer.live(), outer.peak()), (0, 30));
        let other = std::thread::spawn(|| {
            let meter = Meter::new(false).unwrap();
            let _x = meter.tensor(&[11], BF16).unwrap();
            meter.live()
        });
        assert_eq!((other.join().unwrap(), outer.peak()), (22, 30));
    }

    /// A linear layer keeps its input for its weight's gradient; nothing else takes memory.
    #[test]
    fn libtorch_saves_and_makes_gradients_as_with_values() {
        let meter = Meter::new(false).unwrap();
        let leaf = |size: &[i64]| meter.tensor(size, BF16).unwrap().set_requires_grad(true);
        let (w, b) = (leaf(&[128, 64]), leaf(&[128]));
        let x = leaf(&[1000, 64]);
        let base = meter.restart();
        let y = x.linear(&w, Some(&b)).gelu("none");
        assert_eq!(meter.peak() - base, 2 * 1000 * 128 * 2);
        let grads = Tensor::run_backward(&[y.sum(BF16)], &[&x, &w, &b], false, false);
        let sizes: Vec<_> = grads.iter().map(Tensor::size).collect();
        assert_eq!(sizes, [vec![1000, 64], vec![128, 64], vec![128]]);
        drop(y);
        assert_eq!(meter.live() - base, 2 * (1000 * 64 + 128 * 64 + 128));
    }
}
