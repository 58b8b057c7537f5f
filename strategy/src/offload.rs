//! States that leave the device while nobody needs them.
//!
//! A state lies in an [`Arena`] a unit. To leave, its bytes are copied to pinned host memory behind the work that
//! used them last, and the arena's memory is given back; the addresses stay, and with them every view. Each
//! direction has a stream of its own, so that copies run beside compute, one unit's behind another's update.

use std::{fmt, ops::Range, sync::Arc, sync::mpsc, thread, time::Duration};

use anyroll_backends::{Arena, Buffer, DType, Device, Error as BackendError, Event, PinnedBuffer, Stream};
use anyroll_models::Model;

use crate::{Error, Result, Zero, optimizer::Home, weights::WeightsHome};

/// Far beyond the copy of any unit, or pinning its memory: a wedged device is to be an error and not a hang.
const COPY_TIMEOUT: Duration = Duration::from_secs(120);

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

/// The calls that move states. Each may come at any time between steps, and again: what is where it should be
/// stays there.
impl<M: Model> Zero<M> {
    /// Starts to pin the host's memory for `include`, beside whatever comes next: that takes longer than a copy to it, and
    /// the first time that states leave would wait for it. Of gradients nothing is kept, as a rule, and nothing pinned.
    pub fn prepare_offload(&mut self, include: &[State]) {
        let device = self.transfers.out.device().clone();
        let mut orders = Vec::new();
        for &state in include.iter().filter(|&&state| state != State::Gradients) {
            orders.extend(self.movables(state).into_iter().filter_map(Movable::order_host));
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
        for &state in include {
            for movable in self.movables(state) {
                freed_bytes += movable.finish_leaving()?;
            }
        }
        self.transfers.out.synchronize()?; // the errors of copies come out here
        Ok(freed_bytes)
    }

    /// Starts what [`Self::offload_states`] does and returns at once: after a step, so that each unit leaves as
    /// soon as its update is done. From here on the states count as away.
    pub fn start_offload(&mut self, include: &[State]) -> Result<()> {
        let (out, compute) = (self.transfers.out.clone(), self.compute.clone());
        for &state in include {
            self.settle_uses(state)?;
            let keep = state != State::Gradients || self.has_accumulated();
            for movable in self.movables(state) {
                movable.start_leaving(keep, &out, &compute)?;
            }
        }
        Ok(())
    }

    /// Brings `include` back. Returns at once: compute waits for each unit where it first uses it.
    ///
    /// # Errors
    /// The device's: there has to be room for what comes back.
    pub fn load_states(&mut self, include: &[State]) -> Result<()> {
        let back = self.transfers.back.clone();
        for &state in include {
            for movable in self.movables(state) {
                movable.start_arriving(&back)?;
            }
        }
        Ok(())
    }

    /// Returns once all that [`Self::load_states`] brings is there. Compute needs no such wait: it is for measuring.
    ///
    /// # Errors
    /// The device's.
    pub fn finish_loading(&self) -> Result<()> {
        Ok(self.transfers.back.synchronize()?)
    }

    /// How long compute stood still for states on their way back, in the last step that used them. Waits for
    /// that step.
    pub fn load_wait(&mut self) -> Result<Duration> {
        let mut total = Duration::ZERO;
        for state in [State::Optimizer, State::Gradients, State::Params] {
            for movable in self.movables(state) {
                if let Some((before, after)) = movable.stood_still.take() {
                    movable.wait(&after)?;
                    total += before.elapsed(&after)?;
                }
            }
        }
        Ok(total)
    }

    /// Refuses `op`, a call that needs `states`, while one of them is away.
    pub(crate) fn needs(&mut self, op: &'static str, states: &[State]) -> Result<()> {
        for &state in states {
            if self.movables(state).iter().any(|movable| movable.is_away()) {
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

    fn movables(&mut self, state: State) -> Vec<&mut Movable> {
        if state == State::Params {
            let homes = self.units.iter_mut().map(|unit| &mut unit.home);
            return homes.filter_map(WeightsHome::movable).collect();
        }
        let states = self.training.iter_mut().flat_map(|training| training.states.iter_mut().flatten());
        match state {
            State::Optimizer => states
                .filter_map(|state| match &mut state.home {
                    Home::Device(memory) => Some(memory),
                    Home::Host(_) => None,
                })
                .collect(),
            _ => states.map(|state| &mut state.gradient_memory).collect(),
        }
    }
}

/// The streams of copies, one a direction: there is one copy engine for each.
#[derive(Debug)]
pub(crate) struct Transfers {
    pub(crate) out: Stream,
    pub(crate) back: Stream,
}

impl Transfers {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Result<Self> {
        Ok(Self { out: Stream::new(device)?, back: Stream::new(device)? })
    }
}

/// Memory of one unit's state that can leave the device.
#[derive(Debug)]
pub(crate) struct Movable {
    arena: Arena,
    whole: Buffer,
    host: Host,
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
}

impl Host {
    /// The memory, which is made here if nobody ordered it.
    fn get(&mut self, device: &Arc<dyn Device>, len_bytes: usize) -> Result<&mut PinnedBuffer> {
        if let Self::Ordered(memory) = self {
            *self = match memory.recv_timeout(COPY_TIMEOUT) {
                Ok(memory) => Self::There(memory?),
                Err(_) => Self::Nowhere,
            };
        }
        if let Self::Nowhere = self {
            *self = Self::There(PinnedBuffer::new(device, len_bytes)?);
        }
        match self {
            Self::There(memory) => Ok(memory),
            Self::Nowhere | Self::Ordered(_) => unreachable!("it was just made"),
        }
    }
}

/// How much pinned memory is wanted, and where it goes.
type Order = (usize, mpsc::Sender<Result<PinnedBuffer, BackendError>>);

#[derive(Debug)]
enum Place {
    Here,
    /// Until the copy, if its contents matter.
    Leaving(Option<Event>),
    Away {
        on_host: bool,
    },
    /// Until the copy.
    Arriving(Event),
}

impl Movable {
    /// Zeroed memory, for work on `compute`.
    pub(crate) fn zeros(name: String, compute: &Stream, len_bytes: usize) -> Result<Self> {
        let arena = Arena::new(name, compute, len_bytes)?;
        let whole = arena.buffer(0..len_bytes, DType::U8);
        Ok(Self { arena, whole, host: Host::Nowhere, place: Place::Here, last_use: None, stood_still: None })
    }

    /// Elements `range` of `dtype`, counted from the start.
    pub(crate) fn buffer(&self, range: Range<usize>, dtype: DType) -> Buffer {
        let size = dtype.size_bytes();
        self.arena.buffer(range.start * size..range.end * size, dtype)
    }

    /// Makes it ready for `compute`. The caller has seen to it that it is not away.
    pub(crate) fn ready(&mut self, compute: &Stream) -> Result<()> {
        assert!(!self.is_away(), "public calls check that what they need is there");
        if let Place::Arriving(copied) = &self.place {
            let before = compute.record_timed()?;
            compute.wait(copied)?;
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
    fn order_host(&mut self) -> Option<Order> {
        let Host::Nowhere = self.host else { return None };
        let (to, memory) = mpsc::channel();
        self.host = Host::Ordered(memory);
        Some((self.arena.len_bytes(), to))
    }

    fn is_away(&self) -> bool {
        matches!(self.place, Place::Leaving(_) | Place::Away { .. })
    }

    fn start_leaving(&mut self, keep: bool, out: &Stream, compute: &Stream) -> Result<()> {
        if self.is_away() {
            return Ok(());
        }
        if let Place::Arriving(copied) = &self.place {
            out.wait(copied)?;
        }
        if !keep {
            self.place = Place::Leaving(None);
            return Ok(());
        }
        match self.last_use.take() {
            Some(last_use) => out.wait(&last_use)?,
            None => out.wait_stream(compute)?,
        }
        let host = self.host.get(out.device(), self.arena.len_bytes())?;
        host.copy_from(0, &self.whole, out)?;
        self.place = Place::Leaving(Some(out.record()?));
        Ok(())
    }

    /// Gives the memory back once the copy is done: how many bytes.
    fn finish_leaving(&mut self) -> Result<usize> {
        let Place::Leaving(copied) = &self.place else { return Ok(0) };
        let on_host = copied.is_some();
        if let Some(copied) = copied {
            self.wait(copied)?;
        }
        self.arena.unmap()?;
        self.place = Place::Away { on_host };
        Ok(self.arena.len_bytes())
    }

    fn start_arriving(&mut self, back: &Stream) -> Result<()> {
        match &self.place {
            Place::Here | Place::Arriving(_) => {}
            // The memory is still there: whoever writes it next waits for the copy that reads it.
            Place::Leaving(copied) => self.place = copied.clone().map_or(Place::Here, Place::Arriving),
            Place::Away { on_host } => {
                self.arena.map()?;
                self.place = match &mut self.host {
                    Host::There(host) if *on_host => {
                        host.copy_to(0, &self.whole, back)?;
                        Place::Arriving(back.record()?)
                    }
                    _ => Place::Here,
                };
            }
        }
        Ok(())
    }

    /// Blocks the host until `event`, at most for [`COPY_TIMEOUT`].
    fn wait(&self, event: &Event) -> Result<()> {
        if event.wait_for(COPY_TIMEOUT)? {
            return Ok(());
        }
        let device = self.whole.home().device().id();
        let message = format!("a copy of offloaded states did not finish within {COPY_TIMEOUT:?}");
        Err(BackendError::Stream { device, message }.into())
    }
}
