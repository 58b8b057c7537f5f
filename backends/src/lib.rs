//! Memory, order and collectives of one accelerator, and the tensor library on top of it.
//!
//! Read in this order: [`Device`] and [`Collective`] are the contracts that a backend holds; [`Stream`],
//! [`Event`], [`Buffer`], [`Arena`], [`PinnedBuffer`], [`CollectiveGroup`] and [`Work`] are the safe types written
//! once over them; [`ops`] has the tensor operations that libtorch lacks, and [`flat`] what a
//! strategy does to buffers where libtorch does not compute. [`open`] and [`connect`] are the only
//! places that know every backend.

#[cfg(test)]
mod abi;
mod ascend;
mod attention_kernels;
mod buffer;
mod collective;
mod communicator;
mod cpu;
mod cuda;
mod decode_kernels;
mod device;
mod device_kernels;
mod diffusion_kernels;
mod dtype;
mod error;
mod expert_kernels;
pub mod faults;
mod ffi;
pub mod flat;
mod gloo;
mod gpu;
mod graph;
mod group;
mod host_copies;
mod host_work;
mod in_rank_order;
mod kernel_cache;
mod library;
mod model_kernels;
mod nccl;
mod notice;
mod open_devices;
pub mod ops;
mod pinned_ranges;
mod product_kernels;
mod rendezvous;
mod rocm;
mod row_kernels;
mod sample_kernels;
mod stream;
mod tensor_meter;
mod threads;
mod vulkan;

use std::sync::Arc;

pub use buffer::{Arena, Buffer, PinnedBuffer};
pub use collective::{Collective, P2p, ReduceOp, Reduction};
pub use device::{
    BackendKind, Device, DeviceId, DeviceInfo, Diagnosis, Grid, HostFn, Limits, MemoryInfo, RawBuffer,
    RawEvent, RawGraph, RawSlice, RawStream, TorchDevice, release_cached,
};
pub use dtype::DType;
pub use error::{Error, Result, without_backtrace};
pub use graph::Graph;
pub use group::{CollectiveGroup, Work};
pub use kernel_cache::cache_kernels_in;
pub use library::prefer_folder;
pub use rendezvous::{Rendezvous, Store};
pub use stream::{Event, Stream};
pub use tensor_meter::tensor_peak_bytes;
pub use threads::on_threads;

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
        BackendKind::Vulkan => open_devices::once(id, || Ok(Arc::new(vulkan::Vulkan::open(id.ordinal)?))),
        BackendKind::Ascend => open_devices::once(id, || Ok(Arc::new(ascend::Npu::open(id.ordinal)?))),
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
        BackendKind::Cpu | BackendKind::Vulkan => Ok(Arc::new(gloo::Gloo::connect(store)?)),
        BackendKind::Cuda | BackendKind::Rocm => Ok(Arc::new(nccl::Nccl::connect(device, store, reduction)?)),
        BackendKind::Ascend => Ok(Arc::new(ascend::Hccl::connect(device, store)?)),
    }
}

fn open_gpu(vendor: &'static gpu::Vendor, id: DeviceId) -> Result<Arc<dyn Device>> {
    open_devices::once(id, || Ok(Arc::new(gpu::Gpu::open(vendor, id.ordinal)?)))
}
