//! DeepSpeed's JSON: stage, offload, precision, batch sizes, optimizer and schedule.

use serde_json::Value;

use super::{Became, Import, Keys, Rule, Source, value};
use Rule::{Ignored, Refused, Same, Together, Unless, With};

pub(super) const SOURCE: Source = Source { rules: RULES, whole };

const BLOCKS: &str = "weights are gathered and gradients reduced block by block, beside the computation";
const FOLLOWS: &str = "it follows from prompts_per_step, group_size, mini_batches and the ranks";
const LOGGING: &str = "metrics, times and memory are always recorded";
const SCALE: &str = "there is no loss scale in fp32 and bf16";

const RULES: &[(&str, Rule)] = &[
    ("train_batch_size", Ignored(FOLLOWS)),
    ("train_micro_batch_size_per_gpu", Same("strategy.micro_batch_size")),
    ("train_micro_batch_size_per_device", Same("strategy.micro_batch_size")),
    ("gradient_accumulation_steps", Ignored(FOLLOWS)),
    ("gradient_clipping", Same("pipeline.rlvr.optimizer.max_grad_norm")),
    ("zero_optimization", With(old_stage)),
    ("zero_optimization.stage", Same("strategy.zero_stage")),
    ("zero_optimization.offload_optimizer.device", With(offload_optimizer)),
    ("zero_optimization.offload_optimizer.*", Ignored("host memory is pinned, and allocated once")),
    ("zero_optimization.cpu_offload", With(old_offload)),
    ("zero_optimization.offload_param.device", With(offload_param)),
    ("zero_optimization.offload_param.*", Ignored("host memory is pinned, and allocated once")),
    ("zero_optimization.cpu_offload_params", Unless(&["false"], PARAMS)),
    (
        "zero_optimization.zero_hpz_partition_size",
        Unless(&["1"], "there is no second partition of the weights"),
    ),
    ("zero_optimization.zero_quantized_weights", Unless(&["false"], "weights travel in their own precision")),
    (
        "zero_optimization.zero_quantized_nontrainable_weights",
        Unless(&["false"], "weights travel in their own precision"),
    ),
    ("zero_optimization.zero_quantized_gradients", Unless(&["false"], "gradients are summed in fp32")),
    ("zero_optimization.mics_shard_size", Unless(&["-1"], "shards are over all ranks")),
    (
        "zero_optimization.elastic_checkpoint",
        Ignored("every checkpoint can be loaded by another number of ranks"),
    ),
    ("zero_optimization.stage3_gather_16bit_weights_on_model_save", Ignored("checkpoints are shards")),
    ("zero_optimization.stage3_gather_fp16_weights_on_model_save", Ignored("checkpoints are shards")),
    ("zero_optimization.ignore_unused_parameters", Ignored("no parameter is unused")),
    ("zero_optimization.*", Ignored(BLOCKS)),
    ("zero_allow_untested_optimizer", Ignored("the optimizer is AdamW")),
    ("zero_force_ds_cpu_optimizer", Ignored("the optimizer is AdamW")),
    ("bf16.enabled", Together),
    ("bfloat16.enabled", Together),
    ("bf16.*", Ignored("sums of gradients are fp32")),
    ("fp16.enabled", Together),
    ("fp16.*", Ignored(SCALE)),
    ("amp.enabled", Unless(&["false"], "there is no automatic precision")),
    ("amp.*", Ignored("there is no automatic precision")),
    ("optimizer.type", With(optimizer)),
    ("optimizer.params.lr", Same("pipeline.rlvr.optimizer.adamw.learning_rate")),
    ("optimizer.params.betas", Same("pipeline.rlvr.optimizer.adamw.betas")),
    ("optimizer.params.eps", Same("pipeline.rlvr.optimizer.adamw.eps")),
    ("optimizer.params.weight_decay", Same("pipeline.rlvr.optimizer.adamw.weight_decay")),
    ("optimizer.params.torch_adam", Ignored("there is one AdamW")),
    ("optimizer.params.adam_w_mode", Unless(&["true"], "weight decay is decoupled")),
    ("scheduler.type", Together),
    ("scheduler.params.warmup_num_steps", Together),
    ("scheduler.params.total_num_steps", Ignored("the schedule ends with the run")),
    ("scheduler.params.warmup_max_lr", Ignored("the peak is the optimizer's learning rate")),
    ("scheduler.params.warmup_min_lr", Unless(&["0", "0.0"], "the warm-up starts from 0")),
    ("scheduler.params.warmup_type", Unless(&["\"linear\""], "the warm-up is a straight line")),
    ("scheduler.params.cos_min_ratio", Together),
    ("scheduler.params.warmup_min_ratio", Unless(&["0", "0.0"], "the warm-up starts from 0")),
    ("gradient_predivide_factor", Unless(&["1", "1.0"], "gradients are summed in fp32")),
    ("prescale_gradients", Unless(&["false"], "gradients are summed in fp32")),
    ("communication_data_type", Ignored("gradients are reduced in fp32")),
    ("data_types.grad_accum_dtype", Unless(&["\"fp32\""], "gradients are summed in fp32")),
    ("seq_parallel_communication_data_type", Ignored("sequences are not split")),
    ("sparse_gradients", Unless(&["false"], "gradients are dense")),
    (
        "activation_checkpointing.*",
        Ignored("`strategy.recompute: full` runs blocks again in backward; nothing there is a file's choice"),
    ),
    ("steps_per_print", Ignored(LOGGING)),
    ("wall_clock_breakdown", Ignored(LOGGING)),
    ("memory_breakdown", Ignored(LOGGING)),
    ("dump_state", Ignored(LOGGING)),
    ("flops_profiler.*", Ignored(LOGGING)),
    ("comms_logger.*", Ignored(LOGGING)),
    ("tensorboard.*", Ignored(LOGGING)),
    ("wandb.*", Ignored(LOGGING)),
    ("csv_monitor.*", Ignored(LOGGING)),
    ("checkpoint.*", Ignored("every checkpoint can be loaded by another number of ranks")),
    ("aio.*", Ignored("nothing goes to a disk while training")),
    ("compile.*", Ignored("blocks have kernels of their own")),
    ("tensor_parallel.autotp_size", Unless(&["0", "1"], "layers are not split")),
    ("sparse_attention.*", Refused("attention is whole")),
    ("pipeline.*", Refused("layers are not spread over ranks")),
    ("elasticity.enabled", Unless(&["false"], "the number of ranks is fixed")),
    ("elasticity.*", Ignored("the number of ranks is fixed")),
];

const PARAMS: &str = "the weights are needed on the device at all times";

fn old_stage(value: &Value, import: &mut Import) -> Became {
    // Before stages had numbers.
    let stage = u64::from(value::boolean(value) == Some(true));
    import.set("strategy.zero_stage", stage);
    Became::Changed("strategy.zero_stage".into(), format!("the old form; stage {stage}"))
}

/// DeepSpeed's device for optimizer states, and what is the nearest here.
pub(super) fn offload_optimizer(value: &Value, import: &mut Import) -> Became {
    let field = "strategy.offload.optimizer";
    match value.as_str() {
        Some("none") => {
            import.set(field, "none");
            Became::Mapped(field.into())
        }
        Some("cpu") => {
            import.set(field, "between_steps");
            let why = "states are in host memory between steps; the step itself is on the device, and much faster there";
            Became::Changed(field.into(), why.into())
        }
        _ => Became::Refused("states go to host memory, not to a disk".into()),
    }
}

fn old_offload(value: &Value, import: &mut Import) -> Became {
    let device = if value::boolean(value) == Some(true) { "cpu" } else { "none" };
    offload_optimizer(&device.into(), import)
}

pub(super) fn offload_param(value: &Value, _: &mut Import) -> Became {
    match value.as_str() {
        Some("none") => Became::NoEffect("it is off".into()),
        _ => Became::Refused(PARAMS.into()),
    }
}

fn optimizer(value: &Value, _: &mut Import) -> Became {
    match value.as_str() {
        Some("AdamW" | "Adam") => Became::Mapped("pipeline.rlvr.optimizer.adamw".into()),
        _ => Became::Refused("the optimizer is AdamW".into()),
    }
}

fn whole(keys: &Keys, import: &mut Import) {
    let (half, brain) =
        (keys.is_on("fp16.enabled"), keys.is_on("bf16.enabled") || keys.is_on("bfloat16.enabled"));
    for key in ["bf16.enabled", "bfloat16.enabled", "fp16.enabled"] {
        let became = match keys.get(key) {
            None => Became::NoEffect("it is decided elsewhere".into()),
            Some(_) if keys.is_on(key) => Became::Mapped("strategy.precision".into()),
            Some(_) => Became::NoEffect("it is off".into()),
        };
        import.note(keys, key, became);
    }
    if half || brain {
        import.set("strategy.precision", if half { "fp16" } else { "bf16" });
    } else if ["bf16.enabled", "bfloat16.enabled", "fp16.enabled"].iter().any(|key| keys.get(key).is_some()) {
        import.set("strategy.precision", "fp32");
    }
    schedule(keys, import);
}

fn schedule(keys: &Keys, import: &mut Import) {
    let Some(kind) = keys.get("scheduler.type").and_then(Value::as_str) else { return };
    let kind = match kind {
        "WarmupLR" => "constant",
        "WarmupDecayLR" => "linear",
        "WarmupCosineLR" => "cosine",
        other => {
            let why = format!("there is no `{other}`; the nearest are constant, linear and cosine");
            import.note(keys, "scheduler.type", Became::Refused(why));
            return;
        }
    };
    let field = format!("pipeline.rlvr.optimizer.schedule.{kind}");
    import.note(keys, "scheduler.type", Became::Mapped(field.clone()));
    import.set(&field, serde_json::json!({}));
    for (key, name) in [
        ("scheduler.params.warmup_num_steps", "warmup_steps"),
        ("scheduler.params.cos_min_ratio", "final_ratio"),
    ] {
        let Some(number) = keys.number(key) else {
            import.note(keys, key, Became::NoEffect("it is decided elsewhere".into()));
            continue;
        };
        let field = format!("{field}.{name}");
        import.set(&field, value::whole(number));
        import.note(keys, key, Became::Mapped(field));
    }
}
