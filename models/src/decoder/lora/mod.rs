//! Low-rank adapters (Hu et al., 2021): a frozen matrix W is complemented by a trained product of two small
//! matrices.
//!
//! ```text
//! y = x W^T + s x A^T B^T + bias      s = alpha / rank, A [rank, in], B [out, rank]
//! ```
//!
//! With `rslora` (Kalajdzievski, 2023) s is alpha / sqrt(rank), whose gradients do not vanish at large ranks.
//! Ranks and alphas may differ between matrices.
//!
//! With `dora` (Liu et al., 2024) the sum of W and the product determines the direction of rows, and a
//! trained vector m `[out]` their length:
//!
//! ```text
//! y = g * (x W^T + s x A^T B^T) + bias      g = m / ||W + s B A||, the norm of each row
//! ```
//!
//! In training, dropout may apply to the adapters' inputs, with another mask per adapter; the matrix W gets
//! the full input. A mask is recomputed wherever it is needed ([`ops::dropout()`]). With `dora` and the
//! dropped input d: `y = x W^T + (g - 1) * (d W^T) + g * (s d A^T B^T) + bias`, like in PEFT.
//!
//! Names are those of PEFT's files. The adapters of a layer form a unit of their own, so that the layer's
//! other weights can be frozen as a whole. Backward recomputes `x A^T`, which costs less than the memory to
//! keep it; with `dora` also `x W^T`, for the gradient of m. Each expert of a mixture has its own adapters (`experts`).

mod config;
mod experts;
mod magnitude;
mod merge;
mod targets;

use std::{ops::Range, sync::Arc};

use anyroll_backends::ops;
use tch::Tensor;

use super::block::Block;
use super::layer_block::LayerBlock;
use super::{DecoderConfig, math::Math, recorded::Scratch};
use crate::model::{Grads, Init, ParamSpec, Part, Unit, Weights};
use crate::{Cut, Peers, Result};
pub use config::{AdapterShape, LoraConfig, ModulePattern, lora_scale};
pub(crate) use config::{
    PREFIX, check_product, is_adapter, is_second, magnitude_name, matrix_of_magnitudes, names,
};
pub(crate) use magnitude::LEAST_NORM;
use magnitude::Scaled;
pub use targets::{LoraTarget, LoraTargets};

/// Indices of a layer's adapters in its second unit.
#[derive(Clone, Debug)]
pub(super) struct Lora {
    dropout: f64,
    dora: bool,
    /// Adapters of each [`Projection`], or of each matrix of an expressed layer.
    adapters: Vec<Vec<Adapter>>,
    /// Position of the unit with the adapters of experts among the block's, if there are any: those of the MLP's projections.
    experts_unit: Option<usize>,
    /// The ranks that each have a part of the adapters, if they are split.
    peers: Option<Arc<dyn Peers>>,
}

/// A block's product with a matrix. Adapters at one projection share their input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Projection {
    Qkv,
    O,
    GateUp,
    Down,
}

impl Projection {
    pub const ALL: [Projection; 4] = [Projection::Qkv, Projection::O, Projection::GateUp, Projection::Down];

    /// Returns true if a rank of a split block has a part of the input and all of the output; otherwise it is the other way
    /// round.
    pub(super) fn reads_part(self) -> bool {
        matches!(self, Projection::O | Projection::Down)
    }
}

/// Returns the parts of `ranges` that lie in `bounds`.
fn within(ranges: &[Range<i64>], bounds: &Range<i64>) -> Vec<Range<i64>> {
    let clipped = ranges.iter().map(|range| range.start.max(bounds.start)..range.end.min(bounds.end));
    clipped.filter(|range| !range.is_empty()).collect()
}

/// Place of a matrix in a layer.
pub(super) struct Place {
    /// Number of the product with it.
    pub projection: usize,
    /// Index of the (fused) parameter.
    pub matrix: usize,
    /// Its first row there.
    pub start: i64,
    pub inputs: i64,
    pub outputs: i64,
}

/// Dropout of adapters in training.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdapterDropout<'a> {
    /// Keys of the rows, see [`ops::Dropout::keys`].
    pub keys: &'a Tensor,
}

/// One adapter: its parameters, and its rows of the (fused) matrix, which are columns of the output.
#[derive(Clone, Debug)]
struct Adapter {
    /// In the block's first unit.
    matrix: usize,
    a: usize,
    b: usize,
    magnitude: Option<usize>,
    start: i64,
    columns: i64,
    shape: AdapterShape,
    /// Makes its dropout mask differ from those of other adapters.
    salt: u32,
}

/// Results of [`Lora::input_backward`] that [`Lora::weight_backward`] needs.
#[derive(Default)]
pub(super) struct InnerGrads {
    /// Gradient of the rows between A and B, for each adapter.
    inner: Vec<Tensor>,
    /// `Some` with `dora`.
    scaled: Option<Scaled>,
}

/// Returns the unit of each layer with adapters, and the adapters' indices in it.
pub(super) fn layout(
    config: &DecoderConfig,
    lora: &LoraConfig,
    blocks: &[LayerBlock],
) -> Vec<Option<(Unit, Lora)>> {
    let layers = blocks.iter().enumerate().map(|(layer, block)| {
        (!lora.targets.of(layer).is_empty()).then(|| {
            let (params, adapters) = params(config, lora, block, layer);
            (Unit { name: format!("model.layers.{layer}.lora"), params, trainable: true }, adapters)
        })
    });
    layers.collect()
}

fn params(
    config: &DecoderConfig,
    lora: &LoraConfig,
    block: &LayerBlock,
    layer: usize,
) -> (Vec<ParamSpec>, Lora) {
    let (mut params, mut adapters, mut experts_unit) = (Vec::new(), Vec::new(), None);
    let numbered = lora.targets.of(layer).iter().enumerate();
    let is_of_experts = |target: LoraTarget| target.is_of_experts(config, layer);
    // Those of experts come last, so that they can be taken out of the unit.
    let (of_experts, others): (Vec<_>, Vec<_>) = numbered.partition(|&(_, &target)| is_of_experts(target));
    for (number, &target) in others.into_iter().chain(of_experts) {
        let place = block.place_of(target, config).expect("targets were checked against the layer");
        let Place { projection, matrix, start, inputs, outputs } = place;
        let (a, weight) = (params.len(), format!("{}.weight", target.module(layer)));
        let modules = target.modules_in(config, layer);
        let shape = lora.shape_of(&modules[0]);
        let mut pair = pair(&weight, shape.rank, inputs, outputs);
        if is_of_experts(target) {
            experts_unit = Some(UNIT);
            pair = stacked(pair, &modules);
        }
        params.extend(pair);
        let magnitude = shape.dora.then(|| {
            params.push(magnitudes(&weight, outputs, inputs));
            a + 2
        });
        let salt = (layer * 2 * LoraTarget::ALL.len() + 2 * number) as u32;
        adapters.resize_with(adapters.len().max(projection + 1), Vec::new);
        adapters[projection].push(Adapter {
            matrix,
            a,
            b: a + 1,
            magnitude,
            start,
            columns: outputs,
            shape,
            salt,
        });
    }
    (params, Lora { dropout: lora.dropout, dora: lora.dora, adapters, experts_unit, peers: None })
}

impl Block {
    /// Returns the place of a matrix; `None` for one that no block of this kind has.
    pub fn place_of(&self, target: LoraTarget, config: &DecoderConfig) -> Option<Place> {
        let (hidden, intermediate) = (config.hidden_size, self.width(config));
        let [q, kv] = [self.heads, self.kv_heads].map(|heads| heads * self.head_dim);
        let (projection, start, inputs, outputs) = match target {
            LoraTarget::Q => (Projection::Qkv, 0, hidden, q),
            LoraTarget::K => (Projection::Qkv, q, hidden, kv),
            LoraTarget::V => (Projection::Qkv, q + kv, hidden, kv),
            LoraTarget::Qkv => (Projection::Qkv, 0, hidden, q + 2 * kv),
            LoraTarget::O => (Projection::O, 0, q, hidden),
            LoraTarget::Gate => (Projection::GateUp, 0, hidden, intermediate),
            LoraTarget::Up => (Projection::GateUp, intermediate, hidden, intermediate),
            LoraTarget::GateUp => (Projection::GateUp, 0, hidden, 2 * intermediate),
            LoraTarget::Down => (Projection::Down, 0, intermediate, hidden),
            LoraTarget::Named(_) => return None,
        };
        let (matrix, _) = self.params_at(projection);
        Some(Place { projection: projection as usize, matrix, start, inputs, outputs })
    }
}

/// Returns the specs of A and B for the weight `name` of `[outputs, inputs]`.
pub(crate) fn pair(name: &str, rank: i64, inputs: i64, outputs: i64) -> [ParamSpec; 2] {
    let [a, b] = names(name);
    // Initialized like in PEFT: the product is 0, and only B has a gradient at first.
    let bound = 1.0 / (inputs as f64).sqrt();
    [matrix(a, rank, inputs, Init::Uniform { bound }), matrix(b, outputs, rank, Init::Zeros)]
}

/// Returns the specs of the stacked A and B of matrices `modules` of one shape, from those of one of them.
fn stacked(pair: [ParamSpec; 2], modules: &[String]) -> [ParamSpec; 2] {
    let [a, b] = pair;
    let stack = |one: ParamSpec, which: usize| {
        let part = |module: &String| Part { name: names(module)[which].clone(), rows: one.shape[0] };
        let parts: Vec<Part> = modules.iter().map(part).collect();
        ParamSpec { shape: vec![one.shape[0] * modules.len() as i64, one.shape[1]], parts, ..one }
    };
    [stack(a, 0), stack(b, 1)]
}

fn matrix(name: String, rows: i64, columns: i64, init: Init) -> ParamSpec {
    let parts = vec![Part { name: name.clone(), rows }];
    ParamSpec { name, shape: vec![rows, columns], parts, init, decay: true, offset: 0.0 }
}

/// Returns the spec of the magnitudes for the weight `name` of `[outputs, inputs]`. They do not decay, which
/// would shrink the matrix's rows.
pub(crate) fn magnitudes(name: &str, outputs: i64, inputs: i64) -> ParamSpec {
    let name = magnitude_name(name);
    let parts = vec![Part { name: name.clone(), rows: outputs }];
    ParamSpec {
        name,
        shape: vec![outputs],
        parts,
        init: Init::RowNorms { columns: inputs },
        decay: false,
        offset: 0.0,
    }
}

/// Bits of a salt above those that tell a model's adapters apart.
const RANK_BITS: u32 = 20;

/// Index of the adapters' unit among the units of a layer's block.
const UNIT: usize = 1;

impl Lora {
    /// Returns the ranks of adapters, projection by projection.
    pub fn ranks(&self) -> impl Iterator<Item = Vec<usize>> {
        self.adapters
            .iter()
            .map(|projection| projection.iter().map(|adapter| adapter.shape.rank as usize).collect())
    }

    /// Returns the columns of the widest adapter's output.
    pub fn widest(&self) -> i64 {
        self.adapters.iter().flatten().map(|adapter| adapter.columns).max().unwrap_or(0)
    }

    /// Returns true if adapters have magnitudes.
    pub fn is_dora(&self) -> bool {
        self.dora
    }

    /// Returns the adapters of one of `peers`, which has this part of each projection's matrix.
    pub fn part(&self, of: impl Fn(Projection) -> Cut, peers: &Arc<dyn Peers>) -> Lora {
        let mut part = Lora { peers: Some(peers.clone()), ..self.clone() };
        for projection in Projection::ALL {
            let adapters = part.adapters.get_mut(projection as usize).into_iter().flatten();
            let Cut::Rows(own) = of(projection) else {
                // Masks of other columns are others.
                let salt = (peers.rank() as u32) << RANK_BITS;
                adapters.for_each(|it| it.salt ^= salt);
                continue;
            };
            for adapter in adapters {
                let len = |range: Range<i64>| within(&own, &range).iter().map(|it| it.end - it.start).sum();
                let (start, end) = (adapter.start, adapter.start + adapter.columns);
                (adapter.start, adapter.columns) = (len(0..start), len(start..end));
            }
        }
        part
    }

    /// Returns a rank's part of the parameter `param` of the adapters' unit, which is that of `experts` matrices.
    pub fn cut(&self, param: usize, experts: i64, of: impl Fn(Projection) -> Cut) -> Cut {
        let all =
            Projection::ALL.map(|projection| self.at(projection).iter().map(move |it| (projection, it)));
        for (projection, adapter) in all.into_iter().flatten() {
            match of(projection) {
                Cut::Rows(own) if adapter.b == param => {
                    let rows = within(&own, &(adapter.start..adapter.start + adapter.columns));
                    let of_expert = |expert: i64| {
                        let start = expert * adapter.columns - adapter.start;
                        rows.iter().map(move |it| start + it.start..start + it.end)
                    };
                    return Cut::Rows((0..experts).flat_map(of_expert).collect());
                }
                Cut::Columns(own) if adapter.a == param => return Cut::Columns(own),
                _ => {}
            }
        }
        Cut::Whole
    }

    /// Returns true if a projection has adapters.
    pub fn is_at(&self, projection: Projection) -> bool {
        !self.at(projection).is_empty()
    }

    /// Returns true if a projection's adapters have magnitudes: the matrix's bias is then added after them.
    pub fn scales(&self, projection: Projection) -> bool {
        self.dora && self.is_at(projection)
    }

    /// Returns true if there is dropout in training.
    pub fn drops(&self) -> bool {
        self.dropout > 0.0
    }

    fn at(&self, projection: Projection) -> &[Adapter] {
        self.adapters.get(projection as usize).map_or(&[], Vec::as_slice)
    }

    /// Lists the products at a matrix of an expressed layer: the indices of A and B, and the scale.
    pub fn products(&self, matrix: usize) -> impl Iterator<Item = (usize, usize, f64)> {
        let adapters = self.adapters.get(matrix).into_iter().flatten();
        adapters.map(|adapter| (adapter.a, adapter.b, adapter.shape.scale))
    }

    /// Adds the adapters' effect to the matrix product `y` `[N, out]` of `x` `[N, in]`.
    pub fn forward_(
        &self,
        projection: Projection,
        weights: &Weights,
        x: &Tensor,
        drops: Option<AdapterDropout>,
        math: Math,
        y: &mut Tensor,
    ) -> Result<()> {
        for adapter in self.at(projection) {
            let seen = self.dropped(adapter, x, drops)?;
            let z = self.inner(adapter, weights, &seen, math)?;
            let b = weights.get(UNIT, adapter.b);
            let mut y = y.f_narrow(1, adapter.start, adapter.columns)?;
            match adapter.factors(weights)? {
                Some(factors) if self.drops() && drops.is_some() => {
                    let mut product = math.linear(&seen, &adapter.rows(weights)?, None)?;
                    drop(y.f_add_(&product.f_mul_(&factors.f_sub_scalar(1.0)?)?)?);
                    drop(y.f_add_(&math.linear(&z, b, None)?.f_mul_(&factors)?)?);
                }
                Some(factors) => drop(math.add_linear(&mut y, &z, b, false)?.f_mul_(&factors)?),
                None => drop(math.add_linear(&mut y, &z, b, false)?),
            }
        }
        Ok(())
    }

    /// Like [`Self::forward_`], with prepared weights, without dropout and without allocating memory.
    pub fn forward_in_place(
        &self,
        projection: Projection,
        weights: &Weights,
        x: &Tensor,
        scratch: &Scratch,
        math: Math,
        y: &Tensor,
    ) -> Result<()> {
        for adapter in self.at(projection) {
            let (a, b) = (weights.get(UNIT, adapter.a), weights.get(UNIT, adapter.b));
            let mut y = y.f_narrow(1, adapter.start, adapter.columns)?;
            let AdapterShape { rank, scale, .. } = adapter.shape;
            let mut between = scratch.between(rank)?;
            match math {
                Math::Fast | Math::EightBits => {
                    drop(x.f_mm_out(&between, &a.f_tr()?)?.f_mul_scalar_(scale)?);
                    drop(y.f_addmm_(&between, &b.f_tr()?)?);
                }
                Math::ByRows => {
                    ops::linear_by_rows_into(x, a, None, &mut between)?;
                    drop(between.f_mul_scalar_(scale)?);
                    let mut product = scratch.product(adapter.columns)?;
                    ops::linear_by_rows_into(&between, b, None, &mut product)?;
                    drop(y.f_add_(&product)?);
                }
            }
            if let Some(factors) = adapter.factors(weights)? {
                drop(y.f_mul_(&factors)?);
            }
        }
        Ok(())
    }

    /// Turns the gradient `dy` of the output of [`Self::forward_`] for the product with `matrix` into that of
    /// `x`.
    pub fn input_backward(
        &self,
        projection: Projection,
        weights: &Weights,
        matrix: &Tensor,
        dy: &Tensor,
        drops: Option<AdapterDropout>,
    ) -> Result<(Tensor, InnerGrads)> {
        let drops = drops.filter(|_| self.drops());
        let scaled = self.scaled(projection, weights, dy)?;
        let dsum = scaled.as_ref().map_or(dy, |scaled| &scaled.dsum);
        // With dropout, magnitudes affect the matrix's part only through the adapters' dropped input.
        let mut dx = if drops.is_some() { dy } else { dsum }.f_mm(matrix)?;
        let inner = self.at(projection).iter().map(|adapter| {
            let of_adapter = |it: &Tensor| it.f_narrow(1, adapter.start, adapter.columns);
            let dsum = of_adapter(dsum)?;
            let dz = dsum.f_mm(weights.get(UNIT, adapter.b))?.f_mul_scalar(adapter.shape.scale)?;
            let a = weights.get(UNIT, adapter.a);
            if drops.is_none() {
                drop(dx.f_addmm_(&dz, a)?);
                return Ok(dz);
            }
            let mut dseen = dz.f_mm(a)?;
            if scaled.is_some() {
                drop(dseen.f_addmm_(&dsum.f_sub(&of_adapter(dy)?)?, &adapter.rows(weights)?)?);
            }
            drop(dx.f_add_(&self.dropped(adapter, &dseen, drops)?)?);
            Ok(dz)
        });
        let mut inner = inner.collect::<Result<Vec<_>>>()?;
        if !projection.reads_part() {
            self.sum_parts_(&mut inner)?;
        }
        Ok((dx, InnerGrads { inner, scaled }))
    }

    /// Writes the adapters' gradients.
    pub fn weight_backward(
        &self,
        projection: Projection,
        weights: &Weights,
        grads: &mut Grads,
        (dy, x): (&Tensor, &Tensor),
        drops: Option<AdapterDropout>,
        inner_grads: InnerGrads,
    ) -> Result<()> {
        let dsum = inner_grads.scaled.as_ref().map_or(dy, |scaled| &scaled.dsum);
        for (number, (adapter, dz)) in self.at(projection).iter().zip(&inner_grads.inner).enumerate() {
            let seen = self.dropped(adapter, x, drops)?;
            let mut z = self.inner(adapter, weights, &seen, Math::Fast)?;
            if projection.reads_part() {
                self.sum_parts_(std::slice::from_mut(&mut z))?;
            }
            let dsum = dsum.f_narrow(1, adapter.start, adapter.columns)?;
            grads.put_linear(UNIT, adapter.b, &dsum, &z)?;
            grads.put_linear(UNIT, adapter.a, dz, &seen)?;
            if let Some(scaled) = &inner_grads.scaled {
                adapter.magnitude_backward(weights, grads, (dy, &seen, &z), &scaled.norms[number])?;
            }
        }
        Ok(())
    }

    /// Replaces each rank's part of rows between A and B by the sum over the ranks that share the adapters, if there are
    /// any.
    fn sum_parts_(&self, between: &mut [Tensor]) -> Result<()> {
        let Some(peers) = &self.peers else { return Ok(()) };
        between.iter_mut().try_for_each(|it| peers.sum_(it))
    }

    /// Applies an adapter's dropout to its input `x`, or to the gradient of that input.
    fn dropped(&self, adapter: &Adapter, x: &Tensor, drops: Option<AdapterDropout>) -> Result<Tensor> {
        let Some(AdapterDropout { keys }) = drops.filter(|_| self.drops()) else {
            return Ok(x.shallow_clone());
        };
        Ok(ops::dropout(x, ops::Dropout { keys, salt: adapter.salt, probability: self.dropout })?)
    }

    /// Returns `x A^T` `[N, rank]`, scaled.
    fn inner(&self, adapter: &Adapter, weights: &Weights, x: &Tensor, math: Math) -> Result<Tensor> {
        let z = math.linear(x, weights.get(UNIT, adapter.a), None)?;
        Ok(z.f_mul_scalar(adapter.shape.scale)?)
    }
}
