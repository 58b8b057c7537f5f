//! [`NoTime`]: reasons why a plan has no time of a step.

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
    /// Ranks that hold layers together.
    #[error(
        "a step's time is not planned with `strategy.tensor_parallel`: leave out `--hosts`, or set it to 1"
    )]
    Tensor,
    /// Experts on several ranks.
    #[error(
        "a step's time is not planned with `strategy.expert_parallel`: leave out `--hosts`, or set it to 1"
    )]
    Experts,
    /// Frozen weights in 4 bits.
    #[error(
        "a step's time is not planned with `strategy.frozen_weights: nf4`: leave out `--hosts`, or set it to `precision`"
    )]
    FourBits,
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
