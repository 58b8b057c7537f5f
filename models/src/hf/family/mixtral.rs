//! Mixtral: experts in every layer, under other names, whose weights are divided by their sum.

use super::{Class, Family, Reader, mixture};
use crate::hf::Result;
use crate::{DecoderConfig, ExpertNames, ExpertsConfig};

pub(super) const FAMILY: Family = Family {
    class: Class { rms_norm_eps: 1e-5, rope_theta: 1_000_000.0, sliding_window: None, ..Class::USUAL },
    write: mixture::write_whole,
    ..Family::new("Mixtral", "mixtral", read)
};

fn read(file: &Reader) -> Result<DecoderConfig> {
    let noise: f64 = file.get("router_jitter_noise")?.unwrap_or(0.0);
    file.ensure(noise == 0.0, "router_jitter_noise", "is not 0, but router noise is not supported")?;
    let experts = ExpertsConfig {
        norm_topk_prob: true,
        names: ExpertNames::Mixtral,
        ..mixture::read_whole(file, "num_local_experts")?
    };
    let window = file.window(file.all_layers())?;
    Ok(DecoderConfig { experts: Some(experts), ..file.decoder(window)? })
}
