//! Where a rank holds a role: its device, and the ranks that it has met.

use std::{sync::Arc, time::Duration};

use anyroll_backends::{
    BackendKind, CollectiveGroup, Device, DeviceId, Reduction, TorchDevice, connect_with, open,
};
use anyroll_config::{self as config};

use crate::{
    Result,
    launch::Rank,
    run::{Role, Run},
};

/// A device and the ranks that it trains with.
#[derive(Clone, Debug)]
pub struct Place {
    /// The device.
    pub device: Arc<dyn Device>,
    /// All ranks.
    pub group: CollectiveGroup,
}

impl Place {
    /// Opens the policy's device and meets the other ranks.
    pub fn open(run: &Run, rank: &Rank) -> Result<Self> {
        Self::of("policy", &run.policy, rank)
    }

    /// Where another role is held, called `name`: here, where the policy is, or on devices of its own, on which the ranks
    /// meet anew. Every rank calls, in the same order.
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
        Ok(Self { device, group })
    }

    /// Where libtorch computes.
    ///
    /// # Errors
    /// `Unsupported` for a backend that libtorch does not run on.
    pub fn torch_device(&self) -> Result<tch::Device> {
        torch_device(&*self.device)
    }
}

/// A device of the backend of this name.
///
/// # Errors
/// For a name that no backend has, or those of the device.
pub fn open_device(backend: &str, ordinal: usize) -> Result<Arc<dyn Device>> {
    let what = "backend";
    let backend = backend.parse::<BackendKind>();
    let backend = backend.map_err(|problem| anyroll_models::Error::Input { what, problem })?;
    Ok(open(DeviceId { backend, ordinal })?)
}

/// A device, as libtorch calls it.
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

    /// Runs `rank` on as many threads, each at a place of its own on the host; returns what each returned.
    pub fn ranks<R: Send>(world_size: usize, rank: impl Fn(Place) -> R + Sync) -> Vec<R> {
        let host = |ordinal| open(DeviceId { backend: BackendKind::CPU, ordinal }).unwrap();
        on_threads(world_size, host, |device, group| rank(Place { device: device.clone(), group }))
    }
}
