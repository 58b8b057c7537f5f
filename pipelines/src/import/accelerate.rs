//! accelerate's YAML: which ranks there are, and DeepSpeed's or FSDP's section.

use serde_json::Value;

use super::{Became, Import, Keys, Rule, Source, deepspeed, value};
use Rule::{Ignored, Same, Together, Unless, With};

pub(super) const SOURCE: Source = Source { rules: RULES, whole };

const HOSTS: &str = "torchrun, Slurm or Kubernetes start the ranks of several hosts, and say where they meet";
const BLOCKS: &str = "a unit is a block, and its transfers run beside the computation";

const RULES: &[(&str, Rule)] = &[
    (
        "compute_environment",
        Unless(&["\"LOCAL_MACHINE\""], "ranks are started on this host, or by a launcher"),
    ),
    ("debug", Ignored("errors name their rank and operation")),
    ("distributed_type", Together),
    ("downcast_bf16", Unless(&["\"no\"", "false"], "only for TPUs")),
    ("enable_cpu_affinity", Ignored("it is the launcher's")),
    ("dynamo_backend", Ignored("blocks have kernels of their own")),
    ("dynamo_config.*", Ignored("blocks have kernels of their own")),
    ("machine_rank", Ignored(HOSTS)),
    ("main_process_ip", Ignored(HOSTS)),
    ("main_process_port", Ignored(HOSTS)),
    ("main_training_function", Ignored("there is no script")),
    ("num_machines", Together),
    ("num_processes", Together),
    ("rdzv_backend", Ignored(HOSTS)),
    ("same_network", Ignored(HOSTS)),
    ("gpu_ids", With(devices)),
    ("use_cpu", With(use_cpu)),
    ("mixed_precision", With(precision)),
    ("tpu_env", Ignored("only for TPUs")),
    ("tpu_use_cluster", Unless(&["false"], "there is no backend for TPUs")),
    ("tpu_use_sudo", Ignored("only for TPUs")),
    ("deepspeed_config.zero_stage", Same("strategy.zero_stage")),
    ("deepspeed_config.gradient_clipping", Same("pipeline.rlvr.optimizer.max_grad_norm")),
    (
        "deepspeed_config.gradient_accumulation_steps",
        Ignored("it follows from prompts_per_step, group_size, mini_batches and the ranks"),
    ),
    ("deepspeed_config.offload_optimizer_device", With(deepspeed::offload_optimizer)),
    ("deepspeed_config.offload_param_device", With(deepspeed::offload_param)),
    ("deepspeed_config.offload_optimizer_nvme_path", Ignored("nothing goes to a disk while training")),
    ("deepspeed_config.offload_param_nvme_path", Ignored("nothing goes to a disk while training")),
    ("deepspeed_config.zero3_init_flag", Ignored("weights are made sharded")),
    ("deepspeed_config.zero3_save_16bit_model", Ignored("checkpoints are shards")),
    ("deepspeed_config.deepspeed_multinode_launcher", Ignored(HOSTS)),
    ("deepspeed_config.deepspeed_hostfile", Ignored(HOSTS)),
    ("deepspeed_config.deepspeed_exclusion_filter", Ignored(HOSTS)),
    ("deepspeed_config.deepspeed_inclusion_filter", Ignored(HOSTS)),
    ("deepspeed_config.deepspeed_moe_layer_cls_names", Unless(&[], "there are no experts")),
    ("deepspeed_config.deepspeed_config_file.*", Together),
    ("fsdp_config.fsdp_sharding_strategy", With(sharding)),
    ("fsdp_config.fsdp_version", Ignored("stages are DeepSpeed's, whoever names them")),
    ("fsdp_config.fsdp_reshard_after_forward", With(reshard)),
    (
        "fsdp_config.fsdp_offload_params",
        Unless(&["false"], "the weights are needed on the device at all times"),
    ),
    ("fsdp_config.fsdp_activation_checkpointing", With(recompute)),
    ("fsdp_config.fsdp_state_dict_type", Ignored("checkpoints are shards")),
    ("fsdp_config.*", Ignored(BLOCKS)),
    ("megatron_lm_config.*", Rule::Refused("layers are not split")),
    ("parallelism_config.*", Rule::Refused("layers and sequences are not split")),
    ("fp8_config.*", Rule::Refused("there is no fp8")),
];

fn devices(value: &Value, import: &mut Import) -> Became {
    match value.as_str() {
        Some("all") => Became::NoEffect("`devices` says how many".into()),
        Some(list) => {
            let ordinals: Result<Vec<u64>, _> = list.split(',').map(|it| it.trim().parse()).collect();
            match ordinals {
                Ok(ordinals) => {
                    import.set("devices", ordinals);
                    Became::Mapped("devices".into())
                }
                Err(_) => Became::Refused("it is no list of ordinals".into()),
            }
        }
        None => Became::Refused("it is no list of ordinals".into()),
    }
}

fn use_cpu(value: &Value, import: &mut Import) -> Became {
    if value::boolean(value) != Some(true) {
        return Became::NoEffect("`backend` says where".into());
    }
    import.set("backend", "cpu");
    Became::Mapped("backend".into())
}

/// `no` is what YAML 1.1 reads as false.
fn precision(value: &Value, import: &mut Import) -> Became {
    let ours = match value.as_str() {
        Some("no") => "fp32",
        Some("bf16") => "bf16",
        Some("fp16") => "fp16",
        None if *value == Value::Bool(false) => "fp32",
        _ => return Became::Refused("there is only fp32, bf16 and fp16".into()),
    };
    import.set("strategy.precision", ours);
    Became::Mapped("strategy.precision".into())
}

fn sharding(value: &Value, import: &mut Import) -> Became {
    let name = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let stage = match name.as_str() {
        "FULL_SHARD" | "1" => 3,
        "SHARD_GRAD_OP" | "2" => 2,
        "NO_SHARD" | "3" => 0,
        _ => return Became::Refused("shards are over all ranks".into()),
    };
    import.set("strategy.zero_stage", stage);
    Became::Mapped("strategy.zero_stage".into())
}

/// FSDP2's word for the stage; FSDP1 has the same in its sharding strategy.
fn reshard(value: &Value, import: &mut Import) -> Became {
    match value {
        Value::Bool(reshard) => {
            import.set("strategy.zero_stage", if *reshard { 3 } else { 2 });
            Became::Mapped("strategy.zero_stage".into())
        }
        _ => sharding(value, import),
    }
}

fn recompute(value: &Value, import: &mut Import) -> Became {
    let on = value::boolean(value) == Some(true);
    import.set("strategy.recompute", if on { "full" } else { "none" });
    Became::Mapped("strategy.recompute".into())
}

fn whole(keys: &Keys, import: &mut Import) {
    let kind = keys.get("distributed_type").and_then(Value::as_str).unwrap_or("NO");
    let became = match kind {
        "DEEPSPEED" | "FSDP" => Became::Mapped("strategy.zero_stage".into()),
        "NO" | "MULTI_GPU" | "MULTI_CPU" | "MULTI_NPU" => {
            import.set("strategy.zero_stage", 0);
            Became::Mapped("strategy.zero_stage".into())
        }
        _ => Became::Refused("ranks share the work by ZeRO's stages".into()),
    };
    import.note(keys, "distributed_type", became);
    let hosts = keys.number("num_machines").unwrap_or(1.0);
    let became = match hosts > 1.0 {
        true => Became::Changed("devices".into(), HOSTS.into()),
        false => Became::NoEffect("one host".into()),
    };
    import.note(keys, "num_machines", became);
    if let Some(ranks) = keys.number("num_processes") {
        if !import.settings.contains_key("devices") {
            import.set("devices", value::whole(ranks / hosts));
        }
        import.note(keys, "num_processes", Became::Mapped("devices".into()));
    }
    deepspeed::SOURCE.take_over_below("deepspeed_config.deepspeed_config_file", keys, import);
}
