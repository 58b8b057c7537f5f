//! Offloading of states that are not in use.

use std::{sync::Arc, thread, time::Duration};

use anyroll_backends::{Device, PinnedBuffer, Stream};
use anyroll_models::Model;

use super::Zero;
use crate::{
    Error, Result, State, copy_thread::CopyThread, offload_arena::OffloadArena, optimizer::StateStorage,
};
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
        leaving.map(|it| it.len_bytes()).sum()
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
            total += arena.take_load_wait()?;
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
