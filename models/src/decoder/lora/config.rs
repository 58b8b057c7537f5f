//! Configuration of low-rank adapters: matrices, shapes, and names of the tensors.

use regex::Regex;

use super::super::DecoderConfig;
use super::targets::{LoraTarget, LoraTargets};
use crate::Result;
use crate::error::check_config;
use crate::model::{Init, ParamSpec};

/// Configuration of adapters: the matrices of each layer with an adapter, and the adapters' shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Inner width of the product.
    pub rank: i64,
    /// Numerator of the product's scale, alpha / rank.
    pub alpha: f64,
    /// True if the scale is alpha / sqrt(rank) instead (rsLoRA).
    pub rslora: bool,
    /// Matrices with another rank; the first matching pattern counts.
    pub rank_pattern: Vec<(ModulePattern, i64)>,
    /// Matrices with another alpha; the first matching pattern counts.
    pub alpha_pattern: Vec<(ModulePattern, f64)>,
    /// Matrices with an adapter.
    pub targets: LoraTargets,
    /// True if adapters are weight-decomposed (DoRA, Liu et al., 2024). They have magnitudes m, and W x + s B
    /// A x is multiplied by m / ||W + s B A||, row by row.
    pub dora: bool,
    /// Fraction of an adapter's input that is dropped in training, at least 0 and below 1.
    pub dropout: f64,
}

/// Prefix of adapter tensor names.
pub(crate) const PREFIX: &str = "base_model.model.";

/// A pattern for matrix names in PEFT's syntax: a regular expression that matches the whole name, or its end
/// after a dot. `q_proj` and `layers.0.self_attn.q_proj` match `model.layers.0.self_attn.q_proj`.
#[derive(Clone, Debug)]
pub struct ModulePattern {
    written: String,
    compiled: Regex,
}

impl ModulePattern {
    /// Compiles a pattern. Returns `None` for an invalid regular expression.
    pub fn new(written: &str) -> Option<ModulePattern> {
        let compiled = Regex::new(&format!(r"^(?:.*\.)?(?:{written})$")).ok()?;
        Some(ModulePattern { written: written.to_owned(), compiled })
    }

    /// Returns the pattern as written.
    pub fn as_str(&self) -> &str {
        &self.written
    }

    /// Returns true if the pattern matches the matrix `module`, such as `model.layers.0.mlp.up_proj`.
    pub fn matches(&self, module: &str) -> bool {
        self.compiled.is_match(module)
    }
}

impl PartialEq for ModulePattern {
    fn eq(&self, other: &ModulePattern) -> bool {
        self.written == other.written
    }
}

/// The shape of a matrix's adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterShape {
    /// Inner width of the product.
    pub rank: i64,
    /// Factor of the product.
    pub scale: f64,
    /// True if the adapter has magnitudes.
    pub dora: bool,
}

impl LoraConfig {
    /// Creates plain adapters of one rank and alpha for these matrices of all layers, without dropout.
    pub fn new(rank: i64, alpha: f64, targets: Vec<LoraTarget>) -> LoraConfig {
        LoraConfig {
            rank,
            alpha,
            rslora: false,
            rank_pattern: vec![],
            alpha_pattern: vec![],
            targets: LoraTargets::Everywhere(targets),
            dora: false,
            dropout: 0.0,
        }
    }

    /// Returns the matrices with an adapter in a model of this shape, such as `model.layers.0.mlp.up_proj`.
    pub fn modules(&self, config: &DecoderConfig) -> Vec<String> {
        let of_layer =
            |layer| self.targets.of(layer).iter().flat_map(move |target| target.modules_in(config, layer));
        (0..config.num_hidden_layers).flat_map(of_layer).collect()
    }

    /// Returns the shape of the adapter of matrix `module`, such as `model.layers.0.mlp.up_proj`.
    pub(crate) fn shape_of(&self, module: &str) -> AdapterShape {
        let rank = value_of(&self.rank_pattern, module).unwrap_or(self.rank);
        let alpha = value_of(&self.alpha_pattern, module).unwrap_or(self.alpha);
        AdapterShape { rank, scale: lora_scale(rank, alpha, self.rslora), dora: self.dora }
    }

    /// Checks that a model of this shape can have the adapters.
    pub(crate) fn validate(&self, config: &DecoderConfig) -> Result<()> {
        check_product(self.rank, self.alpha)?;
        self.rank_pattern.iter().try_for_each(|(_, rank)| check_product(*rank, self.alpha))?;
        self.alpha_pattern.iter().try_for_each(|(_, alpha)| check_product(self.rank, *alpha))?;
        check_config((0.0..1.0).contains(&self.dropout), "lora.dropout", || {
            format!("is {}, must be at least 0 and below 1", self.dropout)
        })?;
        for (field, is_set) in [("lora.dora", self.dora), ("lora.dropout", self.dropout > 0.0)] {
            check_config(config.expressed.is_none() || !is_set, field, || {
                "is set, but a layer that libtorch differentiates has plain adapters only: leave it out"
                    .to_owned()
            })?;
        }
        self.targets.validate(config)?;
        self.validate_experts(config)
    }

    /// Checks adapters of experts, which PEFT restricts alike.
    fn validate_experts(&self, config: &DecoderConfig) -> Result<()> {
        let Some(module) = self.targets.first_of_experts(config) else { return Ok(()) };
        for (field, is_set) in [("lora.dora", self.dora), ("lora.dropout", self.dropout > 0.0)] {
            check_config(!is_set, field, || {
                format!("is set, but adapters of experts, such as `{module}`, are plain ones: leave it out")
            })?;
        }
        let unequal = self.unequal_experts(config);
        check_config(unequal.is_none(), "lora.rank_pattern", || {
            let [one, other] = unequal.unwrap_or_default();
            format!("or `alpha_pattern` tells `{one}` from `{other}`, but all experts have one shape")
        })
    }

    /// Returns two experts' matrices of one kind and layer to which patterns give other shapes, if there are any.
    pub fn unequal_experts(&self, config: &DecoderConfig) -> Option<[String; 2]> {
        let of_layer =
            |layer| self.targets.of(layer).iter().map(move |target| target.modules_in(config, layer));
        (0..config.num_hidden_layers).flat_map(of_layer).find_map(|mut modules| {
            let first = self.shape_of(&modules[0]);
            let other = modules.iter().position(|module| self.shape_of(module) != first)?;
            Some([modules.swap_remove(other), modules.swap_remove(0)])
        })
    }
}

/// Returns the scale of a product of this rank and alpha, with or without rsLoRA.
pub fn lora_scale(rank: i64, alpha: f64, rslora: bool) -> f64 {
    let rank = rank as f64;
    alpha / if rslora { rank.sqrt() } else { rank }
}

fn value_of<T: Copy>(patterns: &[(ModulePattern, T)], module: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| pattern.matches(module)).map(|(_, value)| *value)
}

/// Checks that a rank and an alpha are valid.
pub(crate) fn check_product(rank: i64, alpha: f64) -> Result<()> {
    check_config(rank > 0, "lora.rank", || format!("is {rank}, must be at least 1"))?;
    let holds = alpha > 0.0 && alpha.is_finite();
    check_config(holds, "lora.alpha", || format!("is {alpha}, must be a positive number"))
}

/// Returns the names of the tensors A and B of the adapter of weight `weight`, such as
/// `model.layers.0.mlp.up_proj.weight`.
pub(crate) fn names(weight: &str) -> [String; 2] {
    let module = weight.strip_suffix(".weight").unwrap_or(weight);
    ["A", "B"].map(|which| format!("{PREFIX}{module}.lora_{which}.weight"))
}

const MAGNITUDE: &str = ".lora_magnitude_vector";

/// Returns the name of the magnitudes of the adapter of weight `weight`.
pub(crate) fn magnitude_name(weight: &str) -> String {
    format!("{PREFIX}{}{MAGNITUDE}", weight.strip_suffix(".weight").unwrap_or(weight))
}

/// Returns true if the parameter belongs to an adapter.
pub(crate) fn is_adapter(spec: &ParamSpec) -> bool {
    spec.name.starts_with(PREFIX)
}

/// Returns true if the parameter is the B of a product B A.
pub(crate) fn is_second(spec: &ParamSpec) -> bool {
    is_adapter(spec) && spec.name.ends_with(".lora_B.weight")
}

/// If the parameter holds magnitudes, returns the name and the columns of their weight.
pub(crate) fn matrix_of_magnitudes(spec: &ParamSpec) -> Option<(String, usize)> {
    let Init::RowNorms { columns } = spec.init else { return None };
    let module = spec.name.strip_prefix(PREFIX)?.strip_suffix(MAGNITUDE)?;
    Some((format!("{module}.weight"), columns as usize))
}
