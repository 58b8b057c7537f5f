//! Mistral: no biases, and a sliding window in every layer unless `layer_types` names some.

use super::{Family, Reader};
use crate::DecoderConfig;
use crate::hf::Result;

pub(super) const FAMILY: Family = Family::new("Mistral", "mistral", read);

fn read(file: &Reader) -> Result<DecoderConfig> {
    file.decoder(file.window(file.all_layers())?)
}
