//! Granite 3 without experts: a Llama with constant factors.

use super::{Class, Family, Reader};
use crate::hf::Result;
use crate::{DecoderConfig, Multipliers};
use serde_json::{Map, Value};

pub(super) const FAMILY: Family = Family {
    class: Class { attention_bias: true, mlp_bias: true, needs_kv_heads: false, ..Class::USUAL },
    write,
    ..Family::new("Granite", "granite", read)
};

fn read(file: &Reader) -> Result<DecoderConfig> {
    let factor = |name: &str| Ok(file.get(name)?.unwrap_or(1.0));
    let multipliers = Multipliers {
        embedding: factor("embedding_multiplier")?,
        rounds_embedding: false,
        attention: Some(factor("attention_multiplier")?),
        residual: factor("residual_multiplier")?,
        logits_scaling: factor("logits_scaling")?,
    };
    Ok(DecoderConfig { multipliers, ..file.decoder(None)? })
}

fn write(config: &DecoderConfig, file: &mut Map<String, Value>) {
    let multipliers = &config.multipliers;
    for (name, number) in [
        ("embedding_multiplier", multipliers.embedding),
        ("attention_multiplier", config.attention_multiplier()),
        ("residual_multiplier", multipliers.residual),
        ("logits_scaling", multipliers.logits_scaling),
    ] {
        file.insert(name.to_owned(), number.into());
    }
}
