//! [`Vendor`] and [`Dialect`]: the differences between vendors whose driver has CUDA's interface.

use std::{
    ffi::{c_int, c_void},
    fmt, ptr,
    sync::OnceLock,
};

use super::{
    compiler::Compiler,
    driver::{Driver, Handle},
};
use crate::{
    BackendKind, Diagnosis, Error, Grid, Result,
    ffi::library::{Failed, Library},
    nccl::Installation,
};

/// One vendor: names, and its [`Dialect`]. A `static` in the vendor's own folder.
#[derive(Debug)]
pub(crate) struct Vendor {
    pub(crate) backend: BackendKind,
    /// The column of the tables that has this vendor's names.
    pub(crate) column: usize,
    /// The driver's library, the first that loads.
    pub(crate) driver_files: &'static [&'static str],
    /// Advice for a machine without it.
    pub(crate) driver_hint: &'static str,
    /// The driver's function that returns its version.
    pub(crate) version_call: &'static str,
    /// Formats that version, or returns the reason to refuse it.
    pub(crate) version: fn(c_int) -> Result<String, String>,
    /// The run-time compiler's library, the first that loads.
    pub(crate) compiler_files: &'static [&'static str],
    /// Advice for a machine without it.
    pub(crate) compiler_hint: &'static str,
    /// Prefix of the file that the compiler opens by its bare name.
    pub(crate) compiler_builtins: &'static str,
    /// The compiler's option that names an architecture, up to the name.
    pub(crate) compiler_architecture: &'static str,
    /// Its other options: C++17, and no fused multiply-add, since a sum must have the same bits as on a CPU.
    pub(crate) compiler_options: &'static [&'static str],
    /// libtorch's own library for this vendor.
    pub(crate) libtorch_file: &'static str,
    /// The vendor's library of collectives, which has NCCL's interface.
    pub(crate) collectives: &'static Installation,
    /// See [`crate::Backend::rank_environment`].
    pub(crate) rank_environment: &'static [(&'static str, &'static str)],
    /// The number of the device attribute that counts multiprocessors.
    pub(crate) multiprocessors: c_int,
    /// Loads the functions that only this vendor has. The library has their signatures, and is never closed.
    pub(crate) dialect: unsafe fn(&Library) -> Result<Box<dyn Dialect>, String>,
    /// Libraries that are opened once a process.
    pub(crate) opened: Opened,
}

/// See [`Vendor::opened`].
#[derive(Debug)]
pub(crate) struct Opened {
    pub(super) driver: OnceLock<Result<Driver>>,
    pub(super) compiler: OnceLock<Result<Compiler>>,
    pub(super) libtorch: OnceLock<Result<()>>,
}

impl Opened {
    /// Nothing, before the first look.
    pub(crate) const fn nothing() -> Self {
        Self { driver: OnceLock::new(), compiler: OnceLock::new(), libtorch: OnceLock::new() }
    }
}

impl Vendor {
    /// The error for what is not on this machine.
    pub(super) fn unavailable(&self, tried: &[&str], reason: impl Into<String>) -> Error {
        let tried = tried.iter().map(|what| (*what).to_owned()).collect();
        Error::Unavailable { backend: self.backend, tried, reason: reason.into() }
    }
}

/// Calls in which vendors differ.
pub(crate) trait Dialect: fmt::Debug + Send + Sync {
    /// Retains a device's context, for [`Dialect::enter`].
    fn retain(&self, device: c_int) -> Result<Handle, Failed>;
    /// Releases it.
    fn release(&self, device: c_int) -> Result<(), Failed>;
    /// Makes it current in this thread; the result is for [`Dialect::leave`].
    fn enter(&self, retained: Handle) -> Result<Handle, Failed>;
    /// Makes current again in this thread what was before.
    fn leave(&self, previous: Handle) -> Result<(), Failed>;
    /// Loads a kernel onto the device now, if the driver would wait for its first launch.
    fn load_function(&self, function: Handle) -> Result<(), Failed>;
    /// Allows a kernel this much dynamic shared memory, if the driver requires it.
    fn allow_shared(&self, _function: Handle, _bytes: u32) -> Result<(), Failed> {
        Ok(())
    }
    /// Returns true if a kernel on such a device may start before the previous one has ended.
    fn can_start_early(&self, _architecture: &str) -> bool {
        false
    }
    /// Launches a kernel.
    ///
    /// # Safety
    /// The function and the stream are live, the arguments those of its signature.
    unsafe fn launch(
        &self,
        driver: &Driver,
        function: Handle,
        grid: Grid,
        stream: Handle,
        arguments: *mut *mut c_void,
    ) -> Result<(), Failed> {
        let Grid { blocks, threads, shared_bytes, .. } = grid;
        assert!(grid.cluster == 1 && !grid.starts_early, "no kernel of this vendor's has {grid:?}");
        // SAFETY: the caller's promise.
        unsafe {
            let extra = ptr::null_mut();
            driver.launch(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, extra)
        }
    }
    /// The architecture of a device, by the compiler's name.
    fn architecture(&self, driver: &Driver, device: c_int) -> Result<String, Failed>;
    /// See [`crate::DeviceLoad::busy`], of the device at a PCIe address.
    fn busy(&self, _pci_bus_id: &str) -> Option<f64> {
        None
    }
    /// Facts that take a while to find out about the device `ordinal` of those at these PCIe addresses.
    fn diagnose(
        &self,
        driver: &Driver,
        device: c_int,
        ordinal: usize,
        addresses: &[String],
    ) -> Result<Diagnosis, Failed>;
}
