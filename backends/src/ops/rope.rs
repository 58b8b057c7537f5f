//! Rotary position embedding.

use tch::{Device, Tensor};

use super::check::{Args, Engine};
use super::{Result, composite, kernels};
use crate::model_kernels;

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

/// Turns each pair `(x[i], x[i + D / 2])` of each head by its position's angle, in place (Su et al., 2021, with
/// the pairs of Hugging Face's models).
///
/// `x` is `[N, H, D]`, a view whose rows may lie apart; `positions` int64 `[N]`; `table` from [`rope_table`].
///
/// # Errors
/// [`super::Error::Argument`] for shapes that do not fit or a position outside of the table, or libtorch's
/// error.
pub fn rope_(x: &mut Tensor, positions: &Tensor, table: &Tensor, rotation: Rotation) -> Result<()> {
    let Some(engine) = Engine::of(x) else { return composite::rope_(x, positions, table, rotation) };
    let args = Args::new("rope_", x);
    let [rows, heads, dim] = args.dims("x", x)?;
    let [max_position, _] = args.dims("table", table)?;
    let x = args.heads("x", x, [rows, heads, dim])?;
    let positions = args.indices("positions", positions, &[rows], max_position)?;
    let table = args.floats("table", table, &[max_position, dim])?;
    let sign = match rotation {
        Rotation::Forward => 1.0,
        Rotation::Inverse => -1.0,
    };
    // SAFETY: the sizes of all tensors and on a CPU the range of the positions were checked, `x` is borrowed mutably,
    // and all outlive the work.
    unsafe {
        match engine {
            Engine::Cpu => args.ran(kernels::anyroll_rope(x, positions, table, sign, rows, heads, dim)),
            Engine::Device(device) => {
                let sizes = [rows, heads, dim, max_position];
                args.launched(model_kernels::rope(&*device, args.kind(), x, positions, table, sign, sizes))
            }
        }
    }
}
