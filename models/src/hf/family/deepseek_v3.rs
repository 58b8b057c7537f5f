//! DeepSeek-V3 and R1, Moonlight: their layers are expressed ([`Expressed::DeepseekV3`]).

use serde_json::{Map, Value, json};

use super::{Family, Reader, object};
use crate::hf::Result;
use crate::{DecoderConfig, DeepseekV3, Expressed, Pairs};

pub(super) const FAMILY: Family = Family {
    refused: &[
        ("DeepseekV2ForCausalLM", "which has another router than `DeepseekV3ForCausalLM`"),
        ("DeepseekV32ForCausalLM", "whose sparse attention is not supported: use a DeepSeek-V3 or R1"),
    ],
    class: super::Class { attention_bias: true, needs_kv_heads: false, ..super::Class::USUAL },
    write,
    ..Family::new("DeepseekV3", "deepseek_v3", read)
};

/// Field of the softmax's scale, in `rope_scaling`.
const GROWTH: &str = "mscale_all_dim";

fn read(file: &Reader) -> Result<DecoderConfig> {
    for (name, only) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        let is_it = file.get::<String>(name)?.is_none_or(|found| found == only);
        file.ensure(is_it, name, format!("must be `{only}`"))?;
    }
    let frequency: i64 = file.get("moe_layer_freq")?.unwrap_or(1);
    file.ensure(frequency == 1, "moe_layer_freq", format!("is {frequency}, must be 1"))?;
    let size = |name: &str, silent: i64| Ok(file.get(name)?.unwrap_or(silent));
    let (rope, plain) = (size("qk_rope_head_dim", 64)?, size("qk_nope_head_dim", 128)?);
    let fields = [file.shared.rope_parameters.as_ref(), file.shared.rope_scaling.as_ref()];
    let growth = fields.into_iter().flatten().find_map(|fields| fields.get(GROWTH)?.as_f64());
    // A class default of 1536; null means one matrix.
    let q_lora_rank =
        if file.shared.others.contains_key("q_lora_rank") { file.get("q_lora_rank")? } else { Some(1536) };
    let expressed = DeepseekV3 {
        q_lora_rank,
        kv_lora_rank: size("kv_lora_rank", 512)?,
        qk_rope_head_dim: rope,
        v_head_dim: size("v_head_dim", 128)?,
        pairs: if file.get("rope_interleave")?.unwrap_or(true) { Pairs::Adjacent } else { Pairs::Halves },
        mscale_all_dim: growth.unwrap_or(0.0),
        first_k_dense_replace: file.get("first_k_dense_replace")?.unwrap_or(3),
        n_routed_experts: size("n_routed_experts", 256)?,
        num_experts_per_tok: size("num_experts_per_tok", 8)?,
        moe_intermediate_size: size("moe_intermediate_size", 2048)?,
        n_shared_experts: size("n_shared_experts", 1)?,
        n_group: size("n_group", 8)?,
        topk_group: size("topk_group", 4)?,
        norm_topk_prob: file.get("norm_topk_prob")?.unwrap_or(true),
        routed_scaling_factor: file.get("routed_scaling_factor")?.unwrap_or(2.5),
    };
    let head_dim = plain.saturating_add(rope);
    Ok(DecoderConfig { expressed: Some(Expressed::DeepseekV3(expressed)), head_dim, ..file.decoder(None)? })
}

fn write(config: &DecoderConfig, file: &mut Map<String, Value>) {
    let Some(Expressed::DeepseekV3(of)) = &config.expressed else { return };
    file.extend(object(json!({
        // The class rotates heads of this width.
        "head_dim": of.qk_rope_head_dim,
        "qk_rope_head_dim": of.qk_rope_head_dim,
        "qk_nope_head_dim": config.head_dim - of.qk_rope_head_dim,
        "v_head_dim": of.v_head_dim,
        "q_lora_rank": of.q_lora_rank,
        "kv_lora_rank": of.kv_lora_rank,
        "rope_interleave": of.pairs == Pairs::Adjacent,
        "first_k_dense_replace": of.first_k_dense_replace,
        "n_routed_experts": of.n_routed_experts,
        "num_experts_per_tok": of.num_experts_per_tok,
        "moe_intermediate_size": of.moe_intermediate_size,
        "n_shared_experts": of.n_shared_experts,
        "n_group": of.n_group,
        "topk_group": of.topk_group,
        "norm_topk_prob": of.norm_topk_prob,
        "routed_scaling_factor": of.routed_scaling_factor,
    })));
    if let Some(Value::Object(scaling)) = file.get_mut("rope_scaling") {
        scaling.insert(GROWTH.to_owned(), of.mscale_all_dim.into());
    }
}
