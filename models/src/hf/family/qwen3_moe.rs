//! Qwen3 with experts in the layers that `decoder_sparse_step` and `mlp_only_layers` leave.

use super::{Class, Family, Reader, mixture};
use crate::hf::Result;
use crate::{DecoderConfig, QkNorm};

pub(super) const FAMILY: Family = Family {
    class: Class { attention_bias: true, ..Class::USUAL },
    write: mixture::write,
    ..Family::new("Qwen3Moe", "qwen3_moe", read)
};

fn read(file: &Reader) -> Result<DecoderConfig> {
    // `max_window_layers` has no effect.
    let window = if file.uses_window()? { file.window(file.all_layers())? } else { None };
    let (qk_norm, experts) = (Some(QkNorm::PerHead), mixture::read(file)?);
    Ok(DecoderConfig { qk_norm, experts, ..file.decoder(window)? })
}
