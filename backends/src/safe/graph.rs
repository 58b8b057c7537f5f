//! [`Graph`]: device work that is recorded once and run again with one call.

use std::sync::{Arc, Mutex, PoisonError};

use super::stream::report;
use crate::{Device, Error, RawGraph, Result, Stream, ffi};

/// Recorded work. It has the addresses of the memory that it reads and writes, which its owner keeps alive. The contents may
/// change from one run to the next.
#[derive(Debug)]
pub struct Graph {
    device: Arc<dyn Device>,
    raw: RawGraph,
}

/// Held while something is recorded: a device has one stream for it.
static RECORDING: Mutex<()> = Mutex::new(());

impl Graph {
    /// Records the libtorch operations that `work` enqueues in this thread. `work` is called twice: the first time it runs, so
    /// that libraries initialize themselves; the second time it is recorded and does not run. It must not allocate, wait or
    /// read back while it is recorded. Threads record one after the other.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device records nothing, `work`'s own error, or that of something in it that
    /// cannot be recorded.
    pub fn record<E: From<Error>>(
        device: &Arc<dyn Device>,
        mut work: impl FnMut() -> Result<(), E>,
    ) -> Result<Graph, E> {
        let _alone = RECORDING.lock().unwrap_or_else(PoisonError::into_inner);
        let recording = Stream::lent(device, device.recording_stream()?);
        let compute = Stream::torch(device)?;
        recording.wait_stream(&compute)?;
        let on_recording = TorchStream::exchange(device, &recording)?;
        work()?;
        recording.synchronize()?;
        // SAFETY: the stream is live, and nothing else records on it, by the lock; what follows ends the recording.
        unsafe { device.graph_begin(recording.raw())? };
        let outcome = work();
        // SAFETY: begun above.
        let raw = unsafe { device.graph_end(recording.raw()) };
        drop(on_recording);
        let graph = raw.map(|raw| Graph { device: device.clone(), raw });
        outcome?;
        Ok(graph?)
    }

    /// Runs the work on `stream`, after the work that is there.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: the graph is live; whoever recorded it keeps its memory.
        unsafe { self.device.graph_launch(self.raw, stream.raw()) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the last use; the driver lets a run in flight finish.
        report(unsafe { self.device.graph_destroy(self.raw) });
    }
}

/// Makes libtorch compute on another stream in this thread, until it is dropped.
struct TorchStream {
    kind: i32,
    index: i32,
    before: i64,
}

impl TorchStream {
    fn exchange(device: &Arc<dyn Device>, stream: &Stream) -> Result<TorchStream> {
        let torch = device.torch_device().ok_or_else(|| Error::Unsupported {
            backend: device.id().backend,
            what: "graphs: libtorch does not compute on it".into(),
        })?;
        // c10 numbers a stream that is not its own by its handle.
        let id = stream.raw().0.cast_signed();
        let mut before = 0;
        // SAFETY: a live stream of this device, and a number of our own.
        let failed = unsafe { ffi::anyroll_exchange_stream(torch.kind, torch.index, id, &mut before) } != 0;
        if failed {
            return Err(Error::Torch(ffi::last_error()));
        }
        Ok(TorchStream { kind: torch.kind, index: torch.index, before })
    }
}

impl Drop for TorchStream {
    fn drop(&mut self) {
        let mut ours = 0;
        // SAFETY: the stream that was current before.
        if unsafe { ffi::anyroll_exchange_stream(self.kind, self.index, self.before, &mut ours) } != 0 {
            tracing::error!("libtorch keeps a stream that was lent to it: {}", ffi::last_error());
        }
    }
}
