//! Importer of DeepSpeed's JSON, alone or inside another config. Older key names are supported.

use serde_json::json;

use super::{ledger::Ledger, rules, values};

const OWN_LAYOUT: &str = "one flat layout serves every stage; its buckets and overlap need no tuning";
pub(super) const UNSPLIT: &str = "sequences are not split over ranks, so they need no communication";
const BY_LAUNCHER: &str = "set by the launcher of the ranks";
const SHOWN_ANYWAY: &str = "metrics and times are always written to the run folder";

const IDLE: [(&str, &str); 45] = [
    ("zero_optimization.gather_16bit_weights_on_model_save", "`anyroll export` gathers at any stage"),
    ("zero_optimization.gather_fp16_weights_on_model_save", "`anyroll export` gathers at any stage"),
    ("zero_optimization.overlap_comm", OWN_LAYOUT),
    ("zero_optimization.contiguous_gradients", OWN_LAYOUT),
    ("zero_optimization.reduce_scatter", OWN_LAYOUT),
    ("zero_optimization.reduce_bucket_size", OWN_LAYOUT),
    ("zero_optimization.allgather_partitions", OWN_LAYOUT),
    ("zero_optimization.allgather_bucket_size", OWN_LAYOUT),
    ("zero_optimization.round_robin_gradients", OWN_LAYOUT),
    ("zero_optimization.sub_group_size", OWN_LAYOUT),
    ("zero_optimization.stage3_max_live_parameters", OWN_LAYOUT),
    ("zero_optimization.stage3_max_reuse_distance", OWN_LAYOUT),
    ("zero_optimization.stage3_prefetch_bucket_size", OWN_LAYOUT),
    ("zero_optimization.stage3_param_persistence_threshold", OWN_LAYOUT),
    ("zero_optimization.stage3_gather_16bit_weights_on_model_save", "`anyroll export` gathers at any stage"),
    ("zero_optimization.stage3_gather_fp16_weights_on_model_save", "`anyroll export` gathers at any stage"),
    ("zero_optimization.ignore_unused_parameters", "every parameter has a gradient"),
    ("zero_optimization.load_from_fp32_weights", "checkpoints hold the fp32 master"),
    ("zero_optimization.cpu_offload_use_pin_memory", "host memory is always pinned"),
    ("zero_optimization.elastic_checkpoint", "checkpoints load at any number of ranks"),
    ("zero_allow_untested_optimizer", "there is only one optimizer"),
    ("zero_force_ds_cpu_optimizer", "there is only one optimizer"),
    ("prescale_gradients", "sums are computed in fp32, so they need no scaling"),
    ("gradient_predivide_factor", "sums are computed in fp32, so they need no scaling"),
    ("activation_checkpointing.*", "`strategy.recompute` turns it on; this section only tunes it"),
    ("steps_per_print", SHOWN_ANYWAY),
    ("wall_clock_breakdown", SHOWN_ANYWAY),
    ("dump_state", SHOWN_ANYWAY),
    ("tensorboard.*", SHOWN_ANYWAY),
    ("csv_monitor.*", SHOWN_ANYWAY),
    ("comms_logger.*", SHOWN_ANYWAY),
    ("flops_profiler.*", SHOWN_ANYWAY),
    ("aio.*", "nothing is offloaded to disks"),
    ("zero_optimization.use_multi_rank_bucket_allreduce", OWN_LAYOUT),
    ("zero_optimization.legacy_stage1", OWN_LAYOUT),
    ("zero_optimization.memory_efficient_linear", OWN_LAYOUT),
    ("zero_optimization.stage3_module_granularity_threshold", OWN_LAYOUT),
    ("zero_optimization.stage3_use_all_reduce_for_fetch_params", OWN_LAYOUT),
    ("zero_optimization.pipeline_loading_checkpoint", "checkpoints load at any number of ranks"),
    ("zero_optimization.log_trace_cache_warnings", SHOWN_ANYWAY),
    ("memory_breakdown", SHOWN_ANYWAY),
    ("disable_allgather", OWN_LAYOUT),
    ("load_universal_checkpoint", "checkpoints load at any number of ranks"),
    ("use_node_local_storage", "checkpoints are in the run folder"),
    ("checkpoint.*", "checkpoints are in the run folder"),
];

const REFUSED: [(&str, &str); 31] = [
    ("zero_optimization.zero_hpz_partition_size", "ZeRO++ is not supported"),
    ("zero_optimization.zero_quantized_weights", "ZeRO++ is not supported"),
    ("zero_optimization.zero_quantized_gradients", "ZeRO++ is not supported"),
    ("zero_optimization.mics_shard_size", "MiCS is not supported"),
    ("sparse_attention.*", "attention is dense"),
    ("curriculum_learning.*", "curricula are not supported; order the data instead"),
    ("data_efficiency.*", "curricula are not supported; order the data instead"),
    ("compression_training.*", "weights are not compressed"),
    ("hybrid_engine.*", "training and generation share one engine already"),
    ("tensor_parallel.*", "the cut of a layer is that of its family: set `strategy.tensor_parallel`"),
    ("pipeline.*", "layers are not staged over ranks; zero_stage 3 shards their weights"),
    ("amp.*", "apex is not supported; use bf16"),
    ("elasticity.*", "the number of ranks is fixed in a run"),
    ("quantize_training.*", "weights are not quantised"),
    ("wandb.*", "TensorBoard events and metrics.jsonl are written instead"),
    ("monitor_config*", "TensorBoard events and metrics.jsonl are written instead"),
    ("optimizer.params", "not a mapping of parameters"),
    ("scheduler.params", "not a mapping of parameters"),
    ("zero_optimization.zeropp_loco_param*", "ZeRO++ is not supported"),
    ("zero_optimization.leaf_module*", "a model is a list of blocks, each gathered separately"),
    ("zero_optimization.save_muon_momentum_buffer_in_memory", "the optimizer is AdamW"),
    ("zero_optimization.override_module_apply", "weights are created as shards"),
    ("torch_autocast*", "precision is set by `strategy.precision`"),
    ("compile*", "blocks are hand-written; nothing is compiled"),
    ("compression_training", "weights are not compressed"),
    ("progressive_layer_drop*", "all layers are trained"),
    ("eigenvalue*", "this analysis is not supported"),
    ("autotuning*", "`anyroll plan` shows what fits, and `zero_stage: auto` chooses it"),
    ("nebula*", "checkpoints are always written in the background, to the run folder"),
    ("sparse_gradients", "gradients are dense"),
    ("graph_harvesting", "training does not use captured graphs"),
];

/// Imports the keys below `prefix`, which is empty or ends in a dot, for the optimizer of `pipeline`.
pub(super) fn apply(ledger: &mut Ledger, prefix: &str, pipeline: &str) {
    let key = |name: &str| format!("{prefix}{name}");
    let field = |name: &str| format!("{pipeline}.optimizer.{name}");
    stage(ledger, &key);
    precision(ledger, &key);
    batches(ledger, &key, &field);
    scheduler_defaults(ledger, &key);
    optimizer(ledger, &key, &field);
    schedule(ledger, &key, &field);
    let with_prefix = |table: &[(&str, &'static str)]| -> Vec<(String, &'static str)> {
        table.iter().map(|(name, why)| (key(name), *why)).collect()
    };
    for (name, why) in with_prefix(&IDLE) {
        ledger.idle_all(&[(&name, why)]);
    }
    off(ledger, prefix);
    for (name, why) in with_prefix(&REFUSED) {
        ledger.refuse_all(&[(&name, why)]);
    }
}

/// Ignores sections with `enabled: false`, and sizes that mean off.
fn off(ledger: &mut Ledger, prefix: &str) {
    let sections: Vec<String> = ledger
        .keys()
        .filter(|key| key.starts_with(prefix) && ledger.truth(key) == Some(false))
        .filter_map(|key| key.strip_suffix(".enabled").map(|section| format!("{section}.*")))
        .collect();
    for section in sections {
        ledger.idle_all(&[(&section, "off")]);
    }
    let secondary = format!("{prefix}zero_optimization.zero_hpz_partition_size");
    if ledger.number(&secondary) == Some(1.0) {
        ledger.idle(&secondary, "off");
    }
    rules::shard_group(ledger, &format!("{prefix}zero_optimization.mics_shard_size"));
    rules::ranks_of_a_layer(ledger, &format!("{prefix}tensor_parallel.autotp_size"));
    let experts = |name: &str| format!("{prefix}expert_parallel.{name}");
    if ledger.truth(&experts("enabled")) == Some(true) {
        rules::ranks_of_experts(ledger, &experts("autoep_size"));
        ledger.idle_all(&[(&experts("*"), "experts follow from the model's config")]);
    }
    let unsplit = format!("{prefix}seq_parallel_communication_data_type");
    ledger.idle_all(&[(&unsplit, UNSPLIT)]);
}

fn stage(ledger: &mut Ledger, key: &dyn Fn(&str) -> String) {
    let stage_key = key("zero_optimization.stage");
    let stage = ledger.whole(&stage_key);
    match stage {
        Some(stage @ 0..=3) => ledger.map(&stage_key, "strategy.zero_stage", stage),
        _ if ledger.peek(&stage_key).is_some() => ledger.refuse(&stage_key, "stages are 0, 1, 2 and 3"),
        _ => {}
    }
    let [states, parameters] =
        ["optimizer", "param"].map(|of| key(&format!("zero_optimization.offload_{of}")));
    for section in [&states, &parameters] {
        let device = format!("{section}.device");
        match section == &states {
            true => offloaded_states(ledger, &device),
            false => offloaded_parameters(ledger, &device, stage.unwrap_or(0)),
        }
        ledger.idle_all(&[(
            &format!("{section}.*"),
            "host memory is always pinned, and copies always overlap",
        )]);
        ledger.refuse_all(&[(section, "not a mapping with a device")]);
    }
    ledger.switch(&key("zero_optimization.cpu_offload"), "strategy.offload.optimizer", "cpu_step");
    ledger.switch(&key("zero_optimization.cpu_offload_params"), "strategy.offload.params", "cpu");
}

/// Device of the optimizer states.
pub(super) fn offloaded_states(ledger: &mut Ledger, key: &str) {
    match ledger.text(key).as_deref() {
        None => {}
        Some("cpu") => ledger.map(key, "strategy.offload.optimizer", "cpu_step"),
        Some("none" | "null") => ledger.idle(key, "off"),
        Some(_) => ledger.refuse(key, "states are on the device or on the host; use cpu"),
    }
}

/// Device of the parameters, which DeepSpeed offloads at stage 3 only.
pub(super) fn offloaded_parameters(ledger: &mut Ledger, key: &str, stage: u64) {
    match ledger.text(key).as_deref() {
        None => {}
        Some("none" | "null") => ledger.idle(key, "off"),
        Some("cpu") if stage < 3 => ledger.idle(key, "DeepSpeed offloads parameters at stage 3 only"),
        Some("cpu") => ledger.map(key, "strategy.offload.params", "cpu"),
        Some(_) => ledger.refuse(key, "weights are on the device or on the host; use cpu"),
    }
}

fn precision(ledger: &mut Ledger, key: &dyn Fn(&str) -> String) {
    for (name, value) in [("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")] {
        let enabled = key(&format!("{name}.enabled"));
        match (ledger.truth(&enabled), ledger.peek(&enabled).is_some()) {
            (Some(true), _) => ledger.map(&enabled, "strategy.precision", value),
            (Some(false), _) => ledger.idle(&enabled, "off"),
            (None, true) => ledger.idle(&enabled, "left to `strategy.precision`"),
            (None, false) => {}
        }
    }
    loss_scale(ledger, key);
    ledger.idle_all(&[
        (&key("fp16.auto_cast"), "inputs are tokens"),
        (&key("fp16.opt_level"), "DeepSpeed does not read it"),
        (&key("fp16.fp16_scale_tolerance"), "DeepSpeed does not read it"),
        (&key("fp16.hysteresis"), "every overflow halves the scale"),
        (&key("fp16.min_loss_scale"), "the scale falls no lower than 1"),
        (&key("bf16.immediate_grad_update"), "gradients accumulate in fp32"),
        (&key("bf16.check_grad_overflow"), "bf16 does not overflow where fp32 does not"),
    ]);
    ledger.fold_all(&[
        (&key("fp16.consecutive_hysteresis"), "every overflow halves the scale"),
        (&key("fp16.fp16_master_weights_and_grads"), "the master weights are fp32"),
        (&key("fp16.fp16_master_weights_and_gradients"), "the master weights are fp32"),
        (&key("bf16.bf16_master_weights_and_grads"), "the master weights are fp32"),
        (&key("bf16.bf16_optimizer_states"), "optimizer states are fp32"),
    ]);
    let accumulation = key("data_types.grad_accum_dtype");
    match ledger.text(&accumulation).as_deref() {
        Some("fp32") => ledger.idle(&accumulation, "gradients accumulate in fp32"),
        Some(_) => ledger.fold(&accumulation, "gradients accumulate in fp32"),
        None => {}
    }
    let wire = key("communication_data_type");
    if ledger.peek(&wire).is_some() {
        ledger.fold(&wire, "gradients are summed in fp32, in the order of the ranks");
    }
}

/// DeepSpeed's dynamic loss scale: the power of two that it starts with, and the steps until it doubles.
fn loss_scale(ledger: &mut Ledger, key: &dyn Fn(&str) -> String) {
    let is_on = ledger.draft("strategy.precision").is_some_and(|precision| precision == "fp16");
    let [fixed, power, window] =
        ["loss_scale", "initial_scale_power", "loss_scale_window"].map(|name| key(&format!("fp16.{name}")));
    match ledger.number(&fixed) {
        Some(0.0) => ledger.idle(&fixed, "0 means dynamic scaling, the default here"),
        Some(_) if !is_on => ledger.idle(&fixed, "fp16 is off"),
        Some(_) => ledger.refuse(&fixed, "the scale is dynamic"),
        None => {}
    }
    if !is_on {
        return ledger.idle_all(&[(&power, "fp16 is off"), (&window, "fp16 is off")]);
    }
    let start = ledger.whole(&power).filter(|power| *power <= 24);
    let steps = ledger.whole(&window).filter(|steps| *steps > 0);
    for (given, key) in [(start, &power), (steps, &window)] {
        match (ledger.peek(key), given) {
            (Some(value), None) if values::is_unset(value) => ledger.idle(key, "left to its default"),
            (Some(_), None) => ledger.refuse(key, "the scale is 1 to 2^24, its window 1 step or more"),
            _ => {}
        }
    }
    if start.is_none() && steps.is_none() {
        return;
    }
    let (scale, interval) = (1_u64 << start.unwrap_or(16), steps.unwrap_or(1000));
    let precision = json!({"fp16": {"initial_scale": scale, "growth_interval": interval}});
    for (given, key) in [(start, &power), (steps, &window)] {
        if given.is_some() {
            ledger.replace(key, "strategy.precision", precision.clone());
        }
    }
}

fn batches(ledger: &mut Ledger, key: &dyn Fn(&str) -> String, field: &dyn Fn(&str) -> String) {
    ledger.copy_number(&key("train_micro_batch_size_per_gpu"), "strategy.micro_batch_size");
    ledger.copy_number(&key("gradient_clipping"), &field("max_grad_norm"));
    ledger.idle_all(&[
        (&key("train_batch_size"), "prompts_per_step, group_size and mini_batches decide it"),
        (&key("gradient_accumulation_steps"), "computed from the batch sizes"),
    ]);
}

fn optimizer(ledger: &mut Ledger, key: &dyn Fn(&str) -> String, field: &dyn Fn(&str) -> String) {
    let kind = key("optimizer.type");
    match ledger.text(&kind).map(|kind| kind.to_ascii_lowercase()).as_deref() {
        Some("adamw" | "adam" | "fusedadam" | "cpuadam") => {
            let decoupled = ledger.truth(&key("optimizer.params.adam_w_mode")) != Some(false);
            match decoupled {
                true => ledger.idle(&kind, "AdamW is the optimizer"),
                false => ledger.refuse(&kind, "weight decay is decoupled from the gradient, as in AdamW"),
            }
        }
        Some(_) => ledger.refuse(&kind, "the optimizer is AdamW"),
        None => {}
    }
    let params = |name: &str| key(&format!("optimizer.params.{name}"));
    learning_rate(
        ledger,
        [&params("lr"), &key("scheduler.params.warmup_max_lr")],
        &field("adamw.learning_rate"),
    );
    for name in ["eps", "weight_decay"] {
        ledger.copy_number(&params(name), &field(&format!("adamw.{name}")));
    }
    let betas = params("betas");
    rules::betas(ledger, &betas, &field("adamw.betas"));
    ledger.idle_all(&[
        (&params("torch_adam"), "AdamW is the optimizer"),
        (&params("adam_w_mode"), "AdamW is the optimizer"),
    ]);
    let correction = params("bias_correction");
    match ledger.truth(&correction) {
        Some(true) => ledger.idle(&correction, "AdamW corrects the bias of its averages"),
        _ => ledger.refuse_all(&[(&correction, "AdamW corrects the bias of its averages")]),
    }
}

/// The optimizer's rate, unless the scheduler has a peak, which then sets the rate of every step.
fn learning_rate(ledger: &mut Ledger, [own, peak]: [&str; 2], field: &str) {
    if ledger.number(peak).is_some() && ledger.number(own).is_some() {
        ledger.idle(own, "the scheduler's warmup_max_lr takes precedence in DeepSpeed as well");
    }
    ledger.copy_number(own, field);
    ledger.copy_number(peak, field);
}

/// Applies DeepSpeed's defaults for missing scheduler parameters.
fn scheduler_defaults(ledger: &mut Ledger, key: &dyn Fn(&str) -> String) {
    let own = match ledger.text(&key("scheduler.type")).as_deref() {
        Some("WarmupLR" | "WarmupDecayLR") => ("warmup_max_lr", json!(1e-3)),
        Some("WarmupCosineLR") => ("cos_min_ratio", json!(1e-4)),
        _ => return,
    };
    for (name, value) in [own, ("warmup_num_steps", json!(1000)), ("warmup_type", json!("log"))] {
        ledger.assume(&[(&key(&format!("scheduler.params.{name}")), value)]);
    }
}

fn schedule(ledger: &mut Ledger, key: &dyn Fn(&str) -> String, field: &dyn Fn(&str) -> String) {
    let kind_key = key("scheduler.type");
    let Some(kind) = ledger.text(&kind_key) else { return };
    let ours = match kind.as_str() {
        "WarmupLR" => "constant",
        "WarmupDecayLR" => "linear",
        "WarmupCosineLR" => "cosine",
        _ => {
            return ledger.refuse(&kind_key, "must be constant, linear or cosine, with a warm-up");
        }
    };
    let params = |name: &str| key(&format!("scheduler.params.{name}"));
    let steps_field = field(&format!("schedule.{ours}.warmup_steps"));
    let warmup = params("warmup_num_steps");
    match (ledger.whole(&warmup), ledger.peek(&warmup).is_some_and(values::is_unset)) {
        (None, true) => {
            let why = "`auto` leaves the warm-up to the trainer, but here it must be set: write a number";
            ledger.change(&kind_key, &steps_field, 0, why);
        }
        (steps, _) => ledger.map(&kind_key, &steps_field, steps.unwrap_or(0)),
    }
    ledger.copy_number(&warmup, &steps_field);
    if ours == "cosine" {
        ledger.copy_number(&params("cos_min_ratio"), &field("schedule.cosine.final_ratio"));
    }
    for start in ["warmup_min_lr", "warmup_min_ratio"].map(params) {
        match ledger.number(&start) {
            Some(rate) if rate != 0.0 => ledger.fold(&start, "the warm-up starts at 0"),
            _ => ledger.idle_all(&[(&start, "the warm-up starts at 0")]),
        }
    }
    let shape = params("warmup_type");
    match ledger.text(&shape).as_deref() {
        Some("linear") | None => ledger.idle_all(&[(&shape, "the warm-up is linear")]),
        Some(_) => ledger.fold(&shape, "the warm-up is linear"),
    }
    ledger.idle_all(&[
        (&params("total_num_steps"), "the schedule ends with the run"),
        (&params("last_batch_iteration"), BY_LAUNCHER),
    ]);
}
