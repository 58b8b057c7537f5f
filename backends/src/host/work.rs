//! Host work in the order of a vendor's stream, which runs it on a thread of its own.

use std::{
    any::Any,
    collections::HashMap,
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
};

use crate::{DeviceId, Error, RawStream, Result, device::HostFn, ffi::library::Failed};

/// The function that a vendor's library calls in stream order.
pub(crate) type HostCallback = unsafe extern "C" fn(*mut c_void);

/// Failures of a device's host work, which vendors' libraries do not report.
#[derive(Debug, Default)]
pub(crate) struct HostFailures {
    /// The first failure of each stream.
    streams: Mutex<HashMap<u64, Failure>>,
}

type Failure = Arc<Mutex<Option<String>>>;

/// The argument of [`run_host_work`].
struct HostWork {
    work: HostFn,
    failure: Failure,
}

impl HostFailures {
    /// Lets `launch` enqueue `work` on `stream`: it receives the function that the library calls, once unless it fails, and
    /// its argument.
    pub(crate) fn enqueue(
        &self,
        stream: RawStream,
        work: HostFn,
        launch: impl FnOnce(HostCallback, *mut c_void) -> Result<(), Failed>,
    ) -> Result<(), Failed> {
        let data = Box::into_raw(Box::new(HostWork { work, failure: self.of(stream) }));
        let outcome = launch(run_host_work, data.cast());
        if outcome.is_err() {
            // SAFETY: it was not enqueued, so the box is still ours.
            drop(unsafe { Box::from_raw(data) });
        }
        outcome
    }

    /// Returns the first failure of `stream`'s work since the last call.
    pub(crate) fn check(&self, device: DeviceId, stream: RawStream) -> Result<()> {
        match self.of(stream).lock().unwrap().take() {
            Some(message) => Err(Error::Stream { device, message }),
            None => Ok(()),
        }
    }

    /// Drops a stream that ends: another stream, which has not failed, may get its handle.
    pub(crate) fn forget(&self, stream: RawStream) {
        self.streams.lock().unwrap().remove(&stream.0);
    }

    fn of(&self, stream: RawStream) -> Failure {
        self.streams.lock().unwrap().entry(stream.0).or_default().clone()
    }
}

/// # Safety
/// `data` is a box of [`HostWork`] that [`HostFailures::enqueue`] gave away; called once.
unsafe extern "C" fn run_host_work(data: *mut c_void) {
    // SAFETY: the caller's promise.
    let HostWork { work, failure } = *unsafe { Box::from_raw(data.cast::<HostWork>()) };
    if let Err(message) = run(work) {
        failure.lock().unwrap().get_or_insert(message);
    }
}

/// Runs `work`. A panic becomes an error and does not end the thread: later work, events among it, would never
/// run.
pub(crate) fn run(work: HostFn) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(words(&*panic)))
}

fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panic".into())
}
