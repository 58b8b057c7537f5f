//! What a strategy is asked for, as plain data: whoever reads files of configuration fills it in.

use anyroll_backends::{DType, ops};

use crate::Error;

/// How a strategy holds and runs a model. A stage alone is one, too: in fp32, without
/// recomputation, stepped on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ZeroConfig {
    /// What is sharded over the ranks.
    pub stage: ZeroStage,
    /// What weights, activations and a micro-batch's gradients are held in.
    pub precision: Precision,
    /// What backward runs again.
    pub recompute: Recompute,
    /// Where the optimizer's states are, and its steps.
    pub steps_on: StepsOn,
    /// Where the weights are while no block uses them.
    pub params_on: ParamsOn,
}

impl ZeroConfig {
    /// fp32 values that the optimizer keeps of an element: two moments, and the weight that it steps where the model
    /// runs with another.
    pub(crate) fn optimizer_values(self) -> usize {
        let steps_weights_themselves = self.precision == Precision::Fp32
            && self.steps_on == StepsOn::Device
            && self.params_on == ParamsOn::Device;
        if steps_weights_themselves { 2 } else { 3 }
    }

    /// Whether whole units come and go.
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
        }
    }
}

/// The element type of weights, activations and a micro-batch's gradients. Gradients are reduced over ranks and
/// added over micro-batches in fp32, and the optimizer steps fp32 weights, whatever it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Precision {
    /// 32-bit IEEE: the optimizer steps the weights themselves.
    Fp32,
    /// bfloat16: each step rounds the optimizer's own fp32 weights, sharded as its moments are.
    Bf16,
    /// 16-bit IEEE: as bf16, and since small gradients would vanish in it, the loss is scaled.
    Fp16(LossScale),
}

impl Precision {
    /// The element type.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Fp32 => DType::F32,
            Self::Bf16 => DType::Bf16,
            Self::Fp16(_) => DType::F16,
        }
    }
}

/// How the factor on the loss in fp16 moves (Micikevicius et al. 2018; PyTorch's `GradScaler`): a gradient that
/// overflows halves it, and its step is skipped; after `growth_interval` steps in a row without one it doubles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// The first factor, above 0. A power of two, so that it rounds nothing.
    pub initial: f64,
    /// Steps without an overflow, at least 1.
    pub growth_interval: u32,
}

impl Default for LossScale {
    fn default() -> Self {
        Self { initial: 65_536.0, growth_interval: 2000 }
    }
}

/// What backward runs again instead of keeping it from forward. The results are the same, to the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    None,
    /// What a block's model can make again cheaply from the rest ([`anyroll_models::Model::thin`]).
    Selective,
    /// Every block but the last, from its input: the activations of one block exist at a time, for about a third
    /// more compute.
    Full,
}

/// Where the optimizer's states are, and its steps. The results are the same, to the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepsOn {
    /// On the device. Between steps they may be elsewhere ([`crate::State::Optimizer`]).
    Device,
    /// On the host, for models whose states the devices cannot hold. A step then sends gradients there and weights
    /// back, and waits for them.
    Host,
}

/// Where the weights are while no block uses them. The results are the same, to the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamsOn {
    /// On the device. Between uses they may be elsewhere ([`crate::State::Params`]).
    Device,
    /// On the host, for models whose weights the devices cannot hold: a block's come just before it runs, while the
    /// block before it does, and new ones go back after a step. The optimizer has fp32 weights of its own then.
    Host,
}

/// What is sharded over the ranks (Rajbhandari et al. 2020). Each stage shards what the one before it does, too.
///
/// One implementation serves all: a stage is a comparison. The losses and weights of all stages are bitwise
/// equal at one world size, since they share one layout and one order of summation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ZeroStage {
    /// Nothing: every rank holds and steps everything.
    Zero0,
    /// The optimizer's states, and with them the accumulated gradients.
    Zero1,
    /// Also the gradients of a micro-batch: only a few blocks' are whole at any time.
    Zero2,
    /// Also the weights: a block's are gathered just before it runs.
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

/// The weights that weight decay applies to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Decays {
    /// Those whose spec says so: not norms and biases.
    #[default]
    Matrices,
    /// All that are trained.
    All,
}

/// AdamW (Loshchilov and Hutter 2019), with decoupled weight decay, after clipping by the global norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay of the running means of the gradient and of its square.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Per step, times the learning rate, off the weights that `decays` says.
    pub weight_decay: f64,
    /// What decays.
    pub decays: Decays,
    /// Gradients are scaled down to this global norm. Infinite: no clipping.
    pub max_grad_norm: f64,
}

impl AdamW {
    /// The numbers of a step at `learning_rate`.
    pub(crate) fn hyper(&self, learning_rate: f64) -> ops::AdamW {
        ops::AdamW { learning_rate, betas: self.betas, eps: self.eps, weight_decay: self.weight_decay }
    }
}
