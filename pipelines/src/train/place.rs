//! Placement of a role on a rank: its device, and the group of ranks.

use std::{sync::Arc, time::Duration};

use anyroll_backends::{
    BackendKind, CollectiveGroup, Device, DeviceId, Reduction, TorchDevice, connect_with, open,
};
use anyroll_config::{self as config};
use anyroll_strategy::Mesh;

use crate::{
    Result,
    launch::Rank,
    run::{Role, Run},
};

/// A device and the ranks that it computes with.
#[derive(Clone, Debug)]
pub struct Place {
    /// The device.
    pub device: Arc<dyn Device>,
    /// All ranks, and those that share micro-batches.
    pub mesh: Mesh,
}

impl Place {
    /// Opens the policy's device and connects to the other ranks.
    pub fn open(run: &Run, rank: &Rank) -> Result<Self> {
        Self::of("policy", &run.policy, rank)
    }

    /// The place of another role, called `name`: this place if the role is on the policy's devices, else its own
    /// devices, on which the ranks connect anew. Every rank must call this, in the same order.
    pub fn beside(&self, name: &'static str, role: &Role, run: &Run, rank: &Rank) -> Result<Self> {
        if role.is_with(&run.policy) { Ok(self.clone()) } else { Self::of(name, role, rank) }
    }

    fn of(name: &'static str, role: &Role, rank: &Rank) -> Result<Self> {
        let device = open_device(&role.backend, role.ordinals[rank.local_rank])?;
        let timeout = Duration::from_secs_f64(role.strategy.collective_timeout_s);
        let rendezvous = rank.rendezvous(timeout);
        let reduction = match role.strategy.reduction {
            config::Reduction::Ordered => Reduction::Ordered,
            config::Reduction::Library => Reduction::Library,
        };
        let comm = connect_with(reduction, &*device, &rendezvous)?;
        let group = CollectiveGroup::new(name, comm, &device, timeout)?;
        let strategy = &role.strategy;
        let shards = strategy.shard_group.ranks(group.world_size(), role.ordinals.len());
        let mesh = Mesh::from(group).in_tensor_groups(strategy.tensor_parallel)?;
        let mesh = mesh.in_sequence_groups(strategy.sequence_parallel)?.in_shard_groups(shards)?;
        let mesh = mesh.in_expert_groups(strategy.expert_parallel)?;
        Ok(Self { device, mesh })
    }

    /// The group of all ranks.
    pub fn group(&self) -> &CollectiveGroup {
        self.mesh.world()
    }

    /// The device of libtorch's computations.
    ///
    /// # Errors
    /// `Unsupported` for a backend that libtorch does not run on.
    pub fn torch_device(&self) -> Result<tch::Device> {
        torch_device(&*self.device)
    }
}

/// Opens a device of the backend of this name.
///
/// # Errors
/// A name of no backend, or the errors of the device.
pub fn open_device(backend: &str, ordinal: usize) -> Result<Arc<dyn Device>> {
    let what = "backend";
    let backend = backend.parse::<BackendKind>();
    let backend = backend.map_err(|problem| anyroll_models::Error::Input { what, problem })?;
    Ok(open(DeviceId { backend, ordinal })?)
}

/// libtorch's name of a device.
///
/// # Errors
/// `Unsupported` for a backend that libtorch does not run on.
pub fn torch_device(device: &dyn Device) -> Result<tch::Device> {
    let of_libtorch = device.torch_device().map(TorchDevice::tch);
    Ok(of_libtorch.ok_or_else(|| anyroll_backends::Error::Unsupported {
        backend: device.id().backend,
        what: "models: libtorch does not compute on it".into(),
    })?)
}

#[cfg(test)]
pub(super) mod tests {
    use anyroll_backends::on_threads;

    use super::*;

    /// Runs `rank` on `world_size` threads, each at a place of its own on the host; returns their results.
    pub fn ranks<R: Send>(world_size: usize, rank: impl Fn(Place) -> R + Sync) -> Vec<R> {
        let host = |ordinal| open(DeviceId { backend: BackendKind::CPU, ordinal }).unwrap();
        on_threads(world_size, host, |device, group| {
            rank(Place { device: device.clone(), mesh: group.into() })
        })
    }
}
