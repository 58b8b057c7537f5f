//! CLIP (Radford et al., 2021): images and texts become vectors, whose cosine says how well they go together. The weights
//! have the names of `transformers`' `CLIPModel`, which later models of what people prefer have as well.
//!
//! A pass is a function of tensors that libtorch differentiates: the gradient of a cosine can be followed back to pixels.

use tch::{Kind, Tensor};

use crate::Result;
use crate::diffusion::layers::{Linear, Params};
use crate::error::check_config;
use crate::model::{Init, Unit, Weights};

/// The shape of a [`Clip`], with the names of its `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ClipConfig {
    /// The tower of the texts.
    pub text_config: TowerConfig,
    /// The tower of the images.
    pub vision_config: TowerConfig,
    /// Elements of a vector that both towers make.
    pub projection_dim: i64,
    /// Tokens that there are.
    pub vocab_size: i64,
    /// The longest text, its first and its last token included.
    pub max_position_embeddings: i64,
    /// The token that ends a text.
    pub eos_token_id: i64,
    /// Pixels of an image's side.
    pub image_size: i64,
    /// Pixels of a patch's side.
    pub patch_size: i64,
    /// What is taken off the pixels of each colour, 0 to 1, and what they are divided by.
    pub pixels: [[f64; 3]; 2],
}

/// A tower of attention layers.
#[derive(Clone, Debug, PartialEq)]
pub struct TowerConfig {
    /// Elements of a token.
    pub hidden_size: i64,
    /// Those within a layer's second half.
    pub intermediate_size: i64,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Heads, of which each has an equal part of a token.
    pub num_attention_heads: i64,
    /// What is between the matrices of that half.
    pub hidden_act: Activation,
    /// Added to the variance in norms.
    pub layer_norm_eps: f64,
}

/// See [`TowerConfig::hidden_act`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x sigmoid(1.702 x)`
    QuickGelu,
    /// The exact one.
    Gelu,
}

/// Both towers. It holds no weights: each tower has a unit.
#[derive(Debug)]
pub struct Clip {
    config: ClipConfig,
    units: [Unit; 2],
    images: Images,
    texts: Texts,
}

/// What makes a number of an image's vector, such as how much people like it: linear layers with nothing in between, as
/// LAION's aesthetic predictor has them. Each is a weight `[outputs, inputs]` and a bias `[outputs]`.
#[derive(Debug)]
pub struct Head(pub Vec<[Tensor; 2]>);

/// Where the parameters of the images' tower lie.
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

/// Where those of the texts' tower lie.
#[derive(Debug)]
struct Texts {
    tokens: usize,
    positions: usize,
    tower: Tower,
    last_norm: Linear,
    projection: usize,
}

impl Clip {
    /// Lays out both towers.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for sizes that make no model.
    pub fn new(config: ClipConfig) -> Result<Clip> {
        config.validate()?;
        let (images, image_unit) = Images::new(&config);
        let (texts, text_unit) = Texts::new(&config);
        Ok(Clip { config, units: [image_unit, text_unit], images, texts })
    }

    /// The shape that it was made from.
    pub fn config(&self) -> &ClipConfig {
        &self.config
    }

    /// The parameters of the images' tower, and of the texts'.
    pub fn units(&self) -> &[Unit; 2] {
        &self.units
    }

    /// The vectors of images `[B, 3, height, width]` of 0 to 1, of length 1: fp32 `[B, projection_dim]`. The shorter side
    /// becomes `image_size`, bicubic as with antialiasing, and what is left of the longer one is cut off on both ends.
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
        let tokens = at.tower.forward(&weights, tokens, false)?;
        let pooled = at.last_norm.layer_norm(&weights, &tokens.f_select(1, 0)?, eps)?;
        unit_vectors(&pooled.f_linear(get(at.projection), None::<&Tensor>)?)
    }

    /// The vectors of texts of tokens, of length 1: fp32 `[B, projection_dim]`. Each text ends with its `eos_token_id`, and
    /// has at most `max_position_embeddings` tokens.
    ///
    /// # Errors
    /// libtorch's.
    pub fn embed_texts(&self, weights: &[Tensor], texts: &[Vec<i64>]) -> Result<Tensor> {
        let (units, at) = ([weights], &self.texts);
        let weights = Weights::new(&units);
        let get = |index: usize| weights.get(0, index);
        let device = get(at.tokens).device();
        let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
        // No token sees one behind it, so it is free what is there.
        let padded = texts.iter().flat_map(|text| {
            let padding = std::iter::repeat_n(self.config.eos_token_id, longest - text.len());
            text.iter().copied().chain(padding)
        });
        let (count, longest) = (texts.len() as i64, longest as i64);
        let padded: Vec<i64> = padded.collect();
        let tokens = Tensor::f_from_slice(&padded)?.f_to_device(device)?.f_view([count, longest])?;
        let positions = get(at.positions).f_narrow(0, 0, longest)?;
        let tokens = Tensor::f_embedding(get(at.tokens), &tokens, -1, false, false)?.f_add(&positions)?;
        let tokens = at.tower.forward(&weights, tokens, true)?;
        let eps = self.config.text_config.layer_norm_eps;
        let tokens = at.last_norm.layer_norm(&weights, &tokens, eps)?.f_flatten(0, 1)?;
        let ends = texts.iter().enumerate().map(|(row, text)| row as i64 * longest + text.len() as i64 - 1);
        let ends = Tensor::f_from_slice(&ends.collect::<Vec<_>>())?.f_to_device(device)?;
        let pooled = tokens.f_index_select(0, &ends)?;
        unit_vectors(&pooled.f_linear(get(at.projection), None::<&Tensor>)?)
    }

    /// fp32 `[B, 3, image_size, image_size]`.
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
    /// The number of each of the vectors `[B, inputs]`: `[B]`.
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

/// Rows of length 1, in fp32.
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

impl Texts {
    fn new(config: &ClipConfig) -> (Texts, Unit) {
        let (mut params, tower) = (Params::default(), &config.text_config);
        let size = tower.hidden_size;
        let (tokens, positions) = (config.vocab_size, config.max_position_embeddings);
        let texts = Texts {
            tokens: params.table("text_model.embeddings.token_embedding.weight", &[tokens, size], INIT),
            positions: params.table(
                "text_model.embeddings.position_embedding.weight",
                &[positions, size],
                INIT,
            ),
            tower: Tower::new(&mut params, "text_model", tower),
            last_norm: params.group_norm("text_model.final_layer_norm", size),
            projection: params.table("text_projection.weight", &[config.projection_dim, size], INIT),
        };
        (texts, Unit { trainable: false, ..params.into_unit("text_model") })
    }
}

/// The layers of a tower.
#[derive(Debug)]
struct Tower {
    config: TowerConfig,
    layers: Vec<Layer>,
}

#[derive(Clone, Copy, Debug)]
struct Layer {
    norm1: Linear,
    qkv: Linear,
    out: Linear,
    norm2: Linear,
    up: Linear,
    down: Linear,
}

impl Tower {
    fn new(params: &mut Params, name: &str, config: &TowerConfig) -> Tower {
        let (size, inner) = (config.hidden_size, config.intermediate_size);
        let layers = (0..config.num_hidden_layers).map(|layer| {
            let name = |part: &str| format!("{name}.encoder.layers.{layer}.{part}");
            let qkv = ["q_proj", "k_proj", "v_proj"].map(|which| name(&format!("self_attn.{which}")));
            Layer {
                norm1: params.group_norm(&name("layer_norm1"), size),
                qkv: params.linears(&name("self_attn.qkv"), &qkv.each_ref().map(String::as_str), size, size),
                out: params.linear(&name("self_attn.out_proj"), size, size),
                norm2: params.group_norm(&name("layer_norm2"), size),
                up: params.linear(&name("mlp.fc1"), inner, size),
                down: params.linear(&name("mlp.fc2"), size, inner),
            }
        });
        Tower { layers: layers.collect(), config: config.clone() }
    }

    /// `x` `[B, T, hidden_size]` through all layers.
    fn forward(&self, weights: &Weights, mut x: Tensor, is_causal: bool) -> Result<Tensor> {
        let TowerConfig { num_attention_heads: heads, hidden_act, layer_norm_eps: eps, .. } = self.config;
        for layer in &self.layers {
            let h = layer.norm1.layer_norm(weights, &x, eps)?;
            let qkv = layer.qkv.forward(weights, &h)?.f_unflatten(-1, [3, heads, -1])?;
            let of_heads = |which: i64| qkv.f_select(2, which)?.f_transpose(1, 2);
            let (q, k, v) = (of_heads(0)?, of_heads(1)?, of_heads(2)?);
            let mask = None::<&Tensor>;
            let attended =
                Tensor::f_scaled_dot_product_attention(&q, &k, &v, mask, 0.0, is_causal, None, false)?;
            let attended = attended.f_transpose(1, 2)?.f_flatten(2, -1)?;
            x = x.f_add(&layer.out.forward(weights, &attended)?)?;
            let h = layer.up.forward(weights, &layer.norm2.layer_norm(weights, &x, eps)?)?;
            let h = match hidden_act {
                Activation::QuickGelu => h.f_mul(&h.f_mul_scalar(1.702)?.f_sigmoid()?)?,
                Activation::Gelu => h.f_gelu("none")?,
            };
            x = x.f_add(&layer.down.forward(weights, &h)?)?;
        }
        Ok(x)
    }
}

impl ClipConfig {
    /// Checks that the sizes make a model.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field and what it should be.
    pub fn validate(&self) -> Result<()> {
        for (name, tower) in [("text_config", &self.text_config), ("vision_config", &self.vision_config)] {
            let (size, heads) = (tower.hidden_size, tower.num_attention_heads);
            check_config(heads > 0 && size > 0 && size % heads == 0, name, || {
                format!("has a hidden_size of {size}, must be a multiple of num_attention_heads = {heads}")
            })?;
            check_config(tower.intermediate_size > 0, name, || {
                format!("has an intermediate_size of {}, must be at least 1", tower.intermediate_size)
            })?;
            check_config(tower.layer_norm_eps > 0.0, name, || {
                format!("has a layer_norm_eps of {}, must be above 0", tower.layer_norm_eps)
            })?;
        }
        let sizes = [
            ("projection_dim", self.projection_dim),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        for (field, size) in sizes {
            check_config(size > 0, field, || format!("is {size}, must be at least 1"))?;
        }
        let (side, patch) = (self.image_size, self.patch_size);
        check_config(patch > 0 && side >= patch, "patch_size", || {
            format!("is {patch}, must be from 1 to image_size = {side}")
        })?;
        let holds = self.pixels[1].iter().all(|deviation| *deviation > 0.0);
        check_config(holds, "image_std", || format!("is {:?}, must be above 0", self.pixels[1]))?;
        let is_token = (0..self.vocab_size).contains(&self.eos_token_id);
        check_config(is_token, "eos_token_id", || format!("is {}, no token", self.eos_token_id))
    }
}
