//! Importer of Megatron's options inside other configs. Its tensor and expert parallelism are ours. Stages of layers change the
//! placement of weights but not the computation: here they are sharded. Its distributed optimizer equals ZeRO stage 1.

use super::{ledger::Ledger, rules};

const STAGE: &str = "strategy.zero_stage";
const FUSED: &str = "fused kernels are always used";
const OVERLAPS: &str = "reduction always overlaps with compute";
const PIPELINE: &str = "layers are not staged over ranks";

const EXPERTS: &str = "experts are computed by grouped products";

const IDLE: [(&str, &str); 39] = [
    ("moe_grouped_gemm", EXPERTS),
    ("moe_permute_fusion", EXPERTS),
    ("additional_configs.moe_permute_fusion", EXPERTS),
    ("moe_token_dispatcher_type", EXPERTS),
    ("moe_enable_deepep", EXPERTS),
    ("moe_shared_expert_overlap", EXPERTS),
    ("moe_layer_recompute", "blocks are recomputed as a whole"),
    ("moe_router_dtype", "routers compute in fp32"),
    ("apply_expert_patch", EXPERTS),
    ("apply_tiled_mlp", "blocks are hand-written"),
    ("masked_softmax_fusion", FUSED),
    ("persist_layer_norm", FUSED),
    ("deallocate_pipeline_outputs", PIPELINE),
    ("seed", "`seed` seeds everything"),
    ("use_mbridge", "weights are read in Hugging Face's layout"),
    ("vanilla_mbridge", "weights are read in Hugging Face's layout"),
    ("use_dist_checkpointing", "checkpoints load at any number of ranks"),
    ("sequence_parallel", "norms compute all rows on every rank"),
    ("expert_tensor_parallel_size", "experts are sharded like other weights"),
    ("virtual_pipeline_model_parallel_size", PIPELINE),
    ("account_for_*", PIPELINE),
    ("overlap_p2p_comm", PIPELINE),
    ("batch_p2p_comm", PIPELINE),
    ("variable_seq_lengths", "sequences are always packed"),
    ("overlap_grad_reduce", OVERLAPS),
    ("overlap_param_gather", OVERLAPS),
    ("delay_wgrad_compute", OVERLAPS),
    ("bf16", "the dtype is set in the model"),
    ("bias_activation_fusion", FUSED),
    ("bias_dropout_fusion", FUSED),
    ("apply_rope_fusion", FUSED),
    ("gradient_accumulation_fusion", FUSED),
    ("cross_entropy_loss_fusion", FUSED),
    ("transformer_impl", FUSED),
    ("use_flash_attn", "the attention kernel is chosen by device"),
    ("attention_backend", "the attention kernel is chosen by device"),
    ("recompute_method", "blocks are recomputed as a whole"),
    ("recompute_num_layers", "blocks are recomputed as a whole"),
    ("recompute_modules", "blocks are recomputed as a whole"),
];

/// Imports the keys below `section`, and layer options below `layers`; the row of `name` reports the stage.
/// Returns the number of ranks that share a model, which have a common batch there.
pub(super) fn apply(ledger: &mut Ledger, name: &str, section: &str, layers: &str) -> u64 {
    let spread = stage(ledger, name, section);
    let granularity = format!("{layers}recompute_granularity");
    match ledger.text(&granularity).as_deref() {
        Some(kind @ ("full" | "selective")) => ledger.map(&granularity, "strategy.recompute", kind),
        _ => ledger.refuse_all(&[(&granularity, "set `strategy.recompute`")]),
    }
    for prefix in [section, layers] {
        for (key, why) in IDLE {
            ledger.idle_all(&[(&format!("{prefix}{key}"), why)]);
        }
    }
    spread
}

fn stage(ledger: &mut Ledger, name: &str, section: &str) -> u64 {
    let key = |name: &str| format!("{section}{name}");
    let [tensor, stages] = ["tensor_model_parallel_size", "pipeline_model_parallel_size"].map(key);
    let ranks = |key: &str| ledger.whole(key).unwrap_or(1).max(1);
    let spread = ranks(&tensor).saturating_mul(ranks(&stages));
    let shards = key("use_distributed_optimizer");
    let (stage, why) = match (ranks(&stages), ledger.truth(&shards)) {
        (1, Some(false)) => (0, "every rank has all layers"),
        (1, _) => (1, "every rank has all layers and a part of the optimizer states"),
        _ => (3, "layers are not staged over ranks: their weights are sharded"),
    };
    ledger.change(name, STAGE, stage, why);
    rules::ranks_of_a_layer(ledger, &tensor);
    for key in [&stages, &shards] {
        match (ledger.peek(key).is_some(), ledger.whole(key)) {
            (false, _) => {}
            (true, Some(1)) if *key != shards => ledger.idle(key, "off"),
            (true, _) => ledger.fold(key, "part of the stage"),
        }
    }
    rules::ranks_of_experts(ledger, &key("expert_model_parallel_size"));
    let sequences = key("context_parallel_size");
    if ledger.whole(&sequences) == Some(1) {
        ledger.idle(&sequences, "off");
    }
    ledger.refuse_all(&[(&sequences, "sequences are not split over ranks")]);
    spread
}
