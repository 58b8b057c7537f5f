//! OLMo 3: OLMo 2 with a sliding window in some layers, by default three of four. Only the others are scaled.

use super::{Class, Family, Reader, write_layer_types};
use crate::hf::Result;
use crate::hf::rope::RopeKind;
use crate::{DecoderConfig, NormPlaces, QkNorm};

pub(super) const FAMILY: Family = Family {
    class: Class {
        attention_bias: true,
        needs_kv_heads: false,
        rms_norm_eps: 1e-5,
        rope: RopeKind::ByWindow,
        ..Class::USUAL
    },
    write: write_layer_types,
    ..Family::new("Olmo3", "olmo3", read)
};

fn read(file: &Reader) -> Result<DecoderConfig> {
    let window =
        file.sized_window((1..=file.shared.num_hidden_layers).map(|layer| layer % 4 != 0).collect())?;
    let (norms, qk_norm) = (NormPlaces::After, Some(QkNorm::Together));
    Ok(DecoderConfig { norms, qk_norm, ..file.decoder(window)? })
}
