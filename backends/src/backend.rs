//! [`Backend`]: the entry of one family of accelerators in the list of `lib.rs`.

use std::sync::Arc;

use crate::{BackendKind, Collective, Device, DeviceInfo, Diagnosis, Reduction, Result, Store};

/// One family of accelerators, and all that the crate asks of it. `docs/adding_a_backend.md` says how to write one.
pub trait Backend: Sync {
    /// Its name and facts.
    fn kind(&self) -> BackendKind;

    /// Opens a device. An accelerator returns the same object while one is open: see [`crate::open`].
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`] when its library or the device is not on this machine.
    fn open(&self, ordinal: usize) -> Result<Arc<dyn Device>>;

    /// Devices that this process could open, at least one.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`] when there is none.
    fn devices(&self) -> Result<Vec<DeviceInfo>>;

    /// Facts about a device that take a while to find out.
    ///
    /// # Errors
    /// An error of the vendor's library.
    fn diagnose(&self, _ordinal: usize) -> Result<Diagnosis> {
        Ok(Diagnosis::default())
    }

    /// Connects the ranks that share `store`, each with a device of this backend. Blocks until all are there.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`] without the library of collectives, [`crate::Error::Rendezvous`] or
    /// [`crate::Error::Timeout`] when ranks do not meet.
    fn connect(&self, device: &dyn Device, store: Store, reduction: Reduction)
    -> Result<Arc<dyn Collective>>;

    /// Variables that the vendor's libraries read, as each rank of a job needs them.
    fn rank_environment(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }
}
