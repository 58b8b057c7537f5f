//! Mistral: no biases, and a sliding window in every layer unless `layer_types` names some.

use super::{Class, Family, Reader};
use crate::DecoderConfig;
use crate::hf::Result;

pub(super) const FAMILY: Family = Family {
    name: "Mistral",
    infix: "",
    model_type: "mistral",
    gguf: None,
    refused: &[],
    class: Class::USUAL,
    read,
    write: |_, _| {},
};

fn read(file: &Reader) -> Result<DecoderConfig> {
    file.decoder(file.window(file.all_layers())?)
}
