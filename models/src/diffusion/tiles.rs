//! Large pictures in tiles, so that decoding one needs the memory of a tile, as diffusers' `enable_tiling` has it: tiles of
//! latents overlap, each is decoded by itself, and pixels of two go over from one to the other evenly. A tile's norms and its
//! attention see that tile alone, so that pixels are slightly other than those of the whole.

use tch::{Kind, Tensor};

use crate::Result;

/// Square tiles of latents `[B, channels, height, width]`, or of such with frames before the height.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Latents of a tile's side.
    pub size: i64,
    /// Latents from one tile to the next: from half of `size` to all of it.
    pub stride: i64,
    /// Pixels of a latent's side.
    pub zoom: i64,
    /// Pixels of the side of a patch, which go over together.
    pub patch: i64,
}

/// Rows of tiles, and each by its column.
type Grid = Vec<Vec<Tensor>>;

impl Tiles {
    /// Whether latents are larger than a tile; others are decoded whole.
    pub fn divide(&self, latents: &Tensor) -> bool {
        sides(latents).into_iter().any(|side| side > self.size)
    }

    /// The pictures of `latents`, where `decode` makes those of a tile.
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

    /// The gradient of `latents` from that of the pictures, where `follow_back` finds that of a tile's latents from that of its
    /// pixels. No more than a tile's passes are held at a time.
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
            // The places are views of one tensor, and overlap.
            let _ = place.shallow_clone().f_add_(&follow_back(&tile, &grad)?)?;
        }
        Ok(found)
    }

    /// Views of the tiles.
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

    /// Tiles of pixels as one picture: each goes over from the one above it, then from the one to its left, and what lies in the
    /// next ones' places is theirs.
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

    /// `tile`, whose first pixels along `dim` lie on the last ones of `before`, if that is there.
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

    /// The gradients of the tiles' pixels, row by row, which depend on how they are blended and not on what they are.
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

/// Height and width.
fn sides(of: &Tensor) -> [i64; 2] {
    let size = of.size();
    [size[size.len() - 2], size[size.len() - 1]]
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// Of what is decoded pixel by pixel the whole is the same, however it is cut; and the gradient is its own.
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
