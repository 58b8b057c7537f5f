//! [`Communicator`]: one handle of the library, from the first rendezvous to its end.
//!
//! It does not block: a call that needs the other ranks returns at once as in progress, and is then polled up to a
//! deadline. The handle is read under a lock, so that the watchdog can end it at any moment without another thread
//! touching what is gone. Only a deadline finds a dead rank: the library itself reports nothing.

use std::{
    ffi::c_int,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::library::{Config, Handle, IN_PROGRESS, Library, NO_COLOR, UniqueId};
use crate::{Error, Result, Store, TorchDevice, ffi, library::Failed, rendezvous::Part, stream::report};

/// How long a communicator that is not needed any more may take to end in peace.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Communicator {
    library: &'static Library,
    /// `None` once it is aborted.
    raw: Mutex<Option<Handle>>,
    device: TorchDevice,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) timeout: Duration,
    aborted: AtomicBool,
    failure: Mutex<Option<Error>>,
}

impl Communicator {
    /// Connects the ranks of `store`. Blocks until all are there or the store's time-out has passed.
    pub(super) fn connect(library: &'static Library, device: TorchDevice, store: &Store) -> Result<Self> {
        let rendezvous = store.rendezvous();
        let id = exchange_id(library, store)?;
        let (rank, world_size) = (rendezvous.rank as c_int, rendezvous.world_size as c_int);
        let config = Config::NON_BLOCKING;
        let mut raw: Handle = 0;
        let outcome = with_current(device, || {
            // SAFETY: the arguments live through the call, and the handle is ours to end.
            unsafe { library.calls.comm_init(&mut raw, world_size, id, rank, &config) }
        })?;
        let comm = Self::new(library, raw, device, store);
        comm.settle_with("ncclCommInitRankConfig", outcome)
            .map_err(|error| rendezvous.error(error.to_string()))?;
        Ok(comm)
    }

    fn new(library: &'static Library, raw: Handle, device: TorchDevice, store: &Store) -> Self {
        let rendezvous = store.rendezvous();
        Self {
            library,
            raw: Mutex::new((raw != 0).then_some(raw)),
            device,
            rank: rendezvous.rank,
            world_size: rendezvous.world_size,
            timeout: rendezvous.timeout,
            aborted: AtomicBool::new(false),
            failure: Mutex::default(),
        }
    }

    /// Lets `start` call the library, and waits until the library has taken the work. `call` is for errors.
    pub(super) fn enqueue(
        &self,
        call: &'static str,
        start: impl FnOnce(&Library, Handle) -> Result<(), Failed>,
    ) -> Result<()> {
        self.state(call)?;
        let outcome = with_current(self.device, || self.with_raw(call, |raw| start(self.library, raw)))??;
        self.settle_with(call, outcome)
    }

    /// The communicator of `part`, or `None` for a rank that is in no part. Every rank calls.
    pub(super) fn split(&self, part: Option<&Part>) -> Result<Option<Self>> {
        const CALL: &str = "ncclCommSplit";
        self.state(CALL)?;
        // The library takes half the colors that we do, so a part is known by its first rank.
        let color = part.map_or(NO_COLOR, |part| part.first as c_int);
        let key = part.map_or(0, |part| part.store.rendezvous().rank as c_int);
        let config = Config::NON_BLOCKING;
        let mut raw: Handle = 0;
        // SAFETY: the parent is live under the lock; `raw` is written before this function returns, since
        // `settle_with` waits for the call or ends the parent.
        let outcome = self.with_raw(CALL, |parent| unsafe {
            self.library.calls.comm_split(parent, color, key, &mut raw, &config)
        })?;
        self.settle_with(CALL, outcome)?;
        let Some(part) = part else { return Ok(None) };
        let comm = Self::new(self.library, raw, self.device, &part.store);
        comm.settle(CALL)?;
        Ok(Some(comm))
    }

    /// The error that ended this communicator, if one has.
    pub(super) fn check(&self) -> Result<()> {
        const CALL: &str = "ncclCommGetAsyncError";
        self.state(CALL)?;
        match self.poll(CALL)? {
            0 | IN_PROGRESS => Ok(()),
            code => Err(self.fail(Failed { call: CALL, code })),
        }
    }

    /// Ends it: whoever waits in a stream for one of its operations goes on.
    pub(super) fn abort(&self) {
        self.end(None);
    }

    /// Ends it for a reason, if there is one; the first reason stays. The handle is locked until the library is
    /// done, and so is everybody who asks after it: who is told that it has ended may leave the process next.
    fn end(&self, reason: Option<Error>) {
        let mut raw = self.raw.lock().unwrap();
        if let Some(reason) = reason {
            self.failure.lock().unwrap().get_or_insert(reason);
        }
        self.aborted.store(true, Ordering::Release);
        if let Some(raw) = raw.take() {
            // SAFETY: the last use of the handle, which nobody else can have any more.
            self.report(unsafe { self.library.calls.comm_abort(raw) });
        }
    }

    fn state(&self, call: &str) -> Result<()> {
        if !self.aborted.load(Ordering::Acquire) {
            return Ok(());
        }
        drop(self.raw.lock().unwrap()); // until it has ended
        match &*self.failure.lock().unwrap() {
            Some(error) => Err(error.clone()),
            None => Err(self.aborted_error(call)),
        }
    }

    fn with_raw<T>(&self, call: &str, use_it: impl FnOnce(Handle) -> T) -> Result<T> {
        match *self.raw.lock().unwrap() {
            Some(raw) => Ok(use_it(raw)),
            None => Err(self.aborted_error(call)),
        }
    }

    /// Waits for what a call has started. Not every call says that it has: a split answers with success.
    fn settle_with(&self, call: &'static str, outcome: Result<(), Failed>) -> Result<()> {
        match outcome {
            Ok(()) | Err(Failed { code: IN_PROGRESS, .. }) => self.settle(call),
            Err(failed) => Err(self.fail(failed)),
        }
    }

    /// Waits until the library has finished what it does on the host.
    fn settle(&self, call: &'static str) -> Result<()> {
        /// Most calls are over by then, and a sleep would be longer than what is left.
        const SPIN: Duration = Duration::from_micros(200);
        let start = Instant::now();
        loop {
            match self.poll(call)? {
                0 => return Ok(()),
                IN_PROGRESS if start.elapsed() < SPIN => thread::yield_now(),
                IN_PROGRESS if start.elapsed() < self.timeout => thread::sleep(Duration::from_micros(50)),
                code => return Err(self.fail(Failed { call, code })),
            }
        }
    }

    fn poll(&self, call: &str) -> Result<c_int> {
        let mut state = 0;
        // SAFETY: the handle is live under the lock.
        let outcome =
            self.with_raw(call, |raw| unsafe { self.library.calls.comm_async_error(raw, &mut state) })?;
        Ok(outcome.err().map_or(state, |failed| failed.code))
    }

    /// Ends the communicator after a failure, so that no stream waits for what will not come.
    fn fail(&self, failed: Failed) -> Error {
        let message = if failed.code == IN_PROGRESS {
            format!("not done within {:?}: is another rank gone?", self.timeout)
        } else {
            let raw = self.raw.lock().unwrap();
            // SAFETY: live under the lock, or zero.
            unsafe { self.library.text(failed.code, raw.unwrap_or(0)) }
        };
        let error = self.error(failed, message);
        self.end(Some(error.clone()));
        error
    }

    fn error(&self, failed: Failed, message: String) -> Error {
        Error::Collective { call: failed.call.into(), rank: self.rank, world_size: self.world_size, message }
    }

    fn aborted_error(&self, call: &str) -> Error {
        Error::Aborted { call: call.into(), rank: self.rank }
    }

    /// Says that the end of a handle failed. One that goes on in the background has not.
    fn report(&self, outcome: Result<(), Failed>) {
        report(outcome.or_else(|failed| {
            if failed.code == IN_PROGRESS {
                return Ok(());
            }
            // SAFETY: no communicator is named.
            Err(self.error(failed, unsafe { self.library.text(failed.code, 0) }))
        }));
    }

    /// Flushes what is enqueued; `false` when that fails or takes too long.
    fn finalize(&self, raw: Handle) -> bool {
        // SAFETY: live, and not used by anybody else: `self` is being dropped.
        let mut code = unsafe { self.library.calls.comm_finalize(raw) }.err().map_or(0, |failed| failed.code);
        let start = Instant::now();
        while code == IN_PROGRESS && start.elapsed() < FINALIZE_TIMEOUT {
            thread::sleep(Duration::from_micros(200));
            let mut state = 0;
            // SAFETY: as above.
            let asked = unsafe { self.library.calls.comm_async_error(raw, &mut state) };
            code = asked.err().map_or(state, |failed| failed.code);
        }
        code == 0
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let raw = *self.raw.lock().unwrap();
        let Some(raw) = raw else { return };
        if self.finalize(raw) {
            // SAFETY: the last use of the handle.
            self.report(unsafe { self.library.calls.comm_destroy(raw) });
        } else {
            self.abort();
        }
    }
}

/// Rank 0 draws an id, and all ranks read it from the store.
fn exchange_id(library: &Library, store: &Store) -> Result<UniqueId> {
    const KEY: &str = "id";
    let rendezvous = store.rendezvous();
    let mut id = UniqueId([0; 128]);
    if rendezvous.rank == 0 {
        // SAFETY: writes 128 bytes of our own.
        let drawn = unsafe { library.calls.unique_id(&mut id) };
        drawn.map_err(|failed| {
            // SAFETY: no communicator is named.
            rendezvous.error(format!("{}: {}", failed.call, unsafe { library.text(failed.code, 0) }))
        })?;
        store.set(KEY, &id.0)?;
        return Ok(id);
    }
    let value = store.get(KEY)?;
    let len = value.len();
    id.0 = value.try_into().map_err(|_| rendezvous.error(format!("a communicator's id has {len} bytes")))?;
    Ok(id)
}

/// Runs `call` with a device current in this thread, and leaves the thread as it was. The library needs it to
/// connect, and for the copies that it makes of a group of one rank.
fn with_current<T>(device: TorchDevice, call: impl FnOnce() -> T) -> Result<T> {
    // SAFETY: libtorch's support of the device is loaded, since the device is open.
    let previous = unsafe { ffi::anyroll_exchange_device(device.kind, device.index) };
    if previous < 0 {
        return Err(Error::Torch(ffi::last_error()));
    }
    let result = call();
    // SAFETY: as above; the index is one that was current.
    unsafe { ffi::anyroll_restore_device(device.kind, previous) };
    Ok(result)
}
