//! What a strategy is asked for, as plain data: whoever reads files of configuration fills it in.

use anyroll_backends::DType;

use crate::Error;

/// How a strategy holds and runs a model. A stage alone is one, too: in fp32, without recomputation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroConfig {
    /// What is sharded over the ranks.
    pub stage: ZeroStage,
    /// What weights, activations and a micro-batch's gradients are held in.
    pub precision: Precision,
    /// What backward runs again.
    pub recompute: Recompute,
}

impl From<ZeroStage> for ZeroConfig {
    fn from(stage: ZeroStage) -> Self {
        Self { stage, precision: Precision::Fp32, recompute: Recompute::None }
    }
}

/// The element type of weights, activations and a micro-batch's gradients. Gradients are reduced over ranks and
/// added over micro-batches in fp32, and the optimizer steps fp32 weights, whatever it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// 32-bit IEEE: the optimizer steps the weights themselves.
    Fp32,
    /// bfloat16: each step rounds the optimizer's own fp32 weights, sharded as its moments are.
    Bf16,
}

impl Precision {
    /// The element type.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Fp32 => DType::F32,
            Self::Bf16 => DType::Bf16,
        }
    }
}

/// What backward runs again instead of keeping it from forward. The results are the same, to the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    None,
    /// Every block but the last, from its input: the activations of one block exist at a time, for about a third
    /// more compute.
    Full,
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

/// AdamW (Loshchilov and Hutter 2019), with decoupled weight decay, after clipping by the global norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay of the running means of the gradient and of its square.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Per step, times the learning rate, off the weights whose spec says so (matrices).
    pub weight_decay: f64,
    /// Gradients are scaled down to this global norm. Infinite: no clipping.
    pub max_grad_norm: f64,
}
