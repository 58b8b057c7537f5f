//! [`Stream`] and [`Event`]: order, written once over the verbs of [`Device`].

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{Device, Error, RawEvent, RawStream, Result, device::HostFn};

/// An in-order queue of device work. Cheap to clone; the last clone ends it after its pending work.
#[derive(Clone, Debug)]
pub struct Stream(Arc<StreamInner>);

#[derive(Debug)]
struct StreamInner {
    device: Arc<dyn Device>,
    raw: RawStream,
    owned: bool,
}

impl Stream {
    /// A new stream, in no order with any other.
    pub fn new(device: &Arc<dyn Device>) -> Result<Self> {
        let raw = device.stream_create()?;
        Ok(Self(Arc::new(StreamInner { device: device.clone(), raw, owned: true })))
    }

    /// The stream that libtorch's operations of the calling thread go to.
    pub fn torch(device: &Arc<dyn Device>) -> Result<Self> {
        let raw = device.torch_stream()?;
        Ok(Self(Arc::new(StreamInner { device: device.clone(), raw, owned: false })))
    }

    /// A stream that this does not own, and that lives as long as the device.
    pub(crate) fn lent(device: &Arc<dyn Device>, raw: RawStream) -> Self {
        Self(Arc::new(StreamInner { device: device.clone(), raw, owned: false }))
    }

    /// The device it belongs to.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.0.device
    }

    /// The backend's handle.
    pub fn raw(&self) -> RawStream {
        self.0.raw
    }

    /// Marks the work enqueued so far.
    pub fn record(&self) -> Result<Event> {
        self.record_event(false)
    }

    /// Marks the work enqueued so far, for [`Event::elapsed`]. Streams pass it more slowly than others.
    pub fn record_timed(&self) -> Result<Event> {
        self.record_event(true)
    }

    fn record_event(&self, timed: bool) -> Result<Event> {
        let raw = self.device().event_create(timed)?;
        let event = Event(Arc::new(EventInner { device: self.device().clone(), raw, timed }));
        // SAFETY: both handles are live and belong to `self.device()`.
        unsafe { self.device().event_record(event.0.raw, self.raw())? };
        Ok(event)
    }

    /// Work enqueued after this call starts once `event` has been reached.
    pub fn wait(&self, event: &Event) -> Result<()> {
        assert_eq!(self.device().id(), event.0.device.id(), "an event orders streams of its own device only");
        // SAFETY: the assertion above; both handles are live.
        unsafe { self.device().stream_wait_event(self.raw(), event.0.raw) }
    }

    /// Work enqueued on `self` after this call starts once the work that is on `other` now is done.
    pub fn wait_stream(&self, other: &Self) -> Result<()> {
        if self.raw() == other.raw() { Ok(()) } else { self.wait(&other.record()?) }
    }

    /// Blocks the host until everything enqueued so far is done, and returns its first error.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the handle is live as long as `self`.
        unsafe { self.device().stream_synchronize(self.raw()) }
    }

    /// Runs `work` on a host thread, in order with the stream. It must not call this device.
    pub fn enqueue_host_fn(&self, work: HostFn) -> Result<()> {
        // SAFETY: the handle is live as long as `self`.
        unsafe { self.device().enqueue_host_fn(self.raw(), work) }
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: the last owner is going away, and events and buffers hold their own references.
            report(unsafe { self.device.stream_destroy(self.raw) });
        }
    }
}

/// A point in a stream's order. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Event(Arc<EventInner>);

#[derive(Debug)]
struct EventInner {
    device: Arc<dyn Device>,
    raw: RawEvent,
    timed: bool,
}

impl Event {
    /// Returns true once the stream has reached it.
    pub fn is_complete(&self) -> Result<bool> {
        // SAFETY: the handle is live as long as `self`.
        unsafe { self.0.device.event_query(self.0.raw) }
    }

    /// Blocks the host until the stream has reached it, at most for `timeout`. Returns false if it has not by then.
    pub fn wait_for(&self, timeout: Duration) -> Result<bool> {
        const SHORTEST: Duration = Duration::from_micros(5);
        const LONGEST: Duration = Duration::from_millis(1);
        let start = Instant::now();
        while !self.is_complete()? {
            let waited = start.elapsed();
            if waited > timeout {
                return Ok(false);
            }
            // Looks an eighth late at most, and leaves the core to others the longer it takes.
            std::thread::sleep((waited / 8).clamp(SHORTEST, LONGEST));
        }
        Ok(true)
    }

    /// Time from `self` to `later`; both must be complete, and come from [`Stream::record_timed`].
    pub fn elapsed(&self, later: &Self) -> Result<Duration> {
        assert_eq!(self.0.device.id(), later.0.device.id(), "events of one device only");
        assert!(self.0.timed && later.0.timed, "only timed events know when they were reached");
        // SAFETY: both handles are live and of this device.
        unsafe { self.0.device.event_elapsed(self.0.raw, later.0.raw) }
    }
}

impl Drop for EventInner {
    fn drop(&mut self) {
        // SAFETY: nobody else holds this handle.
        report(unsafe { self.device.event_destroy(self.raw) });
    }
}

/// `Drop` can return no error and must not panic; a failed release is worth a line in the log.
pub(crate) fn report(released: Result<(), Error>) {
    if let Err(error) = released {
        tracing::error!("a release failed: {error}");
    }
}
