//! Rotations of queries and keys: frequencies changed after pretraining so that a model reads longer texts,
//! layers with other frequencies, and the tables of both.

use std::f64::consts::TAU;
use std::sync::{Mutex, PoisonError};

use anyroll_backends::ops;
use tch::{Device, Tensor};

use super::DecoderConfig;
use crate::Result;
use crate::error::check_config;

/// Deviation of a model's rotary frequencies from those of its base; formulas and names are those of Hugging
/// Face's `rope_scaling`.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum RopeScaling {
    /// No deviation.
    #[default]
    None,
    /// All frequencies are divided by `factor` (Chen et al., 2023).
    Linear {
        /// Factor by which texts became longer.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths are stretched, short ones kept, and those between interpolated.
    Llama3 {
        /// Stretch of long wavelengths.
        factor: f64,
        /// Wavelengths above the original length divided by this are long.
        low_freq_factor: f64,
        /// Wavelengths below the original length divided by this are short.
        high_freq_factor: f64,
        /// Text length of pretraining, in tokens.
        original_max_position_embeddings: f64,
    },
    /// YaRN (Peng et al., 2023): interpolates between stretched and kept frequencies, linearly in the pair's
    /// index, and scales queries and keys.
    Yarn {
        /// Factor by which texts became longer.
        factor: f64,
        /// Pairs that rotate more often than this over the original length are kept.
        beta_fast: f64,
        /// Pairs that rotate less often than this are fully stretched.
        beta_slow: f64,
        /// Text length of pretraining, in tokens.
        original_max_position_embeddings: f64,
        /// Factor of cosines and sines.
        attention_factor: f64,
        /// True if the interpolation's ends are rounded to whole pairs.
        truncate: bool,
    },
    /// LongRoPE (Ding et al., 2024), for texts up to the original length: each pair's frequency has its own
    /// divisor, and queries and keys are scaled. Longer texts use other divisors from their first token on,
    /// so cached keys would have to be rotated again when a text exceeds that length. Such texts are not
    /// supported.
    LongRope {
        /// Divisor of each pair's frequency.
        short_factor: Vec<f64>,
        /// Divisors for longer texts, kept only to write them to files.
        long_factor: Vec<f64>,
        /// Text length of pretraining, in tokens.
        original_max_position_embeddings: f64,
        /// Maximum number of tokens with the long divisors.
        max_position_embeddings: f64,
        /// Factor of cosines and sines; `None`: computed from both lengths.
        attention_factor: Option<f64>,
    },
}

impl RopeScaling {
    /// Checks that the numbers give valid frequencies for `dim` rotated elements of a head.
    pub(super) fn validate(&self, dim: i64) -> Result<()> {
        let numbers = match *self {
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
            RopeScaling::LongRope {
                ref short_factor,
                ref long_factor,
                original_max_position_embeddings,
                max_position_embeddings,
                ..
            } => {
                let factors = [("short_factor", short_factor), ("long_factor", long_factor)];
                for (name, factors) in factors {
                    let (found, pairs) = (factors.len(), dim / 2);
                    check_config(found as i64 == pairs, "rope_scaling", || {
                        format!(
                            "has {found} numbers for {name}, must have one for each of the {pairs} rotated pairs"
                        )
                    })?;
                }
                let all = factors.into_iter().flat_map(|(name, all)| all.iter().map(move |&it| (name, it)));
                let lengths = [
                    ("original_max_position_embeddings", original_max_position_embeddings),
                    ("max_position_embeddings", max_position_embeddings),
                    ("attention_factor", self.table_scale()),
                ];
                all.chain(lengths).collect()
            }
        };
        numbers.into_iter().try_for_each(|(name, number)| {
            check_config(number > 0.0 && number.is_finite(), "rope_scaling", || {
                format!("has {number:?} for {name}, must be a positive number")
            })
        })
    }

    /// Returns the angles of position 1, one per pair, for `dim` rotated elements of a head.
    pub(super) fn frequencies(&self, dim: i64, theta: f64) -> Vec<f32> {
        let mut frequencies = ops::rope_frequencies(dim, theta);
        match *self {
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
                // Index of the pair that makes this many turns over the original length.
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
            RopeScaling::LongRope { ref short_factor, .. } => {
                for (frequency, factor) in frequencies.iter_mut().zip(short_factor) {
                    *frequency = (f64::from(*frequency) / factor) as f32;
                }
            }
        }
        frequencies
    }

    /// Returns the factor of cosines and sines.
    pub(super) fn table_scale(&self) -> f64 {
        match *self {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            RopeScaling::LongRope {
                attention_factor,
                original_max_position_embeddings: original,
                max_position_embeddings: longest,
                ..
            } => attention_factor.unwrap_or_else(|| match longest / original {
                factor if factor <= 1.0 => 1.0,
                factor => (1.0 + factor.ln() / original.ln()).sqrt(),
            }),
            _ => 1.0,
        }
    }

    /// Returns YaRN's temperature with the weight `scale`; 1 without YaRN.
    pub(super) fn growth(&self, scale: f64) -> f64 {
        match *self {
            RopeScaling::Yarn { factor, .. } if factor > 1.0 => 0.1 * scale * factor.ln() + 1.0,
            _ => 1.0,
        }
    }

    /// Returns the maximum number of tokens of a text, for a model whose file says `longest`.
    pub(crate) fn most_positions(&self, longest: i64) -> i64 {
        match *self {
            RopeScaling::LongRope { original_max_position_embeddings: original, .. } => {
                longest.min(original as i64)
            }
            _ => longest,
        }
    }
}

/// Layers whose rotation differs from that of the model's `rope_theta` and [`RopeScaling`].
#[derive(Clone, Debug, PartialEq)]
pub struct OtherRope {
    /// Base of their frequencies, without scaling; `None`: no rotation.
    pub theta: Option<f64>,
    /// True for each such layer.
    pub layers: Vec<bool>,
}

impl OtherRope {
    /// Checks that there is an entry for each of `layers` layers.
    pub(super) fn validate(&self, layers: usize) -> Result<()> {
        let found = self.layers.len();
        check_config(found == layers, "other_rope", || {
            format!("has {found} entries, must have one for each of the {layers} layers")
        })?;
        let theta = self.theta.unwrap_or(1.0);
        check_config(theta > 0.0 && theta.is_finite(), "other_rope", || {
            format!("has a theta of {theta}, must be a positive number")
        })
    }

    /// Returns the angles of position 1, one per pair, of heads of width `dim`. They are 0 without a
    /// rotation: cosines are then 1 and sines 0, so such a layer computes like any other, without loss.
    fn frequencies(&self, dim: i64) -> Vec<f32> {
        match self.theta {
            Some(theta) => ops::rope_frequencies(dim, theta),
            None => vec![0.0; (dim / 2) as usize],
        }
    }
}

/// Cosines and sines of every position, for each layer.
#[derive(Debug)]
pub(super) struct RopeTables {
    /// Table of the model, and of other layers if there are any: fp32 `[max_position_embeddings, R]`. Behind
    /// a lock only because tch's tensors are not `Sync`; nothing writes to them.
    tables: Mutex<Vec<Tensor>>,
    /// Index of each layer's table.
    of_layer: Vec<usize>,
}

impl RopeTables {
    /// Computes the tables of a decoder on `device`.
    pub fn new(config: &DecoderConfig, device: Device) -> Result<RopeTables> {
        let (dim, positions) = (config.rotary_dim(), config.max_position_embeddings);
        let frequencies = config.rope_scaling.frequencies(dim, config.rope_theta);
        let scale = config.rope_scaling.table_scale();
        let mut tables = vec![ops::rope_table(positions, &frequencies, scale, device)?];
        let mut of_layer = vec![0; config.num_hidden_layers];
        if let Some(other) = &config.other_rope {
            tables.push(ops::rope_table(positions, &other.frequencies(dim), 1.0, device)?);
            of_layer = other.layers.iter().map(|&is_other| usize::from(is_other)).collect();
        }
        Ok(RopeTables { tables: Mutex::new(tables), of_layer })
    }

    /// Copies the tables to `device`.
    pub fn on(&self, device: Device) -> Result<RopeTables> {
        let tables = self.all().iter().map(|table| table.f_to_device(device)).collect::<Result<_, _>>()?;
        Ok(RopeTables { tables: Mutex::new(tables), of_layer: self.of_layer.clone() })
    }

    /// Returns the table of a layer.
    pub fn of(&self, layer: usize) -> Tensor {
        self.all().swap_remove(self.of_layer[layer])
    }

    fn all(&self) -> Vec<Tensor> {
        let tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        tables.iter().map(Tensor::shallow_clone).collect()
    }
}

impl Clone for RopeTables {
    /// Clones the handles: both share the same memory.
    fn clone(&self) -> RopeTables {
        RopeTables { tables: Mutex::new(self.all()), of_layer: self.of_layer.clone() }
    }
}
