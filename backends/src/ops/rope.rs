//! Rotary position embedding.

use tch::{Device, Tensor};

use super::check::{Args, Engine};
use super::{Result, composite, cpu_kernels};
use crate::kernels;

/// Which way [`rope_`] turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// By the position's angle.
    Forward,
    /// Back by it, which is the gradient of turning forward.
    Inverse,
}

/// The angles of position 1, one a pair of a head's elements: `theta^(-2 p / dim)` for pair `p`, rounded step by step
/// as PyTorch's fp32 rounds it.
pub fn rope_frequencies(dim: i64, theta: f64) -> Vec<f32> {
    let exponent = |pair: i64| (2 * pair) as f32 / dim as f32;
    (0..dim / 2).map(|pair| 1.0 / theta.powf(exponent(pair).into()) as f32).collect()
}

/// The cosines, then the sines, of the angles of each position, both times `scale`: fp32 `[positions, dim]`, where
/// `frequencies` are the `dim / 2` angles of position 1.
///
/// Angles are products of fp32 numbers, as in Hugging Face's models: at large positions the rounding of an
/// angle is visible, and a checkpoint was trained with it.
///
/// # Errors
/// libtorch's error.
pub fn rope_table(positions: i64, frequencies: &[f32], scale: f64, device: Device) -> Result<Tensor> {
    let dim = 2 * frequencies.len();
    let mut table = Vec::with_capacity(positions as usize * dim);
    for position in 0..positions {
        let angles = frequencies.iter().map(|frequency| f64::from(position as f32 * frequency));
        table.extend(angles.clone().map(|angle| (angle.cos() * scale) as f32));
        table.extend(angles.map(|angle| (angle.sin() * scale) as f32));
    }
    Ok(Tensor::f_from_slice(&table)?.f_view([positions, dim as i64])?.f_to_device(device)?)
}

/// Turns each pair `(x[i], x[i + R / 2])` of the first R elements of each head by its position's angle, in place (Su et
/// al., 2021, with the pairs of Hugging Face's models). The elements behind them, if there are some, stay what they are.
///
/// `x` is `[N, H, D]`, a view whose rows may lie apart; `positions` int64 `[N]`; `table` `[positions, R]` from
/// [`rope_table`], R even and at most D.
///
/// # Errors
/// [`super::Error::Argument`] for shapes that do not fit or a position outside of the table, or libtorch's
/// error.
pub fn rope_(x: &mut Tensor, positions: &Tensor, table: &Tensor, rotation: Rotation) -> Result<()> {
    let Some(engine) = Engine::of(x) else { return composite::rope_(x, positions, table, rotation) };
    let args = Args::new("rope_", x);
    let [rows, heads, dim] = args.dims("x", x)?;
    let [max_position, turned] = rotary(args, table, dim)?;
    let x = args.heads("x", x, [rows, heads, dim])?;
    let positions = args.indices("positions", positions, &[rows], max_position)?;
    let table = args.floats("table", table, &[max_position, turned])?;
    let sign = match rotation {
        Rotation::Forward => 1.0,
        Rotation::Inverse => -1.0,
    };
    // SAFETY: the sizes of all tensors and on a CPU the range of the positions were checked, `x` is borrowed mutably,
    // and all outlive the work.
    unsafe {
        match engine {
            Engine::Cpu => {
                args.ran(cpu_kernels::anyroll_rope(x, positions, table, sign, rows, heads, dim, turned))
            }
            Engine::Device(device) => {
                let sizes = [rows, heads, dim, max_position, turned];
                args.launched(kernels::model::rope(&*device, args.kind(), x, positions, table, sign, sizes))
            }
        }
    }
}

/// The sizes of a table for heads of width `dim`: its positions, and how many elements of a head it turns.
pub(super) fn rotary(args: Args, table: &Tensor, dim: i64) -> Result<[i64; 2]> {
    let [positions, turned] = args.dims("table", table)?;
    if turned % 2 != 0 || turned > dim {
        return Err(args.refuse("table", format!("turns {turned} elements, of heads of {dim} in pairs")));
    }
    Ok([positions, turned])
}
