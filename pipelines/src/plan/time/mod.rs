//! A step's time on paper, by phases, with the resource that bounds each.
//!
//! Work comes from the model's shapes ([`Decoder::work`](anyroll_models::Decoder::work)), and the walk of a step from the
//! strategy ([`anyroll_strategy::timeline`]). This module adds the rates that a device reaches (`rates`), collectives
//! over hosts (`network`) and sampling. `measured.tsv` has the measurements that it is compared with.

mod demand;
mod network;
mod rates;
mod sampling;
mod step;
mod training;

#[cfg(test)]
mod measured;

use anyroll_strategy::timeline::Elapsed;
use serde::Serialize;

pub use demand::Demand;
use rates::Rates;
pub use rates::Sheet;

use super::{Planner, Stages, Strategies};
use crate::{
    NoTime,
    run::{Run, Strategy},
};

/// The devices of a planned run.
#[derive(Clone, Copy, Debug)]
pub struct Cluster {
    /// Data sheet of a device.
    pub sheet: Sheet,
    /// True if the sheet's matrix products are those of 16 bits, false if of the run's precision.
    pub is_16_bit: bool,
    /// Number of hosts.
    pub hosts: usize,
    /// Devices of a host.
    pub devices_per_host: usize,
    /// Bytes/s from a host to others, shared by its devices; `None` for a single host.
    pub link: Option<f64>,
}

impl Cluster {
    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.hosts * self.devices_per_host
    }

    fn rates(&self, strategy: &Strategy) -> Rates {
        Rates::new(self.sheet, self.devices_per_host, strategy.deterministic)
    }
}

/// A phase of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Phase {
    /// Its name.
    pub name: &'static str,
    /// Its time.
    pub seconds: f64,
    /// Part of it in which the device waits for a collective or a copy.
    pub waited_s: f64,
    /// Seconds of each resource, some of them next to others.
    pub demand: Demand,
    /// The resource that is needed longest, or collectives of the phases before.
    pub bound: &'static str,
}

impl Phase {
    fn new(name: &'static str, Elapsed { total, waited }: Elapsed, demand: Demand) -> Self {
        // A phase may also wait for what others have submitted: forward for gathers of new weights.
        let is_others = 2.0 * waited > total && demand.is_bound_by_device();
        let bound = if is_others { "collectives in flight" } else { demand.bound() };
        Self { name, seconds: total, waited_s: waited, demand, bound }
    }
}

/// Time of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepTime {
    /// All phases.
    pub seconds: f64,
    /// Forward, backward and the optimizer.
    pub training_s: f64,
    /// Tokens that a device trains on.
    pub tokens: usize,
    /// Tokens per second and device, of the step.
    pub tokens_per_s: f64,
    /// The same of forward, backward and the optimizer.
    pub training_tokens_per_s: f64,
    /// Operations of forward and backward without repetitions, over those that the device could do in that time.
    pub flops_utilization: f64,
    /// Phases in the order of a step.
    pub phases: Vec<Phase>,
    /// Parts of a step that are left out.
    pub not_counted: Vec<String>,
}

impl Planner {
    /// Time of a step of `run`, whose ranks are those of `cluster`, at these stages. Shards are those of `sharers`
    /// neighbours; other groups of as many hold replicas.
    ///
    /// # Errors
    /// [`NoTime`].
    pub fn time(
        &self,
        run: &Run,
        stages: Stages,
        cluster: &Cluster,
        sharers: usize,
    ) -> Result<StepTime, NoTime> {
        match self {
            Self::Texts(texts) => texts.time(run, &Strategies::of(run, stages), (cluster, sharers)),
            Self::Images(_) => Err(NoTime::Images),
        }
    }
}
