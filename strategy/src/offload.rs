//! Offloading of states that are not in use.
//!
//! Each unit's state lies in its own [`Arena`]. To leave the device, its bytes are copied to pinned host
//! memory after the work that used them last, and the arena's memory is freed; the addresses and all views of
//! them stay valid. Each direction has a [`CopyThread`], so that copies overlap with compute and one unit is
//! copied while another is updated.

use std::{fmt, mem, ops::Range, sync::Arc, sync::mpsc, thread, time::Duration};

use anyroll_backends::{Arena, Buffer, DType, Device, Error as BackendError, Event, PinnedBuffer, Stream};
use anyroll_models::Model;

use crate::{
    Error, Result, Zero,
    copy_thread::{COPY_TIMEOUT, CopyDirection, CopyRequest, CopyThread, PendingCopy, wait_for},
    optimizer::StateStorage,
};

/// A state that can leave the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The optimizer's moments and, with 16-bit weights, its fp32 weights. Empty if the optimizer steps on
    /// the host ([`crate::StepsOn`]), where they stay.
    Optimizer,
    /// The accumulated gradients. After a step their values are not needed, so nothing is copied.
    Gradients,
    /// The weights that the blocks run with. Empty if they are on the host ([`crate::ParamsOn`]).
    Params,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Optimizer => "optimizer states",
            Self::Gradients => "gradients",
            Self::Params => "weights",
        })
    }
}

const STATES: [State; 3] = [State::Optimizer, State::Gradients, State::Params];

/// Calls that move states. Each may be made at any time between steps, and repeated: a state that is already
/// in place stays there.
impl<M: Model> Zero<M> {
    /// Starts to pin host memory for `include` in the background. Pinning takes longer than a copy, and the
    /// first offload would wait for it. Gradients are normally neither kept nor pinned.
    pub fn prepare_offload(&mut self, include: &[State]) {
        let device = self.compute.device().clone();
        let mut requests = Vec::new();
        for &state in include.iter().filter(|&&state| state != State::Gradients) {
            requests.extend(self.arenas(&[state]).into_iter().filter_map(OffloadArena::request_pinned));
        }
        let pin = move || {
            for (len_bytes, to) in requests {
                if to.send(PinnedBuffer::new(&device, len_bytes)).is_err() {
                    return; // the receiver is gone
                }
            }
        };
        // If the thread does not start, the requests are dropped and memory is pinned when it is needed.
        drop(thread::Builder::new().name("pinned memory".into()).spawn(pin));
    }

    /// Offloads `include` and returns once its device memory is freed: the bytes that this call freed. Below
    /// stage 3, drop tensors returned by [`Zero::weights`] before offloading `Params`.
    ///
    /// # Errors
    /// The device's; states that had not left are still there.
    pub fn offload_states(&mut self, include: &[State]) -> Result<usize> {
        self.start_offload(include)?;
        let mut freed_bytes = 0;
        for arena in self.arenas(include) {
            freed_bytes += arena.finish_offload()?;
        }
        self.transfers.offload_thread.synchronize()?; // returns the errors of copies
        Ok(freed_bytes)
    }

    /// Starts [`Self::offload_states`] and returns at once. Call it right after a step, so that each unit
    /// leaves as soon as its update is done. From here on the states count as offloaded.
    pub fn start_offload(&mut self, include: &[State]) -> Result<()> {
        let (thread, compute) = (self.transfers.offload_thread.clone(), self.compute.clone());
        for &state in include {
            self.settle_uses(state)?;
            let keep = state != State::Gradients || self.has_accumulated();
            for arena in self.arenas(&[state]) {
                arena.start_offload(keep, &thread, &compute)?;
            }
        }
        Ok(())
    }

    /// Frees the memory of states whose copies are done, without waiting, and returns the bytes freed.
    ///
    /// # Errors
    /// The device's.
    pub fn give_back_left(&mut self) -> Result<usize> {
        let mut freed_bytes = 0;
        for arena in self.arenas(&STATES) {
            if arena.is_offload_done()? {
                freed_bytes += arena.give_back()?;
            }
        }
        Ok(freed_bytes)
    }

    /// Waits for states that are leaving until `bytes` of the device are free, or until all of them have
    /// left.
    ///
    /// # Errors
    /// The device's.
    pub fn make_room(&mut self, bytes: usize) -> Result<()> {
        self.give_back_left()?;
        let device = self.compute.device().clone();
        for arena in self.arenas(&STATES).into_iter().filter(|it| it.is_offloading()) {
            if device.memory_info()?.free_bytes >= bytes {
                break;
            }
            arena.finish_offload()?;
        }
        Ok(())
    }

    /// Returns the device memory of states that are still leaving, in bytes.
    pub fn leaving_bytes(&mut self) -> usize {
        let leaving = self.arenas(&STATES).into_iter().filter(|it| it.is_offloading());
        leaving.map(|it| it.arena.len_bytes()).sum()
    }

    /// Starts to load `include` back and returns at once: compute waits for each unit at its first use.
    ///
    /// # Errors
    /// The device's, such as too little free memory.
    pub fn load_states(&mut self, include: &[State]) -> Result<()> {
        let thread = self.transfers.load_thread.clone();
        self.arenas(include).into_iter().try_for_each(|arena| arena.start_load(&thread))
    }

    /// Returns once everything that [`Self::load_states`] loads is on the device. Only measurements need this
    /// wait, compute does not.
    ///
    /// # Errors
    /// The device's.
    pub fn finish_loading(&mut self) -> Result<()> {
        self.arenas(&STATES).into_iter().try_for_each(OffloadArena::finish_copy)?;
        Ok(self.transfers.load_thread.synchronize()?)
    }

    /// Returns how long compute waited for states being loaded, in the last step that used them. Waits for
    /// that step.
    pub fn load_wait(&mut self) -> Result<Duration> {
        let mut total = Duration::ZERO;
        for arena in self.arenas(&STATES) {
            if let Some((before, after)) = arena.wait_events.take() {
                wait_for(&after, arena.whole.home().device())?;
                total += before.elapsed(&after)?;
            }
        }
        Ok(total)
    }

    /// Returns an error for the call `op`, which needs `states`, if one of them is offloaded.
    pub(crate) fn needs(&mut self, op: &'static str, states: &[State]) -> Result<()> {
        for &state in states {
            if self.arenas(&[state]).iter().any(|arena| arena.is_offloaded()) {
                return Err(Error::Offloaded { op, state });
            }
        }
        Ok(())
    }

    /// Makes compute wait for other streams' use of a state, and drops the buffers that belong to it.
    fn settle_uses(&mut self, state: State) -> Result<()> {
        match state {
            State::Optimizer => {}
            State::Gradients => self.drop_gradient_buffers(),
            State::Params => self.settle_weights()?,
        }
        Ok(())
    }

    /// Returns the memory of `include`, in the order of [`STATES`].
    fn arenas(&mut self, include: &[State]) -> Vec<&mut OffloadArena> {
        let (mut optimizer, mut gradients, mut params) = (Vec::new(), Vec::new(), Vec::new());
        for state in self.training.iter_mut().flat_map(|training| training.states.iter_mut().flatten()) {
            if let StateStorage::Device(memory) = &mut state.storage {
                optimizer.push(memory);
            }
            gradients.push(&mut state.gradient_memory);
        }
        params.extend(self.units.iter_mut().filter_map(|unit| unit.storage.arena()));
        let all = STATES.into_iter().zip([optimizer, gradients, params]);
        all.filter(|(state, _)| include.contains(state)).flat_map(|(_, arenas)| arenas).collect()
    }
}

/// Streams and threads for copies between host and device. Compute waits for the streams; the copy threads
/// copy states.
#[derive(Debug)]
pub(crate) struct Transfers {
    pub(crate) to_host: Stream,
    pub(crate) to_device: Stream,
    offload_thread: Arc<CopyThread>,
    load_thread: Arc<CopyThread>,
}

impl Transfers {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Result<Self> {
        Ok(Self {
            to_host: Stream::new(device)?,
            to_device: Stream::new(device)?,
            offload_thread: Arc::new(CopyThread::new(device, "states leaving")?),
            load_thread: Arc::new(CopyThread::new(device, "states arriving")?),
        })
    }
}

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
type PinRequest = (usize, mpsc::Sender<Result<PinnedBuffer, BackendError>>);

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
    fn request_pinned(&mut self) -> Option<PinRequest> {
        let HostMemory::Unallocated = self.host else { return None };
        let (to, memory) = mpsc::channel();
        self.host = HostMemory::Requested(memory);
        Some((self.arena.len_bytes(), to))
    }

    fn is_offloaded(&self) -> bool {
        self.is_offloading() || matches!(self.residency, Residency::Offloaded { .. })
    }

    fn is_offloading(&self) -> bool {
        matches!(self.residency, Residency::Offloading { .. })
    }

    fn start_offload(&mut self, keep: bool, thread: &CopyThread, compute: &Stream) -> Result<()> {
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

    fn start_load(&mut self, thread: &CopyThread) -> Result<()> {
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

    fn copy_request(&mut self, direction: CopyDirection, after: Vec<Event>) -> Result<CopyRequest> {
        let device = self.whole.clone();
        let host = self.host.lend(device.home().device(), self.arena.len_bytes())?;
        Ok(CopyRequest { direction, host, device, after })
    }

    /// Returns once its copy is done, if there is one.
    fn finish_copy(&mut self) -> Result<()> {
        match self.copied()? {
            Some(end) => Ok(wait_for(&end, self.whole.home().device())?),
            None => Ok(()),
        }
    }

    /// Returns true if it is leaving and its copy is done.
    fn is_offload_done(&mut self) -> Result<bool> {
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
    fn finish_offload(&mut self) -> Result<usize> {
        self.finish_copy()?;
        self.give_back()
    }

    /// Frees its memory if it has left. Returns the bytes freed.
    fn give_back(&mut self) -> Result<usize> {
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
