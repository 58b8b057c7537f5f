//! Building blocks of diffusion transformers.

use tch::{Kind, Tensor};

use super::lora_linear::{self, Adapter};
use crate::Result;
use crate::autograd::Layout;
use crate::decoder::lora;
use crate::error::check_config;
use crate::model::{Init, ParamSpec, Part, Unit, Weights};

/// Low-rank adapters of the blocks' linear layers, like [`crate::decoder`]'s: `y = x W^T + b + scale x A^T
/// B^T`.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// Inner width of the product.
    pub rank: i64,
    /// Factor of the product.
    pub scale: f64,
    /// Layers with an adapter, such as `transformer_blocks.0.attn.to_q`; at least one.
    pub modules: Vec<String>,
}

impl Lora {
    pub(super) fn validate(&self) -> Result<()> {
        lora::check_product(self.rank, self.scale)?;
        check_config(!self.modules.is_empty(), "lora.targets", || "names no layer".to_owned())
    }
}

/// Returns the layout of a transformer with a `first` block, `blocks` with their adapters' parameters, and a
/// `last` block; and the blocks. With adapters all other weights are frozen.
pub(crate) fn stacked<B>(
    first: Unit,
    blocks: impl Iterator<Item = (Unit, Vec<ParamSpec>, B)>,
    last: Unit,
    has_adapters: bool,
) -> (Layout, Vec<B>) {
    let (mut units, mut adapters, mut stack) = (vec![first], vec![Vec::new()], Vec::new());
    for (unit, of_block, block) in blocks {
        units.push(unit);
        adapters.push(of_block);
        stack.push(block);
    }
    units.push(last);
    let layout = Layout::new(units);
    (if has_adapters { layout.with_adapters(adapters) } else { layout }, stack)
}

/// Collects a unit's parameters, and returns the index of each.
#[derive(Default)]
pub(crate) struct Params<'a> {
    specs: Vec<ParamSpec>,
    lora: Option<&'a Lora>,
    adapters: Vec<ParamSpec>,
}

/// Maximum number of linear layers fused into one: queries, keys and values.
const PARTS: usize = 3;

/// Indices of a layer's weight and bias in a unit, and of its adapters in the next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linear {
    weight: usize,
    /// Index of A for each fused layer with an adapter; B follows it.
    adapters: [Option<usize>; PARTS],
    scale: f64,
}

impl<'a> Params<'a> {
    /// Creates an empty collection, with adapters if there is a `lora`.
    pub fn with_lora(lora: Option<&'a Lora>) -> Self {
        Self { lora, ..Self::default() }
    }

    /// Returns the unit of the collected parameters.
    pub fn into_unit(self, name: &str) -> Unit {
        self.into_units(name).0
    }

    /// Returns the unit of the collected parameters, and its adapters' parameters.
    pub fn into_units(self, name: &str) -> (Unit, Vec<ParamSpec>) {
        (Unit { name: name.to_owned(), params: self.specs, trainable: true }, self.adapters)
    }

    /// Adds a linear layer.
    pub fn linear(&mut self, name: &str, rows: i64, columns: i64) -> Linear {
        self.linears(name, &[name], rows, columns)
    }

    /// Adds a linear layer whose initial output is 0.
    pub fn zero_linear(&mut self, name: &str, rows: i64, columns: i64) -> Linear {
        self.add(name, &[name], rows, &[columns], Init::Zeros)
    }

    /// Adds linear layers with the same input, of `rows` rows each, fused into one.
    pub fn linears(&mut self, whole: &str, names: &[&str], rows: i64, columns: i64) -> Linear {
        let linear = self.add(whole, names, rows, &[columns], usual(columns));
        let Some(lora) = self.lora else { return linear };
        let mut adapters = [None; PARTS];
        for (name, adapter) in names.iter().zip(&mut adapters) {
            if lora.modules.iter().any(|module| module == name) {
                *adapter = Some(self.adapters.len());
                self.adapters.extend(lora::pair(&format!("{name}.weight"), lora.rank, columns, rows));
            }
        }
        Linear { adapters, scale: lora.scale, ..linear }
    }

    /// Adds a convolution with a kernel `[out, in, height, width]`; for videos `[out, in, frames, height,
    /// width]`.
    pub fn convolution(&mut self, name: &str, shape: &[i64]) -> Linear {
        self.add(name, &[name], shape[0], &shape[1..], usual(shape[1..].iter().product()))
    }

    /// Adds a weight of `[rows of all, columns..]` and a bias.
    fn add(&mut self, whole: &str, names: &[&str], rows: i64, columns: &[i64], init: Init) -> Linear {
        let weight = self.specs.len();
        let all_rows = rows * names.len() as i64;
        for (kind, columns, init) in [("weight", columns, init), ("bias", &[], Init::Zeros)] {
            let parts = names.iter().map(|name| Part { name: format!("{name}.{kind}"), rows }).collect();
            let shape = [&[all_rows], columns].concat();
            let decay = kind == "weight";
            self.specs.push(ParamSpec {
                name: format!("{whole}.{kind}"),
                shape,
                parts,
                init,
                decay,
                offset: 0.0,
            });
        }
        Linear { weight, adapters: [None; PARTS], scale: 1.0 }
    }

    /// Adds the weight and bias of a norm over groups of channels, or over tokens.
    pub fn group_norm(&mut self, name: &str, channels: i64) -> Linear {
        let weight = self.table(&format!("{name}.weight"), &[channels], Init::Ones);
        self.table(&format!("{name}.bias"), &[channels], Init::Zeros);
        Linear { weight, adapters: [None; PARTS], scale: 1.0 }
    }

    /// Adds the weight of an RMS norm.
    pub fn norm(&mut self, name: &str, size: i64) -> usize {
        self.table(&format!("{name}.weight"), &[size], Init::Ones)
    }

    /// Adds a parameter that is not a layer's matrix and does not decay. Returns its index.
    pub fn table(&mut self, name: &str, shape: &[i64], init: Init) -> usize {
        let parts = vec![Part { name: name.to_owned(), rows: shape[0] }];
        let name = name.to_owned();
        self.specs.push(ParamSpec { name, shape: shape.to_vec(), parts, init, decay: false, offset: 0.0 });
        self.specs.len() - 1
    }
}

/// Returns the default initialization of torch.nn.Linear: a standard deviation of `1 / sqrt(3 columns)`.
fn usual(columns: i64) -> Init {
    Init::Normal { std: 1.0 / (3.0 * columns as f64).sqrt() }
}

impl Linear {
    /// Applies a linear layer, with its adapters if the block's weights have a second unit.
    pub fn forward(self, weights: &Weights, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = self.parameters(weights);
        // For a strided input libtorch runs one product or many, depending on whether a gradient is needed,
        // and their bits differ.
        let x = &x.f_contiguous()?;
        let adapters: Vec<Adapter> = self.adapters_of(weights).collect();
        if adapters.is_empty() {
            return Ok(x.f_linear(weight, Some(bias))?);
        }
        lora_linear::linear(x, [weight, bias], &adapters, self.scale)
    }

    /// Returns the layer's adapters in `weights`, each with the part of the output that it adds to.
    fn adapters_of<'w>(self, weights: &Weights<'w>) -> impl Iterator<Item = Adapter<'w>> {
        let has_unit = weights.units().len() > 1;
        let weights = *weights;
        self.adapters.into_iter().enumerate().filter(move |_| has_unit).filter_map(move |(part, first)| {
            let first = first?;
            Some(Adapter { part, a: weights.get(1, first), b: weights.get(1, first + 1) })
        })
    }

    /// Applies a convolution with the same padding on each side.
    pub fn convolve(self, weights: &Weights, x: &Tensor, padding: i64) -> Result<Tensor> {
        let (kernel, bias) = self.parameters(weights);
        Ok(x.f_conv2d(kernel, Some(bias), [1, 1], [padding, padding], [1, 1], 1)?)
    }

    /// Applies a convolution over frames and pixels, with the same padding on both sides of each axis.
    pub fn convolve_frames(self, weights: &Weights, x: &Tensor, padding: [i64; 3]) -> Result<Tensor> {
        let (kernel, bias) = self.parameters(weights);
        Ok(x.f_conv3d(kernel, Some(bias), [1, 1, 1], padding, [1, 1, 1], 1)?)
    }

    /// Applies a convolution over adjacent patches, which are as large as the kernel.
    pub fn patches(self, weights: &Weights, x: &Tensor) -> Result<Tensor> {
        let (kernel, bias) = self.parameters(weights);
        let size = kernel.size();
        Ok(match size.len() {
            4 => x.f_conv2d(kernel, Some(bias), &size[2..], [0, 0], [1, 1], 1)?,
            _ => x.f_conv3d(kernel, Some(bias), &size[2..], [0, 0, 0], [1, 1, 1], 1)?,
        })
    }

    /// Applies a norm over `groups` groups of channels.
    pub fn group_norm(self, weights: &Weights, x: &Tensor, groups: i64) -> Result<Tensor> {
        let (weight, bias) = self.parameters(weights);
        Ok(x.f_group_norm(groups, Some(weight), Some(bias), EPS, false)?)
    }

    /// Applies a norm over each token.
    pub fn layer_norm(self, weights: &Weights, x: &Tensor, eps: f64) -> Result<Tensor> {
        let (weight, bias) = self.parameters(weights);
        Ok(x.f_layer_norm(weight.size(), Some(weight), Some(bias), eps, false)?)
    }

    fn parameters<'w>(self, weights: &Weights<'w>) -> (&'w Tensor, &'w Tensor) {
        (weights.get(0, self.weight), weights.get(0, self.weight + 1))
    }
}

/// Added to the variance or the mean square in all norms.
pub(crate) const EPS: f64 = 1e-6;

/// Splits `x` `[B, N, C]` into parts with the given numbers of tokens.
pub(crate) fn split<const N: usize>(x: &Tensor, tokens: [i64; N]) -> Result<[Tensor; N]> {
    Ok(x.f_split_with_sizes(tokens, 1)?.try_into().expect("as many as sizes"))
}

/// Number of cosines and sines that encode sigma.
pub(crate) const FREQUENCIES: i64 = 256;
/// Models receive the timestep 1000 sigma.
const TIMESTEPS: f64 = 1000.0;
/// Wavelength of the slowest cosine, divided by 2 pi.
const MAX_PERIOD: f64 = 10_000.0;

/// Maps `[B]` to fp32 `[B, frequencies]`: cosines, then sines.
pub(crate) fn time_features(sigmas: &Tensor, frequencies: i64) -> Result<Tensor> {
    let half = frequencies / 2;
    let exponents = Tensor::f_arange(half, (Kind::Float, sigmas.device()))?;
    let exponents = exponents.f_mul_scalar(-MAX_PERIOD.ln() / half as f64)?;
    // An angle is up to 1000 times a frequency, so a frequency's last bit matters. Rounding from fp64 gives
    // the same bits with every exp.
    let frequencies = exponents.f_to_kind(Kind::Double)?.f_exp()?.f_to_kind(Kind::Float)?;
    let angles = sigmas.f_mul_scalar(TIMESTEPS)?.f_unsqueeze(1)?.f_mul(&frequencies)?;
    Ok(Tensor::f_cat(&[angles.f_cos()?, angles.f_sin()?], 1)?)
}
