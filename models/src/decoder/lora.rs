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

use anyroll_backends::ops;
use regex::Regex;
use tch::Tensor;

use super::{DecoderConfig, math::Math, recorded::Scratch};
use crate::Result;
use crate::error::check_config;
use crate::model::{Grads, Init, ParamSpec, Part, Unit, Weights};

/// Which matrices of every layer have an adapter, and of which rank.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// The inner width of the product.
    pub rank: i64,
    /// The product is multiplied by alpha / rank.
    pub alpha: f64,
    /// Whether it is multiplied by alpha / sqrt(rank) instead.
    pub rslora: bool,
    /// Matrices with ranks of their own; the first pattern that matches counts.
    pub rank_pattern: Vec<(ModulePattern, i64)>,
    /// Matrices with alphas of their own, in the same way.
    pub alpha_pattern: Vec<(ModulePattern, f64)>,
    /// At least one, each once.
    pub targets: Vec<LoraTarget>,
    /// The part of an adapter's input that is dropped in training, from 0 to below 1.
    pub dropout: f64,
}

/// A matrix of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoraTarget {
    /// The projection to queries.
    Q,
    /// To keys.
    K,
    /// To values.
    V,
    /// Of attention's output.
    O,
    /// The MLP's gate.
    Gate,
    /// The MLP's other input.
    Up,
    /// The MLP's output.
    Down,
}

/// What the names of adapters' tensors begin with.
pub(crate) const PREFIX: &str = "base_model.model.";

impl LoraTarget {
    /// All of them.
    pub const ALL: [LoraTarget; 7] = [
        LoraTarget::Q,
        LoraTarget::K,
        LoraTarget::V,
        LoraTarget::O,
        LoraTarget::Gate,
        LoraTarget::Up,
        LoraTarget::Down,
    ];

    /// Its name in a layer, as `self_attn.q_proj`.
    pub fn name(self) -> &'static str {
        match self {
            LoraTarget::Q => "self_attn.q_proj",
            LoraTarget::K => "self_attn.k_proj",
            LoraTarget::V => "self_attn.v_proj",
            LoraTarget::O => "self_attn.o_proj",
            LoraTarget::Gate => "mlp.gate_proj",
            LoraTarget::Up => "mlp.up_proj",
            LoraTarget::Down => "mlp.down_proj",
        }
    }
}

/// A pattern of matrices, as PEFT has them: a regular expression for the end of a name, from a dot on, or for all of it.
/// `q_proj` and `layers.0.self_attn.q_proj` match `model.layers.0.self_attn.q_proj`.
#[derive(Clone, Debug)]
pub struct ModulePattern {
    written: String,
    compiled: Regex,
}

impl ModulePattern {
    /// The pattern, if it is one.
    pub fn new(written: &str) -> Option<ModulePattern> {
        let compiled = Regex::new(&format!(r"^(?:.*\.)?(?:{written})$")).ok()?;
        Some(ModulePattern { written: written.to_owned(), compiled })
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.written
    }

    /// Whether it is one of the matrix `module`, as `model.layers.0.mlp.up_proj`.
    pub fn matches(&self, module: &str) -> bool {
        self.compiled.is_match(module)
    }
}

impl PartialEq for ModulePattern {
    fn eq(&self, other: &ModulePattern) -> bool {
        self.written == other.written
    }
}

/// The inner width of an adapter's product, and what it is multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterShape {
    /// The inner width.
    pub rank: i64,
    /// The factor.
    pub scale: f64,
}

impl LoraConfig {
    /// Adapters of one rank and alpha, without dropout.
    pub fn new(rank: i64, alpha: f64, targets: Vec<LoraTarget>) -> LoraConfig {
        let (rank_pattern, alpha_pattern) = (vec![], vec![]);
        LoraConfig { rank, alpha, rslora: false, rank_pattern, alpha_pattern, targets, dropout: 0.0 }
    }

    /// The adapter of the matrix `module`, as `model.layers.0.mlp.up_proj`.
    pub(crate) fn shape_of(&self, module: &str) -> AdapterShape {
        let rank = value_of(&self.rank_pattern, module).unwrap_or(self.rank);
        let alpha = value_of(&self.alpha_pattern, module).unwrap_or(self.alpha);
        AdapterShape { rank, scale: lora_scale(rank, alpha, self.rslora) }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        check_product(self.rank, self.alpha)?;
        self.rank_pattern.iter().try_for_each(|(_, rank)| check_product(*rank, self.alpha))?;
        self.alpha_pattern.iter().try_for_each(|(_, alpha)| check_product(self.rank, *alpha))?;
        check_config((0.0..1.0).contains(&self.dropout), "lora.dropout", || {
            format!("is {}, must be from 0 to below 1", self.dropout)
        })?;
        check_config(!self.targets.is_empty(), "lora.targets", || "is empty, must name a matrix".to_owned())
    }
}

/// What a product of this rank and alpha is multiplied by, with rsLoRA or without.
pub fn lora_scale(rank: i64, alpha: f64, rslora: bool) -> f64 {
    let rank = rank as f64;
    alpha / if rslora { rank.sqrt() } else { rank }
}

fn value_of<T: Copy>(patterns: &[(ModulePattern, T)], module: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| pattern.matches(module)).map(|(_, value)| *value)
}

/// Refuses a rank and an alpha that make no product.
pub(crate) fn check_product(rank: i64, alpha: f64) -> Result<()> {
    check_config(rank > 0, "lora.rank", || format!("is {rank}, must be at least 1"))?;
    let holds = alpha > 0.0 && alpha.is_finite();
    check_config(holds, "lora.alpha", || format!("is {alpha}, must be a positive number"))
}

/// The names of the two tensors, A and B, beside the weight `name` of a checkpoint, as
/// `model.layers.0.mlp.up_proj.weight`.
pub(crate) fn names(weight: &str) -> [String; 2] {
    let module = weight.strip_suffix(".weight").unwrap_or(weight);
    ["A", "B"].map(|which| format!("{PREFIX}{module}.lora_{which}.weight"))
}

/// Whether a parameter belongs to an adapter.
pub(crate) fn is_adapter(spec: &ParamSpec) -> bool {
    spec.name.starts_with(PREFIX)
}

/// Whether a parameter is the B of a product B A.
pub(crate) fn is_second(spec: &ParamSpec) -> bool {
    is_adapter(spec) && spec.name.ends_with(".lora_B.weight")
}

/// Where the adapters of a layer lie in its second unit.
#[derive(Clone, Debug)]
pub(super) struct Lora {
    dropout: f64,
    pub qkv: Vec<Adapter>,
    pub o: Vec<Adapter>,
    pub gate_up: Vec<Adapter>,
    pub down: Vec<Adapter>,
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

/// Adapters of a layer that have their input in common.
pub(super) type Site = fn(&Lora) -> &[Adapter];

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
    let mut of = Lora { dropout: lora.dropout, qkv: vec![], o: vec![], gate_up: vec![], down: vec![] };
    for &target in &lora.targets {
        let (site, start, inputs, outputs) = match target {
            LoraTarget::Q => (&mut of.qkv, 0, hidden, q),
            LoraTarget::K => (&mut of.qkv, q, hidden, kv),
            LoraTarget::V => (&mut of.qkv, q + kv, hidden, kv),
            LoraTarget::O => (&mut of.o, 0, q, hidden),
            LoraTarget::Gate => (&mut of.gate_up, 0, hidden, intermediate),
            LoraTarget::Up => (&mut of.gate_up, intermediate, hidden, intermediate),
            LoraTarget::Down => (&mut of.down, 0, intermediate, hidden),
        };
        let (a, module) = (params.len(), format!("{layer}.{}", target.name()));
        let shape = lora.shape_of(&module);
        params.extend(pair(&format!("{module}.weight"), shape.rank, inputs, outputs));
        site.push(Adapter { a, b: a + 1, start, columns: outputs, shape });
    }
    (params, of)
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
        let sites = [&self.qkv, &self.o, &self.gate_up, &self.down];
        sites.into_iter().flatten().map(|adapter| adapter.shape.rank as usize)
    }

    /// Whether values are dropped in training.
    pub fn drops(&self) -> bool {
        self.dropout > 0.0
    }

    /// Adds the products for `x` `[N, in]` to the matrix product `y` `[N, out]`.
    pub fn forward_(
        &self,
        site: &[Adapter],
        weights: &Weights,
        x: &Tensor,
        drops: Option<Drops>,
        math: Math,
        y: &mut Tensor,
    ) -> Result<()> {
        for adapter in site {
            let z = self.inner(adapter, weights, &self.dropped(adapter, x, drops)?, math)?;
            let mut y = y.f_narrow(1, adapter.start, adapter.columns)?;
            drop(math.add_linear(&mut y, &z, weights.get(UNIT, adapter.b), false)?);
        }
        Ok(())
    }

    /// The same without dropping anything and in no other memory.
    pub fn forward_in_place(
        &self,
        site: &[Adapter],
        weights: &Weights,
        x: &Tensor,
        scratch: &Scratch,
        math: Math,
        y: &Tensor,
    ) -> Result<()> {
        for adapter in site {
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
        site: &[Adapter],
        weights: &Weights,
        dy: &Tensor,
        drops: Option<Drops>,
        dx: &mut Tensor,
    ) -> Result<Vec<Tensor>> {
        let between = site.iter().map(|adapter| {
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
        site: &[Adapter],
        weights: &Weights,
        grads: &mut Grads,
        (dy, x): (&Tensor, &Tensor),
        drops: Option<Drops>,
        between: &[Tensor],
    ) -> Result<()> {
        for (adapter, dz) in site.iter().zip(between) {
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
