//! What a strategy is asked for, as plain data: whoever reads files of configuration fills it in.

use crate::Error;

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
