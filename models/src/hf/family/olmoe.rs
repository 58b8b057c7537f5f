//! OLMoE: experts in every layer, and norms over all heads of queries, and of keys.

use super::{Class, Family, Reader, mixture};
use crate::hf::Result;
use crate::{DecoderConfig, QkNorm};

pub(super) const FAMILY: Family = Family {
    class: Class { attention_bias: true, needs_kv_heads: false, rms_norm_eps: 1e-5, ..Class::USUAL },
    write: mixture::write_whole,
    ..Family::new("Olmoe", "olmoe", read)
};

fn read(file: &Reader) -> Result<DecoderConfig> {
    let clips = file.get::<f64>("clip_qkv")?.is_some();
    file.ensure(!clips, "clip_qkv", "is set, but clipping of queries, keys and values is not supported")?;
    let experts = mixture::read_whole(file, "num_experts")?;
    let config =
        DecoderConfig { qk_norm: Some(QkNorm::Together), experts: Some(experts), ..file.decoder(None)? };
    let width = config.head_dim.saturating_mul(config.num_attention_heads);
    file.ensure(
        width == config.hidden_size,
        "head_dim",
        "times the heads is not hidden_size, the norms' width",
    )?;
    Ok(config)
}
