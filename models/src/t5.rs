//! The encoder of T5 (Raffel et al., 2020, 1910.10683) in its version 1.1, and that of UMT5 (Chung et al., 2023, 2304.09151):
//! what models of images and videos read of a text. The weights have the names of `transformers`' `T5EncoderModel` and
//! `UMT5EncoderModel`.
//!
//! Nothing is trained here, so that a pass is a plain function of tensors.

use anyroll_backends::ops;
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::diffusion::layers::Params;
use crate::error::{check_config, check_layers};
use crate::model::{Init, Unit, Weights};

/// The shape of a [`T5Encoder`], with the names of its `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct T5Config {
    /// Tokens that there are.
    pub vocab_size: i64,
    /// Elements of a token.
    pub d_model: i64,
    /// Elements of a head.
    pub d_kv: i64,
    /// Those within a layer's second half, a gated one.
    pub d_ff: i64,
    /// Layers.
    pub num_layers: usize,
    /// Heads.
    pub num_heads: i64,
    /// Kinds of distances between two tokens, half of them forwards.
    pub relative_attention_num_buckets: i64,
    /// From this distance on all are of one kind.
    pub relative_attention_max_distance: i64,
    /// Added to the mean square in norms.
    pub layer_norm_epsilon: f64,
    /// Whether every layer has its own biases of distances, as UMT5's have, or all have those of the first, as T5's.
    pub biases_by_layer: bool,
    /// The token that ends a text.
    pub eos_token_id: i64,
    /// The token behind it, where a text is shorter than others.
    pub pad_token_id: i64,
}

/// The encoder. It holds no weights.
#[derive(Debug)]
pub struct T5Encoder {
    config: T5Config,
    unit: Unit,
    tokens: usize,
    layers: Vec<Layer>,
    last_norm: usize,
}

/// Where the parameters of a layer lie.
#[derive(Debug)]
struct Layer {
    norm: usize,
    q: usize,
    k: usize,
    v: usize,
    o: usize,
    /// Of layers that have one: what is added for each kind of distance, `[buckets, heads]`.
    biases: Option<usize>,
    second_norm: usize,
    gate: usize,
    up: usize,
    down: usize,
}

impl T5Encoder {
    /// The name of the embedding, under which [`Self::unit`] has it.
    pub const EMBEDDING: &str = "shared.weight";

    /// Lays out the encoder.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for sizes that make no model.
    pub fn new(config: T5Config) -> Result<T5Encoder> {
        config.validate()?;
        let mut params = Params::default();
        let tokens = params.table(Self::EMBEDDING, &[config.vocab_size, config.d_model], INIT);
        let layers = (0..config.num_layers).map(|layer| Layer::new(&mut params, &config, layer)).collect();
        let last_norm = params.norm("encoder.final_layer_norm", config.d_model);
        let unit = Unit { trainable: false, ..params.into_unit("encoder") };
        Ok(T5Encoder { config, unit, tokens, layers, last_norm })
    }

    /// The shape that it was made from.
    pub fn config(&self) -> &T5Config {
        &self.config
    }

    /// Its parameters.
    pub fn unit(&self) -> &Unit {
        &self.unit
    }

    /// The last states of texts of tokens, int64 `[B, S]`: `[B, S, d_model]` in the weights' dtype. With `lengths`, one a
    /// text and at least 1, no token sees those behind its text's end, whose own states mean nothing; without, all see all.
    ///
    /// # Errors
    /// libtorch's.
    pub fn encode(&self, weights: &[Tensor], texts: &Tensor, lengths: Option<&[i64]>) -> Result<Tensor> {
        let units = [weights];
        let weights = Weights::new(&units);
        let tokens = texts.size()[1];
        let buckets = self.config.buckets(tokens)?.f_to_device(texts.device())?;
        let behind = lengths.map(|lengths| behind_ends(lengths, tokens, texts.device())).transpose()?;
        let mut x = Tensor::f_embedding(weights.get(0, self.tokens), texts, -1, false, false)?;
        let mut biases = None;
        for layer in &self.layers {
            if let Some(table) = layer.biases {
                biases = Some(biases_of(weights.get(0, table), &buckets, behind.as_ref())?);
            }
            let biases = biases.as_ref().expect("the first layer has biases");
            x = layer.forward(&weights, &x, &self.config, biases)?;
        }
        norm(&weights, &x, self.last_norm, &self.config)
    }
}

/// What of `[S, S]` is added to the heads' scores: `[1, heads, S, S]`, or for each text `[B, heads, S, S]`.
fn biases_of(table: &Tensor, buckets: &Tensor, behind: Option<&Tensor>) -> Result<Tensor> {
    let biases = Tensor::f_embedding(table, buckets, -1, false, false)?.f_permute([2, 0, 1])?;
    let biases = biases.f_unsqueeze(0)?.f_contiguous()?;
    Ok(match behind {
        Some(behind) => biases.f_masked_fill(behind, f64::NEG_INFINITY)?,
        None => biases,
    })
}

/// Which tokens are behind the ends of their texts: bool `[B, 1, 1, S]`.
fn behind_ends(lengths: &[i64], tokens: i64, device: Device) -> Result<Tensor> {
    let lengths = Tensor::f_from_slice(lengths)?.f_view([-1, 1, 1, 1])?;
    let places = Tensor::f_arange(tokens, (Kind::Int64, Device::Cpu))?;
    Ok(places.f_ge_tensor(&lengths)?.f_to_device(device)?)
}

fn norm(weights: &Weights, x: &Tensor, weight: usize, config: &T5Config) -> Result<Tensor> {
    let rows = x.f_flatten(0, 1)?;
    let (y, _) = ops::rms_norm(&rows, weights.get(0, weight), config.layer_norm_epsilon)?;
    Ok(y.f_view_as(x)?)
}

const INIT: Init = Init::Normal { std: 0.02 };

impl Layer {
    fn new(params: &mut Params, config: &T5Config, layer: usize) -> Layer {
        let &T5Config { d_model, d_ff, num_heads, .. } = config;
        let inner = num_heads * config.d_kv;
        let name = |part: &str| format!("encoder.block.{layer}.layer.{part}");
        let mut matrix = |part: &str, rows: i64, columns: i64| {
            params.table(&format!("{}.weight", name(part)), &[rows, columns], INIT)
        };
        let [q, k, v] =
            ["q", "k", "v"].map(|which| matrix(&format!("0.SelfAttention.{which}"), inner, d_model));
        let o = matrix("0.SelfAttention.o", d_model, inner);
        let biases = (layer == 0 || config.biases_by_layer).then(|| {
            let buckets = config.relative_attention_num_buckets;
            matrix("0.SelfAttention.relative_attention_bias", buckets, num_heads)
        });
        let gate = matrix("1.DenseReluDense.wi_0", d_ff, d_model);
        let up = matrix("1.DenseReluDense.wi_1", d_ff, d_model);
        let down = matrix("1.DenseReluDense.wo", d_model, d_ff);
        let [norm, second_norm] =
            ["0.layer_norm", "1.layer_norm"].map(|part| params.norm(&name(part), d_model));
        Layer { norm, q, k, v, o, biases, second_norm, gate, up, down }
    }

    /// `x` `[B, S, d_model]` through the layer.
    fn forward(&self, weights: &Weights, x: &Tensor, config: &T5Config, biases: &Tensor) -> Result<Tensor> {
        let linear = |x: &Tensor, matrix: usize| x.f_linear(weights.get(0, matrix), None::<&Tensor>);
        let h = norm(weights, x, self.norm, config)?;
        let heads = |matrix: usize| -> Result<Tensor> {
            Ok(linear(&h, matrix)?.f_unflatten(-1, [config.num_heads, config.d_kv])?.f_transpose(1, 2)?)
        };
        let (q, k, v) = (heads(self.q)?, heads(self.k)?, heads(self.v)?);
        // T5 does not divide by the root of a head's width.
        let attended =
            Tensor::f_scaled_dot_product_attention(&q, &k, &v, Some(biases), 0.0, false, 1.0, false)?;
        let attended = attended.f_transpose(1, 2)?.f_flatten(2, -1)?;
        let x = x.f_add(&linear(&attended, self.o)?)?;
        let h = norm(weights, &x, self.second_norm, config)?;
        let gated = linear(&h, self.gate)?.f_gelu("tanh")?.f_mul(&linear(&h, self.up)?)?;
        Ok(x.f_add(&linear(&gated, self.down)?)?)
    }
}

impl T5Config {
    /// The kind of distance from each of so many tokens to each other: int64 `[S, S]`, the seen token last, on the host. A
    /// half is for tokens ahead; of a half again half are single distances, and the others wider and wider ones. In fp32 as
    /// `transformers` computes it, so that a distance between two kinds is of the same one.
    fn buckets(&self, tokens: i64) -> Result<Tensor> {
        let half = self.relative_attention_num_buckets / 2;
        let exact = half / 2;
        let places = Tensor::f_arange(tokens, (Kind::Int64, Device::Cpu))?;
        let distances = places.f_unsqueeze(0)?.f_sub(&places.f_unsqueeze(1)?)?;
        let ahead = distances.f_gt(0)?.f_to_kind(Kind::Int64)?.f_mul_scalar(half)?;
        let distances = distances.f_abs()?;
        let octaves = (self.relative_attention_max_distance as f64 / exact as f64).ln();
        let far = distances.f_to_kind(Kind::Float)?.f_div_scalar(exact)?.f_log()?.f_div_scalar(octaves)?;
        let far = far.f_mul_scalar(half - exact)?.f_to_kind(Kind::Int64)?.f_add_scalar(exact)?;
        let far = far.f_clamp_max(half - 1)?;
        Ok(distances.f_where_self(&distances.f_lt(exact)?, &far)?.f_add(&ahead)?)
    }

    /// Checks that the sizes make a model.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field and what it should be.
    pub fn validate(&self) -> Result<()> {
        check_layers("num_layers", self.num_layers)?;
        let sizes = [
            ("num_layers", self.num_layers as i64),
            ("vocab_size", self.vocab_size),
            ("d_model", self.d_model),
            ("d_kv", self.d_kv),
            ("d_ff", self.d_ff),
            ("num_heads", self.num_heads),
        ];
        for (field, size) in sizes {
            check_config(size > 0, field, || format!("is {size}, must be at least 1"))?;
        }
        let (buckets, distance) = (self.relative_attention_num_buckets, self.relative_attention_max_distance);
        check_config(buckets >= 4 && buckets % 4 == 0, "relative_attention_num_buckets", || {
            format!("is {buckets}, must be a multiple of 4")
        })?;
        check_config(distance > buckets / 4, "relative_attention_max_distance", || {
            format!("is {distance}, must be above a quarter of the {buckets} buckets")
        })?;
        check_config(self.layer_norm_epsilon > 0.0, "layer_norm_epsilon", || {
            format!("is {}, must be above 0", self.layer_norm_epsilon)
        })?;
        for (field, token) in [("eos_token_id", self.eos_token_id), ("pad_token_id", self.pad_token_id)] {
            let is_token = (0..self.vocab_size).contains(&token);
            check_config(is_token, field, || format!("is {token}, no token"))?;
        }
        Ok(())
    }
}
