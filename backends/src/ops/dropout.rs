//! Dropout whose mask is a function of numbers and not of a generator's state: made again it is the same, and it does not
//! depend on what else is in a batch.

use tch::Tensor;

use super::check::{Args, Engine};
use super::{Result, composite, cpu_kernels};
use crate::kernels;

/// Which values of `[N, C]` are dropped: those whose hash of the row's key, the salt and the column is below
/// `probability` of all.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    /// A number from 0 to 2^32 - 1 for each row: int64 `[N]`.
    pub keys: &'a Tensor,
    /// Tells masks of the same rows apart.
    pub salt: u32,
    /// From 0 to below 1.
    pub probability: f64,
}

impl Dropout<'_> {
    /// Hashes below it are dropped.
    pub(super) fn threshold(&self) -> u32 {
        (self.probability * 2f64.powi(32)) as u32
    }

    /// Factor of the other values, which keeps the mean.
    pub(super) fn scale(&self) -> f64 {
        1.0 / (1.0 - self.probability)
    }
}

/// The dense `x` `[N, C]` with some of its values dropped, the others divided by `1 - probability`. The same function
/// turns the gradient of the result into that of `x`.
///
/// # Errors
/// [`super::Error::Argument`] for tensors that do not fit, or libtorch's error.
pub fn dropout(x: &Tensor, dropout: Dropout) -> Result<Tensor> {
    let args = Args::new("dropout", x);
    let [rows, columns] = args.dims("x", x)?;
    let keys = args.indices("keys", dropout.keys, &[rows], 1 << 32)?;
    let Some(engine) = Engine::of(x) else { return composite::dropout(x, dropout) };
    let result = args.empty(&[rows, columns])?;
    let from = args.values("x", x, &[rows, columns])?;
    let to = args.values("y", &result, &[rows, columns])?;
    let (how, size) = ((dropout.salt, dropout.threshold(), dropout.scale() as f32), [rows, columns]);
    // SAFETY: the sizes of all tensors were checked or made here, and they outlive the work.
    unsafe {
        match engine {
            Engine::Cpu => {
                let (salt, threshold, scale) = how;
                let (from, to) = (from.cast(), to.cast());
                args.ran(cpu_kernels::anyroll_dropout(
                    from, keys, salt, threshold, scale, to, rows, columns,
                ))?;
            }
            Engine::Device(device) => {
                args.launched(kernels::model::dropout(&*device, args.kind(), (from, to), keys, how, size))?;
            }
        }
    }
    Ok(result)
}
