//! The encoder of T5 1.1 (Raffel et al., 2020, 1910.10683) and of UMT5 (Chung et al., 2023, 2304.09151),
//! which image and video models use for text. The weights have the names of `transformers`' `T5EncoderModel`
//! and `UMT5EncoderModel`.
//!
//! It is never trained, so a pass is a plain function of tensors.

use anyroll_backends::ops;
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::diffusion::layers::Params;
use crate::error::{check_config, check_layers};
use crate::model::{Init, Unit, Weights};

/// The shape of a [`T5Encoder`], with the field names of its `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct T5Config {
    /// Vocabulary size.
    pub vocab_size: i64,
    /// Elements per token.
    pub d_model: i64,
    /// Elements per head.
    pub d_kv: i64,
    /// Width of the gated MLP.
    pub d_ff: i64,
    /// Number of layers.
    pub num_layers: usize,
    /// Number of heads.
    pub num_heads: i64,
    /// Number of buckets for distances between two tokens, half of them for later tokens.
    pub relative_attention_num_buckets: i64,
    /// Distances from here on share one bucket.
    pub relative_attention_max_distance: i64,
    /// Added to the mean square in norms.
    pub layer_norm_epsilon: f64,
    /// True if every layer has its own distance biases, like UMT5's; false if all use the first layer's, like
    /// T5's.
    pub biases_by_layer: bool,
    /// Token that ends a text.
    pub eos_token_id: i64,
    /// Token that pads shorter texts after their end.
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

/// Indices of a layer's parameters.
#[derive(Debug)]
struct Layer {
    norm: usize,
    q: usize,
    k: usize,
    v: usize,
    o: usize,
    /// Biases added to scores per distance bucket, `[buckets, heads]`, in layers that have their own.
    biases: Option<usize>,
    second_norm: usize,
    gate: usize,
    up: usize,
    down: usize,
}

impl T5Encoder {
    /// Name of the embedding in [`Self::unit`].
    pub const EMBEDDING: &str = "shared.weight";

    /// Lays out the encoder.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for invalid sizes.
    pub fn new(config: T5Config) -> Result<T5Encoder> {
        config.validate()?;
        let mut params = Params::default();
        let tokens = params.table(Self::EMBEDDING, &[config.vocab_size, config.d_model], INIT);
        let layers = (0..config.num_layers).map(|layer| Layer::new(&mut params, &config, layer)).collect();
        let last_norm = params.norm("encoder.final_layer_norm", config.d_model);
        let unit = Unit { trainable: false, ..params.into_unit("encoder") };
        Ok(T5Encoder { config, unit, tokens, layers, last_norm })
    }

    /// Returns the shape.
    pub fn config(&self) -> &T5Config {
        &self.config
    }

    /// Returns the parameters.
    pub fn unit(&self) -> &Unit {
        &self.unit
    }

    /// Returns the last hidden states of tokenized texts, int64 `[B, S]`: `[B, S, d_model]` in the weights'
    /// dtype. With `lengths`, one per text and at least 1, no token sees those after its text's end, whose
    /// own states are meaningless. Without it, all tokens see all.
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

/// Returns the biases added to the heads' scores: `[1, heads, S, S]`, or per text `[B, heads, S, S]`.
fn biases_of(table: &Tensor, buckets: &Tensor, behind: Option<&Tensor>) -> Result<Tensor> {
    let biases = Tensor::f_embedding(table, buckets, -1, false, false)?.f_permute([2, 0, 1])?;
    let biases = biases.f_unsqueeze(0)?.f_contiguous()?;
    Ok(match behind {
        Some(behind) => biases.f_masked_fill(behind, f64::NEG_INFINITY)?,
        None => biases,
    })
}

/// Marks the tokens after the ends of their texts: bool `[B, 1, 1, S]`.
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

    /// Runs `x` `[B, S, d_model]` through the layer.
    fn forward(&self, weights: &Weights, x: &Tensor, config: &T5Config, biases: &Tensor) -> Result<Tensor> {
        let linear = |x: &Tensor, matrix: usize| x.f_linear(weights.get(0, matrix), None::<&Tensor>);
        let h = norm(weights, x, self.norm, config)?;
        let heads = |matrix: usize| -> Result<Tensor> {
            Ok(linear(&h, matrix)?.f_unflatten(-1, [config.num_heads, config.d_kv])?.f_transpose(1, 2)?)
        };
        let (q, k, v) = (heads(self.q)?, heads(self.k)?, heads(self.v)?);
        // T5 does not divide by the square root of a head's width.
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
    /// Returns the distance bucket of each pair of `tokens` tokens: int64 `[S, S]` on the host, with the
    /// attended token last. Half of the buckets are for later tokens. Of each half, half are single distances
    /// and the others increasingly wide ranges. Computed in fp32 like in `transformers`, so that borderline
    /// distances get the same bucket.
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

    /// Checks that the sizes are valid.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field and the valid values.
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
