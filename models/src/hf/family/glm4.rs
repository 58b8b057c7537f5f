//! GLM-4, 0414's dense form: its layers are expressed ([`Expressed::Glm4`]).

use serde_json::{Map, Value};

use super::{Class, Family, Reader};
use crate::hf::Result;
use crate::hf::rope::RopeKind;
use crate::{DecoderConfig, Expressed};

pub(super) const FAMILY: Family = Family {
    refused: &[("GlmForCausalLM", "which has other norms than `Glm4ForCausalLM`: use a GLM-4 from 0414 on")],
    class: Class {
        attention_bias: true,
        head_dim: Some(128),
        rms_norm_eps: 1.5625e-7,
        rope: RopeKind::InPart,
        ..Class::USUAL
    },
    write,
    ..Family::new("Glm4", "glm4", read)
};

/// Default of `partial_rotary_factor`.
const PART: f64 = 0.5;

fn read(file: &Reader) -> Result<DecoderConfig> {
    let config = file.decoder(None)?;
    let is_silent = file.rotary_part()?.is_none();
    let partial_rotary_factor = if is_silent { PART } else { config.partial_rotary_factor };
    // Only queries, keys and values are biased.
    Ok(DecoderConfig { expressed: Some(Expressed::Glm4), o_bias: false, partial_rotary_factor, ..config })
}

fn write(config: &DecoderConfig, file: &mut Map<String, Value>) {
    let fields: [(&str, Value); 3] = [
        ("attention_bias", config.qkv_bias.into()),
        ("partial_rotary_factor", config.partial_rotary_factor.into()),
        // The class would use its own default id, which exceeds a small vocabulary.
        ("pad_token_id", Value::Null),
    ];
    file.extend(fields.map(|(name, value)| (name.to_owned(), value)));
}
