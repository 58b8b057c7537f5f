//! Memory that libtorch holds: the peak of its tensors on the host, and what it caches on a device.

use crate::{Error, Result, device::opened, ffi};

/// Runs `work`, and returns its result and the peak of host memory, in bytes, that its tensors held. Counts allocations of
/// libtorch by the calling thread; memory of a [`crate::Buffer`] is none.
///
/// # Errors
/// libtorch's.
pub fn tensor_peak_bytes<R>(work: impl FnOnce() -> R) -> Result<(R, usize)> {
    let failed = || Error::Torch(ffi::last_error());
    // SAFETY: takes nothing; the meter is this thread's.
    if unsafe { ffi::anyroll_meter_begin() } != 0 {
        return Err(failed());
    }
    let result = work();
    // SAFETY: as above.
    let peak = unsafe { ffi::anyroll_meter_end() };
    usize::try_from(peak).map(|peak| (result, peak)).map_err(|_| failed())
}

/// Gives back to an open device the memory that libtorch caches for its next tensors there, for use by others such as
/// [`Buffer`](crate::Buffer)s. libtorch caches nothing on the host.
///
/// # Errors
/// libtorch's, such as a failure of earlier work on the device.
pub fn release_cached(device: tch::Device) -> Result<()> {
    let Some(torch) = opened::torch_device(device) else { return Ok(()) };
    // SAFETY: libtorch's support of an open device is loaded, and memory of live tensors is not given back.
    match unsafe { ffi::anyroll_empty_cache(torch.kind) } {
        0 => Ok(()),
        _ => Err(Error::Torch(ffi::last_error())),
    }
}
