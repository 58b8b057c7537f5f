//! Qwen2 and Qwen2.5: biases on queries, keys and values alone.

use super::{Class, Family, Gguf, Reader, write_layer_types};
use crate::DecoderConfig;
use crate::hf::Result;

pub(super) const FAMILY: Family = Family {
    name: "Qwen2",
    infix: "",
    model_type: "qwen2",
    gguf: Some(Gguf { name: "qwen2", in_pairs: false }),
    refused: &[],
    class: Class::USUAL,
    read,
    write: write_layer_types,
};

fn read(file: &Reader) -> Result<DecoderConfig> {
    Ok(DecoderConfig { qkv_bias: true, ..file.decoder(file.late_window()?)? })
}
