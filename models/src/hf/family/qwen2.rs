//! Qwen2 and Qwen2.5: biases on queries, keys and values alone.

use super::{Family, Gguf, Reader, write_layer_types};
use crate::DecoderConfig;
use crate::hf::Result;

pub(super) const FAMILY: Family = Family {
    gguf: Some(Gguf { name: "qwen2", in_pairs: false }),
    write: write_layer_types,
    ..Family::new("Qwen2", "qwen2", read)
};

fn read(file: &Reader) -> Result<DecoderConfig> {
    Ok(DecoderConfig { qkv_bias: true, ..file.decoder(file.late_window()?)? })
}
