//! Options of a strategy as plain values, which the reader of the config file fills in.

use anyroll_backends::ops;

use crate::{Decays, Error, FrozenWeights, Moments, Precision, Recompute};

/// Describes how a strategy shards and runs a model. A [`ZeroStage`] alone converts into one: fp32, no
/// recomputation, optimizer on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ZeroConfig {
    /// The states that are sharded over the ranks.
    pub stage: ZeroStage,
    /// Element type of weights, activations and a micro-batch's gradients.
    pub precision: Precision,
    /// The activations that backward recomputes.
    pub recompute: Recompute,
    /// Placement of the optimizer's states and steps: the device or the host.
    pub steps_on: StepsOn,
    /// Placement of the weights while no block uses them: the device or the host.
    pub params_on: ParamsOn,
    /// Form of frozen weights while no block uses them.
    pub frozen: FrozenWeights,
    /// Form of the optimizer's moments.
    pub moments: Moments,
}

impl ZeroConfig {
    /// Returns true if the optimizer has weights of its own, fp32, since the model runs with another copy.
    pub(crate) fn has_master(self) -> bool {
        self.precision != Precision::Fp32
            || self.steps_on == StepsOn::Host
            || self.params_on == ParamsOn::Host
    }

    /// Returns true if whole units are gathered before use and freed after it.
    pub(crate) fn gathers(self) -> bool {
        self.stage >= ZeroStage::Zero3 || self.params_on == ParamsOn::Host
    }
}

impl From<ZeroStage> for ZeroConfig {
    fn from(stage: ZeroStage) -> Self {
        Self {
            stage,
            precision: Precision::Fp32,
            recompute: Recompute::None,
            steps_on: StepsOn::Device,
            params_on: ParamsOn::Device,
            frozen: FrozenWeights::Precision,
            moments: Moments::Fp32,
        }
    }
}

/// Placement of the optimizer's states and steps: the device or the host. Results are bitwise the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepsOn {
    /// On the device. Between steps the states may be offloaded ([`crate::State::Optimizer`]).
    Device,
    /// On the host, for models whose optimizer states do not fit on the devices. Each step copies gradients
    /// to the host and weights back, and waits for both.
    Host,
}

/// Placement of the weights while no block uses them: the device or the host. Results are bitwise the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamsOn {
    /// On the device. Between uses the weights may be offloaded ([`crate::State::Params`]).
    Device,
    /// On the host, for models whose weights do not fit on the devices. A block's weights are copied to the
    /// device while the block before it runs, and updated ones are copied back after a step. The optimizer
    /// then has its own fp32 weights.
    Host,
}

/// The states that are sharded over the ranks (Rajbhandari et al. 2020). Each stage also shards the states of
/// the stages before it.
///
/// One implementation serves all stages: a stage is a comparison. Losses and weights are bitwise equal at all
/// stages for one world size, since layout and order of summation are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ZeroStage {
    /// Nothing: every rank holds and steps everything.
    Zero0,
    /// The optimizer's states, and with them the accumulated gradients.
    Zero1,
    /// Also a micro-batch's gradients: only a few blocks' gradients are whole at any time.
    Zero2,
    /// Also the weights: a block's weights are gathered just before it runs.
    Zero3,
}

impl TryFrom<u64> for ZeroStage {
    type Error = Error;

    fn try_from(stage: u64) -> Result<Self, Error> {
        match stage {
            0 => Ok(Self::Zero0),
            1 => Ok(Self::Zero1),
            2 => Ok(Self::Zero2),
            3 => Ok(Self::Zero3),
            stage => Err(Error::ZeroStage(stage)),
        }
    }
}

/// AdamW (Loshchilov and Hutter 2019), with decoupled weight decay, after clipping by the global norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay rates of the running means of the gradient and of its square.
    pub betas: (f64, f64),
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay: each step subtracts this times the learning rate times the weight, for the
    /// weights in `decays`.
    pub weight_decay: f64,
    /// The weights that decay.
    pub decays: Decays,
    /// Gradients are scaled down to this global norm. Infinity turns clipping off.
    pub max_grad_norm: f64,
}

impl AdamW {
    /// Returns the numbers of a step at `learning_rate`.
    pub(crate) fn hyper(&self, learning_rate: f64) -> ops::AdamW {
        ops::AdamW { learning_rate, betas: self.betas, eps: self.eps, weight_decay: self.weight_decay }
    }
}
