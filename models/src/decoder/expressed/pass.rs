//! A layer's parameters, and the parts that layers have in common.

use anyroll_backends::ops;
use tch::Tensor;

use super::super::{DecoderConfig, lora::Lora, matrix_spec, norm_spec, wide};
use super::operations::{Choice, Routes, columns};
use crate::Result;
use crate::model::{Init, ParamSpec, Part, Weights};

/// Collects the parameters of a layer.
pub(super) struct Params<'a> {
    pub config: &'a DecoderConfig,
    /// Name of the layer, such as `model.layers.0`.
    pub prefix: String,
    pub specs: Vec<ParamSpec>,
    pub matrices: Vec<Matrix>,
}

/// A matrix that can have an adapter.
#[derive(Clone, Debug)]
pub(super) struct Matrix {
    /// Name in the layer, such as `self_attn.o_proj`.
    pub name: &'static str,
    /// Index of the parameter.
    pub param: usize,
    pub inputs: i64,
    pub outputs: i64,
}

/// Indices of a product's matrix and bias, and its number among the layer's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Linear {
    matrix: usize,
    bias: Option<usize>,
    number: usize,
}

/// A gated MLP with SiLU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mlp {
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
}

/// A mixture of experts whose scores are logistic, with an expert that every token goes to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mixture {
    pub router: usize,
    /// Added to scores for the choice alone.
    pub bias: usize,
    pub gate_up: usize,
    pub down: usize,
    /// Width of an expert.
    pub width: i64,
    pub choice: Choice,
    pub shared: Mlp,
}

impl Params<'_> {
    /// Returns the full name of a parameter.
    pub fn name(&self, rest: &str) -> String {
        format!("{}.{rest}", self.prefix)
    }

    /// Adds a parameter, and returns its index.
    pub fn add(&mut self, spec: ParamSpec) -> usize {
        self.specs.push(spec);
        self.specs.len() - 1
    }

    /// Adds the weight of a norm.
    pub fn norm(&mut self, name: &str, size: i64) -> usize {
        let spec = norm_spec(self.name(&format!("{name}.weight")), size, self.config.norm_offset);
        self.add(spec)
    }

    /// Adds numbers that are 0 at first.
    pub fn zeros(&mut self, name: &str, size: i64) -> usize {
        let name = self.name(name);
        let parts = vec![Part { name: name.clone(), rows: size }];
        self.add(ParamSpec { name, shape: vec![size], parts, init: Init::Zeros, decay: false, offset: 0.0 })
    }

    /// Adds a matrix, which may have a bias.
    pub fn linear(&mut self, name: &'static str, outputs: i64, inputs: i64, is_biased: bool) -> Linear {
        let full = self.name(&format!("{name}.weight"));
        let param = self.add(matrix_spec(full, outputs, inputs, self.config.initializer_range));
        let bias = is_biased.then(|| self.zeros(&format!("{name}.bias"), outputs));
        self.matrices.push(Matrix { name, param, inputs, outputs });
        Linear { matrix: param, bias, number: self.matrices.len() - 1 }
    }

    /// Adds a gated MLP of this width, with the names of its gate, of up and of down.
    pub fn mlp(&mut self, [gate, up, down]: [&'static str; 3], width: i64) -> Mlp {
        let hidden = self.config.hidden_size;
        let [gate, up] = [gate, up].map(|name| self.linear(name, width, hidden, false));
        Mlp { gate, up, down: self.linear(down, hidden, width, false) }
    }
}

/// A pass through a layer: its weights, and its adapters if they are on.
pub(super) struct Pass<'a> {
    pub weights: &'a Weights<'a>,
    pub lora: Option<&'a Lora>,
}

impl Pass<'_> {
    /// Returns a parameter.
    pub fn param(&self, param: usize) -> &Tensor {
        self.weights.get(0, param)
    }

    /// Returns the product with a matrix and its adapter, with the bias.
    pub fn linear(&self, linear: Linear, x: &Tensor) -> Result<Tensor> {
        let mut y = x.f_linear(self.param(linear.matrix), linear.bias.map(|bias| self.param(bias)))?;
        for (a, b, scale) in self.lora.into_iter().flat_map(|lora| lora.products(linear.number)) {
            let z = x.f_linear(self.weights.get(1, a), None::<&Tensor>)?.f_mul_scalar(scale)?;
            y = y.f_add(&z.f_linear(self.weights.get(1, b), None::<&Tensor>)?)?;
        }
        Ok(y)
    }

    /// Returns the norm of `x` over its last dimension.
    pub fn norm(&self, norm: usize, x: &Tensor, eps: f64) -> Result<Tensor> {
        Ok(ops::rms_normed(x, self.param(norm), eps)?)
    }

    /// Runs a gated MLP.
    pub fn mlp(&self, mlp: Mlp, x: &Tensor) -> Result<Tensor> {
        let gated = self.linear(mlp.gate, x)?.f_silu()?.f_mul(&self.linear(mlp.up, x)?)?;
        self.linear(mlp.down, &gated)
    }

    /// Runs a mixture of experts, and the shared one.
    pub fn mixture(&self, mixture: Mixture, x: &Tensor) -> Result<Tensor> {
        let router = wide(self.param(mixture.router))?;
        let scores = wide(x)?.f_linear(&router, None::<&Tensor>)?.f_sigmoid()?;
        let (weights, routes) = Routes::choose(&scores, self.param(mixture.bias), mixture.choice)?;
        let gate_up = routes.linear(&routes.spread(x)?, self.param(mixture.gate_up))?;
        let width = mixture.width;
        let gated = columns(&gate_up, 0, width)?.f_silu()?.f_mul(&columns(&gate_up, width, width)?)?;
        let out = routes.linear(&gated, self.param(mixture.down))?;
        Ok(routes.collect(&out, &weights)?.f_add(&self.mlp(mixture.shared, x)?)?)
    }
}
