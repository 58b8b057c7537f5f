//! Products of a step of decoding: few rows, into memory that is given.

use std::{ffi::c_void, ptr};

use tch::{Device, Kind, Tensor};

use super::check::{Args, Engine};
use super::{Result, eight_bits, is_in_eight_bits, rms_norm_into, swiglu_into, widened};
use crate::kernels::{
    self,
    product::{MAX_ROWS, Product, Squares},
    product_eight,
};

/// The norm of a residual stream `[B, C]`, from what ends the stream to the products that begin with it. Where our kernels
/// make both, it is the latter that scale it.
#[derive(Debug)]
pub struct Normed {
    /// `[B, C]`, without its scale if that is pending.
    values: Tensor,
    /// fp32 `[B]`.
    rstd: Tensor,
    /// fp32, as [`Squares`] has it.
    squares: Tensor,
    /// The norm's epsilon while its scale is to be applied.
    pending: Option<f64>,
    /// True if the values are in [`EightBitRows`](super::EightBitRows), too.
    is_rounded: bool,
}

impl Normed {
    /// Memory for up to `rows` rows of `dim` values of `kind`.
    ///
    /// # Errors
    /// libtorch's error (out of memory).
    pub fn new(rows: i64, dim: i64, kind: Kind, device: Device) -> Result<Normed> {
        Ok(Normed {
            values: Tensor::f_zeros([rows, dim], (kind, device))?,
            rstd: Tensor::f_zeros([rows], (Kind::Float, device))?,
            squares: Tensor::f_zeros([kernels::product::tiles(dim) + 1, MAX_ROWS], (Kind::Float, device))?,
            pending: None,
            is_rounded: false,
        })
    }

    /// Views of the first `rows` rows.
    ///
    /// # Errors
    /// libtorch's error (there are fewer).
    pub fn first(&self, rows: i64) -> Result<Normed> {
        Ok(Normed {
            values: self.values.f_narrow(0, 0, rows)?,
            rstd: self.rstd.f_narrow(0, 0, rows)?,
            squares: self.squares.shallow_clone(),
            pending: self.pending,
            is_rounded: false,
        })
    }

    /// A stream `x` `[B, C]` that is not normed, in its place.
    pub fn unscaled(x: &Tensor) -> Normed {
        let none = Tensor::new;
        let (values, rstd, squares) = (x.shallow_clone(), none(), none());
        Normed { values, rstd, squares, pending: None, is_rounded: false }
    }

    /// The norm of `x` `[B, C]`.
    ///
    /// # Errors
    /// [`super::Error::Argument`] for tensors that do not fit, or the device's error.
    pub fn become_norm_of(&mut self, x: &Tensor, weight: &Tensor, eps: f64) -> Result<()> {
        (self.pending, self.is_rounded) = (None, false);
        rms_norm_into(x, weight, eps, (&mut self.values, &mut self.rstd))
    }

    /// The norm's values, scaled.
    ///
    /// # Errors
    /// libtorch's error.
    pub fn values(&mut self) -> Result<&Tensor> {
        if let Some(eps) = self.pending.take() {
            let ([rows, dim], tiles) = (self.size(), self.squares.size()[0] - 1);
            let of_rows = self.squares.f_narrow(1, 0, rows)?;
            let squares = of_rows.f_narrow(0, 0, tiles)?;
            drop(squares.f_sum_intlist_out(&self.rstd, [0i64].as_slice(), false, Kind::Float)?);
            drop(self.rstd.f_div_scalar_(dim as f64)?.f_add_scalar_(eps)?.f_rsqrt_()?);
            if self.values.kind() == Kind::Half {
                drop(self.rstd.f_mul_(&of_rows.f_get(tiles)?)?); // the unit
            }
            drop(self.values.f_mul_(&self.rstd.f_unsqueeze(1)?)?);
        }
        Ok(&self.values)
    }

    /// Memory for new values, whose scale is not pending.
    pub(super) fn memory(&mut self) -> &Tensor {
        (self.pending, self.is_rounded) = (None, false);
        &self.values
    }

    /// Says if the values are in 8 bits, too. Returns what was said before.
    pub(super) fn set_rounded(&mut self, is_rounded: bool) -> bool {
        std::mem::replace(&mut self.is_rounded, is_rounded)
    }

    fn size(&self) -> [i64; 2] {
        self.values.size().try_into().expect("rows of values")
    }

    fn squares(&self, args: Args, eps: Option<f64>) -> Result<Squares> {
        let Some(eps) = eps else { return Ok(Squares::NONE) };
        let tiles = kernels::product::tiles(self.size()[1]);
        let of_tiles = args.floats("squares", &self.squares, &[tiles + 1, MAX_ROWS])?.cast();
        Ok(Squares { of_tiles, tiles: tiles as i32, eps: eps as f32 })
    }
}

/// `x W^T + bias`, where `x` is `[B, C]`, `weight` `[F, C]` and `bias` `[F]`, into `y` `[B, F]`. Here and below `weight` may
/// also be [in 8 bits](super::in_eight_bits).
///
/// # Errors
/// [`super::Error::Argument`] for tensors that do not fit, or the device's or libtorch's error; so for all below.
pub fn linear_into(x: &mut Normed, weight: &Tensor, bias: Option<&Tensor>, y: &mut Tensor) -> Result<()> {
    let args = Args::new("linear_into", &x.values);
    let before = x.squares(args, x.pending)?;
    let bias_at = bias.map(|bias| args.values("bias", bias, &[y.size()[1]])).transpose()?;
    let (product, scales) = product(args, &x.values, weight, y, 1)?;
    let product = Product { bias: bias_at.unwrap_or(ptr::null_mut()), before, ..product };
    if multiplied(args, &x.values, (product, scales), product.inputs.min(product.outputs))? {
        return Ok(());
    }
    let (x, weight) = (x.values()?, transposed(weight, args)?);
    match bias {
        Some(bias) => drop(bias.f_addmm_out(y, x, &weight)?),
        None => drop(x.f_mm_out(y, &weight)?),
    }
    Ok(())
}

/// The same in new memory.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if !is_quick_in_eight_bits(x, weight) {
        return Ok(x.f_linear(&widened(weight, x.kind())?, bias)?);
    }
    let size = [x.size()[0], eight_bits::rows_of(weight)];
    let mut y = Tensor::f_empty(size, (x.kind(), x.device()))?;
    linear_into(&mut Normed::unscaled(x), weight, bias, &mut y)?;
    Ok(y)
}

/// [`super::glu()`] with SiLU of `x W^T`, where `x` is `[B, C]` and `weight` `[2 F, C]`, into `y` `[B, F]`; by way of `gate_up`
/// `[B, 2 F]` where one kernel does not do both.
pub fn swiglu_linear_into(
    x: &mut Normed,
    weight: &Tensor,
    gate_up: &mut Tensor,
    y: &mut Tensor,
) -> Result<()> {
    let args = Args::new("swiglu_linear_into", &x.values);
    let before = x.squares(args, x.pending)?;
    let (product, scales) = product(args, &x.values, weight, y, 2)?;
    let product = Product { before, is_gated: 1, ..product };
    if multiplied(args, &x.values, (product, scales), product.inputs)? {
        return Ok(());
    }
    drop(x.values()?.f_mm_out(gate_up, &transposed(weight, args)?)?);
    swiglu_into(gate_up, y)
}

/// `y` `[B, F]` becomes `y + x W^T`, where `x` is `[B, C]` and `weight` `[F, C]`.
pub fn add_linear_(y: &mut Tensor, x: &Tensor, weight: &Tensor) -> Result<()> {
    let args = Args::new("add_linear_", x);
    let (product, scales) = product(args, x, weight, y, 1)?;
    let product = Product { is_added: 1, ..product };
    if !multiplied(args, x, (product, scales), product.outputs)? {
        drop(y.f_addmm_(x, &transposed(weight, args)?)?);
    }
    Ok(())
}

/// The same, and `normed` becomes the norm of `y` with the weights `norm` `[F]`.
pub fn add_linear_and_norm_(
    y: &mut Tensor,
    x: &Tensor,
    weight: &Tensor,
    (norm, eps): (&Tensor, f64),
    normed: &mut Normed,
) -> Result<()> {
    let args = Args::new("add_linear_and_norm_", x);
    let (product, scales) = product(args, x, weight, y, 1)?;
    let product = Product {
        norm: args.values("norm", norm, &[y.size()[1]])?,
        normed: args.values("normed", &normed.values, &y.size())?,
        after: normed.squares(args, Some(eps))?,
        is_added: 1,
        ..product
    };
    if multiplied(args, x, (product, scales), product.outputs)? {
        (normed.pending, normed.is_rounded) = (Some(eps), false);
        return Ok(());
    }
    add_linear_(y, x, weight)?;
    normed.become_norm_of(y, norm, eps)
}

/// A product, and the scales of its weights if they are in 8 bits.
type Scaled = (Product, Option<*mut c_void>);

/// `x W^T` into `y`, where there are so many rows of weights for a column of `y`.
fn product(args: Args, x: &Tensor, weight: &Tensor, y: &mut Tensor, halves: i64) -> Result<Scaled> {
    let ([rows, inputs], [_, outputs]) = (args.dims("x", x)?, args.dims("y", y)?);
    let size = [halves * outputs, inputs];
    let (weight_at, scales) = match is_in_eight_bits(weight) {
        true => {
            let (values, scales) = eight_bits::parts(weight)?;
            let values = args.dense("weight", &values, &size, values.kind())?;
            (values, Some(args.floats("scales", &scales, &size[..1])?.cast()))
        }
        false => (args.values("weight", weight, &size)?, None),
    };
    let addresses =
        [args.values("x", x, &[rows, inputs])?, weight_at, args.values("y", y, &[rows, outputs])?];
    Ok((Product::new(addresses, [rows, outputs, inputs]), scales))
}

/// The transpose of a weight matrix in the dtype of the values.
fn transposed(weight: &Tensor, args: Args) -> Result<Tensor> {
    Ok(widened(weight, args.kind())?.f_tr()?)
}

/// Returns true if a device multiplies a few rows like `like` with a matrix in 8 bits without a copy of the matrix, so that a
/// step with such products can be recorded.
pub fn multiplies_in_eight_bits(like: &Tensor, matrix: &Tensor) -> bool {
    let sizes = [1, eight_bits::rows_of(matrix), matrix.size()[1]];
    let product = Product::new([ptr::null_mut(); 3], sizes);
    match (Engine::of(like), kernels::Narrow::of(like.kind())) {
        (Some(Engine::Device(device)), Some(narrow)) => product_eight::exist_for(&product, &*device, narrow),
        _ => false,
    }
}

/// Returns true if `weight` is in 8 bits, and a device multiplies `x` with it faster than with a copy in 16 bits.
pub fn is_quick_in_eight_bits(x: &Tensor, weight: &Tensor) -> bool {
    const MOST_ROWS: i64 = 512;
    is_in_eight_bits(weight)
        && x.size()[0] <= MOST_ROWS
        && x.is_contiguous()
        && multiplies_in_eight_bits(x, weight)
}

/// Multiplies by our kernel and says so, if there is one for it in a layer with `stream` elements in its residual stream.
fn multiplied(args: Args, x: &Tensor, (product, scales): Scaled, stream: i32) -> Result<bool> {
    let (Some(Engine::Device(device)), Some(narrow)) = (Engine::of(x), args.narrow()) else {
        return Ok(false);
    };
    let rows = i64::from(product.rows);
    let has_norms = [product.before, product.after].iter().any(|squares| !squares.of_tiles.is_null());
    let is_ours = match scales {
        Some(_) => (rows <= MAX_ROWS || !has_norms) && product_eight::exist_for(&product, &*device, narrow),
        None => product.is_quick(stream.into()) && product.fits(&*device, narrow),
    };
    if !(is_ours && product.is_aligned()) {
        return Ok(false);
    }
    // SAFETY: the sizes of all tensors were checked, what is written is borrowed mutably, and libtorch takes memory back in
    // the order of its stream; weights are not what a step of decoding writes.
    args.launched(unsafe {
        match scales {
            Some(scales) => product_eight::multiply_eight(&*device, narrow, product, scales),
            None => kernels::product::multiply(&*device, narrow, product, true),
        }
    })?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use anyroll_close::assert_close;

    use super::*;
    use crate::{
        kernels::{Narrow, device_of},
        ops::{Activation, EIGHT_BIT_COLUMNS, composite, in_eight_bits, tests::*},
    };

    /// Sizes for which a product is cut in every way on an H200 (`kernels/product.rs`), and some for which it is not.
    const SIZES: [(i64, i64, i64); 9] = [
        (1, 2048, 1536),
        (5, 1536, 8960),
        (64, 4864, 896),
        (33, 8960, 1536),
        (17, 18944, 256),
        (64, 104, 64),
        (65, 128, 128),
        (100, 1536, 1536),
        (7, 36, 50),
    ];

    /// `x` in place of a norm, already scaled.
    fn normed(x: &Tensor) -> Normed {
        let (size, place) = (x.size(), (x.kind(), x.device()));
        let normed = Normed::new(size[0], size[1], place.0, place.1).unwrap();
        Normed { values: x.copy(), ..normed }
    }

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
                linear_into(&mut normed(&x), &half, Some(&bias), &mut y).unwrap();
                let tolerance = 2.0 * tolerance(place.0, 1.0);
                assert_close(&what, &y, &(expected.narrow(1, 0, outputs) + &wide_bias), tolerance);
                let mut y = before.copy();
                add_linear_(&mut y, &x, &half).unwrap();
                assert_close(&what, &y, &(expected.narrow(1, 0, outputs) + &wide_before), tolerance);
                if place.1 == Device::Cpu {
                    continue; // it has no kernel for what comes between
                }
                let (mut gate_up, mut y) = (Tensor::empty([rows, 2 * outputs], place), before.copy());
                swiglu_linear_into(&mut normed(&x), &weight, &mut gate_up, &mut y).unwrap();
                let expected = composite::glu(&expected.to_kind(place.0), Activation::Silu).unwrap();
                assert_close(&what, &y, &expected, 4.0 * tolerance);
            }
        }
    }

    /// By our kernels the scale is pending until the second product or until it is asked for. A large stream times large weights
    /// is more than fp16 holds, and their norm is not.
    #[test]
    fn a_norm_between_two_products_is_a_norm() {
        let sizes = [(1, 896, 896), (64, 1536, 256), (13, 3584, 64), (65, 128, 128), (128, 1536, 1536)];
        let magnitudes = [(1.0f64, 1.0), (5e3, 64.0), (1e-3, 0.02)];
        for &place in PLACES.iter().filter(|(_, device)| *device != Device::Cpu) {
            for ((rows, hidden, inputs), (stream, weights)) in
                sizes.into_iter().flat_map(|size| magnitudes.map(|magnitude| (size, magnitude)))
            {
                let what = format!("{rows} x {hidden} x {inputs} of {stream} and {weights} in {place:?}");
                let eps = 1e-3 * stream * stream;
                let x = random(&[rows, inputs], place) * stream.min(5e2);
                let (before, norm) =
                    (random(&[rows, hidden], place) * stream, random(&[hidden], place) * weights);
                let weight = random(&[hidden, inputs], place) * 0.05;
                let next = random(&[192, hidden], place) * 0.05;
                let mut y = before.copy();
                let mut of_y = Normed::new(rows, hidden, place.0, place.1).unwrap();
                add_linear_and_norm_(&mut y, &x, &weight, (&norm, eps), &mut of_y).unwrap();
                let [wide_x, wide_weight, wide_norm, wide_next] =
                    [&x, &weight, &norm, &next].map(|tensor| tensor.to_kind(Kind::Double));
                let tolerance = 2.0 * tolerance(place.0, 1.0);
                let expected = wide_x.mm(&wide_weight.tr()) + before.to_kind(Kind::Double);
                assert_close(&what, &y, &expected, tolerance);
                let y = y.to_kind(Kind::Double);
                let mean = y.square().mean_dim([1i64].as_slice(), true, Kind::Double) + eps;
                let expected = y * mean.rsqrt() * wide_norm;
                let mut z = Tensor::empty([rows, 192], place);
                linear_into(&mut of_y, &next, None, &mut z).unwrap();
                assert_close(&what, &z, &expected.mm(&wide_next.tr()), 2.0 * tolerance);
                assert_close(&what, of_y.values().unwrap(), &expected, 2.0 * tolerance);
            }
        }
    }

    /// For any number of rows, those of many chunks and few, split over blocks and not.
    #[test]
    fn products_in_eight_bits_are_those_of_the_values_that_these_are() {
        let sizes = [(200, 1536, 1536), (300, 64, 128), (128, 4864, 896), (64, 18944, 3584)];
        for &place in PLACES.iter() {
            let on_host = place.1 == Device::Cpu;
            let few = SIZES.into_iter().chain(sizes).filter(|size| size.2 % EIGHT_BIT_COLUMNS == 0);
            for (rows, outputs, inputs) in few.filter(|size| !on_host || size.1 * size.2 < 1 << 22) {
                let what = format!("{rows} x {outputs} x {inputs} in {place:?}");
                let [x, bias, before] =
                    [&[rows, inputs][..], &[outputs], &[rows, outputs]].map(|size| random(size, place));
                let scales = random(&[2 * outputs, 1], place).exp2();
                let weight = random(&[2 * outputs, inputs], place) * 0.05 * scales;
                let half = in_eight_bits(&weight.narrow(0, 0, outputs)).unwrap();
                let both = in_eight_bits(&weight).unwrap();
                let [wide_x, wide_bias, wide_before] =
                    [&x, &bias, &before].map(|tensor| tensor.to_kind(Kind::Double));
                let expected = wide_x.mm(&widened(&both, Kind::Double).unwrap().tr());
                let tolerance = 4.0 * tolerance(place.0, 1.0);
                let mut y = before.copy();
                linear_into(&mut normed(&x), &half, Some(&bias), &mut y).unwrap();
                let product = expected.narrow(1, 0, outputs);
                assert_close(&what, &y, &(&product + &wide_bias), tolerance);
                let mut y = before.copy();
                add_linear_(&mut y, &x, &half).unwrap();
                assert_close(&what, &y, &(&product + &wide_before), tolerance);
                if on_host {
                    continue;
                }
                let (mut gate_up, mut y) = (Tensor::empty([rows, 2 * outputs], place), before.copy());
                swiglu_linear_into(&mut normed(&x), &both, &mut gate_up, &mut y).unwrap();
                let gated = composite::glu(&expected.to_kind(place.0), Activation::Silu).unwrap();
                assert_close(&what, &y, &gated, 4.0 * tolerance);
                let mut y = before.copy();
                let norm = random(&[outputs], place);
                let mut of_y = Normed::new(rows, outputs, place.0, place.1).unwrap();
                add_linear_and_norm_(&mut y, &x, &half, (&norm, 1e-3), &mut of_y).unwrap();
                assert_close(&what, &y, &(product + wide_before), tolerance);
                let wide = y.to_kind(Kind::Double);
                let mean = wide.square().mean_dim([1i64].as_slice(), true, Kind::Double) + 1e-3;
                let expected = wide * mean.rsqrt() * norm.to_kind(Kind::Double);
                assert_close(&what, of_y.values().unwrap(), &expected, 2.0 * tolerance);
            }
        }
    }

    /// With our kernel, the order of a sum depends on the sizes of the weights alone.
    #[test]
    fn a_row_has_the_same_bits_whatever_the_others_are() {
        let is_ours = |tensor: &Tensor| {
            let source = Narrow::of(tensor.kind()).map(|narrow| narrow.pick(kernels::product::SOURCES));
            device_of(tensor).zip(source).is_some_and(|(device, source)| source.exists_on(&*device))
        };
        for &place in PLACES.iter().filter(|(kind, _)| Narrow::of(*kind).is_some()) {
            for (_, outputs, inputs) in SIZES.into_iter().filter(|size| size.2 % 64 == 0) {
                let (x, weight) = (random(&[64, inputs], place), random(&[outputs, inputs], place));
                if !is_ours(&x) {
                    continue;
                }
                let product = |rows: i64| {
                    let mut y = Tensor::empty([rows, outputs], place);
                    linear_into(&mut normed(&x.narrow(0, 0, rows)), &weight, None, &mut y).unwrap();
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
