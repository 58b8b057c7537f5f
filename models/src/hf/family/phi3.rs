//! Phi-3, 3.5 and 4: fused projections, heads rotated in part, and `longrope`.

use super::{Class, Family, Reader};
use crate::hf::Result;
use crate::hf::rope::RopeKind;
use crate::{DecoderConfig, RopeScaling, SlidingWindow};
use serde_json::{Map, Value};

pub(super) const FAMILY: Family = Family {
    class: Class {
        needs_kv_heads: false,
        rms_norm_eps: 1e-5,
        sliding_window: None,
        rope: RopeKind::LongInPart,
        ..Class::USUAL
    },
    write,
    ..Family::new("Phi3", "phi3", read)
};

fn read(file: &Reader) -> Result<DecoderConfig> {
    file.ensure_no_dropout("resid_pdrop")?;
    // The window is in every layer, even if `layer_types` differs.
    let window = file.window_tokens()?.map(|tokens| SlidingWindow { tokens, layers: file.all_layers() });
    Ok(DecoderConfig { fused_projections: true, ..file.decoder(window)? })
}

fn write(config: &DecoderConfig, file: &mut Map<String, Value>) {
    let (longest, original) = match config.rope_scaling {
        RopeScaling::LongRope { max_position_embeddings, original_max_position_embeddings, .. } => {
            (max_position_embeddings as i64, original_max_position_embeddings as i64)
        }
        _ => (config.max_position_embeddings, config.max_position_embeddings),
    };
    let fields: [(&str, Value); 5] = [
        ("partial_rotary_factor", config.partial_rotary_factor.into()),
        ("max_position_embeddings", longest.into()),
        ("original_max_position_embeddings", original.into()),
        // The class would use its own default ids, which exceed a small vocabulary.
        ("pad_token_id", Value::Null),
        ("resid_pdrop", 0.0.into()),
    ];
    for (name, value) in fields {
        file.insert(name.to_owned(), value);
    }
}
