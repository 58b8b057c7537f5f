//! The critic's loss as a gradient on per-token values.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::Result;
use crate::train::device_sums;

/// Targets of the values of some sequences: each tensor is fp32 `[M]`, all tokens concatenated.
#[derive(Debug)]
pub struct ValueTargets {
    /// Tokens of each sequence.
    pub lengths: Vec<i64>,
    /// Values before the first update of the step.
    pub old_values: Tensor,
    /// Returns: advantages plus old values.
    pub returns: Tensor,
    /// Weights from [`token_weights`](super::token_weights).
    pub token_weights: Tensor,
}

impl ValueTargets {
    /// Copies the targets to `device`.
    pub fn on(&self, device: tch::Device) -> Result<Self> {
        Ok(Self {
            lengths: self.lengths.clone(),
            old_values: self.old_values.f_to_device(device)?,
            returns: self.returns.f_to_device(device)?,
            token_weights: self.token_weights.f_to_device(device)?,
        })
    }

    /// Targets of a range of the sequences, as views.
    pub fn part(&self, sequences: Range<usize>) -> Result<Self> {
        let start: i64 = self.lengths[..sequences.start].iter().sum();
        let lengths = self.lengths[sequences].to_vec();
        let tokens = lengths.iter().sum();
        let part = |tensor: &Tensor| tensor.f_narrow(0, start, tokens);
        Ok(Self {
            lengths,
            old_values: part(&self.old_values)?,
            returns: part(&self.returns)?,
            token_weights: part(&self.token_weights)?,
        })
    }
}

device_sums! {
    /// Sums over tokens in the critic's updates.
    pub struct ValueSums {
        /// Weighted losses.
        loss,
        /// Tokens whose value is clipped.
        clipped,
    }
}

/// Sums over a step's micro-batches of the critic, on the device.
#[derive(Debug, Default)]
pub struct ValueStats(Option<Tensor>);

impl ValueStats {
    /// Reads this rank's sums, which are 0 if nothing was added; waits for the device.
    pub fn read(&self) -> Result<ValueSums> {
        self.0.as_ref().map_or(Ok(ValueSums::default()), ValueSums::read)
    }
}

/// Returns the gradient of the value loss with respect to `values`. The loss is a sum over tokens of token weight
/// times max((v - R)², (clip(v, o ± `clip`) - R)²) / 2, divided by `count`. Here v is the value, o the old value and
/// R the return, as in Schulman et al.'s implementation of PPO, verl and OpenRLHF. Without a `clip`
/// the loss of a token is (v - R)² / 2. `count` is [`count`](super::count) of the whole mini-batch, over all ranks and
/// micro-batches.
pub fn value_loss(
    clip: Option<f64>,
    values: &Tensor,
    targets: &ValueTargets,
    count: f64,
    stats: &mut ValueStats,
) -> Result<Tensor> {
    let values = values.f_detach()?.f_set_requires_grad(true)?;
    let ValueTargets { old_values, returns, token_weights, .. } = targets;
    let free = values.f_sub(returns)?.f_square()?;
    let (squares, clipped) = match clip {
        None => (free.shallow_clone(), None),
        Some(clip) => {
            // The clamped value is exactly v within the bounds, so that rounding does not count as clipping.
            let (least, most) = (old_values.f_sub_scalar(clip)?, old_values.f_add_scalar(clip)?);
            let bound = values.f_maximum(&least)?.f_minimum(&most)?.f_sub(returns)?.f_square()?;
            (free.f_maximum(&bound)?, Some(bound.f_gt_tensor(&free)?))
        }
    };
    let sum = squares.f_mul(token_weights)?.f_sum(squares.kind())?.f_mul_scalar(0.5)?;
    let mean = sum.f_div_scalar(count)?;
    let gradient = Tensor::f_run_backward(&[&mean], &[&values], false, false)?.swap_remove(0);
    let sum = sum.f_detach()?.f_to_kind(Kind::Double)?;
    let clipped = match clipped {
        Some(clipped) => clipped.f_sum(Kind::Double)?,
        None => sum.f_zeros_like()?,
    };
    let seen = ValueSums { loss: sum, clipped }.stack()?;
    stats.0 = Some(match stats.0.take() {
        Some(before) => before.f_add(&seen)?,
        None => seen,
    });
    Ok(gradient)
}
