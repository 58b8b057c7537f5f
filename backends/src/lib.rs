//! Memory, order and collectives of one accelerator, and the tensor library on top of it.
//!
//! Read in this order: [`Device`] and [`Collective`] are the contracts that a backend holds; [`Stream`],
//! [`Event`], [`Buffer`], [`Arena`], [`PinnedBuffer`], [`CollectiveGroup`] and [`Work`] are the safe types written
//! once over them; [`ops`] has the tensor operations that libtorch lacks, and [`flat`] what a
//! strategy does to buffers where libtorch does not compute. [`open`] and [`connect`] are the only
//! places that know every backend.

mod ascend;
mod collective;
mod cpu;
mod cuda;
mod device;
pub mod faults;
mod ffi;
pub mod flat;
mod gpu;
mod host;
mod kernels;
mod nccl;
pub mod ops;
mod rocm;
mod safe;
#[cfg(test)]
mod testing;
mod threads;
mod torch_memory;
mod vulkan;

use std::sync::Arc;

pub use collective::{
    Collective, P2p, ReduceOp, Reduction,
    group::{CollectiveGroup, Work},
    rendezvous::{Rendezvous, Store},
};
pub use device::{
    BackendKind, Device, DeviceId, DeviceInfo, Diagnosis, Grid, HostFn, Limits, MemoryInfo, RawBuffer,
    RawEvent, RawGraph, RawSlice, RawStream, TorchDevice,
    dtype::DType,
    error::{Error, Result, without_backtrace},
    release_cached,
};
pub use ffi::library::prefer_folder;
pub use kernels::cache::cache_kernels_in;
pub use safe::{
    buffer::{Arena, Buffer, PinnedBuffer},
    graph::Graph,
    stream::{Event, Stream},
};
pub use threads::on_threads;
pub use torch_memory::tensor_peak_bytes;

/// Variables that vendors' libraries read from the environment, for each rank of a job. NVLink multicast is off: a
/// rank that dies in it can leave the GPUs of a host unusable, and no option of NCCL's own calls turns it off.
pub const RANK_ENVIRONMENT: [(&str, &str); 1] = [("NCCL_NVLS_ENABLE", "0")];

/// Opens a device, or returns the one that this process has open. [`Error::Unavailable`] when its library or the
/// device itself is not there.
pub fn open(id: DeviceId) -> Result<Arc<dyn Device>> {
    match id.backend {
        BackendKind::Cpu => Ok(cpu::CpuDevice::open(id.ordinal)),
        BackendKind::Cuda => open_gpu(&cuda::VENDOR, id),
        BackendKind::Rocm => open_gpu(&rocm::VENDOR, id),
        BackendKind::Vulkan => device::opened::once(id, || Ok(Arc::new(vulkan::Vulkan::open(id.ordinal)?))),
        BackendKind::Ascend => device::opened::once(id, || Ok(Arc::new(ascend::Npu::open(id.ordinal)?))),
    }
}

/// Devices of a backend that this process could open; [`Error::Unavailable`] when there is none.
pub fn devices(backend: BackendKind) -> Result<Vec<DeviceInfo>> {
    match backend {
        BackendKind::Cpu => Ok(vec![open(DeviceId { backend, ordinal: 0 })?.info()]),
        BackendKind::Cuda => gpu::devices(&cuda::VENDOR),
        BackendKind::Rocm => gpu::devices(&rocm::VENDOR),
        BackendKind::Vulkan => vulkan::devices(),
        BackendKind::Ascend => ascend::devices(),
    }
}

/// What takes a while to find out about a device that is there.
pub fn diagnose(id: DeviceId) -> Result<Diagnosis> {
    match id.backend {
        BackendKind::Cuda => gpu::diagnose(&cuda::VENDOR, id.ordinal),
        BackendKind::Rocm => gpu::diagnose(&rocm::VENDOR, id.ordinal),
        BackendKind::Ascend => Ok(ascend::diagnose()),
        _ => Ok(Diagnosis::default()),
    }
}

/// [`connect_with`] sums in rank order.
pub fn connect(device: &dyn Device, rendezvous: &Rendezvous) -> Result<Arc<dyn Collective>> {
    connect_with(Reduction::Ordered, device, rendezvous)
}

/// Connects the ranks of a job for `device`'s backend. Blocks until all are there or the time-out has passed. A process may
/// connect more than once, for other devices too; ranks do so in the same order.
///
/// Whoever starts the ranks sets [`RANK_ENVIRONMENT`] for them.
pub fn connect_with(
    reduction: Reduction,
    device: &dyn Device,
    rendezvous: &Rendezvous,
) -> Result<Arc<dyn Collective>> {
    let store = Store::connect(rendezvous)?.next_part()?;
    match device.id().backend {
        BackendKind::Cpu | BackendKind::Vulkan => Ok(Arc::new(collective::gloo::Gloo::connect(store)?)),
        BackendKind::Cuda | BackendKind::Rocm => Ok(Arc::new(nccl::Nccl::connect(device, store, reduction)?)),
        BackendKind::Ascend => Ok(Arc::new(ascend::Hccl::connect(device, store)?)),
    }
}

fn open_gpu(vendor: &'static gpu::Vendor, id: DeviceId) -> Result<Arc<dyn Device>> {
    device::opened::once(id, || Ok(Arc::new(gpu::Gpu::open(vendor, id.ordinal)?)))
}
