//! What a `config.json` of Gemma 3 has beside the others' fields, read and written.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Result, field};
use crate::{Activation, DecoderConfig, Multipliers, NormPlaces, OtherRope, QkNorm};

/// What weights of its norms are more than its files have.
pub(super) const NORM_OFFSET: f32 = 1.0;
/// Its `model_type`.
pub(super) const MODEL_TYPE: &str = "gemma3_text";
/// Its gate's function, as files call it.
const ACTIVATION: &str = "gelu_pytorch_tanh";

#[derive(Debug, Deserialize)]
pub(super) struct GemmaFields {
    hidden_activation: Option<String>,
    /// Whose root scores of attention are divided by.
    query_pre_attn_scalar: Option<f64>,
    /// The base of layers with a window.
    rope_local_base_freq: Option<f64>,
    /// Of so many layers the last one has no window.
    #[serde(alias = "_sliding_window_pattern")]
    sliding_window_pattern: Option<usize>,
    attn_logit_softcapping: Option<f64>,
    final_logit_softcapping: Option<f64>,
    #[serde(default)]
    use_bidirectional_attention: bool,
}

impl GemmaFields {
    /// Refuses what this crate does not have.
    pub fn refuse_what_is_missing(&self, path: &Path) -> Result<()> {
        if self.hidden_activation.as_deref().is_some_and(|name| name != ACTIVATION) {
            return Err(field(path, "hidden_activation", format!("is another than `{ACTIVATION}`")));
        }
        for (name, capping) in [
            ("attn_logit_softcapping", self.attn_logit_softcapping),
            ("final_logit_softcapping", self.final_logit_softcapping),
        ] {
            if capping.is_some() {
                return Err(field(path, name, "is there; nothing is capped here"));
            }
        }
        if self.use_bidirectional_attention {
            return Err(field(
                path,
                "use_bidirectional_attention",
                "is true; a token sees none behind it here",
            ));
        }
        Ok(())
    }

    /// What is multiplied in a stream of this width.
    pub fn multipliers(&self, path: &Path, hidden_size: i64) -> Result<Multipliers> {
        let scalar = self.query_pre_attn_scalar.unwrap_or(256.0);
        if scalar <= 0.0 || !scalar.is_finite() {
            return Err(field(path, "query_pre_attn_scalar", format!("is {scalar}, must be above 0")));
        }
        Ok(multipliers(hidden_size, scalar))
    }

    /// The base of layers with a window, where the file has no rotations of single kinds of layers.
    pub fn local_theta(&self) -> f64 {
        self.rope_local_base_freq.unwrap_or(10_000.0)
    }

    /// Whether each of so many layers has a window, where the file does not name them.
    pub fn slides(&self, path: &Path, layers: usize) -> Result<Vec<bool>> {
        match self.sliding_window_pattern.unwrap_or(6) {
            0 => Err(field(path, "sliding_window_pattern", "is 0, must be at least 1")),
            pattern => Ok((1..=layers).map(|layer| layer % pattern != 0).collect()),
        }
    }
}

fn multipliers(hidden_size: i64, query_pre_attn_scalar: f64) -> Multipliers {
    Multipliers {
        embedding: (hidden_size as f64).sqrt(),
        rounds_embedding: true,
        attention: Some(query_pre_attn_scalar.powf(-0.5)),
        ..Multipliers::default()
    }
}

/// Whether a decoder, in whose layers windows slide or not, is one; a field and what is wrong with it if it only looks so.
pub(super) fn check(config: &DecoderConfig, slides: &[bool]) -> Result<(), (&'static str, &'static str)> {
    let scalar = query_pre_attn_scalar(config);
    let biases = (config.qkv_bias, config.o_bias, config.mlp_bias);
    let turns = |other: &OtherRope| other.theta.is_some() && other.layers == slides;
    let turned = match &config.other_rope {
        Some(other) => turns(other),
        None => !slides.contains(&true),
    };
    let expected =
        Multipliers { attention: config.multipliers.attention, ..multipliers(config.hidden_size, scalar) };
    for (holds, name, problem) in [
        (config.norms == NormPlaces::Both, "norms", "are before or behind branches, and Gemma's are both"),
        (
            config.norm_offset == NORM_OFFSET,
            "norm_offset",
            "is not 1 beside norms before and behind branches",
        ),
        (
            config.activation == Activation::GeluTanh,
            "hidden_act",
            "is another than Gemma's, whose norms there are",
        ),
        (config.qk_norm == Some(QkNorm::PerHead), "qk_norm", "is not of heads, as Gemma's is"),
        (
            matches!(biases, (true, true, false) | (false, false, false)),
            "o_bias",
            "is there with others than Gemma's",
        ),
        (config.multipliers == expected, "embedding_multiplier", "or another one is none of Gemma's"),
        (turned, "other_rope", "is not of the layers with a window, as Gemma's is"),
        (
            config.experts.is_none() && !config.fused_projections,
            "norms",
            "are Gemma's beside what it has not",
        ),
    ] {
        if !holds {
            return Err((name, problem));
        }
    }
    Ok(())
}

/// Whole where it is but for rounding.
fn query_pre_attn_scalar(config: &DecoderConfig) -> f64 {
    let scalar = config.attention_multiplier().powi(-2);
    if (scalar - scalar.round()).abs() < 1e-9 * scalar { scalar.round() } else { scalar }
}

/// What a file says of a decoder that is one.
pub(super) fn fields(config: &DecoderConfig) -> Map<String, Value> {
    let local = config.other_rope.as_ref().and_then(|other| other.theta).unwrap_or(config.rope_theta);
    let scalar = query_pre_attn_scalar(config);
    let whole = scalar.fract() == 0.0;
    let fields = json!({
        "hidden_activation": ACTIVATION,
        "query_pre_attn_scalar": if whole { json!(scalar as i64) } else { json!(scalar) },
        "rope_local_base_freq": local,
        "attn_logit_softcapping": null,
        "final_logit_softcapping": null,
        "use_bidirectional_attention": false,
        // The class would have one of its own, whose embedding learns nothing.
        "pad_token_id": null,
    });
    let Value::Object(fields) = fields else { unreachable!("written as an object above") };
    fields
}
