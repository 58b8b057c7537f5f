//! Device memory that can be offloaded.
//!
//! Each unit's state lies in its own [`Arena`]. To leave the device, its bytes are copied to pinned host
//! memory after the work that used them last, and the arena's memory is freed; the addresses and all views of
//! them stay valid. Each direction has a [`CopyThread`], so that copies overlap with compute and one unit is
//! copied while another is updated.

use std::{
    mem,
    ops::Range,
    sync::{Arc, mpsc},
    time::Duration,
};

use anyroll_backends::{Arena, Buffer, DType, Device, Error as BackendError, Event, PinnedBuffer, Stream};

use crate::{
    Result,
    copy_thread::{COPY_TIMEOUT, CopyDirection, CopyRequest, CopyThread, PendingCopy, wait_for},
};
/// Device memory of one unit's state, which can be offloaded.
#[derive(Debug)]
pub(crate) struct OffloadArena {
    arena: Arena,
    whole: Buffer,
    host: HostMemory,
    /// True if `host` equals the device's copy: nothing was written since the last copy. Frozen states are
    /// copied once.
    is_on_host: bool,
    residency: Residency,
    /// The compute that used it last, if known.
    last_use: Option<Event>,
    /// Events on compute before and after its last wait for this memory.
    wait_events: Option<(Event, Event)>,
}

/// Pinned memory for an offloaded state. It is kept once allocated, since pinning takes longer than copying.
#[derive(Debug)]
enum HostMemory {
    Unallocated,
    /// Requested from the thread that pins it.
    Requested(mpsc::Receiver<Result<PinnedBuffer, BackendError>>),
    Ready(PinnedBuffer),
    /// Lent to a copy thread, which returns it.
    Lent,
}

impl HostMemory {
    /// Lends the memory to a copy thread. Allocates it if it was not requested before.
    fn lend(&mut self, device: &Arc<dyn Device>, len_bytes: usize) -> Result<PinnedBuffer> {
        let requested = match mem::replace(self, Self::Lent) {
            Self::Ready(memory) => return Ok(memory),
            Self::Requested(memory) => memory.recv_timeout(COPY_TIMEOUT).ok(),
            Self::Unallocated => None,
            Self::Lent => unreachable!("one copy runs at a time"),
        };
        Ok(requested.unwrap_or_else(|| PinnedBuffer::new(device, len_bytes))?)
    }
}

/// Bytes of pinned memory to allocate, and the channel to send it to.
pub(crate) type PinRequest = (usize, mpsc::Sender<Result<PinnedBuffer, BackendError>>);

#[derive(Debug)]
enum Residency {
    OnDevice,
    /// Offloading until the copy is done, if a copy still uses the memory.
    Offloading {
        copy: Option<CopyState>,
        is_kept: bool,
    },
    /// On the host if `is_kept`; otherwise its values are gone.
    Offloaded {
        is_kept: bool,
    },
    /// Loading until the copy is done.
    Loading(CopyState),
}

impl Residency {
    fn copy(&mut self) -> Option<&mut CopyState> {
        match self {
            Self::Offloading { copy, .. } => copy.as_mut(),
            Self::Loading(copy) => Some(copy),
            Self::OnDevice | Self::Offloaded { .. } => None,
        }
    }
}

#[derive(Debug)]
enum CopyState {
    Requested(PendingCopy),
    /// All of it is on a stream; the event marks its end.
    Queued(Event),
}

impl OffloadArena {
    /// Allocates zeroed memory for work on `compute`.
    pub(crate) fn zeros(name: String, compute: &Stream, len_bytes: usize) -> Result<Self> {
        let arena = Arena::new(name, compute, len_bytes)?;
        let whole = arena.buffer(0..len_bytes, DType::U8);
        let (host, residency) = (HostMemory::Unallocated, Residency::OnDevice);
        Ok(Self { arena, whole, host, is_on_host: false, residency, last_use: None, wait_events: None })
    }

    /// Returns elements `range` of `dtype`, counted from the start.
    pub(crate) fn buffer(&self, range: Range<usize>, dtype: DType) -> Buffer {
        let size = dtype.size_bytes();
        self.arena.buffer(range.start * size..range.end * size, dtype)
    }

    /// Makes it ready for writes by `compute`. The caller has checked that it is not offloaded.
    pub(crate) fn ready_to_write(&mut self, compute: &Stream) -> Result<()> {
        self.is_on_host = false;
        self.ready_to_read(compute)
    }

    /// Makes it ready for reads by `compute`. The caller has checked that it is not offloaded.
    pub(crate) fn ready_to_read(&mut self, compute: &Stream) -> Result<()> {
        assert!(!self.is_offloaded(), "public calls check that the states they need are loaded");
        if let Residency::Loading(_) = self.residency {
            let before = compute.record_timed()?;
            if let Some(copied) = self.copied()? {
                compute.wait(&copied)?;
            }
            self.wait_events = Some((before, compute.record_timed()?));
            self.residency = Residency::OnDevice;
        }
        self.last_use = None;
        Ok(())
    }

    /// Records that no later work than what is now on `compute` uses it.
    pub(crate) fn used(&mut self, compute: &Stream) -> Result<()> {
        self.last_use = Some(compute.record()?);
        Ok(())
    }

    /// Returns a request for pinned memory, unless it has some or has requested it.
    pub(crate) fn request_pinned(&mut self) -> Option<PinRequest> {
        let HostMemory::Unallocated = self.host else { return None };
        let (to, memory) = mpsc::channel();
        self.host = HostMemory::Requested(memory);
        Some((self.arena.len_bytes(), to))
    }

    pub(crate) fn is_offloaded(&self) -> bool {
        self.is_offloading() || matches!(self.residency, Residency::Offloaded { .. })
    }

    pub(crate) fn is_offloading(&self) -> bool {
        matches!(self.residency, Residency::Offloading { .. })
    }

    pub(crate) fn start_offload(&mut self, keep: bool, thread: &CopyThread, compute: &Stream) -> Result<()> {
        if self.is_offloaded() {
            return Ok(());
        }
        let arrived = self.copied()?;
        if !keep {
            self.is_on_host = false;
            self.residency = Residency::Offloading { copy: arrived.map(CopyState::Queued), is_kept: false };
            return Ok(());
        }
        let last_use = self.last_use.take().map_or_else(|| compute.record(), Ok)?;
        if mem::replace(&mut self.is_on_host, true) {
            let copy = Some(CopyState::Queued(arrived.unwrap_or(last_use)));
            self.residency = Residency::Offloading { copy, is_kept: true };
            return Ok(());
        }
        let after = arrived.into_iter().chain([last_use]).collect();
        let copy = thread.submit(self.copy_request(CopyDirection::ToHost, after)?);
        self.residency = Residency::Offloading { copy: Some(CopyState::Requested(copy)), is_kept: true };
        Ok(())
    }

    pub(crate) fn start_load(&mut self, thread: &CopyThread) -> Result<()> {
        match &mut self.residency {
            Residency::OnDevice | Residency::Loading(_) => {}
            // The memory is still there; the next writer waits for the copy that reads it.
            Residency::Offloading { copy, .. } => {
                self.residency = copy.take().map_or(Residency::OnDevice, Residency::Loading)
            }
            Residency::Offloaded { is_kept: false } => {
                self.arena.map()?;
                self.residency = Residency::OnDevice;
            }
            Residency::Offloaded { is_kept: true } => {
                self.arena.map()?;
                let copy = thread.submit(self.copy_request(CopyDirection::ToDevice, Vec::new())?);
                self.residency = Residency::Loading(CopyState::Requested(copy));
            }
        }
        Ok(())
    }

    /// Returns how long compute waited for its last load, and zero from then on. Waits for that compute.
    pub(crate) fn take_load_wait(&mut self) -> Result<Duration> {
        let Some((before, after)) = self.wait_events.take() else { return Ok(Duration::ZERO) };
        wait_for(&after, self.whole.home().device())?;
        Ok(before.elapsed(&after)?)
    }

    /// Returns its length.
    pub(crate) fn len_bytes(&self) -> usize {
        self.arena.len_bytes()
    }

    fn copy_request(&mut self, direction: CopyDirection, after: Vec<Event>) -> Result<CopyRequest> {
        let device = self.whole.clone();
        let host = self.host.lend(device.home().device(), self.arena.len_bytes())?;
        Ok(CopyRequest { direction, host, device, after })
    }

    /// Returns once its copy is done, if there is one.
    pub(crate) fn finish_copy(&mut self) -> Result<()> {
        match self.copied()? {
            Some(end) => Ok(wait_for(&end, self.whole.home().device())?),
            None => Ok(()),
        }
    }

    /// Returns true if it is leaving and its copy is done.
    pub(crate) fn is_offload_done(&mut self) -> Result<bool> {
        let Residency::Offloading { copy, .. } = &self.residency else { return Ok(false) };
        let end = match copy {
            None => return Ok(true),
            Some(CopyState::Queued(end)) => end.clone(),
            Some(CopyState::Requested(copy)) => match copy.try_result() {
                Some(result) => self.store_result(result?),
                None => return Ok(false),
            },
        };
        Ok(end.is_complete()?)
    }

    /// If it is leaving, waits for its copy and frees its memory. Returns the bytes freed.
    pub(crate) fn finish_offload(&mut self) -> Result<usize> {
        self.finish_copy()?;
        self.give_back()
    }

    /// Frees its memory if it has left. Returns the bytes freed.
    pub(crate) fn give_back(&mut self) -> Result<usize> {
        let Residency::Offloading { is_kept, .. } = self.residency else { return Ok(0) };
        self.arena.unmap()?;
        self.residency = Residency::Offloaded { is_kept };
        Ok(self.arena.len_bytes())
    }

    /// Returns the end of its copy, if there is one, once all of the copy is on a stream.
    fn copied(&mut self) -> Result<Option<Event>> {
        match self.residency.copy() {
            None => Ok(None),
            Some(CopyState::Queued(end)) => Ok(Some(end.clone())),
            Some(CopyState::Requested(copy)) => {
                let result = copy.result()?;
                Ok(Some(self.store_result(result)))
            }
        }
    }

    /// Stores the result of a copy thread's copy.
    fn store_result(&mut self, (memory, end): (PinnedBuffer, Event)) -> Event {
        self.host = HostMemory::Ready(memory);
        *self.residency.copy().expect("a copy was requested") = CopyState::Queued(end.clone());
        end
    }
}
