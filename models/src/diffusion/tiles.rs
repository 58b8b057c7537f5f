//! Decoding of large images in tiles, so that it needs only the memory of one tile, like diffusers'
//! `enable_tiling`. Tiles of latents overlap, each is decoded separately, and overlapping pixels are blended
//! linearly. A tile's norms and attention see only that tile, so pixels differ slightly from those decoded
//! whole.

use tch::{Kind, Tensor};

use crate::Result;

/// Square tiles of latents `[B, channels, height, width]`, or with frames before the height.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Side of a tile, in latents.
    pub size: i64,
    /// Distance between tiles, in latents: from half of `size` to `size`.
    pub stride: i64,
    /// Pixels per latent and side.
    pub zoom: i64,
    /// Side of a pixel patch that is blended as a whole.
    pub patch: i64,
}

/// Rows of tiles, each by column.
type Grid = Vec<Vec<Tensor>>;

impl Tiles {
    /// Returns true if latents are larger than a tile; others are decoded whole.
    pub fn divide(&self, latents: &Tensor) -> bool {
        sides(latents).into_iter().any(|side| side > self.size)
    }

    /// Decodes `latents`; `decode` decodes one tile.
    ///
    /// # Errors
    /// `decode`'s, or libtorch's.
    pub fn decode(
        &self,
        latents: &Tensor,
        mut decode: impl FnMut(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut decoded = Grid::new();
        for row in self.cut(latents)? {
            decoded.push(row.iter().map(&mut decode).collect::<Result<_>>()?);
        }
        self.blend(&decoded)
    }

    /// Returns the gradient of `latents` from that of the images. `follow_back` computes the gradient of a
    /// tile's latents from that of its pixels. Only one tile's passes are in memory at a time.
    ///
    /// # Errors
    /// `follow_back`'s, or libtorch's.
    pub fn latents_grad(
        &self,
        latents: &Tensor,
        grad: &Tensor,
        mut follow_back: impl FnMut(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let found = latents.f_zeros_like()?;
        let tiles = self.cut(latents)?.into_iter().flatten();
        let grads = self.pixels_grad(latents, grad)?;
        for ((tile, grad), place) in tiles.zip(grads).zip(self.cut(&found)?.into_iter().flatten()) {
            // The places are overlapping views of one tensor.
            let _ = place.shallow_clone().f_add_(&follow_back(&tile, &grad)?)?;
        }
        Ok(found)
    }

    /// Returns views of the tiles.
    fn cut(&self, latents: &Tensor) -> Result<Grid> {
        let [height, width] = sides(latents);
        let part = |of: &Tensor, dim: i64, start: i64, side: i64| {
            of.f_narrow(dim, start, self.size.min(side - start))
        };
        let starts = |side: i64| (0..side).step_by(self.stride as usize);
        let row = |top: i64| -> Result<Vec<Tensor>> {
            let band = part(latents, -2, top, height)?;
            starts(width).map(|left| Ok(part(&band, -1, left, width)?)).collect()
        };
        starts(height).map(row).collect()
    }

    /// Joins tiles of pixels into one image. Each tile is blended with the one above it, then with the one to
    /// its left, and cut where the next tile begins.
    fn blend(&self, tiles: &[Vec<Tensor>]) -> Result<Tensor> {
        let kept = |tile: &Tensor| -> Result<Tensor> {
            let [height, width] = sides(tile).map(|side| side.min(self.stride * self.zoom));
            Ok(tile.f_narrow(-2, 0, height)?.f_narrow(-1, 0, width)?)
        };
        let (mut above, mut bands) = (Vec::new(), Vec::with_capacity(tiles.len()));
        for row in tiles {
            let mut blended: Vec<Tensor> = Vec::with_capacity(row.len());
            for (column, tile) in row.iter().enumerate() {
                let tile = self.go_over(above.get(column), tile, -2)?;
                blended.push(self.go_over(blended.last(), &tile, -1)?);
            }
            bands.push(Tensor::f_cat(&blended.iter().map(kept).collect::<Result<Vec<_>>>()?, -1)?);
            above = blended;
        }
        Ok(Tensor::f_cat(&bands, -2)?)
    }

    /// Blends the first pixels of `tile` along `dim` with the last ones of `before`, if there is one.
    fn go_over(&self, before: Option<&Tensor>, tile: &Tensor, dim: i64) -> Result<Tensor> {
        let of = |tensor: &Tensor| tensor.size()[(tensor.dim() as i64 + dim) as usize];
        let Some(before) = before else { return Ok(tile.shallow_clone()) };
        let length = of(before).min(of(tile)).min((self.size - self.stride) * self.zoom);
        if length == 0 {
            return Ok(tile.shallow_clone());
        }
        let share = Tensor::f_arange(length / self.patch, (Kind::Float, tile.device()))?;
        let share = share.f_mul_scalar(self.patch as f64 / length as f64)?;
        let share = share.f_repeat_interleave_self_int(self.patch, 0, None)?;
        let share = if dim == -2 { share.f_unsqueeze(-1)? } else { share };
        let last = before.f_narrow(dim, of(before) - length, length)?;
        let first = tile.f_narrow(dim, 0, length)?.f_mul(&share)?;
        let first = first.f_add(&last.f_mul(&share.f_neg()?.f_add_scalar(1.0)?)?)?;
        Ok(Tensor::f_cat(&[first, tile.f_narrow(dim, length, of(tile) - length)?], dim)?)
    }

    /// Returns the gradients of the tiles' pixels, row by row. They depend on the blending weights and not on
    /// the pixels.
    fn pixels_grad(&self, latents: &Tensor, grad: &Tensor) -> Result<Vec<Tensor>> {
        let pixels = |tile: &Tensor| -> Result<Tensor> {
            let mut size = grad.size();
            let at = size.len() - 2;
            size[at..].copy_from_slice(&sides(tile).map(|side| side * self.zoom));
            Ok(grad.f_new_zeros(size, (grad.kind(), grad.device()))?.f_set_requires_grad(true)?)
        };
        let leaves = self.cut(latents)?;
        let leaves = leaves.iter().map(|row| row.iter().map(pixels).collect());
        let leaves = leaves.collect::<Result<Grid>>()?;
        let blended = self.blend(&leaves)?;
        let objective = blended.f_mul(grad)?.f_sum(grad.kind())?;
        let leaves: Vec<&Tensor> = leaves.iter().flatten().collect();
        Ok(Tensor::f_run_backward(&[objective], &leaves, false, false)?)
    }
}

/// Returns height and width.
fn sides(of: &Tensor) -> [i64; 2] {
    let size = of.size();
    [size[size.len() - 2], size[size.len() - 1]]
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// If pixels are decoded independently, tiles give the same image and gradient as the whole.
    #[test]
    fn what_depends_on_no_neighbour_is_the_same_in_tiles() {
        let decode = |latents: &Tensor| {
            let size = latents.size();
            let doubled = latents.flatten(0, -3).unsqueeze(0).upsample_nearest2d(
                [size[size.len() - 2] * 2, size[size.len() - 1] * 2],
                None,
                None,
            );
            let sides = doubled.size();
            let shape = [&size[..size.len() - 2], &sides[2..]].concat();
            Ok(doubled.view(&shape[..]).square())
        };
        for (size, stride) in [(4, 3), (4, 4), (4, 2), (3, 2)] {
            for shape in [&[2, 3, 7, 9][..], &[1, 2, 3, 5, 4], &[1, 1, 4, 10]] {
                let tiles = Tiles { size, stride, zoom: 2, patch: 2 };
                let latents = Tensor::randn(shape, (Kind::Float, Device::Cpu)).set_requires_grad(true);
                assert!(tiles.divide(&latents));
                let whole = decode(&latents).unwrap();
                let found = tiles.decode(&latents.detach(), decode).unwrap();
                assert!(found.allclose(&whole, 1e-5, 1e-6, false), "{size} {stride} {shape:?}");
                let grad = whole.randn_like();
                let wanted =
                    Tensor::run_backward(&[(&whole * &grad).sum(Kind::Float)], &[&latents], false, false);
                let follow_back = |tile: &Tensor, grad: &Tensor| {
                    let tile = tile.detach().set_requires_grad(true);
                    let objective = (decode(&tile)? * grad).sum(Kind::Float);
                    Ok(Tensor::run_backward(&[objective], &[tile], false, false).remove(0))
                };
                let found = tiles.latents_grad(&latents.detach(), &grad, follow_back).unwrap();
                assert!(found.allclose(&wanted[0], 1e-4, 1e-5, false), "{size} {stride} {shape:?}");
            }
        }
    }

    #[test]
    fn what_is_no_larger_than_a_tile_stays_whole() {
        let tiles = Tiles { size: 4, stride: 3, zoom: 2, patch: 1 };
        let latents = |height, width| Tensor::zeros([1, 1, height, width], (Kind::Float, Device::Cpu));
        assert!(
            !tiles.divide(&latents(4, 4)) && tiles.divide(&latents(5, 4)) && tiles.divide(&latents(2, 5))
        );
    }
}
