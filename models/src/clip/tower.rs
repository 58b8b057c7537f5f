//! Transformer layers shared by both halves of CLIP.

use anyroll_backends::ops;
use tch::Tensor;

use crate::Result;
use crate::diffusion::layers::{Linear, Params};
use crate::error::{check_config, check_layers};
use crate::model::Weights;

/// A tower of attention layers, with the field names of its configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct TowerConfig {
    /// Elements per token.
    pub hidden_size: i64,
    /// Width of the MLP.
    pub intermediate_size: i64,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Number of attention heads, which divide a token into equal parts.
    pub num_attention_heads: i64,
    /// Activation function of the MLP.
    pub hidden_act: Activation,
    /// Added to the variance in norms.
    pub layer_norm_eps: f64,
}

/// Activation of [`TowerConfig::hidden_act`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x sigmoid(1.702 x)`
    QuickGelu,
    /// Exact GELU.
    Gelu,
}

impl TowerConfig {
    /// Checks that the sizes are valid; `name` is the tower's name in the configuration.
    pub(super) fn validate(&self, name: &'static str) -> Result<()> {
        let (size, heads) = (self.hidden_size, self.num_attention_heads);
        check_config(heads > 0 && size > 0 && size % heads == 0, name, || {
            format!("has a hidden_size of {size}, must be a multiple of num_attention_heads = {heads}")
        })?;
        check_config(self.intermediate_size > 0, name, || {
            format!("has an intermediate_size of {}, must be at least 1", self.intermediate_size)
        })?;
        check_config(self.num_hidden_layers > 0, name, || "has no layer".to_owned())?;
        check_layers("num_hidden_layers", self.num_hidden_layers)?;
        check_config(self.layer_norm_eps > 0.0, name, || {
            format!("has a layer_norm_eps of {}, must be above 0", self.layer_norm_eps)
        })
    }
}

/// Layers of a tower.
#[derive(Debug)]
pub(super) struct Tower {
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
    pub(super) fn new(params: &mut Params, name: &str, config: &TowerConfig) -> Tower {
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

    /// Runs `x` `[B, T, hidden_size]` through all layers. Returns the input of the last `behind` layers (1 to
    /// all), and the output of the last layer.
    pub(super) fn forward(
        &self,
        weights: &Weights,
        x: Tensor,
        behind: usize,
        is_causal: bool,
    ) -> Result<[Tensor; 2]> {
        let (before, behind) = self.layers.split_at(self.layers.len() - behind);
        let through = |x: &Tensor, layers: &[Layer]| {
            layers
                .iter()
                .try_fold(x.shallow_clone(), |x, layer| layer.forward(weights, x, &self.config, is_causal))
        };
        let read = through(&x, before)?;
        let said = through(&read, behind)?;
        Ok([read, said])
    }
}

impl Layer {
    /// Runs `x` `[B, T, hidden_size]` through the layer.
    fn forward(&self, weights: &Weights, x: Tensor, config: &TowerConfig, is_causal: bool) -> Result<Tensor> {
        let &TowerConfig { num_attention_heads: heads, hidden_act, layer_norm_eps: eps, .. } = config;
        let h = self.norm1.layer_norm(weights, &x, eps)?;
        let qkv = self.qkv.forward(weights, &h)?.f_unflatten(-1, [3, heads, -1])?;
        let of_heads = |which: i64| qkv.f_select(2, which)?.f_transpose(1, 2);
        let (q, k, v) = (of_heads(0)?, of_heads(1)?, of_heads(2)?);
        let attended = ops::attend(&q, &k, &v, is_causal)?.f_transpose(1, 2)?.f_flatten(2, -1)?;
        let x = x.f_add(&self.out.forward(weights, &attended)?)?;
        let h = self.up.forward(weights, &self.norm2.layer_norm(weights, &x, eps)?)?;
        let h = match hidden_act {
            Activation::QuickGelu => h.f_mul(&h.f_mul_scalar(1.702)?.f_sigmoid()?)?,
            Activation::Gelu => h.f_gelu("none")?,
        };
        Ok(x.f_add(&self.down.forward(weights, &h)?)?)
    }
}
