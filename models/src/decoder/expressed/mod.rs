//! Layers that nobody differentiated by hand: each is two functions of tensors, before attention and after it. libtorch
//! differentiates both inside the block, and [`footprint`] runs both without values to measure their memory.
//! [`operations`] has what libtorch lacks.
//!
//! ```text
//! q, k, v = project(x);  out = finish(x, attention(q, k, v))
//! ```
//!
//! Attention between them is the decoder's own, and so are its cache, packed batches, embedding and head. Forward saves
//! the block's input and attention's output; backward runs both functions again. So the block is the same at every
//! stage of sharding, and costs one more forward of its products.

mod deepseek_v3;
mod footprint;
mod glm4;
mod operations;
mod pass;

use std::sync::Arc;

use anyroll_backends::ops::{self, AttentionOptions, AttentionOutput, Causal, Qkv, QkvGrads};
use tch::Tensor;

pub use deepseek_v3::DeepseekV3;
pub use operations::Pairs;

use super::DecoderConfig;
use super::layer::Layer as Inputs;
use super::lora::Lora;
use crate::Result;
use crate::autograd::{Graph, store, trained};
use crate::error::check_config;
use crate::footprint::{BlockBytes, Memo};
use crate::model::{Grads, Saved, Unit, Weights};
use pass::{Matrix, Params, Pass};

/// The architecture of expressed layers, with the fields that other decoders lack.
#[derive(Clone, Debug, PartialEq)]
pub enum Expressed {
    /// DeepSeek-V3's.
    DeepseekV3(DeepseekV3),
    /// GLM-4's dense form.
    Glm4,
}

/// The layer of an architecture.
#[derive(Clone, Debug)]
enum Layer {
    DeepseekV3(Box<deepseek_v3::Layer>),
    Glm4(Box<glm4::Layer>),
}

impl Expressed {
    /// Checks that `config` has no trait that the layers do not compute, and its own fields.
    pub(super) fn validate(&self, config: &DecoderConfig) -> Result<()> {
        let plain = DecoderConfig::plain(config.num_hidden_layers, config.hidden_size, 1);
        let foreign = [
            ("num_experts", config.experts.is_some()),
            ("sliding_window", config.sliding_window.is_some()),
            ("other_rope", config.other_rope.is_some()),
            ("fused_projections", config.fused_projections),
            ("mlp_bias", config.mlp_bias),
            ("qk_norm", config.qk_norm.is_some()),
            ("norms", config.norms != plain.norms),
            ("hidden_act", config.activation != plain.activation),
            ("residual_multiplier", config.multipliers.residual != 1.0),
            ("attention_multiplier", config.multipliers.attention.is_some()),
        ];
        for (field, is_set) in foreign {
            check_config(!is_set, field, || "is set, which this architecture has not".to_owned())?;
        }
        match self {
            Expressed::DeepseekV3(of) => of.validate(config),
            Expressed::Glm4 => Ok(()),
        }
    }

    /// Returns the number of rotated elements of a head, if it is not a fraction of the decoder's.
    pub(super) fn rotary_dim(&self) -> Option<i64> {
        match self {
            Expressed::DeepseekV3(of) => Some(of.qk_rope_head_dim),
            Expressed::Glm4 => None,
        }
    }

    /// Returns the factor of the attention scores in units of `1 / sqrt(D)`.
    pub(super) fn attention_factor(&self, config: &DecoderConfig) -> f64 {
        match self {
            Expressed::DeepseekV3(of) => config.rope_scaling.growth(of.mscale_all_dim).powi(2),
            Expressed::Glm4 => 1.0,
        }
    }

    fn layer(&self, params: &mut Params, layer: usize) -> Layer {
        match self {
            Expressed::DeepseekV3(of) => {
                Layer::DeepseekV3(Box::new(deepseek_v3::Layer::new(of, params, layer)))
            }
            Expressed::Glm4 => Layer::Glm4(Box::new(glm4::Layer::new(params))),
        }
    }
}

impl Layer {
    /// Returns queries `[N, H, D]`, keys and values `[N, K, D]` of the rows `x` `[N, C]`, whose positions have the
    /// cosines and sines `turns`.
    fn project(&self, pass: &Pass, x: &Tensor, turns: &Tensor) -> Result<[Tensor; 3]> {
        match self {
            Layer::DeepseekV3(layer) => layer.project(pass, x, turns),
            Layer::Glm4(layer) => layer.project(pass, x, turns),
        }
    }

    /// Returns the layer's output `[N, C]` from attention's `[N, H D]`.
    fn finish(&self, pass: &Pass, x: &Tensor, attended: &Tensor) -> Result<Tensor> {
        match self {
            Layer::DeepseekV3(layer) => layer.finish(pass, x, attended),
            Layer::Glm4(layer) => layer.finish(pass, x, attended),
        }
    }
}

/// A decoder block with an expressed layer.
#[derive(Clone, Debug)]
pub(super) struct ExpressedBlock {
    layer: Layer,
    /// Matrices that can have adapters.
    matrices: Vec<Matrix>,
    /// Factor of the attention scores.
    scale: f64,
    /// True if attention's backward is bitwise deterministic.
    pub deterministic: bool,
    pub lora: Option<Lora>,
    measured: Arc<Memo<BlockBytes>>,
}

impl ExpressedBlock {
    /// Returns the unit of a layer, and its block.
    pub fn layout(config: &DecoderConfig, of: &Expressed, layer: usize) -> (Unit, ExpressedBlock) {
        let prefix = format!("model.layers.{layer}");
        let mut params = Params { config, prefix: prefix.clone(), specs: Vec::new(), matrices: Vec::new() };
        let layer = of.layer(&mut params, layer);
        let Params { specs, matrices, .. } = params;
        let scale = config.attention_multiplier();
        let measured = Arc::default();
        let block = ExpressedBlock { layer, matrices, scale, deterministic: true, lora: None, measured };
        (Unit { name: prefix, params: specs, trainable: true }, block)
    }

    /// Lists the names of the matrices that can have adapters, such as `self_attn.o_proj`.
    pub fn modules(&self) -> impl Iterator<Item = &'static str> {
        self.matrices.iter().map(|matrix| matrix.name)
    }

    /// Returns the number, the parameter, the inputs and the outputs of the matrix `name`.
    pub fn matrix(&self, name: &str) -> Option<(usize, usize, i64, i64)> {
        let mut numbered = self.matrices.iter().enumerate();
        let (number, matrix) = numbered.find(|(_, matrix)| matrix.name == name)?;
        Some((number, matrix.param, matrix.inputs, matrix.outputs))
    }

    /// Returns the attention mask and scale.
    pub fn causal(&self) -> Causal {
        Causal::whole(self.scale)
    }

    fn pass<'a>(&'a self, weights: &'a Weights<'a>) -> Pass<'a> {
        Pass { weights, lora: self.lora.as_ref() }
    }

    /// Returns the inputs of attention for the rows `x` at `positions`.
    pub fn project(
        &self,
        weights: &Weights,
        x: &Tensor,
        positions: &Tensor,
        table: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let turns = table.f_index_select(0, positions)?;
        self.layer.project(&self.pass(weights), x, &turns)
    }

    /// Computes the block's output from attention's `[N, H D]`.
    pub fn finish(&self, weights: &Weights, x: &Tensor, attended: &Tensor) -> Result<Tensor> {
        self.layer.finish(&self.pass(weights), x, attended)
    }

    /// Maps `x` `[N, C]` to `[N, C]`.
    pub fn forward(
        &self,
        weights: &Weights,
        x: &Tensor,
        inputs: &Inputs,
        save: bool,
    ) -> Result<(Tensor, Saved)> {
        let rotation = (inputs.positions(), &inputs.rope_table);
        let attend = |[q, k, v]: [Tensor; 3]| Ok(ops::attention(&q, &k, &v, inputs.packing, self.causal())?);
        let (out, attended, lse) = self.forward_around(weights, x, rotation, attend)?;
        let saved = if save { vec![x.shallow_clone(), attended, lse] } else { Vec::new() };
        Ok((out, Saved(saved)))
    }

    /// Runs the layer around `attend`, which returns attention's output `[N, H D]` and log-sum-exps from its inputs. `rotation` are
    /// the rows' positions and the table of [`ops::rope_table`]. Returns the layer's output, and attention's.
    fn forward_around(
        &self,
        weights: &Weights,
        x: &Tensor,
        (positions, table): (&Tensor, &Tensor),
        attend: impl FnOnce([Tensor; 3]) -> Result<(Tensor, Tensor)>,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let (attended, lse) = attend(self.project(weights, x, positions, table)?)?;
        Ok((self.finish(weights, x, &attended)?, attended, lse))
    }

    /// Turns the gradient of the output into that of `x`.
    pub fn backward(
        &self,
        weights: &Weights,
        grads: &mut Grads,
        saved: Saved,
        dout: &Tensor,
        inputs: &Inputs,
    ) -> Result<Tensor> {
        let [x, attended, lse] = saved.unpack();
        let options = AttentionOptions {
            packing: inputs.packing,
            causal: self.causal(),
            deterministic: self.deterministic,
        };
        let output = AttentionOutput { out: &attended, lse: &lse };
        let attend = |dout: &Tensor, [q, k, v]: [&Tensor; 3], [dq, dk, dv]: [&mut Tensor; 3]| {
            let (qkv, grads) = (Qkv { q, k, v }, QkvGrads { dq, dk, dv });
            Ok(ops::attention_backward(dout, qkv, output, options, grads)?)
        };
        let rotation = (inputs.positions(), &inputs.rope_table);
        self.backward_around(weights, grads, [&x, &attended], dout, rotation, attend)
    }

    /// Runs the layer's backward around `attend`, which writes the gradients of attention's inputs from that of its output.
    fn backward_around(
        &self,
        weights: &Weights,
        grads: &mut Grads,
        [x, attended]: [&Tensor; 2],
        dout: &Tensor,
        (positions, table): (&Tensor, &Tensor),
        attend: impl FnOnce(&Tensor, [&Tensor; 3], [&mut Tensor; 3]) -> Result<()>,
    ) -> Result<Tensor> {
        let wanted: Vec<bool> = (0..weights.units().len()).map(|unit| grads.wants(unit)).collect();
        let trains = |unit: usize| wanted[unit];
        let after = Graph::record(weights, trains, &[(x, true), (attended, true)], |weights, it| {
            Ok(vec![self.finish(weights, &it[0], &it[1])?])
        })?;
        let mut of_after = after.gradients(&[dout])?;
        let dattended = of_after.pop().expect("the last input's gradient").f_contiguous()?;
        let dx = of_after.pop().expect("the first input's gradient");

        let before = Graph::record(weights, trains, &[(x, true)], |weights, it| {
            Ok(self.project(weights, &it[0], positions, table)?.into())
        })?;
        let qkv: Vec<Tensor> = before.outputs.iter().map(Tensor::f_detach).collect::<Result<_, _>>()?;
        let mut dqkv: Vec<Tensor> = qkv.iter().map(dense_like).collect::<Result<_>>()?;
        let ([q, k, v], [dq, dk, dv]) = (&qkv[..], &mut dqkv[..]) else { unreachable!("three of each") };
        attend(&dattended, [q, k, v], [dq, dk, dv])?;
        let mut of_before = before.gradients(&dqkv.iter().collect::<Vec<_>>())?;
        let dx = dx.f_add(&of_before.pop().expect("the input's gradient"))?;
        for ((unit, param), found) in trained(weights, trains).zip(of_after.into_iter().zip(of_before)) {
            for gradient in apart(found) {
                grads.put(unit, param, |buffer, how| store(buffer, &gradient, how))?;
            }
        }
        Ok(dx)
    }
}

/// Returns the gradients of both functions that have one; one of them if neither has, which counts as 0.
fn apart((one, other): (Tensor, Tensor)) -> impl Iterator<Item = Tensor> {
    let first = one.defined() || !other.defined();
    let second = other.defined();
    [(one, first), (other, second)].into_iter().filter(|(_, counts)| *counts).map(|(gradient, _)| gradient)
}

/// Returns dense memory in the shape of `x`.
fn dense_like(x: &Tensor) -> Result<Tensor> {
    Ok(Tensor::f_empty(x.size(), (x.kind(), x.device()))?)
}
