//! What the blocks of diffusion transformers are put together from.

use tch::{Kind, Tensor};

use crate::Result;
use crate::model::{Init, ParamSpec, Part, Weights};

/// Collects a unit's parameters, and says where each lies.
#[derive(Default)]
pub(crate) struct Params(pub Vec<ParamSpec>);

/// Where a layer's weight and bias lie in a unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linear(usize);

impl Params {
    /// A linear layer.
    pub fn linear(&mut self, name: &str, rows: i64, columns: i64) -> Linear {
        self.linears(name, &[name], rows, columns)
    }

    /// A linear layer whose result is 0 at first.
    pub fn zero_linear(&mut self, name: &str, rows: i64, columns: i64) -> Linear {
        self.add(name, &[name], rows, [vec![rows, columns], vec![rows]], Init::Zeros)
    }

    /// Linear layers of the same input, of `rows` rows each, as one.
    pub fn linears(&mut self, whole: &str, names: &[&str], rows: i64, columns: i64) -> Linear {
        let all_rows = rows * names.len() as i64;
        self.add(whole, names, rows, [vec![all_rows, columns], vec![all_rows]], usual(columns))
    }

    /// A convolution, its matrix of `[out, in, height, width]`.
    pub fn convolution(&mut self, name: &str, shape: [i64; 4]) -> Linear {
        let init = usual(shape[1..].iter().product());
        self.add(name, &[name], shape[0], [shape.to_vec(), vec![shape[0]]], init)
    }

    fn add(
        &mut self,
        whole: &str,
        names: &[&str],
        rows: i64,
        [weight, bias]: [Vec<i64>; 2],
        init: Init,
    ) -> Linear {
        let index = self.0.len();
        for (kind, shape, init) in [("weight", weight, init), ("bias", bias, Init::Zeros)] {
            let parts = names.iter().map(|name| Part { name: format!("{name}.{kind}"), rows }).collect();
            let decay = kind == "weight";
            self.0.push(ParamSpec { name: format!("{whole}.{kind}"), shape, parts, init, decay });
        }
        Linear(index)
    }

    /// The weight and bias of a norm of groups of channels.
    pub fn group_norm(&mut self, name: &str, channels: i64) -> Linear {
        let index = self.table(&format!("{name}.weight"), &[channels], Init::Ones);
        self.table(&format!("{name}.bias"), &[channels], Init::Zeros);
        Linear(index)
    }

    /// The weight of an RMS norm.
    pub fn norm(&mut self, name: &str, size: i64) -> usize {
        self.table(&format!("{name}.weight"), &[size], Init::Ones)
    }

    /// A parameter that is no matrix of a layer, and does not decay; returns where it lies.
    pub fn table(&mut self, name: &str, shape: &[i64], init: Init) -> usize {
        let parts = vec![Part { name: name.to_owned(), rows: shape[0] }];
        self.0.push(ParamSpec { name: name.to_owned(), shape: shape.to_vec(), parts, init, decay: false });
        self.0.len() - 1
    }
}

/// As torch.nn.Linear has it by default: a deviation of `1 / sqrt(3 columns)`.
fn usual(columns: i64) -> Init {
    Init::Normal { std: 1.0 / (3.0 * columns as f64).sqrt() }
}

impl Linear {
    /// Of the block's only unit.
    pub fn forward(self, weights: &Weights, x: &Tensor) -> Result<Tensor> {
        Ok(x.f_linear(weights.get(0, self.0), Some(weights.get(0, self.0 + 1)))?)
    }

    /// As a convolution, with as much padding on each side.
    pub fn convolve(self, weights: &Weights, x: &Tensor, padding: i64) -> Result<Tensor> {
        let (kernel, bias) = (weights.get(0, self.0), Some(weights.get(0, self.0 + 1)));
        Ok(x.f_conv2d(kernel, bias, [1, 1], [padding, padding], [1, 1], 1)?)
    }

    /// As a convolution of patches beside each other, as large as its matrix.
    pub fn patches(self, weights: &Weights, x: &Tensor) -> Result<Tensor> {
        let (kernel, bias) = (weights.get(0, self.0), Some(weights.get(0, self.0 + 1)));
        Ok(x.f_conv2d(kernel, bias, &kernel.size()[2..], [0, 0], [1, 1], 1)?)
    }

    /// As a norm of `groups` groups of channels.
    pub fn group_norm(self, weights: &Weights, x: &Tensor, groups: i64) -> Result<Tensor> {
        let (weight, bias) = (Some(weights.get(0, self.0)), Some(weights.get(0, self.0 + 1)));
        Ok(x.f_group_norm(groups, weight, bias, EPS, false)?)
    }
}

/// Added to the variance or the mean square in all norms.
pub(crate) const EPS: f64 = 1e-6;

/// `norm(x)`, without weights, over the last dimension.
pub(crate) fn layer_norm(x: &Tensor) -> Result<Tensor> {
    let channels = x.size()[x.dim() - 1];
    Ok(x.f_layer_norm([channels], None::<&Tensor>, None::<&Tensor>, EPS, false)?)
}

/// `x (1 + scale) + shift`.
pub(crate) fn modulate(x: &Tensor, shift: &Tensor, scale: &Tensor) -> Result<Tensor> {
    Ok(x.f_mul(&scale.f_add_scalar(1.0)?)?.f_add(shift)?)
}

/// Cosines and sines that sigma is told by.
pub(crate) const FREQUENCIES: i64 = 256;
/// Models are told the timestep 1000 sigma.
const TIMESTEPS: f64 = 1000.0;
/// The slowest cosine has this wavelength, over 2 pi.
const MAX_PERIOD: f64 = 10_000.0;

/// `[B]` to fp32 `[B, FREQUENCIES]`: cosines, then sines.
pub(crate) fn time_features(sigmas: &Tensor) -> Result<Tensor> {
    let half = FREQUENCIES / 2;
    let exponents = Tensor::f_arange(half, (Kind::Float, sigmas.device()))?;
    let frequencies = exponents.f_mul_scalar(-MAX_PERIOD.ln() / half as f64)?.f_exp()?;
    let angles = sigmas.f_mul_scalar(TIMESTEPS)?.f_unsqueeze(1)?.f_mul(&frequencies)?;
    Ok(Tensor::f_cat(&[angles.f_cos()?, angles.f_sin()?], 1)?)
}
