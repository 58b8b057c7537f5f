//! Fields that only Gemma 3 has in a `config.json`, read and written.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Result, field};
use crate::{Activation, DecoderConfig, Multipliers, NormPlaces, OtherRope, QkNorm};

/// Difference between the weights of its norms in memory and in files.
pub(super) const NORM_OFFSET: f32 = 1.0;
/// Its `model_type`.
pub(super) const MODEL_TYPE: &str = "gemma3_text";
/// Activation of its gate, as named in files.
const ACTIVATION: &str = "gelu_pytorch_tanh";

#[derive(Debug, Deserialize)]
pub(super) struct GemmaFields {
    hidden_activation: Option<String>,
    /// Its square root divides the attention scores.
    query_pre_attn_scalar: Option<f64>,
    /// Base of layers with a window.
    rope_local_base_freq: Option<f64>,
    /// The last one of this many layers has no window.
    #[serde(alias = "_sliding_window_pattern")]
    sliding_window_pattern: Option<usize>,
    attn_logit_softcapping: Option<f64>,
    final_logit_softcapping: Option<f64>,
    #[serde(default)]
    use_bidirectional_attention: bool,
}

impl GemmaFields {
    /// Returns an error for an unsupported setting.
    pub fn refuse_what_is_missing(&self, path: &Path) -> Result<()> {
        if self.hidden_activation.as_deref().is_some_and(|name| name != ACTIVATION) {
            return Err(field(path, "hidden_activation", format!("must be `{ACTIVATION}`")));
        }
        for (name, capping) in [
            ("attn_logit_softcapping", self.attn_logit_softcapping),
            ("final_logit_softcapping", self.final_logit_softcapping),
        ] {
            if capping.is_some() {
                return Err(field(path, name, "is set, but softcapping is not supported"));
            }
        }
        if self.use_bidirectional_attention {
            return Err(field(
                path,
                "use_bidirectional_attention",
                "is true, but only causal attention is supported",
            ));
        }
        Ok(())
    }

    /// Returns the multipliers for a residual stream of this width.
    pub fn multipliers(&self, path: &Path, hidden_size: i64) -> Result<Multipliers> {
        let scalar = self.query_pre_attn_scalar.unwrap_or(256.0);
        if scalar <= 0.0 || !scalar.is_finite() {
            return Err(field(path, "query_pre_attn_scalar", format!("is {scalar}, must be above 0")));
        }
        Ok(multipliers(hidden_size, scalar))
    }

    /// Returns the base of layers with a window, if the file has no rotations per kind of layer.
    pub fn local_theta(&self) -> f64 {
        self.rope_local_base_freq.unwrap_or(10_000.0)
    }

    /// For each of `layers` layers, returns true if it has a window, if the file does not name them.
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

/// Checks that a decoder is a Gemma 3; `slides` is true for layers with a window. Otherwise returns a field
/// and the problem.
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
        (
            config.norms == NormPlaces::Both,
            "norms",
            "are on branch inputs or outputs, but Gemma's are on both",
        ),
        (
            config.norm_offset == NORM_OFFSET,
            "norm_offset",
            "is not 1, but norms are on branch inputs and outputs",
        ),
        (
            config.activation == Activation::GeluTanh,
            "hidden_act",
            "differs from Gemma's, but the norms are Gemma's",
        ),
        (config.qk_norm == Some(QkNorm::PerHead), "qk_norm", "is not per head like Gemma's"),
        (
            matches!(biases, (true, true, false) | (false, false, false)),
            "o_bias",
            "and the other biases differ from Gemma's",
        ),
        (
            config.multipliers == expected,
            "embedding_multiplier",
            "or another multiplier differs from Gemma's",
        ),
        (turned, "other_rope", "does not apply to the layers with a window like Gemma's"),
        (
            config.experts.is_none() && !config.fused_projections,
            "norms",
            "are Gemma's, which has neither experts nor fused projections",
        ),
    ] {
        if !holds {
            return Err((name, problem));
        }
    }
    Ok(())
}

/// Rounds it if it is whole up to rounding errors.
fn query_pre_attn_scalar(config: &DecoderConfig) -> f64 {
    let scalar = config.attention_multiplier().powi(-2);
    if (scalar - scalar.round()).abs() < 1e-9 * scalar { scalar.round() } else { scalar }
}

/// Returns the fields of a decoder that is a Gemma 3.
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
        // The class's default would reserve an embedding that is never trained.
        "pad_token_id": null,
    });
    let Value::Object(fields) = fields else { unreachable!("written as an object above") };
    fields
}
