//! Constant factors that some families apply in the forward pass.

use half::{bf16, f16};
use tch::{Kind, Tensor};

use crate::Result;
use crate::error::check_config;

/// The four multipliers of Granite, with the names of its `config.json`; Gemma has those of embeddings and
/// attention. By default attention scores are divided by sqrt(D), and nothing else is scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// Factor of embeddings, `embedding_multiplier`.
    pub embedding: f64,
    /// True if that factor is first rounded to the embeddings' dtype (Gemma).
    pub rounds_embedding: bool,
    /// Factor of the attention scores, `attention_multiplier`; `None`: 1 / sqrt(D).
    pub attention: Option<f64>,
    /// Factor of the outputs of attention and MLP, `residual_multiplier`.
    pub residual: f64,
    /// Divisor of the logits, `logits_scaling`.
    pub logits_scaling: f64,
}

impl Default for Multipliers {
    fn default() -> Multipliers {
        Multipliers {
            embedding: 1.0,
            rounds_embedding: false,
            attention: None,
            residual: 1.0,
            logits_scaling: 1.0,
        }
    }
}

impl Multipliers {
    /// Checks that the multipliers are positive numbers.
    pub(super) fn validate(&self) -> Result<()> {
        for (field, number) in [
            ("embedding_multiplier", self.embedding),
            ("attention_multiplier", self.attention.unwrap_or(1.0)),
            ("residual_multiplier", self.residual),
            ("logits_scaling", self.logits_scaling),
        ] {
            check_config(number > 0.0 && number.is_finite(), field, || {
                format!("is {number}, must be a positive number")
            })?;
        }
        Ok(())
    }
}

/// Rounds a number to a dtype.
pub(super) fn rounded(number: f64, kind: Kind) -> f64 {
    match kind {
        Kind::BFloat16 => bf16::from_f64(number).to_f64(),
        Kind::Half => f16::from_f64(number).to_f64(),
        Kind::Float => f64::from(number as f32),
        _ => number,
    }
}

/// Multiplies `x` in place.
pub(super) fn multiply_(x: &mut Tensor, by: f64) -> Result<()> {
    if by != 1.0 {
        drop(x.f_mul_scalar_(by)?);
    }
    Ok(())
}

/// Divides `x` in place.
pub(super) fn divide_(x: &mut Tensor, by: f64) -> Result<()> {
    if by != 1.0 {
        drop(x.f_div_scalar_(by)?);
    }
    Ok(())
}
