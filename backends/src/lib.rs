//! Memory, order and collectives of one accelerator, and the tensor library on top of it.
//!
//! Read in this order: [`Device`] and [`Collective`] are the contracts that a backend holds; [`Stream`],
//! [`Event`], [`Buffer`], [`Arena`], [`PinnedBuffer`], [`CollectiveGroup`] and [`Work`] are the safe types written
//! once over them; [`ops`] has the tensor operations that libtorch lacks. [`open`] and [`connect`] are the only
//! places that know every backend.

mod buffer;
mod collective;
mod cpu;
mod device;
mod dtype;
mod error;
pub mod faults;
mod ffi;
mod gloo;
mod group;
pub mod ops;
mod rendezvous;
mod stream;

use std::sync::Arc;

pub use buffer::{Arena, Buffer, PinnedBuffer};
pub use collective::{Collective, P2p, ReduceOp};
pub use device::{
    BackendKind, Device, DeviceId, DeviceInfo, HostFn, MemoryInfo, RawBuffer, RawEvent, RawSlice, RawStream,
    TorchDevice,
};
pub use dtype::DType;
pub use error::{Error, Result};
pub use group::{CollectiveGroup, Work};
pub use rendezvous::{Rendezvous, Store};
pub use stream::{Event, Stream};

/// Opens a device. [`Error::Unavailable`] when its library or the device itself is not there.
pub fn open(id: DeviceId) -> Result<Arc<dyn Device>> {
    match id.backend {
        BackendKind::Cpu => Ok(cpu::CpuDevice::open(id.ordinal)),
        BackendKind::Cuda | BackendKind::Rocm | BackendKind::Ascend | BackendKind::Vulkan => {
            Err(Error::Unavailable {
                backend: id.backend,
                tried: Vec::new(),
                reason: "this version has no implementation of it".into(),
            })
        }
    }
}

/// Devices of a backend that this process could open; [`Error::Unavailable`] when there is none.
pub fn devices(backend: BackendKind) -> Result<Vec<DeviceInfo>> {
    Ok(vec![open(DeviceId { backend, ordinal: 0 })?.info()])
}

/// Connects the ranks of a job for `device`'s backend. Blocks until all are there or the time-out has passed.
pub fn connect(device: &dyn Device, rendezvous: &Rendezvous) -> Result<Arc<dyn Collective>> {
    let store = Store::connect(rendezvous)?;
    match device.id().backend {
        BackendKind::Cpu => Ok(Arc::new(gloo::Gloo::connect(store)?)),
        backend => Err(Error::Unsupported {
            backend,
            what: "collectives: this version has no implementation of them".into(),
        }),
    }
}
