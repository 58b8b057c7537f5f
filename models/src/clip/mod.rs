//! CLIP (Radford et al., 2021): maps images and texts to vectors whose cosine measures how well they match.
//! The weights have the names of `transformers`' `CLIPModel`, which later preference models share.
//! [`TextEncoder`] is the text half, used by image generators.
//!
//! A pass is a function of tensors that libtorch differentiates, so the gradient of a cosine can be computed
//! for pixels.

mod texts;
mod tower;

use tch::{Kind, Tensor};

pub use texts::{EncodedTexts, TextConfig, TextEncoder};
pub use tower::{Activation, TowerConfig};

use crate::Result;
use crate::autograd::Graph;
use crate::diffusion::layers::{Linear, Params};
use crate::error::check_config;
use crate::footprint::{Memo, Runs};
use crate::measured::Paper;
use crate::model::{Init, Unit, Weights};
use tower::Tower;

/// The shape of a [`Clip`], with the field names of its `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ClipConfig {
    /// Tower of the texts.
    pub text_config: TextConfig,
    /// Tower of the images.
    pub vision_config: TowerConfig,
    /// Elements of the output vectors of both towers.
    pub projection_dim: i64,
    /// Side of an image, in pixels.
    pub image_size: i64,
    /// Side of a patch, in pixels.
    pub patch_size: i64,
    /// Mean and standard deviation per color channel; pixels are from 0 to 1.
    pub pixels: [[f64; 3]; 2],
}

/// Both towers. Holds no weights: each tower has a unit.
#[derive(Debug)]
pub struct Clip {
    config: ClipConfig,
    image_unit: Unit,
    images: Images,
    texts: TextEncoder,
    measured: Memo<usize>,
}

/// Maps an image's vector to a number, such as an aesthetic score: linear layers without activations, like
/// LAION's aesthetic predictor. Each has a weight `[outputs, inputs]` and a bias `[outputs]`.
#[derive(Debug)]
pub struct Head(pub Vec<[Tensor; 2]>);

/// Indices of the image tower's parameters.
#[derive(Debug)]
struct Images {
    class: usize,
    patches: usize,
    positions: usize,
    first_norm: Linear,
    tower: Tower,
    last_norm: Linear,
    projection: usize,
}

impl Clip {
    /// Lays out both towers.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for invalid sizes.
    pub fn new(config: ClipConfig) -> Result<Clip> {
        config.validate()?;
        let (images, image_unit) = Images::new(&config);
        let texts = TextEncoder::new(config.text_config.clone(), config.projection_dim)?;
        Ok(Clip { config, image_unit, images, texts, measured: Memo::default() })
    }

    /// Returns the shape.
    pub fn config(&self) -> &ClipConfig {
        &self.config
    }

    /// Returns the parameters of the image tower and of the text tower.
    pub fn units(&self) -> [&Unit; 2] {
        [&self.image_unit, self.texts.unit()]
    }

    /// Returns unit vectors of images `[B, 3, height, width]` with values from 0 to 1: fp32 `[B,
    /// projection_dim]`. The shorter side is resized to `image_size`, bicubic with antialiasing, and the
    /// longer one is center-cropped.
    ///
    /// # Errors
    /// libtorch's.
    pub fn embed_images(&self, weights: &[Tensor], images: &Tensor) -> Result<Tensor> {
        let (units, at) = ([weights], &self.images);
        let weights = Weights::new(&units);
        let get = |index: usize| weights.get(0, index);
        let pixels = self.pixels(images)?.f_to_kind(get(at.patches).kind())?;
        let side = self.config.patch_size;
        let patches = pixels.f_conv2d(get(at.patches), None::<&Tensor>, [side, side], [0, 0], [1, 1], 1)?;
        let patches = patches.f_flatten(2, -1)?.f_transpose(1, 2)?;
        let size = patches.size();
        let class = get(at.class).f_expand([size[0], 1, size[2]], false)?;
        let tokens = Tensor::f_cat(&[class, patches], 1)?.f_add(get(at.positions))?;
        let eps = self.config.vision_config.layer_norm_eps;
        let tokens = at.first_norm.layer_norm(&weights, &tokens, eps)?;
        let [_, tokens] = at.tower.forward(&weights, tokens, 1, false)?;
        let pooled = at.last_norm.layer_norm(&weights, &tokens.f_select(1, 0)?, eps)?;
        unit_vectors(&pooled.f_linear(get(at.projection), None::<&Tensor>)?)
    }

    /// Returns the peak memory of [`Self::embed_images`] in bytes, for `images` of these heights and widths.
    /// With `followed`, includes the backward pass to the images.
    pub fn image_bytes(&self, images: usize, sides: [usize; 2], followed: bool, runs: Runs) -> usize {
        let size = [images, 3, sides[0], sides[1]];
        self.measured.once((size, followed, runs), || self.measure(&size, followed, runs))
    }

    fn measure(&self, images: &[usize], followed: bool, runs: Runs) -> Result<usize> {
        let paper = Paper::new(runs)?;
        let (weights, images) = (paper.params(&self.image_unit)?, paper.of_kind(images, Kind::Float)?);
        let embed = |images: &Tensor| self.embed_images(&weights, images);
        if !followed {
            return Ok(paper.peak(|| embed(&images))?.1);
        }
        let follow = || {
            let run = |_: &Weights, inputs: &[Tensor]| Ok(vec![embed(&inputs[0])?]);
            let graph = Graph::record(&Weights::new(&[]), |_| false, &[(&images, true)], run)?;
            let grad = graph.outputs[0].f_detach()?.f_empty_like()?;
            graph.gradients(&[&grad])
        };
        Ok(paper.peak(follow)?.1)
    }

    /// Returns unit vectors of tokenized texts: fp32 `[B, projection_dim]`. Each text ends with its
    /// `eos_token_id` and has at most `max_position_embeddings` tokens.
    ///
    /// # Errors
    /// libtorch's.
    pub fn embed_texts(&self, weights: &[Tensor], texts: &[Vec<i64>]) -> Result<Tensor> {
        let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
        let padded = texts.iter().flat_map(|text| {
            let padding = std::iter::repeat_n(self.config.text_config.eos_token_id, longest - text.len());
            text.iter().copied().chain(padding)
        });
        let padded = Tensor::f_from_slice(&padded.collect::<Vec<_>>())?;
        let padded = padded.f_view([texts.len() as i64, longest as i64])?.f_to_device(weights[0].device())?;
        unit_vectors(&self.texts.encode(weights, &padded, 0)?.pooled)
    }

    /// Resizes, crops and normalizes images: fp32 `[B, 3, image_size, image_size]`.
    fn pixels(&self, images: &Tensor) -> Result<Tensor> {
        let side = self.config.image_size;
        let (height, width) = (images.size()[2], images.size()[3]);
        let short = height.min(width);
        let scaled = [height, width].map(|length| length * side / short);
        let images = images.f_internal_upsample_bicubic2d_aa(scaled, false, None, None)?;
        let images = images.f_narrow(2, (scaled[0] - side) / 2, side)?;
        let images = images.f_narrow(3, (scaled[1] - side) / 2, side)?;
        let [mean, deviation] = self.config.pixels.map(|of| -> Result<Tensor> {
            Ok(Tensor::f_from_slice(&of.map(|value| value as f32))?
                .f_view([3, 1, 1])?
                .f_to_device(images.device())?)
        });
        Ok(images.f_sub(&mean?)?.f_div(&deviation?)?)
    }
}

impl Head {
    /// Returns one number per vector of `[B, inputs]`: `[B]`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn score(&self, vectors: &Tensor) -> Result<Tensor> {
        let mut x = vectors.shallow_clone();
        for [weight, bias] in &self.0 {
            x = x.f_linear(weight, Some(bias))?;
        }
        Ok(x.f_squeeze_dim(-1)?)
    }
}

/// Scales rows to length 1, in fp32.
fn unit_vectors(rows: &Tensor) -> Result<Tensor> {
    let rows = rows.f_to_kind(Kind::Float)?;
    let lengths = rows.f_square()?.f_sum_dim_intlist([-1i64].as_slice(), true, Kind::Float)?.f_sqrt()?;
    Ok(rows.f_div(&lengths)?)
}

const INIT: Init = Init::Normal { std: 0.02 };

impl Images {
    fn new(config: &ClipConfig) -> (Images, Unit) {
        let (mut params, tower) = (Params::default(), &config.vision_config);
        let (size, side) = (tower.hidden_size, config.patch_size);
        let patches = (config.image_size / side).pow(2);
        let images = Images {
            class: params.table("vision_model.embeddings.class_embedding", &[size], INIT),
            patches: params.table(
                "vision_model.embeddings.patch_embedding.weight",
                &[size, 3, side, side],
                INIT,
            ),
            positions: params.table(
                "vision_model.embeddings.position_embedding.weight",
                &[patches + 1, size],
                INIT,
            ),
            first_norm: params.group_norm("vision_model.pre_layrnorm", size), // as it is spelled there
            tower: Tower::new(&mut params, "vision_model", tower),
            last_norm: params.group_norm("vision_model.post_layernorm", size),
            projection: params.table("visual_projection.weight", &[config.projection_dim, size], INIT),
        };
        (images, Unit { trainable: false, ..params.into_unit("vision_model") })
    }
}

impl ClipConfig {
    /// Checks that the sizes are valid.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field and the valid values.
    pub fn validate(&self) -> Result<()> {
        self.text_config.validate("text_config")?;
        self.vision_config.validate("vision_config")?;
        let width = self.projection_dim;
        check_config(width > 0, "projection_dim", || format!("is {width}, must be at least 1"))?;
        let (side, patch) = (self.image_size, self.patch_size);
        check_config(patch > 0 && side >= patch, "patch_size", || {
            format!("is {patch}, must be from 1 to image_size = {side}")
        })?;
        let holds = self.pixels[1].iter().all(|deviation| *deviation > 0.0);
        check_config(holds, "image_std", || format!("is {:?}, must be above 0", self.pixels[1]))
    }
}
