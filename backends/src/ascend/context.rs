//! [`Context`]: the device's default context, which libtorch and the collectives' library use too. What is current is a
//! matter of each thread.

use std::marker::PhantomData;

use super::acl::{self, Acl, HBM, Handle};
use crate::{DeviceId, Error, Result, ffi::library::Failed, safe::stream::report};

#[derive(Debug)]
pub(super) struct Context {
    pub(super) acl: &'static Acl,
    pub(super) id: DeviceId,
    raw: Handle,
}

impl Context {
    /// The device's default context, which is created if it does not exist.
    pub(super) fn new(acl: &'static Acl, id: DeviceId) -> Result<Self> {
        let mut raw = 0;
        // SAFETY: the number of a device that is there, and a number of our own.
        let made = unsafe { acl.device_set(id.ordinal as i32).and_then(|()| acl.context_current(&mut raw)) };
        made.map_err(|failed| acl.error(id, failed))?;
        Ok(Self { acl, id, raw })
    }

    /// Makes the context current in this thread until the result is dropped; the thread is then as it was, unless it
    /// had none, which it cannot have again.
    pub(super) fn enter(&self) -> Result<Entered<'_>> {
        let mut previous = 0;
        // SAFETY: a number of our own. A thread without a context is answered with an error.
        let current = unsafe { self.acl.context_current(&mut previous) };
        let previous = if current.is_ok() { previous } else { 0 };
        if previous != self.raw {
            // SAFETY: the context lives as long as the process.
            unsafe { self.acl.context_set(self.raw) }.map_err(|failed| self.error(failed))?;
        }
        Ok(Entered { context: self, previous, of_this_thread: PhantomData })
    }

    /// Runs `call` with the context current.
    pub(super) fn run(&self, call: impl FnOnce(&Acl) -> Result<(), Failed>) -> Result<()> {
        let _entered = self.enter()?;
        call(self.acl).map_err(|failed| self.error(failed))
    }

    /// The error that a failed call becomes.
    pub(super) fn error(&self, failed: Failed) -> Error {
        self.acl.error(self.id, failed)
    }

    /// The error that a failed call for `requested_bytes` becomes. The context is current.
    pub(super) fn memory_error(&self, failed: Failed, requested_bytes: usize) -> Error {
        if !acl::is_out_of_memory(failed) {
            return self.error(failed);
        }
        let free_bytes = self.memory().map_or(0, |(free, _)| free);
        Error::OutOfMemory { device: self.id, requested_bytes, free_bytes }
    }

    /// An error for more than the device has. The context is current.
    pub(super) fn fits(&self, requested_bytes: usize) -> Result<()> {
        let (free_bytes, total_bytes) = self.memory()?;
        if requested_bytes > total_bytes {
            return Err(Error::OutOfMemory { device: self.id, requested_bytes, free_bytes });
        }
        Ok(())
    }

    /// Free and total bytes of the device. The context is current.
    pub(super) fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: two numbers of our own.
        unsafe { self.acl.memory_info(HBM, &mut free, &mut total) }.map_err(|failed| self.error(failed))?;
        Ok((free, total))
    }
}

/// See [`Context::enter`].
pub(super) struct Entered<'a> {
    context: &'a Context,
    previous: Handle,
    /// This must not move to another thread.
    of_this_thread: PhantomData<*mut ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.previous != 0 && self.previous != self.context.raw {
            // SAFETY: it was current when this was made.
            let outcome = unsafe { self.context.acl.context_set(self.previous) };
            report(outcome.map_err(|failed| self.context.error(failed)));
        }
    }
}
