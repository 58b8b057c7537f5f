//! Products of a step of decoding: few rows, into memory that is given.

use std::ptr;

use tch::{Kind, Tensor};

use super::check::{Args, Engine};
use super::{Result, swiglu_into};
use crate::product_kernels::{self, Product};

/// `x W^T + bias`, where `x` is `[B, C]`, `weight` `[F, C]` and `bias` `[F]`, into `y` `[B, F]`.
///
/// # Errors
/// [`super::Error::Argument`] for tensors that do not fit, or the device's or libtorch's error; so for all below.
pub fn linear_into(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, y: &mut Tensor) -> Result<()> {
    if multiplied("linear_into", (x, weight, bias), y, false, false)? {
        return Ok(());
    }
    let weight = weight.f_tr()?;
    match bias {
        Some(bias) => drop(bias.f_addmm_out(y, x, &weight)?),
        None => drop(x.f_mm_out(y, &weight)?),
    }
    Ok(())
}

/// `y` `[B, F]` becomes `y + x W^T`, where `x` is `[B, C]` and `weight` `[F, C]`.
pub fn add_linear_(y: &mut Tensor, x: &Tensor, weight: &Tensor) -> Result<()> {
    if !multiplied("add_linear_", (x, weight, None), y, false, true)? {
        drop(y.f_addmm_(x, &weight.f_tr()?)?);
    }
    Ok(())
}

/// [`super::swiglu()`] of `x W^T`, where `x` is `[B, C]` and `weight` `[2 F, C]`, into `y` `[B, F]`; by way of `gate_up`
/// `[B, 2 F]` where one kernel does not do both.
pub fn swiglu_linear_into(x: &Tensor, weight: &Tensor, gate_up: &mut Tensor, y: &mut Tensor) -> Result<()> {
    if multiplied("swiglu_linear_into", (x, weight, None), y, true, false)? {
        return Ok(());
    }
    drop(x.f_mm_out(gate_up, &weight.f_tr()?)?);
    swiglu_into(gate_up, y)
}

/// Multiplies by our kernel and says so, if there is one for it.
fn multiplied(
    op: &'static str,
    (x, weight, bias): (&Tensor, &Tensor, Option<&Tensor>),
    y: &mut Tensor,
    is_gated: bool,
    is_added: bool,
) -> Result<bool> {
    let args = Args::new(op, x);
    let Some(Engine::Device(device)) = Engine::of(x) else { return Ok(false) };
    let ([rows, inputs], [_, outputs]) = (args.dims("x", x)?, args.dims("y", y)?);
    let weight_rows = if is_gated { 2 * outputs } else { outputs };
    let product = Product {
        x: args.values("x", x, &[rows, inputs])?,
        weight: args.values("weight", weight, &[weight_rows, inputs])?,
        bias: bias.map_or(Ok(ptr::null_mut()), |bias| args.values("bias", bias, &[outputs]))?,
        y: args.values("y", y, &[rows, outputs])?,
        rows: rows as i32,
        outputs: outputs as i32,
        inputs: inputs as i32,
        is_gated: is_gated.into(),
        is_added: is_added.into(),
    };
    if args.kind() != Kind::BFloat16 || !product.fits(&*device) {
        return Ok(false);
    }
    // SAFETY: the sizes of all tensors were checked, what is written is borrowed mutably, and libtorch takes memory back in
    // the order of its stream; weights are not what a step of decoding writes.
    args.launched(unsafe { product_kernels::multiply(&*device, product) })?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        device_kernels::device_of,
        ops::{composite, tests::*},
    };

    /// Sizes for which a product is cut in every way on an H200 (`product_kernels`), and some for which it is not.
    const SIZES: [(i64, i64, i64); 8] = [
        (1, 2048, 1536),
        (5, 1536, 8960),
        (64, 4864, 896),
        (33, 8960, 1536),
        (17, 18944, 256),
        (64, 104, 64),
        (65, 128, 128),
        (7, 36, 50),
    ];

    #[test]
    fn products_of_few_rows_equal_those_in_fp64() {
        for &place in PLACES.iter() {
            for (rows, outputs, inputs) in SIZES {
                let what = format!("{rows} x {outputs} x {inputs} in {place:?}");
                let [x, bias, before] =
                    [&[rows, inputs][..], &[outputs], &[rows, outputs]].map(|size| random(size, place));
                let weight = random(&[2 * outputs, inputs], place) * 0.05;
                let half = weight.narrow(0, 0, outputs);
                let [wide_x, wide_bias, wide_before, wide_weight] =
                    [&x, &bias, &before, &weight].map(|tensor| tensor.to_kind(Kind::Double));
                let expected = wide_x.mm(&wide_weight.tr());
                let mut y = before.copy();
                linear_into(&x, &half, Some(&bias), &mut y).unwrap();
                let tolerance = 2.0 * tolerance(place.0, 1.0);
                assert_close(&what, &y, &(expected.narrow(1, 0, outputs) + &wide_bias), tolerance);
                let mut y = before.copy();
                add_linear_(&mut y, &x, &half).unwrap();
                assert_close(&what, &y, &(expected.narrow(1, 0, outputs) + &wide_before), tolerance);
                if place.1 == tch::Device::Cpu {
                    continue; // it has no kernel for what comes between
                }
                let (mut gate_up, mut y) = (Tensor::empty([rows, 2 * outputs], place), before.copy());
                swiglu_linear_into(&x, &weight, &mut gate_up, &mut y).unwrap();
                let expected = composite::swiglu(&expected.to_kind(place.0)).unwrap();
                assert_close(&what, &y, &expected, 4.0 * tolerance);
            }
        }
    }

    /// Where it is our kernel that multiplies, the order of a sum is that of the sizes of the weights.
    #[test]
    fn a_row_has_the_same_bits_whatever_the_others_are() {
        let is_ours = |tensor: &Tensor| {
            device_of(tensor).is_some_and(|device| {
                product_kernels::SOURCE.kernels.iter().all(|kernel| device.has_kernel(kernel))
            })
        };
        for &place in PLACES.iter().filter(|(kind, _)| *kind == Kind::BFloat16) {
            for (_, outputs, inputs) in SIZES.into_iter().filter(|size| size.2 % 64 == 0) {
                let (x, weight) = (random(&[64, inputs], place), random(&[outputs, inputs], place));
                if !is_ours(&x) {
                    continue;
                }
                let product = |rows: i64| {
                    let mut y = Tensor::empty([rows, outputs], place);
                    linear_into(&x.narrow(0, 0, rows), &weight, None, &mut y).unwrap();
                    y
                };
                let all = product(64);
                for rows in [1, 7, 64] {
                    assert_eq!(product(rows), all.narrow(0, 0, rows), "{rows} of {outputs} x {inputs}");
                }
            }
        }
    }
}
