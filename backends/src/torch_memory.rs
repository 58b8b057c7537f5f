//! How much memory libtorch's tensors take on the host: what plans of memory are tested against.

use crate::{Error, Result, ffi};

/// Runs `work`, and returns beside its result the most bytes of host memory that tensors which it made held at a time.
/// Counted is what the calling thread allocates; memory of a [`crate::Buffer`] is none of libtorch's.
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
