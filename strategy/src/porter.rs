//! Long copies between a device and the host, a little at a time.
//!
//! A device has one engine for each direction. It stays with a stream for as long as that has copies for it, and waits
//! with all others for one that has to wait for compute: given all states at once, it would have a batch for the next
//! pass, or the loss of the last one, wait until they have passed (on an H200 a third of a second for a model of 1.5
//! billion weights). So a thread gives it a piece at a time, and nothing that cannot be copied at once.

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

/// Some 0.3 ms of PCIe 5: much longer than the engine idles between two, and short enough for others to wait for.
const PIECE_BYTES: usize = 16 << 20;
/// How long a piece's end is looked for without sleep, which may last longer than wanted by some 0.05 ms.
const SPIN: Duration = Duration::from_micros(200);
/// Far beyond the copies of all units, or pinning memory: a wedged device is to be an error and not a hang.
pub(crate) const COPY_TIMEOUT: Duration = Duration::from_secs(120);
/// How often a wait looks whether anybody still wants the copy.
const LOOK: Duration = Duration::from_millis(20);

/// A thread that carries bytes, one order after the other. To drop it is to give up what it has not begun.
#[derive(Debug)]
pub(crate) struct Porter {
    stream: Stream,
    /// `None` once no more come.
    orders: Option<mpsc::Sender<(Order, mpsc::Sender<Outcome>)>>,
    is_given_up: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

/// What is to be copied.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) way: Way,
    pub(crate) host: PinnedBuffer,
    /// Of bytes, as many as `host` has.
    pub(crate) device: Buffer,
    /// What comes before.
    pub(crate) after: Vec<Event>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    ToHost,
    ToDevice,
}

/// What becomes of an order: the host's memory again, and the copy's end, which is on a stream by then.
pub(crate) type Outcome = Result<(PinnedBuffer, Event)>;

/// An order on its way.
#[derive(Debug)]
pub(crate) struct Transit {
    device: Arc<dyn Device>,
    outcome: mpsc::Receiver<Outcome>,
}

impl Porter {
    /// `name` is the thread's.
    pub(crate) fn new(device: &Arc<dyn Device>, name: &str) -> Result<Self> {
        let (orders, ordered) = mpsc::channel::<(Order, mpsc::Sender<Outcome>)>();
        let is_given_up = Arc::new(AtomicBool::new(false));
        let stream = Stream::new(device)?;
        let mut pieces = Pieces {
            stream: stream.clone(),
            given: None,
            pace: Duration::ZERO,
            is_given_up: is_given_up.clone(),
        };
        let carry = move || {
            for (order, to) in ordered {
                // Whoever ordered may have gone away meanwhile.
                drop(to.send(pieces.carry(order)));
            }
        };
        let thread = thread::Builder::new().name(name.into()).spawn(carry);
        let thread = thread.map_err(|error| failed(device, format!("no thread for copies: {error}")))?;
        Ok(Self { stream, orders: Some(orders), is_given_up, thread: Some(thread) })
    }

    /// Starts a copy behind those that were ordered before, and returns at once.
    pub(crate) fn carry(&self, order: Order) -> Transit {
        let (to, outcome) = mpsc::channel();
        let orders = self.orders.as_ref().expect("only `drop` takes it");
        // A thread that has gone took `to` along, and the outcome says so.
        drop(orders.send((order, to)));
        Transit { device: self.stream.device().clone(), outcome }
    }

    /// Returns once what it has given to the device is done, with the first error of that.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }
}

impl Drop for Porter {
    fn drop(&mut self) {
        self.is_given_up.store(true, Ordering::Relaxed);
        self.orders = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a thread for copies panicked");
        }
    }
}

impl Transit {
    /// Waits until the whole copy is on its stream; `Ok` comes once.
    pub(crate) fn outcome(&self) -> Outcome {
        self.outcome.recv_timeout(COPY_TIMEOUT).unwrap_or_else(|error| {
            Err(failed(
                &self.device,
                format!("a copy of states was not begun within {COPY_TIMEOUT:?} ({error})"),
            ))
        })
    }

    /// The same without waiting; `None` if it is not.
    pub(crate) fn outcome_now(&self) -> Option<Outcome> {
        self.outcome.try_recv().ok()
    }
}

/// What is with the device's engine.
struct Pieces {
    stream: Stream,
    /// What is copied until an event, which keeps the memory alive, and since when.
    given: Option<(Event, Buffer, Instant)>,
    /// How long the last piece took that was waited for.
    pace: Duration,
    is_given_up: Arc<AtomicBool>,
}

impl Pieces {
    fn carry(&mut self, Order { way, mut host, device, after }: Order) -> Outcome {
        for event in &after {
            self.wait(event)?;
        }
        for begin in (0..device.len_bytes()).step_by(PIECE_BYTES) {
            self.await_piece()?;
            let piece = device.slice(begin..device.len_bytes().min(begin + PIECE_BYTES));
            match way {
                Way::ToHost => host.copy_from(begin, &piece, &self.stream)?,
                Way::ToDevice => host.copy_to(begin, &piece, &self.stream)?,
            }
            self.given = Some((self.stream.record()?, piece, Instant::now()));
        }
        Ok((host, self.stream.record()?))
    }

    fn await_piece(&mut self) -> Result<()> {
        let Some((end, _, since)) = &self.given else { return Ok(()) };
        if !end.is_complete()? {
            thread::sleep((self.pace / 2).saturating_sub(since.elapsed()));
            let spun = Instant::now();
            while !end.is_complete()? {
                if spun.elapsed() > SPIN {
                    self.wait(end)?;
                }
                thread::yield_now();
            }
            self.pace = since.elapsed();
        }
        self.given = None;
        Ok(())
    }

    fn wait(&self, event: &Event) -> Result<()> {
        let started = Instant::now();
        while !event.wait_for(LOOK)? {
            if self.is_given_up.load(Ordering::Relaxed) || started.elapsed() > COPY_TIMEOUT {
                let device = self.stream.device();
                return Err(failed(
                    device,
                    format!("a copy of states did not go on within {COPY_TIMEOUT:?}"),
                ));
            }
        }
        Ok(())
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        if let Some((end, piece, _)) = self.given.take()
            && !end.wait_for(COPY_TIMEOUT).unwrap_or(false)
        {
            tracing::error!("{} bytes are leaked, which a device may still copy", piece.len_bytes());
            mem::forget(piece);
        }
    }
}

/// Blocks the host until `event`, at most for [`COPY_TIMEOUT`].
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
    /// Of three pieces, the last one short.
    const LEN: usize = 2 * PIECE_BYTES + 12345;

    fn order(device: &Arc<dyn Device>, stream: &Stream, way: Way) -> Order {
        let buffer = Buffer::zeros(stream, LEN, DType::U8).unwrap();
        let mut host = PinnedBuffer::new(device, LEN).unwrap();
        for (index, byte) in host.bytes_mut().unwrap().iter_mut().enumerate() {
            *byte = (index % 251) as u8;
        }
        Order { way, host, device: buffer, after: vec![stream.record().unwrap()] }
    }

    #[test]
    fn all_pieces_come_to_their_places() {
        let device = open(CPU).unwrap();
        let stream = Stream::new(&device).unwrap();
        let porter = Porter::new(&device, "test").unwrap();
        let there = order(&device, &stream, Way::ToDevice);
        let on_device = there.device.clone();
        let (mut host, end) = porter.carry(there).outcome().unwrap();
        host.bytes_mut().unwrap().fill(0);
        let back = Order { way: Way::ToHost, host, device: on_device, after: vec![end] };
        let (mut host, _) = porter.carry(back).outcome().unwrap();
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
        let porter = Porter::new(&device, "test").unwrap();
        let transits: Vec<Transit> =
            (0..3).map(|_| porter.carry(order(&device, &stream, Way::ToHost))).collect();
        let started = Instant::now();
        drop(porter);
        assert!(started.elapsed() < Duration::from_secs(10), "it does not wait for what comes first");
        assert!(transits.iter().all(|transit| transit.outcome().is_err()));
        release.send(()).unwrap();
    }
}
