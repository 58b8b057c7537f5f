//! Rotary position embedding.

use tch::{Device, Tensor};

use super::Result;

/// Which way [`rope_`] turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// By the position's angle.
    Forward,
    /// Back by it, which is the gradient of turning forward.
    Inverse,
}

/// The cosines, then the sines, of the angles of each position: fp32 `[positions, dim]`.
///
/// Angles are products of fp32 numbers, as in Hugging Face's models: at large positions the rounding of an
/// angle is visible, and a checkpoint was trained with it.
///
/// # Errors
/// libtorch's error.
pub fn rope_table(positions: i64, dim: i64, theta: f64, device: Device) -> Result<Tensor> {
    let half = dim / 2;
    let frequencies: Vec<f32> =
        (0..half).map(|pair| theta.powf(-2.0 * pair as f64 / dim as f64) as f32).collect();
    let mut table = Vec::with_capacity((positions * dim) as usize);
    for position in 0..positions {
        let angles = frequencies.iter().map(|frequency| f64::from(position as f32 * frequency));
        table.extend(angles.clone().map(|angle| angle.cos() as f32));
        table.extend(angles.map(|angle| angle.sin() as f32));
    }
    Ok(Tensor::f_from_slice(&table)?.f_view([positions, dim])?.f_to_device(device)?)
}
