//! Gemma 3 of texts: norms that multiply by 1 + w on both sides of a branch, GELU, embeddings times the root of
//! their width, and windows in five layers of six, with a base of their own.

use serde_json::{Map, Value, json};

use super::{Class, Family, Reader, object, write_layer_types};
use crate::hf::Result;
use crate::hf::rope::RopeKind;
use crate::{Activation, DecoderConfig, Multipliers, NormPlaces, QkNorm};

/// Activation of its gate, as named in files.
const ACTIVATION: &str = "gelu_pytorch_tanh";
/// Field with the base of layers with a window.
const LOCAL_THETA: &str = "rope_local_base_freq";

pub(super) const FAMILY: Family = Family {
    infix: "Text",
    refused: &[(
        "Gemma3ForConditionalGeneration",
        "which reads images: load its text model with transformers' `Gemma3ForCausalLM`, save that, and use its folder",
    )],
    class: Class {
        attention_bias: true,
        head_dim: Some(256),
        activation: Activation::GeluTanh,
        tied: true,
        rope_theta: 1_000_000.0,
        rope: RopeKind::ByWindow,
        sliding_theta: Some((LOCAL_THETA, 10_000.0)),
        ..Class::USUAL
    },
    write,
    ..Family::new("Gemma3", "gemma3_text", read)
};

fn read(file: &Reader) -> Result<DecoderConfig> {
    let activation: Option<String> = file.get("hidden_activation")?;
    let is_known = activation.is_none_or(|name| name == ACTIVATION);
    file.ensure(is_known, "hidden_activation", format!("must be `{ACTIVATION}`"))?;
    for name in ["attn_logit_softcapping", "final_logit_softcapping"] {
        let caps = file.get::<f64>(name)?.is_some();
        file.ensure(!caps, name, "is set, but softcapping is not supported")?;
    }
    let looks_ahead = file.get("use_bidirectional_attention")?.unwrap_or(false);
    let problem = "is true, but only causal attention is supported";
    file.ensure(!looks_ahead, "use_bidirectional_attention", problem)?;
    let scalar: f64 = file.get("query_pre_attn_scalar")?.unwrap_or(256.0);
    let is_valid = scalar > 0.0 && scalar.is_finite();
    file.ensure(is_valid, "query_pre_attn_scalar", format!("is {scalar}, must be above 0"))?;
    // The last one of this many layers has no window.
    let named = ["sliding_window_pattern", "_sliding_window_pattern"].map(|name| file.get(name));
    let [plain, underlined] = named;
    let pattern: usize = plain?.or(underlined?).unwrap_or(6);
    file.ensure(pattern > 0, "sliding_window_pattern", "is 0, must be at least 1")?;
    let slides = (1..=file.shared.num_hidden_layers).map(|layer| layer % pattern != 0).collect();
    Ok(DecoderConfig {
        qk_norm: Some(QkNorm::PerHead),
        norms: NormPlaces::Both,
        norm_offset: 1.0,
        multipliers: Multipliers {
            embedding: (file.shared.hidden_size as f64).sqrt(),
            rounds_embedding: true,
            attention: Some(scalar.powf(-0.5)),
            ..Multipliers::default()
        },
        ..file.decoder(file.sized_window(slides)?)?
    })
}

fn write(config: &DecoderConfig, file: &mut Map<String, Value>) {
    write_layer_types(config, file);
    file.remove("hidden_act");
    let local = config.other_rope.as_ref().and_then(|other| other.theta).unwrap_or(config.rope_theta);
    // Its square root divides the attention scores. Whole up to rounding errors, it is written as an integer.
    let scalar = config.attention_multiplier().powi(-2);
    let is_whole = (scalar - scalar.round()).abs() < 1e-9 * scalar;
    file.extend(object(json!({
        "hidden_activation": ACTIVATION,
        "query_pre_attn_scalar": if is_whole { json!(scalar.round() as i64) } else { json!(scalar) },
        LOCAL_THETA: local,
        "attn_logit_softcapping": null,
        "final_logit_softcapping": null,
        "use_bidirectional_attention": false,
        // The class's default would reserve an embedding that is never trained.
        "pad_token_id": null,
    })));
}
