//! Which matrices have adapters, of which shape, and under which names.

use regex::Regex;

use super::super::DecoderConfig;
use super::targets::{LoraTarget, LoraTargets};
use crate::Result;
use crate::error::check_config;
use crate::model::{Init, ParamSpec};

/// Which matrices of which layers have an adapter, and of which shape.
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
    /// The matrices that have one.
    pub targets: LoraTargets,
    /// Whether adapters are weight-decomposed (DoRA, Liu et al., 2024): they have magnitudes m, and W x + s B A x is
    /// multiplied by m / ||W + s B A||, row by row.
    pub dora: bool,
    /// The part of an adapter's input that is dropped in training, from 0 to below 1.
    pub dropout: f64,
}

/// What the names of adapters' tensors begin with.
pub(crate) const PREFIX: &str = "base_model.model.";

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

/// An adapter beside a matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterShape {
    /// The inner width of its product.
    pub rank: i64,
    /// What the product is multiplied by.
    pub scale: f64,
    /// Whether it has magnitudes.
    pub dora: bool,
}

impl LoraConfig {
    /// Plain adapters of one rank and alpha beside these matrices of all layers, without dropout.
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

    /// The matrices that have an adapter in a model of so many layers, as `model.layers.0.mlp.up_proj`.
    pub fn modules(&self, layers: usize) -> Vec<String> {
        let of_layer = |layer| self.targets.of(layer).iter().map(move |target| target.module(layer));
        (0..layers).flat_map(of_layer).collect()
    }

    /// The adapter of the matrix `module`, as `model.layers.0.mlp.up_proj`.
    pub(crate) fn shape_of(&self, module: &str) -> AdapterShape {
        let rank = value_of(&self.rank_pattern, module).unwrap_or(self.rank);
        let alpha = value_of(&self.alpha_pattern, module).unwrap_or(self.alpha);
        AdapterShape { rank, scale: lora_scale(rank, alpha, self.rslora), dora: self.dora }
    }

    /// Refuses what a model of this shape cannot have.
    pub(crate) fn validate(&self, config: &DecoderConfig) -> Result<()> {
        check_product(self.rank, self.alpha)?;
        self.rank_pattern.iter().try_for_each(|(_, rank)| check_product(*rank, self.alpha))?;
        self.alpha_pattern.iter().try_for_each(|(_, alpha)| check_product(self.rank, *alpha))?;
        check_config((0.0..1.0).contains(&self.dropout), "lora.dropout", || {
            format!("is {}, must be from 0 to below 1", self.dropout)
        })?;
        self.targets.validate(config)
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

const MAGNITUDE: &str = ".lora_magnitude_vector";

/// The name of the magnitudes of the adapter beside the weight `name`.
pub(crate) fn magnitude_name(weight: &str) -> String {
    format!("{PREFIX}{}{MAGNITUDE}", weight.strip_suffix(".weight").unwrap_or(weight))
}

/// Whether a parameter belongs to an adapter.
pub(crate) fn is_adapter(spec: &ParamSpec) -> bool {
    spec.name.starts_with(PREFIX)
}

/// Whether a parameter is the B of a product B A.
pub(crate) fn is_second(spec: &ParamSpec) -> bool {
    is_adapter(spec) && spec.name.ends_with(".lora_B.weight")
}

/// The name and the columns of the weight that a parameter has the magnitudes of, if that is what it is.
pub(crate) fn matrix_of_magnitudes(spec: &ParamSpec) -> Option<(String, usize)> {
    let Init::RowNorms { columns } = spec.init else { return None };
    let module = spec.name.strip_prefix(PREFIX)?.strip_suffix(MAGNITUDE)?;
    Some((format!("{module}.weight"), columns as usize))
}
