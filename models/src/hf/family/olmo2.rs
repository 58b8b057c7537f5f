//! OLMo 2: norms on the outputs of attention and the MLP, and over all heads of queries, and of keys.

use super::{Class, Family, Reader};
use crate::hf::Result;
use crate::{DecoderConfig, NormPlaces, QkNorm};

pub(super) const FAMILY: Family = Family {
    class: Class { attention_bias: true, needs_kv_heads: false, rms_norm_eps: 1e-5, ..Class::USUAL },
    ..Family::new("Olmo2", "olmo2", read)
};

fn read(file: &Reader) -> Result<DecoderConfig> {
    let (norms, qk_norm) = (NormPlaces::After, Some(QkNorm::Together));
    Ok(DecoderConfig { norms, qk_norm, ..file.decoder(None)? })
}
