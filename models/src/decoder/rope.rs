//! The rotations of queries and keys: frequencies that were changed after pretraining, so that a model reads longer texts,
//! layers that have others, and the tables of both.

use std::f64::consts::TAU;
use std::sync::{Mutex, PoisonError};

use anyroll_backends::ops;
use tch::{Device, Tensor};

use super::DecoderConfig;
use crate::Result;
use crate::error::check_config;

/// How a model's rotary frequencies differ from those of its base alone; the formulas and names are those of
/// Hugging Face's `rope_scaling`.
#[derive(Clone, Debug, Default, PartialEq)]
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
    /// LongRoPE (Ding et al., 2024), of texts up to the original length: each pair's frequency is divided by a factor of its own,
    /// and queries and keys are scaled. Texts that are longer turn by other factors from their first token on, which would turn
    /// cached keys anew when a text grows past that length; a model takes none here.
    LongRope {
        /// What each pair's frequency is divided by.
        short_factor: Vec<f64>,
        /// The same of longer texts: for files alone.
        long_factor: Vec<f64>,
        /// The length of the texts of pretraining, in tokens.
        original_max_position_embeddings: f64,
        /// The most tokens with the long factors.
        max_position_embeddings: f64,
        /// What cosines and sines are multiplied by; `None`: what follows from both lengths.
        attention_factor: Option<f64>,
    },
}

impl RopeScaling {
    /// Checks that the numbers make frequencies of heads of which `dim` elements are turned.
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
                            "has {found} numbers for {name}, must have one for each of the {pairs} pairs that are turned"
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

    /// The angles of position 1, one a pair, of heads of which `dim` elements are turned.
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
            RopeScaling::LongRope { ref short_factor, .. } => {
                for (frequency, factor) in frequencies.iter_mut().zip(short_factor) {
                    *frequency = (f64::from(*frequency) / factor) as f32;
                }
            }
        }
        frequencies
    }

    /// What cosines and sines are multiplied by.
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

    /// The most tokens of a text of a model whose file says `longest`.
    pub(crate) fn most_positions(&self, longest: i64) -> i64 {
        match *self {
            RopeScaling::LongRope { original_max_position_embeddings: original, .. } => {
                longest.min(original as i64)
            }
            _ => longest,
        }
    }
}

/// Layers whose rotation is another than that of the model's `rope_theta` and [`RopeScaling`].
#[derive(Clone, Debug, PartialEq)]
pub struct OtherRope {
    /// The base of their frequencies, which nothing scales; `None`: positions turn nothing there.
    pub theta: Option<f64>,
    /// Whether each layer is one of them.
    pub layers: Vec<bool>,
}

impl OtherRope {
    /// Checks that it is one of so many layers.
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

    /// The angles of position 1, one a pair, of heads of width `dim`: 0 where nothing is turned, so that a layer without a
    /// rotation computes as any other does, and loses nothing, since its cosines are 1 and its sines 0.
    fn frequencies(&self, dim: i64) -> Vec<f32> {
        match self.theta {
            Some(theta) => ops::rope_frequencies(dim, theta),
            None => vec![0.0; (dim / 2) as usize],
        }
    }
}

/// Cosines and sines of every position, as each layer turns by them.
#[derive(Debug)]
pub(super) struct RopeTables {
    /// The model's, and that of other layers if there are some: fp32 `[max_position_embeddings, R]`. Behind a lock only
    /// because tch's tensors are not `Sync`; nobody writes to them.
    tables: Mutex<Vec<Tensor>>,
    /// Which of them is a layer's.
    of_layer: Vec<usize>,
}

impl RopeTables {
    /// Those of a decoder on `device`.
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

    /// The same on `device`.
    pub fn on(&self, device: Device) -> Result<RopeTables> {
        let tables = self.all().iter().map(|table| table.f_to_device(device)).collect::<Result<_, _>>()?;
        Ok(RopeTables { tables: Mutex::new(tables), of_layer: self.of_layer.clone() })
    }

    /// That of a layer.
    pub fn of(&self, layer: usize) -> Tensor {
        self.all().swap_remove(self.of_layer[layer])
    }

    fn all(&self) -> Vec<Tensor> {
        let tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        tables.iter().map(Tensor::shallow_clone).collect()
    }
}

impl Clone for RopeTables {
    /// The same tables in the same memory.
    fn clone(&self) -> RopeTables {
        RopeTables { tables: Mutex::new(self.all()), of_layer: self.of_layer.clone() }
    }
}
