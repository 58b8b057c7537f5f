//! [`Communicator`]: one handle of a vendor's library of collectives, from the first rendezvous to its end.
//!
//! Calls block: a library may start a thread for each call of a communicator that does not. Nothing of the library's
//! has a deadline of use, and a dead rank is not reported: whoever waits for other ranks inside of a call does it
//! under a deadline of ours, past which another thread ends the communicator, and with that the call.

use std::{
    ffi::c_int,
    fmt,
    sync::{
        Mutex, MutexGuard, TryLockError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use super::notice::Notice;
use crate::{
    Buffer, DType, Error, Rendezvous, Result, Store, Stream, TorchDevice,
    ffi::{self, library::Failed},
    safe::stream::report,
};

/// A communicator as its library has it.
pub(crate) type Handle = usize;

/// The calls of a library that a [`Communicator`] needs. A handle that a call takes came from the library and is not
/// ended.
pub(crate) trait Library: fmt::Debug + Send + Sync {
    /// Draws what all ranks of a new communicator show when they connect.
    fn draw_id(&self) -> Result<Vec<u8>, Failed>;
    /// Connects this rank. Blocks until all are there, for `timeout` or for longer. The device is current.
    fn connect(&self, id: &[u8], rendezvous: &Rendezvous) -> Result<Handle, Failed>;
    /// The error that has ended a communicator, if one has.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn check(&self, comm: Handle) -> Result<(), Failed>;
    /// Ends a communicator that is not needed any more. May wait for what is pending.
    ///
    /// # Safety
    /// See the trait; the last use.
    unsafe fn destroy(&self, comm: Handle) -> Result<(), Failed>;
    /// Ends a communicator with what is pending on it, as far as the library can. Another thread may be inside.
    ///
    /// # Safety
    /// See the trait; the last use.
    unsafe fn abort(&self, comm: Handle) -> Result<(), Failed>;
    /// The library's words for a code, and what it last complained about. `comm` may be zero.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn text(&self, code: c_int, comm: Handle) -> String;
}

/// Time that a communicator may take to end cleanly.
const DESTROY_TIMEOUT: Duration = Duration::from_secs(5);
/// Calls that do not wait for other ranks take microseconds: a thread that is inside for longer does not come back.
const STUCK_AFTER: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(crate) struct Communicator<L: Library + 'static> {
    library: &'static L,
    handle: Handle,
    /// Locked by the thread that is inside of the library; `None` once the handle is gone.
    inside: Mutex<Option<Handle>>,
    device: TorchDevice,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) timeout: Duration,
    /// `None` for a rank without peers.
    notice: Option<Notice>,
    aborted: AtomicBool,
    /// The reason of its end. Locked until the library has ended it: a caller that sees the error may end the process next.
    failure: Mutex<Option<Error>>,
}

impl<L: Library> Communicator<L> {
    /// Connects the ranks of `store`. Blocks until all are there or the store's time-out has passed.
    pub(crate) fn connect(library: &'static L, device: TorchDevice, store: &Store) -> Result<Self> {
        let rendezvous = store.rendezvous();
        let id = with_current(device, || exchange_id(library, store))??;
        let place = rendezvous.clone();
        let connect = move || {
            let outcome = with_current(device, || library.connect(&id, &place))?;
            // SAFETY: no communicator is named.
            outcome.map_err(|failed| place.error(unsafe { library.text(failed.code, 0) }))
        };
        // There is no handle before the last rank has come, and so no way to end the call.
        let ended = |heard: Option<&str>| {
            let late = || format!("not all ranks came within {:?}", rendezvous.timeout);
            rendezvous.error(heard.map_or_else(late, str::to_owned))
        };
        let notice = Notice::among(store)?;
        let handle = rendezvous.in_time(rendezvous.timeout, notice.as_ref(), connect, ended);
        let handle = Notice::telling(notice.as_ref(), handle)?;
        Ok(Self::new(library, handle, device, (store, notice)))
    }

    /// Takes over a handle that a split of this one made, for the ranks of `store`.
    pub(crate) fn child(&self, handle: Handle, store: &Store) -> Result<Self> {
        Ok(Self::new(self.library, handle, self.device, (store, Notice::among(store)?)))
    }

    fn new(
        library: &'static L,
        handle: Handle,
        device: TorchDevice,
        (store, notice): (&Store, Option<Notice>),
    ) -> Self {
        let rendezvous = store.rendezvous();
        Self {
            library,
            handle,
            inside: Mutex::new(Some(handle)),
            device,
            rank: rendezvous.rank,
            world_size: rendezvous.world_size,
            timeout: rendezvous.timeout,
            notice,
            aborted: AtomicBool::new(false),
            failure: Mutex::default(),
        }
    }

    /// Lets `start` call the library. `call` is for errors.
    pub(crate) fn enqueue(
        &self,
        call: &'static str,
        start: impl FnOnce(&L, Handle) -> Result<(), Failed>,
    ) -> Result<()> {
        let outcome = with_current(self.device, || self.with_handle(call, |raw| start(self.library, raw)))??;
        outcome.map_err(|failed| self.fail(failed))
    }

    /// Runs `work`, which waits for other ranks inside of the library. Past the deadline the communicator is ended,
    /// which ends the wait.
    pub(crate) fn within_deadline(
        &self,
        call: &'static str,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.end_unless_done(self.timeout, || self.end_by(self.late(call)), work)?;
        self.state(call)
    }

    /// The error that ended this communicator, if one has.
    pub(crate) fn check(&self) -> Result<()> {
        self.state("check")?;
        if let Some(words) = self.notice.as_ref().and_then(Notice::heard) {
            self.end_by(self.error("check", words.into()));
            return self.state("check");
        }
        let Some(inside) = self.try_inside() else {
            return Ok(()); // the thread that is inside sees the error for itself
        };
        let Some(handle) = *inside else { return Ok(()) };
        // SAFETY: the handle is live, since this thread is inside.
        let asked = unsafe { self.library.check(handle) };
        drop(inside);
        asked.map_err(|failed| self.fail(failed))
    }

    /// Ends it: streams that wait for one of its operations continue. The other ranks get `why`.
    pub(crate) fn abort(&self, why: &str) {
        self.end(None, why);
    }

    /// Ends it because of an error.
    fn end_by(&self, error: Error) {
        let why = error.to_string();
        self.end(Some(error), &why);
    }

    /// Ends it for a reason, if there is one; the first reason stays.
    fn end(&self, reason: Option<Error>, why: &str) {
        let mut failure = self.failure.lock().unwrap();
        if let Some(reason) = reason {
            failure.get_or_insert(reason);
        }
        if self.aborted.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(notice) = &self.notice {
            notice.tell(why);
        }
        let start = Instant::now();
        let handle = loop {
            match self.try_inside() {
                Some(mut inside) => break inside.take(),
                None if start.elapsed() < STUCK_AFTER => thread::sleep(Duration::from_micros(100)),
                // Only an abort frees the thread that is inside, so there is nothing to wait for.
                None => break Some(self.handle),
            }
        };
        if let Some(handle) = handle {
            // SAFETY: nobody calls with the handle from here on. A thread that is stuck in a call is let go by the
            // flag that an abort sets first, and by nothing else.
            self.report(unsafe { self.library.abort(handle) });
        }
    }

    fn try_inside(&self) -> Option<MutexGuard<'_, Option<Handle>>> {
        match self.inside.try_lock() {
            Ok(inside) => Some(inside),
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        }
    }

    fn state(&self, call: &str) -> Result<()> {
        if self.aborted.load(Ordering::Acquire) { Err(self.ended(call)) } else { Ok(()) }
    }

    /// The error of a call to a communicator that has ended.
    fn ended(&self, call: &str) -> Error {
        let failure = self.failure.lock().unwrap();
        failure.clone().unwrap_or_else(|| Error::Aborted { call: call.into(), rank: self.rank })
    }

    fn with_handle<T>(&self, call: &str, use_it: impl FnOnce(Handle) -> T) -> Result<T> {
        let inside = self.inside.lock().unwrap();
        match *inside {
            Some(handle) if !self.aborted.load(Ordering::Acquire) => Ok(use_it(handle)),
            _ => {
                drop(inside);
                Err(self.ended(call))
            }
        }
    }

    /// Runs `work`, and `end`, which ends the communicator, in another thread when that takes longer than `timeout`.
    fn end_unless_done<T>(
        &self,
        timeout: Duration,
        end: impl FnOnce() + Send,
        work: impl FnOnce() -> T,
    ) -> T {
        let (done, is_done) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                if is_done.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
                    end();
                }
            });
            let outcome = work();
            drop(done);
            outcome
        })
    }

    /// Ends the communicator after a failure, so that no stream waits for what will not come. What it was ended for
    /// before comes first: a call that an abort has ended fails, too.
    fn fail(&self, failed: Failed) -> Error {
        let inside = self.try_inside();
        let handle = inside.as_deref().copied().flatten().unwrap_or(0);
        // SAFETY: live, since this thread is inside, or zero.
        let message = unsafe { self.library.text(failed.code, handle) };
        drop(inside);
        self.end_by(self.error(failed.call, message));
        self.ended(failed.call)
    }

    fn late(&self, call: &str) -> Error {
        self.error(call, format!("not done within {:?}: is another rank gone?", self.timeout))
    }

    fn error(&self, call: &str, message: String) -> Error {
        Error::Collective { call: call.into(), rank: self.rank, world_size: self.world_size, message }
    }

    /// Says that the end of a handle failed.
    fn report(&self, outcome: Result<(), Failed>) {
        // SAFETY: no communicator is named.
        let words = |failed: Failed| self.error(failed.call, unsafe { self.library.text(failed.code, 0) });
        report(outcome.map_err(words));
    }
}

impl<L: Library> Drop for Communicator<L> {
    fn drop(&mut self) {
        if self.aborted.load(Ordering::Acquire) {
            return;
        }
        // It flushes what is enqueued, which may be waiting for a rank that is gone.
        let abort = || self.abort("what is enqueued does not end");
        self.end_unless_done(DESTROY_TIMEOUT, abort, || {
            if let Some(handle) = self.inside.lock().unwrap().take() {
                // SAFETY: the last use of the handle.
                self.report(unsafe { self.library.destroy(handle) });
            }
        });
    }
}

/// Memory that a communicator keeps: it grows to the largest operation, and is used in stream order.
#[derive(Debug, Default)]
pub(crate) struct Workspace(Mutex<Option<Buffer>>);

impl Workspace {
    /// Memory for `bytes`, ready for `stream`.
    pub(crate) fn take(&self, bytes: usize, stream: &Stream) -> Result<Buffer> {
        let mut kept = self.0.lock().unwrap();
        if kept.as_ref().is_none_or(|buffer| buffer.len() < bytes) {
            if let Some(small) = kept.take() {
                // Released in its home's order, before there is another.
                small.home().wait_stream(stream)?;
            }
            *kept = Some(Buffer::zeros(stream, bytes, DType::U8)?);
        }
        let buffer = kept.as_ref().expect("made above");
        stream.wait_stream(buffer.home())?;
        Ok(buffer.slice(0..bytes))
    }
}

/// Rank 0 draws an id, and all ranks read it from the store.
fn exchange_id<L: Library>(library: &L, store: &Store) -> Result<Vec<u8>> {
    const KEY: &str = "id";
    let rendezvous = store.rendezvous();
    if rendezvous.rank > 0 {
        return store.get(KEY);
    }
    let drawn = library.draw_id();
    let id = drawn.map_err(|failed| {
        // SAFETY: no communicator is named.
        rendezvous.error(format!("{}: {}", failed.call, unsafe { library.text(failed.code, 0) }))
    })?;
    store.set(KEY, &id)?;
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
