//! Where a rank trains: its device, and the ranks that it has met.

use std::{sync::Arc, time::Duration};

use anyroll_backends::{
    BackendKind, CollectiveGroup, Device, DeviceId, Reduction, Rendezvous, TorchDevice, connect_with, open,
};

use crate::{
    Result,
    config::{self, Run},
    launch::Rank,
};

/// A device and the ranks that it trains with.
#[derive(Debug)]
pub struct Place {
    /// The device.
    pub device: Arc<dyn Device>,
    /// All ranks.
    pub group: CollectiveGroup,
}

impl Place {
    /// Opens the policy's device and meets the other ranks.
    pub fn open(run: &Run, rank: &Rank) -> Result<Self> {
        let backend: BackendKind = run.policy.backend.parse().expect("a resolved config names a backend");
        let device = open(DeviceId { backend, ordinal: run.policy.ordinals[rank.local_rank] })?;
        let timeout = Duration::from_secs_f64(run.policy.strategy.collective_timeout_s);
        let rendezvous = Rendezvous {
            rank: rank.rank,
            world_size: rank.world_size,
            master_addr: rank.master_addr.clone(),
            master_port: rank.master_port,
            agent_store: rank.agent_store.clone(),
            timeout,
        };
        let reduction = match run.policy.strategy.reduction {
            config::Reduction::Ordered => Reduction::Ordered,
            config::Reduction::Library => Reduction::Library,
        };
        let comm = connect_with(reduction, &*device, &rendezvous)?;
        let group = CollectiveGroup::new("policy", comm, &device, timeout)?;
        Ok(Self { device, group })
    }

    /// Where libtorch computes.
    ///
    /// # Errors
    /// `Unsupported` for a backend that libtorch does not run on.
    pub fn torch_device(&self) -> Result<tch::Device> {
        let device = self.device.torch_device().and_then(TorchDevice::tch);
        Ok(device.ok_or_else(|| anyroll_backends::Error::Unsupported {
            backend: self.device.id().backend,
            what: "models: libtorch does not compute on it".into(),
        })?)
    }
}
