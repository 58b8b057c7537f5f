//! Llama 2 and 3, and models of its shape: biases on all of attention, all of the MLP, or none.

use super::{Class, Family, Gguf, Reader};
use crate::DecoderConfig;
use crate::hf::Result;

pub(super) const FAMILY: Family = Family {
    name: "Llama",
    infix: "",
    model_type: "llama",
    gguf: Some(Gguf { name: "llama", in_pairs: true }),
    refused: &[],
    class: Class { attention_bias: true, mlp_bias: true, needs_kv_heads: false, ..Class::USUAL },
    read,
    write: |_, _| {},
};

fn read(file: &Reader) -> Result<DecoderConfig> {
    file.decoder(None)
}
