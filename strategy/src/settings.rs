//! Settings that a config file has in the same form: precision, recomputation, weight decay. Their docs are those of
//! the file's fields.
//!
//! A micro-batch's gradients have the precision of weights. At every precision gradients are reduced over ranks and
//! accumulated over micro-batches in fp32, and the optimizer steps fp32 weights: at fp32 the weights themselves, else
//! master weights, sharded like its moments, which each step rounds. Loss scaling is that of Micikevicius et al., 2018,
//! as in PyTorch's `GradScaler`. Results do not depend on [`Recompute`].

use anyroll_backends::DType;
use serde::{Deserialize, Serialize};

/// Dtype of weights and activations; master weights are always fp32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// 32-bit IEEE.
    #[default]
    Fp32,
    /// bfloat16.
    Bf16,
    /// 16-bit IEEE with dynamic loss scaling; `fp16` alone leaves its fields to their defaults.
    Fp16(Fp16Config),
}

impl Precision {
    /// Returns the element type.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Fp32 => DType::F32,
            Self::Bf16 => DType::Bf16,
            Self::Fp16(_) => DType::F16,
        }
    }

    /// Returns its name in a config file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
            Self::Fp16(_) => "fp16",
        }
    }
}

/// Dynamic loss scaling. An overflow skips the update and halves the scale; the scale doubles after `growth_interval`
/// steps without an overflow.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Fp16Config {
    /// Initial scale of the loss; a power of two, from 1 to 2^24. Default 65536.
    pub initial_scale: f64,
    /// Number of optimizer steps without an overflow until the scale doubles; 1 or above. Default 2000.
    pub growth_interval: u32,
}

impl Default for Fp16Config {
    fn default() -> Self {
        Self { initial_scale: 65_536.0, growth_interval: 2000 }
    }
}

/// Form in which frozen weights are kept while no block uses them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FrozenWeights {
    /// The strategy's precision.
    #[default]
    Precision,
    /// 4 bits in the matrices of layers ([`anyroll_backends::ops::in_four_bits`]); others have the precision.
    Nf4,
}

/// Form of AdamW's moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum Moments {
    /// 32-bit IEEE.
    #[default]
    #[serde(rename = "fp32")]
    Fp32,
    /// 8 bits, and a scale for each 256 elements ([`anyroll_backends::ops::EightBitMoments`]).
    #[serde(rename = "8bit")]
    EightBit,
}

/// Activations that backward recomputes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing: forward keeps the activations of every block.
    #[default]
    None,
    /// Activations of each block that are large and cheap to recompute: in a decoder, the MLP's inner activations.
    Selective,
    /// Every block but the last, from its input: the activations of one block exist at a time.
    Full,
}

/// Weights that weight decay applies to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Decays {
    /// All weights but norms and biases.
    #[default]
    Matrices,
    /// All weights that are trained.
    All,
}
