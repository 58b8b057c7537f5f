//! Position encoding of patches: cosines and sines of both axes, like diffusers' `get_2d_sincos_pos_embed`.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::Sd3Config;
use crate::Result;
use crate::init::WeightSource;
use crate::model::{Init, ParamSpec, Part};

const MAX_PERIOD: f64 = 10_000.0;

/// Encodes each row, or column, of the longest side: fp32 `[side, C / 2]`.
pub(super) fn places(config: &Sd3Config) -> Result<Tensor> {
    let side = config.pos_embed_max_size;
    let base = (config.sample_size / config.patch_size) as f64;
    let options = (Kind::Double, tch::Device::Cpu);
    let places = Tensor::f_arange(side, options)?.f_mul_scalar(base / side as f64)?;
    Ok(sines(&places, config.inner_dim() / 2)?.f_to_kind(Kind::Float)?)
}

/// Returns the encodings of `rows` and `columns` in the middle of the longest sides: `[rows * columns, C]`.
/// The first half of C encodes the column, the second the row.
pub(super) fn grid(places: &Tensor, rows: i64, columns: i64) -> Result<Tensor> {
    let (side, half) = (places.size()[0], places.size()[1]);
    let middle = |count: i64| places.f_narrow(0, (side - count) / 2, count);
    let wide = [rows, columns, half];
    let of_columns = middle(columns)?.f_unsqueeze(0)?.f_expand(wide, false)?;
    let of_rows = middle(rows)?.f_unsqueeze(1)?.f_expand(wide, false)?;
    Ok(Tensor::f_cat(&[of_columns, of_rows], 2)?.f_flatten(0, 1)?)
}

/// Maps `[N]` to `[N, size]`: sines, then cosines.
fn sines(places: &Tensor, size: i64) -> Result<Tensor> {
    let half = size / 2;
    let exponents = Tensor::f_arange(half, (Kind::Double, places.device()))?;
    let frequencies = exponents.f_mul_scalar(-MAX_PERIOD.ln() / half as f64)?.f_exp()?;
    let angles = places.f_unsqueeze(1)?.f_mul(&frequencies)?;
    Ok(Tensor::f_cat(&[angles.f_sin()?, angles.f_cos()?], 1)?)
}

/// Encodings of the largest square's patches, which diffusers' files contain in addition to the weights.
#[derive(Debug)]
pub(crate) struct PositionTable {
    places: Vec<f32>,
    side: usize,
    half: usize,
}

impl PositionTable {
    /// Name of the tensor.
    pub const NAME: &'static str = "pos_embed.pos_embed";

    /// Computes the table for a transformer of the shape `config`.
    pub fn new(config: &Sd3Config) -> Result<PositionTable> {
        let places = Vec::try_from(places(config)?.f_flatten(0, -1)?)?;
        let (side, half) = (config.pos_embed_max_size as usize, config.inner_dim() as usize / 2);
        Ok(PositionTable { places, side, half })
    }

    /// Returns the spec of the table as a parameter `[1, side * side, C]`.
    pub fn spec(&self) -> ParamSpec {
        let parts = vec![Part { name: Self::NAME.to_owned(), rows: 1 }];
        let shape = vec![1, (self.side * self.side) as i64, 2 * self.half as i64];
        ParamSpec { name: Self::NAME.to_owned(), shape, parts, init: Init::Zeros, decay: false, offset: 0.0 }
    }
}

impl WeightSource for PositionTable {
    fn read(&self, _: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        for (value, index) in values.iter_mut().zip(range) {
            let (cell, channel) = (index / (2 * self.half), index % (2 * self.half));
            let place = if channel < self.half { cell % self.side } else { cell / self.side };
            *value = self.places[place * self.half + channel % self.half];
        }
        Ok(())
    }
}
