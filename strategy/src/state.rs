//! Names of the states that can leave the device.

use std::fmt;

/// A state that can leave the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The optimizer's moments and, with 16-bit weights, its fp32 weights. Empty if the optimizer steps on
    /// the host ([`crate::StepsOn`]), where they stay.
    Optimizer,
    /// The accumulated gradients. After a step their values are not needed, so nothing is copied.
    Gradients,
    /// The weights that the blocks run with. Empty if they are on the host ([`crate::ParamsOn`]).
    Params,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Optimizer => "optimizer states",
            Self::Gradients => "gradients",
            Self::Params => "weights",
        })
    }
}
