//! Memory, order and collectives of one accelerator, and the tensor library on top of it.
//!
//! Read in this order: [`Device`] and [`Collective`] are the contracts that a backend holds. [`Stream`], [`Event`],
//! [`Buffer`], [`Arena`], [`PinnedBuffer`], [`CollectiveGroup`] and [`Work`] are the safe types written once over them.
//! [`ops`] has the tensor operations that libtorch lacks, and [`flat`] a strategy's operations on buffers, for devices on
//! which libtorch does not compute. A [`Backend`] is a folder and an entry of the list in this
//! file, the only one that names them all.

#[cfg(test)]
extern crate self as anyroll_backends; // the example's name for this crate

mod ascend;
mod backend;
mod collective;
mod cpu;
mod cuda;
mod device;
mod exit;
pub mod faults;
mod ffi;
pub mod flat;
mod gpu;
mod host;
mod host_exchange;
#[cfg(test)]
#[path = "../examples/host_memory/mod.rs"]
mod host_memory;
mod kernels;
mod nccl;
pub mod ops;
pub mod paper;
pub mod profile;
mod rocm;
mod safe;
#[cfg(test)]
mod testing;
mod threads;
mod torch_memory;
mod vulkan;

use std::{str::FromStr, sync::Arc};

pub use backend::Backend;
pub use collective::{
    Collective, CollectiveGroup, Listener, P2p, ReduceOp, Reduction, Rendezvous, Store, Work,
    connect_through_host,
};
pub use device::{
    BackendKind, BackendTraits, Card, DType, Device, DeviceId, DeviceInfo, DeviceLoad, Diagnosis, Error,
    Grid, HostFn, Limits, MemoryInfo, RawBuffer, RawEvent, RawGraph, RawSlice, RawStream, Result,
    SharedHandle, TorchDevice, without_backtrace,
};
pub use exit::exit_at_once;
pub use ffi::prefer_folder;
pub use host::memory::give_back_freed_memory;
pub use host_exchange::HostExchange;
pub use kernels::cache_kernels_in;
pub use safe::{Arena, Buffer, Event, Graph, PinnedBuffer, Stream};
pub use threads::on_threads;
pub use torch_memory::{release_cached, tensor_peak_bytes};

/// Every backend, in the order in which `auto` prefers them. The only list of them.
static BACKENDS: &[&dyn Backend] = &[
    &cuda::BACKEND,
    &rocm::BACKEND,
    &ascend::BACKEND,
    &vulkan::BACKEND,
    &cpu::BACKEND,
    #[cfg(test)]
    &host_memory::BACKEND,
];

impl BackendKind {
    /// Every backend, in the order in which `auto` prefers them.
    pub fn all() -> impl Iterator<Item = Self> {
        BACKENDS.iter().map(|backend| backend.kind())
    }
}

impl FromStr for BackendKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::all().find(|kind| kind.name() == name).ok_or_else(|| {
            let names: Vec<&str> = Self::all().map(Self::name).collect();
            format!("no backend {name:?}: choose one of {}", names.join(", "))
        })
    }
}

/// The entry of a backend.
///
/// # Errors
/// [`Error::Unavailable`] for one that is not in the list.
pub fn backend(kind: BackendKind) -> Result<&'static dyn Backend> {
    let listed = BACKENDS.iter().copied().find(|backend| backend.kind() == kind);
    listed.ok_or_else(|| Error::Unavailable {
        backend: kind,
        tried: Vec::new(),
        reason: "it is not in `BACKENDS` of `backends/src/lib.rs`".into(),
    })
}

/// Opens a device, or returns the one that this process has open.
///
/// # Errors
/// [`Error::Unavailable`] when its library or the device itself is not there.
pub fn open(id: DeviceId) -> Result<Arc<dyn Device>> {
    backend(id.backend)?.open(id.ordinal)
}

/// Devices of a backend that this process could open.
///
/// # Errors
/// [`Error::Unavailable`] when there is none.
pub fn devices(kind: BackendKind) -> Result<Vec<DeviceInfo>> {
    backend(kind)?.devices()
}

/// Facts about a device that take a while to find out.
///
/// # Errors
/// An error of the vendor's library.
pub fn diagnose(id: DeviceId) -> Result<Diagnosis> {
    backend(id.backend)?.diagnose(id.ordinal)
}

/// Variables that vendors' libraries read from the environment. The launcher of a job sets them for each rank.
pub fn rank_environment() -> impl Iterator<Item = (&'static str, &'static str)> {
    BACKENDS.iter().flat_map(|backend| backend.rank_environment()).copied()
}

/// Connects the ranks of a job for sums in rank order; see [`connect_with`].
pub fn connect(device: &dyn Device, rendezvous: &Rendezvous) -> Result<Arc<dyn Collective>> {
    connect_with(Reduction::Ordered, device, rendezvous)
}

/// Connects the ranks of a job for `device`'s backend. Blocks until all are there or the time-out has passed. A process may
/// connect more than once, for other devices too; ranks do so in the same order. The ranks' environment has
/// [`rank_environment`].
///
/// # Errors
/// [`Error::Unavailable`] without the backend's library of collectives, [`Error::Rendezvous`] or [`Error::Timeout`] when
/// ranks do not meet.
pub fn connect_with(
    reduction: Reduction,
    device: &dyn Device,
    rendezvous: &Rendezvous,
) -> Result<Arc<dyn Collective>> {
    let store = Store::connect(rendezvous)?.next_part()?;
    backend(device.id().backend)?.connect(device, store, reduction)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::testing::{download, upload};

    /// Adding a backend is its folder, a `mod` and an entry of the list: the example has no other line in this crate.
    #[test]
    fn a_backend_is_a_folder_and_two_lines() {
        let name = concat!("host", "_memory");
        let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
        let mut lines = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let text = std::fs::read_to_string(&path).unwrap();
                let of_example = |line: &&str| {
                    line.contains(&format!("{name}::")) || line.contains(&format!("mod {name};"))
                };
                lines.extend(text.lines().filter(of_example).map(|line| line.trim().to_owned()));
            }
        }
        assert_eq!(lines, [format!("mod {name};"), format!("&{name}::BACKEND,")]);
    }

    #[test]
    fn a_listed_backend_is_found_opened_and_connected_by_name() {
        let kind: BackendKind = concat!("host", "_memory").parse().unwrap();
        let found: Vec<DeviceId> = devices(kind).unwrap().iter().map(|info| info.id).collect();
        assert_eq!(found, [DeviceId { backend: kind, ordinal: 0 }]);
        assert!(diagnose(found[0]).unwrap().details.is_empty());
        let open = |ordinal| open(DeviceId { backend: kind, ordinal }).unwrap();
        let sums = on_threads(2, open, |device, group| {
            let stream = Stream::new(device).unwrap();
            let value = [1.5f32, 2.25][group.rank()];
            let buffer = upload(&stream, &value.to_le_bytes(), DType::F32);
            group.all_reduce(&buffer, ReduceOp::Sum, &stream).unwrap().wait().unwrap();
            f32::from_le_bytes(download(&buffer, &stream).try_into().unwrap())
        });
        assert_eq!(sums, [3.75; 2]);
    }

    #[test]
    fn a_backend_that_is_not_listed_is_refused_by_name() {
        const UNLISTED: BackendKind = BackendKind::new(&BackendTraits::accelerator("unlisted"));
        let error = open(DeviceId { backend: UNLISTED, ordinal: 0 }).unwrap_err();
        assert!(matches!(error, Error::Unavailable { backend, .. } if backend == UNLISTED), "{error}");
        let error = "unlisted".parse::<BackendKind>().unwrap_err();
        assert!(error.starts_with("no backend \"unlisted\": choose one of cuda, rocm, "), "{error}");
    }
}
