//! Products of which both sides are in 8 bits: each row of `x` is rounded as a row of weights is
//! ([`super::eight_bits`]). The library multiplies e4m3 with e4m3, sums in fp32, and returns bf16 without scales;
//! these are powers of two, and come in with what follows the product. Its sums have fewer bits than fp32 ("fast
//! accumulation" of NVIDIA's compute capability 9.0).

use std::{ptr, sync::Arc};

use tch::{Device, Kind, Tensor};

use super::check::{Args, Engine};
use super::{Normed, Result, eight_bits, is_in_eight_bits, linear};
use crate::kernels::{self, eight_bits::Scaled};

/// Memory for rows in 8 bits between what makes them and their product.
#[derive(Debug)]
pub struct EightBitRows {
    /// e4m3, as many as the largest rows have.
    values: Tensor,
    /// fp32, one for each row.
    scales: Tensor,
    /// The number 1, fp32: the scale of all values for the library.
    one: Tensor,
}

/// A product without its scales, and the tensors of the latter.
struct Unscaled {
    device: Arc<dyn crate::Device>,
    args: Args,
    size: [i64; 2],
    product: Tensor,
    of_rows: Tensor,
    of_columns: Tensor,
}

impl Unscaled {
    fn scaled(&self) -> Result<Scaled> {
        let [rows, columns] = self.size;
        Ok(Scaled {
            product: self.args.values("product", &self.product, &[rows, columns])?,
            of_rows: self.args.floats("scales", &self.of_rows, &[rows])?,
            of_columns: self.args.floats("scales", &self.of_columns, &[columns])?,
        })
    }
}

impl EightBitRows {
    /// Allocates memory for up to `rows` rows of up to `columns` values.
    ///
    /// # Errors
    /// libtorch's error (out of memory).
    pub fn new(rows: i64, columns: i64, device: Device) -> Result<EightBitRows> {
        let float = (Kind::Float, device);
        Ok(EightBitRows {
            values: Tensor::f_empty([rows * columns], (Kind::Float8e4m3fn, device))?,
            scales: Tensor::f_empty([rows], float)?,
            one: Tensor::f_ones([1], float)?,
        })
    }

    /// The same memory, for another holder.
    #[must_use]
    pub fn shared(&self) -> EightBitRows {
        let [values, scales, one] = [&self.values, &self.scales, &self.one].map(Tensor::shallow_clone);
        EightBitRows { values, scales, one }
    }

    /// Computes `x W^T + bias` into `y` `[B, F]`, where `x` is `[B, C]` in bf16, W `[F, C]` [in 8 bits](super::in_eight_bits),
    /// and `bias` `[F]`. Rows are not rounded again if [`Self::add_linear_and_norm_`] of `x` was the operation before.
    ///
    /// # Errors
    /// [`super::Error::Argument`] for tensors that do not fit, or the device's or libtorch's error; so for all below.
    pub fn linear_into(
        &self,
        x: &mut Normed,
        weight: &Tensor,
        bias: Option<&Tensor>,
        y: &mut Tensor,
    ) -> Result<()> {
        let product = self.multiply("linear_into", x, weight, y)?;
        let Unscaled { device, args, size, .. } = &product;
        let bias = bias.map(|bias| args.values("bias", bias, &size[1..])).transpose()?;
        let to = (bias.unwrap_or(ptr::null_mut()), args.values("y", y, size)?);
        // SAFETY: the sizes of all tensors were checked, what is written is borrowed mutably, and libtorch takes memory back
        // in the order of its stream.
        args.launched(unsafe { kernels::eight_bits::scale_product(&**device, product.scaled()?, to, *size) })
    }

    /// Computes [`super::glu()`] with SiLU of `x W^T` into `y` `[B, F]`, where W is `[2 F, C]`, by way of `gate_up` `[B, 2 F]`.
    pub fn swiglu_linear_into(
        &self,
        x: &mut Normed,
        weight: &Tensor,
        gate_up: &mut Tensor,
        y: &mut Tensor,
    ) -> Result<()> {
        let product = self.multiply("swiglu_linear_into", x, weight, gate_up)?;
        let Unscaled { device, args, size: [rows, columns], .. } = &product;
        let size = [*rows, columns / 2];
        let to = args.values("y", y, &size)?;
        // SAFETY: as in `linear_into`.
        args.launched(unsafe { kernels::eight_bits::swiglu_product(&**device, product.scaled()?, to, size) })
    }

    /// `y` `[B, F]` becomes `y + x W^T`, and `normed` the norm of that with the weights `norm` `[F]`.
    pub fn add_linear_and_norm_(
        &self,
        y: &mut Tensor,
        x: &Tensor,
        weight: &Tensor,
        (norm, eps): (&Tensor, f64),
        normed: &mut Normed,
    ) -> Result<()> {
        let memory = normed.memory().shallow_clone();
        let product = self.multiply("add_linear_and_norm_", &mut Normed::unscaled(x), weight, &memory)?;
        let Unscaled { device, args, size, .. } = &product;
        let norm = (args.values("norm", norm, &size[1..])?, eps as f32);
        let [y, to] = [args.values("y", y, size)?, args.values("normed", &memory, size)?];
        let is_rounded = size[1] % kernels::eight_bits::ROUNDED_COLUMNS == 0;
        let eight = if is_rounded { self.room(*size)?.0.data_ptr() } else { ptr::null_mut() };
        let scaled = product.scaled()?;
        let to = (to, eight, scaled.of_rows);
        // SAFETY: as in `linear_into`; the norm lies where the product does, and its rows in 8 bits where those of `x` were.
        args.launched(unsafe {
            kernels::eight_bits::add_product_and_norm(&**device, scaled, y, norm, to, *size)
        })?;
        normed.set_rounded(is_rounded);
        Ok(())
    }

    /// Multiplies the rows of `x` with `weight` into `y`, after rounding them unless they are.
    fn multiply(&self, op: &'static str, x: &mut Normed, weight: &Tensor, y: &Tensor) -> Result<Unscaled> {
        let is_rounded = x.set_rounded(false);
        let x = x.values()?;
        let args = Args::new(op, x);
        let device =
            device_of(x, weight).ok_or_else(|| args.refuse("weight", "has no products in 8 bits here"))?;
        let [rows, columns] = args.dims("x", x)?;
        let (values, of_rows) = self.room([rows, columns])?;
        if !is_rounded {
            let to = (values.data_ptr(), args.floats("scales", &of_rows, &[rows])?);
            let from = args.values("x", x, &[rows, columns])?;
            // SAFETY: as in `linear_into`; the rows in 8 bits are this operation's until their product.
            args.launched(unsafe { kernels::eight_bits::round_rows(&*device, from, to, [rows, columns]) })?;
        }
        let (matrix, of_columns) = eight_bits::parts(weight)?;
        let size = [rows, matrix.size()[0]];
        args.matches_values("y", y, &size)?;
        let (matrix, none) = (matrix.f_tr()?, None::<&Tensor>);
        let (one, kind) = (&self.one, args.kind());
        drop(values.f_internal_scaled_mm_out(y, &matrix, one, one, none, none, kind, true)?);
        Ok(Unscaled { device, args, size, product: y.shallow_clone(), of_rows, of_columns })
    }

    /// Views of the memory of such rows, and of their scales.
    fn room(&self, [rows, columns]: [i64; 2]) -> Result<(Tensor, Tensor)> {
        let values = self.values.f_narrow(0, 0, rows * columns)?.f_view([rows, columns])?;
        Ok((values, self.scales.f_narrow(0, 0, rows)?))
    }
}

/// Computes `x W^T + bias` of rows that are rounded to 8 bits, where `x` is `[N, C]` and W `[F, C]`
/// [in 8 bits](super::in_eight_bits): the same as [`EightBitRows::linear_into`] where the device has it, otherwise a product in
/// the dtype of `x` of the same values.
///
/// # Errors
/// The same as for [`super::linear`].
pub fn linear_of_eight_bits(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if device_of(x, weight).is_none() {
        return linear(&in_eight_bit_values(x)?, weight, bias);
    }
    let [rows, columns] = Args::new("linear_of_eight_bits", x).dims("x", x)?;
    let x = x.f_contiguous()?;
    let mut y = Tensor::f_empty([rows, eight_bits::rows_of(weight)], (x.kind(), x.device()))?;
    EightBitRows::new(rows, columns, x.device())?.linear_into(
        &mut Normed::unscaled(&x),
        weight,
        bias,
        &mut y,
    )?;
    Ok(y)
}

/// Returns true if a device multiplies rows like `like` in 8 bits with this matrix in 8 bits.
pub fn multiplies_eight_bit_rows(like: &Tensor, matrix: &Tensor) -> bool {
    device_of(like, matrix).is_some()
}

/// The device with kernels for such rows and this matrix.
fn device_of(like: &Tensor, matrix: &Tensor) -> Option<Arc<dyn crate::Device>> {
    let (rows, columns) = (eight_bits::rows_of(matrix), matrix.size()[1]);
    let is_even = rows % kernels::eight_bits::PRODUCT_COLUMNS == 0
        && columns % kernels::eight_bits::ROUNDED_COLUMNS == 0;
    match Engine::of(like) {
        Some(Engine::Device(device))
            if is_even && like.kind() == Kind::BFloat16 && is_in_eight_bits(matrix) =>
        {
            kernels::eight_bits::SOURCE.exists_on(&*device).then_some(device)
        }
        _ => None,
    }
}

/// Rows `[N, C]` rounded to 8 bits, in their own dtype.
fn in_eight_bit_values(x: &Tensor) -> Result<Tensor> {
    let wide = x.f_to_kind(Kind::Float)?;
    let scales = eight_bits::scales_of(&wide)?.f_unsqueeze(1)?;
    let rounded = wide.f_div(&scales)?.f_to_kind(Kind::Float8e4m3fn)?.f_to_kind(Kind::Float)?;
    Ok(rounded.f_mul(&scales)?.f_to_kind(x.kind())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Activation, composite, in_eight_bits, tests::*, widened};

    /// Independent numbers in -1 to 1: sums of products that cancel would show the error of the addends alone.
    fn noise(size: &[i64], seed: u64, place: (Kind, Device)) -> Tensor {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let values: Vec<f32> = (0..size.iter().product()).map(|_| next()).collect();
        Tensor::from_slice(&values).view(size).to_kind(place.0).to_device(place.1)
    }

    /// Rows of which each has a magnitude of its own, one of them zero.
    fn rows(count: i64, columns: i64, place: (Kind, Device)) -> Tensor {
        let powers: Vec<f32> = (0..count).map(|row| 2f32.powi((row * 3 % 11 - 5) as i32)).collect();
        let magnitudes = Tensor::from_slice(&powers).to_device(place.1).unsqueeze(1);
        let _ = magnitudes.narrow(0, 0, 1).zero_();
        (noise(&[count, columns], 1, (Kind::Float, place.1)) * magnitudes).to_kind(place.0)
    }

    /// Each row in fp64 by the definition: libtorch's cast to e4m3 of the row over the smallest power of two with which no value
    /// exceeds 448.
    fn rounded(x: &Tensor) -> Tensor {
        let wide = x.to_kind(Kind::Double);
        let largest = wide.abs().amax([1i64].as_slice(), true);
        let scale = (&largest / 448.0).log2().ceil().exp2().where_self(&largest.gt(0), &largest.ones_like());
        (&wide / &scale).to_kind(Kind::Float).to_kind(Kind::Float8e4m3fn).to_kind(Kind::Double) * scale
    }

    /// A hundredth of the length of each row at most: the library's sums have about 14 bits, and thousands of addends.
    fn assert_near(what: &str, found: &Tensor, expected: &Tensor) {
        let [found, expected] = [found, expected].map(|tensor| tensor.to_kind(Kind::Double));
        let lengths =
            |of: &Tensor| of.square().sum_dim_intlist([1i64].as_slice(), false, Kind::Double).sqrt();
        let apart = (lengths(&(found - &expected)) / (lengths(&expected) + 1e-9)).max().double_value(&[]);
        assert!(apart < 0.01, "{what} differs by {apart}");
    }

    const SIZES: [(i64, i64, i64); 5] =
        [(1, 2048, 1536), (64, 256, 3584), (5, 1024, 18944), (200, 896, 64), (33, 80, 128)];

    #[test]
    fn products_are_those_of_rounded_rows() {
        for &place in PLACES.iter() {
            for (count, outputs, inputs) in SIZES {
                let what = format!("{count} x {outputs} x {inputs} in {place:?}");
                let (x, bias) = (rows(count, inputs, place), noise(&[outputs], 3, place));
                let matrix = in_eight_bits(&(noise(&[outputs, inputs], 4, place) * 0.05)).unwrap();
                let wide = widened(&matrix, Kind::Double).unwrap();
                let expected = rounded(&x).mm(&wide.tr()) + bias.to_kind(Kind::Double);
                let y = linear_of_eight_bits(&x, &matrix, Some(&bias)).unwrap();
                assert_near(&what, &y, &expected);
            }
        }
    }

    #[test]
    fn what_follows_a_product_has_its_scales() {
        for &place in PLACES.iter() {
            for (count, outputs, inputs) in SIZES {
                let what = format!("{count} x {outputs} x {inputs} in {place:?}");
                let x = noise(&[count, inputs], 5, place);
                let matrix = in_eight_bits(&(noise(&[2 * outputs, inputs], 6, place) * 0.05)).unwrap();
                if !multiplies_eight_bit_rows(&x, &matrix) {
                    continue;
                }
                let room = EightBitRows::new(count, inputs.max(2 * outputs), place.1).unwrap();
                let product = rounded(&x).mm(&widened(&matrix, Kind::Double).unwrap().tr());
                let [mut gate_up, mut y] =
                    [2 * outputs, outputs].map(|columns| Tensor::empty([count, columns], place));
                room.swiglu_linear_into(&mut Normed::unscaled(&x), &matrix, &mut gate_up, &mut y).unwrap();
                assert_near(&what, &y, &composite::glu(&product, Activation::Silu).unwrap());
                let (norm, before) =
                    (noise(&[2 * outputs], 7, place), noise(&[count, 2 * outputs], 8, place));
                let (mut y, mut normed) =
                    (before.copy(), Normed::new(count, 2 * outputs, place.0, place.1).unwrap());
                room.add_linear_and_norm_(&mut y, &x, &matrix, (&norm, 1e-3), &mut normed).unwrap();
                assert_near(&what, &y, &(product + before.to_kind(Kind::Double)));
                let wide = y.to_kind(Kind::Double);
                let mean = wide.square().mean_dim([1i64].as_slice(), true, Kind::Double) + 1e-3;
                let expected = wide * mean.rsqrt() * norm.to_kind(Kind::Double);
                assert_near(&what, normed.values().unwrap(), &expected);
                // The norm is there in 8 bits, too.
                let next = in_eight_bits(&(noise(&[64, 2 * outputs], 9, place) * 0.05)).unwrap();
                if multiplies_eight_bit_rows(&x, &next) {
                    let again = linear_of_eight_bits(normed.values().unwrap(), &next, None).unwrap();
                    let mut y = Tensor::empty([count, 64], place);
                    room.linear_into(&mut normed, &next, None, &mut y).unwrap();
                    assert_eq!(y, again, "{what}");
                }
            }
        }
    }
}
