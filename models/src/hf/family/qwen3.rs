//! Qwen3 without experts: norms of each head's queries and keys, and a separate head width.

use super::{Class, Family, Gguf, Reader, write_layer_types};
use crate::hf::Result;
use crate::{DecoderConfig, QkNorm};

pub(super) const FAMILY: Family = Family {
    gguf: Some(Gguf { name: "qwen3", in_pairs: false }),
    class: Class { attention_bias: true, head_dim: Some(128), ..Class::USUAL },
    write: write_layer_types,
    ..Family::new("Qwen3", "qwen3", read)
};

fn read(file: &Reader) -> Result<DecoderConfig> {
    Ok(DecoderConfig { qk_norm: Some(QkNorm::PerHead), ..file.decoder(file.late_window()?)? })
}
