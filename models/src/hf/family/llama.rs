//! Llama 2 and 3, and models of its shape: biases on all of attention, all of the MLP, or none.

use super::{Class, Family, Gguf, Reader};
use crate::DecoderConfig;
use crate::hf::Result;

pub(super) const FAMILY: Family = Family {
    gguf: Some(Gguf { name: "llama", in_pairs: true }),
    class: Class { attention_bias: true, mlp_bias: true, needs_kv_heads: false, ..Class::USUAL },
    ..Family::new("Llama", "llama", read)
};

fn read(file: &Reader) -> Result<DecoderConfig> {
    file.decoder(None)
}
