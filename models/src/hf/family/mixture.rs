//! Fields of a mixture of experts.

use serde_json::{Map, Value, json};

use super::{Reader, object};
use crate::hf::Result;
use crate::{DecoderConfig, ExpertNames, ExpertsConfig};

/// Reads the experts of a family in which any layer may have some.
pub(super) fn read(file: &Reader) -> Result<Option<ExpertsConfig>> {
    let num_experts = count(file, "num_experts")?;
    let step: usize = file.get("decoder_sparse_step")?.unwrap_or(1);
    file.ensure(step > 0, "decoder_sparse_step", "is 0, must be at least 1")?;
    let without: Vec<usize> = file.get("mlp_only_layers")?.unwrap_or_default();
    let has_experts =
        |layer: usize| num_experts > 0 && (layer + 1).is_multiple_of(step) && !without.contains(&layer);
    let layers: Vec<bool> = (0..file.shared.num_hidden_layers).map(has_experts).collect();
    if !layers.contains(&true) {
        return Ok(None);
    }
    Ok(Some(ExpertsConfig {
        moe_intermediate_size: file.required("moe_intermediate_size")?,
        layers,
        ..whole(file, num_experts)?
    }))
}

/// Reads the experts of a family that has them in all layers, as wide as the MLP that they replace. The field
/// `name` has their number.
pub(super) fn read_whole(file: &Reader, name: &str) -> Result<ExpertsConfig> {
    let num_experts = count(file, name)?;
    file.ensure(num_experts != 0, name, "is 0, must be at least 1")?;
    whole(file, num_experts)
}

fn whole(file: &Reader, num_experts: i64) -> Result<ExpertsConfig> {
    Ok(ExpertsConfig {
        num_experts,
        num_experts_per_tok: file.required("num_experts_per_tok")?,
        moe_intermediate_size: file.shared.intermediate_size,
        norm_topk_prob: file.get("norm_topk_prob")?.unwrap_or(false),
        layers: file.all_layers(),
        names: ExpertNames::Usual,
    })
}

/// Returns the number of experts, which newer files name differently; an error about `name` if there is none.
fn count(file: &Reader, name: &str) -> Result<i64> {
    // Makes `transformers` balance experts; here a field of the config does.
    let _: Option<bool> = file.get("output_router_logits")?;
    match (file.get("num_experts")?, file.get("num_local_experts")?) {
        (Some(old), Some(new)) if old != new => {
            Err(file.wrong("num_local_experts", format!("is {new}, and `num_experts` is {old}")))
        }
        (old, new) => old.or(new).ok_or_else(|| file.wrong(name, "is missing")),
    }
}

/// Adds the fields of experts in some layers.
pub(super) fn write(config: &DecoderConfig, file: &mut Map<String, Value>) {
    let Some(experts) = &config.experts else { return };
    let plain = experts.layers.iter().enumerate().filter(|(_, has_experts)| !**has_experts);
    file.extend(object(json!({
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.moe_intermediate_size,
        "norm_topk_prob": experts.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": plain.map(|(layer, _)| layer).collect::<Vec<_>>(),
        "output_router_logits": false,
    })));
}

/// Adds the fields of experts in all layers.
pub(super) fn write_whole(config: &DecoderConfig, file: &mut Map<String, Value>) {
    let Some(experts) = &config.experts else { return };
    write(config, file);
    file.insert("intermediate_size".to_owned(), experts.moe_intermediate_size.into());
    file.insert("num_local_experts".to_owned(), experts.num_experts.into());
}
