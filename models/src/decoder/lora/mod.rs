//! Low-rank adapters (Hu et al., 2021): beside a frozen matrix W stands a product of two small ones that is trained.
//!
//! ```text
//! y = x W^T + (alpha / rank) x A^T B^T      A [rank, in], B [out, rank]
//! ```
//!
//! With `rslora` (Kalajdzievski, 2023) the product is multiplied by alpha / sqrt(rank), whose gradients do not vanish in
//! large ranks. Matrices may have ranks and alphas of their own.
//!
//! In training the adapters may see their input with some of its values dropped, each adapter with others; the matrix
//! beside it sees all of it. A mask is made again wherever it is needed ([`ops::dropout()`]).
//!
//! Names are those of PEFT's files. The adapters of a layer are a unit of their own, so that the layer's other weights
//! can be frozen as a whole. Backward runs `x A^T` again, which costs less than keeping it would hold.

mod config;

use anyroll_backends::ops;
use tch::Tensor;

use super::{DecoderConfig, math::Math, recorded::Scratch};
use crate::Result;
use crate::model::{Grads, Init, ParamSpec, Part, Unit, Weights};
pub use config::{AdapterShape, LoraConfig, LoraTarget, ModulePattern, lora_scale};
pub(crate) use config::{PREFIX, check_product, is_adapter, is_second, names};

/// Where the adapters of a layer lie in its second unit.
#[derive(Clone, Debug)]
pub(super) struct Lora {
    dropout: f64,
    /// Of each [`Site`].
    adapters: [Vec<Adapter>; 4],
}

/// A block's products with a matrix. Adapters at one of them have their input in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Site {
    Qkv,
    O,
    GateUp,
    Down,
}

/// Which rows a layer sees in training, where adapters drop some of their values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drops<'a> {
    /// See [`ops::Dropout::keys`].
    pub keys: &'a Tensor,
    pub layer: usize,
}

/// One adapter: its two parameters, and the columns of the (fused) output that it adds to.
#[derive(Clone, Debug)]
pub(super) struct Adapter {
    a: usize,
    b: usize,
    start: i64,
    columns: i64,
    shape: AdapterShape,
}

/// The unit of each layer, and where its adapters lie.
pub(super) fn layout(config: &DecoderConfig, lora: &LoraConfig) -> (Vec<Unit>, Vec<Lora>) {
    let layers = (0..config.num_hidden_layers).map(|layer| {
        let name = format!("model.layers.{layer}");
        let (params, adapters) = params(config, lora, &name);
        (Unit { name: format!("{name}.lora"), params, trainable: true }, adapters)
    });
    layers.unzip()
}

fn params(config: &DecoderConfig, lora: &LoraConfig, layer: &str) -> (Vec<ParamSpec>, Lora) {
    let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
    let q = config.num_attention_heads * config.head_dim;
    let kv = config.num_key_value_heads * config.head_dim;
    let mut params = Vec::new();
    let mut adapters = [const { Vec::new() }; 4];
    for &target in &lora.targets {
        let (site, start, inputs, outputs) = match target {
            LoraTarget::Q => (Site::Qkv, 0, hidden, q),
            LoraTarget::K => (Site::Qkv, q, hidden, kv),
            LoraTarget::V => (Site::Qkv, q + kv, hidden, kv),
            LoraTarget::O => (Site::O, 0, q, hidden),
            LoraTarget::Gate => (Site::GateUp, 0, hidden, intermediate),
            LoraTarget::Up => (Site::GateUp, intermediate, hidden, intermediate),
            LoraTarget::Down => (Site::Down, 0, intermediate, hidden),
        };
        let (a, module) = (params.len(), format!("{layer}.{}", target.name()));
        let shape = lora.shape_of(&module);
        params.extend(pair(&format!("{module}.weight"), shape.rank, inputs, outputs));
        adapters[site as usize].push(Adapter { a, b: a + 1, start, columns: outputs, shape });
    }
    (params, Lora { dropout: lora.dropout, adapters })
}

/// A and B beside the weight `name` of `[outputs, inputs]`.
pub(crate) fn pair(name: &str, rank: i64, inputs: i64, outputs: i64) -> [ParamSpec; 2] {
    let [a, b] = names(name);
    // As PEFT begins: the product is 0, and its first gradient goes to B alone.
    let bound = 1.0 / (inputs as f64).sqrt();
    [matrix(a, rank, inputs, Init::Uniform { bound }), matrix(b, outputs, rank, Init::Zeros)]
}

fn matrix(name: String, rows: i64, columns: i64, init: Init) -> ParamSpec {
    let parts = vec![Part { name: name.clone(), rows }];
    ParamSpec { name, shape: vec![rows, columns], parts, init, decay: true }
}

/// The adapters' unit among those of a layer's block.
const UNIT: usize = 1;

impl Lora {
    /// The rank of each adapter.
    pub fn ranks(&self) -> impl Iterator<Item = usize> {
        self.adapters.iter().flatten().map(|adapter| adapter.shape.rank as usize)
    }

    /// Whether there are some at a site.
    pub fn is_at(&self, site: Site) -> bool {
        !self.at(site).is_empty()
    }

    fn at(&self, site: Site) -> &[Adapter] {
        &self.adapters[site as usize]
    }

    /// Whether values are dropped in training.
    pub fn drops(&self) -> bool {
        self.dropout > 0.0
    }

    /// Adds the products for `x` `[N, in]` to the matrix product `y` `[N, out]`.
    pub fn forward_(
        &self,
        site: Site,
        weights: &Weights,
        x: &Tensor,
        drops: Option<Drops>,
        math: Math,
        y: &mut Tensor,
    ) -> Result<()> {
        for adapter in self.at(site) {
            let z = self.inner(adapter, weights, &self.dropped(adapter, x, drops)?, math)?;
            let mut y = y.f_narrow(1, adapter.start, adapter.columns)?;
            drop(math.add_linear(&mut y, &z, weights.get(UNIT, adapter.b), false)?);
        }
        Ok(())
    }

    /// The same without dropping anything and in no other memory.
    pub fn forward_in_place(
        &self,
        site: Site,
        weights: &Weights,
        x: &Tensor,
        scratch: &Scratch,
        math: Math,
        y: &Tensor,
    ) -> Result<()> {
        for adapter in self.at(site) {
            let (a, b) = (weights.get(UNIT, adapter.a), weights.get(UNIT, adapter.b));
            let mut y = y.f_narrow(1, adapter.start, adapter.columns)?;
            let AdapterShape { rank, scale } = adapter.shape;
            let mut between = scratch.between(rank)?;
            match math {
                Math::Fast => {
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
        }
        Ok(())
    }

    /// Adds the products' part to `dx`, the gradient of `x`. Returns the gradients of what is between A and B, for
    /// [`Self::weight_backward`], which needs `x` itself.
    pub fn input_backward_(
        &self,
        site: Site,
        weights: &Weights,
        dy: &Tensor,
        drops: Option<Drops>,
        dx: &mut Tensor,
    ) -> Result<Vec<Tensor>> {
        let between = self.at(site).iter().map(|adapter| {
            let dy = dy.f_narrow(1, adapter.start, adapter.columns)?;
            let dz = dy.f_mm(weights.get(UNIT, adapter.b))?.f_mul_scalar(adapter.shape.scale)?;
            let a = weights.get(UNIT, adapter.a);
            match drops.filter(|_| self.drops()) {
                Some(_) => drop(dx.f_add_(&self.dropped(adapter, &dz.f_mm(a)?, drops)?)?),
                None => drop(dx.f_addmm_(&dz, a)?),
            }
            Ok(dz)
        });
        between.collect()
    }

    /// Writes the gradients of A and B.
    pub fn weight_backward(
        &self,
        site: Site,
        weights: &Weights,
        grads: &mut Grads,
        (dy, x): (&Tensor, &Tensor),
        drops: Option<Drops>,
        between: &[Tensor],
    ) -> Result<()> {
        for (adapter, dz) in self.at(site).iter().zip(between) {
            let dy = dy.f_narrow(1, adapter.start, adapter.columns)?;
            let x = self.dropped(adapter, x, drops)?;
            grads.put_linear(UNIT, adapter.b, &dy, &self.inner(adapter, weights, &x, Math::Fast)?)?;
            grads.put_linear(UNIT, adapter.a, dz, &x)?;
        }
        Ok(())
    }

    /// What an adapter sees of its input `x`, and of what it sees the gradient of `x`.
    fn dropped(&self, adapter: &Adapter, x: &Tensor, drops: Option<Drops>) -> Result<Tensor> {
        let Some(Drops { keys, layer }) = drops.filter(|_| self.drops()) else {
            return Ok(x.shallow_clone());
        };
        let salt = (layer * 2 * LoraTarget::ALL.len() + adapter.a) as u32;
        Ok(ops::dropout(x, ops::Dropout { keys, salt, probability: self.dropout })?)
    }

    /// `x A^T` `[N, rank]`, scaled.
    fn inner(&self, adapter: &Adapter, weights: &Weights, x: &Tensor, math: Math) -> Result<Tensor> {
        let z = math.linear(x, weights.get(UNIT, adapter.a), None)?;
        Ok(z.f_mul_scalar(adapter.shape.scale)?)
    }
}
