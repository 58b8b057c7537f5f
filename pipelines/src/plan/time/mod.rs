//! A step's time on paper, by phases, with the resource that bounds each.
//!
//! Work comes from the model's shapes ([`Decoder::work`](anyroll_models::Decoder::work)), and the walk of a step from the
//! strategy ([`anyroll_strategy::timeline`]). This module adds the rates that a device reaches ([`rates`]), collectives
//! over hosts ([`network`]) and sampling. `measured.tsv` has the measurements that it is compared with.

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
use crate::run::{Run, Strategy};

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

/// Reason why a step's time is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoTime {
    /// Several hosts without a link.
    #[error("several hosts need the rate of their links: add `--link 400Gb/s`, or `--link 50GB/s`")]
    NoLink,
    /// Figures of the devices.
    #[error("a step's time needs the devices' figures: add `--device H100` or another card, or {missing}")]
    NoDevice {
        /// The options that are missing.
        missing: String,
    },
    /// No stage of `auto`.
    #[error(
        "a step's time needs a stage, and `auto` finds none: add `--memory 80GiB`, or set `strategy.zero_stage` to 3"
    )]
    NoStage,
    /// Single precision on a card of the table.
    #[error(
        "the figures of `--device` are those of 16 bits, and the config's `strategy.precision` is fp32: use bf16 or fp16, or \
         add `--device-flops`"
    )]
    Fp32,
    /// A model of images.
    #[error(
        "a step's time is planned for language models only: leave out `--hosts`, and use `--world` for its memory"
    )]
    Images,
    /// Layers that libtorch differentiates.
    #[error("a step's time is not planned for layers that libtorch differentiates: leave out `--hosts`")]
    Layers,
    /// An optimizer on the host.
    #[error(
        "a step's time is not planned with `strategy.offload.optimizer: cpu_step`, whose speed depends on the host: use \
         `between_steps` or `none`"
    )]
    CpuStep,
    /// A group of ranks that is unequally divided by hosts.
    #[error(
        "{ranks} ranks that share shards or micro-batches are neither a part of {devices_per_host} devices nor whole hosts: \
         use another `--devices-per-host`, or another `strategy.sequence_parallel`"
    )]
    Uneven {
        /// Ranks of the group.
        ranks: usize,
        /// Devices of a host.
        devices_per_host: usize,
    },
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
    /// The resource that is needed longest.
    pub bound: &'static str,
}

impl Phase {
    fn new(name: &'static str, Elapsed { total, waited }: Elapsed, demand: Demand) -> Self {
        Self { name, seconds: total, waited_s: waited, demand, bound: demand.bound() }
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
