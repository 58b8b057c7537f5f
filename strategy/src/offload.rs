//! Offloading of states that are not in use.
//!
//! Each unit's state lies in its own [`Arena`]. To leave the device, its bytes are copied to pinned host
//! memory after the work that used them last, and the arena's memory is freed; the addresses and all views of
//! them stay valid. Each direction has a [`Porter`], so that copies overlap with compute and one unit is
//! copied while another is updated.

use std::{fmt, mem, ops::Range, sync::Arc, sync::mpsc, thread, time::Duration};

use anyroll_backends::{Arena, Buffer, DType, Device, Error as BackendError, Event, PinnedBuffer, Stream};
use anyroll_models::Model;

use crate::{
    Error, Result, Zero,
    optimizer::Home,
    porter::{COPY_TIMEOUT, Order, Porter, Transit, Way, wait_for},
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
        let mut orders = Vec::new();
        for &state in include.iter().filter(|&&state| state != State::Gradients) {
            orders.extend(self.movables(&[state]).into_iter().filter_map(Movable::order_host));
        }
        let pin = move || {
            for (len_bytes, to) in orders {
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
        for movable in self.movables(include) {
            freed_bytes += movable.finish_leaving()?;
        }
        self.transfers.leaving.synchronize()?; // returns the errors of copies
        Ok(freed_bytes)
    }

    /// Starts [`Self::offload_states`] and returns at once. Call it right after a step, so that each unit
    /// leaves as soon as its update is done. From here on the states count as offloaded.
    pub fn start_offload(&mut self, include: &[State]) -> Result<()> {
        let (out, compute) = (self.transfers.leaving.clone(), self.compute.clone());
        for &state in include {
            self.settle_uses(state)?;
            let keep = state != State::Gradients || self.has_accumulated();
            for movable in self.movables(&[state]) {
                movable.start_leaving(keep, &out, &compute)?;
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
        for movable in self.movables(&STATES) {
            if movable.has_left()? {
                freed_bytes += movable.give_back()?;
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
        for movable in self.movables(&STATES).into_iter().filter(|it| it.is_leaving()) {
            if device.memory_info()?.free_bytes >= bytes {
                break;
            }
            movable.finish_leaving()?;
        }
        Ok(())
    }

    /// Returns the device memory of states that are still leaving, in bytes.
    pub fn leaving_bytes(&mut self) -> usize {
        let leaving = self.movables(&STATES).into_iter().filter(|it| it.is_leaving());
        leaving.map(|it| it.arena.len_bytes()).sum()
    }

    /// Starts to load `include` back and returns at once: compute waits for each unit at its first use.
    ///
    /// # Errors
    /// The device's, such as too little free memory.
    pub fn load_states(&mut self, include: &[State]) -> Result<()> {
        let back = self.transfers.arriving.clone();
        self.movables(include).into_iter().try_for_each(|movable| movable.start_arriving(&back))
    }

    /// Returns once everything that [`Self::load_states`] loads is on the device. Only measurements need this
    /// wait, compute does not.
    ///
    /// # Errors
    /// The device's.
    pub fn finish_loading(&mut self) -> Result<()> {
        self.movables(&STATES).into_iter().try_for_each(Movable::finish_copy)?;
        Ok(self.transfers.arriving.synchronize()?)
    }

    /// Returns how long compute waited for states being loaded, in the last step that used them. Waits for
    /// that step.
    pub fn load_wait(&mut self) -> Result<Duration> {
        let mut total = Duration::ZERO;
        for movable in self.movables(&STATES) {
            if let Some((before, after)) = movable.stood_still.take() {
                wait_for(&after, movable.whole.home().device())?;
                total += before.elapsed(&after)?;
            }
        }
        Ok(total)
    }

    /// Returns an error for the call `op`, which needs `states`, if one of them is offloaded.
    pub(crate) fn needs(&mut self, op: &'static str, states: &[State]) -> Result<()> {
        for &state in states {
            if self.movables(&[state]).iter().any(|movable| movable.is_away()) {
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
    fn movables(&mut self, include: &[State]) -> Vec<&mut Movable> {
        let (mut optimizer, mut gradients, mut params) = (Vec::new(), Vec::new(), Vec::new());
        for state in self.training.iter_mut().flat_map(|training| training.states.iter_mut().flatten()) {
            if let Home::Device(memory) = &mut state.home {
                optimizer.push(memory);
            }
            gradients.push(&mut state.gradient_memory);
        }
        params.extend(self.units.iter_mut().filter_map(|unit| unit.home.movable()));
        let all = STATES.into_iter().zip([optimizer, gradients, params]);
        all.filter(|(state, _)| include.contains(state)).flat_map(|(_, movables)| movables).collect()
    }
}

/// Streams and threads for copies between host and device. Compute waits for the streams; the porters copy
/// states.
#[derive(Debug)]
pub(crate) struct Transfers {
    pub(crate) out: Stream,
    pub(crate) back: Stream,
    leaving: Arc<Porter>,
    arriving: Arc<Porter>,
}

impl Transfers {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Result<Self> {
        Ok(Self {
            out: Stream::new(device)?,
            back: Stream::new(device)?,
            leaving: Arc::new(Porter::new(device, "states leaving")?),
            arriving: Arc::new(Porter::new(device, "states arriving")?),
        })
    }
}

/// Device memory of one unit's state, which can be offloaded.
#[derive(Debug)]
pub(crate) struct Movable {
    arena: Arena,
    whole: Buffer,
    host: Host,
    /// True if `host` equals the device's copy: nothing was written since the last copy. Frozen states are
    /// copied once.
    is_on_host: bool,
    place: Place,
    /// The compute that used it last, if known.
    last_use: Option<Event>,
    /// Events on compute before and after its last wait for this memory.
    stood_still: Option<(Event, Event)>,
}

/// Pinned memory for an offloaded state. It is kept once allocated, since pinning takes longer than copying.
#[derive(Debug)]
enum Host {
    Nowhere,
    /// Requested from the thread that pins it.
    Ordered(mpsc::Receiver<Result<PinnedBuffer, BackendError>>),
    There(PinnedBuffer),
    /// Lent to a porter, which returns it.
    Lent,
}

impl Host {
    /// Lends the memory to a porter. Allocates it if it was not requested before.
    fn lend(&mut self, device: &Arc<dyn Device>, len_bytes: usize) -> Result<PinnedBuffer> {
        let ordered = match mem::replace(self, Self::Lent) {
            Self::There(memory) => return Ok(memory),
            Self::Ordered(memory) => memory.recv_timeout(COPY_TIMEOUT).ok(),
            Self::Nowhere => None,
            Self::Lent => unreachable!("one copy runs at a time"),
        };
        Ok(ordered.unwrap_or_else(|| PinnedBuffer::new(device, len_bytes))?)
    }
}

/// Bytes of pinned memory to allocate, and the channel to send it to.
type Wanted = (usize, mpsc::Sender<Result<PinnedBuffer, BackendError>>);

#[derive(Debug)]
enum Place {
    Here,
    /// Leaving until the copy is done, if a copy still uses the memory.
    Leaving {
        copy: Option<Copy>,
        is_kept: bool,
    },
    /// On the host if `is_kept`; otherwise its values are gone.
    Away {
        is_kept: bool,
    },
    /// Arriving until the copy is done.
    Arriving(Copy),
}

impl Place {
    fn copy(&mut self) -> Option<&mut Copy> {
        match self {
            Self::Leaving { copy, .. } => copy.as_mut(),
            Self::Arriving(copy) => Some(copy),
            Self::Here | Self::Away { .. } => None,
        }
    }
}

#[derive(Debug)]
enum Copy {
    Ordered(Transit),
    /// All of it is on a stream; the event marks its end.
    Given(Event),
}

impl Movable {
    /// Allocates zeroed memory for work on `compute`.
    pub(crate) fn zeros(name: String, compute: &Stream, len_bytes: usize) -> Result<Self> {
        let arena = Arena::new(name, compute, len_bytes)?;
        let whole = arena.buffer(0..len_bytes, DType::U8);
        let (host, place) = (Host::Nowhere, Place::Here);
        Ok(Self { arena, whole, host, is_on_host: false, place, last_use: None, stood_still: None })
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
        assert!(!self.is_away(), "public calls check that the states they need are loaded");
        if let Place::Arriving(_) = self.place {
            let before = compute.record_timed()?;
            if let Some(copied) = self.copied()? {
                compute.wait(&copied)?;
            }
            self.stood_still = Some((before, compute.record_timed()?));
            self.place = Place::Here;
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
    fn order_host(&mut self) -> Option<Wanted> {
        let Host::Nowhere = self.host else { return None };
        let (to, memory) = mpsc::channel();
        self.host = Host::Ordered(memory);
        Some((self.arena.len_bytes(), to))
    }

    fn is_away(&self) -> bool {
        self.is_leaving() || matches!(self.place, Place::Away { .. })
    }

    fn is_leaving(&self) -> bool {
        matches!(self.place, Place::Leaving { .. })
    }

    fn start_leaving(&mut self, keep: bool, out: &Porter, compute: &Stream) -> Result<()> {
        if self.is_away() {
            return Ok(());
        }
        let arrived = self.copied()?;
        if !keep {
            self.is_on_host = false;
            self.place = Place::Leaving { copy: arrived.map(Copy::Given), is_kept: false };
            return Ok(());
        }
        let last_use = self.last_use.take().map_or_else(|| compute.record(), Ok)?;
        if mem::replace(&mut self.is_on_host, true) {
            let copy = Some(Copy::Given(arrived.unwrap_or(last_use)));
            self.place = Place::Leaving { copy, is_kept: true };
            return Ok(());
        }
        let after = arrived.into_iter().chain([last_use]).collect();
        let transit = out.carry(self.order(Way::ToHost, after)?);
        self.place = Place::Leaving { copy: Some(Copy::Ordered(transit)), is_kept: true };
        Ok(())
    }

    fn start_arriving(&mut self, back: &Porter) -> Result<()> {
        match &mut self.place {
            Place::Here | Place::Arriving(_) => {}
            // The memory is still there; the next writer waits for the copy that reads it.
            Place::Leaving { copy, .. } => self.place = copy.take().map_or(Place::Here, Place::Arriving),
            Place::Away { is_kept: false } => {
                self.arena.map()?;
                self.place = Place::Here;
            }
            Place::Away { is_kept: true } => {
                self.arena.map()?;
                let transit = back.carry(self.order(Way::ToDevice, Vec::new())?);
                self.place = Place::Arriving(Copy::Ordered(transit));
            }
        }
        Ok(())
    }

    fn order(&mut self, way: Way, after: Vec<Event>) -> Result<Order> {
        let device = self.whole.clone();
        let host = self.host.lend(device.home().device(), self.arena.len_bytes())?;
        Ok(Order { way, host, device, after })
    }

    /// Returns once its copy is done, if there is one.
    fn finish_copy(&mut self) -> Result<()> {
        match self.copied()? {
            Some(end) => Ok(wait_for(&end, self.whole.home().device())?),
            None => Ok(()),
        }
    }

    /// Returns true if it is leaving and its copy is done.
    fn has_left(&mut self) -> Result<bool> {
        let Place::Leaving { copy, .. } = &self.place else { return Ok(false) };
        let end = match copy {
            None => return Ok(true),
            Some(Copy::Given(end)) => end.clone(),
            Some(Copy::Ordered(transit)) => match transit.outcome_now() {
                Some(outcome) => self.given(outcome?),
                None => return Ok(false),
            },
        };
        Ok(end.is_complete()?)
    }

    /// If it is leaving, waits for its copy and frees its memory. Returns the bytes freed.
    fn finish_leaving(&mut self) -> Result<usize> {
        self.finish_copy()?;
        self.give_back()
    }

    /// Frees its memory if it has left. Returns the bytes freed.
    fn give_back(&mut self) -> Result<usize> {
        let Place::Leaving { is_kept, .. } = self.place else { return Ok(0) };
        self.arena.unmap()?;
        self.place = Place::Away { is_kept };
        Ok(self.arena.len_bytes())
    }

    /// Returns the end of its copy, if there is one, once all of the copy is on a stream.
    fn copied(&mut self) -> Result<Option<Event>> {
        match self.place.copy() {
            None => Ok(None),
            Some(Copy::Given(end)) => Ok(Some(end.clone())),
            Some(Copy::Ordered(transit)) => {
                let outcome = transit.outcome()?;
                Ok(Some(self.given(outcome)))
            }
        }
    }

    /// Stores the result of a porter's copy.
    fn given(&mut self, (memory, end): (PinnedBuffer, Event)) -> Event {
        self.host = Host::There(memory);
        *self.place.copy().expect("a copy was requested") = Copy::Given(end.clone());
        end
    }
}
