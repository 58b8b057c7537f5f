//! Host work around device work: move bytes, hold a stream, wait for a state.

use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use anyroll_backends::{Buffer, DType, Device, PinnedBuffer, Result, Stream};
use tch::Tensor;

use crate::runner::{Verdict, ensure};

/// A gate that nobody opens opens by itself after this long, so that a failed check leaves no stuck stream.
pub(crate) const GATE_LIMIT: Duration = Duration::from_secs(5);

/// Time that a check waits for an effect that is immediate on an idle machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);

/// A buffer with these contents, whose home is `stream`. Blocks until it holds them.
pub(crate) fn upload(stream: &Stream, bytes: &[u8], dtype: DType) -> Result<Buffer> {
    let buffer = Buffer::zeros(stream, bytes.len() / dtype.size_bytes(), dtype)?;
    if !bytes.is_empty() {
        pinned(stream, bytes)?.copy_to(0, &buffer, stream)?;
    }
    Ok(buffer)
}

/// The contents of `buffer`, in order with `stream`.
pub(crate) fn download(buffer: &Buffer, stream: &Stream) -> Result<Vec<u8>> {
    if buffer.is_empty() {
        return Ok(Vec::new());
    }
    let mut pinned = PinnedBuffer::new(stream.device(), buffer.len_bytes())?;
    pinned.copy_from(0, buffer, stream)?;
    Ok(pinned.bytes()?.to_vec())
}

/// The bytes of a tensor's elements, as libtorch sees them on the stream that it uses here.
pub(crate) fn tensor_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let host = tensor.f_to_device(tch::Device::Cpu)?.f_contiguous()?.f_view(-1)?;
    let mut bytes = vec![0; host.numel() * host.kind().elt_size_in_bytes()];
    host.f_copy_data_u8(&mut bytes, host.numel())?;
    Ok(bytes)
}

/// Pinned memory with these contents.
pub(crate) fn pinned(stream: &Stream, bytes: &[u8]) -> Result<PinnedBuffer> {
    let mut pinned = PinnedBuffer::new(stream.device(), bytes.len())?;
    pinned.bytes_mut()?.copy_from_slice(bytes);
    Ok(pinned)
}

/// Holds a stream up until it is opened or dropped: what is enqueued behind it has not run before.
pub(crate) struct Gate(mpsc::Sender<()>);

impl Gate {
    /// Closes `stream` behind the work that it has now.
    pub(crate) fn close(stream: &Stream) -> Result<Self> {
        let (opener, opened) = mpsc::channel();
        stream.enqueue_host_fn(Box::new(move || match opened.recv_timeout(GATE_LIMIT) {
            Err(mpsc::RecvTimeoutError::Timeout) => Err("the host was blocked behind a closed gate".into()),
            _ => Ok(()),
        }))?;
        Ok(Self(opener))
    }

    /// Lets the stream go on.
    pub(crate) fn open(self) {
        drop(self.0);
    }

    /// Lets the stream go on after `delay`, while the caller does something that blocks.
    pub(crate) fn open_after(self, delay: Duration) {
        std::thread::spawn(move || {
            std::thread::sleep(delay);
            self.open();
        });
    }
}

/// Fails unless `holds` becomes true while we are patient: for what a release sets off and nobody waits for.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Verdict {
    let start = Instant::now();
    while !holds()? {
        ensure!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Runs a check and fails unless all memory that it took is back: also what it dropped with work pending.
pub(crate) fn leaves_no_memory(device: &Arc<dyn Device>, check: impl FnOnce() -> Verdict) -> Verdict {
    let held = || device.memory_info().map(|info| (info.allocated_bytes, info.pinned_bytes));
    let before = held()?;
    check()?;
    eventually("all memory that the case took is back", || Ok(held()? == before))
}
