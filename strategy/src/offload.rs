//! States that leave the device while nobody needs them.
//!
//! A state lies in an [`Arena`] a unit. To leave, its bytes are copied to pinned host memory behind the work that
//! used them last, and the arena's memory is given back; the addresses stay, and with them every view. Each
//! direction has a [`Porter`], so that copies run beside compute, one unit's behind another's update.

use std::{fmt, mem, ops::Range, sync::Arc, sync::mpsc, thread, time::Duration};

use anyroll_backends::{Arena, Buffer, DType, Device, Error as BackendError, Event, PinnedBuffer, Stream};
use anyroll_models::Model;

use crate::{
    Error, Result, Zero,
    optimizer::Home,
    porter::{COPY_TIMEOUT, Order, Porter, Transit, Way, wait_for},
};

/// What can be away from the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The optimizer's moments and, with weights in 16 bits, its fp32 weights. Nothing if it steps on the host
    /// ([`crate::StepsOn`]), where they are at all times.
    Optimizer,
    /// The accumulated gradients. After a step nobody needs what they hold, and nothing is copied.
    Gradients,
    /// The weights that the blocks run with. Nothing if they are on the host ([`crate::ParamsOn`]).
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

/// The calls that move states. Each may come at any time between steps, and again: what is where it should be
/// stays there.
impl<M: Model> Zero<M> {
    /// Starts to pin the host's memory for `include`, beside whatever comes next: that takes longer than a copy to it, and
    /// the first time that states leave would wait for it. Of gradients nothing is kept, as a rule, and nothing pinned.
    pub fn prepare_offload(&mut self, include: &[State]) {
        let device = self.compute.device().clone();
        let mut orders = Vec::new();
        for &state in include.iter().filter(|&&state| state != State::Gradients) {
            orders.extend(self.movables(&[state]).into_iter().filter_map(Movable::order_host));
        }
        let pin = move || {
            for (len_bytes, to) in orders {
                if to.send(PinnedBuffer::new(&device, len_bytes)).is_err() {
                    return; // nobody is there any more
                }
            }
        };
        // A thread that does not start drops the orders, and memory is pinned when it is needed.
        drop(thread::Builder::new().name("pinned memory".into()).spawn(pin));
    }

    /// Takes `include` off the device, and returns once its memory is given back: the bytes that this call gave.
    /// Tensors that [`Zero::weights`] returned below stage 3 must be gone before `Params` are.
    ///
    /// # Errors
    /// The device's, with the states still there that had not left.
    pub fn offload_states(&mut self, include: &[State]) -> Result<usize> {
        self.start_offload(include)?;
        let mut freed_bytes = 0;
        for movable in self.movables(include) {
            freed_bytes += movable.finish_leaving()?;
        }
        self.transfers.leaving.synchronize()?; // the errors of copies come out here
        Ok(freed_bytes)
    }

    /// Starts what [`Self::offload_states`] does and returns at once: after a step, so that each unit leaves as
    /// soon as its update is done. From here on the states count as away.
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

    /// Gives back the memory of states that have left by now, and waits for nobody: how many bytes.
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

    /// Waits for states that are leaving until `bytes` of the device are free, or all of them have left.
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

    /// The device's memory that states take that are still leaving, in bytes.
    pub fn leaving_bytes(&mut self) -> usize {
        let leaving = self.movables(&STATES).into_iter().filter(|it| it.is_leaving());
        leaving.map(|it| it.arena.len_bytes()).sum()
    }

    /// Brings `include` back. Returns at once: compute waits for each unit where it first uses it.
    ///
    /// # Errors
    /// The device's: there has to be room for what comes back.
    pub fn load_states(&mut self, include: &[State]) -> Result<()> {
        let back = self.transfers.arriving.clone();
        self.movables(include).into_iter().try_for_each(|movable| movable.start_arriving(&back))
    }

    /// Returns once all that [`Self::load_states`] brings is there. Compute needs no such wait: it is for measuring.
    ///
    /// # Errors
    /// The device's.
    pub fn finish_loading(&mut self) -> Result<()> {
        self.movables(&STATES).into_iter().try_for_each(Movable::finish_copy)?;
        Ok(self.transfers.arriving.synchronize()?)
    }

    /// How long compute stood still for states on their way back, in the last step that used them. Waits for
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

    /// Refuses `op`, a call that needs `states`, while one of them is away.
    pub(crate) fn needs(&mut self, op: &'static str, states: &[State]) -> Result<()> {
        for &state in states {
            if self.movables(&[state]).iter().any(|movable| movable.is_away()) {
                return Err(Error::Offloaded { op, state });
            }
        }
        Ok(())
    }

    /// Orders compute after what other streams still do with a state, and drops buffers that go with it.
    fn settle_uses(&mut self, state: State) -> Result<()> {
        match state {
            State::Optimizer => {}
            State::Gradients => self.drop_gradient_buffers(),
            State::Params => self.settle_weights()?,
        }
        Ok(())
    }

    /// The memory of `include`, in the order of [`STATES`].
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

/// What copies go by. The streams are for those that compute waits for, in each direction; the porters for states.
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

/// Memory of one unit's state that can leave the device.
#[derive(Debug)]
pub(crate) struct Movable {
    arena: Arena,
    whole: Buffer,
    host: Host,
    /// Whether `host` has what the device has: nothing was written since it was copied. What is frozen leaves once.
    is_on_host: bool,
    place: Place,
    /// The compute that used it last, where that is known.
    last_use: Option<Event>,
    /// Compute before and after its last wait for this memory.
    stood_still: Option<(Event, Event)>,
}

/// Pinned memory for one that is away, kept once it is there: to pin memory takes longer than to copy it.
#[derive(Debug)]
enum Host {
    Nowhere,
    /// From the thread that pins it.
    Ordered(mpsc::Receiver<Result<PinnedBuffer, BackendError>>),
    There(PinnedBuffer),
    /// With a porter, who brings it back.
    Lent,
}

impl Host {
    /// The memory for a porter, which is made here if nobody ordered it.
    fn lend(&mut self, device: &Arc<dyn Device>, len_bytes: usize) -> Result<PinnedBuffer> {
        let ordered = match mem::replace(self, Self::Lent) {
            Self::There(memory) => return Ok(memory),
            Self::Ordered(memory) => memory.recv_timeout(COPY_TIMEOUT).ok(),
            Self::Nowhere => None,
            Self::Lent => unreachable!("a copy at a time"),
        };
        Ok(ordered.unwrap_or_else(|| PinnedBuffer::new(device, len_bytes))?)
    }
}

/// How much pinned memory is wanted, and where it goes.
type Wanted = (usize, mpsc::Sender<Result<PinnedBuffer, BackendError>>);

#[derive(Debug)]
enum Place {
    Here,
    /// Until the copy, if one still uses the memory.
    Leaving {
        copy: Option<Copy>,
        is_kept: bool,
    },
    /// On the host, if `is_kept`; else what it held is gone.
    Away {
        is_kept: bool,
    },
    /// Until the copy.
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
    /// All of it is on a stream, and ends with this.
    Given(Event),
}

impl Movable {
    /// Zeroed memory, for work on `compute`.
    pub(crate) fn zeros(name: String, compute: &Stream, len_bytes: usize) -> Result<Self> {
        let arena = Arena::new(name, compute, len_bytes)?;
        let whole = arena.buffer(0..len_bytes, DType::U8);
        let (host, place) = (Host::Nowhere, Place::Here);
        Ok(Self { arena, whole, host, is_on_host: false, place, last_use: None, stood_still: None })
    }

    /// Elements `range` of `dtype`, counted from the start.
    pub(crate) fn buffer(&self, range: Range<usize>, dtype: DType) -> Buffer {
        let size = dtype.size_bytes();
        self.arena.buffer(range.start * size..range.end * size, dtype)
    }

    /// Makes it ready for `compute`, which writes to it. The caller has seen to it that it is not away.
    pub(crate) fn ready_to_write(&mut self, compute: &Stream) -> Result<()> {
        self.is_on_host = false;
        self.ready_to_read(compute)
    }

    /// Makes it ready for `compute`, which only reads it. The caller has seen to it that it is not away.
    pub(crate) fn ready_to_read(&mut self, compute: &Stream) -> Result<()> {
        assert!(!self.is_away(), "public calls check that what they need is there");
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

    /// Notes that nothing uses it after what is on `compute` now.
    pub(crate) fn used(&mut self, compute: &Stream) -> Result<()> {
        self.last_use = Some(compute.record()?);
        Ok(())
    }

    /// What it takes to have pinned memory for it, if it has none and none is on its way.
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
            // The memory is still there: whoever writes it next waits for the copy that reads it.
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

    /// Whether it is leaving, and its memory free by now.
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

    /// Gives its memory back once its copy is done, if it is leaving: how many bytes.
    fn finish_leaving(&mut self) -> Result<usize> {
        self.finish_copy()?;
        self.give_back()
    }

    /// Gives the memory of what has left back: how many bytes.
    fn give_back(&mut self) -> Result<usize> {
        let Place::Leaving { is_kept, .. } = self.place else { return Ok(0) };
        self.arena.unmap()?;
        self.place = Place::Away { is_kept };
        Ok(self.arena.len_bytes())
    }

    /// The end of its copy, if there is one, once all of that is on a stream.
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

    /// Takes what a porter brings back.
    fn given(&mut self, (memory, end): (PinnedBuffer, Event)) -> Event {
        self.host = Host::There(memory);
        *self.place.copy().expect("it was ordered") = Copy::Given(end.clone());
        end
    }
}
