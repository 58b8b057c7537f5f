//! Rotary frequencies that were changed after pretraining, so that a model reads longer texts.

use std::f64::consts::TAU;

use anyroll_backends::ops;

use crate::Result;
use crate::error::check_config;

/// How a model's rotary frequencies differ from those of its base alone; the formulas and names are those of
/// Hugging Face's `rope_scaling`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum RopeScaling {
    /// They do not.
    #[default]
    None,
    /// All are divided by `factor` (Chen et al., 2023).
    Linear {
        /// How many times longer the texts became.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths are stretched, short ones kept, and those between are a mixture.
    Llama3 {
        /// How far long wavelengths are stretched.
        factor: f64,
        /// Wavelengths above the original length divided by this are long.
        low_freq_factor: f64,
        /// Wavelengths below the original length divided by this are short.
        high_freq_factor: f64,
        /// The length of the texts of pretraining, in tokens.
        original_max_position_embeddings: f64,
    },
    /// YaRN (Peng et al., 2023): a mixture of stretched and kept frequencies that changes linearly with the pair's
    /// number, and a scale on queries and keys.
    Yarn {
        /// How many times longer the texts became.
        factor: f64,
        /// Pairs that turn more often than this over the original length are kept.
        beta_fast: f64,
        /// Pairs that turn less often than this are stretched whole.
        beta_slow: f64,
        /// The length of the texts of pretraining, in tokens.
        original_max_position_embeddings: f64,
        /// What cosines and sines are multiplied by.
        attention_factor: f64,
        /// Whether the ends of the mixture are rounded to whole pairs.
        truncate: bool,
    },
}

impl RopeScaling {
    /// Checks that the numbers make frequencies.
    pub(super) fn validate(self) -> Result<()> {
        let numbers = match self {
            RopeScaling::None => vec![],
            RopeScaling::Linear { factor } => vec![("factor", factor)],
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                check_config(high_freq_factor > low_freq_factor, "rope_scaling", || {
                    format!(
                        "has a high_freq_factor of {high_freq_factor:?}, must be above its low_freq_factor"
                    )
                })?;
                let original = ("original_max_position_embeddings", original_max_position_embeddings);
                vec![("factor", factor), ("low_freq_factor", low_freq_factor), original]
            }
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_max_position_embeddings,
                attention_factor,
                ..
            } => vec![
                ("factor", factor),
                ("beta_fast", beta_fast),
                ("beta_slow", beta_slow),
                ("original_max_position_embeddings", original_max_position_embeddings),
                ("attention_factor", attention_factor),
            ],
        };
        numbers.into_iter().try_for_each(|(name, number)| {
            check_config(number > 0.0 && number.is_finite(), "rope_scaling", || {
                format!("has {number:?} for {name}, must be a positive number")
            })
        })
    }

    /// The angles of position 1, one a pair, of heads of width `dim`.
    pub(super) fn frequencies(self, dim: i64, theta: f64) -> Vec<f32> {
        let mut frequencies = ops::rope_frequencies(dim, theta);
        match self {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                frequencies.iter_mut().for_each(|frequency| *frequency /= factor as f32);
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original,
            } => frequencies.iter_mut().for_each(|frequency| {
                let kept = f64::from(*frequency);
                let turns = original * kept / TAU;
                // Above 1 a wavelength is short, below 0 it is long.
                let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let smooth = smooth.clamp(0.0, 1.0);
                *frequency = ((1.0 - smooth) * kept / factor + smooth * kept) as f32;
            }),
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_max_position_embeddings: original,
                truncate,
                ..
            } => {
                // The pair that turns so often over the original length.
                let pair = |turns: f64| dim as f64 * (original / (turns * TAU)).ln() / (2.0 * theta.ln());
                let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min((dim - 1) as f64));
                if low == high {
                    high += 0.001;
                }
                for (pair, frequency) in frequencies.iter_mut().enumerate() {
                    let kept = f64::from(*frequency);
                    let stretched = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    *frequency = (kept / factor * stretched + kept * (1.0 - stretched)) as f32;
                }
            }
        }
        frequencies
    }

    /// What cosines and sines are multiplied by.
    pub(super) fn table_scale(self) -> f64 {
        match self {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }
}
