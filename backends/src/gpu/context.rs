//! [`Context`]: what a device's work lives in, which libtorch and the collectives' library use too.

use std::{ffi::c_int, marker::PhantomData};

use super::driver::{Driver, Handle, OUT_OF_MEMORY};
use crate::{DeviceId, Error, Result, ffi::library::Failed, safe::stream::report};

#[derive(Debug)]
pub(super) struct Context {
    pub(super) driver: &'static Driver,
    pub(super) id: DeviceId,
    /// The driver's number of the device.
    pub(super) device: c_int,
    raw: Handle,
}

impl Context {
    /// The context of the device with this number, made now unless libtorch has.
    pub(super) fn new(driver: &'static Driver, ordinal: usize, device: c_int) -> Result<Self> {
        let id = DeviceId { backend: driver.vendor.backend, ordinal };
        let raw = driver.dialect.retain(device).map_err(|failed| driver.error(id, failed))?;
        Ok(Self { driver, id, device, raw })
    }

    /// Makes the context current in this thread until the result is dropped; the thread is then as it was.
    pub(super) fn enter(&self) -> Result<Entered<'_>> {
        let previous = self.driver.dialect.enter(self.raw).map_err(|failed| self.error(failed))?;
        Ok(Entered { context: self, previous, of_this_thread: PhantomData })
    }

    /// Runs `call` with the context current.
    pub(super) fn run(&self, call: impl FnOnce(&Driver) -> Result<(), Failed>) -> Result<()> {
        let _entered = self.enter()?;
        call(self.driver).map_err(|failed| self.error(failed))
    }

    /// The error that a failed call becomes.
    pub(super) fn error(&self, failed: Failed) -> Error {
        self.driver.error(self.id, failed)
    }

    /// The error that a failed call for `requested_bytes` becomes. The context is current.
    pub(super) fn memory_error(&self, failed: Failed, requested_bytes: usize) -> Error {
        if failed.code != OUT_OF_MEMORY {
            return self.error(failed);
        }
        let free_bytes = self.memory().map_or(0, |(free, _)| free);
        Error::OutOfMemory { device: self.id, requested_bytes, free_bytes }
    }

    /// An error for more than the device has: drivers answer absurd sizes in different ways. The context is current.
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
        unsafe { self.driver.memory_info(&mut free, &mut total) }.map_err(|failed| self.error(failed))?;
        Ok((free, total))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // What lived in it is gone.
        let released = self.driver.dialect.release(self.device);
        report(released.map_err(|failed| self.error(failed)));
    }
}

/// See [`Context::enter`].
pub(super) struct Entered<'a> {
    context: &'a Context,
    previous: Handle,
    /// Keeps it on one thread, since each has a current context of its own.
    of_this_thread: PhantomData<*mut ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let outcome = self.context.driver.dialect.leave(self.previous);
        report(outcome.map_err(|failed| self.context.error(failed)));
    }
}
