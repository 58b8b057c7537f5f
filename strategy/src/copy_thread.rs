//! Long copies between device and host, split into chunks.
//!
//! A device has one copy engine per direction. The engine serves a stream as long as that stream has copies,
//! and blocks all other streams' copies while one copy waits for compute. If all states were queued at once,
//! the next pass's batch or the last pass's loss would wait behind them. That is a third of a second on an
//! H200, for a model of 1.5 billion weights. So a thread queues one chunk at a time, and only chunks that can
//! be copied at once.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyroll_backends::{Buffer, Device, Error, Event, PinnedBuffer, Result, Stream};

/// About 0.3 ms of PCIe 5: much longer than the engine idles between two chunks, and short enough for other
/// copies to wait for.
const CHUNK_BYTES: usize = 16 << 20;
/// Time to poll for the end of a chunk before sleeping; a sleep may overrun by about 0.05 ms.
const SPIN: Duration = Duration::from_micros(200);
/// Far longer than the copies of all units, or pinning memory, can take. Turns a wedged device into an error
/// instead of a hang.
pub(crate) const COPY_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval at which a wait checks if the copy is still wanted.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A thread that runs copies, one request after the other. Dropping it cancels the requests that have not
/// begun.
#[derive(Debug)]
pub(crate) struct CopyThread {
    stream: Stream,
    /// `None` once no more requests will come.
    requests: Option<mpsc::Sender<(CopyRequest, mpsc::Sender<CopyResult>)>>,
    is_cancelled: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

/// A copy to run.
#[derive(Debug)]
pub(crate) struct CopyRequest {
    pub(crate) direction: CopyDirection,
    pub(crate) host: PinnedBuffer,
    /// Device memory as bytes, as many as `host` has.
    pub(crate) device: Buffer,
    /// Events to wait for before the copy.
    pub(crate) after: Vec<Event>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum CopyDirection {
    ToHost,
    ToDevice,
}

/// Result of a request: the host memory, and the event at the end of the copy, which is on a stream by then.
pub(crate) type CopyResult = Result<(PinnedBuffer, Event)>;

/// A request in flight.
#[derive(Debug)]
pub(crate) struct PendingCopy {
    device: Arc<dyn Device>,
    result: mpsc::Receiver<CopyResult>,
}

impl CopyThread {
    /// Starts the thread and names it `name`.
    pub(crate) fn new(device: &Arc<dyn Device>, name: &str) -> Result<Self> {
        let (requests, requested) = mpsc::channel::<(CopyRequest, mpsc::Sender<CopyResult>)>();
        let is_cancelled = Arc::new(AtomicBool::new(false));
        let stream = Stream::new(device)?;
        let mut chunks = Chunks {
            stream: stream.clone(),
            queued: None,
            last_duration: Duration::ZERO,
            is_cancelled: is_cancelled.clone(),
        };
        let run = move || {
            for (request, to) in requested {
                // The requester may be gone by now.
                drop(to.send(chunks.copy(request)));
            }
        };
        let thread = thread::Builder::new().name(name.into()).spawn(run);
        let thread =
            thread.map_err(|error| failed(device, format!("cannot start a thread for copies: {error}")))?;
        Ok(Self { stream, requests: Some(requests), is_cancelled, thread: Some(thread) })
    }

    /// Queues a copy behind earlier requests and returns at once.
    pub(crate) fn submit(&self, request: CopyRequest) -> PendingCopy {
        let (to, result) = mpsc::channel();
        let requests = self.requests.as_ref().expect("only `drop` takes it");
        // If the thread has ended, `to` is dropped with it and the result reports that.
        drop(requests.send((request, to)));
        PendingCopy { device: self.stream.device().clone(), result }
    }

    /// Waits for all copies queued on the device and returns their first error.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }
}

impl Drop for CopyThread {
    fn drop(&mut self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        self.requests = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a thread for copies panicked");
        }
    }
}

impl PendingCopy {
    /// Waits until the whole copy is on its stream; returns `Ok` only once.
    pub(crate) fn result(&self) -> CopyResult {
        self.result.recv_timeout(COPY_TIMEOUT).unwrap_or_else(|error| {
            Err(failed(
                &self.device,
                format!("a copy of states did not start within {COPY_TIMEOUT:?} ({error})"),
            ))
        })
    }

    /// Like [`Self::result`] without waiting; `None` if the copy is not on its stream yet.
    pub(crate) fn try_result(&self) -> Option<CopyResult> {
        self.result.try_recv().ok()
    }
}

/// Chunks that are queued on the device's engine.
struct Chunks {
    stream: Stream,
    /// End of the chunk in flight, its memory, which must stay alive until then, and the time it was queued.
    queued: Option<(Event, Buffer, Instant)>,
    /// Duration of the last chunk that was waited for.
    last_duration: Duration,
    is_cancelled: Arc<AtomicBool>,
}

impl Chunks {
    fn copy(&mut self, CopyRequest { direction, mut host, device, after }: CopyRequest) -> CopyResult {
        for event in &after {
            self.wait(event)?;
        }
        for begin in (0..device.len_bytes()).step_by(CHUNK_BYTES) {
            self.await_chunk()?;
            let chunk = device.slice(begin..device.len_bytes().min(begin + CHUNK_BYTES));
            match direction {
                CopyDirection::ToHost => host.copy_from(begin, &chunk, &self.stream)?,
                CopyDirection::ToDevice => host.copy_to(begin, &chunk, &self.stream)?,
            }
            self.queued = Some((self.stream.record()?, chunk, Instant::now()));
        }
        Ok((host, self.stream.record()?))
    }

    fn await_chunk(&mut self) -> Result<()> {
        let Some((end, _, since)) = &self.queued else { return Ok(()) };
        if !end.is_complete()? {
            thread::sleep((self.last_duration / 2).saturating_sub(since.elapsed()));
            let spun = Instant::now();
            while !end.is_complete()? {
                if spun.elapsed() > SPIN {
                    self.wait(end)?;
                }
                thread::yield_now();
            }
            self.last_duration = since.elapsed();
        }
        self.queued = None;
        Ok(())
    }

    fn wait(&self, event: &Event) -> Result<()> {
        let started = Instant::now();
        while !event.wait_for(POLL_INTERVAL)? {
            if self.is_cancelled.load(Ordering::Relaxed) || started.elapsed() > COPY_TIMEOUT {
                let device = self.stream.device();
                return Err(failed(
                    device,
                    format!("a copy of states made no progress within {COPY_TIMEOUT:?}"),
                ));
            }
        }
        Ok(())
    }
}

impl Drop for Chunks {
    fn drop(&mut self) {
        if let Some((end, chunk, _)) = self.queued.take()
            && !end.wait_for(COPY_TIMEOUT).unwrap_or(false)
        {
            tracing::error!("leaked {} bytes that a device may still be copying", chunk.len_bytes());
            mem::forget(chunk);
        }
    }
}

/// Blocks the host until `event`, for at most [`COPY_TIMEOUT`].
pub(crate) fn wait_for(event: &Event, device: &Arc<dyn Device>) -> Result<()> {
    if event.wait_for(COPY_TIMEOUT)? {
        return Ok(());
    }
    Err(failed(device, format!("a copy of states did not finish within {COPY_TIMEOUT:?}")))
}

fn failed(device: &Arc<dyn Device>, message: String) -> Error {
    Error::Stream { device: device.id(), message }
}

#[cfg(test)]
mod tests {
    use anyroll_backends::{BackendKind, DType, DeviceId, open};

    use super::*;

    const CPU: DeviceId = DeviceId { backend: BackendKind::CPU, ordinal: 0 };
    /// Three chunks, the last one short.
    const LEN: usize = 2 * CHUNK_BYTES + 12345;

    fn request(device: &Arc<dyn Device>, stream: &Stream, direction: CopyDirection) -> CopyRequest {
        let buffer = Buffer::zeros(stream, LEN, DType::U8).unwrap();
        let mut host = PinnedBuffer::new(device, LEN).unwrap();
        for (index, byte) in host.bytes_mut().unwrap().iter_mut().enumerate() {
            *byte = (index % 251) as u8;
        }
        CopyRequest { direction, host, device: buffer, after: vec![stream.record().unwrap()] }
    }

    #[test]
    fn all_pieces_come_to_their_places() {
        let device = open(CPU).unwrap();
        let stream = Stream::new(&device).unwrap();
        let copy_thread = CopyThread::new(&device, "test").unwrap();
        let there = request(&device, &stream, CopyDirection::ToDevice);
        let on_device = there.device.clone();
        let (mut host, end) = copy_thread.submit(there).result().unwrap();
        host.bytes_mut().unwrap().fill(0);
        let back =
            CopyRequest { direction: CopyDirection::ToHost, host, device: on_device, after: vec![end] };
        let (mut host, _) = copy_thread.submit(back).result().unwrap();
        assert!(host.bytes().unwrap().iter().enumerate().all(|(index, &byte)| byte == (index % 251) as u8));
    }

    #[test]
    fn one_that_goes_away_gives_up_what_it_has_not_begun() {
        let device = open(CPU).unwrap();
        let stream = Stream::new(&device).unwrap();
        let (release, released) = mpsc::channel::<()>();
        stream
            .enqueue_host_fn(Box::new(move || {
                let _ = released.recv();
                Ok(())
            }))
            .unwrap();
        let copy_thread = CopyThread::new(&device, "test").unwrap();
        let copies: Vec<PendingCopy> =
            (0..3).map(|_| copy_thread.submit(request(&device, &stream, CopyDirection::ToHost))).collect();
        let started = Instant::now();
        drop(copy_thread);
        assert!(started.elapsed() < Duration::from_secs(10), "it does not wait for earlier copies");
        assert!(copies.iter().all(|copy| copy.result().is_err()));
        release.send(()).unwrap();
    }
}
